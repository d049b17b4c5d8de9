"""Qwen3-Next: Gated DeltaNet and, in listed layers, attention with a gate on its output; experts beside a gated shared
one, behind dense first layers; norms that multiply by 1 + weight.

Shapes: h query or key heads, g KV or value heads, c and k head width, v value width.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from archlab.attn.gqa import GroupedQueryAttention
from archlab.attn.linear import LinearAttention
from archlab.errors import UsageError
from archlab.ffn.moe_deepseek import DeepSeekMoE
from archlab.interop.families import deepseek
from archlab.interop.families.common import (
    DECODER,
    UNREAD,
    dense_weights,
    gqa_weights,
    norm_eps,
    read_partial_rope,
    write_partial_rope,
)
from archlab.interop.families.delta import DELTA, conv_weight
from archlab.interop.families.layers import mixers
from archlab.interop.family import Family
from archlab.interop.settings import Setting, fixed, only, same, without_effect
from archlab.interop.weights import Weight, halves, regrouped, rows, zeros
from archlab.interop.weights import same as same_weight


def _read_dense(n_layers: int, dense: Sequence[int], decoder_sparse_step: int) -> tuple:
    is_dense = [i in dense or (i + 1) % decoder_sparse_step != 0 for i in range(n_layers)]
    n_dense = sum(is_dense)
    if not all(is_dense[:n_dense]):
        raise UsageError(f"mlp_only_layers={list(dense)}, {decoder_sparse_step=} (it has only first layers dense)")
    return n_layers, n_dense


GDN = (
    same("linear_num_key_heads", "linear.n_heads"),
    same("linear_key_head_dim", "linear.head_dim"),
    same("linear_num_value_heads", "linear.n_v_heads"),
    same("linear_value_head_dim", "linear.v_head_dim"),
    *DELTA,
    only("linear.decay", "scalar"),
    only("linear.gate", "full"),
    only("linear.gate_act", "silu"),
    without_effect("linear.decay_rank", None),
)
GATED_ATTENTION = (
    same("num_attention_heads", "gqa.n_heads"),
    same("num_key_value_heads", "gqa.n_kv_heads"),
    Setting(
        ("rope_parameters", "head_dim"),
        ("gqa.rope_theta", "gqa.rope_dim", "gqa.head_dim"),
        read_partial_rope,
        write_partial_rope,
    ),
    norm_eps("gqa"),
    only("gqa.norm", "gemma"),
    only("gqa.qk_norm", True),
    only("gqa.window", None),
    only("gqa.out_gate", True),
    only("gqa.conv_size", 0),
    fixed("attention_bias", False),
)
MOE = (
    Setting(
        ("num_hidden_layers", "mlp_only_layers", "decoder_sparse_step"),
        ("model.n_layers", "moe_deepseek.first_dense"),
        _read_dense,
        lambda n_layers, n_dense: (n_layers, list(range(n_dense)), 1),
    ),
    same("num_experts", "moe_deepseek.n_experts"),
    same("num_experts_per_tok", "moe_deepseek.top_k"),
    same("intermediate_size", "moe_deepseek.d_ff"),
    same("norm_topk_prob", "moe_deepseek.norm_topk_prob"),
    deepseek.shared_width("moe_intermediate_size", "shared_expert_intermediate_size", at_least=1),
    deepseek.ONE_GROUP,
    fixed("output_router_logits", False),
    only("moe_deepseek.routed_scaling", 1.0),
    only("moe_deepseek.scoring", "softmax"),
    only("moe_deepseek.shared_gate", True),
    only("moe_deepseek.limit", None),
    only("ffn", "moe_deepseek"),
)


def _gdn_weights(mixer: LinearAttention, config: Mapping[str, Any]) -> Iterable[Weight]:
    """Their rows stand by key heads: a query, a key, the values and gates that it serves; their betas and decays."""
    h, g, k, v = mixer.n_heads, mixer.n_v_heads, mixer.head_dim, mixer.v_head_dim
    sizes = [h * k, h * k, g * v, g, g, g * v]
    q, key, value, beta, decay, gate = (part.view(h, -1) for part in torch.arange(sum(sizes)).split(sizes))
    wide, narrow = (torch.cat(parts, dim=1).flatten() for parts in ((q, key, value, gate), (beta, decay)))
    parts = {"in_proj_qkvz": len(wide), "in_proj_ba": len(narrow)}
    yield rows(
        "in_proj.weight", {f"linear_attn.{name}.weight": n for name, n in parts.items()}, torch.cat([wide, narrow])
    )
    yield conv_weight("linear_attn.conv1d.weight")
    yield same_weight("forget.A_log", "linear_attn.A_log")
    yield same_weight("forget.dt_bias", "linear_attn.dt_bias")
    yield same_weight("out_norm.weight", "linear_attn.norm.weight")
    yield same_weight("out.weight", "linear_attn.out_proj.weight")


def _gqa_weights(mixer: GroupedQueryAttention, config: Mapping[str, Any]) -> Iterable[Weight]:
    """Behind each query of theirs stand the gates of its head."""
    h, g, c = mixer.n_heads, mixer.n_kv_heads, mixer.head_dim
    ours = {"qkv.weight": (h + 2 * g) * c, "gate.weight": h * c}
    projections = {"q_proj": 2 * h * c, "k_proj": g * c, "v_proj": g * c}
    q, k = halves(h + g, c, mixer.rope_dim).split([h * c, g * c])
    v, gate = torch.arange((h + g) * c, sum(ours.values())).split([g * c, h * c])
    queries = torch.cat([q.view(h, c), gate.view(h, c)], dim=1).flatten()
    theirs = {f"self_attn.{name}.weight": n for name, n in projections.items()}
    yield regrouped(ours, theirs, torch.cat([queries, k, v]))
    for weight in gqa_weights(mixer, config):
        if weight.ours != "qkv.weight":
            yield weight


def _moe_weights(ffn: DeepSeekMoE, config: Mapping[str, Any]) -> Iterable[Weight]:
    """Its shared experts are one, with a gate."""
    for weight in deepseek.moe_weights(ffn, config):
        if ffn.is_dense or not weight.ours.startswith("shared."):
            yield weight
    if not ffn.is_dense:
        yield from dense_weights(ffn.shared, "shared.", "mlp.shared_expert.")
        yield same_weight("gate.weight", "mlp.shared_expert_gate.weight")
        yield zeros("selection_bias", ffn.selection_bias)


QWEN3_NEXT = Family(
    "qwen3_next",
    settings=(
        *(setting for setting in DECODER if setting.ours != ("model.norm",)),
        only("model.norm", "gemma"),
        # Only of a layer that is full attention does its cache know the length.
        mixers({"linear_attention": "linear", "full_attention": "gqa"}, needed="gqa"),
        *GDN,
        *GATED_ATTENTION,
        *MOE,
    ),
    weights={
        LinearAttention: _gdn_weights,
        GroupedQueryAttention: _gqa_weights,
        DeepSeekMoE: _moe_weights,
    },
    unread=(
        *UNREAD,
        "full_attention_interval",  # which `layer_types` spells out
        "router_aux_loss_coef",
    ),
    spelled_out={"use_sliding_window": False},
    training=deepseek.MOE_TRAINING,
)
