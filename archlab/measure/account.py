"""What a model costs, counted from its modules and weighed from its tensors: parameters, FLOPs, bytes.

Every unit conversion of the project stands here once. A FLOP is half a multiply-add. A model on the meta device is
counted as well as a live one: nothing here runs it.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from archlab.mixer import Mixer
from archlab.model import LM
from archlab.nn.experts import ExpertLinear

FLOPS_PER_MULTIPLY_ADD = 2

TRAIN_PASSES = 3
"""A training step does the work of so many forward passes: backward has two products for each of the forward."""

LONG_CONTEXT = 1 << 20
"""Tokens from which on a cache grows by the same bytes for each: windows are full."""

MOST_CONTEXTS = 4096
"""A mean over more contexts than that is taken over a sample of them."""


def static(model: LM, *, train_context: int, contexts: Sequence[int], dtype: torch.dtype) -> dict[str, int | float]:
    """All that is known of a model without running it, as entries of the record.

    `params/*`: see `parameters`.
    `flops/forward_per_token`: one forward pass over `train_context` tokens, divided by them.
    `flops/train_per_token`: that pass and its backward pass, `TRAIN_PASSES` times as much.
    `flops/decode_per_token_at/<context>`: one decode step of one sequence of that length, its new token included.
    `cache/bytes_at/<context>`: the state of one sequence that has room for so many tokens.
    `cache/bytes_per_token_stored`: by how much that grows a token, beyond `LONG_CONTEXT`.
    `cache/bytes_constant`: what remains of it there without the tokens' share: recurrent states, full windows.
    `cache/read_bytes_at/<context>`: what one decode step reads of the state.

    Args:
        train_context: length in tokens of a training sequence.
        contexts: lengths in tokens at which decoding is accounted.
        dtype: of cached activations.
    """
    forward = forward_flops(model, train_context)
    entries: dict[str, int | float] = {f"params/{part}": n for part, n in parameters(model).items()}
    entries |= {"flops/forward_per_token": forward, "flops/train_per_token": TRAIN_PASSES * forward}
    entries |= cache_growth(model, dtype)
    for context in contexts:
        entries[f"flops/decode_per_token_at/{context}"] = decode_flops(model, context)
        entries[f"cache/bytes_at/{context}"] = cache_bytes(model, context, dtype)
        entries[f"cache/read_bytes_at/{context}"] = cache_read_bytes(model, context, dtype)
    return entries


def parameters(model: LM) -> dict[str, int]:
    """Numbers of parameters; a weight that several modules share counts once, where it is first used.

    `embedding` (with learned positions), `head` (0 if tied), `attention`, `ffn` and `other` (norms) sum to `total`.
    `non_embedding` is the total without embedding and head. `active` is the total without the experts that a token does
    not choose; `active_non_input_embedding` is without the embedding also, unless it serves as the head.
    """
    seen: set[int] = set()
    parts = {part: _count_new(modules, seen) for part, modules in _parts(model).items()}
    total = sum(p.numel() for p in model.parameters())
    assert sum(parts.values()) == total, f"parameters by part {parts} do not sum to {total}"
    experts = [m for m in model.modules() if isinstance(m, ExpertLinear)]
    active = total - sum(m.weight.numel() // m.n_experts * (m.n_experts - m.top_k) for m in experts)
    tied = model.head.weight is model.embed.weight
    return parts | {
        "total": total,
        "non_embedding": total - parts["embedding"] - parts["head"],
        "active": active,
        "active_non_input_embedding": active - parts["embedding"] + (model.head.weight.numel() if tied else 0),
    }


def _parts(model: LM) -> dict[str, list[nn.Module | None]]:
    return {
        "embedding": [model.embed, model.positions],
        "head": [model.head],
        "attention": [block.mixer for block in model.blocks],
        "ffn": [block.ffn for block in model.blocks],
        "other": [model.norm, *(norm for block in model.blocks for norm in (block.mixer_norm, block.ffn_norm))],
    }


def _count_new(modules: Iterable[nn.Module | None], seen: set[int]) -> int:
    """Parameters that are not among those seen, which they join."""
    found = {id(p): p.numel() for m in modules if m is not None for p in m.parameters() if id(p) not in seen}
    seen.update(found)
    return sum(found.values())


def linear_flops(model: LM) -> int:
    """FLOPs of a token in all linear layers: every weight once, of experts the chosen ones', a tied head as an untied
    one; looking up an embedding costs none."""
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    experts = (m for m in model.modules() if isinstance(m, ExpertLinear))
    return FLOPS_PER_MULTIPLY_ADD * (weights + sum(m.weight.numel() // m.n_experts * m.top_k for m in experts))


def forward_flops(model: LM, train_context: int) -> float:
    """FLOPs a token of one causal pass over `train_context` tokens, on average: token i mixes a context of i."""
    contexts = _spread(train_context)
    mixing = sum(mixer.mix_flops(context) for mixer in _mixers(model) for context in contexts)
    return linear_flops(model) + mixing / len(contexts)


def _spread(n: int) -> Sequence[int]:
    """1 to n, or `MOST_CONTEXTS` of them, symmetrical and even, so that what grows in proportion averages exactly."""
    if n <= MOST_CONTEXTS:
        return range(1, n + 1)
    lower = [1 + (2 * i + 1) * n // (2 * MOST_CONTEXTS) for i in range(MOST_CONTEXTS // 2)]
    return [*lower, *(n + 1 - context for context in lower)]


def decode_flops(model: LM, context: int) -> int:
    """FLOPs of one decode step of one sequence of that length, its new token included."""
    return linear_flops(model) + sum(mixer.decode_flops(context) for mixer in _mixers(model))


def cache_bytes(model: LM, context: int, dtype: torch.dtype) -> int:
    """Bytes of one sequence's state with room for that many tokens: weighed from the tensors a plugin allocates."""
    return model.init_cache(1, context, device=torch.device("meta"), dtype=dtype).nbytes


