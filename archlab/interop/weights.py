"""Weights of archlab as weights of another library.

Each rule moves elements and computes nothing: a weight that goes there and back is the same to the bit, and gradients,
moments and whatever else has a weight's shape go the same way.

Shapes: h query heads, g KV heads, c head width, d model width, e experts, f expert width.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from archlab.errors import UsageError

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Weight:
    """Tensors of archlab and what holds their elements elsewhere: any number on either side.

    Attributes:
        ours: the first of ours; `beside`: the others.
        split, join: ours -> theirs, and back.
    """

    ours: str
    theirs: tuple[str, ...]
    split: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    join: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    beside: tuple[str, ...] = ()

    @property
    def all_ours(self) -> tuple[str, ...]:
        return self.ours, *self.beside

    def within(self, ours: str, theirs: str) -> "Weight":
        """The same below these prefixes."""
        return replace(
            self,
            ours=ours + self.ours,
            theirs=tuple(theirs + name for name in self.theirs),
            beside=tuple(ours + name for name in self.beside),
        )


def same(ours: str, theirs: str) -> Weight:
    """One tensor under two names."""
    return Weight(ours, (theirs,), lambda tensors: tensors, lambda tensors: tensors)


def transposed(ours: str, theirs: str) -> Weight:
    """One tensor whose last two axes stand the other way round."""
    return Weight(ours, (theirs,), _transpose, _transpose)


def _transpose(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensor.mT for tensor in tensors]


def rows(ours: str, theirs: Mapping[str, int], order: Tensor | None = None) -> Weight:
    """A tensor that is several, of so many rows each, one below the other; `order` as of `regrouped`."""
    return regrouped({ours: sum(theirs.values())}, theirs, order)


def regrouped(ours: Mapping[str, int], theirs: Mapping[str, int], order: Tensor | None = None) -> Weight:
    """The same rows cut into tensors of so many rows each, here in one way and there in another. `order`: row i of
    theirs, all taken together, is row order[i] of ours, all taken together; None means the same order."""
    inverse = None if order is None else order.argsort()

    def split(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return _taken(_stacked(tensors), order).split(list(theirs.values()))

    def join(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return _taken(_stacked(tensors), inverse).split(list(ours.values()))

    first, *others = ours
    return Weight(first, tuple(theirs), split, join, tuple(others))


def zeros(ours: str, like: Tensor) -> Weight:
    """A tensor that the other library does not have: nothing but zeros, or a UsageError."""

    def split(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if tensors[0].any():
            raise UsageError(f"{ours} is not zero, which Transformers has no place for")
        return []

    return Weight(ours, (), split, lambda tensors: [torch.zeros_like(like)])


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _taken(tensor: Tensor, order: Tensor | None) -> Tensor:
    return tensor if order is None else tensor[order.to(tensor.device)]


def halves(n_heads: int, head_dim: int, n_rot: int) -> Tensor:
    """Which of our rows is each row of heads whose channels i and i + n_rot/2 rotate together: here 2i and 2i+1 do."""
    channels = torch.arange(head_dim)
    rotary = torch.cat([channels[0:n_rot:2], channels[1:n_rot:2], channels[n_rot:]])
    return (torch.arange(n_heads)[:, None] * head_dim + rotary).flatten()


def to_theirs(rules: Collection[Weight], tensors: Tensors) -> dict[str, Tensor]:
    """Copies of our tensors under their names. Errors: UsageError for one that is not there or that no rule moves."""
    check_names(tensors.keys(), {name for rule in rules for name in rule.all_ours})
    return {
        name: _copy(part)
        for rule in rules
        for name, part in zip(rule.theirs, rule.split([tensors[name] for name in rule.all_ours]), strict=True)
    }


def to_ours(rules: Collection[Weight], tensors: Tensors) -> dict[str, Tensor]:
    """Copies of their tensors under our names. Errors: as of `to_theirs`."""
    check_names(tensors.keys(), {name for rule in rules for name in rule.theirs})
    return {
        name: _copy(part)
        for rule in rules
        for name, part in zip(rule.all_ours, rule.join([tensors[name] for name in rule.theirs]), strict=True)
    }


def check_names(given: AbstractSet[str], wanted: AbstractSet[str]) -> None:
    """Nothing is left out, and nothing made up."""
    for name in sorted(given ^ wanted):
        raise UsageError(f"the weight {name} {'has no counterpart' if name in given else 'is missing'}")


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)
