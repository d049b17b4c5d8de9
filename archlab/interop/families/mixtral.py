"""Mixtral (arXiv:2401.04088): Mistral's attention and a mixture of experts in every layer."""

from archlab.attn.gqa import GroupedQueryAttention
from archlab.ffn.moe import MixtureOfExperts
from archlab.interop.families.common import (
    DECODER,
    GQA,
    MOE,
    MOE_TRAINING,
    MOE_UNREAD,
    NO_QK_NORM,
    UNREAD,
    gqa_weights,
    moe_weights,
)
from archlab.interop.family import Family
from archlab.interop.settings import fixed, only, same

MIXTRAL = Family(
    "mixtral",
    settings=(
        *DECODER,
        *GQA,
        *NO_QK_NORM,
        *MOE,
        same("sliding_window", "gqa.window"),
        same("intermediate_size", "moe.d_expert"),
        only("ffn", "moe"),
        only("moe.norm_topk_prob", True),
        fixed("router_jitter_noise", 0.0),
    ),
    weights={GroupedQueryAttention: gqa_weights, MixtureOfExperts: moe_weights},
    unread=(*UNREAD, *MOE_UNREAD),
    training=MOE_TRAINING,
)
