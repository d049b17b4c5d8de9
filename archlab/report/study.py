"""A study as a person reads it: statements first, then tables. See also `archlab.report.html`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from archlab.measure.units import human_bytes, human_context, human_count
from archlab.report import records
from archlab.report.group import Group, metrics
from archlab.study import ladder
from archlab.study.analysis import CONFOUNDS, Analysis, Comparison, Row
from archlab.study.spec import COUNTS
from archlab.study.statements import FAILS, HOLDS, UNDECIDED, Finding, judge, tally
from archlab.study.statistics import LEVEL, Estimate

CACHE_AT = 8192
LIMIT = "latency/decode_limit_ms"
STYLES = {HOLDS: "green", FAILS: "red"}
CSS = {HOLDS: "holds", FAILS: "fails", UNDECIDED: "undecided"}


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
    if c.solved is not None:
        return [f"{c.solved[0]} solved against {c.solved[1]}", f"{c.p_holm:.2g}"]
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
        if c.verdict == "no difference shown" and c.over_seeds is not None and c.solved is None:
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
    """Write report.md, report.html and all records into a folder; returns the files."""
    from archlab.report import html  # plotly takes a second to import

    findings, text = judge(analysis), folder / "report.md"
    text.write_text(markdown(analysis, findings), encoding="utf-8")
    page = html.write(
        folder / "report.html",
        title=analysis.spec.name,
        says=f"{analysis.spec.says[:1].upper()}{analysis.spec.says[1:]}.",
        findings=[vars(f) | {"css": CSS[f.verdict]} for f in findings],
        sections=[*_laws(analysis), *(_section(analysis, t) for t in analysis.spec.tasks), _confounds(analysis)],
        sources=sources(analysis),
    )
    analysis.keep_seeds()
    every = [r for row in analysis.rows.values() for r in row.records if r is not None]
    return [text, page, *records.write(every, folder)]


def _laws(analysis: Analysis):
    """The power laws of a ladder, and where they cross; nothing of another study."""
    from archlab.report import charts, html

    if not analysis.spec.ladder:
        return []
    points = {
        v: [r for r in analysis.rows.values() if r.variant == v and r.values("flops/train_total")]
        for v in analysis.spec.variants
    }
    chart = charts.laws(analysis.ladder, points, analysis.spec.metric)
    tables = [("", ladder.table(analysis.ladder))]
    return [html.Section("Loss against training FLOPs", tables=tables, figures=[chart], notes=crossings(analysis))]


def crossings(analysis: Analysis) -> list[str]:
    """For each variant, where its law crosses the reference's, how sure that is, and how far outside what was run."""
    laws, reference = analysis.ladder, analysis.spec.reference
    largest = max((f for r in analysis.rows.values() for f in r.values("flops/train_total").values()), default=0.0)
    found = []
    for variant, law in laws.items():
        base = laws.get(reference)
        if variant == reference or law is None or base is None:
            continue
        at = ladder.crossing(law, base, largest)
        if at is None:
            found.append(f"{variant} and {reference} do not cross within 10,000 times the largest size")
            continue
        where = f"{at.flops:.2g} FLOPs ({at.low:.2g} to {at.high:.2g}), {at.beyond:.2g} times the largest size"
        found.append(f"{variant} crosses {reference} at {where}; {at.share:.0%} of the bootstraps cross")
    return found


def groups(analysis: Analysis, task: str) -> list[Group]:
    """The variants of a task, in the order of the study file, so that each has one colour everywhere."""
    found = []
    for variant in analysis.spec.variants:
        if (row := analysis.rows.get((task, variant))) is not None:
            ok = [i for i, r in enumerate(row.records) if r is not None and r["status"] == "ok"]
            entries = [{**(row.records[i] or {}), **row.timing} for i in ok]
            found.append(Group(variant, entries, [row.folders[i] for i in ok], len(row.records)))
    return found


