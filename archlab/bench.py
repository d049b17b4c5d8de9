"""`python -m archlab.bench`: see archlab/cli/bench.py, or type --help."""

import sys

from archlab.cli.bench import main

if __name__ == "__main__":
    sys.exit(main())
