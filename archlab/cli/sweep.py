"""A sweep as a whole: its folder, and at its end one table and the name of every cell that failed."""

from collections.abc import Collection
from pathlib import Path

from rich.console import Console

from archlab.errors import UsageError
from archlab.report.comparison import read
from archlab.report.table import show
from archlab.run import record

MULTIRUN = "multirun.yaml"
"""Where Hydra keeps what the sweep was asked for."""


def claim(sweep_dir: Path, *, resume: bool | str) -> None:
    """Refuse a folder that holds a sweep, unless it is to go on. Errors: UsageError."""
    if (sweep_dir / MULTIRUN).exists() and not resume:
        raise UsageError(
            f"{sweep_dir} already holds a sweep: name another hydra.sweep.dir, or go on with it by train.resume=true"
        )


def summarise(sweep_dir: Path, cells: Collection[str]) -> int:
    """Print one table of the sweep and name every cell that did not end well; returns how many they are.

    `cells` are the folders that the sweep should have: one that was not reached, or whose process was killed, has no
    record.
    """
    console = Console()
    runs = read([sweep_dir]) if sweep_dir.exists() else []
    show(runs, console)
    begun = {path.parent for path in sweep_dir.rglob(record.CONFIG)}
    cut = sorted(begun - {run.path.parent for run in runs})
    lines = [f"ended without a record: {folder}" for folder in cut]
    unreached = {sweep_dir / cell for cell in cells} - begun
    if unreached:
        lines.append(f"not started: {len(unreached)} of {len(cells)} cells")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return sum(run.status != "ok" for run in runs) + len(cut) + len(unreached)
