"""The learning rate of each variant: the best of a grid on the validation split, and whether it lies inside."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VAL_LOSS, VAL_ACCURACY, STEPS = "quality/val_loss", "quality/val_accuracy", "train/steps_to_target"


@dataclass(frozen=True)
class Point:
    """One rate of a curve: how many of its runs ended well, and their mean validation loss; of a task that is solved or
    not, the share that solved it, the mean steps of those, and the mean accuracy."""

    lr: float
    n_ok: int
    n_runs: int
    val_loss: float | None
    solved_share: float | None = None
    steps_to_target: float | None = None
    accuracy: float | None = None

    @property
    def merit(self) -> tuple[float, ...]:
        """What makes a rate better than another: the larger, the better. A rate at which a run fails comes last."""
        if self.n_ok < self.n_runs or self.val_loss is None:
            return (-math.inf,)
        if self.solved_share is None:
            return (-self.val_loss,)
        steps = -math.inf if self.steps_to_target is None else -self.steps_to_target
        return (self.solved_share, steps if self.solved_share else 0.0, self.accuracy or 0.0, -self.val_loss)


def point(lr: float, records: Sequence[Mapping[str, Any] | None], solved_at: float | None) -> Point:
    """What the tuning runs at one rate say; a run without a record counts as one that failed."""
    ok = [r for r in records if r is not None and r["status"] == "ok"]
    losses = [r[VAL_LOSS] for r in ok if r.get(VAL_LOSS) is not None]
    loss = statistics.fmean(losses) if losses else None
    if solved_at is None or not ok:
        return Point(lr, len(ok), len(records), loss)
    accuracies = [r[VAL_ACCURACY] for r in ok]
    solved = [r for r in ok if r[VAL_ACCURACY] >= solved_at]
    steps = statistics.fmean(r.get(STEPS) or r["train/steps"] for r in solved) if solved else None
    return Point(lr, len(ok), len(records), loss, len(solved) / len(ok), steps, statistics.fmean(accuracies))


def best(points: Sequence[Point]) -> Point:
    """The best point of a curve; of equals, the smallest rate."""
    return max(sorted(points, key=lambda p: p.lr), key=lambda p: p.merit)


def beyond(points: Sequence[Point]) -> float | None:
    """The rate to try next where the best one is at an end of the grid; None where it is inside.

    An end beyond which runs fail already is no end: the failure is the neighbour.
    """
    ordered = sorted(points, key=lambda p: p.lr)
    lrs, top = [p.lr for p in ordered], best(points).lr
    ratio = lrs[1] / lrs[0]
    if top == lrs[0]:
        return float(f"{lrs[0] / ratio:.3g}")
    if top == lrs[-1]:
        return float(f"{lrs[-1] * ratio:.3g}")
    return None
