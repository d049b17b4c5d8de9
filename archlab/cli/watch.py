"""`python -m archlab.watch FOLDER`: how far a study is, from any terminal that sees its folder.

Only files are read, so it may run while cells run, on this machine or on others. --once prints the table and ends.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from archlab.errors import guarded
from archlab.study import progress

POLL_S = 2.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m archlab.watch", description=__doc__.partition("\n\n")[2])
    parser.add_argument("folder", type=Path, help="the study's folder, as runs/study/NAME")
    parser.add_argument("--once", action="store_true", help="print the table and end")
    args = parser.parse_args(argv)
    return guarded(lambda: _watch(args.folder, once=args.once))


def _watch(folder: Path, *, once: bool) -> None:
    console = Console()
    found = progress.read(folder)
    if once or not console.is_terminal:
        console.print(progress.table(found))
        return
    with Live(progress.table(found), console=console, auto_refresh=False) as live:
        while (counts := found.counts())["running"] + counts["waiting"]:
            time.sleep(POLL_S)
            began, before = found.began, found.done_before
            found = progress.read(folder)
            found.began, found.done_before = began, before
            live.update(progress.table(found), refresh=True)
