"""`python -m archlab.zoo`: see archlab/cli/zoo.py, or type --help."""

import sys

from archlab.cli.zoo import main

if __name__ == "__main__":
    sys.exit(main())
