"""The feed-forward plugins against slow references and by hand.

Shapes: b batch, t tokens, n = b t, d model width, e experts, k experts a token.
"""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, silu
from torch.utils.flop_counter import FlopCounterMode

from archlab.attn.gqa import GroupedQueryAttention
from archlab.config.compose import load
from archlab.errors import UsageError
from archlab.ffn.mlp import MLP
from archlab.ffn.moe import MixtureOfExperts
from archlab.ffn.moe_deepseek import DeepSeekMoE
from archlab.ffn.swiglu import SwiGLU
from archlab.model import LM
from archlab.nn.experts import Experts, Router, balance_loss, expert_counts
from archlab.plugins import build_layer, factory


def moe(d_model=12, *, n_experts=6, top_k=2, d_expert=10, **settings):
    return MixtureOfExperts(d_model, n_experts=n_experts, top_k=top_k, d_expert=d_expert, **settings)


def deepseek(d_model=12, *, n_experts=8, top_k=3, n_shared=1, d_expert=10, layer_idx=0, **settings):
    counts = {"n_experts": n_experts, "top_k": top_k, "n_shared": n_shared}
    return DeepSeekMoE(d_model, **counts, d_expert=d_expert, layer_idx=layer_idx, **settings)


def strong(module: nn.Module, *, seed: int = 0) -> nn.Module:
    """Float64, with weights large enough that every term matters, and a selection bias that decides something."""
    torch.manual_seed(seed)
    for parameter in module.double().parameters():
        nn.init.normal_(parameter, std=0.5)
    if hasattr(module, "selection_bias"):
        nn.init.normal_(module.selection_bias, std=0.3)
    return module


MIXTURES = {
    "moe": moe,
    "moe-not-normalised": partial(moe, norm_topk_prob=False),
    "moe-top-1": partial(moe, top_k=1, norm_topk_prob=False),
    "moe-all": partial(moe, top_k=6),
    "deepseek": deepseek,
    "deepseek-groups": partial(deepseek, n_groups=4, top_k_groups=2, routed_scaling=2.5, n_shared=2),
    "deepseek-v2": partial(
        deepseek, n_groups=4, top_k_groups=2, scoring="softmax", group_score="max", norm_topk_prob=False
    ),
    "deepseek-not-normalised": partial(deepseek, n_shared=0, norm_topk_prob=False, top_k=1),
}
mixtures = pytest.mark.parametrize("make", MIXTURES.values(), ids=MIXTURES)


def slow_forward(ffn, x):
    """Token by token and expert by expert."""
    rows = [slow_token(ffn, token) for token in x.flatten(0, 1)]
    return torch.stack(rows).view(x.shape)


def slow_token(ffn, token):
    logits = ffn.router.weight @ token
    if isinstance(ffn, MixtureOfExperts):
        gates = slow_softmax(logits)
        order = sorted(range(len(gates)), key=lambda i: -gates[i].item())[: ffn.top_k]
        scale, y = 1.0, torch.zeros_like(token)
    else:
        gates = 1 / (1 + (-logits).exp()) if ffn.scoring == "sigmoid" else slow_softmax(logits)
        order = slow_selection(ffn, gates + ffn.selection_bias)
        scale, y = ffn.routed_scaling, torch.zeros_like(token) if ffn.shared is None else ffn.shared(token[None])[0][0]
    total = sum(gates[i] for i in order) if ffn.norm_topk_prob else 1.0
    for i in order:
        gate, up = (token @ ffn.experts.gate_up.weight[i]).chunk(2)
        y = y + scale * gates[i] / total * ((silu(gate) * up) @ ffn.experts.out.weight[i])
    return y


def slow_softmax(logits):
    return logits.exp() / logits.exp().sum()


def slow_selection(ffn, biased):
    size = len(biased) // ffn.n_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(ffn.n_groups)]
    n_best = 2 if ffn.group_score == "top2" else 1
    groups.sort(key=lambda group: -sum(sorted((biased[i].item() for i in group), reverse=True)[:n_best]))
    allowed = [i for group in groups[: ffn.top_k_groups] for i in group] if ffn.n_groups > 1 else groups[0]
    return sorted(allowed, key=lambda i: -biased[i].item())[: ffn.top_k]


@mixtures
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 13), (3, 17)])
def test_mixture_equals_the_loop_over_tokens(make, shape):
    ffn = strong(make()).eval()
    x = torch.randn(*shape, 12, dtype=torch.float64)
    torch.testing.assert_close(ffn(x)[0], slow_forward(ffn, x), rtol=0, atol=1e-12)
    with torch.inference_mode():
        torch.testing.assert_close(ffn(x)[0], slow_forward(ffn, x), rtol=0, atol=1e-12)


