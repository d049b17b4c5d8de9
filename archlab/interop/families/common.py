"""What many families share: the decoder around the plugins, grouped-query attention, the dense network."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from archlab.attn.gqa import GroupedQueryAttention
from archlab.errors import UsageError
from archlab.ffn.swiglu import SwiGLU
from archlab.interop.settings import Setting, fixed, only, same
from archlab.interop.weights import Weight, halves, rows
from archlab.interop.weights import same as same_weight

DECODER = (
    same("vocab_size", "model.vocab_size"),
    same("num_hidden_layers", "model.n_layers"),
    same("rms_norm_eps", "model.norm_eps"),
    same("tie_word_embeddings", "model.tied"),
    only("model.norm", "rms"),
    only("model.positions", "none"),
    only("model.dropout", 0.0),
    fixed("hidden_act", "silu"),
    fixed("attention_dropout", 0.0),
)
UNREAD = (
    "initializer_range",
    "max_position_embeddings",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)


def _read_heads(d_model: int, n_heads: int, head_dim: int | None) -> tuple:
    head_dim = head_dim or d_model // n_heads
    return d_model, n_heads, head_dim, head_dim


def _write_heads(d_model: int, n_heads: int, head_dim: int, rope_dim: int) -> tuple:
    if rope_dim != head_dim:
        raise UsageError(f"gqa.rope_dim={rope_dim} (all head_dim={head_dim} channels of a head rotate there)")
    return d_model, n_heads, head_dim


def read_theta(parameters: Mapping[str, Any]) -> tuple:
    """The rotation's base, where that is all there is to say of it."""
    for name, value in parameters.items():
        if name != "rope_theta" and (name, value) != ("rope_type", "default"):
            raise UsageError(f"rope_parameters.{name}={value!r} (it has only the plain rotation, rope_type='default')")
    return (parameters["rope_theta"],)


def rope_theta(ours: str) -> Setting:
    return Setting(
        ("rope_parameters",), (ours,), read_theta, lambda theta: ({"rope_type": "default", "rope_theta": theta},)
    )


GQA = (
    Setting(
        ("hidden_size", "num_attention_heads", "head_dim"),
        ("model.d_model", "gqa.n_heads", "gqa.head_dim", "gqa.rope_dim"),
        _read_heads,
        _write_heads,
    ),
    same("num_key_value_heads", "gqa.n_kv_heads"),
    rope_theta("gqa.rope_theta"),
)
PLAIN_HEADS = (only("gqa.qk_norm", False), Setting((), ("gqa.norm_eps",), lambda: (1e-5,), lambda eps: ()))
"""No norm over queries and keys, so its epsilon says nothing."""

SWIGLU = (only("ffn", "swiglu"), same("intermediate_size", "swiglu.d_ff"))


def gqa_weights(mixer: GroupedQueryAttention, config: Mapping[str, Any]) -> Iterable[Weight]:
    """Their rotation pairs channels i and i + c/2 of a head."""
    h, g, c = mixer.n_heads, mixer.n_kv_heads, mixer.head_dim
    rotary = halves(h + g, c, mixer.rope_dim)
    order = torch.cat([rotary, torch.arange(len(rotary), len(rotary) + g * c)])
    projections = {"q_proj": h * c, "k_proj": g * c, "v_proj": g * c}
    yield rows("qkv.weight", {f"self_attn.{name}.weight": n for name, n in projections.items()}, order)
    yield same_weight("out.weight", "self_attn.o_proj.weight")
    if mixer.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield rows(f"{name}.weight", {f"self_attn.{name}.weight": c}, halves(1, c, mixer.rope_dim))


def swiglu_weights(ffn: SwiGLU, config: Mapping[str, Any]) -> Iterable[Weight]:
    return dense_weights(ffn, "", "mlp.")


def dense_weights(ffn: SwiGLU, ours: str, theirs: str) -> Iterable[Weight]:
    """A dense network below these prefixes."""
    yield rows(f"{ours}gate_up.weight", {f"{theirs}{name}_proj.weight": ffn.d_ff for name in ("gate", "up")})
    yield same_weight(f"{ours}out.weight", f"{theirs}down_proj.weight")
