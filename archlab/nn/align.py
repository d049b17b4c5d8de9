"""How closely the index branch of MiniMax Sparse Attention follows the attention that it selects for.

The teacher is the attention itself, its probabilities averaged over the heads of a group; the student is the softmax of
the index scores over the same tokens. Nothing flows back into the teacher, so the loss and its gradient, student minus
teacher, are computed in one pass in which no score outlives its piece.

Shapes: b batch, t queries, h query heads, g groups, r = h/g heads a group, c head width, e index width, n blocks of B
tokens; N = b*t*g rows, in tiles (see `tiles.py`).
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from archlab.nn.attention import visible
from archlab.nn.precision import widen, without_autocast
from archlab.nn.select import select_blocks
from archlab.nn.tiles import Tiles, merge_lse, take, tile_log_weights, tile_scores

SCORES_PER_PIECE = 1 << 20
"""Scores of the whole prefix held at once."""

SAMPLED_QUERIES = 16
"""Queries whose recall is measured."""


class _WithGradient(torch.autograd.Function):
    """A loss whose gradients with respect to q and k are known already."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, loss: Tensor, dq: Tensor, dk: Tensor) -> Tensor:
        ctx.save_for_backward(dq, dk)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, scale: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        dq, dk = ctx.saved_tensors
        return scale * dq, scale * dk, None, None, None


def tiled_divergence(index_q: Tensor, index_k: Tensor, q: Tensor, k: Tensor, lse: Tensor, tiles: Tiles) -> Tensor:
    """Sum over rows of KL(teacher || student) over the tokens that the row attends to.

    index_q (N 1 e) and q (N r c), both scaled; index_k (b*g*n B e), k (b*g*n B c); lse (N r) of the attention's scores.
    """
    return _WithGradient.apply(index_q, index_k, *_tiled_divergence(index_q, index_k, q, k, lse, tiles))


@torch.no_grad()
def _tiled_divergence(
    index_q: Tensor, index_k: Tensor, q: Tensor, k: Tensor, lse: Tensor, tiles: Tiles
) -> tuple[Tensor, Tensor, Tensor]:
    parts = [tile_scores(index_q, index_k, tiles, piece).logsumexp(-1) for piece in tiles.pieces(k.shape[1])]
    index_lse = merge_lse(torch.cat(parts).view(-1, 1), tiles)[1]
    loss = lse.new_zeros(())
    dq, dk = index_q.new_zeros(len(index_q) + 1, index_q.shape[-1]), torch.zeros_like(index_k)
    for piece in tiles.pieces(q.shape[1] * k.shape[1]):
        block, rows = tiles.block[piece], tiles.rows[piece]
        log_teacher = tile_log_weights(q, k, lse, tiles, piece).unflatten(1, (rows.shape[1], -1))
        log_student = tile_log_weights(index_q, index_k, index_lse, tiles, piece)
        part, dscores = _divergence(log_teacher.exp_().mean(2), log_student)
        loss += part
        dq.index_add_(0, rows.flatten(), (dscores @ index_k[block]).flatten(0, 1))
        dk.index_add_(0, block, dscores.mT @ take(index_q, rows))
    return loss, dq[:-1].view_as(index_q), dk


def prefix_divergence(index_q: Tensor, index_k: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Sum over queries and groups of KL(teacher || student) over all tokens up to the query, queries from position 0.

    index_q (b t g e), index_k (b t e), q (b h t c), k (b g t c).
    """
    with without_autocast(q.device):
        index_q, index_k = widen(index_q) * index_q.shape[-1] ** -0.5, widen(index_k)
        q, k = widen(q.detach()) * q.shape[-1] ** -0.5, widen(k.detach())
        return _WithGradient.apply(index_q, index_k, *_prefix_divergence(index_q, index_k, q, k))


@torch.no_grad()
def _prefix_divergence(index_q: Tensor, index_k: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    (b, t, g, _), r = index_q.shape, q.shape[1] // k.shape[1]
    loss, dq, dk = q.new_zeros(()), torch.empty_like(index_q), torch.zeros_like(index_k)
    q = q.unflatten(1, (g, r))
    step = max(1, SCORES_PER_PIECE // (b * g * r * t))
    for i in range(0, t, step):
        stop = min(i + step, t)
        hidden = ~visible(i, stop - i, stop, device=q.device)
        scores = q[:, :, :, i:stop].flatten(2, 3) @ k[:, :, :stop].mT
        teacher = scores.unflatten(2, (r, -1)).masked_fill_(hidden, -math.inf).softmax(-1).mean(2)
        rows = index_q[:, i:stop].transpose(1, 2).flatten(1, 2)
        scores = (rows @ index_k[:, :stop].mT).unflatten(1, (g, -1)).masked_fill_(hidden, -math.inf)
        part, dscores = _divergence(teacher, scores.log_softmax(-1))
        loss += part
        dscores = dscores.flatten(1, 2)
        dq[:, i:stop] = (dscores @ index_k[:, :stop]).unflatten(1, (g, -1)).transpose(1, 2)
        dk[:, :stop] += dscores.mT @ rows
    return loss, dq, dk


def _divergence(teacher: Tensor, log_student: Tensor) -> tuple[Tensor, Tensor]:
    """KL(teacher || student), summed, and its gradient with respect to the student's scores."""
    terms = teacher * (teacher.log() - log_student)
    return torch.where(teacher > 0, terms, 0.0).sum(), log_student.exp() - teacher


@torch.no_grad()
def block_recall(index_q: Tensor, index_k: Tensor, q: Tensor, k: Tensor, *, block_size: int, top_k: int) -> Tensor:
    """Of the top_k blocks that a query would attend to most if it saw everything: the share that the index branch
    chooses, and that share weighted by the attention they would get. Two numbers in [0, 1] as one tensor.

    A mean over groups and a sample of queries of the first sequence that see more than top_k blocks; there must be one.
    index_q (b t g e), index_k (b t e), q (b h t c), k (b g t c).
    """
    t, g = q.shape[2], k.shape[1]
    first = top_k * block_size
    at = torch.linspace(first, t - 1, min(SAMPLED_QUERIES, t - first), device=q.device).round().long()
    rows = widen(q[0, :, at]).unflatten(0, (g, -1)) * q.shape[-1] ** -0.5
    with without_autocast(q.device):
        scores = rows @ widen(k[0, :, None]).mT  # (g r sample t)
    hidden = torch.arange(t, device=q.device) > at[:, None]
    attention = scores.masked_fill_(hidden, -math.inf).softmax(-1).mean(1)
    mass = pad(attention, (0, -t % block_size)).unflatten(-1, (-1, block_size)).sum(-1)  # (g sample n)
    best, wanted = mass.topk(top_k, dim=-1)
    keys = index_k[:1].expand(len(at), -1, -1)
    chosen = select_blocks(index_q[0, at][:, None], keys, at, block_size=block_size, top_k=top_k)
    hit = (wanted[..., None] == chosen[:, 0].transpose(0, 1)[:, :, None]).any(-1)  # (g sample k)
    return torch.stack([hit.to(best.dtype).mean(), ((best * hit).sum(-1) / best.sum(-1)).mean()])
