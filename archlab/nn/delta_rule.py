"""The gated delta rule of linear attention: token by token for few tokens, in chunks for many.

    state <- diag(exp(g)) state;  state <- state + k (beta (v - state^T k))^T;  output = state^T q

with one log-decay g a key channel (Kimi Delta Attention, arXiv:2510.26692), one a head (Gated DeltaNet,
arXiv:2412.06464) or none (DeltaNet, arXiv:2406.06484). Without beta the state learns the value itself, not the error:
state <- diag(exp(g)) state + k v^T (gated linear attention, arXiv:2312.06635).

Shapes: b batch, t tokens, h heads, k key width, v value width, n chunks of c tokens; r = n b h chunks of all heads.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from archlab.nn.chunk_ops import DecayedProducts, StateScan, UnitInverse

FEW_TOKENS = 16
"""Up to so many tokens, one after the other is faster than a chunk."""


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    *,
    chunk_size: int,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs (b t h v) and the state after the last token, both in the state's dtype, also under autocast.

    Args:
        q, k: (b t h k), already scaled and normalised. v: (b t h v).
        g: log-decay, at most 0: (b t h k) a channel, (b t h 1) a head, or None. It may be as strong as it likes.
        beta: (b t h), how much of its error the state corrects; None: it adds the value (no delta rule).
        state: (b h k v), what came before.
        chunk_size: tokens a chunk, a power of two. It decides the speed, and of the result only the rounding.
        in_place: write the new state into `state`; not for a state that a gradient needs.
    """
    with _full_precision(state.device.type):
        q, k, v = (x.to(state.dtype) for x in (q, k, v))
        g, beta = (None if x is None else x.to(state.dtype) for x in (g, beta))
        if q.shape[1] <= FEW_TOKENS:
            return recurrent(q, k, v, g, beta, state, in_place=in_place)
        form = _chunked_uncompiled if torch.compiler.is_compiling() else chunked
        y, last = form(q, k, v, g, beta, state, chunk_size=chunk_size)
        return y, state.copy_(last) if in_place else last


def _full_precision(device_type: str) -> AbstractContextManager:
    on = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if on else nullcontext()


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor, *, in_place: bool = False
) -> tuple[Tensor, Tensor]:
    """`delta_rule`, token by token."""
    b, t, h, _ = q.shape
    flat, outputs = state.view(b * h, *state.shape[2:]), []
    out = flat if in_place else None
    nothing = [None] * t
    decays = nothing if g is None else _tokens(g.exp())
    betas = nothing if beta is None else _tokens(beta[..., None])
    for q_i, k_i, v_i, decay, beta_i in zip(_tokens(q), _tokens(k), _tokens(v), decays, betas, strict=True):
        if decay is not None:
            flat = torch.mul(flat, decay.mT, out=out)
        if beta_i is not None:
            v_i = torch.baddbmm(v_i, k_i, flat, alpha=-1) * beta_i
        flat = torch.baddbmm(flat, k_i.mT, v_i, out=out)
        outputs.append(torch.bmm(q_i, flat))
    return torch.stack(outputs, dim=1).view(b, h, t, -1).transpose(1, 2), flat.view(state.shape)


def _tokens(x: Tensor) -> tuple[Tensor, ...]:
    """(b t h d) -> t times (b h, 1, d)."""
    b, t, h, d = x.shape
    return x.transpose(0, 1).reshape(t, b * h, 1, d).unbind(0)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor, *, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """`delta_rule`, in chunks: each becomes one affine map of the state, and the maps are applied in order.

    Let G(i) be the decay from the chunk's start through token i, A(x)[i,j] = x_i^T diag(G(i)/G(j)) k_j for j < i. The
    corrected values u of a chunk solve (I + A(beta k)) u = beta v - (beta k G) state, so u = U - W state; then
    state <- diag(G(c)) state + (k G(c)/G)^T u, and the outputs are (q G) state + A(q) u, here with j <= i.
    """
    b, t, h, width = q.shape
    c = min(chunk_size, 1 << (t - 1).bit_length())
    n = -(-t // c)
    g = None if g is None else _fold(g, n, c)
    if beta is None:
        q, k, v = (_fold(x, n, c) for x in (q, k, v))
        a_q, q, k, whole = _decayed_products(k, g, q)
        values = v
    else:
        beta = beta[..., None]
        q, k, beta_k, beta_v = (_fold(x, n, c) for x in (q, k, beta * k, beta * v))
        a_q, a_k, q, beta_k, k, whole = _decayed_products(k, g, q, beta_k)
        inverse = UnitInverse.apply(a_k)
        values = torch.bmm(inverse, beta_v)
    into = torch.cat([k.mT, a_q], dim=1)  # (r k+c c): what the values of a chunk give to the state and to the outputs
    carry = torch.cat([torch.diag_embed(whole.expand(-1, width)), q], dim=1)  # (r k+c k): what the state gives
    if beta is not None:
        carry = torch.baddbmm(carry, into, torch.bmm(inverse, beta_k), alpha=-1)
    maps = (x.view(n, b * h, width + c, -1) for x in (carry, torch.bmm(into, values)))
    y, last = StateScan.apply(*maps, state.reshape(b * h, width, -1))
    y = rearrange(y, "n (b h) c v -> b (n c) h v", b=b)
    return y[:, :t], last.view(state.shape)


# Unrolled over chunks and levels it would take minutes to compile and run no faster.
_chunked_uncompiled = torch._disable_dynamo(chunked)


def _fold(x: Tensor, n: int, c: int) -> Tensor:
    """(b t h d) -> (r c d), chunks in front; added tokens are zero: they neither decay the state nor add to it."""
    if x.shape[1] < n * c:
        x = pad(x, (0, 0, 0, 0, 0, n * c - x.shape[1]))
    return rearrange(x, "b (n c) h d -> (n b h) c d", n=n)


def _decayed_products(k: Tensor, g: Tensor | None, *rows: Tensor) -> tuple[Tensor, ...]:
    """`DecayedProducts`; where a head's channels decay alike, a product of plain scores and decays of width 1."""
    if g is not None and g.shape[-1] == k.shape[-1]:
        return DecayedProducts.apply(k, g, *rows)
    if g is None:
        decay, since, until, whole = k.new_ones(k.shape[1], k.shape[1]).tril(), 1, 1, k.new_ones(len(k), 1)
    else:
        one = torch.ones_like(g)
        decay, since, until, whole = DecayedProducts.apply(one, g, one)
    return *(torch.bmm(x, k.mT) * decay for x in rows), *(x * since for x in rows), k * until, whole


def recurrent_flops(width: int, v_width: int, *, delta: bool) -> int:
    """Of one head and token, token by token: a read, a write and, with the delta rule, a recall. Decays are elementwise
    and not counted."""
    return (6 if delta else 4) * width * v_width


def chunked_flops(width: int, v_width: int, chunk: int, *, delta: bool, decay_width: int) -> int:
    """Of one head and token in chunks, rounded down. `decay_width`: channels of g, 0 where there is no decay."""
    k, v, c, rows = width, v_width, chunk, 2 if delta else 1
    halving = c * (c - 1)  # products of halves, summed over a chunk's levels, a channel
    total = rows * halving * k if decay_width == k else rows * 2 * c * c * k + halving * decay_width
    if delta:
        total += 2 * c * (c * c - 1) // 3 + 2 * c * c * (k + v) + 2 * (k + c) * c * k
    total += 2 * (k + c) * c * v + 2 * (k + c) * k * v
    return total // c
