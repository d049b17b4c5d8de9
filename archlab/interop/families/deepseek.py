"""What DeepSeek-V2 and V3 share: latent attention, and experts beside shared ones behind dense first layers."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from archlab.attn.mla import MultiHeadLatentAttention
from archlab.errors import UsageError
from archlab.ffn.moe_deepseek import DeepSeekMoE
from archlab.interop.families.common import dense_weights, expert_weights, rope
from archlab.interop.settings import Setting, fixed, only, same
from archlab.interop.weights import Weight, halves, rows
from archlab.interop.weights import same as same_weight


def _read_heads(n_heads: int, n_kv_heads: int) -> tuple:
    if n_kv_heads != n_heads:
        raise UsageError(f"num_key_value_heads={n_kv_heads} (it has as many as num_attention_heads={n_heads})")
    return (n_heads,)


MLA = (
    Setting(("num_attention_heads", "num_key_value_heads"), ("mla.n_heads",), _read_heads, lambda n: (n, n)),
    same("kv_lora_rank", "mla.kv_lora_rank"),
    same("q_lora_rank", "mla.q_lora_rank"),
    same("qk_nope_head_dim", "mla.qk_nope_head_dim"),
    same("qk_rope_head_dim", "mla.qk_rope_head_dim"),
    same("v_head_dim", "mla.v_head_dim"),
    rope("mla.rope_theta"),
    only("mla.rope", True),
    only("mla.conv_size", 0),
    only("mla.norm_eps", 1e-6),  # written into their code, whatever rms_norm_eps
    only("attn", "mla"),
    fixed("attention_bias", False),
)
MLA_UNREAD = ("head_dim", "qk_head_dim")
"""Sums of the widths above."""

OLD_UNREAD = ("auto_map", "aux_loss_alpha", "ep_size", "pretraining_tp", "seq_aux")
"""What the authors' own code read of its configuration, for training and for its parallel layout."""

MOE = (
    same("n_routed_experts", "moe_deepseek.n_experts"),
    same("num_experts_per_tok", "moe_deepseek.top_k"),
    same("n_shared_experts", "moe_deepseek.n_shared"),
    same("moe_intermediate_size", "moe_deepseek.d_expert"),
    same("intermediate_size", "moe_deepseek.d_ff"),
    same("first_k_dense_replace", "moe_deepseek.first_dense"),
    same("routed_scaling_factor", "moe_deepseek.routed_scaling"),
    fixed("output_router_logits", False),
    only("moe_deepseek.shared_gate", False),
    only("moe_deepseek.limit", None),
    only("ffn", "moe_deepseek"),
)
MOE_TRAINING = {"moe_deepseek.bias_rate": 0.0, "moe_deepseek.balance_coef": 0.0}


def _write_one_group(n_groups: int, top_k_groups: int, group_score: str) -> tuple:
    if n_groups > 1:
        raise UsageError(f"moe_deepseek.n_groups={n_groups} (it has one group)")
    return ()


ONE_GROUP = Setting(
    (),
    ("moe_deepseek.n_groups", "moe_deepseek.top_k_groups", "moe_deepseek.group_score"),
    lambda: (1, 1, "top2"),
    _write_one_group,
)


def shared_width(expert: str, shared: str, *, at_least: int = 0) -> Setting:
    """Shared experts given by the width of an expert and of all shared ones, which are so many or more."""

    def read(d_expert: int, width: int) -> tuple:
        if width % d_expert or width < at_least * d_expert:
            raise UsageError(f"{shared}={width} (it has only multiples of {d_expert})")
        return d_expert, width // d_expert

    return Setting(
        (expert, shared),
        ("moe_deepseek.d_expert", "moe_deepseek.n_shared"),
        read,
        lambda d_expert, n_shared: (d_expert, n_shared * d_expert),
    )


def mla_weights(mixer: MultiHeadLatentAttention, interleaved: bool = True) -> Iterable[Weight]:
    """`interleaved`: their rotation pairs channels 2i and 2i + 1, as ours, else i and i + dr/2."""
    h, dn, dr, dc = mixer.n_heads, mixer.dn, mixer.dr, mixer.dc
    n_rot = 0 if interleaved else dr
    query = halves_behind(h, dn, dr, n_rot)
    latent = halves_behind(1, dc, dr, n_rot)
    down = torch.arange(mixer.d_query) if mixer.q_up is not None else query
    name = "q_proj" if mixer.q_up is None else "q_a_proj"
    sizes = {name: mixer.d_query, "kv_a_proj_with_mqa": dc + dr}
    order = torch.cat([down, mixer.d_query + latent])
    yield rows("down.weight", {f"self_attn.{name}.weight": n for name, n in sizes.items()}, order)
    if mixer.q_up is not None:
        yield same_weight("q_norm.weight", "self_attn.q_a_layernorm.weight")
        yield rows("q_up.weight", {"self_attn.q_b_proj.weight": len(query)}, query)
    yield same_weight("kv_norm.weight", "self_attn.kv_a_layernorm.weight")
    yield same_weight("kv_up.weight", "self_attn.kv_b_proj.weight")
    yield same_weight("out.weight", "self_attn.o_proj.weight")


def halves_behind(n_heads: int, plain: int, rotary: int, n_rot: int) -> torch.Tensor:
    """`halves` of the rotary channels of heads whose first `plain` channels have no position."""
    width = plain + rotary
    head = torch.cat([torch.arange(plain), plain + halves(1, rotary, n_rot)])
    return (torch.arange(n_heads)[:, None] * width + head).flatten()


def moe_weights(ffn: DeepSeekMoE, config: Mapping[str, Any]) -> Iterable[Weight]:
    """All but the selection bias."""
    if ffn.is_dense:
        yield from dense_weights(ffn.shared, "shared.", "mlp.")
        return
    yield from expert_weights()
    if ffn.shared is not None:
        yield from dense_weights(ffn.shared, "shared.", "mlp.shared_experts.")
