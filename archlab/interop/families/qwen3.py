"""Qwen3 (arXiv:2505.09388): grouped-query attention with normed queries and keys, a window in some layers, SwiGLU."""

from archlab.attn.gqa import GroupedQueryAttention
from archlab.errors import UsageError
from archlab.ffn.swiglu import SwiGLU
from archlab.interop.families.common import DECODER, GQA, QK_NORM, SWIGLU, UNREAD, gqa_weights, swiglu_weights
from archlab.interop.family import Family
from archlab.interop.settings import PerLayer, Setting, collapse, expand, fixed, only

LAYER_TYPES = {True: "sliding_attention", False: "full_attention"}


def _read_windows(n_layers: int, used: bool, window: int | None, layer_types: list[str]) -> tuple:
    for name in layer_types:
        if name not in LAYER_TYPES.values():
            raise UsageError(f"layer_types={layer_types} (it has only {' and '.join(LAYER_TYPES.values())})")
    return n_layers, collapse([window if used and name == LAYER_TYPES[True] else None for name in layer_types])


def _write_windows(n_layers: int, window: int | PerLayer | None) -> tuple:
    windows = expand(window, n_layers)
    widths = sorted({w for w in windows if w is not None})
    if len(widths) > 1:
        raise UsageError(f"gqa.window={list(windows)} (it has windows of one width)")
    return n_layers, bool(widths), *(widths or [None]), [LAYER_TYPES[w is not None] for w in windows]


QWEN3 = Family(
    "qwen3",
    settings=(
        *DECODER,
        *GQA,
        *QK_NORM,
        *SWIGLU,
        Setting(
            ("num_hidden_layers", "use_sliding_window", "sliding_window", "layer_types"),
            ("model.n_layers", "gqa.window"),
            _read_windows,
            _write_windows,
            per_layer=True,
        ),
        only("ffn", "swiglu"),
        fixed("attention_bias", False),
    ),
    weights={GroupedQueryAttention: gqa_weights, SwiGLU: swiglu_weights},
    unread=(*UNREAD, "max_window_layers"),  # which `layer_types` spells out
)
