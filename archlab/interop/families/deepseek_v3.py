"""DeepSeek-V3 (arXiv:2412.19437): latent attention, and experts chosen by sigmoid scores and a bias; or, where all
layers are among the dense first ones, SwiGLU."""

from collections.abc import Iterable, Mapping
from typing import Any

from archlab.attn.mla import MultiHeadLatentAttention
from archlab.errors import UsageError
from archlab.ffn.moe_deepseek import DeepSeekMoE
from archlab.ffn.swiglu import SwiGLU
from archlab.interop.families import deepseek
from archlab.interop.families.common import DECODER, SWIGLU, UNREAD, swiglu_weights
from archlab.interop.family import Family
from archlab.interop.settings import Setting, only, same
from archlab.interop.weights import Weight
from archlab.interop.weights import same as same_weight


def _write_groups(n_experts: int, n_groups: int, top_k_groups: int, group_score: str) -> tuple:
    if n_groups > 1 and group_score != "top2":
        raise UsageError(f"moe_deepseek.group_score={group_score!r} (it has only 'top2')")
    if n_experts // n_groups < 2:
        raise UsageError(f"moe_deepseek.n_groups={n_groups} (it needs two experts or more in a group)")
    return n_experts, n_groups, top_k_groups


def _mla_weights(mixer: MultiHeadLatentAttention, config: Mapping[str, Any]) -> Iterable[Weight]:
    return deepseek.mla_weights(mixer, interleaved=config["rope_interleave"])


def _moe_weights(ffn: DeepSeekMoE, config: Mapping[str, Any]) -> Iterable[Weight]:
    yield from deepseek.moe_weights(ffn, config)
    if not ffn.is_dense:
        yield same_weight("selection_bias", "mlp.gate.e_score_correction_bias")


ROPE_INTERLEAVE = Setting(("rope_interleave",), (), lambda either: (), lambda: (True,))
"""Weights in the other order are sorted into this one."""

UNREAD_BY_BOTH = (
    *UNREAD,
    *deepseek.MLA_UNREAD,
    *deepseek.OLD_UNREAD,
    "num_nextn_predict_layers",  # of layers that a causal language model does not have
)
SPELLED_OUT = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}

DEEPSEEK_V3 = Family(
    "deepseek_v3",
    settings=(
        *DECODER,
        *deepseek.MLA,
        *deepseek.MOE,
        ROPE_INTERLEAVE,
        Setting(
            ("n_routed_experts", "n_group", "topk_group"),
            (
                "moe_deepseek.n_experts",
                "moe_deepseek.n_groups",
                "moe_deepseek.top_k_groups",
                "moe_deepseek.group_score",
            ),
            lambda n_experts, n_groups, top_k_groups: (n_experts, n_groups, top_k_groups, "top2"),
            _write_groups,
        ),
        only("moe_deepseek.scoring", "sigmoid"),
        same("norm_topk_prob", "moe_deepseek.norm_topk_prob"),
    ),
    weights={MultiHeadLatentAttention: _mla_weights, DeepSeekMoE: _moe_weights},
    unread=UNREAD_BY_BOTH,
    spelled_out=SPELLED_OUT,
    training=deepseek.MOE_TRAINING,
)


def _read_dense(n_layers: int, n_dense: int) -> tuple:
    if n_dense < n_layers:
        raise UsageError(f"first_k_dense_replace={n_dense} (which leaves layers of experts)")
    return (n_layers,)


DEEPSEEK_V3_DENSE = Family(
    "deepseek_v3",
    settings=(
        *DECODER,
        *deepseek.MLA,
        *SWIGLU,
        ROPE_INTERLEAVE,
        Setting(("num_hidden_layers", "first_k_dense_replace"), ("model.n_layers",), _read_dense, lambda n: (n, n)),
        only("ffn", "swiglu"),
    ),
    weights={MultiHeadLatentAttention: _mla_weights, SwiGLU: swiglu_weights},
    unread=(
        *UNREAD_BY_BOTH,
        "moe_intermediate_size",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "norm_topk_prob",
        "num_experts_per_tok",
        "output_router_logits",
        "routed_scaling_factor",
        "topk_group",
    ),
    spelled_out=SPELLED_OUT,
)
