"""`python -m archlab.study`: see archlab/cli/study.py, or type --help."""

import sys

from archlab.cli.study import main

if __name__ == "__main__":
    sys.exit(main())
