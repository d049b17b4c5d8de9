"""How loss falls with compute: L = E + A C^-a fitted to the sizes of each variant (Kaplan et al. 2020,
arXiv:2001.08361; the form of Hoffmann et al. 2022, arXiv:2203.15556, in one variable), where two curves cross, and how
sure that is.

The law shows only where every size has its own best learning rate: a point whose best rate lies at the end of its grid
is not fitted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize

LEAST_SIZES = 4
"""Three numbers are fitted: fewer sizes than four leave nothing to judge them by."""

N_BOOTSTRAPS = 200
LEVEL = 0.95
LAW = tuple[float, float, float]
"""E, A and a."""


@dataclass(frozen=True)
class Size:
    """One size of a variant: training FLOPs, and the test loss of each seed. `tuned`: its rate lies inside the grid."""

    flops: float
    losses: Sequence[float]
    tuned: bool


@dataclass(frozen=True)
class Fit:
    """The law of one variant.

    Attributes:
        law: E (nats), A and a, with C in units of the smallest size's FLOPs.
        exponent_low, exponent_high: interval of a, by a bootstrap over seeds.
        unit_flops: what C is counted in.
        bootstraps: the law of each resampling.
    """

    law: LAW
    exponent_low: float
    exponent_high: float
    unit_flops: float
    bootstraps: Sequence[LAW]

    def loss(self, flops: float, law: LAW | None = None) -> float:
        e, a, exponent = law or self.law
        return e + a * (flops / self.unit_flops) ** -exponent


@dataclass(frozen=True)
class Crossing:
    """Where two laws are equal: training FLOPs, an interval over the bootstraps that cross at all, their share, and how
    many times the largest measured size it lies at."""

    flops: float
    low: float
    high: float
    share: float
    beyond: float


def fit(sizes: Sequence[Size], *, seed: int = 0) -> Fit | None:
    """The law of the tuned sizes; None of fewer than `LEAST_SIZES`, or where it cannot be fitted."""
    tuned = sorted((s for s in sizes if s.tuned and len(s.losses)), key=lambda s: s.flops)
    if len(tuned) < LEAST_SIZES:
        return None
    unit = tuned[0].flops
    x = np.array([s.flops / unit for s in tuned])
    law = _solve(x, np.array([np.mean(s.losses) for s in tuned]))
    if law is None:
        return None
    rng = np.random.default_rng(seed)
    means = (np.array([rng.choice(s.losses, len(s.losses)).mean() for s in tuned]) for _ in range(N_BOOTSTRAPS))
    laws = [found for found in (_solve(x, y) for y in means) if found is not None]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile([found[2] for found in laws or [law]], [tail, 1 - tail])
    return Fit(law, float(low), float(high), unit, laws)


def _solve(x: np.ndarray, y: np.ndarray) -> LAW | None:
    """Least squares with E and A at least 0 and a above 0."""
    start = (0.9 * y.min(), max(y.max() - 0.9 * y.min(), 1e-3), 0.3)
    try:
        found, _ = optimize.curve_fit(
            lambda c, e, a, exponent: e + a * c**-exponent,
            x,
            y,
            p0=start,
            bounds=((0.0, 0.0, 1e-3), (float(y.min()), np.inf, 3.0)),
            maxfev=20_000,
        )
    except (RuntimeError, ValueError):
        return None
    return float(found[0]), float(found[1]), float(found[2])


def crossing(first: Fit, second: Fit, largest_flops: float, *, reach: float = 1e4) -> Crossing | None:
    """Where the two laws cross between the smallest size and `reach` times the largest; None where they do not."""
    low, high = min(first.unit_flops, second.unit_flops), reach * largest_flops
    where = _cross(first, second, first.law, second.law, low, high)
    if where is None:
        return None
    pairs = list(zip(first.bootstraps, second.bootstraps, strict=False))
    found = [at for a, b in pairs if (at := _cross(first, second, a, b, low, high)) is not None]
    tail = (1 - LEVEL) / 2
    ends = np.quantile(found or [where], [tail, 1 - tail])
    share = len(found) / len(pairs) if pairs else 0.0
    return Crossing(where, float(ends[0]), float(ends[1]), share, where / largest_flops)


def _cross(first: Fit, second: Fit, a: LAW, b: LAW, low: float, high: float) -> float | None:
    """The first crossing on a logarithmic grid, refined."""

    def gap(log_flops: float) -> float:
        return first.loss(math.exp(log_flops), a) - second.loss(math.exp(log_flops), b)

    grid = np.linspace(math.log(low), math.log(high), 400)
    signs = np.sign([gap(g) for g in grid])
    turns = np.flatnonzero(signs[1:] * signs[:-1] < 0)
    if not len(turns):
        return None
    return math.exp(float(optimize.brentq(gap, grid[turns[0]], grid[turns[0] + 1])))


def table(fits: Mapping[str, Fit | None]) -> list[list[str]]:
    """Header and a row for each variant."""
    header = ["variant", "E, nats", "A", "exponent", "interval (bootstrap over seeds)"]
    body = []
    for name, found in fits.items():
        if found is None:
            body.append([name, "-", "-", "-", f"fewer than {LEAST_SIZES} tuned sizes"])
            continue
        e, a, exponent = found.law
        interval = f"{found.exponent_low:.3f} to {found.exponent_high:.3f}"
        body.append([name, f"{e:.3f}", f"{a:.3f}", f"{exponent:.3f}", interval])
    return [header, *body]
