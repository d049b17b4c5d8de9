"""What the chunkwise delta rule is made of: three differentiable operations on chunks, with hand-written gradients.

A chunk is halved again and again, down to single tokens. The later half of a piece meets its earlier half in one matrix
product whose reference point lies between the two: every decay in it is a product of factors in [0, 1], none is a
ratio, so a decay of any strength is exact and nothing of the size (C, C, d) is formed.

Shapes: n chunks (of all sequences and heads), c tokens a chunk (a power of two), d channels, m pieces of 2h tokens.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def _halves(x: Tensor, h: int) -> Tensor:
    """(n c d) -> (n m 2 h d)."""
    return x.unflatten(1, (-1, 2, h))


def _pairs(a: Tensor, h: int) -> Tensor:
    """The squares of a (n c c) in which the later half of each piece meets its earlier half: a view (n m h h)."""
    return _tiles(a, h)[:, 1, :, 0].permute(0, 3, 1, 2)


def _tiles(a: Tensor, h: int) -> Tensor:
    """The m diagonal squares of 2h tokens of a (n c c), in quarters: a view (n 2 h 2 h m)."""
    m = a.shape[1] // (2 * h)
    return a.view(a.shape[0], m, 2, h, m, 2, h).diagonal(dim1=1, dim2=4)


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    """a (n i j) @ b (n j d). A CPU multiplies thousands of matrices of one or two columns faster term by term."""
    if a.shape[2] > 2:
        return torch.bmm(a, b)
    return sum(a[:, :, j, None] * b[:, j, None] for j in range(a.shape[2]))


def _levels(since: Tensor, until: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For h = 1, 2, 4, ... c/2: h, the decay of each later token since the middle of its piece, and that of each
    earlier token until there, both (n m h d).

    since (n c d) holds each token's own decay and until (n c d) ones; at last, what reaches over the whole chunk.
    """
    h, c = 1, since.shape[1]
    while h < c:
        s, u = _halves(since, h), _halves(until, h)
        yield h, s[:, :, 1], u[:, :, 0]
        u[:, :, 0] *= s[:, :, 1, -1:]
        s[:, :, 1] *= s[:, :, 0, -1:]
        h *= 2


class DecayedProducts(Function):
    """(k, g, *rows), all (n c d), g <= 0 the log-decay of each token, to

    * for each of rows x: sum_d x[i] k[j] exp(g[j+1] + ... + g[i]) for i > j, else 0 (n c c); of the first, i = j too;
    * each of rows decayed since the chunk began, its own token's decay included (n c d);
    * k decayed until the chunk ends (n c d);
    * the decay of a whole chunk (n d).
    """

    @staticmethod
    def forward(ctx, k: Tensor, g: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(k, g, *rows)
        since, until = g.exp(), torch.ones_like(g)
        scores = [k.new_zeros(*k.shape[:2], k.shape[1]) for _ in rows]
        scores[0].diagonal(dim1=1, dim2=2).copy_((rows[0] * k).sum(-1))
        for h, since_mid, until_mid in _levels(since, until):
            early = (_halves(k, h)[:, :, 0] * until_mid).flatten(0, 1)
            for a, x in zip(scores, rows, strict=True):
                late = (_halves(x, h)[:, :, 1] * since_mid).flatten(0, 1)
                pairs = _pairs(a, h)
                pairs.copy_(torch.bmm(late, early.mT).view(pairs.shape))
        return *scores, *(x * since for x in rows), k * until, since[:, -1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, ...]:
        k, g, *rows = ctx.saved_tensors
        n_rows = len(rows)
        d_scores, d_decayed, (d_kept, d_whole) = grads[:n_rows], grads[n_rows:-2], grads[-2:]
        d_rows, d_k = [torch.zeros_like(x) for x in rows], torch.zeros_like(k)
        since, until = g.exp(), torch.ones_like(g)
        for h, since_mid, until_mid in _levels(since, until):
            early = (_halves(k, h)[:, :, 0] * until_mid).flatten(0, 1)
            d_early = torch.zeros_like(early)
            for d_a, x, d_x in zip(d_scores, rows, d_rows, strict=True):
                d_pairs = _pairs(d_a, h).reshape(-1, h, h)
                late = (_halves(x, h)[:, :, 1] * since_mid).flatten(0, 1)
                _halves(d_x, h)[:, :, 1].addcmul_(_bmm(d_pairs, early).view(since_mid.shape), since_mid)
                d_early += _bmm(d_pairs.mT, late)
            _halves(d_k, h)[:, :, 0].addcmul_(d_early.view(until_mid.shape), until_mid)
        # In x[i] k[j] exp(g[j+1] + ... + g[i]) the gradient of each g between j and i is x[i] d_x[i] = k[j] d_k[j].
        kept = d_kept * until
        d_k += kept
        d_g = -k * d_k
        d_g[:, -1] += (kept * k).sum(1) + d_whole * since[:, -1]
        for x, d_x, d in zip(rows, d_rows, d_decayed, strict=True):
            d_x.addcmul_(d, since)
            d_g.addcmul_(x, d_x)
        d_g = torch.ones(g.shape[1], g.shape[1], dtype=g.dtype, device=g.device).triu() @ d_g
        d_self = d_scores[0].diagonal(dim1=1, dim2=2)[..., None]
        d_rows[0].addcmul_(d_self, k)
        d_k.addcmul_(d_self, rows[0])
        return d_k, d_g, *d_rows


class UnitInverse(Function):
    """(I + a)^-1 of the strictly lower part of a (n c c); the rest of it is not read."""

    @staticmethod
    def forward(ctx, a: Tensor) -> Tensor:
        c = a.shape[1]
        inverse = torch.eye(c, dtype=a.dtype, device=a.device).repeat(a.shape[0], 1, 1)
        h = 1
        while h < c:
            tiles = _tiles(inverse, h)
            early, late = (tiles[:, i, :, i].permute(0, 3, 1, 2).reshape(-1, h, h) for i in (0, 1))
            pairs = _pairs(inverse, h)
            pairs.copy_(torch.bmm(late, torch.bmm(_pairs(a, h).reshape(-1, h, h), early)).neg_().view(pairs.shape))
            h *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return (inverse.mT @ grad @ inverse.mT).tril_(-1).neg_()


class StateScan(Function):
    """Chunk after chunk, [state; output] = a[i] @ state + b[i].

    a (l m k+c k) and b (l m k+c v) of l chunks in order and m heads, and the first state (m k v), to the outputs
    (l m c v) and the last state (m k v).
    """

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        both, state, k = torch.empty_like(b), first, first.shape[1]
        for a_i, b_i, both_i in zip(a.unbind(0), b.unbind(0), both.unbind(0), strict=True):
            torch.baddbmm(b_i, a_i, state, out=both_i)
            state = both_i[:, :k]
        ctx.save_for_backward(a, both, first)
        return both[:, :, k:].clone(), state.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out: Tensor, d_state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, both, first = ctx.saved_tensors
        k = first.shape[1]
        d_both = torch.empty_like(both)
        d_both[:, :, k:] = d_out
        for a_i, d_i in zip(reversed(a.unbind(0)), reversed(d_both.unbind(0)), strict=True):
            d_i[:, :k] = d_state
            d_state = torch.bmm(a_i.mT, d_i)
        states = torch.cat([first[None], both[:-1, :, :k]])
        return d_both @ states.mT, d_both, d_state
