"""`python -m archlab.study.calibrate`: see archlab/cli/calibrate.py, or type --help."""

import sys

from archlab.cli.calibrate import main

if __name__ == "__main__":
    sys.exit(main())
