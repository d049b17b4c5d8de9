"""Two caches side by side: what one saves, and from which context on it is the smaller."""

from collections.abc import Iterator
from dataclasses import dataclass

from archlab.config.compose import configuration
from archlab.zoo.models import LONGEST, PER_TOKEN, Model
from archlab.zoo.published import BITS, Claim


@dataclass(frozen=True)
class Comparison:
    """A model's cache against that of a baseline.

    Attributes:
        bits: of an element of the model's cache; those of the baseline have 16.
        claim: the published saving, if one is.
    """

    model: Model
    baseline: Model
    bits: int
    claim: Claim | None

    def saving(self, context: int) -> float:
        """The share of the baseline's bytes that the model does without; below 0 where it has more."""
        return 1 - self.bits / BITS * self.model.cache_bytes(context) / self.baseline.cache_bytes(context)

    @property
    def limit(self) -> float:
        return _limit(self.model, self.baseline, self.bits)


def comparisons(model: Model) -> Iterator[Comparison]:
    """The model against each baseline that its configuration names."""
    for what, stated in model.published.against.items():
        baseline = Model(configuration(stated.overrides), what)
        baseline.name = what
        counted = _limit(model, baseline, stated.bits)
        claim = Claim("saving", stated.saving, counted, stated.explained) if stated.saving else None
        yield Comparison(model, baseline, stated.bits, claim)


def _limit(model: Model, baseline: Model, bits: int) -> float:
    """The saving in bytes a token: what that of ever longer contexts approaches."""
    return 1 - bits / BITS * model.entries[PER_TOKEN] / baseline.entries[PER_TOKEN]


def crossings(a: Model, b: Model) -> list[int]:
    """The contexts at which the smaller cache becomes the other one: each the first at which it is."""
    found, before, smaller = [], 1, 0
    for power in range(LONGEST.bit_length()):
        context = 1 << power
        sign = _sign(a, b, context)
        if sign and smaller and sign != smaller:
            found.append(_first(a, b, sign, before, context))
        before, smaller = context, sign or smaller
    return found


def _sign(a: Model, b: Model, context: int) -> int:
    """1 where the cache of a is larger, -1 where that of b is."""
    difference = a.cache_bytes(context) - b.cache_bytes(context)
    return int(difference > 0) - int(difference < 0)


def _first(a: Model, b: Model, sign: int, low: int, high: int) -> int:
    """The first context above `low`, up to `high`, at which the difference has that sign; from there on it keeps it."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _sign(a, b, middle) == sign else (middle, high)
    return high