@mixtures
def test_gradients_equal_those_of_the_loop_over_tokens(make):
    ffn = strong(make())
    x = torch.randn(2, 19, 12, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(2, 19, 12, dtype=torch.float64)
    inputs = [x, *ffn.parameters()]
    fast = torch.autograd.grad(ffn(x)[0], inputs, grad, allow_unused=True)
    slow = torch.autograd.grad(slow_forward(ffn, x), inputs, grad, materialize_grads=True)
    for a, b in zip(fast, slow, strict=True):
        assert a is not None
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize("d_expert", [16, 10], ids=["grouped product", "widths it refuses"])
@pytest.mark.parametrize("tokens", [1, 2, 30])
def test_float32_equals_float64(d_expert, tokens):
    ffn = strong(moe(16, n_experts=8, d_expert=d_expert))
    x = torch.randn(1, tokens, 16, dtype=torch.float64)
    narrow = copy.deepcopy(ffn).float()
    expected, actual = ffn(x)[0], narrow(x.float())[0]
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(narrow(x.float())[0].double(), expected, rtol=1e-4, atol=1e-4)
    expected.sum().backward()
    actual.sum().backward()
    for a, b in zip(narrow.parameters(), ffn.parameters(), strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-3, atol=1e-3)


def test_dispatch_can_be_differentiated_twice():
    experts = strong(Experts(5, d_expert=3, n_experts=4, top_k=2))
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(6, 2, dtype=torch.float64, requires_grad=True)
    chosen = torch.rand(6, 4).topk(2).indices
    assert torch.autograd.gradgradcheck(lambda x, w: experts(x, w, chosen), (x, weights))


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_one_expert_is_swiglu(norm_topk_prob):
    ffn = strong(moe(n_experts=1, top_k=1, norm_topk_prob=norm_topk_prob))
    dense = SwiGLU(12, d_ff=10).double()
    with torch.no_grad():
        dense.gate_up.weight.copy_(ffn.experts.gate_up.weight[0].T)
        dense.out.weight.copy_(ffn.experts.out.weight[0].T)
    x = torch.randn(3, 37, 12, dtype=torch.float64)
    torch.testing.assert_close(ffn(x)[0], dense(x)[0], rtol=0, atol=1e-13)
    with torch.inference_mode():
        torch.testing.assert_close(ffn(x[:1, :1])[0], dense(x[:1, :1])[0], rtol=0, atol=1e-13)


def test_mlp_by_its_formula():
    ffn = strong(MLP(6))
    assert ffn.up.weight.shape == (24, 6)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    y, aux = ffn(x)
    torch.testing.assert_close(y, gelu(x @ ffn.up.weight.T) @ ffn.out.weight.T)
    assert aux == {}


def test_softmax_router_by_hand():
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0])
    p = [math.exp(v) for v in logits.tolist()]
    weights, chosen = moe(n_experts=4).choose(logits)
    assert chosen.tolist() == [0, 2]
    assert weights.tolist() == pytest.approx([p[0] / (p[0] + p[2]), p[2] / (p[0] + p[2])])
    weights, chosen = moe(n_experts=4, norm_topk_prob=False).choose(logits)
    assert chosen.tolist() == [0, 2]
    assert weights.tolist() == pytest.approx([p[0] / sum(p), p[2] / sum(p)])


def test_sigmoid_router_by_hand():
    scores = torch.tensor([0.9, 0.2, 0.6, 0.5])
    ffn = deepseek(n_experts=4, top_k=2, routed_scaling=2.0)
    weights, chosen = ffn.choose(scores)
    assert chosen.tolist() == [0, 2]
    assert weights.tolist() == pytest.approx([2 * 0.9 / 1.5, 2 * 0.6 / 1.5])
    ffn.selection_bias.copy_(torch.tensor([-1.0, 0.0, 0.0, 0.0]))  # chosen by score + bias, weighted by score
    weights, chosen = ffn.choose(scores)
    assert chosen.tolist() == [2, 3]
    assert weights.tolist() == pytest.approx([2 * 0.6 / 1.1, 2 * 0.5 / 1.1])


