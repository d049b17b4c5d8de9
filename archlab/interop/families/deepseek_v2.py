"""DeepSeek-V2 (arXiv:2405.04434): latent attention, and experts chosen by softmax scores in the best groups."""

from collections.abc import Iterable, Mapping
from typing import Any

from archlab.attn.mla import MultiHeadLatentAttention
from archlab.errors import UsageError
from archlab.ffn.moe_deepseek import DeepSeekMoE
from archlab.interop.families import deepseek
from archlab.interop.families.common import DECODER, UNREAD
from archlab.interop.family import Family
from archlab.interop.settings import Setting, fixed, only
from archlab.interop.weights import Weight, zeros

GREEDY, LIMITED = "greedy", "group_limited_greedy"


def _read_groups(method: str, n_groups: int | None, top_k_groups: int | None) -> tuple:
    if method not in (GREEDY, LIMITED):
        raise UsageError(f"topk_method={method!r} (it has only {GREEDY!r} and {LIMITED!r})")
    return (n_groups, top_k_groups, "max") if method == LIMITED else (1, 1, "max")


def _write_groups(n_groups: int, top_k_groups: int, group_score: str) -> tuple:
    if n_groups == 1:
        return GREEDY, 1, 1
    if group_score != "max":
        raise UsageError(f"moe_deepseek.group_score={group_score!r} (it has only 'max')")
    return LIMITED, n_groups, top_k_groups


def _moe_weights(ffn: DeepSeekMoE, config: Mapping[str, Any]) -> Iterable[Weight]:
    yield from deepseek.moe_weights(ffn, config)
    if not ffn.is_dense:
        yield zeros("selection_bias", ffn.selection_bias)


DEEPSEEK_V2 = Family(
    "deepseek_v2",
    settings=(
        *DECODER,
        *deepseek.MLA,
        *deepseek.MOE,
        Setting(
            ("topk_method", "n_group", "topk_group"),
            ("moe_deepseek.n_groups", "moe_deepseek.top_k_groups", "moe_deepseek.group_score"),
            _read_groups,
            _write_groups,
        ),
        only("moe_deepseek.scoring", "softmax"),
        only("moe_deepseek.norm_topk_prob", False),
        fixed("norm_topk_prob", False),  # which its code does not look at
        fixed("mlp_bias", False),
    ),
    weights={
        MultiHeadLatentAttention: lambda mixer, config: deepseek.mla_weights(mixer),
        DeepSeekMoE: _moe_weights,
    },
    unread=(*UNREAD, *deepseek.MLA_UNREAD, *deepseek.OLD_UNREAD),
    spelled_out={"moe_layer_freq": 1, "scoring_func": "softmax"},
    training=deepseek.MOE_TRAINING,
)
