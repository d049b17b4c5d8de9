"""`python -m archlab.interop.hf`: see archlab/cli/interop.py, or type --help."""

import sys

from archlab.cli.interop import main

if __name__ == "__main__":
    sys.exit(main())