def test_what_a_group_is_worth():
    scores = torch.tensor([0.9, 0.1, 0.05, 0.6, 0.5, 0.0])  # 0.9 + 0.1 against 0.6 + 0.5
    make = partial(deepseek, n_experts=6, top_k=2, n_groups=2)
    assert make(top_k_groups=1).choose(scores)[1].tolist() == [3, 4]
    assert make(top_k_groups=1, group_score="max").choose(scores)[1].tolist() == [0, 1]
    assert make(top_k_groups=2).choose(scores)[1].tolist() == [0, 3]


def test_tokens_stay_in_their_groups():
    ffn = deepseek(n_experts=12, top_k=4, n_groups=6, top_k_groups=2)
    nn.init.normal_(ffn.selection_bias)
    _, chosen = ffn.choose(torch.rand(500, 12))
    groups = torch.zeros(500, 6).scatter_(1, chosen // 2, 1.0)
    assert (groups.sum(1) == 2).all()


def test_a_constant_bias_changes_nothing():
    ffn = strong(deepseek(n_groups=4, top_k_groups=2))
    x = torch.randn(2, 30, 12, dtype=torch.float64)
    before = ffn(x)[0]
    ffn.selection_bias += 3.0
    assert torch.equal(ffn(x)[0], before)


def test_weights_do_not_depend_on_the_bias():
    ffn = strong(deepseek(n_experts=3, top_k=3))  # the set is always the same
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    before = ffn(x)[0]
    ffn.selection_bias.copy_(torch.tensor([5.0, -3.0, 0.1]))
    torch.testing.assert_close(ffn(x)[0], before, rtol=0, atol=1e-13)


def test_shared_experts_see_every_token():
    ffn = strong(deepseek(n_shared=2))
    assert ffn.shared.d_ff == 20
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    routed = ffn.experts(x, *ffn.choose(ffn.router(x).sigmoid()))
    torch.testing.assert_close(ffn(x)[0], routed + ffn.shared(x)[0])


def test_first_layers_are_dense():
    ffn = partial(DeepSeekMoE, n_experts=4, top_k=2, n_shared=1, d_expert=8, first_dense=2, d_ff=40)
    model = LM(vocab_size=11, attn=partial(GroupedQueryAttention, n_heads=2), ffn=ffn, d_model=16, n_layers=3)
    kinds = [[type(m).__name__ for m in block.ffn.children()] for block in model.blocks]
    assert kinds[:2] == [["SwiGLU"]] * 2
    assert "Experts" in kinds[2]
    assert [block.ffn.shared.d_ff for block in model.blocks] == [40, 40, 8]
    model(torch.randint(11, (2, 5)))
    model.after_step(0.5)
    assert model.metrics()["router_load_max_over_mean"] >= 1


@pytest.mark.parametrize("k", [1, 2, 4])
def test_balance_loss_of_uniform_routing_is_one(k):
    e, n = 8, 16
    chosen = (torch.arange(n)[:, None] + torch.arange(k)) % e  # each expert is chosen as often
    counts = expert_counts(chosen[None], e)
    assert counts.tolist() == [[n * k // e] * e]
    assert balance_loss(torch.full((1, n, e), 1 / e), counts).item() == pytest.approx(1)


def test_balance_loss_by_hand():
    counts = torch.tensor([[6, 2, 0, 0]])
    probs = torch.tensor([0.5, 0.3, 0.1, 0.1]).expand(1, 4, 4)
    assert balance_loss(probs, counts).item() == pytest.approx(4 * (6 / 8 * 0.5 + 2 / 8 * 0.3))


@pytest.mark.parametrize(("make", "name"), [(moe, "balance_coef"), (moe, "z_coef"), (deepseek, "balance_coef")])
def test_coefficient_scales_what_reaches_the_router(make, name):
    x = torch.randn(3, 11, 12, dtype=torch.float64)

    def router_grad(coefficient, repeats=1):
        ffn = strong(make(**{name: coefficient}))
        return torch.autograd.grad(sum(ffn(x.repeat(repeats, 1, 1))[1].values()), ffn.router.weight)[0]

    def added(coefficient, repeats=1):
        rest = router_grad(0.0, repeats) if make is moe else 0.0
        return router_grad(coefficient, repeats) - rest

    assert added(1.0).abs().max() > 1e-3
    torch.testing.assert_close(added(2.0), 2 * added(1.0))
    torch.testing.assert_close(added(1.0, repeats=4), added(1.0))


def test_z_loss_by_hand():
    ffn = moe(n_experts=2, top_k=1, balance_coef=0.0, z_coef=0.5)
    nn.init.zeros_(ffn.router.weight)
    assert ffn(torch.randn(2, 3, 12))[1]["router_z"].item() == pytest.approx(0.5 * math.log(2) ** 2)


def test_sequences_are_balanced_each_on_its_own():
    """Two sequences of opposite taste are balanced together, and not apart."""
    ffn = deepseek(n_experts=2, top_k=1, balance_coef=1.0)
    with torch.no_grad():
        ffn.router.weight.zero_()[:, 0] = torch.tensor([9.0, -9.0])
    x = torch.zeros(2, 5, 12)
    x[0, :, 0], x[1, :, 0] = 1, -1
    assert ffn(x)[1]["router_balance"].item() == pytest.approx(2, abs=1e-3)
    assert ffn(x.view(1, 10, 12))[1]["router_balance"].item() == pytest.approx(1, abs=1e-3)
    assert deepseek(balance_coef=0.0)(x)[1] == {}


@mixtures
def test_evaluation_has_no_losses_and_changes_nothing(make):
    ffn = strong(make())
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    before = copy.deepcopy(dict(ffn.named_buffers()))
    with torch.no_grad():
        ffn.train()(x)
    assert ffn.eval()(x)[1] == {}
    assert all(torch.equal(tensor, before[name]) for name, tensor in ffn.named_buffers())


@mixtures
def test_rows_are_independent(make):
    ffn = strong(make()).eval()
    x = torch.randn(4, 9, 12, dtype=torch.float64)
    with torch.no_grad():
        expected = ffn(x)[0]
        other = torch.cat([x[:1], torch.randn(3, 9, 12, dtype=torch.float64)])
        torch.testing.assert_close(ffn(other)[0][0], expected[0], rtol=0, atol=1e-13)
        torch.testing.assert_close(ffn(x[:1, :1])[0], expected[:1, :1], rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_experts_without_tokens_get_a_zero_gradient(dtype):
    ffn = moe(16, n_experts=4, top_k=1, d_expert=16, norm_topk_prob=False).to(dtype)
    with torch.no_grad():
        ffn.router.weight.zero_()[0, 0] = 1.0
    x = torch.ones(2, 40, 16, dtype=dtype)
    (ffn(x)[0] ** 2).sum().backward()
    for layer in (ffn.experts.gate_up, ffn.experts.out):
        assert layer.weight.grad[0].abs().max() > 0
        assert layer.weight.grad[1:].abs().max() == 0
    ffn.after_step(0.0)
    assert ffn.metrics() == pytest.approx(
        {"router_load_max_over_mean": 4, "router_dead_expert_share": 0.75, "router_load_entropy_nats": 0}
    )


@pytest.mark.parametrize("tokens", [1, 5, 50])
def test_no_expert_computes_a_token_that_is_not_its_own(tokens):
    ffn = moe(n_experts=6, top_k=2, d_expert=10).double().eval()
    x = torch.randn(1, tokens, 12, dtype=torch.float64)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        ffn(x)
    assert counter.get_total_flops() == 2 * tokens * (12 * 6 + 2 * 3 * 12 * 10)


@pytest.mark.slow  # two threads on a busy machine wait for each other
def test_every_run_gives_the_same_bits():
    x = torch.randn(4, 200, 16)

    def run():
        torch.manual_seed(1)
        ffn = deepseek(16, n_experts=16, d_expert=16)
        y, aux = ffn(x)
        (y.square().mean() + sum(aux.values())).backward()
        return [y, *(p.grad for p in ffn.parameters())]

    torch.set_num_threads(2)
    first, second = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_router_computes_in_float32_under_autocast():
    router, x = Router(64, 8), torch.randn(1, 30, 64)
    expected = router(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(router(x), expected)
        assert torch.equal(router(x.bfloat16()), router(x.bfloat16().float()))
        assert router(x.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("d_expert", [16, 10])
def test_experts_compute_in_bfloat16_under_autocast(d_expert):
    ffn = moe(16, d_expert=d_expert)
    x = torch.randn(1, 60, 16)
    expected = ffn(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        y, aux = ffn(x)
        with torch.no_grad():
            step = ffn(x[:, :1])[0]
    assert y.dtype == step.dtype == torch.bfloat16
    assert all(value.dtype == torch.float32 for value in aux.values())
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.05 * expected.std().item())
    torch.testing.assert_close(step.float(), expected[:, :1], rtol=0.05, atol=0.05 * expected.std().item())
    y.sum().backward()
    assert ffn.experts.out.weight.grad.dtype == torch.float32


def route_to(ffn, loads):
    """A training forward in which expert i gets loads[i] tokens."""
    with torch.no_grad():
        ffn.router.weight.copy_(20 * torch.eye(len(loads)))
    experts = torch.repeat_interleave(torch.arange(len(loads)), torch.tensor(loads))
    ffn(torch.eye(len(loads))[experts][None])


def test_bias_follows_the_sign_of_the_load():
    ffn = deepseek(4, n_experts=4, top_k=1, bias_rate=0.5)
    ffn.after_step(0.0)
    assert ffn.selection_bias.tolist() == [0, 0, 0, 0]
    route_to(ffn, [7, 3, 1, 1])  # the mean is 3
    ffn.after_step(0.1)
    assert ffn.selection_bias.tolist() == [-0.5, 0, 0.5, 0.5]
    ffn.after_step(0.1)
    assert ffn.selection_bias.tolist() == [-0.5, 0, 0.5, 0.5]
    assert ffn.metrics() == pytest.approx(
        {
            "router_load_max_over_mean": 7 / 3,
            "router_dead_expert_share": 0,
            "router_load_entropy_nats": -sum(n / 12 * math.log(n / 12) for n in (7, 3, 1, 1)),
        }
    )


def test_load_is_that_of_the_whole_step_and_of_training_only():
    ffn = deepseek(4, n_experts=4, top_k=1, bias_rate=0.5)
    route_to(ffn, [4, 0, 0, 0])
    route_to(ffn.eval(), [0, 0, 9, 0])
    route_to(ffn.train(), [0, 2, 2, 0])
    ffn.after_step(0.1)
    assert ffn.selection_bias.tolist() == [-0.5, 0, 0, 0.5]


def test_a_checkpoint_within_a_step_keeps_the_load():
    ffn, resumed = (deepseek(4, n_experts=4, top_k=1, bias_rate=0.5) for _ in range(2))
    route_to(ffn, [6, 0, 1, 1])
    resumed.load_state_dict(ffn.state_dict())
    resumed.after_step(0.1)  # as after every load of a checkpoint
    for module in (ffn, resumed):
        route_to(module, [0, 2, 2, 0])
        module.after_step(0.1)
    assert ffn.selection_bias.tolist() == [-0.5, 0.5, 0, 0.5]
    assert torch.equal(resumed.selection_bias, ffn.selection_bias)
    assert torch.equal(resumed.load.current, ffn.load.current)


def test_the_bias_balances_a_skewed_router():
    ffn = deepseek(8, n_experts=8, top_k=2, bias_rate=0.01)
    with torch.no_grad():
        ffn.router.weight[:, 0] += torch.linspace(-1, 1, 8)
    x = torch.randn(1, 400, 8)
    x[..., 0] = 1
    imbalance = []
    for _ in range(60):
        ffn(x)
        ffn.after_step(0.5)
        imbalance.append(ffn.metrics()["router_load_max_over_mean"])
    assert imbalance[0] > 2.5
    assert imbalance[-1] < 1.5


@pytest.mark.parametrize("name", ["moe", "moe_deepseek"])
def test_active_weights_are_as_many_as_in_the_dense_network(name):
    ffn = build_layer(factory("ffn", load([f"ffn={name}"]).ffn), 256, layer_idx=3, n_layers=4)
    dense = sum(p.numel() for p in SwiGLU(256).parameters())
    experts = sum(p.numel() for p in ffn.experts.parameters())
    shared = sum(p.numel() for p in ffn.shared.parameters()) if name == "moe_deepseek" else 0
    assert experts * ffn.top_k // ffn.router.out_features + shared == dense


@pytest.mark.parametrize(
    ("make", "settings", "value"),
    [
        (moe, {"top_k": 7}, "top_k=7"),
        (moe, {"top_k": 0}, "top_k=0"),
        (deepseek, {"top_k": 9}, "top_k=9"),
        (deepseek, {"n_groups": 3}, "n_groups=3"),
        (deepseek, {"scoring": "tanh"}, "scoring='tanh'"),
        (deepseek, {"group_score": "min"}, "group_score='min'"),
        (deepseek, {"n_groups": 4, "top_k_groups": 5}, "top_k_groups=5"),
        (deepseek, {"n_groups": 4, "top_k_groups": 1}, "top_k=3"),
    ],
)
def test_impossible_sizes_get_a_sentence(make, settings, value):
    with pytest.raises(UsageError, match=value):
        make(**settings)
