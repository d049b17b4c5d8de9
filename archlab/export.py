"""`python -m archlab.export`: see archlab/cli/export.py, or type --help."""

import sys

from archlab.cli.export import main

if __name__ == "__main__":
    sys.exit(main())
