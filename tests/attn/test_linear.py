"""Kimi Delta Attention and its family: the fast forms against the definition, each member against its own formula.

Shapes: b batch, t tokens, h heads, k key width, v value width.
"""

import math

import pytest
import torch
from torch.nn.functional import elu, logsigmoid, normalize, sigmoid, silu, softplus
from torch.utils.flop_counter import FlopCounterMode

from archlab.attn.linear import LinearAttention
from archlab.config.compose import load
from archlab.errors import UsageError
from archlab.nn.chunk_ops import DecayedProducts, UnitInverse
from archlab.nn.decay import LearnedDecay
from archlab.nn.delta_reference import delta_rule_reference
from archlab.nn.delta_rule import FEW_TOKENS, chunked, delta_rule, recurrent
from archlab.plugins import build_layer, factory
from archlab.train.optimizer import param_groups

CPU, META = torch.device("cpu"), torch.device("meta")
F64 = torch.float64
FAMILY = ["kda", "gdn", "deltanet", "gla", "retnet", "linear"]
D = 20
SMALL = {"n_heads": 2, "head_dim": 6, "chunk_size": 8}


def rand(*shape, dtype=F64):
    return torch.randn(*shape, dtype=dtype)


def member(name, d_model=D, **settings):
    """A mixer of the family with its plugin's settings, by default small and in float64, with weights that matter."""
    node = load([f"attn={name}"]).attn
    node.update(SMALL | settings)
    if node.rope_dim is None:
        node.rope_dim = 4
    mixer = build_layer(factory("attn", node), d_model, layer_idx=0, n_layers=1).double()
    with torch.no_grad():
        for parameter in mixer.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
        if mixer.out_norm is not None:
            mixer.out_norm.weight.normal_()
    return mixer


def inputs(t, *, decay="channel", delta=True, strength=3.0, dtype=F64, b=2, h=3, k=8, v=5):
    """q, k, v, g, beta, state: what a layer would give to the delta rule, with a state that is not empty."""
    q, key = (normalize(rand(b, t, h, k), dim=-1) for _ in range(2))
    width = {"channel": k, "scalar": 1, "none": 0}[decay]
    g = -strength * torch.rand(b, t, h, width, dtype=F64) if width else None
    beta = 2 * torch.rand(b, t, h, dtype=F64) if delta else None
    everything = [q, key, rand(b, t, h, v), g, beta, rand(b, h, k, v)]
    return [None if x is None else x.to(dtype).requires_grad_() for x in everything]


def results(form, args):
    """Outputs, last state, and the gradients of a weighted sum of both."""
    y, state = form(*args)
    weigh = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(x.shape, generator=weigh, dtype=F64).to(x.dtype)).sum() for x in (y, state))
    return y, state, *torch.autograd.grad(loss, [x for x in args if x is not None])


def in_chunks(size):
    return lambda *args: chunked(*args, chunk_size=size)


def assert_same(actual, expected, tolerance):
    for a, e in zip(actual, expected, strict=True):
        assert (a - e).abs().max() <= tolerance * max(1.0, e.abs().max().item())


@pytest.mark.parametrize("delta", [True, False], ids=["delta", "no delta"])
@pytest.mark.parametrize("decay", ["channel", "scalar", "none"])
@pytest.mark.parametrize("t", [1, 7, 8, 9, 19, 37, 64, 67])
def test_every_form_is_the_definition_gradients_too(t, decay, delta):
    args = inputs(t, decay=decay, delta=delta)
    expected = results(delta_rule_reference, args)
    for form in (recurrent, in_chunks(8), in_chunks(32)):
        assert_same(results(form, args), expected, 1e-12)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gradcheck_in_chunks(size):
    assert torch.autograd.gradcheck(in_chunks(size), inputs(7, b=1, h=2, k=3, v=2), fast_mode=False)


def test_gradcheck_of_the_parts():
    k, q = rand(1, 8, 2).requires_grad_(), rand(1, 8, 2).requires_grad_()
    g = (-torch.rand(1, 8, 2, dtype=F64)).requires_grad_()
    assert torch.autograd.gradcheck(DecayedProducts.apply, (k, g, q))
    assert torch.autograd.gradcheck(DecayedProducts.apply, (k, g, q, k.detach().clone().requires_grad_()))
    a = rand(3, 8, 8).requires_grad_()
    assert torch.autograd.gradcheck(UnitInverse.apply, (a,))
    inverse = UnitInverse.apply(a)
    eye = torch.eye(8, dtype=F64)
    torch.testing.assert_close((eye + a.tril(-1)) @ inverse, eye.expand(3, 8, 8))


