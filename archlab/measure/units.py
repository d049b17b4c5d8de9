"""How a person reads a number: units and few digits. No figure is computed here."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]


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
