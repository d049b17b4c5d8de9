"""A sweep as a whole: its folder, and at its end one table and the name of every cell that failed."""

from pathlib import Path

from rich.console import Console

from archlab import record, report
from archlab.errors import UsageError

MULTIRUN = "multirun.yaml"
"""Where Hydra keeps what the sweep was asked for."""


def claim(sweep_dir: Path, *, resume: bool) -> None:
    """Refuse a folder that holds a sweep, unless it is to go on. Errors: UsageError."""
    if (sweep_dir / MULTIRUN).exists() and not resume:
        raise UsageError(
            f"{sweep_dir} already holds a sweep: name another hydra.sweep.dir, or go on with it by train.resume=true"
        )


def summarise(sweep_dir: Path, n_cells: int) -> int:
    """Print the table of all records below the folder and name every cell without a good one; returns their number.

    `n_cells` is how many the sweep has: a cell whose process was killed leaves no record.
    """
    if not sweep_dir.exists():
        return n_cells
    console = Console()
    records = report.read([sweep_dir])
    report.show(records, console)
    bad = [f"{r.status}: {r.name} ({r.path})" for r in records if r.status != "ok"]
    cut = [folder for folder in _begun(sweep_dir) if not (folder / record.RESULT).exists()]
    bad += [f"ended without a record: {folder}" for folder in cut]
    absent = n_cells - len(records) - len(cut)
    bad += [f"not started: {absent} of {n_cells} cells"] * (absent > 0)
    for line in bad:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return len(bad)


def _begun(sweep_dir: Path) -> list[Path]:
    return sorted(path.parent for path in sweep_dir.rglob(record.CONFIG))
