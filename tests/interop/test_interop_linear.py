"""Hybrid stacks of Transformers and of archlab with the same weights compute the same, in both directions."""

import re
from functools import partial

import pytest
import test_interop_hf
import torch
from test_interop_hf import (
    F32,
    F64,
    HEADS,
    LAYERS,
    VOCAB,
    D,
    assert_same_bits,
    assert_same_logits,
    assert_same_step,
    configured,
    each,
    error,
    full,
    mixed,
    random_tokens,
    widened,
)

from archlab.attn.gqa import GroupedQueryAttention
from archlab.attn.linear import LinearAttention
from archlab.attn.mla import MultiHeadLatentAttention
from archlab.attn.msa import MiniMaxSparseAttention
from archlab.config.compose import load
from archlab.errors import UsageError
from archlab.ffn.moe_deepseek import DeepSeekMoE
from archlab.ffn.swiglu import SwiGLU
from archlab.interop import hf
from archlab.model import build_model
from archlab.nn.glu import glu
from archlab.nn.norm import build_norm

transformers = pytest.importorskip("transformers", reason="needs the extra archlab[hf]")

DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": D,
    "intermediate_size": 50,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "rms_norm_eps": 3e-3,
    "pad_token_id": None,
}
KIMI = DECODER | {
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
    "moe_intermediate_size": 18,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "routed_scaling_factor": 1.7,
    "linear_num_heads": 5,
    "linear_head_dim": 7,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
GROUPS = {"num_expert_group": 4, "topk_group": 2}

CASES = {
    "kimi_linear": ("kimi_linear", KIMI | GROUPS),
    "kimi_linear-query-latent": (
        "kimi_linear",
        KIMI | {"q_lora_rank": 12, "moe_renormalize": False, "num_shared_experts": 2, "linear_conv_kernel_dim": 4},
    ),
    "kimi_linear-unshared": ("kimi_linear", KIMI | {"mlp_layer_types": ["sparse"] * LAYERS, "num_shared_experts": 0}),
    "kimi_linear-dense": ("kimi_linear", KIMI | {"mlp_layer_types": ["dense"] * LAYERS}),
}

M3 = {name: value for name, value in DECODER.items() if name != "intermediate_size"} | {
    "num_key_value_heads": 2,
    "head_dim": 10,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.6},
    "intermediate_size": 18,
    "shared_intermediate_size": 36,
    "dense_intermediate_size": 50,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.7,
    "swiglu_limit": 0.8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_block_size": 5,
    "index_topk_blocks": 3,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
M3_TYPE = "minimax_m3_vl_text"
CASES |= {
    M3_TYPE: (M3_TYPE, M3),
    f"{M3_TYPE}-sparse-tied": (
        M3_TYPE,
        M3
        | {
            "layer_types": ["minimax_m3_sparse"] * LAYERS,
            "mlp_layer_types": ["sparse"] * LAYERS,
            "tie_word_embeddings": True,
            "shared_intermediate_size": 18,
            "index_head_dim": 6,
            "index_topk_blocks": 2,
        },
    ),
    f"{M3_TYPE}-full": (
        M3_TYPE,
        M3
        | {
            "layer_types": ["full_attention"] * LAYERS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 9.0},
            "index_head_dim": 10,
        },
    ),
}

NEXT = DECODER | {
    "num_key_value_heads": 2,
    "head_dim": 10,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.6},
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 5,
    "linear_conv_kernel_dim": 3,
    "moe_intermediate_size": 18,
    "shared_expert_intermediate_size": 18,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
NEXT_TYPE = "qwen3_next"
CASES |= {
    NEXT_TYPE: (NEXT_TYPE, NEXT),
    f"{NEXT_TYPE}-dense-tied": (
        NEXT_TYPE,
        NEXT
        | {
            "mlp_only_layers": [0],
            "tie_word_embeddings": True,
            "norm_topk_prob": False,
            "shared_expert_intermediate_size": 36,
            "linear_num_value_heads": 3,
            "linear_conv_kernel_dim": 4,
        },
    ),
    f"{NEXT_TYPE}-full": (
        NEXT_TYPE,
        NEXT
        | {
            "layer_types": ["full_attention"] * LAYERS,
            "decoder_sparse_step": 3,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 9.0, "partial_rotary_factor": 1.0},
        },
    ),
}


