"""`python -m archlab.study.calibrate`: coverage, false findings and power of the report's own statistics.

Thousands of made-up studies whose truth is known go through the code that a report uses. An interval of 95% should hold
the truth in 95% of them, and at most 5% of the studies without any difference should find one.
"""

import argparse
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import track
from rich.table import Table

from archlab.data.base import check_whole
from archlab.errors import guarded
from archlab.study.calibrate import EFFECTS, N_VARIANTS, SEED_COUNTS, SPREADS, Result, calibrate


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m archlab.study.calibrate", description=(__doc__ or "").partition("\n\n")[2]
    )
    parser.add_argument("--studies", type=int, default=1000, help="made-up studies of each kind (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the drawing (default %(default)s)")
    args = parser.parse_args(argv)
    return guarded(lambda: _calibrate(args.studies, args.seed))


def _calibrate(n_studies: int, seed: int) -> None:
    check_whole("studies", n_studies)
    check_whole("seed", seed, 0)
    console, n = Console(), len(SPREADS) * len(SEED_COUNTS) * len(EFFECTS)
    results = list(track(calibrate(n_studies, seed=seed), "drawing", total=n, console=console, transient=True))
    console.print(_table(results))
    console.print(
        f"{n_studies} studies of each kind, {N_VARIANTS} variants against a reference. An effect is one standard "
        "deviation of a variant's own spread; of two heaps, a share of 95% in place of 60% that solve it. There, "
        "coverage is that of the exact interval of the share, and variants are compared by shares.",
        highlight=False,
    )


def _table(results: Sequence[Result]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for i, name in enumerate(("spread", "seeds", "effect", "coverage", "false studies", "power", "by shares")):
        table.add_column(name, justify="right" if i else "left")
    for r in results:
        figures = (r.coverage, r.false_studies, r.power, r.by_shares)
        table.add_row(r.spread, str(r.n_seeds), f"{r.effect:g}", *("-" if f is None else f"{f:.1%}" for f in figures))
    return table
