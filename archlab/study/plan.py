"""From a study file to its cells: match, tune, compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from archlab.study.cells import Cell, Factory
from archlab.study.match import counts, matched
from archlab.study.spec import Spec
from archlab.study.tune import Point, best, beyond, point

Run = Callable[[Sequence[Cell]], None]
"""Runs the cells that are missing."""


@dataclass
class Plan:
    """The cells of a study, each variant of each task at the size that makes it fair."""

    spec: Spec

    def __post_init__(self):
        self.factory = Factory(Path(self.spec.cells_dir))
        self.tuned: dict[tuple[str, str], list[Point]] = {}

    @cached_property
    def matches(self) -> dict[tuple[str, str], list[str]]:
        """By (task, variant), the overrides that bring the matched count to the reference's."""
        spec = self.spec
        found: dict[tuple[str, str], list[str]] = {}
        for task in spec.tasks:
            wanted = counts(self.factory.configuration(self._words(task, spec.reference)))
            for variant in spec.variants_of(task):
                found[task, variant] = []
                if spec.match is not None and variant != spec.reference:
                    cfg = self.factory.configuration(self._words(task, variant))
                    found[task, variant] = matched(cfg, wanted[spec.match], spec.match, spec.match_by)
        return found

    def counts(self, task: str, variant: str) -> dict[str, float]:
        """All four counts of a variant, after matching."""
        return counts(self.factory.configuration(self.words(task, variant)))

    def words(self, task: str, variant: str) -> list[str]:
        """The overrides of a variant in a task, after matching."""
        return [*self._words(task, variant), *self.matches[task, variant]]

    def _words(self, task: str, variant: str) -> list[str]:
        words = [*self.spec.settings, *self.spec.tasks[task], *self.spec.variants[variant]]
        return list({word.partition("=")[0]: word for word in words}.values())  # of two values of a key, the later

    def contests(self) -> list[tuple[str, str]]:
        """Every (task, variant) that takes part."""
        return [(task, variant) for task in self.spec.tasks for variant in self.spec.variants_of(task)]

    def tuning_cells(self, task: str, variant: str, lrs: Sequence[float]) -> list[Cell]:
        tune = self.spec.tune
        assert tune is not None
        words = list(
            {w.partition("=")[0]: w for w in (*self.words(task, variant), *self.spec.tuning_settings)}.values()
        )
        return [self.factory.make(task, variant, "tune", seed, lr, words) for lr in lrs for seed in tune.seeds]

    def test_cells(self, task: str, variant: str) -> list[Cell]:
        """The runs that are compared, at the rate that was chosen. Needs `tune` to have run."""
        lr = best(self.tuned[task, variant]).lr if self.spec.tune else None
        words = self.words(task, variant)
        return [self.factory.make(task, variant, "test", seed, lr, words) for seed in self.spec.seeds_of(variant)]

    def first_cells(self) -> list[Cell]:
        """The cells that are known before anything ran: all rates of the grids, or without tuning, all runs."""
        tune = self.spec.tune
        if tune is None:
            return [cell for key in self.contests() for cell in self.test_cells(*key)]
        return [cell for key in self.contests() for cell in self.tuning_cells(*key, tune.lrs)]

    def tune(self, run: Run) -> list[Cell]:
        """Run every grid, extended until its best rate is inside or `extend` rates were added; returns all cells."""
        tune = self.spec.tune
        if tune is None:
            return []
        lrs: dict[tuple[str, str], list[float]] = {key: list(tune.lrs) for key in self.contests()}
        for _ in range(tune.extend + 1):
            cells = {key: self.tuning_cells(*key, lrs[key]) for key in lrs}
            run([cell for some in cells.values() for cell in some])
            self.tuned = {key: self._curve(some) for key, some in cells.items()}
            grown = {key: lr for key, points in self.tuned.items() if (lr := beyond(points)) is not None}
            for key, lr in grown.items():
                if len(lrs[key]) < len(tune.lrs) + tune.extend:
                    lrs[key].append(lr)
            if not grown:
                break
        return [cell for some in cells.values() for cell in some]

    def _curve(self, cells: Sequence[Cell]) -> list[Point]:
        by_lr: dict[float, list[Any]] = {}
        for cell in cells:
            by_lr.setdefault(cell.lr, []).append(cell.record)
        return [point(lr, records, self.spec.solved_at) for lr, records in sorted(by_lr.items())]
