"""Qwen3-MoE (arXiv:2505.09388): Qwen3's attention, and in each layer a mixture of experts or a dense network."""

from archlab.attn.gqa import GroupedQueryAttention
from archlab.ffn.moe import MixtureOfExperts
from archlab.ffn.swiglu import SwiGLU
from archlab.interop.families.common import (
    DECODER,
    GQA,
    MOE,
    MOE_TRAINING,
    MOE_UNREAD,
    QK_NORM,
    SWIGLU,
    UNREAD,
    gqa_weights,
    moe_weights,
    swiglu_weights,
)
from archlab.interop.family import Family
from archlab.interop.settings import PerLayer, Setting, collapse, expand, fixed, same


def _read_layers(n_layers: int, dense: list[int], step: int) -> tuple:
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(n_layers)]
    return n_layers, collapse(["moe" if is_sparse else "swiglu" for is_sparse in sparse])


def _write_layers(n_layers: int, ffn: str | PerLayer) -> tuple:
    return n_layers, [i for i, name in enumerate(expand(ffn, n_layers)) if name == "swiglu"], 1


QWEN3_MOE = Family(
    "qwen3_moe",
    settings=(
        *DECODER,
        *GQA,
        *QK_NORM,
        *SWIGLU,
        *MOE,
        Setting(
            ("use_sliding_window", "sliding_window"),
            ("gqa.window",),
            lambda used, window: (window if used else None,),
            lambda window: (window is not None, window),
        ),
        Setting(
            ("num_hidden_layers", "mlp_only_layers", "decoder_sparse_step"),
            ("model.n_layers", "ffn"),
            _read_layers,
            _write_layers,
            per_layer=True,
        ),
        same("moe_intermediate_size", "moe.d_expert"),
        same("norm_topk_prob", "moe.norm_topk_prob"),
        fixed("attention_bias", False),
    ),
    weights={GroupedQueryAttention: gqa_weights, MixtureOfExperts: moe_weights, SwiGLU: swiglu_weights},
    unread=(*UNREAD, *MOE_UNREAD, "max_window_layers"),
    training=MOE_TRAINING,
)
