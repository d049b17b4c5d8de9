"""`python -m archlab.generate`: see archlab/cli/generate.py, or type --help."""

import sys

from archlab.cli.generate import main

if __name__ == "__main__":
    sys.exit(main())
