"""Which blocks of the context a query attends to: the index branch of MiniMax Sparse Attention.

A block is `block_size` consecutive tokens, anchored at position 0. Its score is the largest score of its tokens. A
query takes its own block always, and the best of the blocks before it: those are complete, so that neither a score nor
a choice depends on a token that the query may not see.

Shapes: b batch, t queries, g groups (one index query each), e index width, s keys, n blocks, k blocks a query.
"""

import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

from archlab.mixer import Position
from archlab.nn.precision import widen, without_autocast

SCORES_PER_PIECE = 1 << 21
"""Scores held at once: all t * s of them are computed, but never together."""

_LOWEST = torch.iinfo(torch.int64).min
_BLOCK_BITS = 0xFFFFFFFF


@torch.no_grad()
def select_blocks(q: Tensor, k: Tensor, pos: Position, *, block_size: int, top_k: int) -> Tensor:
    """q (b t g e), k (b s e), queries at `pos` -> block numbers (b t g k): first the query's own, then the chosen ones
    in no order, then -1 where fewer than `top_k` blocks are visible.

    Scores are compared as float32, and of equal ones the later block wins: two computations of one score that differ in
    their last float64 bits choose alike.
    """
    b, t, g, _ = q.shape
    with without_autocast(q.device):
        q, k = widen(q), widen(k)
        step = max(1, SCORES_PER_PIECE // (b * g * k.shape[1]))
        pieces = [_select(q[:, i : i + step], k, pos + i, block_size, top_k) for i in range(0, t, step)]
    return torch.cat(pieces, dim=1)


def _select(q: Tensor, k: Tensor, pos: Position, block_size: int, top_k: int) -> Tensor:
    b, t, g, _ = q.shape
    own = (query_positions(pos, t, device=q.device) // block_size)[..., None, None].expand(b, t, g, 1)
    chosen = own.new_full((b, t, g, top_k - 1), -1)
    n_earlier = (pos + t - 1 if isinstance(pos, int) else k.shape[1] - 1) // block_size  # than the last query's own
    n_best = min(top_k - 1, n_earlier)
    if n_best:
        ranks = _ranks(block_scores(q, k[:, : n_earlier * block_size], block_size))
        if not isinstance(pos, int) or pos // block_size < n_earlier:
            ranks.masked_fill_(torch.arange(n_earlier, device=q.device) >= own, _LOWEST)
        best = ranks.topk(n_best, dim=-1, sorted=False).values
        chosen[..., :n_best] = torch.where(best == _LOWEST, -1, best & _BLOCK_BITS)
    return torch.cat([own, chosen], dim=-1)


def query_positions(pos: Position, t: int, *, device: torch.device) -> Tensor:
    """Absolute positions of t tokens from `pos` on: (t,), or (b t) for a ragged pos."""
    steps = torch.arange(t, device=device)
    return steps + pos if isinstance(pos, int) else steps + pos[:, None]


def block_scores(q: Tensor, k: Tensor, block_size: int) -> Tensor:
    """q (b t g e), k (b n*block_size e) -> the largest product of each query with a key of each block (b t g n)."""
    # Pooling, as amax over a short last axis is slow.
    return max_pool1d(q.flatten(1, 2) @ k.mT, block_size).unflatten(1, q.shape[1:3])


def _ranks(scores: Tensor) -> Tensor:
    """int64 (.. n) in the order of the scores, equal ones in that of their block, whose number is the low half."""
    bits = scores.to(torch.float32).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()  # floats order like integers of sign and magnitude
    return (ordered << 32) | torch.arange(scores.shape[-1], device=scores.device)
