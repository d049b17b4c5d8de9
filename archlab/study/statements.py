"""What a study was made to test, each a sentence with a rule, and whether it came out.

A statement in a study file names its `kind`:

    solves, fails      variant, task: the share of seeds that solve it is above (below) a half
    lower, higher      first, second, task, entry: a paired difference of an entry of the record, of that sign
    sooner             first, second, task: fewer optimizer steps to solve it, over the seeds of which both do
    equal              first, second, task, entry: no difference shown
    metric_rises       variant, task, entry: a logged figure is higher in the last tenth of training than in the first

The direction is fixed before anything runs, so shares have one-sided bounds. The p of all statements that have one are
corrected together (Holm).
"""

from __future__ import annotations

import json
import statistics as plain
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scipy import stats

from archlab.errors import UsageError
from archlab.plugins import nearest
from archlab.run.log import FILE_NAME
from archlab.study import statistics
from archlab.study.analysis import Analysis, Comparison

HOLDS, FAILS, UNDECIDED = "holds", "does not hold", "undecided"


@dataclass(frozen=True)
class Finding:
    """A statement and what came out.

    Attributes:
        says: the sentence.
        verdict: `HOLDS`, `FAILS` (the contrary is shown) or `UNDECIDED`.
        evidence: the figures, in words.
        n_seeds: how many runs (of each side) stand behind it.
        p: of the test, corrected for all statements of the study; None where the rule is a bound.
    """

    says: str
    verdict: str
    evidence: str
    n_seeds: int
    p: float | None = None


def judge(analysis: Analysis) -> list[Finding]:
    """Every statement of the study. Errors: UsageError for one that cannot be read."""
    found = [_judge(analysis, statement) for statement in analysis.spec.statements]
    with_p = [f.p for f in found if f.p is not None]
    adjusted = iter(statistics.holm(with_p))
    found = [f if f.p is None else _corrected(f, next(adjusted)) for f in found]
    if not (added := analysis.added_seeds):
        return found
    told = f"; seeds {', '.join(map(str, added))} were added after a report had been read"
    return [replace(f, evidence=f.evidence + told) for f in found]


def _corrected(finding: Finding, p: float) -> Finding:
    verdict = finding.verdict if p <= 1 - statistics.LEVEL or finding.verdict == UNDECIDED else UNDECIDED
    return Finding(finding.says, verdict, f"{finding.evidence}; p {p:.2g} (Holm)", finding.n_seeds, p)


def _judge(analysis: Analysis, statement: Mapping[str, Any]) -> Finding:
    kind = statement.get("kind")
    if kind not in KINDS:
        raise UsageError(f"a statement's kind is {kind!r}; {nearest(str(kind), KINDS)}")
    try:
        says, settings = statement["says"], {k: v for k, v in statement.items() if k not in ("kind", "says")}
        return KINDS[kind](analysis, says, **settings)
    except (KeyError, TypeError) as error:
        raise UsageError(f"the statement {dict(statement)} cannot be read: {error}") from error


def _solves(analysis: Analysis, says: str, *, variant: str, task: str, not_solved: bool = False) -> Finding:
    solved_at = analysis.spec.solved_at
    if solved_at is None:
        raise UsageError("a statement of kind solves needs the study's solved_at")
    share = analysis.row(task, variant).solved(solved_at)
    if share is None:
        return Finding(says, UNDECIDED, "no run has ended", 0)
    k = round(share.mean * share.n)
    low, high = (statistics.share_bound(k, share.n, above=above) for above in (True, False))
    evidence = f"{k} of {share.n} seeds solve it (95% interval {share.low:.2f} to {share.high:.2f})"
    verdicts = (FAILS, HOLDS) if not_solved else (HOLDS, FAILS)
    verdict = verdicts[0] if low > 0.5 else verdicts[1] if high < 0.5 else UNDECIDED
    return Finding(says, verdict, evidence, share.n)


def _fails(analysis: Analysis, says: str, *, variant: str, task: str) -> Finding:
    return _solves(analysis, says, variant=variant, task=task, not_solved=True)