def cache_growth(model: LM, dtype: torch.dtype) -> dict[str, float]:
    """`cache/bytes_per_token_stored` and `cache/bytes_constant` of one sequence: the line that long caches lie on."""
    long, longer = (cache_bytes(model, n * LONG_CONTEXT, dtype) for n in (1, 2))
    per_token = (longer - long) / LONG_CONTEXT
    return {"cache/bytes_per_token_stored": per_token, "cache/bytes_constant": long - per_token * LONG_CONTEXT}


def cache_read_bytes(model: LM, context: int, dtype: torch.dtype) -> int:
    """Bytes of state that one decode step of one sequence reads at that context."""
    return sum(mixer.read_bytes(context, dtype.itemsize) for mixer in _mixers(model))


def decode_read_bytes(model: LM, context: int, dtype: torch.dtype, *, batch: int = 1) -> int:
    """Bytes that one decode step of `batch` sequences has to read at that context, weights and state in `dtype`: each
    weight once, each sequence's state; of the embedding, unless it serves as the head, next to nothing.

    Of experts, as many as so many tokens choose on average where routing is uniform.
    """
    weights: float = parameters(model)["active_non_input_embedding"]
    for m in model.modules():
        if isinstance(m, ExpertLinear):
            chosen = m.n_experts * (1 - (1 - m.top_k / m.n_experts) ** batch)
            weights += m.weight.numel() / m.n_experts * (chosen - m.top_k)
    return round(weights) * dtype.itemsize + batch * cache_read_bytes(model, context, dtype)


def training_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int | float]:
    """Bytes of the live tensors that training keeps, between a backward pass and the next `zero_grad`.

    `train/weight_bytes`, `train/gradient_bytes`, `train/moment_bytes` (optimizer state of a parameter's own shape: a
    step counter is not counted) and, of all three, `train/bytes_per_param`.
    """
    params = list(model.parameters())
    moments = (t for p in params for t in optimizer.state.get(p, {}).values() if _same_shape(t, p))
    held = {
        "train/weight_bytes": _nbytes(params),
        "train/gradient_bytes": _nbytes(p.grad for p in params if p.grad is not None),
        "train/moment_bytes": _nbytes(moments),
    }
    return held | {"train/bytes_per_param": sum(held.values()) / sum(p.numel() for p in params)}


def _same_shape(value: object, p: nn.Parameter) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == p.shape


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _mixers(model: LM) -> list[Mixer]:
    return [block.mixer for block in model.blocks]
