"""Kimi Linear (arXiv:2510.26692): delta attention and, in listed layers, latent attention without positions; experts as
in DeepSeek-V3, or, where all layers are dense, SwiGLU.

Shapes: h heads.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from archlab.attn.linear import LinearAttention
from archlab.attn.mla import MultiHeadLatentAttention
from archlab.errors import UsageError
from archlab.ffn.moe_deepseek import DeepSeekMoE
from archlab.ffn.swiglu import SwiGLU
from archlab.interop.families import deepseek
from archlab.interop.families.common import DECODER, SWIGLU, UNREAD, swiglu_weights
from archlab.interop.families.delta import DELTA, conv_weight
from archlab.interop.families.layers import FIRST_DENSE, SPARSE, mixers, mlp_types
from archlab.interop.family import Family
from archlab.interop.settings import Setting, fixed, only, same, without_effect
from archlab.interop.weights import Weight, rows
from archlab.interop.weights import same as same_weight


def _write_heads(n_heads: int, head_dim: int, n_v_heads: int, v_head_dim: int, decay_rank: int) -> tuple:
    for name, value, wanted in (
        ("n_v_heads", n_v_heads, n_heads),
        ("v_head_dim", v_head_dim, head_dim),
        ("decay_rank", decay_rank, head_dim),
    ):
        if value != wanted:
            raise UsageError(f"linear.{name}={value} (it has only that of the keys, {wanted})")
    return n_heads, head_dim


KDA = (
    Setting(
        ("linear_num_heads", "linear_head_dim"),
        ("linear.n_heads", "linear.head_dim", "linear.n_v_heads", "linear.v_head_dim", "linear.decay_rank"),
        lambda n_heads, head_dim: (n_heads, head_dim, n_heads, head_dim, head_dim),
        _write_heads,
    ),
    *DELTA,
    only("linear.decay", "channel"),
    only("linear.gate", "low_rank"),
    only("linear.gate_act", "sigmoid"),
)
MLA = (
    *(setting for setting in deepseek.MLA if not {"attn", "mla.rope", "mla.rope_theta"} & set(setting.ours)),
    only("mla.rope", False),
    without_effect("mla.rope_theta", 10_000.0),
)
STACK = (
    *DECODER,
    fixed("tie_word_embeddings", False),  # which its code does not look at
    only("model.tied", False),
    *KDA,
    *MLA,
    # Only of a layer that is full attention does its cache know the length.
    mixers({"linear_attention": "linear", "full_attention": "mla"}, needed="mla"),
)
UNREAD_BY_BOTH = (
    *(name for name in UNREAD if name != "max_position_embeddings"),
    *deepseek.MLA_UNREAD,
    *deepseek.OLD_UNREAD,
    "model_max_length",
    "linear_attn_config",  # which the settings above spell out
    "first_k_dense_replace",  # which `mlp_layer_types` spells out
    "num_nextn_predict_layers",  # of layers that a causal language model does not have
    "rope_parameters",  # of a rotation that it does not have
    "rope_scaling",
    "rope_theta",
)
SPELLED_OUT = {
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "use_grouped_topk": True,
}


def _kda_weights(mixer: LinearAttention, config: Mapping[str, Any]) -> Iterable[Weight]:
    width, rank = mixer.n_heads * mixer.head_dim, mixer.head_dim
    parts = {"q_proj": width, "k_proj": width, "v_proj": width, "b_proj": mixer.n_heads}
    parts |= {"forget_gate.f_a_proj": rank, "g_a_proj": rank}
    yield rows("in_proj.weight", {f"self_attn.{name}.weight": n for name, n in parts.items()})
    yield conv_weight("self_attn.conv1d.weight")
    yield same_weight("decay_up.weight", "self_attn.forget_gate.f_b_proj.weight")
    yield Weight(  # (h), there (1 1 h 1)
        "forget.A_log",
        ("self_attn.forget_gate.A_log",),
        lambda tensors: [tensors[0].view(1, 1, -1, 1)],
        lambda tensors: [tensors[0].flatten()],
    )
    yield same_weight("forget.dt_bias", "self_attn.forget_gate.dt_bias")
    yield same_weight("out_norm.weight", "self_attn.o_norm.weight")
    yield same_weight("gate_up.weight", "self_attn.g_b_proj.weight")
    yield same_weight("out.weight", "self_attn.o_proj.weight")


def _moe_weights(ffn: DeepSeekMoE, config: Mapping[str, Any]) -> Iterable[Weight]:
    yield from deepseek.moe_weights(ffn, config)
    if not ffn.is_dense:
        yield same_weight("selection_bias", "mlp.gate.e_score_correction_bias")


MIXER_WEIGHTS = {
    LinearAttention: _kda_weights,
    MultiHeadLatentAttention: lambda mixer, config: deepseek.mla_weights(mixer),
}


def _write_groups(n_experts: int, n_groups: int, top_k_groups: int, group_score: str) -> tuple:
    if n_groups > 1 and group_score != "top2":
        raise UsageError(f"moe_deepseek.group_score={group_score!r} (it has only 'top2')")
    if n_experts // n_groups < 2:
        raise UsageError(f"moe_deepseek.n_groups={n_groups} (it needs two experts or more in a group)")
    return n_experts, n_groups, top_k_groups


KIMI_LINEAR = Family(
    "kimi_linear",
    settings=(
        *STACK,
        FIRST_DENSE,
        Setting(
            ("num_experts", "num_expert_group", "topk_group"),
            (
                "moe_deepseek.n_experts",
                "moe_deepseek.n_groups",
                "moe_deepseek.top_k_groups",
                "moe_deepseek.group_score",
            ),
            lambda n_experts, n_groups, top_k_groups: (n_experts, n_groups, top_k_groups, "top2"),
            _write_groups,
        ),
        same("num_experts_per_token", "moe_deepseek.top_k"),
        same("num_shared_experts", "moe_deepseek.n_shared"),
        same("moe_intermediate_size", "moe_deepseek.d_expert"),
        same("intermediate_size", "moe_deepseek.d_ff"),
        same("routed_scaling_factor", "moe_deepseek.routed_scaling"),
        same("moe_renormalize", "moe_deepseek.norm_topk_prob"),
        fixed("output_router_logits", False),
        only("moe_deepseek.scoring", "sigmoid"),
        only("moe_deepseek.shared_gate", False),
        only("moe_deepseek.limit", None),
        only("ffn", "moe_deepseek"),
    ),
    weights=MIXER_WEIGHTS | {DeepSeekMoE: _moe_weights},
    unread=UNREAD_BY_BOTH,
    spelled_out=SPELLED_OUT,
    training=deepseek.MOE_TRAINING,
)


def _read_all_dense(n_layers: int, layer_types: Sequence[str]) -> tuple:
    if SPARSE in layer_types:
        raise UsageError(f"mlp_layer_types={list(layer_types)} (which leaves layers of experts)")
    return (n_layers,)


KIMI_LINEAR_DENSE = Family(
    "kimi_linear",
    settings=(
        *STACK,
        *SWIGLU,
        Setting(
            ("num_hidden_layers", "mlp_layer_types"),
            ("model.n_layers",),
            _read_all_dense,
            lambda n_layers: (n_layers, mlp_types(n_layers, n_layers)),
        ),
        only("ffn", "swiglu"),
    ),
    weights=MIXER_WEIGHTS | {SwiGLU: swiglu_weights},
    unread=(
        *UNREAD_BY_BOTH,
        "moe_intermediate_size",
        "moe_renormalize",
        "num_expert_group",
        "num_experts",
        "num_experts_per_token",
        "num_shared_experts",
        "output_router_logits",
        "routed_scaling_factor",
        "topk_group",
    ),
    spelled_out=SPELLED_OUT,
)