@pytest.mark.parametrize("t", [64, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("g", [-0.1, -1.0, -5.0, -20.0, -100.0, "sudden", "of every size"])
def test_strong_decay_is_exact_in_float32_gradients_too(g, t):
    args = inputs(t, b=1, h=2, k=8, v=8)
    with torch.no_grad():
        if g == "sudden":  # a reset now and then, and hardly any decay between: no sum over the chunk keeps its digits
            args[3].copy_(torch.where(torch.rand_like(args[3]) < 0.2, -1000.0, -0.01))
        elif g == "of every size":
            args[3].copy_(-torch.exp(3 * torch.randn_like(args[3])))
        else:
            args[3].fill_(g)
    expected = results(delta_rule_reference, args)
    narrow = [x.detach().float().requires_grad_() for x in args]
    for form in (recurrent, in_chunks(32)):
        assert_same(results(form, narrow), expected, 2e-6)


def test_a_decay_that_forgets_all_is_exact():
    args = inputs(37)
    with torch.no_grad():
        args[3][:, ::5] = -math.inf
    expected = [x.nan_to_num() for x in results(delta_rule_reference, args)]
    assert_same(results(in_chunks(8), args), expected, 1e-12)


@pytest.mark.parametrize("t", [1, FEW_TOKENS, FEW_TOKENS + 1, 40])
@pytest.mark.parametrize("delta", [True, False], ids=["delta", "no delta"])
def test_the_state_is_written_in_place_or_left_alone(t, delta):
    *args, state = (None if x is None else x.detach() for x in inputs(t, delta=delta))
    before = state.clone()
    y, last = delta_rule(*args, state, chunk_size=8)
    assert torch.equal(state, before)
    y_again, same = delta_rule(*args, state, chunk_size=8, in_place=True)
    assert torch.equal(y, y_again)
    assert torch.equal(state, last)
    assert same.data_ptr() == state.data_ptr()


def test_gdn_is_kda_with_a_gate_constant_over_channels():
    q, k, v, g, beta, state = inputs(37, decay="scalar")
    wide = g.expand(-1, -1, -1, k.shape[-1])
    for form in (in_chunks(8), recurrent, delta_rule_reference):
        assert_same(form(q, k, v, g, beta, state), delta_rule_reference(q, k, v, wide, beta, state), 1e-12)
    gdn = member("gdn", gate="low_rank")
    kda = member("kda", gate_act="silu", decay_rank=2)
    with torch.no_grad():
        for name, parameter in gdn.named_parameters():
            if name != "forget.dt_bias":
                kda.get_parameter(name).copy_(parameter)
        kda.decay_up.weight.copy_(torch.eye(2, dtype=F64).repeat_interleave(6, 0))
        kda.forget.dt_bias.copy_(gdn.forget.dt_bias.repeat_interleave(6))
    x = rand(2, 37, D)
    torch.testing.assert_close(kda(x)[0], gdn(x)[0])


def parts_of(mixer, x):
    """in_proj's output by meaning, the convolution written out: q, k (b t h k), v (b t g v), and what gates need."""
    qkv, beta, z, gate = (x @ mixer.in_proj.weight.T).split(mixer.splits, dim=-1)
    if mixer.conv is not None:
        w = mixer.conv.weight
        seen = torch.cat([torch.zeros_like(qkv[:, : len(w) - 1]), qkv], dim=1)
        qkv = silu(sum(w[j] * seen[:, j : j + x.shape[1]] for j in range(len(w))))
    n = mixer.n_heads * mixer.head_dim
    q, k, v = qkv.split([n, n, qkv.shape[-1] - 2 * n], dim=-1)
    q, k = (y.unflatten(-1, (mixer.n_heads, -1)) for y in (q, k))
    return q, k, v.unflatten(-1, (mixer.n_v_heads, -1)), beta, z, gate


def unit(x):
    return x / torch.sqrt((x**2).sum(-1, keepdim=True) + 1e-6)


def by_products(q, k, v, transition, write):
    """o_i = S_i^T q_i with S_i = sum_{j <= i} transition(i) .. transition(j + 1) write(j) k_j v_j^T, from the sum."""
    y = torch.zeros_like(v)
    for i in range(q.shape[1]):
        for j in range(i + 1):
            key = write(j)[..., None] * k[:, j]
            for s in range(j + 1, i + 1):
                key = (transition(s) @ key[..., None])[..., 0]
            y[:, i] += (q[:, i] * key).sum(-1, keepdim=True) * v[:, j]
    return y


def expected_output(name, mixer, x):
    """Each member from its paper's formula: no shared code, no recurrence that carries a state."""
    q, k, v, beta, z, gate = parts_of(mixer, x)
    b, t, h, width = q.shape
    scale = width**-0.5
    if name == "linear":
        q, k = elu(q) + 1, elu(k) + 1
        weights = torch.einsum("bihc,bjhc->bhij", q, k).tril()
        y = torch.einsum("bhij,bjhv->bihv", weights, v) / weights.sum(-1).transpose(1, 2)[..., None]
        return y.flatten(2) @ mixer.out.weight.T
    if name == "retnet":
        angles = torch.arange(t)[:, None] * 1e4 ** (-torch.arange(0, 4, 2, dtype=F64) / 4)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        q, k = (
            torch.cat([torch.view_as_real(torch.view_as_complex(y[..., :4].unflatten(-1, (2, 2)).contiguous()) * turn)
                       .flatten(-2), y[..., 4:]], dim=-1)
            for y in (q, k)
        )  # fmt: skip
        age = (torch.arange(t)[:, None] - torch.arange(t)).clamp(min=0)
        kept = torch.stack([(1 - 2.0 ** (-5 - head)) ** age.to(F64) for head in range(h)]).tril()
        y = torch.einsum("bihc,bjhc,hij,bjhv->bihv", q, k, kept, v) * scale
    elif name == "gla":
        alpha = sigmoid((z @ mixer.decay_up.weight.T + mixer.forget.dt_bias).unflatten(-1, (h, width))) ** (1 / 16)
        y = torch.zeros_like(v)
        for i in range(t):
            for j in range(i + 1):
                kept = alpha[:, j + 1 : i + 1].prod(dim=1)
                y[:, i] += (q[:, i] * k[:, j] * kept).sum(-1, keepdim=True) * v[:, j] * scale
    else:
        q, k, beta = unit(q), unit(k), mixer.beta_max * sigmoid(beta)
        if name == "deltanet":
            alpha = torch.ones(b, t, h, 1, dtype=F64)
        elif name == "gdn":
            alpha = torch.exp(-mixer.forget.A_log.exp() * softplus(z + mixer.forget.dt_bias))[..., None]
        else:
            z = (z @ mixer.decay_up.weight.T + mixer.forget.dt_bias).unflatten(-1, (h, width))
            rate = mixer.forget.A_log.exp()[:, None]
            alpha = torch.exp(-5 * sigmoid(rate * z) if mixer.forget.gate == "bounded" else -rate * softplus(z))
        alpha, eye = alpha.expand(b, t, h, width), torch.eye(width, dtype=F64)

        def transition(i):
            erase = eye - beta[:, i, :, None, None] * k[:, i, :, :, None] * k[:, i, :, None, :]
            return erase @ torch.diag_embed(alpha[:, i])

        y = by_products(q, k, v, transition, lambda j: beta[:, j]) * scale
    y = y / torch.sqrt((y**2).mean(-1, keepdim=True) + 1e-5) * mixer.out_norm.weight
    if name == "kda":
        y = y * sigmoid(gate if mixer.gate_up is None else gate @ mixer.gate_up.weight.T).view_as(y)
    elif name != "deltanet":
        y = y * silu(gate).view_as(y)
    return y.flatten(2) @ mixer.out.weight.T


@pytest.mark.parametrize("t", [5, 19])
@pytest.mark.parametrize("name", [*FAMILY, "kda, later"])
def test_each_member_is_its_own_formula(name, t):
    settings = {"decay_gate": "bounded", "gate": "full", "beta_max": 2.0, "v_head_dim": 9} if "later" in name else {}
    name = name.removesuffix(", later")
    mixer, x = member(name, **settings), rand(2, t, D)
    # The formula of linear attention has no epsilon in its denominator.
    tolerance = 1e-4 if name == "linear" else 1e-10
    torch.testing.assert_close(mixer(x)[0], expected_output(name, mixer, x), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", FAMILY)
def test_two_pieces_are_one_pass_at_every_cut(name):
    mixer, x = member(name), rand(2, 37, D)
    with torch.no_grad():
        whole = mixer(x)[0]
        for cut in range(1, 37):
            state = mixer.init_state(2, 37, device=CPU, dtype=F64)
            pieces = [mixer(x[:, :cut], pos=0, state=state)[0], mixer(x[:, cut:], pos=cut, state=state)[0]]
            torch.testing.assert_close(torch.cat(pieces, dim=1), whole, atol=1e-11, rtol=0)


@pytest.mark.parametrize("t", [1, 20])
def test_a_state_is_updated_in_place_with_and_without_autograd(t):
    mixer, x = member("kda"), rand(1, 2 * t, D)
    states = []
    for grad in (False, True):
        state = mixer.init_state(1, 9, device=CPU, dtype=F64)
        addresses = [tensor.data_ptr() for tensor in state.tensors().values()]
        with torch.set_grad_enabled(grad):
            mixer(x[:, :t], pos=0, state=state)
            mixer(x[:, t:], pos=t, state=state)
        assert [tensor.data_ptr() for tensor in state.tensors().values()] == addresses
        states.append(state)
    torch.testing.assert_close(states[0].memory, states[1].memory.detach())
    assert states[0].memory.abs().max() > 0


@pytest.mark.parametrize("t", [3, 40])
def test_value_heads_share_the_queries_and_keys_of_their_group(t):
    grouped = member("gdn", n_v_heads=4)
    plain = member("gdn", n_heads=4)
    n = 2 * 6
    with torch.no_grad():
        rows = torch.arange(2 * n).view(2, 2, 6).repeat_interleave(2, dim=1).flatten()
        keep = torch.cat([rows, torch.arange(2 * n, grouped.in_proj.out_features)])
        plain.in_proj.weight.copy_(grouped.in_proj.weight[keep])
        plain.conv.weight.copy_(grouped.conv.weight[:, keep[: plain.conv.weight.shape[1]]])
        for name in ("forget.A_log", "forget.dt_bias", "out_norm.weight", "out.weight"):
            plain.get_parameter(name).copy_(grouped.get_parameter(name))
    x = rand(2, t, D)
    torch.testing.assert_close(grouped(x)[0], plain(x)[0])


@pytest.mark.parametrize("gate", ["softplus", "bounded", "logsigmoid"])
def test_learned_decays(gate):
    decay = LearnedDecay(3, 4, gate=gate, floor=-5.0)
    with torch.no_grad():
        if gate != "logsigmoid":
            decay.A_log.copy_(torch.tensor([-1.0, 0.5, 2.0]))
        decay.dt_bias.normal_()
    z = torch.linspace(-30, 30, 24).view(1, 2, 12)
    shifted = (z + decay.dt_bias).view(1, 2, 3, 4)
    rate = None if gate == "logsigmoid" else decay.A_log.exp().view(3, 1)
    expected = {
        "softplus": lambda: -rate * softplus(shifted),
        "bounded": lambda: -5 * sigmoid(rate * shifted),
        "logsigmoid": lambda: logsigmoid(shifted) / 16,
    }[gate]()
    torch.testing.assert_close(decay(z), expected)
    assert (decay(z) <= 0).all()
    assert gate != "bounded" or (decay(100 * z) >= -5).all()
    assert decay(z.bfloat16()).dtype == torch.float32


def test_initial_decays_cover_slow_and_fast():
    decay = LearnedDecay(64, 16, gate="softplus", floor=-5.0)
    step = softplus(decay.dt_bias)
    assert 1e-3 * 0.99 < step.min() < 2e-3
    assert 5e-2 < step.max() < 1e-1 * 1.01
    rate = decay.A_log.exp()
    assert 1 <= rate.min() < 3
    assert 12 < rate.max() <= 16.01
    assert (LearnedDecay(4, 1, gate="bounded", floor=-5.0).A_log == 0).all()


@pytest.mark.parametrize("t", [1, 40])
@pytest.mark.parametrize("name", FAMILY)
def test_the_state_stays_wide_under_bfloat16_autocast(name, t):
    mixer = member(name).float()
    state = mixer.init_state(2, 50, device=CPU, dtype=torch.bfloat16)
    x = rand(2, t, D, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            mixer(x, pos=0, state=state)
        mixer(x)[0].float().square().mean().backward()
    assert state.memory.dtype == torch.float32
    assert state.conv.dtype == torch.bfloat16
    assert mixer.init_state(1, 1, device=META, dtype=F64).memory.dtype == F64
    assert all(p.grad.isfinite().all() for p in mixer.parameters())
    # As wide as in float32, from the same rounded inputs: nothing of the recurrence ran in bfloat16.
    assert (state.memory != state.memory.bfloat16().float()).any()


@pytest.mark.parametrize("t", [1, 40])
def test_weights_in_bfloat16(t):
    mixer = member("kda").bfloat16()
    y = mixer(rand(1, t, D).bfloat16())[0]
    assert y.dtype == torch.bfloat16
    assert y.isfinite().all()


@pytest.mark.parametrize("g", [-5.0, -20.0, -100.0])
def test_strong_decay_under_bfloat16_autocast(g):
    args = inputs(70, b=1, h=2, k=8, v=8, dtype=torch.float32)
    with torch.no_grad():
        args[3].fill_(g)

    def under_autocast(*args):
        with torch.autocast("cpu", torch.bfloat16):
            return delta_rule(*args, chunk_size=32)

    assert_same(results(under_autocast, args), results(delta_rule_reference, args), 2e-6)


def test_parameters_and_state_of_kimi_linear():
    with META:
        mixer = LinearAttention(2304, n_heads=32, head_dim=128)
    assert sum(p.numel() for p in mixer.parameters()) == 39_514_272
    state = mixer.init_state(1, 1 << 20, device=META, dtype=torch.bfloat16)
    assert state.memory.numel() == 524_288
    assert state.conv.numel() == 36_864
    assert state.nbytes == 4 * 524_288 + 2 * 36_864 == mixer.read_bytes(1 << 20, 2)


def linear_flops(mixer):
    return sum(2 * m.weight.numel() for m in mixer.modules() if isinstance(m, torch.nn.Linear))


def counted(call):
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("settings", [{}, {"v_head_dim": 10, "n_v_heads": 4, "chunk_size": 16}], ids=["even", "wide"])
@pytest.mark.parametrize("name", FAMILY)
def test_flops_are_those_that_torch_counts(name, settings):
    mixer = member(name, **settings).to(META)
    state = mixer.init_state(1, 8, device=META, dtype=F64)
    step = counted(lambda: mixer(torch.empty(1, 1, D, dtype=F64, device=META), pos=3, state=state))
    assert step - linear_flops(mixer) == mixer.decode_flops(4) == mixer.decode_flops(1 << 20)
    n = 4 * mixer.chunk_size
    whole = counted(lambda: mixer(torch.empty(1, n, D, dtype=F64, device=META)))
    mixing = whole - n * linear_flops(mixer)
    assert 0 <= mixing - n * mixer.mix_flops(n) < n * mixer.n_v_heads  # a head's share is rounded down


def test_decays_are_exempt_from_weight_decay():
    decayed, others = param_groups(member("kda"), 0.1)
    mixer = member("kda")
    names = {name for name, p in mixer.named_parameters() if p.dim() < 2}
    assert names == {"forget.A_log", "forget.dt_bias", "out_norm.weight"}
    assert len(others["params"]) == 3
    assert len(decayed["params"]) == 5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n_heads": 0}, "n_heads=0"),
        ({"n_heads": 3, "head_dim": None}, "n_heads=3"),
        ({"n_v_heads": 3}, "n_v_heads=3"),
        ({"v_head_dim": 0}, "v_head_dim=0"),
        ({"rope_dim": 3}, "rope_dim=3"),
        ({"rope_dim": 8}, "rope_dim=8"),
        ({"conv_size": -1}, "conv_size=-1"),
        ({"chunk_size": 24}, "chunk_size=24"),
        ({"chunk_size": 0}, "chunk_size=0"),
        ({"decay_rank": 0}, "decay_rank=0"),
        ({"decay": "fast"}, "decay=fast"),
        ({"decay_gate": "relu"}, "decay_gate=relu"),
        ({"decay_floor": 0.0}, "decay_floor=0"),
        ({"feature_map": "relu"}, "feature_map=relu"),
        ({"norm": "layer"}, "norm=layer"),
        ({"norm": "sum"}, "norm=sum"),
        ({"gate": "wide"}, "gate=wide"),
        ({"gate_act": "relu"}, "gate_act=relu"),
        ({"beta_max": 3.0}, "beta_max=3"),
    ],
)
def test_impossible_settings_get_a_sentence(settings, words):
    with pytest.raises(UsageError, match=words):
        LinearAttention(D, **SMALL | settings)


@pytest.mark.slow
def test_compiled_is_eager():
    mixer, x = member("kda"), rand(2, 40, D)
    compiled = torch.compile(mixer, backend="aot_eager")
    expected = torch.autograd.grad(mixer(x)[0].square().sum(), list(mixer.parameters()))
    actual = torch.autograd.grad(compiled(x)[0].square().sum(), list(mixer.parameters()))
    assert_same(actual, expected, 1e-12)
    state = mixer.init_state(2, 40, device=CPU, dtype=F64)
    with torch.no_grad():
        pieces = [
            compiled(x[:, a:b], pos=a, state=state)[0] for a, b in ((0, 30), *((i, i + 1) for i in range(30, 40)))
        ]
        torch.testing.assert_close(torch.cat(pieces, dim=1), mixer(x)[0])
