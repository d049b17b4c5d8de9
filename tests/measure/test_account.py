"""Every figure of the accounting against live objects, torch's own counter, or a published figure.

The registry is enumerated: a new plugin edits nothing here.
"""

import itertools
from collections import Counter
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from archlab.attn.gqa import GroupedQueryAttention
from archlab.attn.mla import MultiHeadLatentAttention
from archlab.config.compose import load
from archlab.ffn.moe import MixtureOfExperts
from archlab.ffn.moe_deepseek import DeepSeekMoE
from archlab.ffn.swiglu import SwiGLU
from archlab.measure import account
from archlab.measure.account import parameters, static
from archlab.model import LM, build_model
from archlab.nn.experts import ExpertLinear
from archlab.plugins import names
from archlab.testing import VOCAB, WIDTHS, Variant, tokens

META = torch.device("meta")
BASE = Variant()
every_attn = pytest.mark.parametrize("attn", names("attn"))
every_ffn = pytest.mark.parametrize("ffn", names("ffn"))


def cells():
    """Every combination; those away from both axes of the table are the slow part."""
    for attn, ffn in itertools.product(names("attn"), names("ffn")):
        on_axis = BASE.attn == attn or BASE.ffn == ffn
        yield pytest.param(attn, ffn, id=f"{attn}-{ffn}", marks=[] if on_axis else pytest.mark.slow)


every_cell = pytest.mark.parametrize(("attn", "ffn"), list(cells()))


@cache
def on_meta(attn: str, ffn: str, *overrides: str) -> LM:
    return build_model(Variant(attn, ffn, overrides).config(), VOCAB, device=META).eval()


def small(*, d_model=16, n_layers=2, vocab=30, ffn=None, device=META, **settings) -> LM:
    attn = partial(GroupedQueryAttention, n_heads=4, n_kv_heads=2)
    with torch.device(device):
        return LM(vocab_size=vocab, attn=attn, ffn=ffn or SwiGLU, d_model=d_model, n_layers=n_layers, **settings).eval()


def counted(model: LM, n: int, context: int | None = None, *, backward: bool = False) -> Counter:
    """FLOPs by operation of a pass over n tokens, or of n tokens that end at `context` of a cache, as torch counts."""
    x = torch.zeros(1, n, dtype=torch.long, device=META)
    cache = None if context is None else model.init_cache(1, context + 7)
    if cache is not None:
        cache.pos = context - n
    with torch.set_grad_enabled(backward), FlopCounterMode(display=False) as counter:
        logits, _ = model(x, cache)
        if backward:
            logits.sum().backward()
    return Counter({str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()})


@cache
def counted_of(attn: str, ffn: str, n: int, context: int | None = None) -> Counter:
    return counted(on_meta(attn, ffn), n, context)


def by_matrix(flops: Counter) -> int:
    """Of products with one matrix, as linear layers do them; attention and grouped experts have batches of them."""
    return sum(n for op, n in flops.items() if op in ("aten.mm", "aten.addmm"))


@every_attn
def test_linear_layers_of_a_pass_are_those_that_torch_counts(attn):
    model = on_meta(attn, "swiglu")
    n = 5
    assert by_matrix(counted_of(attn, "swiglu", n)) == n * account.linear_flops(model)


@every_cell
def test_ffn_flops_are_those_that_torch_counts(attn, ffn):
    """Beside any attention, an FFN adds to a decode step and to a pass exactly what the accounting says."""
    more = account.linear_flops(on_meta(attn, ffn)) - account.linear_flops(on_meta(attn, "swiglu"))
    step, base_step = (counted_of(attn, name, 1, 64).total() for name in (ffn, "swiglu"))
    assert step - base_step == more
    whole, base_whole = (counted_of(attn, name, 5).total() for name in (ffn, "swiglu"))
    assert whole - base_whole == 5 * more


