"""Two calls timed in turns, as the ratio of their times: what a change is worth, however busy the machine is."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Column, Table

from archlab.errors import UsageError
from archlab.measure.timing import Call, interleaved
from archlab.plugins import nearest


@dataclass(frozen=True)
class Pair:
    """Two calls; the ratio is the time of `over` through that of `under`. A name tells pairs of one case apart."""

    over: Call
    under: Call
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Pairs, made one after the other, and the ratio that all of them should reach or not exceed, if one is aimed at;
    `rounds` where the calls are too slow for as many as the suite's."""

    pairs: Callable[[], Iterator[Pair]]
    at_least: float | None = None
    at_most: float | None = None
    rounds: int | None = None

    def met(self, ratio: float) -> bool | None:
        """None where nothing is aimed at."""
        if self.at_least is None and self.at_most is None:
            return None
        return ratio >= (self.at_least or 0) and (self.at_most is None or ratio <= self.at_most)

    def aim(self) -> str:
        bounds = {">=": self.at_least, "<=": self.at_most}
        return " ".join(f"{sign} {bound:g}" for sign, bound in bounds.items() if bound is not None)


@dataclass(frozen=True)
class Ratio:
    """The median over the rounds of one pair's ratio, the quartiles as its noise, and both median times."""

    name: str
    ratio: float
    ratio_p25: float
    ratio_p75: float
    over_ms_p50: float
    under_ms_p50: float
    aim: str
    met: bool | None


@dataclass(frozen=True, kw_only=True)
class Suite:
    """Cases by name, and how they are measured.

    Attributes:
        cases: those there are.
        only: names of those to measure; None means all.
        rounds: samples of each call.
        sample_s: a faster call is repeated for so many seconds a sample.
        warmup_s: seconds each call runs before.
    """

    cases: Mapping[str, Case]
    only: Sequence[str] | None = None
    rounds: int = 15
    sample_s: float = 0.02
    warmup_s: float = 0.2

    def __post_init__(self):
        for name in self.only or ():
            if name not in self.cases:
                raise UsageError(f"bench.only: there is no case {name!r}; {nearest(name, self.cases)}")

    def run(self, device: torch.device) -> dict[str, Any]:
        """Measure every case, print a table, and return what the JSON line holds."""
        torch.manual_seed(0)
        ratios = []
        for name in self.cases if self.only is None else self.only:
            ratios += [self._measure(name, self.cases[name], pair, device) for pair in _built(self.cases[name], device)]
        Console().print(_table(ratios))
        env = {"torch": torch.__version__, "threads": torch.get_num_threads(), "cpus": os.cpu_count()}
        return {"env": env | {"machine": platform.machine(), "device": str(device)}, "ratios": [*map(asdict, ratios)]}

    def _measure(self, name: str, case: Case, pair: Pair, device: torch.device) -> Ratio:
        calls = {"over": pair.over, "under": pair.under}
        rounds = case.rounds or self.rounds
        seconds = interleaved(calls, device, rounds=rounds, sample_s=self.sample_s, warmup_s=self.warmup_s)
        low, ratio, high = np.quantile(np.divide(seconds["over"], seconds["under"]), [0.25, 0.5, 0.75]).tolist()
        over, under = (1e3 * float(np.median(seconds[side])) for side in calls)
        return Ratio(
            "/".join(filter(None, (name, pair.name))), ratio, low, high, over, under, case.aim(), case.met(ratio)
        )


def _built(case: Case, device: torch.device) -> Iterator[Pair]:
    """The pairs of a case, one at a time. Only their making is under the device's mode, which costs each operator of a
    measured call several microseconds."""
    pairs = iter(case.pairs())
    while True:
        with torch.device(device):
            pair = next(pairs, None)
        if pair is None:
            return
        yield pair


def _table(ratios: list[Ratio]) -> Table:
    table = Table(Column("case", overflow="fold"), "ms / ms", "ratio", "quartiles", "aim", "met")
    for r in ratios:
        times = " / ".join(f"{ms:.0f}" if ms >= 100 else f"{ms:.3g}" for ms in (r.over_ms_p50, r.under_ms_p50))
        noise = f"{r.ratio_p25:.3g} - {r.ratio_p75:.3g}"
        table.add_row(r.name, times, f"{r.ratio:.3g}", noise, r.aim, {True: "yes", False: "NO", None: ""}[r.met])
    return table
