"""Models of Transformers and of archlab with the same weights compute the same, in both directions.

Every family here widens no further than float32: its norms, its rotation and its router's scores are computed in
float32 whatever the weights. Where float64 is asked for, `widened` lets those parts compute in float64 too; nothing
else of the library's code is touched.
"""

import inspect
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from archlab.attn.gqa import GroupedQueryAttention
from archlab.attn.hybrid import hybrid
from archlab.attn.mla import MultiHeadLatentAttention
from archlab.config.compose import load
from archlab.errors import UsageError
from archlab.ffn.mlp import MLP
from archlab.ffn.moe import MixtureOfExperts
from archlab.ffn.moe_deepseek import DeepSeekMoE
from archlab.ffn.swiglu import SwiGLU
from archlab.interop import hf, weights
from archlab.interop.families import FAMILIES
from archlab.interop.families.llama import LLAMA
from archlab.interop.settings import describe
from archlab.model import LM, build_model
from archlab.plugins import HARNESS_ARGS

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="needs the extra archlab[hf]")
transformers.logging.set_verbosity_error()

F32, F64 = torch.float32, torch.float64
VOCAB, D, HEADS, LAYERS = 97, 36, 6, 3
BATCH, LENGTH = 3, 37
PIECES = (11, 1, 17, 8)

DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": D,
    "intermediate_size": 50,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "rms_norm_eps": 3e-3,
}
GQA = DECODER | {"num_key_value_heads": 2, "head_dim": 10}
MOE = GQA | {"num_local_experts": 5, "num_experts_per_tok": 2}
QWEN_MOE = MOE | {"moe_intermediate_size": 18}
WINDOW = {"use_sliding_window": True, "sliding_window": 7}
MLA = DECODER | {
    "num_key_value_heads": HEADS,
    "q_lora_rank": 12,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
    "moe_intermediate_size": 18,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
LIMITED = {"n_group": 4, "topk_group": 2}
V2 = MLA | {"n_shared_experts": 2}
V3 = MLA | LIMITED | {"n_shared_experts": 1}

CASES = {
    "llama": ("llama", GQA),
    "llama-mha-tied": ("llama", GQA | {"num_key_value_heads": HEADS, "tie_word_embeddings": True}),
    "llama-mqa": ("llama", GQA | {"num_key_value_heads": 1, "head_dim": None}),
    "mistral": ("mistral", GQA | {"sliding_window": None, "head_dim": None}),
    "mistral-window": ("mistral", GQA | {"sliding_window": 7, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", GQA | WINDOW | {"max_window_layers": 1}),
    "qwen3-full": ("qwen3", GQA),
    "qwen3-mha-tied": ("qwen3", GQA | {"num_key_value_heads": HEADS, "tie_word_embeddings": True}),
    "qwen3-windows": ("qwen3", GQA | WINDOW | {"max_window_layers": 0, "num_key_value_heads": 1}),
    "mixtral": ("mixtral", MOE | {"sliding_window": 7, "num_experts_per_tok": 3}),
    "mixtral-full": ("mixtral", MOE | {"head_dim": None}),
    "qwen3_moe": ("qwen3_moe", QWEN_MOE | {"decoder_sparse_step": 2, "tie_word_embeddings": True}),
    "qwen3_moe-normed": ("qwen3_moe", QWEN_MOE | {"norm_topk_prob": True}),
    "qwen3_moe-dense-layer": ("qwen3_moe", QWEN_MOE | WINDOW | {"mlp_only_layers": [1]}),
    "deepseek_v2": ("deepseek_v2", V2 | LIMITED | {"topk_method": "group_limited_greedy"}),
    "deepseek_v2-lite": ("deepseek_v2", V2 | {"q_lora_rank": None, "first_k_dense_replace": 0}),
    "deepseek_v2-tied": ("deepseek_v2", V2 | {"n_shared_experts": 0, "tie_word_embeddings": True}),
    "deepseek_v3": ("deepseek_v3", V3),
    "deepseek_v3-one-group": ("deepseek_v3", V3 | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "deepseek_v3-unnormed": ("deepseek_v3", V3 | {"norm_topk_prob": False, "n_shared_experts": 2}),
    "deepseek_v3-unshared": ("deepseek_v3", V3 | {"n_shared_experts": 0, "first_k_dense_replace": 0}),
    "deepseek_v3-dense": ("deepseek_v3", V3 | {"first_k_dense_replace": LAYERS, "q_lora_rank": None}),
}
HALVES = {"deepseek_v3-halves": ("deepseek_v3", V3 | {"rope_interleave": False})}
MODEL_TYPES = list(dict.fromkeys(family.model_type for family in FAMILIES))


def each(cases):
    """One case a family is fast, the others are the slow part."""
    return pytest.mark.parametrize(
        "case",
        [pytest.param(c, id=name, marks=[] if name in MODEL_TYPES else pytest.mark.slow) for name, c in cases.items()],
    )


def configured(case, **change):
    model_type, settings = case
    return transformers.AutoConfig.for_model(model_type, **settings | change)


def theirs(case, dtype=F32):
    """A random model of Transformers in which every weight matters and the bias of a router decides something."""
    model = transformers.AutoModelForCausalLM.from_config(configured(case)).to(dtype).eval()
    model.set_experts_implementation("eager")
    return strong(model)


def strong(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in hf.tensors(model).items():
            noise = torch.randn(tensor.shape, generator=generator, dtype=F64)
            bias = "bias" in name
            tensor.copy_(1 + 0.3 * noise if "norm" in name else noise * (0.1 if bias else tensor.shape[-1] ** -0.5))
    return model


def random_tokens(length=LENGTH):
    return torch.randint(VOCAB, (BATCH, length), generator=torch.Generator().manual_seed(2))


@contextmanager
def widened(monkeypatch, *model_types):
    """Float64 wherever the code of these families says float32."""

    class Wide:
        float = float32 = F64

        def __getattr__(self, name):
            return getattr(torch, name)

    with monkeypatch.context() as patch:
        for model_type in model_types:
            folder = model_type.removesuffix("_text")
            name = f"transformers.models.{folder}.modeling_{folder}"
            __import__(name)
            patch.setattr(sys.modules[name], "torch", Wide())
        patch.setattr(Tensor, "float", Tensor.double)
        yield


def full(model, tokens):
    return model(tokens)[0] if isinstance(model, LM) else model(tokens).logits


@torch.no_grad()
def fed(model, tokens, pieces):
    """Logits of tokens that a cache gets in pieces."""
    if isinstance(model, LM):
        cache = model.init_cache(len(tokens), tokens.shape[1] + 5)
        return torch.cat([model(piece, cache)[0] for piece in tokens.split(list(pieces), dim=1)], dim=1)
    name = next(n for n in ("cache", "past_key_values") if n in inspect.signature(model.forward).parameters)
    cache = transformers.DynamicCache(config=model.config)
    return torch.cat([model(piece, **{name: cache}).logits for piece in tokens.split(list(pieces), dim=1)], dim=1)


def error(actual, expected):
    """The largest, as a share of the largest logit."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def assert_same_logits(lm, model, tolerance):
    tokens = random_tokens()
    expected = full(model, tokens)
    assert error(full(lm, tokens), expected) < tolerance
    for pieces in (PIECES, [1] * LENGTH):
        assert error(fed(model, tokens, pieces), expected) < tolerance
        assert error(fed(lm, tokens, pieces), expected) < tolerance


def losses_and_gradients(lm, model):
    """Of one batch, the gradients of both under the names of Transformers."""
    tokens = random_tokens(LENGTH + 1)
    for one in (lm, model):
        loss = cross_entropy(full(one, tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        one.zero_grad()
        loss.backward()
        yield loss.item()
    grads = {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}
    table = [rule for rule in hf.rules(lm, model.config) if rule.ours in grads]
    yield weights.to_theirs(table, grads)
    yield {name: p.grad for name, p in model.named_parameters() if p.numel() and p.grad is not None}


def assert_same_step(lm, model, loss_tolerance, tolerance):
    loss, expected_loss, grads, expected = losses_and_gradients(lm, model)
    assert loss == pytest.approx(expected_loss, rel=loss_tolerance)
    assert grads.keys() == expected.keys()
    for name, grad in expected.items():
        assert grad.norm() > 0, name
        assert (grads[name] - grad).norm() < tolerance * grad.norm(), name


def assert_same_bits(actual, expected):
    actual, expected = hf.tensors(actual), hf.tensors(expected)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert torch.equal(actual[name], tensor), name


@each(CASES | HALVES)
def test_from_transformers(case, monkeypatch):
    model = theirs(case)
    assert_same_logits(hf.from_hf(model), model, 2e-5)
    with widened(monkeypatch, case[0]):
        model = theirs(case, F64)
        assert_same_logits(hf.from_hf(model), model, 1e-9)


@each(CASES | HALVES)
def test_a_training_step(case, monkeypatch):
    model = theirs(case).train()
    assert_same_step(hf.from_hf(model), model, 1e-6, 1e-4)
    with widened(monkeypatch, case[0]):
        model = theirs(case, F64).train()
        assert_same_step(hf.from_hf(model), model, 1e-12, 1e-9)


@pytest.mark.parametrize("dtype", [F32, F64, torch.bfloat16])
@each(CASES)
def test_there_and_back_is_the_same_to_the_bit(case, dtype):
    model = theirs(case, dtype)
    lm = hf.from_hf(model)
    again = hf.to_hf(lm)
    windowless = case[0] == "mistral" and case[1]["sliding_window"] is None  # which is a Llama
    assert again.config.model_type == ("llama" if windowless else case[0])
    assert again.dtype == again.config.dtype == dtype
    assert again.config.eos_token_id is None
    assert again.generation_config.eos_token_id is None
    assert_same_bits(again, model)
    assert_same_bits(hf.from_hf(again), lm)


def test_the_order_of_rotated_channels_is_that_of_archlab_on_return():
    model = theirs(HALVES["deepseek_v3-halves"])
    again = hf.to_hf(hf.from_hf(model))
    assert again.config.rope_interleave
    assert error(full(again, random_tokens()), full(model, random_tokens())) < 2e-5


gqa = partial(GroupedQueryAttention, n_heads=HEADS, n_kv_heads=2, head_dim=10, rope_theta=500.0)
normed = partial(gqa, qk_norm=True)
mla = partial(
    MultiHeadLatentAttention,
    n_heads=5,  # of which the model's width is no multiple
    kv_lora_rank=14,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=8,
)
swiglu = partial(SwiGLU, d_ff=50)
moe = partial(MixtureOfExperts, n_experts=5, top_k=2, d_expert=18)
deepseek = partial(DeepSeekMoE, n_experts=8, top_k=3, n_shared=1, d_expert=18, first_dense=1, d_ff=50)
softmax = partial(deepseek, scoring="softmax", norm_topk_prob=False, bias_rate=0.0)


def ours(attn=gqa, ffn=swiglu, **model):
    return strong(LM(vocab_size=VOCAB, d_model=D, n_layers=LAYERS, attn=attn, ffn=ffn, **model)).eval()


def mixed(*layers, **parts):
    return partial(hybrid, parts=parts, layers=layers)


OURS = {
    "llama": (gqa, swiglu, {}),
    "llama-mha": (partial(gqa, n_kv_heads=None), swiglu, {"tied": False}),
    "llama-mqa": (partial(gqa, n_kv_heads=1), swiglu, {"norm_eps": 1e-3}),
    "mistral": (partial(gqa, window=7), swiglu, {"tied": False}),
    "mistral-any-heads": (partial(gqa, n_heads=5, n_kv_heads=5), swiglu, {}),
    "qwen3-full": (normed, swiglu, {}),
    "qwen3": (mixed("a", "b", "a", a=partial(normed, window=7), b=normed), swiglu, {"tied": False}),
    "mixtral": (gqa, moe, {}),
    "qwen3_moe": (partial(normed, window=7), partial(moe, norm_topk_prob=False), {}),
    "qwen3_moe-dense-layers": (normed, mixed("a", "b", "a", a=swiglu, b=moe), {"tied": False}),
    "deepseek_v3": (mla, partial(deepseek, n_groups=4, top_k_groups=2, routed_scaling=1.7), {}),
    "deepseek_v3-dense": (partial(mla, q_lora_rank=12), swiglu, {"tied": False}),
    "deepseek_v2": (partial(mla, n_heads=6, q_lora_rank=12), partial(softmax, n_shared=2), {}),
    "deepseek_v2-groups": (
        partial(mla, n_heads=6),
        partial(softmax, n_groups=4, top_k_groups=2, group_score="max"),
        {"tied": False},
    ),
}


def exported(case):
    attn, ffn, model = case
    lm = ours(attn, ffn, **model)
    for block in lm.blocks:
        if getattr(block.ffn, "scoring", None) == "softmax" and not block.ffn.is_dense:
            block.ffn.selection_bias.zero_()
    return lm


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


@pytest.mark.parametrize(
    ("attn", "ffn", "model_type"),
    [
        ("mha", "swiglu", "llama"),
        ("gqa", "swiglu", "llama"),
        ("mqa", "moe", "mixtral"),
        ("swa", "swiglu", "mistral"),
        ("mla", "swiglu", "deepseek_v3"),
        ("mla", "moe_deepseek", "deepseek_v3"),
    ],
)
def test_plugins_as_they_are_configured_go_there(attn, ffn, model_type):
    cfg = load([f"attn={attn}", f"ffn={ffn}", "model.d_model=64", "model.n_layers=2"])
    lm = build_model(cfg, VOCAB).eval()
    model = hf.to_hf(lm)
    assert model.config.model_type == model_type
    assert error(full(lm, random_tokens()), full(model, random_tokens())) < 2e-5


def test_copies_are_copies_in_the_mode_of_the_original():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model = theirs(CASES["llama-mha-tied"])
    torch.set_rng_state(before)
    lm = hf.from_hf(model)
    again = hf.to_hf(lm)
    assert torch.equal(torch.get_rng_state(), before)
    assert not lm.training
    assert not again.training
    assert hf.to_hf(hf.from_hf(model.train())).training
    assert lm.head.weight is lm.embed.weight
    assert again.lm_head.weight is again.model.embed_tokens.weight
    held = [{t.untyped_storage().data_ptr() for t in hf.tensors(m).values()} for m in (model, lm, again)]
    assert held[0].isdisjoint(held[1])
    assert held[1].isdisjoint(held[2])
    assert all(t.is_contiguous() for t in hf.tensors(again).values())


def test_a_model_from_there_trains_as_it_did_there():
    assert hf.from_hf(theirs(CASES["mixtral"])).train()(random_tokens())[1].keys() == {"router_balance", "router_z"}
    lm = hf.from_hf(theirs(CASES["deepseek_v3"])).train()
    assert lm(random_tokens())[1] == {}
    biases = [block.ffn.selection_bias.clone() for block in lm.blocks[1:]]
    lm.after_step(0.5)
    assert all(torch.equal(b.ffn.selection_bias, old) for b, old in zip(lm.blocks[1:], biases, strict=True))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"attention_dropout": 0.1}),
        ("llama", {"partial_key": 3}),
        ("mistral", {"layer_types": ["full_attention"] * LAYERS}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"layer_types": ["chunked_attention"] * LAYERS}),
        ("mixtral", {"router_jitter_noise": 0.1}),
        ("mixtral", {"output_router_logits": True}),
        ("qwen3_moe", {"attention_bias": True}),
        ("deepseek_v2", {"topk_method": "noaux_tc"}),
        ("deepseek_v2", {"norm_topk_prob": True}),
        ("deepseek_v3", {"num_key_value_heads": 2}),
        ("deepseek_v3", {"attention_bias": True}),
    ],
)
def test_a_setting_without_words_for_it_is_refused_by_name(name, change):
    with pytest.raises(UsageError, match=f"archlab cannot express {CASES[name][0]}'s {next(iter(change))}="):
        hf.configuration(configured(CASES[name], **change))


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "deepseek_v3-dense"])
@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_a_stretched_rotation_is_refused(name, kind):
    ends = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    stretched = {"rope_theta": 500.0, "factor": 2.0, "rope_type": kind} | ends
    with pytest.raises(UsageError, match=f"rope_parameters.rope_type='{kind}'"):
        hf.configuration(configured(CASES[name], rope_parameters=stretched))


OLD_FILES = {
    "llama": {"is_llama_config": True, "rope_interleaved": False, "rope_scaling": None},
    "qwen3": {"rope_scaling": None},
    "qwen3_moe": {"rope_scaling": None, "max_window_layers": 48, "num_experts": 5},
    "deepseek_v2": {"moe_layer_freq": 1, "scoring_func": "softmax", "aux_loss_alpha": 0.001, "seq_aux": True},
    "deepseek_v3": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1},
}


@pytest.mark.parametrize("name", OLD_FILES)
def test_files_of_released_models_say_more_than_the_library_reads(name):
    model_type, settings = CASES[name]
    settings = {key: value for key, value in settings.items() if key != "rope_parameters"}
    config = transformers.CONFIG_MAPPING[model_type].from_dict(settings | {"rope_theta": 500.0} | OLD_FILES[name])
    assert hf.configuration(config) == hf.configuration(configured(CASES[name]))


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("llama", "rope_interleaved", True),
        ("deepseek_v2", "scoring_func", "sigmoid"),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3-dense", "topk_method", "greedy"),
    ],
)
def test_what_only_released_files_say_is_held_to(name, setting, value):
    with pytest.raises(UsageError, match=f"archlab cannot express {CASES[name][0]}'s {setting}={value!r}"):
        hf.configuration(configured(CASES[name], **{setting: value}))


def test_weights_that_are_missing_or_unknown_are_refused():
    model = theirs(CASES["llama"])
    with pytest.raises(UsageError, match=r"the weight embed_tokens\.weight has no counterpart"):
        hf.from_hf(model.model)
    model.model.adapter = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError, match=r"the weight model\.adapter\.bias has no counterpart"):
        hf.from_hf(model)
    lm = ours()
    lm.blocks[1].ffn.scale = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(UsageError, match=r"the weight blocks\.1\.ffn\.scale has no counterpart"):
        hf.to_hf(lm)
    del lm.blocks[1].ffn.scale, lm.blocks[1].ffn.out
    with pytest.raises(UsageError, match=r"the weight blocks\.1\.ffn\.out\.weight is missing"):
        hf.to_hf(lm)


def test_an_unknown_family_is_refused():
    with pytest.raises(UsageError, match="does not know the model type 'gpt2' of Transformers; known: llama, mistral"):
        hf.configuration(transformers.GPT2Config())


@pytest.mark.parametrize(
    ("named", "attn", "ffn", "model"),
    [
        ("model.norm='layer'", gqa, swiglu, {"norm": "layer"}),
        ("model.positions='learned'", gqa, swiglu, {"positions": "learned", "max_positions": 50}),
        ("gqa.rope_dim=4", partial(gqa, rope_dim=4), swiglu, {}),
        ("gqa.norm_eps=0.1", partial(normed, norm_eps=0.1), swiglu, {}),
        ("gqa.window=\\[7, None, 7\\]", mixed("a", "b", "a", a=partial(gqa, window=7), b=gqa), swiglu, {}),
        (
            "gqa.window=\\[7, 8, 7\\]",
            mixed("a", "b", "a", a=partial(normed, window=7), b=partial(normed, window=8)),
            swiglu,
            {},
        ),
        (
            "gqa.rope_theta=\\[500.0, 9.0, 9.0\\]",
            mixed("a", "b", "b", a=gqa, b=partial(gqa, rope_theta=9.0)),
            swiglu,
            {},
        ),
        ("moe.norm_topk_prob=False", gqa, partial(moe, norm_topk_prob=False), {}),
        ("no family of Transformers with layers of mla and moe", mla, moe, {}),
        ("mla.rope=False", partial(mla, rope=False), swiglu, {}),
        ("mla.norm_eps=0.1", partial(mla, norm_eps=0.1), deepseek, {}),
        ("moe_deepseek.group_score='max'", mla, partial(deepseek, n_groups=2, group_score="max"), {}),
        ("moe_deepseek.n_groups=8", mla, partial(deepseek, n_groups=8, top_k_groups=4), {}),
        ("moe_deepseek.scoring='softmax'", mla, softmax, {}),
        ("deepseek_v2 refuses these sizes: .* hidden size \\(36\\)", mla, softmax, {}),
        ("selection_bias is not zero", partial(mla, n_heads=6), softmax, {}),
        ("no family of Transformers with layers of gqa and mlp", gqa, MLP, {}),
    ],
)
def test_a_setting_that_no_family_has_is_refused_by_name(named, attn, ffn, model):
    with pytest.raises(UsageError, match=named):
        hf.to_hf(ours(attn, ffn, **model))


def test_dropout_is_refused_where_it_acts():
    lm = ours(dropout=0.1)
    assert hf.to_hf(lm).config.model_type == "llama"
    with pytest.raises(UsageError, match=r"llama cannot express model\.dropout=0\.1"):
        hf.to_hf(lm.train())


def test_a_setting_that_a_table_forgets_is_refused():
    family = replace(LLAMA, settings=tuple(s for s in LLAMA.settings if s.ours != ("gqa.window",)))
    with pytest.raises(UsageError, match=r"llama cannot express gqa\.window=None \(which it does not know\)"):
        family.to_theirs(describe(ours()))


def test_a_plugin_that_keeps_no_settings_is_refused():
    class Forgetful(SwiGLU):
        def __init__(self, d_model, *, strength=1.0):
            super().__init__(d_model, d_ff=50)

    with pytest.raises(UsageError, match="Forgetful does not keep its setting 'strength'"):
        hf.to_hf(ours(ffn=Forgetful))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_tables_name_every_setting_of_their_plugins(family):
    named = {name for setting in family.settings for name in setting.ours} | family.training.keys()
    for name, kind in family.kinds.items():
        for parameter in inspect.signature(kind).parameters.keys() - set(HARNESS_ARGS):
            assert f"{name}.{parameter}" in named
