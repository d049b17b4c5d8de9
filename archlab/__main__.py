"""`python -m archlab`: see archlab/cli.py, or type --help."""

import sys

from archlab.cli import main

if __name__ == "__main__":
    sys.exit(main())
