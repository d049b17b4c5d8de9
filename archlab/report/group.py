"""The runs of one variant as every chart and table sees them, wherever they come from: folders or a study."""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from archlab.run.log import FILE_NAME

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#882255", "#44AA99", "#999933")
"""The palette of Okabe and Ito, which the colour-blind tell apart, without its yellow and black (each is hard to see on
one of the two grounds), and four of Tol's."""

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True)
class Group:
    """One variant.

    Attributes:
        label: its name.
        records: those of its runs that ended well.
        folders: theirs, in the same order.
        n_runs: how many there are, whatever became of them.
    """

    label: str
    records: Sequence[Mapping[str, Any]]
    folders: Sequence[Path]
    n_runs: int

    def values(self, entry: str) -> list[float]:
        return [r[entry] for r in self.records if r.get(entry) is not None]

    def mean(self, entry: str) -> float | None:
        values = self.values(entry)
        return statistics.fmean(values) if values else None

    @cached_property
    def logs(self) -> list[list[dict[str, Any]]]:
        """The rows of each run's metrics.jsonl; none of a run without one."""
        paths = [folder / FILE_NAME for folder in self.folders]
        return [_rows(path) for path in paths if path.is_file()]


def _rows(path: Path) -> list[dict[str, Any]]:
    """What a log holds; a line that a kill or a full disk cut short is passed over."""
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def metrics(groups: Sequence[Group]) -> list[str]:
    """What plugins logged of themselves (router load, block recall), by the entries of the logs."""
    rows = (rows[-1] for group in groups for rows in group.logs if rows)
    return list(dict.fromkeys(key for row in rows for key in row if key.startswith("model/")))


@dataclass(frozen=True)
class Style:
    """How a variant is drawn, in every chart of a report alike."""

    colour: str
    symbol: str
    dash: str


def styles(labels: Sequence[str]) -> dict[str, Style]:
    """By label, in its order: colours first, and where they come again, other symbols and dashes."""
    turns = itertools.product(range(len(DASHES)), COLOURS)
    return {
        label: Style(colour, SYMBOLS[turn % len(SYMBOLS)], DASHES[turn])
        for label, (turn, colour) in zip(dict.fromkeys(labels), itertools.cycle(turns), strict=False)
    }
