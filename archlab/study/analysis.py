"""What the records of a study say: a row for each variant of each task, differences to the reference, statements."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from archlab.errors import UsageError
from archlab.run.stages import ITEMS_FILE_NAME
from archlab.study import statistics, timing
from archlab.study.cells import Cell
from archlab.study.ladder import Fit, Size, fit
from archlab.study.plan import Plan
from archlab.study.spec import Spec
from archlab.study.statistics import Difference, Estimate
from archlab.study.tune import Point, best, beyond

SEEDS_READ = "seeds_read.json"

CONFOUNDS = {
    "short convolution": ("conv_size",),
    "output gate": ("gate", "out_gate"),
    "QK-norm": ("qk_norm", "feature_map"),
    "rotation": ("rope_dim", "rope"),
}
"""What variants may have beside their mechanism, by the parameters that say so."""


@dataclass(frozen=True)
class Row:
    """A variant in one task: its test runs, in the order of the study's seeds.

    Attributes:
        records: those of the runs; None where one has not ended.
        curve: its tuning, empty without one.
        matched: what was changed to make it fair.
        counts: all four counts, whatever was matched.
        confounds: what it has beside its mechanism.
        timing: the entries `latency/*` of its model, measured alone (see `archlab.study.timing`).
    """

    task: str
    variant: str
    seeds: Sequence[int]
    records: Sequence[Mapping[str, Any] | None]
    folders: Sequence[Path]
    curve: Sequence[Point]
    matched: Sequence[str]
    counts: Mapping[str, float]
    confounds: Mapping[str, str] = field(default_factory=dict)
    timing: Mapping[str, Any] = field(default_factory=dict)

    def values(self, entry: str) -> dict[int, float]:
        """An entry of the record by seed: of the runs that ended well, and no other."""
        found = {}
        for seed, record in zip(self.seeds, self.records, strict=True):
            if record is not None and record["status"] == "ok" and record.get(entry) is not None:
                found[seed] = record[entry]
        return found

    def count(self, status: str) -> int:
        return sum(r is not None and r["status"] == status for r in self.records)

    @property
    def lr(self) -> float | None:
        return best(self.curve).lr if self.curve else None

    @property
    def lr_is_inside(self) -> bool:
        """Whether the best rate has neighbours on both sides."""
        return not self.curve or beyond(self.curve) is None

    def estimate(self, entry: str) -> Estimate | None:
        values = list(self.values(entry).values())
        return statistics.mean_interval(values) if values else None

    def solved(self, solved_at: float) -> Estimate | None:
        """The share of runs that solved the task, with its exact interval; one that diverged did not."""
        ended = [r for r in self.records if r is not None]
        if not ended:
            return None
        n_solved = sum(r["status"] == "ok" and r["quality/test_accuracy"] >= solved_at for r in ended)
        return statistics.share_interval(n_solved, len(ended))

    def steps_to_solve(self, solved_at: float) -> dict[int, float]:
        """Optimizer steps by seed, of the runs that solved the task."""
        accuracy, steps = self.values("quality/test_accuracy"), self.values("train/steps")
        return {seed: steps[seed] for seed, a in accuracy.items() if a >= solved_at}


@dataclass(frozen=True)
class Comparison:
    """A variant against another in one task, over the seeds that both have.

    Attributes:
        over_seeds: the difference of the metric, first minus second, paired by seed where both have the same; None of
            fewer than two.
        over_sequences: the same difference over the sequences of the test set, averaged over seeds; None for a metric
            that no sequence has.
        solved: how many runs of the first and of the second solved the task, where some did and some did not: such runs
            lie in two heaps, and the shares are compared; None elsewhere.
        p: that the two are equal: of the t test, or of Fisher's exact test of the shares; None without either.
        p_holm: the same, corrected for all comparisons of the study.
    """

    task: str
    first: str
    second: str
    over_seeds: Difference | None
    over_sequences: Estimate | None
    solved: tuple[int, int] | None
    p: float | None
    p_holm: float = 1.0

    @property
    def verdict(self) -> str:
        """ "lower", "higher" or "no difference shown", or why there is none."""
        d = self.over_seeds
        if d is None or d.estimate.n < statistics.LEAST_SEEDS:
            return f"fewer than {statistics.LEAST_SEEDS} seeds: nothing is ranked"
        shown = self.p_holm <= 1 - statistics.LEVEL and (self.solved is not None or d.excludes_zero)
        if not shown:
            return "no difference shown"
        return "lower" if d.estimate.mean < 0 else "higher"


def compare_values(
    task: str,
    names: tuple[str, str],
    values: tuple[Sequence[float], Sequence[float]],
    *,
    pairs: bool,
    solved_at: float | None = None,
    over_sequences: Estimate | None = None,
) -> Comparison:
    """The comparison of two variants from their values, one a seed.

    Args:
        pairs: whether values of one place are of one seed.
        solved_at: of accuracies: from which on a run counts as solved.
    """
    x, y = values
    if min(len(x), len(y)) < 2:
        return Comparison(task, *names, None, over_sequences, None, None)
    difference = statistics.paired(x, y) if pairs else statistics.unpaired(x, y)
    if solved_at is not None:
        k, other_k = (sum(v >= solved_at for v in some) for some in (x, y))
        if 0 < k + other_k < len(x) + len(y):
            p = statistics.share_difference(k, len(x), other_k, len(y))
            return Comparison(task, *names, difference, over_sequences, (k, other_k), p)
    return Comparison(task, *names, difference, over_sequences, None, difference.p)


class Analysis:
    """The results of a study, from the records of its cells alone."""

    def __init__(self, plan: Plan, tests: Mapping[tuple[str, str], Sequence[Cell]]):
        self.spec: Spec = plan.spec
        self.rows = {key: _row(plan, key, cells) for key, cells in tests.items()}

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Every variant of each task against the reference, and every pair that a statement names."""
        pairs = [
            (task, variant, self.spec.reference)
            for task, variant in self.rows
            if variant != self.spec.reference and (task, self.spec.reference) in self.rows
        ]
        found = [self.compare(*pair, self.spec.metric) for pair in pairs]
        return corrected(found)

    @cached_property
    def ladder(self) -> dict[str, Fit | None]:
        """The power law of each variant through its sizes, where the study is a ladder."""
        found: dict[str, list[Size]] = {}
        for row in self.rows.values() if self.spec.ladder else ():
            flops = list(row.values("flops/train_total").values())
            if flops:
                losses = list(row.values(self.spec.metric).values())
                found.setdefault(row.variant, []).append(Size(flops[0], losses, bool(row.curve) and row.lr_is_inside))
        return {variant: fit(sizes) for variant, sizes in found.items()}

    @cached_property
    def added_seeds(self) -> list[int]:
        """Seeds that were added after a report of this study had been written: who has seen a result may stop where it
        pleases, so a reader is told."""
        path = Path(self.spec.dir) / SEEDS_READ
        if not path.exists():
            return []
        read = json.loads(path.read_text(encoding="utf-8"))
        return [seed for seed in self.spec.seeds if seed not in read]

    def keep_seeds(self) -> None:
        """Remember the seeds of the first report."""
        path = Path(self.spec.dir) / SEEDS_READ
        if not path.exists():
            path.write_text(json.dumps(list(self.spec.seeds)), encoding="utf-8")

    def row(self, task: str, variant: str) -> Row:
        """Errors: UsageError where the variant takes no part in the task."""
        if (task, variant) not in self.rows:
            raise UsageError(f"no {variant} in {task}: a statement names what the study does not run")
        return self.rows[task, variant]

    def compare(self, task: str, first: str, second: str, entry: str) -> Comparison:
        """Errors: UsageError where the two did not see the same data."""
        a, b = self.row(task, first), self.row(task, second)
        values, others = a.values(entry), b.values(entry)
        pairs = list(a.seeds) == list(b.seeds)
        over_sequences = None
        if pairs:
            _require_paired(a, b)
            seeds = [seed for seed in a.seeds if seed in values and seed in others]
            values, others = ({seed: some[seed] for seed in seeds} for some in (values, others))
            over_sequences = _over_sequences(a, b, seeds) if entry == "quality/test_loss" else None
        solved_at = self.spec.solved_at if entry == "quality/test_accuracy" else None
        both = list(values.values()), list(others.values())
        return compare_values(
            task, (first, second), both, pairs=pairs, solved_at=solved_at, over_sequences=over_sequences
        )


