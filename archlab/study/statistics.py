"""Intervals, differences and their evidence. Everything that is a distribution comes from scipy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, stats

LEVEL = 0.95
LEAST_SEEDS = 3
"""Fewer tell no effect from noise."""


@dataclass(frozen=True)
class Estimate:
    """A mean over n seeds with its interval at `LEVEL`; no interval of fewer than two."""

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def margin(self) -> float | None:
        """Half the width of a symmetric interval."""
        return None if self.high is None else self.high - self.mean


@dataclass(frozen=True)
class Difference:
    """A paired difference over seeds, the first minus the second.

    Attributes:
        estimate: its mean and t interval.
        p: two-sided, of the paired t test; 1 where all pairs are equal.
        detectable: the smallest true difference that so many pairs of this spread find with a probability of 0.8.
    """

    estimate: Estimate
    p: float
    detectable: float

    @property
    def excludes_zero(self) -> bool:
        low, high = self.estimate.low, self.estimate.high
        return low is not None and high is not None and (low > 0 or high < 0)


def mean_interval(values: Sequence[float]) -> Estimate:
    """Student's t interval of a mean."""
    x = np.asarray(values, dtype=float)
    mean = float(x.mean())
    if len(x) < 2:
        return Estimate(mean, None, None, len(x))
    if not x.std():
        return Estimate(mean, mean, mean, len(x))
    low, high = stats.ttest_1samp(x, 0.0).confidence_interval(LEVEL)
    return Estimate(mean, float(low), float(high), len(x))


def paired(first: Sequence[float], second: Sequence[float]) -> Difference:
    """The difference of two variants on the same seeds. Errors: ValueError for fewer than two pairs."""
    x = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    if len(x) < 2:
        raise ValueError(f"{len(x)} pairs: an interval of a difference takes two")
    if not x.std():
        return Difference(mean_interval(x), 1.0 if not x.any() else 0.0, 0.0)
    p = float(stats.ttest_1samp(x, 0.0).pvalue)
    return Difference(mean_interval(x), p, detectable(float(x.std(ddof=1)), len(x)))


def unpaired(first: Sequence[float], second: Sequence[float]) -> Difference:
    """The difference of two variants that share no seed (Welch's t test). Errors: ValueError for fewer than two."""
    x, y = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if min(len(x), len(y)) < 2:
        raise ValueError(f"{len(x)} and {len(y)} runs: an interval of a difference takes two of each")
    mean, n = float(x.mean() - y.mean()), min(len(x), len(y))
    if not x.std() and not y.std():
        return Difference(Estimate(mean, mean, mean, n), float(mean == 0), 0.0)
    test = stats.ttest_ind(x, y, equal_var=False)
    low, high = test.confidence_interval(LEVEL)
    spread = math.sqrt(float(x.var(ddof=1) + y.var(ddof=1)))
    return Difference(Estimate(mean, float(low), float(high), n), float(test.pvalue), detectable(spread, n))


def detectable(deviation: float, n: int, *, power: float = 0.8) -> float:
    """The smallest true difference that a two-sided paired t test of n pairs finds with that power, at `LEVEL` (by the
    noncentral t distribution)."""
    df, root = n - 1, math.sqrt(n)
    critical = stats.t.ppf((1 + LEVEL) / 2, df)

    def missing(effect: float) -> float:
        return power - float(stats.nct.sf(critical, df, effect * root))

    return deviation * float(optimize.brentq(missing, 1e-6, 100.0))


def share_interval(k: int, n: int) -> Estimate:
    """The exact (Clopper-Pearson) interval of a share."""
    ci = stats.binomtest(k, n).proportion_ci(LEVEL, method="exact")
    return Estimate(k / n, float(ci.low), float(ci.high), n)


def share_bound(k: int, n: int, *, above: bool) -> float:
    """The exact one-sided bound of a share at `LEVEL`: for a statement whose direction was fixed beforehand."""
    side = "greater" if above else "less"
    ci = stats.binomtest(k, n, alternative=side).proportion_ci(LEVEL, method="exact")
    return float(ci.low if above else ci.high)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction (1979): the p of each test of a family, such that a false finding anywhere in it is
    as rare as stated. scipy has none."""
    order = np.argsort(p_values)
    adjusted, worst = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = worst
    return adjusted


def share_difference(k: int, n: int, other_k: int, other_n: int) -> float:
    """The two-sided p that two shares are equal (Fisher's exact test): what is left where runs lie in two heaps, solved
    or not, for whose mean no interval holds."""
    return float(stats.fisher_exact([[k, n - k], [other_k, other_n - other_k]]).pvalue)


def by_sequence(first: np.ndarray, second: np.ndarray) -> Estimate:
    """The difference of two runs in nats a target on one test set, clustered by sequence: its interval says how far it
    would move on other sequences, apart from what other seeds would do.

    Args:
        first, second: (n 2), nats and targets of each sequence; the sequences are the same.
    """
    targets = first[:, 1]
    per_sequence = (first[:, 0] - second[:, 0]) / targets.mean()
    return mean_interval(per_sequence)