PLUS_ONE = ("GemmaRMSNorm", "MiniMaxM3VLRMSNorm", "Qwen3NextRMSNorm")


@torch.no_grad()
def around_one(model):
    """Norms multiply by about 1, those of 1 + weight too: with scores four times as large it would be the rounding of
    float32 that decides, on either side."""
    for module in model.modules():
        if type(module).__name__ in PLUS_ONE:
            module.weight -= 1
    return model


def theirs(case, dtype=F32):
    return around_one(test_interop_hf.theirs(case, dtype))


def ours(attn, ffn, **settings):
    return around_one(test_interop_hf.ours(attn, ffn, **settings))


def exported(case):
    return around_one(test_interop_hf.exported(case))


@each(CASES)
def test_from_transformers(case, monkeypatch):
    model = theirs(case)
    lm = hf.from_hf(model)
    assert_same_logits(lm, model, 2e-5)
    assert_same_step(lm.train(), model.train(), 1e-6, 1e-4)
    with widened(monkeypatch, case[0]):
        model = theirs(case, F64)
        lm = hf.from_hf(model)
        assert_same_logits(lm, model, 1e-9)
        assert_same_step(lm.train(), model.train(), 1e-12, 1e-9)


@pytest.mark.parametrize("dtype", [F32, F64, torch.bfloat16])
@each(CASES)
def test_there_and_back_is_the_same_to_the_bit(case, dtype):
    model = theirs(case, dtype)
    lm = hf.from_hf(model)
    again = hf.to_hf(lm)
    assert again.config.model_type == case[0]
    assert again.dtype == again.config.dtype == dtype
    assert_same_bits(again, model)
    assert_same_bits(hf.from_hf(again), lm)


kda = partial(LinearAttention, n_heads=5, head_dim=6, conv_size=3, chunk_size=8)
mla = partial(
    MultiHeadLatentAttention,
    n_heads=5,
    kv_lora_rank=14,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=8,
    rope=False,
)
swiglu = partial(SwiGLU, d_ff=50)
deepseek = partial(DeepSeekMoE, n_experts=8, top_k=3, n_shared=1, d_expert=18, first_dense=1, d_ff=50)
kimi = mixed("a", "b", "a", a=kda, b=mla)

OURS = {
    "kimi_linear": (kimi, partial(deepseek, n_groups=4, top_k_groups=2, routed_scaling=1.7), {"tied": False}),
    "kimi_linear-dense": (kimi, swiglu, {"tied": False}),
    "kimi_linear-all-mla": (partial(mla, q_lora_rank=12), deepseek, {"tied": False}),
}

heads = {"n_heads": 6, "n_kv_heads": 3, "head_dim": 10, "rope_dim": 4, "qk_norm": True, "norm": "gemma"}
gqa = partial(GroupedQueryAttention, **heads)
index = {"block_size": 4, "top_k_blocks": 3, "d_index": 8, "index_norm": True, "index_rope_dim": 4}
msa = partial(MiniMaxSparseAttention, **heads, **index)
clamped = partial(deepseek, limit=0.7, n_shared=2, routed_scaling=1.3)
gemma = {"norm": "gemma", "tied": False}

OURS |= {
    M3_TYPE: (mixed("a", "b", "b", a=gqa, b=msa), clamped, gemma),
    f"{M3_TYPE}-sparse": (msa, partial(clamped, first_dense=0), {"norm": "gemma"}),
    f"{M3_TYPE}-full": (gqa, clamped, gemma),
}

gdn = partial(
    kda, n_v_heads=10, v_head_dim=4, conv_size=4, decay="scalar", gate="full", gate_act="silu", decay_floor=-1.0
)
gated = partial(gqa, out_gate=True)
next_layers = mixed("a", "b", "a", a=gdn, b=gated)
shared = partial(deepseek, scoring="softmax", shared_gate=True, n_shared=2)

OURS |= {
    NEXT_TYPE: (next_layers, shared, gemma),
    f"{NEXT_TYPE}-sparse": (next_layers, partial(shared, first_dense=0, norm_topk_prob=False), {"norm": "gemma"}),
    f"{NEXT_TYPE}-full": (partial(gated, rope_dim=None), shared, gemma),
}


