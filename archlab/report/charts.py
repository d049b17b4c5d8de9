"""The interactive charts of a report, each made from groups of records alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from archlab.measure.units import contexts, human_context
from archlab.report.group import Group, Style, styles
from archlab.study.analysis import Row
from archlab.study.ladder import Fit
from archlab.study.statistics import mean_interval
from archlab.study.tune import Point, best

MOST_POINTS = 150
"""Points of a curve that is drawn: more would not be seen, and a hundred runs shall open in a second."""

BAND_OPACITY = 0.15


def figure(title: str, x: str, y: str, *, log_x: bool = False, log_y: bool = False) -> go.Figure:
    """An empty chart with its axes."""
    found = go.Figure()
    found.update_layout(
        title={"text": title, "x": 0, "xanchor": "left"},
        xaxis={"title": x, "type": "log" if log_x else "linear"},
        yaxis={"title": y, "type": "log" if log_y else "linear"},
        margin={"l": 60, "r": 20, "t": 50, "b": 50},
        legend={"orientation": "h", "y": -0.25},
        hovermode="closest",
    )
    return found


def curves(groups: Sequence[Group], entry: str, title: str, y: str) -> go.Figure | None:
    """What was logged while training, a line for the mean over seeds and a band from the least to the largest."""
    found, drawn = figure(title, "optimizer step", y), styles([g.label for g in groups])
    for group in groups:
        by_step = _by_step(group, entry)
        if len(by_step) < 2:
            continue
        steps, style = list(by_step), drawn[group.label]
        low, high = [min(v) for v in by_step.values()], [max(v) for v in by_step.values()]
        if any(len(v) > 1 for v in by_step.values()):
            found.add_trace(
                go.Scatter(
                    x=[*steps, *reversed(steps)],
                    y=[*high, *reversed(low)],
                    fill="toself",
                    fillcolor=_faint(style.colour),
                    line={"width": 0},
                    hoverinfo="skip",
                    showlegend=False,
                    legendgroup=group.label,
                )
            )
        found.add_trace(_line(group.label, style, steps, [statistics.fmean(v) for v in by_step.values()]))
    return found if found.data else None


def _by_step(group: Group, entry: str) -> dict[int, list[float]]:
    """Values by step over all seeds, thinned; each is the mean of the rows that it stands for."""
    logs = [[(row["step"], row[entry]) for row in rows if row.get(entry) is not None] for rows in group.logs]
    longest = max((len(rows) for rows in logs), default=0)
    stride = max(1, -(-longest // MOST_POINTS))
    found: dict[int, list[float]] = {}
    for rows in logs:
        for i in range(0, len(rows), stride):
            part = rows[i : i + stride]
            found.setdefault(part[0][0], []).append(statistics.fmean(value for _, value in part))
    return dict(sorted(found.items()))


def quality_against(
    groups: Sequence[Group], x_entry: str, y_entry: str, *, title: str, x: str, y: str, lower_is_better: bool
) -> go.Figure | None:
    """A point for each variant with its interval over seeds, and the front that none beats in both."""
    points = [(g, g.mean(x_entry), g.values(y_entry)) for g in groups]
    points = [(g, at, values) for g, at, values in points if at and values]
    if not points:
        return None
    found, drawn = figure(title, x, y, log_x=True), styles([g.label for g in groups])
    for group, at, values in points:
        e, style = mean_interval(values), drawn[group.label]
        found.add_trace(
            go.Scatter(
                x=[at],
                y=[e.mean],
                error_y={"type": "data", "array": [e.margin or 0], "visible": e.margin is not None},
                mode="markers+text",
                text=[group.label],
                textposition="top center",
                name=group.label,
                marker={"color": style.colour, "symbol": style.symbol, "size": 10},
                showlegend=False,
            )
        )
    front = pareto([(at, statistics.fmean(v)) for _, at, v in points], lower_is_better=lower_is_better)
    found.add_trace(
        go.Scatter(
            x=[p[0] for p in front],
            y=[p[1] for p in front],
            mode="lines",
            line={"dash": "dot", "width": 1, "color": "#888888"},
            name="Pareto front",
            hoverinfo="skip",
        )
    )
    return found


def pareto(points: Sequence[tuple[float, float]], *, lower_is_better: bool) -> list[tuple[float, float]]:
    """Those that no other beats in both (the smaller x is always the better), by x."""
    sign, front = (1 if lower_is_better else -1), []
    for x, y in sorted(points, key=lambda p: (p[0], sign * p[1])):
        if not front or sign * y < sign * front[-1][1]:
            front.append((x, y))
    return front


def against_context(
    groups: Sequence[Group], prefix: str, title: str, y: str, limit: str | None = None
) -> go.Figure | None:
    """A line for each variant over the contexts at which it was measured; the machine's limit as points."""
    found, drawn = figure(title, "context, tokens", y, log_x=True, log_y=True), styles([g.label for g in groups])
    ticks: set[int] = set()
    for group in groups:
        at = sorted({n for record in group.records for n in contexts(record, prefix)})
        values = {n: v for n in at if (v := group.mean(f"{prefix}/{n}"))}
        if len(values) < 2:
            continue
        ticks |= set(values)
        style = drawn[group.label]
        found.add_trace(_line(group.label, style, list(values), list(values.values()), markers=True))
        if limit is not None:
            limits = {n: v for n in values if (v := group.mean(f"{limit}/{n}"))}
            found.add_trace(
                go.Scatter(
                    x=list(limits),
                    y=list(limits.values()),
                    mode="markers",
                    marker={"color": style.colour, "size": 5, "symbol": "line-ew-open"},
                    name=f"{group.label}: limit of this machine",
                    legendgroup=group.label,
                    showlegend=False,
                )
            )
    if not found.data:
        return None
    found.update_xaxes(tickvals=sorted(ticks), ticktext=[human_context(n) for n in sorted(ticks)])
    return found


