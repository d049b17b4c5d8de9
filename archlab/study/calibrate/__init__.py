"""Are the report's intervals and findings what they say? Made-up studies whose truth is known go through its own code.

A made-up study has a reference and a few variants, each with one value a seed: the variant's truth, a part that the
seed gives to all of them (what pairing takes out), and a part of its own. Three spreads of that part: normal;
heavy-tailed (Student's t of 3 degrees); two heaps, as a task leaves that is solved on some seeds and not on others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from archlab.study import statistics
from archlab.study.analysis import Comparison, compare_values, corrected

SPREADS = ("normal", "heavy", "heaps")
SEED_COUNTS = (3, 5, 10)
EFFECTS = (0.0, 1.0)
"""True differences, in standard deviations of one variant's own part."""

N_VARIANTS = 4
SHARED_SD = 2.0
"""Of the part that a seed gives to all variants."""

SOLVED_AT = 0.9

SOLVED_SHARE = 0.6
"""Of the seeds that solve the task, where there are two heaps; with an effect, of the reference alone."""


@dataclass(frozen=True)
class Result:
    """Over many made-up studies of one kind.

    Attributes:
        coverage: share of the intervals of a difference that hold the truth; of two heaps, of the exact intervals of
            the share that solved it.
        false_studies: where all variants are equal, the share of studies with any finding.
        power: where all differ, the share of comparisons that are found.
        by_shares: share of the comparisons that the report makes by shares, since runs lie in two heaps.
    """

    spread: str
    n_seeds: int
    effect: float
    coverage: float
    false_studies: float | None
    power: float | None
    by_shares: float


def calibrate(n_studies: int, *, seed: int = 0, effects: Sequence[float] = EFFECTS) -> Iterator[Result]:
    """Every spread with every number of seeds, with and without an effect; a study of `n_studies` each."""
    for spread in SPREADS:
        for n_seeds in SEED_COUNTS:
            for effect in effects:
                rng = np.random.default_rng([seed, SPREADS.index(spread), n_seeds, int(effect * 100)])
                yield _simulate(spread, n_seeds, effect, n_studies, rng)


def _simulate(spread: str, n_seeds: int, effect: float, n_studies: int, rng: np.random.Generator) -> Result:
    covered, found, false_studies, by_shares = [], [], 0, []
    for _ in range(n_studies):
        truths = np.array([0.0, *[effect] * N_VARIANTS])
        values = _draw(spread, truths, n_seeds, rng)
        compared = corrected([_compare(i, values, spread) for i in range(1, len(truths))])
        verdicts = [c.verdict in ("lower", "higher") for c in compared]
        found += verdicts
        by_shares += [c.solved is not None for c in compared]
        false_studies += any(verdicts)
        covered += _coverage(spread, values, truths, compared)
    return Result(
        spread,
        n_seeds,
        effect,
        float(np.mean(covered)),
        None if effect else false_studies / n_studies,
        float(np.mean(found)) if effect else None,
        float(np.mean(by_shares)),
    )


def _draw(spread: str, truths: np.ndarray, n_seeds: int, rng: np.random.Generator) -> np.ndarray:
    """Values (variants, seeds)."""
    if spread == "heaps":
        shares = np.where(truths > 0, 0.95, SOLVED_SHARE)[:, None]
        solved = rng.random((len(truths), n_seeds)) < shares
        return np.where(solved, 1.0, 0.25) - 0.01 * rng.random((len(truths), n_seeds))
    shape = (len(truths), n_seeds)
    own = rng.standard_normal(shape) if spread == "normal" else rng.standard_t(3, shape) / np.sqrt(3)
    return truths[:, None] + SHARED_SD * rng.standard_normal(n_seeds) + own


def _compare(i: int, values: np.ndarray, spread: str) -> Comparison:
    solved_at = SOLVED_AT if spread == "heaps" else None
    names = f"variant {i}", "reference"
    return compare_values("made up", names, (values[i], values[0]), pairs=True, solved_at=solved_at)


def _coverage(spread: str, values: np.ndarray, truths: np.ndarray, compared: Sequence[Comparison]) -> list[bool]:
    if spread == "heaps":
        shares = [statistics.share_interval(int((row > SOLVED_AT).sum()), len(row)) for row in values]
        wanted = np.where(truths > 0, 0.95, SOLVED_SHARE)
        return [e.low <= w <= e.high for e, w in zip(shares, wanted, strict=True)]
    estimates = [c.over_seeds.estimate for c in compared if c.over_seeds is not None]
    return [e.low <= t <= e.high for e, t in zip(estimates, truths[1:], strict=True)]
