"""Latent attention: both of its forms against the equations of the paper, and what it caches.

Shapes: b batch, t tokens, h heads, dc latent width, dn / dr / dv width of plain / rotary query and key / value.
"""

import math

import pytest
import torch
from torch.nn.functional import rms_norm
from torch.utils.flop_counter import FlopCounterMode

from archlab.attn.mla import LatentState, MultiHeadLatentAttention
from archlab.config.compose import load
from archlab.errors import UsageError
from archlab.plugins import factory

CPU, META = torch.device("cpu"), torch.device("meta")
F64 = torch.float64
D = 20
SIZES = {"n_heads": 3, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
SETTINGS = {
    "plain": {},
    "query latent": {"q_lora_rank": 7},
    "nope": {"rope": False},
    "no rotary channels": {"rope": False, "qk_rope_head_dim": 0},
    "odd rotary channels": {"rope": False, "qk_rope_head_dim": 3},
    "wide values": {"v_head_dim": 13},
    "values as wide as keys": {"v_head_dim": 10, "rope_theta": 50.0},
    "narrow latent": {"kv_lora_rank": 3},
}
every_setting = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())


def rand(*shape, **kwargs):
    return torch.randn(*shape, dtype=F64, **kwargs)


def build(**settings):
    mixer = MultiHeadLatentAttention(D, **SIZES | settings).double()
    for norm in (mixer.q_norm, mixer.kv_norm):
        if norm is not None:
            torch.nn.init.normal_(norm.weight)
    return mixer


