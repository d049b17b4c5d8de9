"""The files of a report: CSV, Markdown and the pictures."""

import csv
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from archlab.report.comparison import CONTEXT, Comparison, Run, compare
from archlab.report.table import closing_lines, rows


def write(runs: Sequence[Run], out: Path, context: int = CONTEXT) -> list[Path]:
    """Write report.csv, report.md and the pictures; returns the files."""
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
    return written


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
            table.writerow([v.label, c.fingerprint, *(v.count(s) for s in statuses), *figures])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _markdown(table: list[list[str]]) -> str:
    header, *body = table
    lines = [header, ["---"] * 2 + ["---:"] * (len(header) - 2), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
