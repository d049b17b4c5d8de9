"""`python -m archlab.evaluate`: see archlab/cli/evaluate.py, or type --help."""

import sys

from archlab.cli.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