def _section(analysis: Analysis, task: str):
    from archlab.report import charts, html

    spec, found = analysis.spec, groups(analysis, task)
    quality = {"y_entry": spec.metric, "y": spec.metric, "lower_is_better": not spec.higher_is_better}
    is_task = spec.solved_at is not None
    curves = {g.label: analysis.rows[task, g.label].curve for g in found}
    decode = "latency/decode_ms_per_token_p50"
    figures = [
        charts.curves(found, "train/loss", "training loss: mean and range over seeds", "nats a token"),
        charts.curves(found, "quality/val_accuracy", "validation accuracy while training", "accuracy"),
        charts.rates(curves, title="tuning: the large point was chosen", by_accuracy=is_task),
        charts.quality_against(
            found, f"cache/bytes_at/{CACHE_AT}", title="quality against cache", x="cache at 8k tokens, bytes", **quality
        ),
        charts.quality_against(
            found, f"{decode}/{CACHE_AT}", title="quality against latency", x="decode step at 8k tokens, ms", **quality
        ),
        charts.against_context(found, "cache/bytes_at", "cache of one sequence", "bytes"),
        charts.against_context(
            found, decode, "decode step (dashes: the machine's limit)", "ms", "latency/decode_limit_ms"
        ),
        *charts.slices(found),
        *(charts.curves(found, entry, entry.removeprefix("model/"), "") for entry in metrics(found)),
    ]
    return html.Section(
        task,
        about=" ".join(spec.tasks[task]),
        tables=[
            ("", table(analysis, task)),
            ("differences", differences(analysis, task)),
            ("counts", sizes(analysis, task)),
        ],
        figures=figures,
        notes=[n for n in notes(analysis) if n.startswith(f"{task}:")],
    )


def differences(analysis: Analysis, task: str) -> list[list[str]]:
    """Header and a row for each variant against the reference: over seeds, and over the sequences of the test set."""
    header = ["variant", "minus", "over seeds", "pairs", "p (Holm)", "detectable", "over sequences", "verdict"]
    body = []
    for c in (c for c in analysis.comparisons if c.task == task):
        d = c.over_seeds
        over = ["-"] * 4
        if d is not None:
            margin = f"{d.estimate.mean:+.4f} ±{d.estimate.margin or 0:.4f}"
            by_shares = c.solved is not None
            over = ["by shares solved" if by_shares else margin, str(d.estimate.n), f"{c.p_holm:.2g}"]
            over.append("-" if by_shares else f"{d.detectable:.3g}")
        body.append([c.first, c.second, *over, spread(c.over_sequences), c.verdict])
    return [header, *body]


def sizes(analysis: Analysis, task: str) -> list[list[str]]:
    """Header and a row for each variant: all counts, whatever was matched, and what was changed for it."""
    rows = [row for (t, _), row in analysis.rows.items() if t == task]
    header = ["variant", *COUNTS, "changed to match"]
    return [header, *([r.variant, *(f"{r.counts[c]:,.0f}" for c in COUNTS), " ".join(r.matched) or "-"] for r in rows)]


def _confounds(analysis: Analysis):
    """What each variant has beside its mechanism."""
    from archlab.report import html

    rows = {row.variant: row for row in analysis.rows.values()}
    header = ["variant", *CONFOUNDS]
    body = [[v, *(row.confounds.get(c) or "-" for c in CONFOUNDS)] for v, row in rows.items()]
    about = (
        "What variants have beside their mechanism. Where two differ in one of these, "
        "their difference is not that of the mechanism alone."
    )
    return html.Section("Confounds", about=about, tables=[("", [header, *body])], notes=notes(analysis))


def sources(analysis: Analysis) -> list[str]:
    """The command that repeats the study, its file, and the data that each task saw."""
    spec = analysis.spec
    found = [f"python -m archlab.study {spec.name}", f"{spec.dir}/study.yaml, {spec.dir}/cells.jsonl"]
    for task in spec.tasks:
        prints = {r["data/fingerprint"] for (t, _), row in analysis.rows.items() if t == task for r in row.records if r}
        found.append(f"{task}: data {', '.join(sorted(p[:16] for p in prints))}")
    return found
