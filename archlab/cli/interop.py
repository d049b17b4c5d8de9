"""`python -m archlab.interop.hf import FOLDER RUN`: a checkpoint of Transformers becomes a run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from archlab.errors import guarded
from archlab.interop.import_run import import_run


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="archlab.interop.hf", description="Models of Transformers in archlab.")
    actions = parser.add_subparsers(required=True, metavar="import")
    reading = actions.add_parser("import", help="make a run's folder of a local checkpoint of Transformers")
    reading.add_argument("folder", type=Path, help="the checkpoint's folder")
    reading.add_argument("run", type=Path, help="the run's folder to make")
    args = parser.parse_args(argv)
    return guarded(lambda: print(import_run(args.folder, args.run)))