@every_attn
def test_decode_flops_are_those_that_torch_counts(attn):
    """The counter sees products of matrices alone: what grows with the context is made of them, what a recurrent state
    does beside need not be."""
    model = on_meta(attn, "swiglu")
    claimed = [account.decode_flops(model, context) for context in (64, 256)]
    seen = [counted_of(attn, "swiglu", 1, context).total() for context in (64, 256)]
    assert account.linear_flops(model) <= seen[0] <= 1.3 * claimed[0]
    growth_claimed, growth_seen = claimed[1] - claimed[0], seen[1] - seen[0]
    assert 0.7 * growth_claimed <= growth_seen <= 1.4 * growth_claimed


@every_attn
def test_no_claim_is_below_the_work_of_a_pass(attn):
    """Over so few tokens that no width cuts any off. Torch counts a causal product as a full one, hence the factor."""
    model = on_meta(attn, "swiglu")
    n = min(WIDTHS.values())
    claimed = n * (account.forward_flops(model, n) - account.linear_flops(model))
    seen = counted(model, n).total() - n * account.linear_flops(model)
    assert claimed >= seen * (n + 1) / (2 * n) / 1.3


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_flops_of_softmax_attention_are_exact(n_kv_heads):
    attn = partial(GroupedQueryAttention, n_heads=4, n_kv_heads=n_kv_heads, head_dim=6)
    with META:
        model = LM(vocab_size=30, attn=attn, ffn=SwiGLU, d_model=16, n_layers=3).eval()
    for context in (1, 2, 57):
        assert account.decode_flops(model, context) == counted(model, 1, context).total()
    mixing = 3 * 4 * 4 * 6
    assert account.forward_flops(model, 9) == account.linear_flops(model) + mixing * sum(range(1, 10)) / 9


def test_training_costs_three_forward_passes():
    forward, both = (by_matrix(counted(small(), 6, backward=backward)) for backward in (False, True))
    assert both == account.TRAIN_PASSES * forward
    record = static(small(), train_context=64, contexts=(), dtype=torch.float32)
    assert record["flops/train_per_token"] == 3 * record["flops/forward_per_token"]


@pytest.mark.parametrize("window", [None, 100])
def test_mean_over_a_long_context_is_sampled(window, monkeypatch):
    attn = partial(GroupedQueryAttention, n_heads=4, window=window)
    with META:
        model = LM(vocab_size=30, attn=attn, ffn=SwiGLU, d_model=16, n_layers=1)
    exact = account.forward_flops(model, 1003)
    monkeypatch.setattr(account, "MOST_CONTEXTS", 64)
    assert account.forward_flops(model, 1003) == pytest.approx(exact, rel=1e-12 if window is None else 2e-3)


def test_a_tied_head_costs_what_an_untied_one_does():
    tied, untied = small(tied=True), small(tied=False)
    assert account.linear_flops(tied) == account.linear_flops(untied)
    assert counted(tied, 5).total() == counted(untied, 5).total()
    a, b = account.parameters(tied), account.parameters(untied)
    assert b["total"] - a["total"] == b["head"] == 30 * 16
    assert a["head"] == 0
    assert a["non_embedding"] == b["non_embedding"]
    assert a["active_non_input_embedding"] == b["active_non_input_embedding"]


@every_cell
def test_parameters_are_the_sum_of_the_tensors(attn, ffn):
    model = on_meta(attn, ffn)
    counts = account.parameters(model)
    assert counts["total"] == sum(p.numel() for p in model.parameters())
    assert counts["total"] == sum(counts[part] for part in ("embedding", "head", "attention", "ffn", "other"))
    assert counts["attention"] == sum(p.numel() for block in model.blocks for p in block.mixer.parameters())
    assert counts["ffn"] == sum(p.numel() for block in model.blocks for p in block.ffn.parameters())
    idle = sum(m.weight[0].numel() * (m.n_experts - m.top_k) for m in model.modules() if isinstance(m, ExpertLinear))
    assert counts["active"] == counts["total"] - idle