@each(OURS)
def test_to_transformers(case, monkeypatch, request):
    lm = exported(case)
    model = hf.to_hf(lm)
    assert model.config.model_type == request.node.callspec.id.split("-")[0]
    assert_same_logits(lm, model, 2e-5)
    with widened(monkeypatch, model.config.model_type):
        lm = exported(case).double()
        model = hf.to_hf(lm)
        assert_same_logits(lm, model, 1e-9)
        assert_same_step(lm.train(), model.train(), 1e-12, 1e-9)
    assert_same_bits(hf.from_hf(model), lm)


def test_the_hybrid_as_it_is_configured_goes_there():
    overrides = ["attn=kda_mla", "ffn=moe_deepseek", "model.d_model=48", "model.n_layers=4", "model.tied=false"]
    lm = build_model(load(overrides), VOCAB).eval()
    model = hf.to_hf(lm)
    assert model.config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert error(full(lm, random_tokens()), full(model, random_tokens())) < 2e-5


def test_the_released_file_of_kimi_linear_is_read():
    """What it says beside the widths; its layers are numbered from 1."""
    widths = {name: value for name, value in KIMI.items() if not name.startswith("linear") and name != "layer_types"}
    released = {
        "linear_attn_config": {
            "full_attn_layers": [2],
            "head_dim": 7,
            "kda_layers": [1, 3],
            "num_heads": 5,
            "short_conv_kernel_size": 3,
        },
        "first_k_dense_replace": 1,
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "use_grouped_topk": True,
    }
    config = transformers.CONFIG_MAPPING["kimi_linear"].from_dict(widths | released)
    assert hf.configuration(config) == hf.configuration(configured(("kimi_linear", KIMI)))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("kimi_linear", {"attention_bias": True}),
        ("kimi_linear", {"tie_word_embeddings": True}),
        ("kimi_linear", {"num_key_value_heads": 2}),
        ("kimi_linear", {"mla_use_nope": False}),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}),
        ("kimi_linear", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
        ("kimi_linear", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
        ("kimi_linear-dense", {"hidden_act": "gelu"}),
        (M3_TYPE, {"swiglu_alpha": 1.0}),
        (M3_TYPE, {"index_n_heads": 1}),
        (M3_TYPE, {"index_head_dim": 4}),
        (M3_TYPE, {"index_local_blocks": 2}),
        (M3_TYPE, {"shared_intermediate_size": 20}),
        (M3_TYPE, {"router_jitter_noise": 0.1}),
        (M3_TYPE, {"output_router_logits": True}),
        (NEXT_TYPE, {"attention_bias": True}),
        (NEXT_TYPE, {"mlp_only_layers": [1]}),
        (NEXT_TYPE, {"mlp_only_layers": [], "decoder_sparse_step": 2}),
        (NEXT_TYPE, {"shared_expert_intermediate_size": 20}),
        (NEXT_TYPE, {"shared_expert_intermediate_size": 0}),
        (NEXT_TYPE, {"output_router_logits": True}),
        (NEXT_TYPE, {"hidden_act": "gelu"}),
        (NEXT_TYPE, {"use_sliding_window": True}),
    ],
)
def test_a_setting_without_words_for_it_is_refused_by_name(name, change):
    with pytest.raises(UsageError, match=f"archlab cannot express {CASES[name][0]}'s {next(iter(change))}="):
        hf.configuration(configured(CASES[name], **change))