def corrected(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The same with their p corrected for all of them together."""
    adjusted = iter(statistics.holm([c.p for c in comparisons if c.p is not None]))
    return [c if c.p is None else replace(c, p_holm=next(adjusted)) for c in comparisons]


def _row(plan: Plan, key: tuple[str, str], cells: Sequence[Cell]) -> Row:
    task, variant = key
    return Row(
        task,
        variant,
        [cell.seed for cell in cells],
        [cell.record for cell in cells],
        [cell.path for cell in cells],
        plan.tuned.get(key, []),
        plan.matches[key],
        plan.counts(task, variant),
        _confounds(cells[0].cfg.attn),
        timing.read(Path(plan.spec.dir), task, variant),
    )


def _confounds(node: Any) -> dict[str, str]:
    """What an attention's configuration, and those of a hybrid's parts, says of each confound; "" where nothing."""
    parts = node.get("parts")
    nodes = list(parts.values()) if parts else [node]
    found = {}
    for what, keys in CONFOUNDS.items():
        values = [_plain(key, n[key]) for n in nodes for key in keys if key in n]
        found[what] = ", ".join(dict.fromkeys(values))
    return found


def _plain(key: str, value: Any) -> str:
    """A setting as a reader wants it: null channels that rotate are all of them."""
    if value is None:
        return "all channels" if key == "rope_dim" else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value == 0 else str(value)


def _require_paired(a: Row, b: Row) -> None:
    for seed, first, second in zip(a.seeds, a.records, b.records, strict=True):
        for entry in ("data/fingerprint", "seed/data"):
            if first and second and first.get(entry) != second.get(entry):
                raise UsageError(
                    f"{a.task}: {a.variant} and {b.variant} of seed {seed} differ in {entry}, so they are no pair: "
                    "run both on the same data"
                )


def _over_sequences(a: Row, b: Row, seeds: Sequence[int]) -> Estimate | None:
    """Differences of each test sequence, averaged over the seeds, as one sample."""
    found = []
    for seed in seeds:
        items = [_items(row.folders[list(row.seeds).index(seed)]) for row in (a, b)]
        if any(i is None for i in items):
            return None
        found.append(items)
    if not found:
        return None
    first, second = (np.mean([pair[i] for pair in found], axis=0) for i in (0, 1))
    return statistics.by_sequence(first, second)


def _items(folder: Path) -> np.ndarray | None:
    path = folder / ITEMS_FILE_NAME
    if not path.exists():
        return None
    tensors = load_file(path)
    return np.stack([tensors["nats"], tensors["targets"]], axis=1)
