"""What a context costs: the bytes of a cache and the milliseconds of a decode step, against the tokens of context.

These two depend on a variant's shape alone, not on what it has learned: one run of each is enough.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from archlab.measure.units import contexts, human_bytes, human_context
from archlab.report.figure import DPI, SUFFIXES, short_names, styles

if TYPE_CHECKING:
    from archlab.report.comparison import Comparison, Variant

PANELS = {
    "cache/bytes_at": "cache of one sequence",
    "latency/decode_ms_per_token_p50": "decode step, ms (points: the machine's limit)",
}
LIMIT = "latency/decode_limit_ms"
LINES = ("-", "--", ":", "-.")


def draw(c: "Comparison", stem: Path) -> list[Path]:
    """Write `stem`.png and .svg; returns them, or nothing where there is no curve of two contexts."""
    panels = [key for key in PANELS if any(len(_points(v, key)) > 1 for v in c.variants)]
    if not panels:
        return []
    with matplotlib.rc_context({"svg.hashsalt": "archlab", "font.size": 10}):
        figure = Figure(figsize=(5.2 * len(panels) + 1.6, 5), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for ax, key in zip(axes, panels, strict=True):
            _plot(ax, key, c)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9)
        files = [stem.with_name(stem.name + suffix) for suffix in SUFFIXES]
        for file in files:
            figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def _points(variant: "Variant", key: str) -> list[tuple[int, float]]:
    """(context, mean over runs), ascending."""
    found = {n for entries in variant.ok for n in contexts(entries, key)}
    return [(n, y) for n in sorted(found) if (y := variant.mean(f"{key}/{n}"))]


def _plot(ax: Axes, key: str, c: "Comparison") -> None:
    colours, names = styles(c)[0], short_names(c)
    lines = itertools.cycle(LINES)
    ticks: set[int] = set()
    for variant in (v for v in c.variants if _points(v, key)):
        xs, ys = zip(*_points(variant, key), strict=True)
        ticks |= set(xs)
        colour = colours[variant.ok[0]["variant/attn"]]
        ax.plot(xs, ys, color=colour, ls=next(lines), marker="o", ms=3, lw=1.6, label=names[variant.label])
        if key.startswith("latency/") and (limit := _points(variant, LIMIT)):
            ax.plot(*zip(*limit, strict=True), color=colour, ls="", marker=".", ms=4, alpha=0.6)
    ax.set(xscale="log", yscale="log", xlabel="context, tokens", title=PANELS[key])
    ax.xaxis.set_major_locator(FixedLocator(_apart(sorted(ticks))))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: human_context(round(x))))
    ax.yaxis.set_major_locator(LogLocator(base=4 if key.startswith("cache/") else 2, numticks=12))
    is_bytes = key.startswith("cache/")
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: human_bytes(y) if is_bytes else f"{y:.3g}"))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def _apart(ticks: Sequence[int]) -> list[int]:
    """Those that are at least twice the one before."""
    kept: list[int] = []
    for tick in ticks:
        if not kept or tick >= 2 * kept[-1]:
            kept.append(tick)
    return kept
