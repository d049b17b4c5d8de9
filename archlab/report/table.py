"""The table of a comparison in a terminal: a row for each variant, and what a reader must know of the rows."""

from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from archlab.measure.units import human_bytes, human_context, human_count, human_figure
from archlab.report.comparison import CONTEXT, Comparison, Run, Variant, compare, newest

LEFT_OUT = ("bits/byte", "accuracy", "active", "prefill")
WIDE = 120
"""A terminal of fewer columns is spared the headers that begin so."""

Cell = Callable[[Variant], str]


def columns(c: Comparison, narrow: bool) -> dict[str, Cell]:
    """By header, how a variant fills it; only those that some variant has a figure for."""
    stored, read_at = (c.measured_context(f"cache/{name}") for name in ("bytes_at", "read_bytes_at"))
    prefill, decode = (c.measured_context(f"latency/{n}_p50") for n in ("prefill_ms", "decode_ms_per_token"))
    figures = {
        "val loss": ("quality/val_loss", "{:.4f}".format),
        "bits/byte": ("quality/val_bits_per_byte", "{:.4f}".format),
        "accuracy": ("quality/val_accuracy", "{:.1%}".format),
        "params": ("params/total", human_count),
        "active": ("params/active", human_count),
        "cache B/token": ("cache/bytes_per_token_stored", "{:,.0f}".format),
        f"cache at {_at(stored)}": (f"cache/bytes_at/{stored}", human_bytes),
        f"read at {_at(read_at)}": (f"cache/read_bytes_at/{read_at}", human_bytes),
        f"prefill ms at {_at(prefill)}": (f"latency/prefill_ms_p50/{prefill}", human_figure),
        f"decode ms at {_at(decode)}": (f"latency/decode_ms_per_token_p50/{decode}", human_figure),
    }
    cells: dict[str, Cell] = {"variant": lambda v: v.label, "ok" if narrow else "runs": lambda v: _counts(v, narrow)}
    if c.ranks:
        cells["rank"] = lambda v: c.ranks.get(v.label, "-")
    for header, (key, text) in figures.items():
        if any(key in entries for entries in c.records) and not (narrow and header.startswith(LEFT_OUT)):
            cells[header] = lambda v, key=key, text=text: _figure(v, key, text)
    return cells


def _at(context: int | None) -> str:
    return "-" if context is None else human_context(context)


def _counts(variant: Variant, narrow: bool) -> str:
    if narrow:
        return f"{len(variant.ok)}/{len(variant.runs)}"
    statuses = ("ok", *sorted({run.status for run in variant.runs} - {"ok"}))
    return ", ".join(f"{n} {status}" for status in statuses if (n := variant.count(status)))


def _figure(variant: Variant, key: str, text: Callable[[float], str]) -> str:
    mean, deviation = variant.mean(key), variant.deviation(key)
    if mean is None:
        return "-"
    return f"{text(mean)}±{deviation:.4f}" if deviation is not None and key == "quality/val_loss" else text(mean)


def rows(c: Comparison, *, narrow: bool = False) -> list[list[str]]:
    """The header, then a row for every variant: ranked ones first, in order."""
    cells = columns(c, narrow)
    ranked = sorted((v for v in c.variants if v.label in c.ranks), key=lambda v: v.mean("quality/val_loss"))
    others = [v for v in c.variants if v.label not in c.ranks]
    return [list(cells), *([cell(v) for cell in cells.values()] for v in (*ranked, *others))]


def show(runs: Sequence[Run], console: Console, context: int = CONTEXT) -> None:
    """Print the tables, what must be known of them, and every run that did not end well."""
    for c in compare(runs, context):
        header, *body = rows(c, narrow=console.width < WIDE)
        console.print(c.title, style="bold", highlight=False)
        if c.shared:
            console.print(f"all with {' '.join(c.shared)}", highlight=False, markup=False, soft_wrap=True)
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for i, name in enumerate(header):
            stacked = name.replace(" at ", "\nat\N{NO-BREAK SPACE}").replace(" ", "\n")
            table.add_column(stacked, justify="right" if i else "left", no_wrap=i > 0, overflow="fold")
        for row in body:
            table.add_row(*row)
        console.print(table)
        for note in c.notes:
            console.print(f"  {note}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    for line in closing_lines(runs):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def closing_lines(runs: Sequence[Run]) -> list[str]:
    """What concerns all tables: other data, repeated runs, and each run that did not end well."""
    lines = []
    comparisons, repeated = compare(runs), len(runs) - len(newest(runs))
    if len(comparisons) > 1:
        lines.append(f"{len(comparisons)} data sets: figures of different data are no comparison, so each has a table")
    if repeated:
        lines.append(f"{repeated} of {len(runs)} runs repeat a variant and seed: only the last good one is counted")
    return lines + [run.fault for run in newest(runs) if run.status != "ok"]
