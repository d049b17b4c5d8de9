"""The files of a report: CSV, Markdown and the pictures."""

import csv
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from archlab.report import records
from archlab.report.comparison import CONTEXT, Comparison, Run, compare
from archlab.report.group import Group, metrics
from archlab.report.table import closing_lines, rows


def write(runs: Sequence[Run], out: Path, context: int = CONTEXT) -> list[Path]:
    """Write report.csv, report.md, report.html, the pictures, and all records as CSV and Parquet; returns the files."""
    from archlab.report import curves, figure

    out.mkdir(parents=True, exist_ok=True)
    comparisons = compare(runs, context)
    written, text = [out / "report.csv", out / "report.md"], ["# Comparison"]
    _write_csv(written[0], comparisons)
    for c in comparisons:
        stem = "report" if len(comparisons) == 1 else f"report-{(c.fingerprint or 'static')[:8]}"
        pictures = {
            "loss against cache bytes and against decode latency": figure.draw(c, out / stem),
            "cache bytes and decode latency against context": curves.draw(c, out / f"{stem}-contexts"),
        }
        written += itertools.chain.from_iterable(pictures.values())
        text += [
            f"## {c.title}",
            *([f"All with `{' '.join(c.shared)}`."] if c.shared else []),
            _markdown(rows(c)),
            *(f"* {note}" for note in c.notes),
        ]
        text += [f"![{title}]({p.name})" for title, files in pictures.items() for p in files if p.suffix == ".svg"]
    text += [f"* {line}" for line in closing_lines(runs)]
    written[1].write_text("\n\n".join(text) + "\n", encoding="utf-8")
    written += records.write([run.entries for run in runs], out)
    return [*written, _page(comparisons, closing_lines(runs), out / "report.html")]


def _page(comparisons: Sequence[Comparison], closing: Sequence[str], path: Path) -> Path:
    from archlab.report import html  # plotly takes a second to import

    return html.write(
        path,
        title="Comparison",
        says="Means over seeds; nothing is ranked here: python -m archlab.study tests differences.",
        sections=[*map(_section, comparisons), html.Section("Runs", notes=closing)],
        sources=[f"data {c.fingerprint or 'none'}: {' '.join(c.shared)}" for c in comparisons],
    )


def _section(c: Comparison):
    from archlab.report import charts, html

    groups = [
        Group(v.label, v.ok, [run.path.parent for run in v.runs if run.status == "ok"], len(v.runs)) for v in c.variants
    ]
    decode = "latency/decode_ms_per_token_p50"
    bytes_at, decode_at = c.measured_context("cache/bytes_at"), c.measured_context(decode)
    loss = {"y_entry": "quality/val_loss", "y": "validation loss, nats a token", "lower_is_better": True}
    figures = [
        charts.curves(groups, "train/loss", "training loss: mean and range over seeds", "nats a token"),
        charts.quality_against(
            groups, f"cache/bytes_at/{bytes_at}", title="loss against cache", x=f"bytes at {bytes_at} tokens", **loss
        ),
        charts.quality_against(
            groups, f"{decode}/{decode_at}", title="loss against latency", x=f"ms at {decode_at} tokens", **loss
        ),
        charts.against_context(groups, "cache/bytes_at", "cache of one sequence", "bytes"),
        charts.against_context(
            groups, decode, "decode step (dashes: the machine's limit)", "ms", "latency/decode_limit_ms"
        ),
        *charts.slices(groups),
        *(charts.curves(groups, entry, entry.removeprefix("model/"), "") for entry in metrics(groups)),
    ]
    return html.Section(c.title, about=" ".join(c.shared), tables=[("", rows(c))], figures=figures, notes=c.notes)


def _write_csv(path: Path, comparisons: Sequence[Comparison]) -> None:
    """A row for every variant: its counts, and mean and standard deviation over seeds of every number on record."""
    variants = [(c, v) for c in comparisons for v in c.variants]
    keys = sorted({key for _, v in variants for e in v.ok for key, x in e.items() if _is_number(x)} - {"seed"})
    statuses = sorted({run.status for _, v in variants for run in v.runs} | {"ok"})
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(
            [
                "variant",
                "data/fingerprint",
                *(f"n_{s}" for s in statuses),
                *(f"{k}{m}" for k in keys for m in ("", "/sd")),
            ]
        )
        for c, v in variants:
            figures = (x for key in keys for x in (v.mean(key), v.deviation(key)))
            table.writerow([records.as_text(v.label), c.fingerprint, *(v.count(s) for s in statuses), *figures])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _markdown(table: list[list[str]]) -> str:
    header, *body = table
    lines = [header, ["---"] * 2 + ["---:"] * (len(header) - 2), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
