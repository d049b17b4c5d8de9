"""What a person sees of a run: the bar while it trains, the card at its end. Nothing is computed here but units."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from archlab.measure.units import contexts, human_bytes, human_context, human_count, human_figure

Record = Mapping[str, Any]

CARD_COLUMNS = 80


def card(record: Record, where: str) -> RenderableType:
    """A record on one page of 80 columns. `where` says in which file the whole of it stands."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    for name, lines in (
        ("parameters", _parameters(record)),
        ("forward pass", _flops(record)),
        ("training", _training(record)),
        ("quality", _quality(record)),
        ("cache", _cache(record)),
        ("cached = full", _gate(record)),
    ):
        if lines:
            grid.add_row(name, "\n".join(lines))
    parts = [grid, _latency(record)] if "latency/batch" in record else [grid]
    title = Text(f"{record['variant/name']} seed {record['seed']}: {record['status']}", style="bold")
    return Panel(Group(*parts), title=title, subtitle=Text(where), width=CARD_COLUMNS)


def _parameters(r: Record) -> list[str]:
    if "params/total" not in r:
        return []
    total, active = human_count(r["params/total"]), human_count(r["params/active"])
    parts = [f"{name} {human_count(r[f'params/{name}'])}" for name in ("attention", "ffn")]
    lines = [f"{total}, {active} active at a token; {', '.join(parts)}"]
    return lines + ([f"fixed, whatever d_model: {fixed}"] if (fixed := r.get("variant/fixed_widths")) else [])


def _flops(r: Record) -> list[str]:
    if "flops/forward_per_token" not in r:
        return []
    return [f"{human_count(r['flops/forward_per_token'])} FLOPs a token"]


def _training(r: Record) -> list[str]:
    if not r.get("data/train_tokens"):
        return []
    line = f"{human_count(r['data/train_tokens'])} tokens"
    if r.get("train/tokens_per_second"):
        line += f" at {human_count(r['train/tokens_per_second'])} tokens/s"
    if r.get("train/peak_memory_bytes"):
        line += f", {human_bytes(r['train/peak_memory_bytes'])} of memory at the peak"
    return [line]


def _quality(r: Record) -> list[str]:
    lines = []
    for split in ("val", "test"):
        if r.get(f"quality/{split}_loss") is None:
            continue
        line = f"{split} loss {r[f'quality/{split}_loss']:.4f} nats a token"
        if f"quality/{split}_bits_per_byte" in r:
            line += f", {r[f'quality/{split}_bits_per_byte']:.4f} bits a byte"
        if f"quality/{split}_accuracy" in r:
            line += f", accuracy {r[f'quality/{split}_accuracy']:.1%}"
        lines.append(line)
    return lines


def _cache(r: Record) -> list[str]:
    if "cache/bytes_per_token_stored" not in r:
        return []
    lines = [f"{r['cache/bytes_per_token_stored']:,.0f} B a token and {human_bytes(r['cache/bytes_constant'])} once"]
    at = contexts(r, "cache/bytes_at")
    rows = {"at": [f"{human_context(c)} tokens" for c in at]}
    for name, key in (("stored", "cache/bytes_at"), ("read a step", "cache/read_bytes_at")):
        rows[name] = [human_bytes(r[f"{key}/{c}"]) for c in at]
    return lines + [name.ljust(11) + "".join(cell.rjust(12) for cell in cells) for name, cells in rows.items()]


def _gate(r: Record) -> list[str]:
    if "equivalence/passed" not in r:
        return []
    verdict = "yes" if r["equivalence/passed"] else f"[red]NO: {r['equivalence/failed_checks']}[/]"
    error, allowed = r["equivalence/max_abs_error"], r["equivalence/tolerance"]
    return [f"{verdict}: logits differ by {_figure(error)} at most, {_figure(allowed)} is allowed"]


def _latency(r: Record) -> Table:
    table = Table(title=f"latency, batch {r['latency/batch']}, {r['latency/dtype']}", title_justify="left", box=None)
    for header in ("context", "prefill ms p50", "p90", "decode ms/token p50", "p90", "limit ms"):
        table.add_column(header, justify="right")
    for c in contexts(r, "latency/decode_ms_per_token_p50"):
        names = ("prefill_ms_p50", "prefill_ms_p90", "decode_ms_per_token_p50", "decode_ms_per_token_p90")
        figures = [r.get(f"latency/{name}/{c}") for name in (*names, "decode_limit_ms")]
        table.add_row(human_context(c), *map(_figure, figures))
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else human_figure(value)
