"""`python -m archlab.testing`: see archlab/cli/testing.py, or type --help."""

import sys

from archlab.cli.testing import main

if __name__ == "__main__":
    sys.exit(main())
