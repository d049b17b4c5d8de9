"""Timing that can be trusted: warmed up by the call that is measured, synchronised, without garbage collection."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Call = Callable[[], object]

clock = time.perf_counter
"""Seconds, as every measurement reads them."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How long a call is warmed up and measured: both until a count and a time are reached.

    Attributes:
        warmup_calls, warmup_s: at least so many calls and seconds before the first that counts.
        calls, seconds: at least so many measured calls, and more until so many seconds are spent.
    """

    warmup_calls: int = 2
    warmup_s: float = 0.2
    calls: int = 3
    seconds: float = 1.0


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it; a CPU has already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def timed(call: Call, device: torch.device, *, times: int = 1) -> float:
    """Seconds of one call, as the mean over `times` of them in a row."""
    synchronize(device)
    start = clock()
    for _ in range(times):
        call()
    synchronize(device)
    return (clock() - start) / times


def measure(call: Call, device: torch.device, effort: Effort, *, prepare: Call = lambda: None) -> list[float]:
    """Seconds of each measured call. `prepare` runs before every call, warm-up included, and is not timed."""

    def once() -> float:
        prepare()
        return timed(call, device)

    with collector_off():
        _until(once, effort.warmup_calls, effort.warmup_s)
        return _until(once, effort.calls, effort.seconds)


def interleaved(
    calls: Mapping[str, Call], device: torch.device, *, rounds: int, sample_s: float, warmup_s: float
) -> dict[str, list[float]]:
    """Seconds of each named call, one sample a round. All calls take part in every round, in turns of order, so that a
    machine whose speed drifts is as slow for one as for another. A sample repeats a fast call for about `sample_s`.
    """
    with collector_off():
        times = {}
        for name, call in calls.items():
            fastest = min(_until(lambda call=call: timed(call, device), 2, warmup_s))
            times[name] = max(1, math.ceil(sample_s / max(fastest, 1e-9)))
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(rounds):
            order = list(calls) if turn % 2 == 0 else list(reversed(calls))
            for name in order:
                samples[name].append(timed(calls[name], device, times=times[name]))
    return samples


@contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collection inside; the collector's state of before is restored."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _until(once: Callable[[], float], calls: int, seconds: float) -> list[float]:
    samples = []
    while len(samples) < calls or sum(samples) < seconds:
        samples.append(once())
    return samples