def test_parameters_by_hand():
    model = small(ffn=partial(MixtureOfExperts, n_experts=5, top_k=2, d_expert=7), positions="learned", max_positions=9)
    expert = 3 * 16 * 7
    attention, ffn = 2 * (16 * 16 + 2 * 16 * 8 + 16 * 16), 2 * (5 * 16 + 5 * expert)
    parts = {"embedding": 30 * 16 + 9 * 16, "head": 0, "attention": attention, "ffn": ffn, "other": 5 * 16}
    total = sum(parts.values())
    assert account.parameters(model) == parts | {
        "total": total,
        "non_embedding": total - 39 * 16,
        "active": total - 2 * 3 * expert,
        "active_non_input_embedding": total - 2 * 3 * expert - 9 * 16,
    }
    forward = 2 * (30 * 16 + attention + 2 * (5 * 16 + 2 * expert))
    assert account.linear_flops(model) == forward


@every_ffn
def test_more_experts_leave_the_active_ones_as_many(ffn):
    """Twice the experts: only the router grows. Without experts nothing does."""
    model = on_meta("mha", ffn)
    experts = [m for m in model.modules() if isinstance(m, ExpertLinear)]
    doubled = on_meta("mha", ffn, f"ffn.n_experts={2 * experts[0].n_experts}") if experts else model
    routers = len(experts) // 2 * model.d_model * (experts[0].n_experts if experts else 0)
    assert account.parameters(doubled)["active"] - account.parameters(model)["active"] == routers
    assert account.linear_flops(doubled) - account.linear_flops(model) == 2 * routers
    assert bool(experts) == (account.parameters(doubled)["total"] > account.parameters(model)["total"])


@every_attn
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_a_live_cache(attn, dtype):
    model = Variant(attn).build(torch.float32)
    contexts = (1, 7, 8, 9, 37, 100)
    record = static(model, train_context=32, contexts=contexts, dtype=dtype)
    for context in contexts:
        live = model.init_cache(1, context, dtype=dtype)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            model(tokens(1, context), live)
        held = sum(t.untyped_storage().nbytes() for state in live.states for t in state.tensors().values())
        assert record[f"cache/bytes_at/{context}"] == held
        assert 0 < record[f"cache/read_bytes_at/{context}"] <= held


@every_attn
def test_long_caches_lie_on_the_line_of_the_record(attn):
    model = on_meta(attn, "swiglu")
    per_token_of = {}
    for dtype in (torch.float32, torch.bfloat16):
        growth = account.cache_growth(model, dtype)
        per_token, constant = growth["cache/bytes_per_token_stored"], growth["cache/bytes_constant"]
        assert per_token >= 0
        assert constant >= 0
        assert per_token + constant > 0
        for context in (1 << 20, 3 << 20):
            assert account.cache_bytes(model, context, dtype) == constant + per_token * context
        per_token_of[dtype] = per_token
    assert per_token_of[torch.float32] == 2 * per_token_of[torch.bfloat16]


def test_a_window_is_a_constant():
    attn = partial(GroupedQueryAttention, n_heads=8, n_kv_heads=2, window=100)
    with META:
        model = LM(vocab_size=30, attn=attn, ffn=SwiGLU, d_model=64, n_layers=3)
    record = static(model, train_context=8, contexts=(10, 100, 5000), dtype=torch.bfloat16)
    token = 3 * 2 * 2 * 8 * 2
    assert [record[f"cache/bytes_at/{c}"] for c in (10, 100, 5000)] == [10 * token, 100 * token, 100 * token]
    assert record["cache/bytes_per_token_stored"] == 0
    assert record["cache/bytes_constant"] == 100 * token


def test_few_kv_heads_store_as_many_times_less():
    def stored(n_kv_heads):
        attn = partial(GroupedQueryAttention, n_heads=8, n_kv_heads=n_kv_heads)
        with META:
            model = LM(vocab_size=9, attn=attn, ffn=SwiGLU, d_model=64, n_layers=2)
        return account.cache_bytes(model, 50, torch.float32)

    assert 4 * stored(2) == stored(8)


