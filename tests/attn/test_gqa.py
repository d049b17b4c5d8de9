"""Grouped-query attention, its rotary positions and the softmax core, against loops that follow the equations.

Shapes: b batch, t tokens, h query heads, g KV heads, c head width, s keys.
"""

import math

import pytest
import torch
from torch.nn.functional import rms_norm
from torch.utils.flop_counter import FlopCounterMode

from archlab.attn.gqa import GroupedQueryAttention, KVState
from archlab.errors import UsageError
from archlab.nn.attention import append, causal_attention
from archlab.nn.rope import rotate, rotate_

CPU = torch.device("cpu")
F64 = torch.float64


def rand(*shape, **kwargs):
    return torch.randn(*shape, dtype=F64, **kwargs)


def slow_rope(x, positions, n_rot, theta):
    """x (b t h c), positions (b t): each pair of channels times its own 2 x 2 rotation."""
    out = x.clone()
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            for j in range(n_rot // 2):
                angle = float(positions[b, t]) * theta ** (-2 * j / n_rot)
                turn = torch.tensor(
                    [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=F64
                )
                out[b, t, :, 2 * j : 2 * j + 2] = x[b, t, :, 2 * j : 2 * j + 2].to(F64) @ turn.T
    return out


def slow_attention(q, k, v, positions, window=None, scale=None):
    """q (b h t c), k and v (b g s c), positions (b t): one softmax a query."""
    group = q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = []
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            for t in range(q.shape[2]):
                p = int(positions[b, t])
                seen = slice(0 if window is None else max(0, p - window + 1), p + 1)
                weights = (q[b, i, t] @ k[b, i // group, seen].T * scale).softmax(-1)
                out.append(weights @ v[b, i // group, seen])
    return torch.stack(out).unflatten(0, q.shape[:3])


def row_positions(pos, batch, t):
    start = torch.full((batch,), pos) if isinstance(pos, int) else pos
    return start[:, None] + torch.arange(t)


def slow_gqa(mixer, x):
    """The whole mixer from its weights: one full pass."""
    b, t, _ = x.shape
    h, g, c = mixer.n_heads, mixer.n_kv_heads, mixer.head_dim
    q, k, v = (x @ mixer.qkv.weight.T).unflatten(-1, (h + 2 * g, c)).split([h, g, g], dim=2)
    if mixer.q_norm is not None:
        q = rms_norm(q, (c,), mixer.q_norm.weight, mixer.norm_eps)
        k = rms_norm(k, (c,), mixer.k_norm.weight, mixer.norm_eps)
    positions = row_positions(0, b, t)
    q, k = (slow_rope(z, positions, mixer.rope_dim, mixer.rope_theta).transpose(1, 2) for z in (q, k))
    y = slow_attention(q, k, v.transpose(1, 2), positions, mixer.window)
    return y.transpose(1, 2).flatten(2) @ mixer.out.weight.T


D = 24


def build(**settings):
    return GroupedQueryAttention(D, **{"n_heads": 4, "n_kv_heads": 2, "head_dim": 6} | settings).double()


def feed(mixer, x, pieces, *, capacity=None):
    """x (b t d) in pieces onto one state, whose slots start as garbage."""
    state = mixer.init_state(len(x), capacity or x.shape[1], device=CPU, dtype=x.dtype)
    state.kv.fill_(50.0)
    out, pos = [], 0
    with torch.no_grad():
        for piece in x.split(pieces, dim=1):
            out.append(mixer(piece, pos=pos, state=state)[0])
            pos += piece.shape[1]
    return torch.cat(out, dim=1)


def close(actual, expected, tolerance=1e-11):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# Rotary positions


@pytest.mark.parametrize("n_rot", [0, 2, 6, 8])
@pytest.mark.parametrize("pos", [0, 5, torch.tensor([3, 0, 11])], ids=["start", "offset", "ragged"])
def test_rope_is_a_rotation_of_each_pair(pos, n_rot):
    x = rand(3, 4, 2, 8)
    expected = slow_rope(x, row_positions(pos, 3, 4), n_rot, 100.0)
    close(rotate(x, pos, n_rot=n_rot, theta=100.0), expected)
    before = x.clone()
    assert rotate_(x, pos, n_rot=n_rot, theta=100.0) is x
    close(x, expected)
    assert n_rot or torch.equal(x, before)


def test_rope_of_narrow_and_of_oddly_strided_heads():
    x = rand(2, 3, 5, 7)  # rows of odd width: pairs do not start at even offsets
    expected = slow_rope(x, row_positions(4, 2, 3), 4, 50.0)
    close(rotate(x, 4, n_rot=4, theta=50.0), expected)
    close(rotate_(x.clone()[..., 1:], 4, n_rot=4, theta=50.0), slow_rope(x[..., 1:], row_positions(4, 2, 3), 4, 50.0))
    half = rotate(x.bfloat16(), 4, n_rot=4, theta=50.0)
    assert half.dtype == torch.bfloat16
    close(half.double(), expected, tolerance=0.02)


def test_rope_scores_depend_on_the_distance_alone():
    q, k = rand(1, 1, 1, 8), rand(1, 1, 1, 8)

    def score(i, j):
        return (rotate(q, i, n_rot=6, theta=1e4) * rotate(k, j, n_rot=6, theta=1e4)).sum()

    for i, j, shift in [(0, 0, 7), (5, 2, 13), (9, 1, 4000)]:
        close(score(i, j), score(i + shift, j + shift), 1e-10)
    assert (score(5, 2) - score(5, 3)).abs() > 1e-3
    close(rotate(q, 77, n_rot=8, theta=1e4).norm(), q.norm())


def test_rope_keeps_its_precision_far_out():
    x = torch.randn(1, 2, 1, 8)
    exact = rotate(x.double(), 100_000, n_rot=8, theta=1e4)
    close(rotate(x, 100_000, n_rot=8, theta=1e4).double(), exact, 1e-5)


def test_rope_table_made_while_decoding_serves_training():
    with torch.inference_mode():
        rotate(torch.randn(1, 1, 1, 4), 0, n_rot=4, theta=12345.0)
    x = torch.randn(1, 3, 1, 4, requires_grad=True)
    rotate(x, 0, n_rot=4, theta=12345.0).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("width", [6, 5])
def test_rope_gradient(width):
    x = rand(2, 3, 2, width, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: rotate_(z * 1.5, 3, n_rot=4, theta=20.0), x)


# The softmax core

CASES = {
    "one token, at the end": (1, 8, 9),
    "full pass": (9, 0, 9),
    "long full pass": (23, 0, 23),
    "few tokens onto a cache": (3, 6, 9),
    "packed at most": (16, 5, 21),
    "more than packed": (17, 5, 22),
    "slots behind the tokens": (3, 2, 9),
    "one token, slots behind it": (1, 3, 9),
    "ragged, one token": (1, torch.tensor([0, 7]), 9),
    "ragged, three tokens": (3, torch.tensor([6, 2]), 9),
    "ragged, many tokens": (18, torch.tensor([1, 4]), 24),
}


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_attention_is_a_softmax_over_what_is_visible(case, heads, window):
    t, pos, s = case
    h, g = heads
    q, k, v = (
        rand(2, h, t, 4, requires_grad=True),
        rand(2, g, s, 4, requires_grad=True),
        rand(2, g, s, 4, requires_grad=True),
    )
    y = causal_attention(q, k, v, pos=pos, window=window, scale=0.7)
    expected = slow_attention(q, k, v, row_positions(pos, 2, t), window, scale=0.7)
    close(y, expected)
    upstream = rand(*y.shape)
    for grad, slow in zip(
        torch.autograd.grad(y, (q, k, v), upstream), torch.autograd.grad(expected, (q, k, v), upstream), strict=True
    ):
        close(grad, slow)


@pytest.mark.parametrize("pos", [0, 30])
@pytest.mark.parametrize("window", [5, 64, 70])
def test_windowed_pass_of_several_pieces(window, pos):
    t = 150
    q, k, v = rand(1, 2, t, 2, requires_grad=True), rand(1, 1, pos + t, 2, requires_grad=True), rand(1, 1, pos + t, 2)
    age = torch.arange(pos, pos + t)[:, None] - torch.arange(pos + t)
    scores = (q @ k.mT * 2**-0.5).masked_fill((age < 0) | (age >= window), -math.inf)
    y, expected = causal_attention(q, k, v, pos=pos, window=window), scores.softmax(-1) @ v
    close(y, expected)
    upstream = rand(*y.shape)
    for grad, slow in zip(
        torch.autograd.grad(y, (q, k), upstream), torch.autograd.grad(expected, (q, k), upstream), strict=True
    ):
        close(grad, slow)


def test_default_scale_is_that_of_the_head_width():
    q, k, v = rand(1, 2, 3, 5), rand(1, 1, 3, 5), rand(1, 1, 3, 5)
    close(causal_attention(q, k, v), slow_attention(q, k, v, row_positions(0, 1, 3)))


def test_a_narrow_cache_decides_the_precision_but_not_the_dtype():
    q, k, v = torch.randn(1, 2, 1, 4), torch.randn(1, 1, 6, 4).bfloat16(), torch.randn(1, 1, 6, 4).bfloat16()
    y = causal_attention(q, k, v, pos=5)
    assert y.dtype == torch.float32
    close(y, causal_attention(q.bfloat16(), k, v, pos=5).float(), 1e-6)


def test_append_writes_where_it_should_and_nowhere_else():
    new = rand(2, 3, 2, 4)
    for pos in (5, torch.tensor([5, 1])):
        slots = torch.zeros(2, 3, 9, 4, dtype=F64)
        filled = append(slots, new, pos)
        assert filled.shape[2] == 7
        assert filled.data_ptr() == slots.data_ptr()
        for row, start in enumerate([5, 5] if isinstance(pos, int) else pos.tolist()):
            assert torch.equal(slots[row, :, start : start + 2], new[row])
        assert slots.count_nonzero() == new.count_nonzero()


# The mixer

SETTINGS = {
    "gqa": {},
    "mha": {"n_kv_heads": None, "head_dim": None},
    "mqa": {"n_kv_heads": 1},
    "qk-norm": {"qk_norm": True},
    "partial rope": {"rope_dim": 2, "rope_theta": 100.0},
    "nope": {"rope_dim": 0},
    "odd heads": {"head_dim": 5, "rope_dim": 4},
    "window": {"window": 4},
    "all of it": {"n_heads": 6, "n_kv_heads": 2, "qk_norm": True, "rope_dim": 4, "window": 5},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_mixer_follows_the_equations_with_gradients(settings):
    mixer = build(**settings)
    for norm in (mixer.q_norm, mixer.k_norm):
        if norm is not None:
            torch.nn.init.normal_(norm.weight)
    x = rand(2, 11, D, requires_grad=True)
    y, aux = mixer(x)
    expected = slow_gqa(mixer, x)
    assert aux == {}
    close(y, expected)
    upstream, leaves = rand(*y.shape), (x, *mixer.parameters())
    grads, slow = (torch.autograd.grad(out, leaves, upstream) for out in (y, expected))
    for grad, slow_grad in zip(grads, slow, strict=True):
        close(grad, slow_grad)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("pieces", [[11], [1] * 11, [3, 1, 6, 1], [10, 1]], ids=str)
def test_pieces_equal_the_full_pass(settings, pieces):
    mixer, x = build(**settings), rand(2, 11, D)
    expected = slow_gqa(mixer, x).detach()
    close(feed(mixer, x, pieces), expected)
    close(feed(mixer, x, pieces, capacity=40), expected)


def test_query_head_i_reads_kv_head_i_over_group():
    mixer = build(n_heads=6, n_kv_heads=3, head_dim=4)
    values = mixer.qkv.weight.data.unflatten(0, (12, 4))[9:]
    for j in range(3):
        values[j] = float(j + 1) / D  # the value of KV head j at an input of ones
    seen = []
    mixer.out.register_forward_pre_hook(lambda _, args: seen.append(args[0].unflatten(-1, (6, 4))))
    x = torch.ones(1, 5, D, dtype=F64)
    mixer(x)
    feed(mixer, x, [1] * 5)
    for y in seen:
        close(y[0, 0, :, 0], torch.tensor([1.0, 1, 2, 2, 3, 3], dtype=F64))


@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_shared_kv_heads_equal_heads_with_copied_weights(n_kv_heads):
    shared, full = build(n_kv_heads=n_kv_heads), build(n_kv_heads=None)
    group = 4 // n_kv_heads
    heads = shared.qkv.weight.data.unflatten(0, (4 + 2 * n_kv_heads, 6))
    copied = [heads[:4], *(part.repeat_interleave(group, 0) for part in heads[4:].chunk(2))]
    full.qkv.weight.data = torch.cat(copied).flatten(0, 1)
    full.out.weight.data = shared.out.weight.data
    x = rand(2, 9, D)
    close(shared(x)[0], full(x)[0])
    close(feed(shared, x, [4] + [1] * 5), feed(full, x, [4] + [1] * 5))


def test_huge_window_is_no_window():
    plain, windowed = build(), build(window=1000)
    windowed.load_state_dict(plain.state_dict())
    x = rand(2, 13, D)
    close(windowed(x)[0], plain(x)[0])
    close(feed(windowed, x, [6, 1, 6]), feed(plain, x, [6, 1, 6]))


WINDOW = 5


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 1])
@pytest.mark.parametrize("size", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
def test_ring_at_its_boundaries(length, size):
    mixer, x = build(window=WINDOW), rand(2, length, D)
    pieces = [min(size, length - start) for start in range(0, length, size)]
    close(feed(mixer, x, pieces), slow_gqa(mixer, x).detach())


@pytest.mark.parametrize("prefill", [1, 2, WINDOW - 1, WINDOW, 2 * WINDOW + 2])
def test_decoding_past_two_wraps_of_the_ring(prefill):
    mixer, x = build(window=WINDOW), rand(1, prefill + 2 * WINDOW + 3, D)
    pieces = [prefill] + [1] * (2 * WINDOW + 3)
    close(feed(mixer, x, pieces), slow_gqa(mixer, x).detach())


def test_pieces_longer_than_the_ring_leave_it_whole():
    mixer, x = build(window=WINDOW), rand(2, 6 * WINDOW, D)
    pieces = [3, 2 * WINDOW + 1, 1, WINDOW, 2 * WINDOW - 5, WINDOW]
    close(feed(mixer, x, pieces), slow_gqa(mixer, x).detach())


@pytest.mark.parametrize("window", [None, WINDOW])
def test_ragged_rows_decode_as_each_alone(window):
    mixer, starts, x = build(window=window), [1, 7, 4, 12], rand(4, 20, D)
    expected = slow_gqa(mixer, x).detach()
    rows = []
    for row, start in enumerate(starts):
        rows.append(mixer.init_state(1, 20, device=CPU, dtype=F64))
        mixer(x[row : row + 1, :start], state=rows[-1])
    state, at = KVState.cat(rows), torch.tensor(starts)
    for _ in range(8):
        with torch.no_grad():
            y, _ = mixer(x[torch.arange(4), at][:, None], pos=at, state=state)
        close(y[:, 0], expected[torch.arange(4), at])
        at = at + 1


def test_ragged_rows_take_several_tokens_without_a_window():
    mixer, x, pos = build(), rand(2, 9, D), torch.tensor([2, 5])
    state = mixer.init_state(2, 9, device=CPU, dtype=F64)
    with torch.no_grad():
        mixer(x[:, :5], state=state)
        y, _ = mixer(torch.stack([x[0, 2:5], x[1, 5:8]]), pos=pos, state=state)
    expected = slow_gqa(mixer, x).detach()
    close(y, torch.stack([expected[0, 2:5], expected[1, 5:8]]))
    windowed = build(window=WINDOW)
    with pytest.raises(ValueError, match="one token at a time"):
        windowed(x[:, :2], pos=pos, state=windowed.init_state(2, 9, device=CPU, dtype=F64))


def test_the_cache_holds_keys_rotated_once_and_values():
    mixer, x = build(), rand(1, 9, D)
    state = mixer.init_state(1, 9, device=CPU, dtype=F64)
    with torch.no_grad():
        for t in range(9):
            mixer(x[:, t : t + 1], pos=t, state=state)
    k, v = (x @ mixer.qkv.weight.T).unflatten(-1, (8, 6))[:, :, 4:].split([2, 2], dim=2)
    close(state.k.transpose(1, 2), slow_rope(k, row_positions(0, 1, 9), 6, 1e4))
    close(state.v.transpose(1, 2), v)


def test_the_cache_is_as_large_as_it_says():
    def elements(max_len, **settings):
        return build(**settings).init_state(1, max_len, device=torch.device("meta"), dtype=torch.float32).nbytes // 4

    assert elements(100) == 2 * 2 * 6 * 100
    assert elements(100, n_kv_heads=None) == 2 * elements(100)
    assert elements(100, window=7) == elements(7)
    assert elements(3, window=7) == elements(3)
    assert build().init_state(1, 8, device=CPU, dtype=torch.bfloat16).nbytes * 2 == elements(8) * 4


def test_flops_are_those_of_the_counter():
    with torch.device("meta"):
        mixer, x = GroupedQueryAttention(32, n_heads=4, n_kv_heads=2), torch.empty(1, 10, 32)
        state = mixer.init_state(1, 50, device=torch.device("meta"), dtype=torch.float32)
    linear = 2 * sum(p.numel() for p in mixer.parameters())
    with FlopCounterMode(display=False) as counted:
        mixer(x)
    assert counted.get_total_flops() == 10 * (linear + mixer.mix_flops(10))
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        mixer(x[:, :1], pos=49, state=state)
    assert counted.get_total_flops() == linear + mixer.decode_flops(50)
    assert build(window=7).mix_flops(1000) == build().mix_flops(7)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"qk_norm": True, "rope_dim": 4, "window": 4}], ids=str)
def test_compiled_mixer_computes_the_same_with_gradients(settings):
    mixer, x = build(**settings), rand(2, 11, D, requires_grad=True)
    compiled = torch.compile(mixer, backend="aot_eager")
    y, expected = compiled(x)[0], mixer(x)[0]
    close(y, expected)
    close(*(torch.autograd.grad(out.square().sum(), x)[0] for out in (y, expected)))


def test_autocast_norms_in_the_precision_of_the_weights(recwarn):
    mixer, x = build(qk_norm=True).float(), torch.randn(1, 6, D)
    with torch.autocast("cpu", torch.bfloat16):
        y = mixer(x)[0]
    torch.testing.assert_close(y.float(), mixer(x)[0], rtol=0.05, atol=0.02)
    assert not [w for w in recwarn if "dtype" in str(w.message)]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"n_heads": 5, "head_dim": None}, "d_model=24 is not divisible by n_heads=5"),
        ({"n_heads": 0, "head_dim": None}, "n_heads=0"),
        ({"n_kv_heads": 3}, "n_kv_heads=3"),
        ({"n_kv_heads": 0}, "n_kv_heads=0"),
        ({"head_dim": 0}, "head_dim=0"),
        ({"rope_dim": 3}, "rope_dim=3"),
        ({"rope_dim": 8}, "rope_dim=8"),
        ({"head_dim": 5}, "rope_dim=5"),
        ({"window": 0}, "window=0"),
    ],
)
def test_impossible_sizes_are_named(settings, named):
    with pytest.raises(UsageError, match=named):
        build(**settings)
