"""The picture of a comparison: loss against cache bytes, and loss against decode latency."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from matplotlib.transforms import Bbox

from archlab.card import human_bytes, human_context

if TYPE_CHECKING:
    from archlab.report import Comparison, Variant

LOSS = "quality/val_loss"
SUFFIXES = (".png", ".svg")
MARKERS = "osD^vP*X<>"
"""One for each FFN; the colour is the attention's."""

MOST_LABELS = 14
"""Up to so many points carry their names; more are told apart by the legend alone."""

POINT_PX = 14
"""Room that a point takes, in pixels at the figure's own resolution."""


@dataclass(frozen=True)
class Point:
    """A variant in one panel: its mean, and the range over seeds."""

    variant: "Variant"
    x: float
    y: float

    @property
    def spread(self) -> tuple[float, float]:
        losses = self.variant.values(LOSS)
        return self.y - min(losses), max(losses) - self.y


def draw(c: "Comparison", stem: Path) -> list[Path]:
    """Write `stem`.png and .svg; returns them, or nothing where no variant has both a loss and a cache."""
    cache, decode = c.measured_context("cache/bytes_at"), c.measured_context("latency/decode_ms_per_token_p50")
    panels = {
        f"cache/bytes_at/{cache}": ("cache at {} tokens", cache, lambda x, _: human_bytes(x)),
        f"latency/decode_ms_per_token_p50/{decode}": (
            "decode at {} tokens, ms a token",
            decode,
            lambda x, _: f"{x:.3g}",
        ),
    }
    points = {key: _points(c, key) for key in panels}
    if not any(points.values()):
        return []
    # Text stays text in the SVG, and the file does not change with the day.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "archlab", "font.size": 10}):
        figure = Figure(figsize=(11, 5), layout="constrained")
        for axes, (key, (title, context, form)) in zip(figure.subplots(1, 2, sharey=True), panels.items(), strict=True):
            _panel(axes, points[key], _styles(c), form)
            axes.set_xlabel(title.format("-" if context is None else human_context(context)))
        figure.axes[0].set_ylabel("validation loss, nats a token")
        figure.suptitle(f"{c.title}: nearer to the lower left is better")
        _legend(figure, c)
        for axes, key in zip(figure.axes, panels, strict=True):
            if len(points[key]) <= MOST_LABELS:
                label(axes, points[key])
        files = [stem.with_name(stem.name + suffix) for suffix in SUFFIXES]
        for file in files:
            figure.savefig(file, dpi=160, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def _points(c: "Comparison", key: str) -> list[Point]:
    found = [Point(v, x, y) for v in c.variants if (x := v.mean(key)) is not None and (y := v.mean(LOSS)) is not None]
    return [p for p in found if p.x > 0]


def _styles(c: "Comparison") -> Callable[["Variant"], tuple]:
    """Colour and marker of a variant."""
    colours = dict(zip(_names(c, "attn"), itertools.cycle(matplotlib.color_sequences["tab20"]), strict=False))
    markers = dict(zip(_names(c, "ffn"), itertools.cycle(MARKERS), strict=False))
    return lambda v: (colours[v.ok[0]["variant/attn"]], markers[v.ok[0]["variant/ffn"]])


def _names(c: "Comparison", group: str) -> list[str]:
    return list(dict.fromkeys(entries[f"variant/{group}"] for entries in c.records))


def _panel(axes: Axes, points: Sequence[Point], style: Callable[["Variant"], tuple], form: Callable) -> None:
    for p in points:
        colour, marker = style(p.variant)
        low, high = p.spread
        axes.errorbar(p.x, p.y, [[low], [high]], fmt=marker, color=colour, ms=8, mec="white", mew=0.6, elinewidth=1)
    xs = [p.x for p in points] or [1]
    if max(xs) > 4 * min(xs):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(base=10 if max(xs) > 30 * min(xs) else 2))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(form))
    axes.margins(0.15)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, c: "Comparison") -> None:
    """What a colour and what a marker means."""
    style = _styles(c)
    first = {group: {e[f"variant/{group}"]: v for v in c.variants for e in v.ok[:1]} for group in ("attn", "ffn")}
    handles = [Line2D([], [], ls="", marker="o", color=style(v)[0], label=name) for name, v in first["attn"].items()]
    handles += [Line2D([], [], ls="", marker=style(v)[1], color="0.4", label=name) for name, v in first["ffn"].items()]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9)


def label(axes: Axes, points: Sequence[Point]) -> None:
    """Write each variant's name beside its point, as near as it covers neither another name nor a point."""
    figure = axes.get_figure()
    FigureCanvasAgg(figure).draw()  # the layout, which decides where a point lies
    places = axes.transData.transform([(p.x, p.y) for p in points])
    taken = [Bbox.from_bounds(x - POINT_PX / 2, y - POINT_PX / 2, POINT_PX, POINT_PX) for x, y in places]
    for p, (x, y) in zip(points, places, strict=True):
        text = axes.annotate(
            p.variant.label,
            (p.x, p.y),
            xytext=(0, 0),
            textcoords="offset pixels",
            ha="center",
            va="center",
            fontsize=8,
            arrowprops={"arrowstyle": "-", "lw": 0.5, "color": "0.6", "shrinkA": 0, "shrinkB": 4},
        )
        size = text.get_window_extent()
        offset = next((o for o in _offsets(size) if _free(_box(x, y, o, size), taken, axes.bbox)), next(_offsets(size)))
        text.set_position(offset)
        taken.append(_box(x, y, offset, size))


def _offsets(size: Bbox) -> Iterator[tuple[float, float]]:
    """From a point to the middle of its name: around it, ever further."""
    for gap, turn in itertools.product(range(10, 150, 10), range(16)):
        angle = turn * math.pi / 8
        yield math.cos(angle) * (size.width / 2 + gap), math.sin(angle) * (size.height / 2 + gap)


def _box(x: float, y: float, offset: tuple[float, float], size: Bbox) -> Bbox:
    left, bottom = x + offset[0] - size.width / 2, y + offset[1] - size.height / 2
    return Bbox.from_bounds(left, bottom, size.width, size.height)


def _free(box: Bbox, taken: Sequence[Bbox], within: Bbox) -> bool:
    inside = within.x0 <= box.x0 and box.x1 <= within.x1 and within.y0 <= box.y0 and box.y1 <= within.y1
    return inside and not box.count_overlaps(taken)