def test_bytes_of_a_decode_step_by_hand():
    dense = small(tied=False)
    weights = account.parameters(dense)["total"] - 30 * 16
    state = 2 * 2 * 2 * 4 * 50 * 4
    assert account.decode_read_bytes(dense, 50, torch.float32) == 4 * weights + state
    assert account.decode_read_bytes(dense, 50, torch.float32, batch=3) == 4 * weights + 3 * state
    mixed = small(tied=False, ffn=partial(MixtureOfExperts, n_experts=4, top_k=2, d_expert=8))
    one, two = (account.decode_read_bytes(mixed, 50, torch.bfloat16, batch=b) for b in (1, 2))
    assert one == 2 * account.parameters(mixed)["active_non_input_embedding"] + state // 2
    # Each of the second token's two experts is another one in half of the cases.
    assert two - one == 2 * (2 * 3 * 16 * 8) + state // 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_training_holds_four_numbers_a_parameter(dtype):
    model = small(device="cpu").to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randint(30, (2, 5))
    model(x)[0].square().mean().backward()
    before = account.training_bytes(model, optimizer)
    optimizer.step()
    held = account.training_bytes(model, optimizer)
    n = sum(p.numel() for p in model.parameters())
    assert before["train/bytes_per_param"] == 2 * dtype.itemsize
    assert held["train/weight_bytes"] == held["train/gradient_bytes"] == dtype.itemsize * n
    assert held["train/moment_bytes"] == 2 * dtype.itemsize * n
    assert held["train/bytes_per_param"] == 4 * dtype.itemsize


def test_a_part_that_is_not_counted_is_an_error():
    model = small()
    model.extra = nn.Linear(3, 3, device=META)
    with pytest.raises(AssertionError, match="do not sum"):
        account.parameters(model)


def published(d_model, n_layers, vocab_size, ffn, attn, *, tied=False) -> LM:
    with META:
        return LM(vocab_size=vocab_size, attn=attn, ffn=ffn, d_model=d_model, n_layers=n_layers, tied=tied)


def gqa(n_heads, n_kv_heads, head_dim=None, *, qk_norm=False, window=None):
    return partial(
        GroupedQueryAttention, n_heads=n_heads, n_kv_heads=n_kv_heads, head_dim=head_dim, qk_norm=qk_norm, window=window
    )


def dense(d_ff):
    return partial(SwiGLU, d_ff=d_ff)


def mla(n_heads, q_lora_rank):
    widths = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    return partial(MultiHeadLatentAttention, n_heads=n_heads, q_lora_rank=q_lora_rank, **widths)


def deepseek(n_experts, top_k, n_shared, d_expert, first_dense, d_ff):
    routed = {"n_experts": n_experts, "top_k": top_k, "n_shared": n_shared, "d_expert": d_expert}
    return partial(DeepSeekMoE, **routed, first_dense=first_dense, d_ff=d_ff)


def mixtral(n_experts, top_k, d_expert):
    return partial(MixtureOfExperts, n_experts=n_experts, top_k=top_k, d_expert=d_expert)


MODELS = {
    "OPT-13B, cache": lambda: published(5120, 40, 50272, dense(20480), gqa(40, 40)),
    "Llama-2-7B": lambda: published(4096, 32, 32000, dense(11008), gqa(32, 32)),
    "Llama-2-70B": lambda: published(8192, 80, 32000, dense(28672), gqa(64, 8)),
    "Llama-3-8B": lambda: published(4096, 32, 128256, dense(14336), gqa(32, 8)),
    "Llama-3-70B": lambda: published(8192, 80, 128256, dense(28672), gqa(64, 8)),
    "Llama-3.1-405B, cache": lambda: published(16384, 126, 128256, dense(53248), gqa(128, 8)),
    "Mistral-7B": lambda: published(4096, 32, 32000, dense(14336), gqa(32, 8)),
    "Mixtral-8x7B": lambda: published(4096, 32, 32000, mixtral(8, 2, 14336), gqa(32, 8)),
    "DeepSeek-67B, cache": lambda: published(8192, 95, 102400, dense(22016), gqa(64, 8)),
    "Qwen3-0.6B": lambda: published(1024, 28, 151936, dense(3072), gqa(16, 8, 128, qk_norm=True), tied=True),
    "Qwen3-4B": lambda: published(2560, 36, 151936, dense(9728), gqa(32, 8, 128, qk_norm=True), tied=True),
    "Qwen3-8B": lambda: published(4096, 36, 151936, dense(12288), gqa(32, 8, 128, qk_norm=True)),
    "Qwen3-32B": lambda: published(5120, 64, 151936, dense(25600), gqa(64, 8, 128, qk_norm=True)),
    "Qwen3-30B-A3B": lambda: published(2048, 48, 151936, mixtral(128, 8, 768), gqa(32, 4, 128, qk_norm=True)),
    "DeepSeek-V2": lambda: published(5120, 60, 102400, deepseek(160, 6, 2, 1536, 1, 12288), mla(128, 1536)),
    "DeepSeek-V3": lambda: published(7168, 61, 129280, deepseek(256, 8, 1, 2048, 3, 18432), mla(128, 1536)),
}


