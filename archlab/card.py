"""What a person sees of a run: the bar while it trains, the card at its end. Nothing is computed here but units."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

Record = Mapping[str, Any]

CARD_COLUMNS = 80
PLAIN_LINE_EVERY_S = 10.0
"""Where there is no terminal, a line of progress is printed so often."""


def human_bytes(n: float) -> str:
    """3 significant digits in B, KiB, MiB, GiB or TiB."""
    return _scaled(n, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def human_count(n: float) -> str:
    """3 significant digits in units, thousands (k), millions (M), billions (B) or trillions (T)."""
    return _scaled(n, 1000, ("", "k", "M", "B", "T")).replace(" ", "")


def human_figure(x: float) -> str:
    """3 significant digits, or all those before the point."""
    return f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"


def human_context(tokens: int) -> str:
    """1024 -> 1k, 2**20 -> 1M; what is no multiple stays a number."""
    for size, unit in ((1 << 20, "M"), (1 << 10, "k")):
        if tokens % size == 0:
            return f"{tokens // size}{unit}"
    return str(tokens)


def _scaled(n: float, base: int, units: Sequence[str]) -> str:
    power = 0 if n < base else min(int(math.log(n, base) + 1e-9), len(units) - 1)
    value = n / base**power
    return f"{value:.{0 if power == 0 else max(0, 2 - int(math.log10(value)))}f} {units[power]}"


def contexts(record: Record, prefix: str) -> list[int]:
    """The contexts, ascending, for which a record has `<prefix>/<context>`."""
    found = (key.removeprefix(f"{prefix}/") for key in record if key.startswith(f"{prefix}/"))
    return sorted(int(context) for context in found if context.isdecimal())


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
    return [f"{total}, {active} active at a token; {', '.join(parts)}"]


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
    verdict = "yes" if r["equivalence/passed"] else "[red]NO[/]"
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


class Reporter:
    """What a running job tells a person: stages as lines, training as a bar in a terminal, else as a line now and then.

    A cell of a sweep says no stages; a quiet one, of several side by side that would write over each other, nothing.
    `appendix` holds lines for the end, behind the card.
    """

    def __init__(self, console: Console, steps: int, *, stages: bool = True, quiet: bool = False):
        self.console, self.steps, self.stages, self.quiet = console, steps, stages, quiet
        self.appendix: list[str] = []
        self.bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
            disable=quiet or not console.is_terminal,
        )
        self.task = self.bar.add_task("training", total=steps, figures="")
        self.first: tuple[int, float] | None = None
        self.said_at = -math.inf

    def stage(self, text: str) -> None:
        """Say what begins now."""
        self.bar.stop()
        if self.stages and not self.quiet:
            self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """See `archlab.train.Progress`."""
        figures = f"loss {loss:.3f}, {human_count(tokens_per_second)} tokens/s"
        self.bar.start()
        self.bar.update(self.task, completed=step, figures=figures)
        now = time.perf_counter()
        self.first = self.first or (step, now)
        due = step == self.steps or now - self.said_at >= PLAIN_LINE_EVERY_S
        if self.quiet or self.console.is_terminal or not due:
            return
        self.said_at, done = now, step - self.first[0]
        left = f", {(now - self.first[1]) / done * (self.steps - step):.0f} s left" if done else ""
        self.console.print(f"step {step}/{self.steps}: {figures}{left}", highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.bar.stop()
