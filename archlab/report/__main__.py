"""`python -m archlab.report`: see archlab/cli/report.py, or type --help."""

import sys

from archlab.cli.report import main

if __name__ == "__main__":
    sys.exit(main())