def _lower(analysis: Analysis, says: str, *, first: str, second: str, task: str, entry: str, sign: int = -1) -> Finding:
    c = analysis.compare(task, first, second, entry)
    d = c.over_seeds
    if d is None or c.p is None or d.estimate.n < statistics.LEAST_SEEDS:
        return Finding(says, UNDECIDED, f"fewer than {statistics.LEAST_SEEDS} pairs", 0 if d is None else d.estimate.n)
    shown = c.solved is not None or d.excludes_zero  # of shares, the corrected p alone decides
    verdict = UNDECIDED if not shown else HOLDS if d.estimate.mean * sign > 0 else FAILS
    return Finding(says, verdict, _evidence(c, d), d.estimate.n, c.p)


def _higher(analysis: Analysis, says: str, *, first: str, second: str, task: str, entry: str) -> Finding:
    return _lower(analysis, says, first=first, second=second, task=task, entry=entry, sign=1)


def _equal(analysis: Analysis, says: str, *, first: str, second: str, task: str, entry: str) -> Finding:
    c = analysis.compare(task, first, second, entry)
    d = c.over_seeds
    if d is None or d.estimate.n < statistics.LEAST_SEEDS:
        return Finding(says, UNDECIDED, f"fewer than {statistics.LEAST_SEEDS} pairs", 0 if d is None else d.estimate.n)
    return Finding(says, FAILS if d.excludes_zero else HOLDS, _evidence(c, d), d.estimate.n)


def _sooner(analysis: Analysis, says: str, *, first: str, second: str, task: str) -> Finding:
    solved_at = analysis.spec.solved_at or 1.0
    a, b = (analysis.row(task, v).steps_to_solve(solved_at) for v in (first, second))
    if len(a) < statistics.LEAST_SEEDS:
        return Finding(says, UNDECIDED, f"{first} solved it on {len(a)} seeds", len(a))
    if not b:
        return Finding(says, HOLDS, f"{first} in {plain.fmean(a.values()):.0f} steps, {second} on no seed", len(a))
    test = stats.mannwhitneyu(list(a.values()), list(b.values()), alternative="two-sided")
    evidence = f"{plain.median(a.values()):.0f} against {plain.median(b.values()):.0f} steps (medians)"
    sooner = plain.median(a.values()) < plain.median(b.values())
    return Finding(says, HOLDS if sooner else FAILS, evidence, min(len(a), len(b)), float(test.pvalue))


def _metric_rises(analysis: Analysis, says: str, *, variant: str, task: str, entry: str) -> Finding:
    rises = [rise for folder in analysis.row(task, variant).folders if (rise := _rise(folder, entry)) is not None]
    if len(rises) < statistics.LEAST_SEEDS:
        return Finding(says, UNDECIDED, f"{entry} was logged by {len(rises)} runs", len(rises))
    d = statistics.paired([end for _, end in rises], [start for start, _ in rises])
    first, last = (plain.fmean(x[i] for x in rises) for i in (0, 1))
    verdict = UNDECIDED if not d.excludes_zero else HOLDS if d.estimate.mean > 0 else FAILS
    return Finding(says, verdict, f"{first:.2f} at first, {last:.2f} at last", len(rises), d.p)


def _rise(folder: Path, entry: str) -> tuple[float, float] | None:
    """Mean of the first and of the last tenth of what a run logged of an entry; None of fewer than ten rows."""
    path = folder / FILE_NAME
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    values = [row[entry] for row in map(json.loads, lines) if row.get(entry) is not None]
    tenth = len(values) // 10
    return (plain.fmean(values[:tenth]), plain.fmean(values[-tenth:])) if tenth else None


def _evidence(c: Comparison, d: statistics.Difference) -> str:
    e = d.estimate
    if c.solved is not None:
        return f"{c.solved[0]} against {c.solved[1]} of {e.n} seeds solve it"
    interval = f"difference {e.mean:+.4f} (95% interval {e.low:+.4f} to {e.high:+.4f})"
    return f"{interval}; {e.n} pairs could have shown {d.detectable:.3g}"


KINDS: dict[str, Callable[..., Finding]] = {
    "solves": _solves,
    "fails": _fails,
    "lower": _lower,
    "higher": _higher,
    "equal": _equal,
    "sooner": _sooner,
    "metric_rises": _metric_rises,
}


def tally(findings: Sequence[Finding]) -> str:
    """How many came out, in words."""
    return ", ".join(f"{sum(f.verdict == v for f in findings)} {v}" for v in (HOLDS, FAILS, UNDECIDED))
