"""The picture of a comparison: loss against cache bytes, and loss against decode latency."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from archlab.measure.units import human_bytes, human_context

if TYPE_CHECKING:
    from archlab.report.comparison import Comparison, Variant

LOSS = "quality/val_loss"
SUFFIXES = (".png", ".svg")
DPI = 160
MARKERS = "osD^vP*X<>"
"""One for each FFN; the colour is the attention's."""

MOST_LABELS = 40
"""Up to so many points carry their names; more are told apart by a legend."""

MOST_RINGS = 60
"""So many distances from a point are tried for its name."""

POINT_PT = 9
"""Room that a point takes, in points of 1/72 inch, as its name's distance is."""


@dataclass(frozen=True)
class Panel:
    """One of the two plots: which entry of the records is its x axis, and how that reads."""

    key: str
    title: str
    is_bytes: bool = False

    def points(self, c: "Comparison") -> "list[Point]":
        """The variants that have both figures."""
        found = ((v, v.mean(self.key), v.mean(LOSS)) for v in c.variants)
        return [Point(v, x, y) for v, x, y in found if x and y is not None]

    def tick(self, x: float, _: int) -> str:
        return human_bytes(x).replace(".00", "").replace(".0", "") if self.is_bytes else f"{x:.3g}"


@dataclass(frozen=True)
class Point:
    """A variant in one panel: its means over seeds."""

    variant: "Variant"
    x: float
    y: float

    @property
    def range(self) -> tuple[float, float]:
        """The least and the largest loss of its seeds."""
        losses = self.variant.values(LOSS)
        return min(losses), max(losses)


def draw(c: "Comparison", stem: Path) -> list[Path]:
    """Write `stem`.png and .svg; returns them, or nothing where no variant has both a loss and a cache."""
    cache, decode = c.measured_context("cache/bytes_at"), c.measured_context("latency/decode_ms_per_token_p50")
    panels = [
        Panel(f"cache/bytes_at/{cache}", f"cache at {human_context(cache or 0)} tokens, bytes", is_bytes=True),
        Panel(
            f"latency/decode_ms_per_token_p50/{decode}", f"decode at {human_context(decode or 0)} tokens, ms a token"
        ),
    ]
    panels = [panel for panel in panels if panel.points(c)]
    if not panels:
        return []
    n = max(len(panel.points(c)) for panel in panels)
    with matplotlib.rc_context({"svg.hashsalt": "archlab", "font.size": 10}):
        figure = Figure(figsize=(6 * len(panels), 4.5 + max(0, n - 10) / 10), dpi=DPI, layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for ax, panel in zip(axes, panels, strict=True):
            _plot(ax, panel, c)
        axes[0].set_ylabel("validation loss, nats a token")
        figure.suptitle(f"{c.title}: the lower left is better")
        if n > MOST_LABELS:
            _legend(figure, c)
        FigureCanvasAgg(figure).draw()  # lays out, which decides where a point lies
        for ax, panel in zip(axes, panels, strict=True):
            if n <= MOST_LABELS:
                label(ax, panel.points(c), short_names(c))
        files = [stem.with_name(stem.name + suffix) for suffix in SUFFIXES]
        for file in files:
            figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def _plot(ax: Axes, panel: Panel, c: "Comparison") -> None:
    points, (colours, markers) = panel.points(c), styles(c)
    for p in points:
        (low, high), first = p.range, p.variant.ok[0]
        colour, marker = colours[first["variant/attn"]], markers[first["variant/ffn"]]
        ax.errorbar(p.x, p.y, [[p.y - low], [high - p.y]], fmt=marker, color=colour, ms=7, elinewidth=1)
    xs = [p.x for p in points]
    if max(xs) > 4 * min(xs):
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_locator(LogLocator(base=4 if panel.is_bytes else 2, numticks=8))
        ax.xaxis.set_minor_locator(NullLocator())
    else:
        ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(FuncFormatter(panel.tick))
    ax.set_xlabel(panel.title)
    ax.margins(0.15)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def styles(c: "Comparison") -> tuple[Mapping[str, tuple], Mapping[str, str]]:
    """The colour of each attention and the marker of each FFN."""
    attns, ffns = (dict.fromkeys(entries[f"variant/{group}"] for entries in c.records) for group in ("attn", "ffn"))
    dark_first = [*matplotlib.color_sequences["tab20"][::2], *matplotlib.color_sequences["tab20"][1::2]]
    colours = dict(zip(attns, itertools.cycle(dark_first), strict=False))
    return colours, dict(zip(ffns, itertools.cycle(MARKERS), strict=False))


def _legend(figure: Figure, c: "Comparison") -> None:
    colours, markers = styles(c)
    handles = [Line2D([], [], ls="", marker="o", color=colour, label=name) for name, colour in colours.items()]
    handles += [Line2D([], [], ls="", marker=marker, color="0.4", label=name) for name, marker in markers.items()]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=9)


def short_names(c: "Comparison") -> dict[str, str]:
    """By label, what a point is called: without the FFN where all have the same."""
    ffns = {entries["variant/ffn"] for entries in c.records}
    shared = f"+{ffns.pop()}" if len(ffns) == 1 else ""
    return {v.label: v.label.replace(shared, "", 1) if shared else v.label for v in c.variants}


def label(ax: Axes, points: Sequence[Point], names: Mapping[str, str]) -> None:
    """Write each name beside its point, as near as it covers neither another name nor a point with its range.

    The layout must be done: the figure drawn once.
    """
    px = ax.get_figure().dpi / 72
    places = ax.transData.transform([(p.x, p.y) for p in points])
    taken = [_point_box(ax, p, POINT_PT * px) for p in points]
    for p, (x, y) in zip(points, places, strict=True):
        text = ax.annotate(
            names[p.variant.label],
            (p.x, p.y),
            xytext=(0, 0),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=8,
            arrowprops={"arrowstyle": "-", "lw": 0.5, "color": "0.5", "shrinkA": 0, "shrinkB": 4},
        )
        size = text.get_window_extent()
        tried = ((offset, _box(x, y, offset, size)) for offset in _offsets(size, POINT_PT * px))
        # Where a picture is too full for a name, it lies on its point.
        offset, box = next((pair for pair in tried if _free(pair[1], taken, ax.bbox)), ((0.0, 0.0), size))
        text.set_position((offset[0] / px, offset[1] / px))
        taken.append(box)


def _point_box(ax: Axes, p: Point, width: float) -> Bbox:
    (x, low), (_, high) = ax.transData.transform([(p.x, loss) for loss in p.range])
    return Bbox.from_extents(x - width / 2, low - width / 2, x + width / 2, high + width / 2)


def _offsets(size: Bbox, step: float) -> Iterator[tuple[float, float]]:
    """From a point to the middle of its name: around it, ever further."""
    for ring, turn in itertools.product(range(1, MOST_RINGS), range(16)):
        angle, gap = turn * math.pi / 8, step * (0.5 + 0.4 * ring)
        yield math.cos(angle) * (size.width / 2 + gap), math.sin(angle) * (size.height / 2 + gap)


def _box(x: float, y: float, offset: tuple[float, float], size: Bbox) -> Bbox:
    left, bottom = x + offset[0] - size.width / 2, y + offset[1] - size.height / 2
    return Bbox.from_bounds(left, bottom, size.width, size.height)


def _free(box: Bbox, taken: Sequence[Bbox], within: Bbox) -> bool:
    inside = within.x0 <= box.x0 and box.x1 <= within.x1 and within.y0 <= box.y0 and box.y1 <= within.y1
    return inside and not box.count_overlaps(taken)