def turned(x, position, theta):
    """x (.. dr), channels in pairs (2j, 2j+1), each turned by its own angle."""
    out = x.clone()
    for j in range(x.shape[-1] // 2):
        angle = position * theta ** (-2 * j / x.shape[-1])
        a, b = x[..., 2 * j], x[..., 2 * j + 1]
        out[..., 2 * j] = a * math.cos(angle) - b * math.sin(angle)
        out[..., 2 * j + 1] = a * math.sin(angle) + b * math.cos(angle)
    return out


def slow_mla(mixer, x, *, q_rank=None, rope=True, theta=1e4, eps=1e-6):
    """Token by token, head by head, as the paper writes it. Also what should be cached, (b t dc+dr)."""
    h, dc, dn, dr, dv = mixer.n_heads, mixer.dc, mixer.dn, mixer.dr, mixer.dv
    w_q, w_c, w_kr = mixer.down.weight.split([q_rank or h * (dn + dr), dc, dr])
    w_up = mixer.kv_up.weight.unflatten(0, (h, dn + dv))
    rows, cached = [], []
    for sequence in x:
        keys, values, latents, outputs = [], [], [], []
        for position, token in enumerate(sequence):
            spin = (lambda z, p=position: turned(z, p, theta)) if rope else (lambda z: z)
            query = w_q @ token
            if q_rank:
                query = mixer.q_up.weight @ rms_norm(query, (q_rank,), mixer.q_norm.weight, eps)
            query = query.unflatten(0, (h, dn + dr))
            query = torch.cat([query[:, :dn], spin(query[:, dn:])], -1)
            latent, key_rope = rms_norm(w_c @ token, (dc,), mixer.kv_norm.weight, eps), spin(w_kr @ token)
            keys.append(torch.cat([w_up[:, :dn] @ latent, key_rope.expand(h, -1)], -1))
            values.append(w_up[:, dn:] @ latent)
            latents.append(torch.cat([latent, key_rope]))
            scores = torch.stack([(query * key).sum(-1) for key in keys]) / math.sqrt(dn + dr)
            outputs.append(torch.einsum("sh,shv->hv", scores.softmax(0), torch.stack(values)).flatten())
        rows.append(torch.stack(outputs) @ mixer.out.weight.T)
        cached.append(torch.stack(latents))
    return torch.stack(rows), torch.stack(cached)


def slow(mixer, x, settings):
    kwargs = {"q_rank": settings.get("q_lora_rank"), "rope": settings.get("rope", True)}
    return slow_mla(mixer, x, theta=settings.get("rope_theta", 1e4), **kwargs)


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def feed(mixer, x, pieces, capacity):
    state = mixer.init_state(len(x), capacity, device=CPU, dtype=x.dtype)
    state.latent.fill_(math.nan)
    out, pos = [], 0
    with torch.no_grad():
        for piece in x.split(pieces, dim=1):
            out.append(mixer(piece, pos=pos, state=state)[0])
            pos += piece.shape[1]
    return torch.cat(out, dim=1), state


@every_setting
def test_full_pass_follows_the_equations_with_gradients(settings):
    mixer, x = build(**settings), rand(2, 9, D, requires_grad=True)
    y, aux = mixer(x)
    expected, _ = slow(mixer, x, settings)
    assert aux == {}
    close(y, expected)
    upstream, leaves = rand(*y.shape), (x, *mixer.parameters())
    grads, slow_grads = (torch.autograd.grad(out, leaves, upstream) for out in (y, expected))
    for grad, slow_grad in zip(grads, slow_grads, strict=True):
        close(grad, slow_grad)


@every_setting
def test_absorbed_equals_expanded_with_gradients(settings):
    mixer, x = build(**settings), rand(2, 7, D)
    *queries, latent = mixer.project(x, 0)
    tail = [q[:, 4:] for q in queries]  # three tokens onto a cache of four
    for args in ((*queries, latent, 0), (*tail, latent, 4)):
        absorbed, expanded = mixer.absorbed(*args), mixer.expanded(*args)
        close(absorbed, expanded)
        upstream, leaves = rand(*absorbed.shape), (mixer.down.weight, mixer.kv_up.weight)
        for grad, other in zip(
            torch.autograd.grad(absorbed, leaves, upstream, retain_graph=True),
            torch.autograd.grad(expanded, leaves, upstream, retain_graph=True),
            strict=True,
        ):
            close(grad, other)


@every_setting
@pytest.mark.parametrize("pieces", [[11], [1] * 11, [3, 1, 6, 1], [10, 1], [1, 10]], ids=str)
def test_pieces_equal_the_full_pass(settings, pieces):
    mixer, x = build(**settings), rand(2, 11, D)
    expected, cached = slow(mixer, x, settings)
    for capacity in (11, 30):
        y, state = feed(mixer, x, pieces, capacity)
        close(y, expected.detach())
        close(state.latent[:, :11], cached.detach())
        assert state.latent[:, 11:].isnan().all()


def test_ragged_rows_decode_as_each_alone():
    mixer, starts, x = build(), torch.tensor([1, 7, 4]), rand(3, 14, D)
    expected = slow(mixer, x, {})[0].detach()
    rows = [mixer.init_state(1, 14, device=CPU, dtype=F64) for _ in starts]
    with torch.no_grad():
        for row, start in enumerate(starts.tolist()):
            mixer(x[row : row + 1, :start], state=rows[row])
        state = LatentState.cat(rows)
        for t in (1, 2, 4):  # several tokens at once, too
            at = starts[:, None] + torch.arange(t)
            y, _ = mixer(x[torch.arange(3)[:, None], at], pos=starts, state=state)
            close(y, expected[torch.arange(3)[:, None], at])
            starts = starts + t


def test_few_queries_are_absorbed_and_many_expanded():
    mixer = build(kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32)

    def flops(t, s):
        heads, up = 2 * mixer.n_heads, mixer.dc * (mixer.dn + mixer.dv)
        absorbed = heads * (t * up + t * s * (2 * mixer.dc + mixer.dr))
        return absorbed, heads * (s * up + t * s * (mixer.dn + mixer.dr + mixer.dv))

    for t, s in [(1, 1), (1, 4096), (8, 4096), (40, 4096), (60, 4096), (256, 256), (2, 2), (30, 60)]:
        absorbed, expanded = flops(t, s)
        assert mixer.absorbs(t, s) == (t == 1 or absorbed <= expanded), (t, s)
    assert mixer.absorbs(8, 4096)
    assert not mixer.absorbs(256, 256)


def test_a_decode_step_expands_nothing():
    mixer, x = build(), rand(1, 6, D)
    passed = []
    mixer.kv_up.register_forward_hook(lambda *_: passed.append(1))
    feed(mixer, x, [1] * 6, 6)
    assert not passed
    feed(mixer, x, [6], 6)
    assert passed


def test_flops_are_those_of_the_counter():
    with META:
        mixer, x = MultiHeadLatentAttention(D, **SIZES, q_lora_rank=7), torch.empty(1, 10, D)
        state = mixer.init_state(1, 50, device=META, dtype=torch.float32)
    linear = 2 * sum(p.numel() for p in mixer.parameters() if p.dim() == 2)
    with FlopCounterMode(display=False) as counted:
        mixer(x)
    assert counted.get_total_flops() == 10 * (linear + mixer.mix_flops(10))
    with torch.no_grad(), FlopCounterMode(display=False) as counted:
        mixer(x[:, :1], pos=49, state=state)
    assert counted.get_total_flops() == linear + mixer.decode_flops(50)


PUBLISHED = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


@pytest.mark.parametrize(
    ("d_model", "n_heads", "q_lora_rank", "parameters"),
    [(7168, 128, 1536, 187_107_328), (2304, 32, None, 29_114_880)],
    ids=["DeepSeek-V3", "Kimi-Linear"],
)
def test_published_shapes(d_model, n_heads, q_lora_rank, parameters):
    with META:
        mixer = MultiHeadLatentAttention(d_model, n_heads=n_heads, q_lora_rank=q_lora_rank, **PUBLISHED)
        x = torch.empty(1, 8, d_model)
    assert sum(p.numel() for p in mixer.parameters()) == parameters
    state = mixer.init_state(1, 8, device=META, dtype=torch.bfloat16)
    with torch.no_grad():
        mixer(x, state=state)
    assert sum(t.numel() for t in state.tensors().values()) == 8 * 576
    assert state.nbytes == 8 * 576 * 2


def test_published_cost_of_a_context_token():
    with META:
        v3 = MultiHeadLatentAttention(7168, n_heads=128, q_lora_rank=1536, **PUBLISHED)
    assert v3.mix_flops(1) == 81_920
    assert v3.decode_flops(1) == 278_528
    assert v3.read_bytes(1000, 2) == 1000 * 576 * 2


def test_nope_of_the_yaml_file_ignores_positions():
    cfg = load(["attn=mla", "attn.rope=false", "attn.kv_lora_rank=12"])
    mixer = factory("attn", cfg.attn)(32).double()
    x = rand(1, 6, 32)
    shuffled = x[:, [3, 1, 4, 0, 2, 5]]
    close(mixer(shuffled)[0][:, -1], mixer(x)[0][:, -1])  # the last token sees a set, not a sequence
    rotary = factory("attn", load(["attn=mla"]).attn)(32).double()
    assert not torch.allclose(rotary(shuffled)[0][:, -1], rotary(x)[0][:, -1])


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_a_cache_narrower_than_the_weights(weights):
    mixer, x = build().to(weights), torch.randn(1, 40, D, dtype=weights)
    expected = mixer(x)[0].detach()
    state = mixer.init_state(1, 40, device=CPU, dtype=torch.bfloat16)
    with torch.no_grad():
        pieces = [mixer(x[:, a:b], pos=a, state=state)[0] for a, b in ((0, 30), (30, 31), (31, 40))]
    y = torch.cat(pieces, dim=1)
    assert y.dtype == weights
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.02)


@pytest.mark.slow
def test_compiled_mixer_computes_the_same_with_gradients():
    mixer, x = build(), rand(2, 11, D, requires_grad=True)
    compiled = torch.compile(mixer, backend="aot_eager")
    y, expected = compiled(x)[0], mixer(x)[0]
    close(y, expected)
    close(*(torch.autograd.grad(out.square().sum(), x)[0] for out in (y, expected)))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"n_heads": 0}, "n_heads=0"),
        ({"kv_lora_rank": 0}, "kv_lora_rank=0"),
        ({"q_lora_rank": 0}, "q_lora_rank=0"),
        ({"qk_nope_head_dim": 0}, "qk_nope_head_dim=0"),
        ({"v_head_dim": -1}, "v_head_dim=-1"),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim=3"),
        ({"qk_rope_head_dim": 0}, "qk_rope_head_dim=0"),
        ({"qk_rope_head_dim": -2, "rope": False}, "qk_rope_head_dim=-2"),
    ],
)
def test_impossible_sizes_are_named(settings, named):
    with pytest.raises(UsageError, match=named):
        build(**settings)
