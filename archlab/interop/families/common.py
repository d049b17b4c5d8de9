"""What many families share: the decoder around the plugins, grouped-query attention, the dense network, experts."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from archlab.attn.gqa import GroupedQueryAttention
from archlab.errors import UsageError
from archlab.ffn.moe import MixtureOfExperts
from archlab.ffn.swiglu import SwiGLU
from archlab.interop.settings import Setting, fixed, only, same
from archlab.interop.weights import Weight, halves, rows, transposed
from archlab.interop.weights import same as same_weight

DECODER = (
    same("vocab_size", "model.vocab_size"),
    same("hidden_size", "model.d_model"),
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
    "bos_token_id",
    "eos_token_id",
    "initializer_range",
    "max_position_embeddings",
    "pad_token_id",
    "use_cache",
)


def _read_heads(d_model: int, n_heads: int, head_dim: int | None) -> tuple:
    head_dim = head_dim or d_model // n_heads
    return d_model, n_heads, head_dim, head_dim


def _write_heads(d_model: int, n_heads: int, head_dim: int, rope_dim: int) -> tuple:
    if rope_dim != head_dim:
        raise UsageError(f"gqa.rope_dim={rope_dim} (all {head_dim} channels of a head rotate)")
    return d_model, n_heads, head_dim


def _read_rope(parameters: Mapping[str, Any]) -> tuple:
    for name in sorted(parameters.keys() - {"rope_theta"}, key="rope_type".__ne__):
        if (name, parameters[name]) != ("rope_type", "default"):
            raise UsageError(f"rope_parameters.{name}={parameters[name]!r} (it has only the type 'default' and a base)")
    return (parameters["rope_theta"],)


def rope(theta: str) -> Setting:
    """A rotation that is described by its base alone, which archlab calls `theta`."""
    return Setting(
        ("rope_parameters",), (theta,), _read_rope, lambda value: ({"rope_type": "default", "rope_theta": value},)
    )


def read_partial_rope(parameters: Mapping[str, Any], head_dim: int) -> tuple:
    """Base, rotary channels and width of a head."""
    known = {"rope_type", "rope_theta", "partial_rotary_factor"}
    for name in sorted(parameters.keys() - known | {"rope_type"}):
        if (name, parameters[name]) != ("rope_type", "default"):
            raise UsageError(f"rope_parameters.{name}={parameters[name]!r} (it has only the type 'default' and a base)")
    return parameters["rope_theta"], int(head_dim * parameters.get("partial_rotary_factor", 1.0)), head_dim


def write_partial_rope(theta: float, rope_dim: int, head_dim: int) -> tuple:
    """The rotation and the width of a head."""
    share = rope_dim / head_dim
    if int(head_dim * share) < rope_dim:
        share = math.nextafter(share, 1.0)
    return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share}, head_dim


GQA = (
    Setting(
        ("hidden_size", "num_attention_heads", "head_dim"),
        ("model.d_model", "gqa.n_heads", "gqa.head_dim", "gqa.rope_dim"),
        _read_heads,
        _write_heads,
    ),
    same("num_key_value_heads", "gqa.n_kv_heads"),
    rope("gqa.rope_theta"),
    only("gqa.norm", "rms"),
    only("gqa.out_gate", False),
    only("gqa.conv_size", 0),
    only("attn", "gqa"),
)


def norm_eps(plugin: str) -> Setting:
    """A plugin's norms have the epsilon of all others."""

    def write(model_eps: float, eps: float) -> tuple:
        if model_eps != eps:
            raise UsageError(
                f"{plugin}.norm_eps={eps!r} (it has one epsilon for all norms, here model.norm_eps={model_eps!r})"
            )
        return (model_eps,)

    return Setting(("rms_norm_eps",), ("model.norm_eps", f"{plugin}.norm_eps"), lambda eps: (eps, eps), write)


QK_NORM = (
    only("gqa.qk_norm", True),
    norm_eps("gqa"),
)
NO_QK_NORM = (
    only("gqa.qk_norm", False),
    # An epsilon of norms that are not there.
    Setting(("rms_norm_eps",), ("model.norm_eps", "gqa.norm_eps"), lambda eps: (eps, eps), lambda eps, _: (eps,)),
)

SWIGLU = (same("intermediate_size", "swiglu.d_ff"), only("swiglu.limit", None))

MOE = (
    same("num_local_experts", "moe.n_experts"),
    same("num_experts_per_tok", "moe.top_k"),
    fixed("output_router_logits", False),
)
MOE_UNREAD = ("router_aux_loss_coef",)
"""Without `output_router_logits` it has no balance loss; what it would have is not that of archlab."""
MOE_TRAINING = {"moe.balance_coef": 0.0, "moe.z_coef": 0.0}


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


def moe_weights(ffn: MixtureOfExperts, config: Mapping[str, Any]) -> Iterable[Weight]:
    return expert_weights()


def expert_weights() -> Iterable[Weight]:
    """A router and its experts."""
    yield same_weight("router.weight", "mlp.gate.weight")
    yield transposed("experts.gate_up.weight", "mlp.experts.gate_up_proj")
    yield transposed("experts.out.weight", "mlp.experts.down_proj")
