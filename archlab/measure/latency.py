"""Prefill and decode latency of a model, beside the limit that this machine sets to a decode step.

`python -m archlab.bench +attn=gqa` times an untrained model of a configuration, `python -m archlab.bench run=FOLDER`
that of a run or an import, `python -m archlab.bench +bench=mechanisms` measures what the formulation of each mechanism
is worth. Any key can be set as for `python -m archlab`. All print a table and one line of JSON, which `out=FILE` keeps.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from archlab.errors import ArchlabError, UsageError
from archlab.measure.account import decode_flops, decode_read_bytes
from archlab.measure.equivalence import explain
from archlab.measure.limits import gemm_rate, read_bandwidth
from archlab.measure.timing import Effort, measure
from archlab.mixer import Cache
from archlab.model import LM, eval_mode
from archlab.nn.precision import autocast


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What is timed, and how long.

    Attributes:
        contexts: tokens of context at which prefill and decode are timed; those that a learned position table does not
            reach are left out.
        batch: sequences side by side.
        prefill_chunk: most tokens of one prefill pass; a longer context is given in several.
        gate_length, gate_batch: tokens and sequences on which cached = full is proved first.
        prefill, decode: the effort spent on each figure.
    """

    contexts: Sequence[int]
    batch: int = 1
    prefill_chunk: int = 8192
    gate_length: int = 1027
    gate_batch: int = 4
    prefill: Effort = field(default_factory=Effort)
    decode: Effort = field(default_factory=Effort)

    def __post_init__(self):
        if not isinstance(self.contexts, Sequence) or not all(isinstance(c, int) and c > 0 for c in self.contexts):
            raise UsageError(f"bench.contexts={self.contexts}: give a list of whole numbers of at least 1")
        for name in ("batch", "prefill_chunk", "gate_length", "gate_batch"):
            if getattr(self, name) < 1:
                raise UsageError(f"bench.{name}={getattr(self, name)}: give a whole number of at least 1")


@torch.inference_mode()
def latency(
    model: LM, settings: BenchSettings, *, dtype: torch.dtype, gate: Mapping[str, Any]
) -> dict[str, float | int | str]:
    """Milliseconds of a prefill and of a decode step at each context, as `latency/*` entries of the record.

    Prefill: `context` tokens into an empty cache, up to the logits of the last one. Decode: one token more for every
    sequence of the batch, onto the cache that this prefill filled; the position is put back before each step, so that
    the context stays the stated one. The cache policy is the same for all variants: `latency/capacity_tokens` are
    allocated once, `context` of them used.

    `latency/decode_limit_ms` is the longer of bytes read / `latency/read_bandwidth_bytes_per_s` (measured at that size)
    and FLOPs / `latency/gemm_flops_per_s`.

    Args:
        dtype: as in `archlab.equivalence.gate`.
        gate: that function's result. Errors: ArchlabError if it did not pass.
    """
    if not gate["equivalence/passed"]:
        raise ArchlabError(f"no latency: {explain(gate)}; mend the plugin's forward with a state")
    device, batch = model.embed.weight.device, settings.batch
    reach = model.max_positions if model.positions is not None else float("inf")
    contexts = sorted({c for c in settings.contexts if c < reach})
    capacity = max(contexts, default=0) + 1
    tokens = torch.randint(model.vocab_size, (batch, capacity), generator=torch.Generator().manual_seed(0)).to(device)
    record: dict[str, float | int | str] = {
        "latency/batch": batch,
        "latency/dtype": str(dtype).removeprefix("torch."),
        "latency/capacity_tokens": capacity,
        "latency/prefill_chunk_tokens": settings.prefill_chunk,
        "latency/gemm_flops_per_s": gemm_rate(device, dtype),
    }
    # Entered once: autocast keeps its copies of the weights until it is left.
    with eval_mode(model), autocast(device, dtype):
        cache = model.init_cache(batch, capacity, dtype=dtype)
        for context in contexts:
            prefill = _prefill_seconds(model, tokens[:, :context], cache, settings)
            decode = _decode_seconds(model, tokens, cache, settings)
            record |= _quantiles("prefill_ms", context, prefill) | _quantiles("decode_ms_per_token", context, decode)
            record |= _limit(model, context, batch, dtype)
    return record


def _prefill_seconds(model: LM, tokens: Tensor, cache: Cache, settings: BenchSettings) -> list[float]:
    """Leaves the cache filled with the tokens."""

    def empty() -> None:
        cache.pos = 0
        for tensor in (t for state in cache.states for t in state.tensors().values()):
            tensor.zero_()

    def prefill() -> None:
        for piece in tokens.split(settings.prefill_chunk, dim=1):
            model(piece, cache, last=True)

    return measure(prefill, tokens.device, settings.prefill, prepare=empty)


def _decode_seconds(model: LM, tokens: Tensor, cache: Cache, settings: BenchSettings) -> list[float]:
    context = cache.pos
    # Other tokens each step: always the same one would find its experts' weights in the nearest cache.
    following = itertools.cycle(tokens.split(1, dim=1))

    def put_back() -> None:
        cache.pos = context

    return measure(lambda: model(next(following), cache, last=True), tokens.device, settings.decode, prepare=put_back)


def _quantiles(name: str, context: int, seconds: list[float]) -> dict[str, float]:
    p50, p90 = (1e3 * float(q) for q in np.quantile(seconds, [0.5, 0.9]))
    return {f"latency/{name}_p50/{context}": p50, f"latency/{name}_p90/{context}": p90}


def _limit(model: LM, context: int, batch: int, dtype: torch.dtype) -> dict[str, float]:
    device, length = model.embed.weight.device, context + 1
    n_bytes = decode_read_bytes(model, length, dtype, batch=batch)
    bandwidth = read_bandwidth(n_bytes, device)
    seconds = max(n_bytes / bandwidth, batch * decode_flops(model, length) / gemm_rate(device, dtype))
    return {
        f"latency/decode_limit_ms/{context}": 1e3 * seconds,
        f"latency/read_bandwidth_bytes_per_s/{context}": bandwidth,
    }
