"""A study as a person reads it: statements first, then tables. See also `archlab.report.html`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from archlab.measure.units import human_bytes, human_context, human_count
from archlab.study.analysis import Analysis, Comparison, Row
from archlab.study.statements import FAILS, HOLDS, Finding, judge, tally
from archlab.study.statistics import LEVEL, Estimate

CACHE_AT = 8192
STYLES = {HOLDS: "green", FAILS: "red"}


def show(analysis: Analysis, console: Console) -> None:
    """Print the statements and a table for each task."""
    findings = judge(analysis)
    if findings:
        console.print(f"statements: {tally(findings)}", style="bold", highlight=False)
    for f in findings:
        console.print(f"  {f.verdict}: {f.says}", style=STYLES.get(f.verdict, "yellow"), highlight=False, markup=False)
        console.print(f"      {f.evidence}", highlight=False, markup=False, soft_wrap=True)
    for task in analysis.spec.tasks:
        header, *body = table(analysis, task)
        console.print(f"\n{task}", style="bold", highlight=False)
        shown = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for i, name in enumerate(header):
            shown.add_column(name.replace(" ", "\n"), justify="right" if i else "left", overflow="fold")
        for row in body:
            shown.add_row(*row)
        console.print(shown)
    for note in notes(analysis):
        console.print(f"  {note}", style="yellow", highlight=False, markup=False, soft_wrap=True)


def table(analysis: Analysis, task: str) -> list[list[str]]:
    """Header and a row for each variant, the best mean first."""
    spec = analysis.spec
    rows = [row for (t, _), row in analysis.rows.items() if t == task]
    header = ["variant", "seeds", "lr", "params", f"cache at {human_context(CACHE_AT)}"]
    header += ["solved", "steps"] if spec.solved_at is not None else []
    header += [spec.metric.removeprefix("quality/").replace("_", " "), f"minus {spec.reference}", "p"]
    by_variant = {c.first: c for c in analysis.comparisons if c.task == task}
    return [header, *(_cells(analysis, row, by_variant.get(row.variant)) for row in sorted(rows, key=_order(analysis)))]


def _order(analysis: Analysis):
    sign = -1 if analysis.spec.higher_is_better else 1

    def key(row: Row) -> float:
        estimate = row.estimate(analysis.spec.metric)
        return float("inf") if estimate is None else sign * estimate.mean

    return key


def _cells(analysis: Analysis, row: Row, comparison: Comparison | None) -> list[str]:
    spec = analysis.spec
    lr = "-" if row.lr is None else f"{row.lr:g}{'' if row.lr_is_inside else '!'}"
    cells = [row.variant, _seeds(row), lr, human_count(row.counts["params"]), human_bytes(row.counts["cache_at_8k"])]
    if spec.solved_at is not None:
        share, steps = row.solved(spec.solved_at), sorted(row.steps_to_solve(spec.solved_at).values())
        cells.append("-" if share is None else f"{round(share.mean * share.n)}/{share.n}")
        cells.append(f"{steps[len(steps) // 2]:.0f}" if steps else "-")
    return [*cells, spread(row.estimate(spec.metric)), *_difference(comparison)]


def _seeds(row: Row) -> str:
    bad = [f"{n} {status}" for status in ("diverged", "failed") if (n := row.count(status))]
    missing = sum(r is None for r in row.records)
    return ", ".join([str(row.count("ok")), *bad, *([f"{missing} missing"] if missing else [])])


def spread(e: Estimate | None) -> str:
    """A mean with the margin of its interval."""
    if e is None:
        return "-"
    return f"{e.mean:.4f}" if e.margin is None else f"{e.mean:.4f} ±{e.margin:.4f}"


def _difference(c: Comparison | None) -> list[str]:
    if c is None:
        return ["(reference)", ""]
    if c.over_seeds is None:
        return ["one pair", ""]
    if c.two_heaps:
        return ["two groups", ""]
    e = c.over_seeds.estimate
    return [f"{e.mean:+.4f} ±{e.margin or 0:.4f}", f"{c.p_holm:.2g}"]


def notes(analysis: Analysis) -> list[str]:
    """What a reader must know before believing the tables."""
    spec, found = analysis.spec, []
    outside = [f"{r.variant} ({r.task})" for r in analysis.rows.values() if not r.lr_is_inside]
    if outside:
        found.append(f"! the best learning rate lies at the end of the grid: {', '.join(outside)}")
    if spec.tune is None:
        found.append("no learning rate was tuned: every variant ran at that of the configuration")
    if len(spec.seeds) < 3:
        found.append(f"{len(spec.seeds)} seeds: fewer than 3 rank nothing")
    if spec.match is None:
        found.append("nothing was matched: see the counts of each variant")
    for c in analysis.comparisons:
        if c.verdict == "no difference shown" and c.over_seeds is not None:
            found.append(
                f"{c.task}: {c.first} and {c.second}: no difference shown; {c.over_seeds.estimate.n} pairs would have "
                f"shown one of {c.over_seeds.detectable:.3g} with a probability of 0.8"
            )
    return [*found, f"intervals of {LEVEL:.0%}; p corrected for {len(analysis.comparisons)} comparisons (Holm)"]


def markdown(analysis: Analysis, findings: Sequence[Finding]) -> str:
    """The same as a text."""
    spec = analysis.spec
    parts = [f"# {spec.name}", f"{spec.says[:1].upper()}{spec.says[1:]}."]
    if findings:
        parts.append("\n".join(["| statement | | evidence |", "| --- | --- | --- |", *map(_statement, findings)]))
    for task in spec.tasks:
        header, *body = table(analysis, task)
        lines = [header, ["---"] + ["---:"] * (len(header) - 1), *body]
        parts += [f"## {task}", "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    return "\n\n".join([*parts, "\n".join(f"* {note}" for note in notes(analysis))]) + "\n"


def _statement(f: Finding) -> str:
    return f"| {f.says} | {f.verdict} | {f.evidence}, {f.n_seeds} seeds |"


def write(analysis: Analysis, folder: Path) -> list[Path]:
    """Write the report's files into a folder; returns them."""
    path = folder / "report.md"
    path.write_text(markdown(analysis, judge(analysis)), encoding="utf-8")
    return [path]
