"""Mistral (arXiv:2310.06825): grouped-query attention, with or without a sliding window, and SwiGLU."""

from archlab.attn.gqa import GroupedQueryAttention
from archlab.ffn.swiglu import SwiGLU
from archlab.interop.families.common import DECODER, GQA, NO_QK_NORM, SWIGLU, UNREAD, gqa_weights, swiglu_weights
from archlab.interop.family import Family
from archlab.interop.settings import only, same

MISTRAL = Family(
    "mistral",
    settings=(
        *DECODER,
        *GQA,
        *NO_QK_NORM,
        *SWIGLU,
        same("sliding_window", "gqa.window"),
        only("ffn", "swiglu"),
    ),
    weights={GroupedQueryAttention: gqa_weights, SwiGLU: swiglu_weights},
    unread=UNREAD,
)
