"""Hybrid stacks of Transformers and of archlab with the same weights compute the same, in both directions."""

import re
from functools import partial

import pytest
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
    ours,
    random_tokens,
    theirs,
    widened,
)

from archlab.attn.kda import KimiDeltaAttention
from archlab.attn.mla import MultiHeadLatentAttention
from archlab.errors import UsageError
from archlab.ffn.moe_deepseek import DeepSeekMoE
from archlab.ffn.swiglu import SwiGLU
from archlab.interop import hf
from archlab.model import build_model
from archlab.plugins import load

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


kda = partial(KimiDeltaAttention, n_heads=5, head_dim=6, conv_size=3, chunk_size=8)
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


@each(OURS)
def test_to_transformers(case, monkeypatch, request):
    attn, ffn, settings = case
    lm = ours(attn, ffn, **settings)
    model = hf.to_hf(lm)
    assert model.config.model_type == request.node.callspec.id.split("-")[0]
    assert_same_logits(lm, model, 2e-5)
    with widened(monkeypatch, model.config.model_type):
        lm = ours(attn, ffn, **settings).double()
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
    ],
)
def test_a_setting_without_words_for_it_is_refused_by_name(name, change):
    with pytest.raises(UsageError, match=f"archlab cannot express {CASES[name][0]}'s {next(iter(change))}="):
        hf.configuration(configured(CASES[name], **change))


@pytest.mark.parametrize(
    ("named", "attn", "ffn"),
    [
        ("attn='kda'", kda, swiglu),
        ("kda.n_v_heads=10", partial(kda, n_v_heads=10), swiglu),
        ("kda.v_head_dim=4", partial(kda, v_head_dim=4), swiglu),
        ("kda.decay_rank=4", partial(kda, decay_rank=4), swiglu),
        ("kda.conv_size=0", partial(kda, conv_size=0), swiglu),
        ("kda.feature_map='none'", partial(kda, feature_map="none"), swiglu),
        ("kda.rope_dim=4", partial(kda, rope_dim=4), swiglu),
        ("kda.delta=False", partial(kda, delta=False), swiglu),
        ("kda.beta_max=2.0", partial(kda, beta_max=2.0), swiglu),
        ("kda.decay='scalar'", partial(kda, decay="scalar"), swiglu),
        ("kda.decay_gate='bounded'", partial(kda, decay_gate="bounded"), swiglu),
        ("kda.norm='none'", partial(kda, norm="none"), swiglu),
        ("kda.norm_eps=0.1", partial(kda, norm_eps=0.1), swiglu),
        ("kda.gate='full'", partial(kda, gate="full"), swiglu),
        ("kda.gate_act='silu'", partial(kda, gate_act="silu"), swiglu),
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
