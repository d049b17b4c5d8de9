"""Exact softmax attention of each query over a few blocks of the context, in work proportional to what it attends to.

Many queries are grouped by the block they chose: its keys and values meet all of their queries in one product, and a
query's partial results are merged by their log-sum-exp. Few queries over a long context gather their blocks, each of
which is contiguous in the cache.

Shapes: b batch, t queries, h query heads, g KV heads, r = h/g heads a group, c head width, e index width, s keys,
n blocks of B tokens, k blocks a query; N = b*t*g rows, in tiles of m (see `tiles.py`).
"""

import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import embedding_bag, pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

from archlab.mixer import Position
from archlab.nn.align import tiled_divergence
from archlab.nn.precision import widen, without_autocast
from archlab.nn.select import query_positions
from archlab.nn.tiles import Tiles, group_by_block, merge_lse, take, tile_log_weights, tile_scores

PARTIALS_PER_CHUNK = 1 << 23
"""Elements of partial results, k for each query, held before they are merged."""


def tiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    pos: int,
    *,
    block_size: int,
    index: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """q (b h t c) at `pos` over the chosen blocks (b t g k) of k and v (b g s c) -> (b h t c).

    With index queries (b t g e) and keys (b s e), the scores of the choice, also their divergence from the attention,
    summed over queries and groups. The queries are taken in chunks, so that what is held does not grow with k * t.
    """
    b, h, t, c = q.shape
    g, length = k.shape[1:3]
    with without_autocast(q.device):
        k, v = to_blocks(k, block_size), to_blocks(v, block_size)
        index_k = None if index is None else to_blocks(index[1][:, None].expand(-1, g, -1, -1), block_size)
        step = max(1, PARTIALS_PER_CHUNK // (b * h * c * blocks.shape[-1]))
        chunks, divergences = [], []
        for i in range(0, t, step):
            piece = slice(i, i + step)
            tiles = group_by_block(blocks[:, piece], pos + i, n_blocks=-(-length // block_size), block_size=block_size)
            rows = to_rows(q[:, :, piece].transpose(1, 2), g)
            y, lse = TiledAttention.apply(rows, k, v, tiles)
            chunks.append(y.view(b, -1, h, c))
            if index is not None:
                index_rows = to_rows(index[0][:, piece], g)
                divergences.append(tiled_divergence(index_rows, index_k, rows, k, lse, tiles))
        y = torch.cat(chunks, dim=1).transpose(1, 2).to(q.dtype)
    return y, sum(divergences) if divergences else None


def to_rows(q: Tensor, n_groups: int) -> Tensor:
    """(b t h c) -> (N r c), scaled by 1/sqrt(c), at least float32."""
    return (widen(q) * q.shape[-1] ** -0.5).reshape(-1, q.shape[2] // n_groups, q.shape[-1])


def to_blocks(x: Tensor, block_size: int) -> Tensor:
    """(b g s c) -> (b*g*n B c), at least float32, the last block filled up with zeros."""
    return pad(widen(x), (0, 0, 0, -x.shape[2] % block_size)).reshape(-1, block_size, x.shape[3])


class TiledAttention(torch.autograd.Function):
    """Rows over the blocks of their tiles. Kept for the backward pass: inputs, result and log-sum-exp, no scores."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
        """q (N r c), scaled; k, v (b*g*n B c) -> the attention's result (N r c), and the log-sum-exp (N r) of each
        row's scores, which has no gradient."""
        r, c = q.shape[1:]
        n_tiles, m = tiles.rows.shape
        part = q.new_empty(n_tiles, m * r, c)
        part_lse = q.new_empty(n_tiles, m * r, 1)
        for piece in tiles.pieces(r * k.shape[1]):
            block = tiles.block[piece]
            scores = tile_scores(q, k, tiles, piece)
            top = scores.amax(-1, keepdim=True)
            weights = scores.sub_(top).exp_()
            total = weights.sum(-1, keepdim=True)
            torch.bmm(weights, v[block], out=part[piece]).div_(total)
            part_lse[piece] = total.log_().add_(top)
        y, lse = _merge(part.view(-1, c), part_lse.view(-1, r), tiles)
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.tiles = tiles
        ctx.mark_non_differentiable(lse)
        return y, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor, _) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, y, lse = ctx.saved_tensors
        tiles = ctx.tiles
        n_rows, r, c = q.shape
        dot = (dy * y).sum(-1, keepdim=True)
        dq, dk, dv = q.new_zeros(n_rows + 1, r * c), torch.zeros_like(k), torch.zeros_like(v)
        with without_autocast(q.device):
            for piece in tiles.pieces(r * k.shape[1]):
                block, rows = tiles.block[piece], tiles.rows[piece]
                weights = tile_log_weights(q, k, lse, tiles, piece).exp_()
                dy_tile = take(dy, rows)
                dv.index_add_(0, block, weights.mT @ dy_tile)
                dscores = (dy_tile @ v[block].mT).sub_(take(dot, rows)).mul_(weights)
                dq.index_add_(0, rows.flatten(), (dscores @ k[block]).view(-1, r * c))
                dk.index_add_(0, block, dscores.mT @ take(q, rows))
        return dq[:-1].view_as(q), dk, dv, None


def _merge(part: Tensor, part_lse: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """The mean of each row's partial results (T*m*r c), weighted by their share of the row's exponentials."""
    pairs, lse = merge_lse(part_lse, tiles)
    n_rows, k, r = pairs.shape
    share = (pairs - lse[:, None]).exp_().transpose(1, 2).reshape(n_rows * r, k)
    places = tiles.slot[:, None] * r + torch.arange(r, device=part.device)[:, None]
    y = embedding_bag(places.view(n_rows * r, k), part, mode="sum", per_sample_weights=share)
    return y.view(n_rows, r, -1), lse


def gathered_attention(
    q: Tensor, slots: Tensor, blocks: Tensor, pos: Position, *, length: int, block_size: int
) -> Tensor:
    """q (b h t c) at `pos` over the chosen blocks (b t g k) of a cache -> (b h t c).

    slots (b 2g s c), contiguous: keys, then values; of its s slots no query stands beyond the first `length`, which are
    more than a block.
    """
    b, h, t, c = q.shape
    heads, capacity = slots.shape[1:3]
    g = heads // 2
    begin = blocks * block_size
    query = query_positions(pos, t, device=q.device)[..., None, None]
    end = torch.minimum(begin + block_size, query + 1)  # of what the query sees; 0 where there is no block
    start = begin.clamp(0, length - block_size)
    key = start[..., None] + torch.arange(block_size, device=q.device)
    seen = (key >= begin[..., None]) & (key < end[..., None])
    mask = torch.where(seen, 0.0, -math.inf).to(slots.dtype).view(b, t * g, 1, -1)

    head = torch.arange(b, device=q.device)[:, None] * heads + torch.arange(g, device=q.device)
    first = start + (head * capacity)[:, None, :, None]
    windows = slots.flatten().unfold(0, block_size * c, c)  # the block_size tokens from each slot on
    k, v = windows.index_select(0, torch.stack([first, first + g * capacity]).flatten()).view(2, b, t * g, -1, c)
    rows = q.to(slots.dtype).transpose(1, 2).reshape(b, t * g, h // g, c)
    return sdpa(rows, k, v, attn_mask=mask).view(b, t, h, c).transpose(1, 2).to(q.dtype)
