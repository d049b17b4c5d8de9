"""MiniMax-M3, the language model: sparse attention beside layers of grouped-query attention, a clamped SwiGLU in dense
layers and experts, norms that multiply by 1 + weight.

Shapes: g KV heads, e index width.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from archlab.attn.gqa import GroupedQueryAttention
from archlab.attn.msa import MiniMaxSparseAttention
from archlab.errors import UsageError
from archlab.ffn.moe_deepseek import DeepSeekMoE
from archlab.interop.families import deepseek
from archlab.interop.families.common import (
    DECODER,
    UNREAD,
    gqa_weights,
    norm_eps,
    read_partial_rope,
    write_partial_rope,
)
from archlab.interop.families.layers import FIRST_DENSE, mixers
from archlab.interop.family import Family
from archlab.interop.settings import Setting, fixed, only, same
from archlab.interop.weights import Weight, halves, rows
from archlab.interop.weights import same as same_weight
from archlab.nn.glu import SLOPE


def _of_attention(
    theirs: tuple[str, ...], names: tuple[str, ...], read: Callable[..., tuple], write: Callable[..., tuple]
) -> Iterator[Setting]:
    """A setting of both kinds of attention, which must agree where a model has both."""
    for plugins in (("gqa",), ("msa",), ("gqa", "msa")):
        ours = tuple(f"{plugin}.{name}" for plugin in plugins for name in names)

        def read_all(*values: Any, times: int = len(plugins)) -> tuple:
            return read(*values) * times

        def write_one(*values: Any, ours: tuple[str, ...] = ours) -> tuple:
            first = dict(zip(names, values, strict=False))
            for name, value in zip(ours, values, strict=True):
                if value != first[name.partition(".")[2]]:
                    raise UsageError(f"{name}={value!r} (all its layers have that of {ours[0].partition('.')[0]})")
            return write(*first.values())

        yield Setting(theirs, ours, read_all, write_one)


def _read_rope(parameters: Mapping[str, Any], head_dim: int, _: int) -> tuple:
    return read_partial_rope(parameters, head_dim)


def _write_rope(theta: float, rope_dim: int, head_dim: int) -> tuple:
    return *write_partial_rope(theta, rope_dim, head_dim), rope_dim


def _read_index(parameters: Mapping[str, Any], head_dim: int, rotary_dim: int, d_index: int) -> tuple:
    theta, rope_dim, _ = _read_rope(parameters, head_dim, rotary_dim)
    if d_index < rope_dim:
        raise UsageError(f"index_head_dim={d_index} (it has no index narrower than the {rope_dim} rotary channels)")
    return theta, rope_dim, head_dim, d_index, rope_dim


def _write_index(theta: float, rope_dim: int, head_dim: int, d_index: int, index_rope_dim: int) -> tuple:
    if index_rope_dim != rope_dim:
        raise UsageError(f"msa.index_rope_dim={index_rope_dim} (it has only that of the heads, {rope_dim})")
    return *_write_rope(theta, rope_dim, head_dim), d_index


def _read_index_heads(n_kv_heads: int, n_index_heads: int) -> tuple:
    if n_index_heads != n_kv_heads:
        raise UsageError(f"index_n_heads={n_index_heads} (it has as many as num_key_value_heads={n_kv_heads})")
    return (n_kv_heads,)


HEADS = (
    *_of_attention(("num_attention_heads",), ("n_heads",), lambda n: (n,), lambda n: (n,)),
    *_of_attention(("num_key_value_heads",), ("n_kv_heads",), lambda n: (n,), lambda n: (n,)),
    *_of_attention(
        ("rope_parameters", "head_dim", "rotary_dim"), ("rope_theta", "rope_dim", "head_dim"), _read_rope, _write_rope
    ),
    *(norm_eps(plugin) for plugin in ("gqa", "msa")),
    *(only(f"{plugin}.norm", "gemma") for plugin in ("gqa", "msa")),
    *(only(f"{plugin}.qk_norm", True) for plugin in ("gqa", "msa")),
    only("gqa.window", None),
    only("gqa.out_gate", False),
    only("gqa.conv_size", 0),
    only("msa.conv_size", 0),
)
INDEX = (
    only("msa.index_norm", True),
    Setting(
        ("rope_parameters", "head_dim", "rotary_dim", "index_head_dim"),
        ("msa.rope_theta", "msa.rope_dim", "msa.head_dim", "msa.d_index", "msa.index_rope_dim"),
        _read_index,
        _write_index,
    ),
    Setting(("num_key_value_heads", "index_n_heads"), ("msa.n_kv_heads",), _read_index_heads, lambda n: (n, n)),
    same("index_block_size", "msa.block_size"),
    same("index_topk_blocks", "msa.top_k_blocks"),
    fixed("index_local_blocks", 1),
)


def _write_limit(limit: float | None) -> tuple:
    if limit is None:
        raise UsageError("moe_deepseek.limit=None (its SwiGLU is clamped)")
    return (limit,)


MOE = (
    FIRST_DENSE,
    same("num_local_experts", "moe_deepseek.n_experts"),
    same("num_experts_per_tok", "moe_deepseek.top_k"),
    same("dense_intermediate_size", "moe_deepseek.d_ff"),
    same("routed_scaling_factor", "moe_deepseek.routed_scaling"),
    deepseek.shared_width("intermediate_size", "shared_intermediate_size"),
    deepseek.ONE_GROUP,
    Setting(("swiglu_limit",), ("moe_deepseek.limit",), lambda limit: (limit,), _write_limit),
    fixed("swiglu_alpha", SLOPE),
    fixed("router_jitter_noise", 0.0),
    fixed("output_router_logits", False),
    only("moe_deepseek.scoring", "sigmoid"),
    only("moe_deepseek.norm_topk_prob", True),
    only("moe_deepseek.shared_gate", False),
    only("ffn", "moe_deepseek"),
)


def _msa_weights(mixer: MiniMaxSparseAttention, config: Mapping[str, Any]) -> Iterable[Weight]:
    yield from gqa_weights(mixer, config)
    g, e, n_rot = mixer.n_kv_heads, mixer.d_index, mixer.index_rope_dim
    sizes = {"self_attn.indexer.q_proj.weight": g * e, "self_attn.indexer.k_proj.weight": e}
    yield rows("index.weight", sizes, halves(g + 1, e, n_rot))
    for name in ("q_norm", "k_norm"):
        yield rows(f"index_{name}.weight", {f"self_attn.indexer.{name}.weight": e}, halves(1, e, n_rot))


def _moe_weights(ffn: DeepSeekMoE, config: Mapping[str, Any]) -> Iterable[Weight]:
    """Its dense networks hold gate and up in one matrix, as ours do."""
    name = "mlp." if ffn.is_dense else "mlp.shared_experts."
    for weight in deepseek.moe_weights(ffn, config):
        if not weight.ours.startswith("shared."):
            yield weight
    if ffn.shared is not None:
        yield same_weight("shared.gate_up.weight", f"{name}gate_up_proj.weight")
        yield same_weight("shared.out.weight", f"{name}down_proj.weight")
    if not ffn.is_dense:
        yield same_weight("selection_bias", "mlp.gate.e_score_correction_bias")


DENSE_ATTENTION = {"full_attention": "gqa"}
SHARED = (
    *(setting for setting in DECODER if setting.ours != ("model.norm",)),
    only("model.norm", "gemma"),
    *MOE,
)
UNREAD_BY_BOTH = (*UNREAD, "router_aux_loss_coef")

MINIMAX_M3 = Family(
    "minimax_m3_vl_text",
    settings=(*SHARED, mixers(DENSE_ATTENTION | {"minimax_m3_sparse": "msa"}, needed="msa"), *HEADS, *INDEX),
    weights={GroupedQueryAttention: gqa_weights, MiniMaxSparseAttention: _msa_weights, DeepSeekMoE: _moe_weights},
    unread=UNREAD_BY_BOTH,
    training=deepseek.MOE_TRAINING | {"msa.kl_coef": 0.0, "msa.warmup": 0.0},
)

MINIMAX_M3_DENSE = Family(
    "minimax_m3_vl_text",
    settings=(
        *SHARED,
        mixers(DENSE_ATTENTION),
        *(setting for setting in HEADS if not any(name.startswith("msa.") for name in setting.ours)),
    ),
    weights={GroupedQueryAttention: gqa_weights, DeepSeekMoE: _moe_weights},
    unread=(
        *UNREAD_BY_BOTH,
        "index_block_size",
        "index_head_dim",
        "index_local_blocks",
        "index_n_heads",
        "index_topk_blocks",
    ),
    training=deepseek.MOE_TRAINING,
)
"""All layers attend to all tokens."""
