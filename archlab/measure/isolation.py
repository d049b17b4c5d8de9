"""Whether sequences are kept apart: what one cache holds, one row or one module may not reach another.

That cached decoding equals the full pass shows none of this: a plugin may keep its memory on the module, hide it beside
the fields of its state, or mix the rows of a batch, and still pass with one cache at a time.

Shapes: b batch, t tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from archlab.measure.held import changed, fingerprint, held_tensors
from archlab.mixer import Cache, State
from archlab.model import LM

LENGTH = 20
"""Tokens of a sequence: memory that leaks does so at once, whatever window or block comes later."""

PIECES = (9, 1, 5, 1, 1, 3)
CUT = 3
"""How `LENGTH` tokens are fed, and after how many pieces a cache is cloned."""

FAULTS = {
    "caches_interleaved": "two caches that are used in turn disturb each other",
    "clone_goes_on": "a cloned cache does not go on as the original would have",
    "rows_alone": "a sequence comes out differently beside others",
    "state_declared": "a state holds tensors that are none of its fields",
    "module_unchanged": "decoding changed the module",
}
"""What each fault means, in one clause."""

STRUCTURAL = frozenset({"state_declared", "module_unchanged"})
"""Those that no rounding can cause."""


def faults(model: LM, *, dtype: torch.dtype, relative_tolerance: float, seed: int = 0) -> list[str]:
    """The names in `FAULTS` that the model shows, in eval mode, on random sequences.

    Args:
        dtype: of the weights and of the cache.
        relative_tolerance: largest difference of two logits that are the same, as a share of the largest.
    """
    length = LENGTH if model.positions is None else min(LENGTH, model.max_positions)
    pieces = PIECES if length == LENGTH else (length,)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.vocab_size, (4, length), generator=generator).to(model.embed.weight.device)
    before = fingerprint(model)
    return list(_faults(model, tokens, pieces, dtype, relative_tolerance, before))


@torch.inference_mode()
def _faults(
    model: LM, tokens: Tensor, pieces: Sequence[int], dtype: torch.dtype, tolerance: float, before: dict
) -> Iterator[str]:
    x, y = tokens[:2], tokens[2:]
    expected_x, expected_y = model(x)[0], model(y)[0]
    scale = tolerance * torch.stack([expected_x, expected_y]).abs().max().item()

    def differs(actual: Tensor, expected: Tensor) -> bool:
        return not (actual - expected).abs().max().item() <= scale  # NaN differs

    fed_x, fed_y, cache = _interleaved(model, x, y, pieces, dtype)
    if differs(fed_x, expected_x) or differs(fed_y, expected_y):
        yield "caches_interleaved"
    if len(pieces) > CUT and differs(_cloned(model, x, y, pieces, dtype), expected_x[:, sum(pieces[:CUT]) :]):
        yield "clone_goes_on"
    alone = model(x[:1])[0], _feed(model, x[:1], pieces, model.init_cache(1, x.shape[1], dtype=dtype))
    if any(differs(row, expected_x[:1]) for row in alone):
        yield "rows_alone"
    if any(True for state in cache.states for _ in undeclared(state)):
        yield "state_declared"
    if changed(before, fingerprint(model)):
        yield "module_unchanged"


def undeclared(state: State) -> Iterator[str]:
    """Where tensors hang on a state or its class beside the tensors of its fields, which are what is weighed."""
    declared = {t.untyped_storage().data_ptr() for t in state.tensors().values()}
    for path, tensor in held_tensors([vars(state), *(vars(kind) for kind in type(state).__mro__[:-1])], "state"):
        if tensor.untyped_storage().data_ptr() not in declared:
            yield path


def _interleaved(
    model: LM, x: Tensor, y: Tensor, pieces: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Cache]:
    caches = [model.init_cache(len(x), x.shape[1], dtype=dtype) for _ in range(2)]
    fed: tuple[list[Tensor], list[Tensor]] = ([], [])
    for part in zip(x.split(list(pieces), dim=1), y.split(list(pieces), dim=1), strict=True):
        for out, piece, cache in zip(fed, part, caches, strict=True):
            out.append(model(piece, cache)[0])
    return torch.cat(fed[0], dim=1), torch.cat(fed[1], dim=1), caches[0]


def _cloned(model: LM, x: Tensor, other: Tensor, pieces: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The logits of x after the cut, from a clone made there, while the original went on with other tokens."""
    cache, cut = model.init_cache(len(x), x.shape[1], dtype=dtype), sum(pieces[:CUT])
    _feed(model, x[:, :cut], pieces[:CUT], cache)
    clone = cache.clone()
    _feed(model, other[:, cut:], pieces[CUT:], cache)
    return _feed(model, x[:, cut:], pieces[CUT:], clone)


def _feed(model: Callable, tokens: Tensor, pieces: Sequence[int], cache: Cache) -> Tensor:
    return torch.cat([model(piece, cache)[0] for piece in tokens.split(list(pieces), dim=1)], dim=1)
