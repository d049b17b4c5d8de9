"""Llama (arXiv:2302.13971): grouped-query attention and SwiGLU."""

from archlab.attn.gqa import GroupedQueryAttention
from archlab.ffn.swiglu import SwiGLU
from archlab.interop.families.common import DECODER, GQA, NO_QK_NORM, SWIGLU, UNREAD, gqa_weights, swiglu_weights
from archlab.interop.family import Family
from archlab.interop.settings import fixed, only

LLAMA = Family(
    "llama",
    settings=(
        *DECODER,
        *GQA,
        *NO_QK_NORM,
        *SWIGLU,
        only("gqa.window", None),
        only("ffn", "swiglu"),
        fixed("attention_bias", False),
        fixed("mlp_bias", False),
    ),
    weights={GroupedQueryAttention: gqa_weights, SwiGLU: swiglu_weights},
    unread=(*UNREAD, "pretraining_tp", "is_llama_config", "transformers.js_config"),
    spelled_out={"rope_interleaved": False},
)