@pytest.mark.parametrize(
    ("named", "attn", "ffn"),
    [
        ("attn='linear'", kda, swiglu),
        ("linear.n_v_heads=10", partial(kda, n_v_heads=10), swiglu),
        ("linear.v_head_dim=4", partial(kda, v_head_dim=4), swiglu),
        ("linear.decay_rank=4", partial(kda, decay_rank=4), swiglu),
        ("linear.conv_size=0", partial(kda, conv_size=0), swiglu),
        ("linear.feature_map='none'", partial(kda, feature_map="none"), swiglu),
        ("linear.rope_dim=4", partial(kda, rope_dim=4), swiglu),
        ("linear.delta=False", partial(kda, delta=False), swiglu),
        ("linear.beta_max=2.0", partial(kda, beta_max=2.0), swiglu),
        ("linear.decay='scalar'", partial(kda, decay="scalar"), swiglu),
        ("linear.decay_gate='bounded'", partial(kda, decay_gate="bounded"), swiglu),
        ("linear.norm='none'", partial(kda, norm="none"), swiglu),
        ("linear.norm_eps=0.1", partial(kda, norm_eps=0.1), swiglu),
        ("linear.gate='full'", partial(kda, gate="full"), swiglu),
        ("linear.gate_act='silu'", partial(kda, gate_act="silu"), swiglu),
        ("mla.rope=True", mixed("a", "b", "a", a=kda, b=partial(mla, rope=True)), swiglu),
        ("moe_deepseek.scoring='softmax'", kimi, partial(deepseek, scoring="softmax")),
        ("moe_deepseek.n_groups=8", kimi, partial(deepseek, n_groups=8, top_k_groups=4)),
        ("moe_deepseek.group_score='max'", kimi, partial(deepseek, n_groups=2, group_score="max")),
    ],
)
def test_a_setting_that_no_family_has_is_refused_by_name(named, attn, ffn):
    with pytest.raises(UsageError, match=f"kimi_linear cannot express {re.escape(named)}"):
        hf.to_hf(ours(attn, ffn, tied=False))


def test_a_head_tied_to_the_embedding_is_refused():
    with pytest.raises(UsageError, match=r"kimi_linear cannot express model\.tied=True"):
        hf.to_hf(ours(kimi, swiglu))


@pytest.mark.parametrize(
    ("named", "attn", "ffn"),
    [
        ("msa.index_norm=False", partial(msa, index_norm=False), clamped),
        ("msa.index_rope_dim=2", partial(msa, index_rope_dim=2), clamped),
        ("msa.norm='rms'", partial(msa, norm="rms"), clamped),
        ("msa.qk_norm=False", partial(msa, qk_norm=False), clamped),
        ("msa.norm_eps=0.1", partial(msa, norm_eps=0.1), clamped),
        ("msa.rope_theta=9.0", mixed("a", "b", "b", a=gqa, b=partial(msa, rope_theta=9.0)), clamped),
        ("msa.n_kv_heads=2", mixed("a", "b", "b", a=gqa, b=partial(msa, n_kv_heads=2)), clamped),
        ("gqa.window=7", mixed("a", "b", "b", a=partial(gqa, window=7), b=msa), clamped),
        ("gqa.out_gate=True", mixed("a", "b", "b", a=partial(gqa, out_gate=True), b=msa), clamped),
        ("moe_deepseek.limit=None", msa, deepseek),
        ("moe_deepseek.scoring='softmax'", msa, partial(clamped, scoring="softmax")),
        ("moe_deepseek.n_groups=4", msa, partial(clamped, n_groups=4, top_k_groups=2)),
        ("moe_deepseek.shared_gate=True", msa, partial(clamped, shared_gate=True)),
    ],
)
def test_a_setting_that_minimax_m3_does_not_have_is_refused_by_name(named, attn, ffn):
    with pytest.raises(UsageError, match=f"{M3_TYPE} cannot express {re.escape(named)}"):
        hf.to_hf(ours(attn, ffn, **gemma))


def with_gdn(**change):
    return mixed("a", "b", "a", a=partial(gdn, **change), b=gated)


def with_gated(**change):
    return mixed("a", "b", "a", a=gdn, b=partial(gated, **change))


