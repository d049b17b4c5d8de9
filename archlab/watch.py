"""`python -m archlab.watch`: see archlab/cli/watch.py, or type --help."""

import sys

from archlab.cli.watch import main

if __name__ == "__main__":
    sys.exit(main())