def slices(groups: Sequence[Group]) -> list[go.Figure]:
    """Accuracy by slice, a heat map for each kind of slice: a row a variant."""
    prefix = "quality/test_accuracy_at/"
    keys = dict.fromkeys(k for g in groups for r in g.records for k in r if k.startswith(prefix))
    kinds: dict[str, list[int]] = {}
    for key in keys:
        kind, _, value = key.removeprefix(prefix).rpartition("/")
        kinds.setdefault(kind, []).append(int(value))
    found = []
    for kind, unsorted in kinds.items():
        values = sorted(set(unsorted))
        rows = [g for g in groups if any(g.values(f"{prefix}{kind}/{v}") for v in values)]
        chart = figure(f"test accuracy by {kind}", kind.replace("_", " "), "")
        chart.add_trace(
            go.Heatmap(
                x=[str(v) for v in values],
                y=[g.label for g in rows],
                z=[[g.mean(f"{prefix}{kind}/{v}") for v in values] for g in rows],
                zmin=0,
                zmax=1,
                colorscale="Viridis",
                hovertemplate="%{y}, %{x}: %{z:.1%}<extra></extra>",
            )
        )
        chart.update_layout(yaxis={"type": "category"}, xaxis={"type": "category"})
        found.append(chart)
    return found


def rates(points: Mapping[str, Sequence[Point]], *, title: str, by_accuracy: bool) -> go.Figure | None:
    """The tuning of each variant: validation loss, or accuracy, against the learning rate; the chosen one is marked."""
    y = "validation accuracy" if by_accuracy else "validation loss, nats a token"
    found, drawn = figure(title, "learning rate", y, log_x=True), styles(list(points))
    for label, curve in points.items():
        shown = [p for p in curve if (p.accuracy if by_accuracy else p.val_loss) is not None]
        if not shown:
            continue
        ys = [p.accuracy if by_accuracy else p.val_loss for p in shown]
        style, chosen = drawn[label], best(curve).lr
        trace = _line(label, style, [p.lr for p in shown], ys, markers=True)
        trace.marker = {
            "color": style.colour,
            "size": [13 if p.lr == chosen else 6 for p in shown],
            "symbol": ["circle" if p.n_ok == p.n_runs else "circle-open" for p in shown],
        }
        found.add_trace(trace)
    return found if found.data else None


def laws(fits: Mapping[str, Fit | None], rows: Mapping[str, Sequence[Row]], metric: str) -> go.Figure | None:
    """The sizes of each variant with their law; a size whose rate was not tuned inside its grid is hollow."""
    found, drawn = figure("loss against training FLOPs", "training FLOPs", metric, log_x=True), styles(list(rows))
    for variant, some in rows.items():
        if not some:
            continue
        style, law = drawn[variant], fits.get(variant)
        flops = [next(iter(r.values("flops/train_total").values())) for r in some]
        means = [statistics.fmean(r.values(metric).values()) for r in some]
        symbols = [style.symbol if r.curve and r.lr_is_inside else f"{style.symbol}-open" for r in some]
        marker = {"color": style.colour, "symbol": symbols, "size": 9}
        found.add_trace(go.Scatter(x=flops, y=means, mode="markers", name=variant, marker=marker))
        if law is not None:
            xs = [law.unit_flops * (max(flops) / law.unit_flops) ** (i / 60) for i in range(61)]
            found.add_trace(_line(f"{variant}: law", style, xs, [law.loss(x) for x in xs]))
    return found if found.data else None


def _line(label: str, style: Style, xs: Sequence, ys: Sequence, *, markers: bool = False) -> go.Scatter:
    return go.Scatter(
        x=list(xs),
        y=list(ys),
        mode="lines+markers" if markers else "lines",
        name=label,
        legendgroup=label,
        line={"color": style.colour, "dash": style.dash, "width": 2},
        marker={"color": style.colour, "symbol": style.symbol, "size": 6},
    )


def _faint(colour: str) -> str:
    r, g, b = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({r},{g},{b},{BAND_OPACITY})"
