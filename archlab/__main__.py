"""`python -m archlab`: see archlab/cli/main.py, or type --help."""

import sys

from archlab.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
