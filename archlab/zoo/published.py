"""What the authors of a model state of it, and whether that is what is counted."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Self

from archlab.errors import UsageError
from archlab.plugins import nearest

BITS = 16
"""Of a cached element, where nothing else is said."""

BYTES = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}

UNITS = {
    "params": {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12},
    "flops": {"": 1, "M": 1e6, "G": 1e9, "T": 1e12},
    "cache": BYTES | {"elements": BITS / 8, "k elements": BITS / 8 * 1e3},
    "saving": {"%": 0.01},
}
"""By the first word of a figure's name: the units that it may be published in."""


@dataclass(frozen=True)
class Claim:
    """A published figure beside the counted one.

    Attributes:
        name: the figure's in the record.
        text: as published, with its unit.
        explained: why they differ, where somebody has found out.
    """

    name: str
    text: str
    counted: float
    explained: str | None = None

    def __post_init__(self):
        parse(self.name, self.text)

    @property
    def verdict(self) -> str:
        """`exact` to the published digit, `explained`, or `differs`."""
        value, half_digit = parse(self.name, self.text)
        if abs(self.counted - value) <= half_digit * (1 + 1e-9):
            return "exact"
        return "explained" if self.explained else "differs"


def parse(name: str, text: str) -> tuple[float, float]:
    """The value of a published figure, and half a unit of its last digit: what rounding may have taken or given.

    "8.03B" of a name below `params/` is 8.03e9 and 5e6. Errors: UsageError for what is no number with such a unit.
    """
    units = UNITS.get(name.partition("/")[0], {})
    match = re.fullmatch(r"(\d+)(?:\.(\d+))? ?(.*)", text)
    if not match or match[3] not in units:
        raise UsageError(f"{name}: {text!r} is no figure; give a number and a unit: {', '.join(filter(None, units))}")
    whole, decimals, unit = match[1], match[2] or "", units[match[3]]
    return float(f"{whole}.{decimals}") * unit, 0.5 * 10 ** -len(decimals) * unit


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What a model's cache is compared with.

    Attributes:
        overrides: the command line that composes it.
        bits: of an element of the model's cache, the baseline's having `BITS`.
        saving: the share of the baseline's bytes a token that the model is said to do without, as "93.3%".
        explained: why that is not what is counted.
    """

    overrides: Sequence[str]
    bits: int = BITS
    saving: str | None = None
    explained: str | None = None


@dataclass(frozen=True, kw_only=True)
class Published:
    """The section `published` of a configuration.

    Attributes:
        name: as the authors write it.
        sources: where the figures stand.
        figures: by their names in the record, each with its unit: {"params/total": "8.03B"}.
        explained: by those names, why a figure is not the counted one.
        unexpressed: what of the model its configuration does not say.
        against: baselines of its cache, by what they are.
    """

    name: str
    sources: Sequence[str] = ()
    figures: Mapping[str, str] = field(default_factory=dict)
    explained: Mapping[str, str] = field(default_factory=dict)
    unexpressed: Sequence[str] = ()
    against: Mapping[str, Baseline] = field(default_factory=dict)

    @classmethod
    def read(cls, section: Mapping[str, Any], name: str) -> Self:
        """The section of the configuration called `name`. Errors: UsageError naming a key that is unknown or absent."""
        published = _made(cls, {"name": name} | _mapping(section, "published"), "published")
        for part in ("figures", "explained", "against"):
            _mapping(getattr(published, part), f"published.{part}")
        against = {what: _made(Baseline, b, f"published.against.{what}") for what, b in published.against.items()}
        return replace(published, against=against)

    def claims(self, entries: Mapping[str, float]) -> list[Claim]:
        """Every figure beside that of the record. Errors: UsageError for a name that the record does not have."""
        for name in (*self.figures, *self.explained):
            if name not in entries:
                raise UsageError(f"{self.name}: no figure is called {name!r}; {nearest(name, entries)}")
        return [Claim(n, str(text), entries[n], self.explained.get(n)) for n, text in self.figures.items()]

    def contexts(self, prefix: str) -> list[int]:
        """The contexts of the figures `<prefix>/<context>`."""
        found = (name.removeprefix(f"{prefix}/") for name in self.figures if name.startswith(f"{prefix}/"))
        return [int(context) for context in found if context.isdecimal()]


def _mapping(section: Any, where: str) -> dict[str, Any]:
    if not isinstance(section, Mapping):
        raise UsageError(f"{where} is {section!r}: give a mapping")
    return dict(section)


def _made(kind: type, section: Any, where: str) -> Any:
    values = _mapping(section, where)
    known = [f.name for f in fields(kind)]
    for key in values:
        if key not in known:
            raise UsageError(f"{where} has no key {key!r}; {nearest(key, known)}")
    for f in fields(kind):
        if f.default is MISSING and f.default_factory is MISSING and f.name not in values:
            raise UsageError(f"{where} lacks {f.name}")
    return kind(**values)
