"""The picture of the zoo: cache bytes against context, and where one curve crosses another."""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from archlab.measure.units import human_bytes, human_context
from archlab.report.figure import DPI, SUFFIXES
from archlab.zoo.compare import Comparison, crossings
from archlab.zoo.models import LONGEST, PER_FIRST_TOKEN, PER_TOKEN, Model

CONTEXTS = [round(2 ** (i / 2)) for i in range(2 * 6, 2 * (LONGEST.bit_length() - 1) + 1)]
"""Tokens at which the curves are drawn: two points a doubling."""

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Of Okabe and Ito, told apart by colour-blind eyes too."""

LABEL_PT = 7


@dataclass(frozen=True)
class Curve:
    """The cache of one model, or of several whose caches are alike.

    Attributes:
        baseline_of: the model that is compared with it, where it is no model of the zoo.
    """

    models: Sequence[Model]
    baseline_of: Model | None = None

    @property
    def name(self) -> str:
        names = ", ".join(model.name for model in self.models)
        return f"{self.baseline_of.name}, {names}" if self.baseline_of else names

    @property
    def is_yours(self) -> bool:
        return not self.baseline_of and any(not model.published.sources for model in self.models)

    @property
    def kind(self) -> str:
        """The attentions of its layers, and whether some of them forget."""
        first = self.models[0]
        names = " + ".join(sorted({type(block.mixer).__name__ for block in first.lm.blocks}))
        return f"{names}, windowed" if first.entries[PER_FIRST_TOKEN] != first.entries[PER_TOKEN] else names

    def at(self, context: int) -> int:
        return self.models[0].cache_bytes(context)


def draw(models: Sequence[Model], comparisons: Sequence[Comparison], stem: Path) -> list[Path]:
    """Write `stem`.png and .svg; returns them."""
    crossed = [c for c in comparisons if crossings(c.model, c.baseline)]
    curves = [*_curves(models), *(Curve([c.baseline], c.model) for c in crossed)]
    kinds = Counter(curve.kind for curve in curves).most_common()
    colours = {kind: colour for (kind, _), colour in zip(kinds, itertools.cycle(COLOURS), strict=False)}
    with matplotlib.rc_context({"svg.hashsalt": "archlab", "font.size": 9}):
        figure = Figure(figsize=(11.5, 8), dpi=DPI)
        ax = figure.add_axes((0.07, 0.07, 0.65, 0.88))
        for curve in curves:
            ax.plot(
                CONTEXTS, [curve.at(n) for n in CONTEXTS], **{"color": colours[curve.kind]} | _style(curve, kinds[0][0])
            )
        _frame(ax)
        _mark(ax, curves, crossed)
        handles = [matplotlib.lines.Line2D([], [], color=colour, label=kind) for kind, colour in colours.items()]
        ax.legend(handles=handles, frameon=False, loc="upper left")
        FigureCanvasAgg(figure).draw()  # lays out, which decides where a curve ends
        _label(ax, curves, colours)
        files = [stem.with_name(stem.name + suffix) for suffix in SUFFIXES]
        for file in files:
            figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    return files


def _curves(models: Sequence[Model]) -> list[Curve]:
    alike: dict[tuple[int, ...], list[Model]] = {}
    for model in models:
        alike.setdefault(tuple(map(model.cache_bytes, CONTEXTS)), []).append(model)
    return [Curve(group) for group in alike.values()]


def _style(curve: Curve, common: str) -> dict[str, Any]:
    """The commonest kind recedes, a baseline is dashed, a configuration of one's own stands out."""
    if curve.is_yours:
        return {"lw": 3, "zorder": 2.5}
    if curve.baseline_of:
        return {"lw": 1.6, "ls": (0, (4, 3)), "color": "black"}
    return {"lw": 0.8, "alpha": 0.7} if curve.kind == common else {"lw": 1.6}


def _frame(ax: Axes) -> None:
    ax.set(xscale="log", yscale="log", xlim=(CONTEXTS[0], LONGEST), xlabel="context, tokens")
    ax.set_title("Cache of one sequence in bfloat16; circles: one curve crosses another", loc="left")
    ax.xaxis.set_major_locator(FixedLocator([1 << i for i in range(6, LONGEST.bit_length(), 2)]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: human_context(round(x))))
    ax.yaxis.set_major_locator(LogLocator(base=4, numticks=20))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: re.sub(r"\.0+(?= )", "", human_bytes(y))))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_minor_locator(NullLocator())
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)


def _mark(ax: Axes, curves: Sequence[Curve], crossed: Sequence[Comparison]) -> None:
    """A circle where two curves cross; where a model crosses its baseline, in words."""
    pairs = itertools.combinations([curve for curve in curves if not curve.baseline_of], 2)
    found = [(n, a.at(n)) for a, b in pairs for n in crossings(a.models[0], b.models[0]) if n >= CONTEXTS[0]]
    ax.scatter(*zip(*found, strict=True), s=14, facecolors="white", edgecolors="0.35", linewidths=0.8, zorder=3)
    for c in crossed:
        context = crossings(c.model, c.baseline)[-1]
        ax.plot(context, c.model.cache_bytes(context), "ko", ms=6, zorder=4)
        ax.annotate(
            f"{c.model.name} has less than\n{c.baseline.name}\nfrom {context:,} tokens on",
            (context, c.model.cache_bytes(context)),
            xytext=(150, -75),
            textcoords="offset points",
            arrowprops={"arrowstyle": "->", "lw": 1, "relpos": (0, 0.5), "shrinkB": 4},
        )


def _label(ax: Axes, curves: Sequence[Curve], colours: dict[str, str]) -> None:
    """Names behind the ends of the curves, moved apart where they would cover each other."""
    curves = sorted(curves, key=lambda curve: curve.at(LONGEST))
    ends = ax.transData.transform([(LONGEST, curve.at(LONGEST)) for curve in curves])[:, 1]
    line_px = LABEL_PT * DPI / 72
    places = spread(ends, 1.25 * line_px, ax.get_figure().bbox.height - line_px)
    line = {"arrowstyle": "-", "lw": 0.5, "relpos": (0, 0.5), "shrinkA": 0, "shrinkB": 0}
    for curve, place in zip(curves, places, strict=True):
        colour = "black" if curve.baseline_of else colours[curve.kind]
        ax.annotate(
            curve.name,
            (LONGEST, curve.at(LONGEST)),
            xytext=(1.05, ax.transAxes.inverted().transform((0, place))[1]),
            textcoords="axes fraction",
            va="center",
            fontsize=LABEL_PT,
            color=colour,
            weight="bold" if curve.is_yours else "normal",
            arrowprops=line | {"color": colour},
        )


def spread(wanted: Sequence[float], gap: float, top: float) -> list[float]:
    """The places up to `top` nearest to those wanted (ascending) that are at least `gap` apart: least squares, by
    pooling adjacent violators."""
    pools: list[tuple[float, int]] = []
    for i, place in enumerate(wanted):
        total, n = place - i * gap, 1
        while pools and pools[-1][0] / pools[-1][1] > total / n:
            total, n = total + pools[-1][0], n + pools.pop()[1]
        pools.append((total, n))
    slots = itertools.chain.from_iterable(itertools.repeat(total / n, n) for total, n in pools)
    return [min(slot, top - (len(wanted) - 1) * gap) + i * gap for i, slot in enumerate(slots)]
