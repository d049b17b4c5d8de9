"""Cached decoding against one full pass: the gate before any latency is reported, and what it is made of.

Shapes: b batch, t tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from archlab.measure import isolation
from archlab.measure.isolation import STRUCTURAL, faults
from archlab.mixer import Cache
from archlab.model import LM, eval_mode
from archlab.nn.precision import autocast

RELATIVE_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Largest error allowed, as a share of the largest logit. bfloat16 is held to the full pass's own rounding instead."""

BFLOAT16_FACTOR = 2.0
"""Two computations that are each as far from float32 as the full pass in bfloat16 differ by at most twice that."""

FAULTS = {"cached_equals_full": "cached decoding differs from one full pass"} | isolation.FAULTS
"""What the gate can find, by the name that the record gives it."""

SINGLE_STEPS = 64
PIECE = 5
"""The gate feeds a prefill, a piece of `PIECE` tokens, and up to `SINGLE_STEPS` tokens one by one."""


@torch.inference_mode()
def full(model: LM, tokens: Tensor) -> Tensor:
    """Logits (b t vocab) of one pass without a cache."""
    return model(tokens)[0]


@torch.inference_mode()
def feed(model: LM, tokens: Tensor, pieces: Sequence[int], cache: Cache) -> Tensor:
    """Logits (b t vocab) of the same tokens given to a cache in pieces of the stated lengths, which sum to t."""
    return torch.cat([model(piece, cache)[0] for piece in tokens.split(list(pieces), dim=1)], dim=1)


def poisoned_cache(
    model: LM, batch: int, max_len: int, *, dtype: torch.dtype | None = None, poison: float = math.nan
) -> Cache:
    """An empty cache whose unwritten slots hold `poison`. Slots are the tensors whose shape follows `max_len`; the rest
    are accumulators, whose zeros are the initial state."""
    cache = model.init_cache(batch, max_len, dtype=dtype)
    least = model.init_cache(batch, 1, device=torch.device("meta"), dtype=dtype)
    for state, smallest in zip(cache.states, least.states, strict=True):
        for name, tensor in state.tensors().items():
            if tensor.shape != smallest.tensors()[name].shape and tensor.is_floating_point():
                tensor.fill_(poison)
    return cache


def gate(model: LM, *, length: int, batch: int, dtype: torch.dtype, seed: int = 0) -> dict[str, float | bool | str]:
    """Whether decoding with a cache gives the logits of one full pass, on `batch` random sequences of `length` tokens
    (of fewer where a learned position table has no more).

    The cache has room to spare and NaN in every slot that no token has written. `dtype` is the arithmetic of the run:
    float64 and float32 as the weights are; bfloat16 by autocast with a bfloat16 cache, once float32 has passed.

    What that one cache cannot show is judged beside it: see `archlab.measure.isolation`.

    Returns `equivalence/max_abs_error` (of a logit; NaN where either side has one), `equivalence/tolerance`,
    `equivalence/passed`, `equivalence/failed_checks` (names of `FAULTS`, joined by commas), `equivalence/dtype` (the
    arithmetic that decided) and `equivalence/length_tokens`.
    """
    if model.positions is not None:
        length = min(length, model.max_positions)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.vocab_size, (batch, length), generator=generator).to(model.embed.weight.device)
    exact_enough = torch.float32 if dtype == torch.bfloat16 else dtype
    with eval_mode(model):
        verdict = _judge(model, tokens, exact_enough)
        if verdict.passed and dtype == torch.bfloat16:
            verdict = _judge(model, tokens, dtype)
        failed = [] if verdict.passed else ["cached_equals_full"]
        failed += _isolation(model, exact_enough, seed)
    return {
        "equivalence/max_abs_error": verdict.error,
        "equivalence/tolerance": verdict.tolerance,
        "equivalence/passed": not failed,
        "equivalence/failed_checks": ", ".join(failed),
        "equivalence/dtype": str(verdict.dtype).removeprefix("torch."),
        "equivalence/length_tokens": length,
    }


def explain(gate: Mapping[str, Any]) -> str:
    """Why a gate is red, in one sentence."""
    error, allowed = gate["equivalence/max_abs_error"], gate["equivalence/tolerance"]
    clauses = [FAULTS[name] for name in gate["equivalence/failed_checks"].split(", ")]
    return f"{'; '.join(clauses)} (logits differ by {error:.3g}, and {allowed:.3g} is allowed)"


def _isolation(model: LM, dtype: torch.dtype, seed: int) -> list[str]:
    """As for the verdict, a tie of float32 is told from a fault in float64."""
    found = faults(model, dtype=dtype, relative_tolerance=RELATIVE_TOLERANCE[dtype], seed=seed)
    if not found or dtype == torch.float64 or STRUCTURAL & set(found):
        return found
    exact = copy.deepcopy(model).to("cpu", torch.float64)
    return faults(exact, dtype=torch.float64, relative_tolerance=RELATIVE_TOLERANCE[torch.float64], seed=seed)


@dataclass(frozen=True)
class _Verdict:
    """Errors of the logits at each position (b t), against what `dtype` allows."""

    errors: Tensor
    tolerance: float
    dtype: torch.dtype

    @property
    def error(self) -> float:
        return self.errors.max().item()

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # False where an error is NaN

    @property
    def half_passed(self) -> bool:
        """Whether all is finite, and at least half of the sequences agree."""
        agree = self.errors.amax(1) <= self.tolerance
        return bool(self.errors.isfinite().all()) and 2 * int(agree.sum()) >= len(agree)


def _judge(model: LM, tokens: Tensor, dtype: torch.dtype) -> _Verdict:
    verdict = _compare(model, tokens, dtype)
    if verdict.passed or not verdict.half_passed:
        return verdict
    # Where two scores are closer than rounding, each side may choose another expert or block, and both are right. A tie
    # is rare, so it strikes few of the sequences, and it is gone in float64; a fault does neither.
    exact = _compare(copy.deepcopy(model).to("cpu", torch.float64), tokens.cpu(), torch.float64)
    return exact if exact.passed else verdict


def _compare(model: LM, tokens: Tensor, dtype: torch.dtype) -> _Verdict:
    batch, length = tokens.shape
    with autocast(tokens.device, dtype):
        expected = full(model, tokens)
        cache = poisoned_cache(model, batch, length + SINGLE_STEPS, dtype=dtype)
        cached = feed(model, tokens, _pieces(length), cache)
    if dtype in RELATIVE_TOLERANCE:
        tolerance = RELATIVE_TOLERANCE[dtype] * expected.abs().max().item()
    else:
        tolerance = BFLOAT16_FACTOR * _errors(expected, full(model, tokens)).max().item()
    return _Verdict(_errors(cached, expected), tolerance, dtype)


def _errors(actual: Tensor, expected: Tensor) -> Tensor:
    return (actual - expected).abs().amax(-1)


def _pieces(length: int) -> list[int]:
    singles = min(SINGLE_STEPS, length // 2)
    several = min(PIECE, (length - singles) // 2)
    return [n for n in (length - singles - several, several, *[1] * singles) if n]