@cache
def model_of(name: str) -> LM:
    return MODELS[name]()


@pytest.mark.parametrize(
    ("name", "total"),
    [
        ("Llama-2-7B", 6_738_415_616),
        ("Llama-2-70B", 68_976_648_192),
        ("Llama-3-8B", 8_030_261_248),
        ("Llama-3-70B", 70_553_706_496),
        ("Mistral-7B", 7_241_732_096),
        ("Mixtral-8x7B", 46_702_792_704),
        ("Qwen3-0.6B", 596_049_920),
        ("Qwen3-4B", 4_022_468_096),
        ("Qwen3-8B", 8_190_735_360),
        ("Qwen3-32B", 32_762_123_264),
        ("Qwen3-30B-A3B", 30_532_122_624),
        ("DeepSeek-V2", 235_741_434_880),
        ("DeepSeek-V3", 671_026_404_352),
    ],
)
def test_published_parameters(name, total):
    assert account.parameters(model_of(name))["total"] == total


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("Mixtral-8x7B", {"active": 12.88, "active_non_input_embedding": 12.75}),
        ("Qwen3-0.6B", {"non_embedding": 0.440}),
        ("Qwen3-4B", {"non_embedding": 3.634}),
        ("Qwen3-8B", {"non_embedding": 6.946}),
        ("Qwen3-32B", {"non_embedding": 31.206}),
        ("Qwen3-30B-A3B", {"non_embedding": 29.910, "active": 3.353, "active_non_input_embedding": 3.042}),
        ("DeepSeek-V2", {"active": 21.376, "active_non_input_embedding": 20.852}),
        ("DeepSeek-V3", {"active": 37.552, "active_non_input_embedding": 36.626}),
    ],
)
def test_published_parameters_in_use(name, figures):
    """In billions, as far as they are published."""
    counts = account.parameters(model_of(name))
    for part, billions in figures.items():
        digits = len(str(billions).partition(".")[2])
        assert round(counts[part] / 1e9, digits) == pytest.approx(billions, abs=10**-digits / 2), part


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("OPT-13B, cache", 409_600),
        ("Llama-2-7B", 262_144),
        ("Llama-3-70B", 163_840),
        ("Llama-3-8B", 65_536),
        ("Llama-3.1-405B, cache", 258_048),
        ("Mixtral-8x7B", 65_536),
        ("DeepSeek-67B, cache", 194_560),
        ("Qwen3-0.6B", 57_344),
        ("Qwen3-8B", 73_728),
        ("Qwen3-32B", 131_072),
        ("Qwen3-30B-A3B", 49_152),
        ("DeepSeek-V2", 34_560),
        ("DeepSeek-V3", 35_136),
    ],
)
def test_published_cache_elements_a_token(name, elements):
    growth = account.cache_growth(model_of(name), torch.bfloat16)
    assert growth == {"cache/bytes_per_token_stored": 2 * elements, "cache/bytes_constant": 0}


def test_a_window_of_mistral():
    model = published(4096, 32, 32000, dense(14336), gqa(32, 8, window=4096))
    assert [account.cache_bytes(model, n, torch.bfloat16) for n in (1024, 8192)] == [1024 * 131_072, 4096 * 131_072]


@pytest.mark.parametrize("attn", names("attn"))
def test_every_default_width_follows_the_model(attn):
    """Twice the width is about four times the weights of attention, in every variant: none stays as wide as it was."""
    small, large = (
        parameters(build_model(load([f"attn={attn}", f"model.d_model={d}", "model.n_layers=4"]), 16, device="meta"))
        for d in (64, 128)
    )
    assert 3 < large["attention"] / small["attention"] < 4.2
