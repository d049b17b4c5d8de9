"""`python -m archlab.report FOLDER... [--out DIR]`: the tables, the pictures and the page of any set of runs.

It reads their records and logs and nothing else. The seeds of one variant become one row; runs of different data never
stand in one table; a place in the ranking takes three seeds, and a paired difference that excludes none. Runs that did
not end well are counted and named.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from archlab.errors import UsageError, guarded
from archlab.report.comparison import CONTEXT, read
from archlab.report.files import write
from archlab.report.table import show
from archlab.run import record


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: see archlab/cli.py."""
    parser = argparse.ArgumentParser(prog="python -m archlab.report", description=__doc__.partition("\n\n")[2])
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="a run, a sweep, or any folder above")
    parser.add_argument("--out", type=Path, help="where the files go; default: report/ in the first folder")
    parser.add_argument(
        "--context", type=int, default=CONTEXT, help="tokens at which caches and latencies are compared"
    )
    args = parser.parse_args(argv)
    return guarded(lambda: _report(args.folders, args.out or args.folders[0] / "report", args.context))


def _report(folders: Sequence[Path], out: Path, context: int) -> None:
    runs = read(folders)
    if not runs:
        raise UsageError(f"no {record.RESULT} at or below {', '.join(map(str, folders))}: has a run ended there?")
    console = Console()
    show(runs, console, context)
    written = write(runs, out, context)
    console.print(f"written: {', '.join(map(str, written))}", highlight=False, markup=False, soft_wrap=True)