@pytest.mark.parametrize(
    ("named", "attn", "ffn"),
    [
        ("attn='linear'", gdn, shared),
        ("linear.conv_size=0", with_gdn(conv_size=0), shared),
        ("linear.feature_map='none'", with_gdn(feature_map="none"), shared),
        ("linear.rope_dim=4", with_gdn(rope_dim=4), shared),
        ("linear.delta=False", with_gdn(delta=False), shared),
        ("linear.beta_max=2.0", with_gdn(beta_max=2.0), shared),
        ("linear.decay='channel'", with_gdn(decay="channel"), shared),
        ("linear.decay_gate='bounded'", with_gdn(decay_gate="bounded"), shared),
        ("linear.norm='none'", with_gdn(norm="none"), shared),
        ("linear.norm_eps=0.1", with_gdn(norm_eps=0.1), shared),
        ("linear.gate='low_rank'", with_gdn(gate="low_rank"), shared),
        ("linear.gate_act='sigmoid'", with_gdn(gate_act="sigmoid"), shared),
        ("gqa.out_gate=False", with_gated(out_gate=False), shared),
        ("gqa.norm='rms'", with_gated(norm="rms"), shared),
        ("gqa.norm_eps=0.1", with_gated(norm_eps=0.1), shared),
        ("gqa.qk_norm=False", with_gated(qk_norm=False), shared),
        ("gqa.window=7", with_gated(window=7), shared),
        ("moe_deepseek.scoring='sigmoid'", next_layers, partial(shared, scoring="sigmoid")),
        ("moe_deepseek.shared_gate=False", next_layers, partial(shared, shared_gate=False)),
        ("moe_deepseek.routed_scaling=1.5", next_layers, partial(shared, routed_scaling=1.5)),
        ("moe_deepseek.limit=0.7", next_layers, partial(shared, limit=0.7)),
        ("moe_deepseek.n_groups=4", next_layers, partial(shared, n_groups=4, top_k_groups=2)),
    ],
)
def test_a_setting_that_qwen3_next_does_not_have_is_refused_by_name(named, attn, ffn):
    with pytest.raises(UsageError, match=f"{NEXT_TYPE} cannot express {re.escape(named)}"):
        hf.to_hf(ours(attn, ffn, **gemma))


def test_qwen3_next_has_no_selection_bias_and_no_plain_norm():
    with pytest.raises(UsageError, match="selection_bias is not zero"):
        hf.to_hf(ours(next_layers, shared, **gemma))
    with pytest.raises(UsageError, match=f"{NEXT_TYPE} cannot express model.norm='rms'"):
        hf.to_hf(ours(next_layers, shared))


def test_the_released_file_of_qwen3_next_is_read():
    """What it says beside the widths; three layers in four are linear."""
    widths = NEXT | {"num_hidden_layers": 4, "full_attention_interval": 4}
    rotation = {"rope_theta": 500.0, "rope_scaling": None, "partial_rotary_factor": 0.6}
    released = {n: v for n, v in widths.items() if n not in ("layer_types", "rope_parameters")} | rotation
    config = transformers.CONFIG_MAPPING[NEXT_TYPE].from_dict(released | {"use_sliding_window": False})
    layers = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    assert hf.configuration(config) == hf.configuration(configured((NEXT_TYPE, NEXT), **layers))


def test_norms_times_one_plus_weight():
    x, norm = torch.randn(3, 7, dtype=F64), build_norm("gemma", 7, 1e-3).double()
    plain = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(norm(x), plain)
    with torch.no_grad():
        norm.weight.normal_()
    torch.testing.assert_close(norm(x), plain * (1 + norm.weight))
    assert norm(x.bfloat16()).dtype == torch.bfloat16


def test_a_clamped_swiglu():
    values = torch.linspace(-3, 3, 25, dtype=F64)
    gates, ups = values.clamp(max=1), values.clamp(-1, 1)
    expected = gates / (1 + (-1.702 * gates).exp()) * (ups[:, None] + 1)
    torch.testing.assert_close(glu(values.expand(25, 25), values[:, None].expand(25, 25), 1.0), expected)


def test_gates_on_the_output_of_attention_and_of_shared_experts():
    x = torch.randn(2, 9, D, dtype=F64)
    mixer = partial(gqa, out_gate=True)(D).double()
    pre = []
    handle = mixer.out.register_forward_pre_hook(lambda _, args: pre.append(args[0]))
    mixer(x)
    gate, mixer.gate = mixer.gate, None
    mixer(x)
    handle.remove()
    torch.testing.assert_close(pre[0], pre[1] * torch.sigmoid(x @ gate.weight.T))
    ffn = partial(deepseek, shared_gate=True, first_dense=0)(D, layer_idx=0).double().eval()
    gated = ffn(x)[0]
    gate, ffn.gate = ffn.gate, None
    torch.testing.assert_close(gated, ffn(x)[0] - ffn.shared(x)[0] * torch.sigmoid(-x @ gate.weight.T))
    with pytest.raises(UsageError, match="shared_gate=true"):
        partial(deepseek, shared_gate=True, n_shared=0)(D, layer_idx=0)
