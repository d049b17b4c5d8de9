"""`python -m archlab.study NAME_OR_FILE [key=value ...] [--dry-run]`: a comparison that can be believed.

A study tunes the learning rate of each variant on the validation split with seeds of its own, runs all variants on the
same seeds and batches, at a matched size where its file asks for that, and ends in a report: statements that hold or do
not, with intervals. Running it again does only what is missing; a kill loses at most the steps since a checkpoint.

NAME is one of `conf/study`; a FILE of yours ends in .yaml. Any key of it can be set, as in `seeds=[0,1,2]`.
--dry-run prints the cells, the size of each variant, and an estimate of the time.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from omegaconf import OmegaConf
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from archlab.errors import ArchlabError, guarded
from archlab.measure.units import human_count
from archlab.report import study as report
from archlab.study import launch, progress, timing
from archlab.study.analysis import Analysis
from archlab.study.cells import Cell, write_index
from archlab.study.estimate import seconds_of_step
from archlab.study.plan import Plan
from archlab.study.spec import load_spec

SPEC_FILE = "study.yaml"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    return guarded(lambda: _command(words))


def _command(words: list[str]) -> None:
    flags = {word for word in words if word.startswith("--")}
    names = [word for word in words if not word.startswith("-")]
    if not names or {"--help"} & flags or "-h" in words:
        print(__doc__)
        return
    spec, console = load_spec(names), Console()
    console.print(f"{spec.name}: {spec.says}", highlight=False, markup=False, soft_wrap=True)
    plan = Plan(spec)
    if "--dry-run" in flags:
        _dry_run(plan, console)
        return
    analysis = run_study(plan, console)
    files = report.write(analysis, Path(spec.dir))
    report.show(analysis, console)
    console.print(f"written: {', '.join(map(str, files))}", highlight=False, markup=False, soft_wrap=True)
    n_failed = sum(row.count("failed") for row in analysis.rows.values())
    n_missing = sum(record is None for row in analysis.rows.values() for record in row.records)
    if n_failed or n_missing:
        raise ArchlabError(
            f"{n_failed} cells failed and {n_missing} left no record: the table counts them, the result.json of each "
            f"in {spec.cells_dir} says why; the same command tries them again"
        )


def run_study(plan: Plan, console: Console) -> Analysis:
    """Tune, run, analyse. What is done already is not done again."""
    spec, folder = plan.spec, Path(plan.spec.dir)
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(asdict(spec)), folder / SPEC_FILE)
    known: dict[str, Cell] = {}

    def run(cells: Sequence[Cell]) -> None:
        known.update({cell.folder_name + cell.role + cell.task: cell for cell in cells})
        write_index(folder / progress.INDEX, list(known.values()))
        state = progress.Progress(progress.grouped(list(known.values())))
        launch.launch(cells, launcher=spec.launcher, n_jobs=spec.n_jobs, console=console, progress=state)

    plan.tune(run)
    tests = {key: plan.test_cells(*key) for key in plan.contests()}
    run([cell for cells in tests.values() for cell in cells])
    if spec.timing:
        trained = [cell for cells in tests.values() if (cell := _first_good(cells)) is not None]
        timing.time_all(folder, trained, spec.timing, console)
    return Analysis(plan, tests)


def _first_good(cells: Sequence[Cell]) -> Cell | None:
    return next((c for c in cells if (record := c.record) is not None and record["status"] == "ok"), None)


def _dry_run(plan: Plan, console: Console) -> None:
    """The cells, the size of each variant, and how long they take at the speed of a few steps here and now."""
    spec = plan.spec
    table = Table(box=SIMPLE_HEAD)
    for i, name in enumerate(("task", "variant", "params", "changed", "cells", "minutes")):
        table.add_column(name, justify="left" if i in (0, 1, 3) else "right")
    total, began = 0.0, time.perf_counter()
    n_rates = len(spec.tune.lrs) * len(spec.tune.seeds) if spec.tune else 0
    n_cells = n_rates + len(spec.seeds)
    for task, variant in plan.contests():
        cfg = plan.factory.configuration(plan.words(task, variant))
        seconds = n_cells * cfg.train.steps * seconds_of_step(cfg)
        total += seconds
        size = human_count(plan.counts(task, variant)["params"])
        table.add_row(task, variant, size, " ".join(plan.matches[task, variant]), str(n_cells), f"{seconds / 60:.1f}")
    console.print(table)
    side_by_side = spec.n_jobs if spec.launcher == "joblib" else 1
    n_total, minutes = n_cells * len(plan.contests()), total / side_by_side / 60
    console.print(
        f"{n_total} cells, at most {minutes:.0f} minutes, {side_by_side} at once, if every step is made (a solved task "
        f"ends before); measured in {time.perf_counter() - began:.0f} s",
        highlight=False,
        soft_wrap=True,
    )
