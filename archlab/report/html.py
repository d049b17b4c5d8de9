"""`report.html`: one file that needs no network, with plotly's script inside. All text in it is escaped."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

TEMPLATE = "page.html.j2"


@dataclass
class Section:
    """A part of the page.

    Attributes:
        tables: (title, header and rows) each.
        figures: charts, drawn when they come into view.
        notes: what a reader must know of them.
    """

    title: str
    about: str = ""
    tables: Sequence[tuple[str, Sequence[Sequence[str]]]] = ()
    figures: Sequence[go.Figure | None] = ()
    notes: Sequence[str] = field(default_factory=tuple)


def write(
    path: Path,
    *,
    title: str,
    says: str,
    sections: Sequence[Section],
    sources: Sequence[str],
    findings: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write the page.

    Args:
        sources: what made the records: files, commands, fingerprints.
        findings: statements, as dicts of `says`, `verdict`, `css`, `evidence` and `n_seeds`.
    """
    charts: dict[str, Any] = {}
    parts = [_part(i, section, charts) for i, section in enumerate(sections)]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=jinja2.StrictUndefined
    )
    text = environment.get_template(TEMPLATE).render(
        title=title,
        says=says,
        sections=parts,
        sources=sources,
        findings=findings,
        plotly_js=get_plotlyjs(),
        charts_json=_for_script(charts),
    )
    path.write_text(text, encoding="utf-8")
    return path


def _part(i: int, section: Section, charts: dict[str, Any]) -> dict[str, Any]:
    ids = []
    for j, figure in enumerate(f for f in section.figures if f is not None):
        ids.append(f"chart-{i}-{j}")
        charts[ids[-1]] = json.loads(figure.to_json())
    tables = [
        {"id": f"table-{i}-{j}", "title": title, "header": table[0], "rows": table[1:]}
        for j, (title, table) in enumerate(section.tables)
    ]
    return {"title": section.title, "about": section.about, "tables": tables, "charts": ids, "notes": section.notes}


def _for_script(value: Any) -> str:
    """JSON that nothing in it can end the script with; plotly shows names as text but for a few tags, so those too are
    escaped."""
    text = json.dumps(_escaped(value))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    if isinstance(value, dict):
        return {k: v if k == "hovertemplate" else _escaped(v) for k, v in value.items()}
    return [_escaped(v) for v in value] if isinstance(value, list) else value
