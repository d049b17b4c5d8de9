"""Queries grouped by the block that they attend to, as a mixture of experts groups tokens by expert.

Shapes: b batch, t queries, g groups, n blocks of B tokens, k blocks a query. A row is one query of one group, (b t g)
flattened: N rows. A pair is a row and one of its k blocks, (N k) flattened. A tile is one block and m pairs: T tiles.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

SCORES_PER_PIECE = 1 << 20
"""Scores of the tiles computed together: few enough to stay in a processor's cache."""


@dataclass
class Tiles:
    """Which rows meet which block.

    Attributes:
        rows: (T m) the row in each place of a tile; N where the place is empty.
        block: (T,) which of the (b g n) blocks.
        slot: (N k) the place of each pair among the T * m; 0 where there is no such pair.
        real: (N k) whether there is.
        n_own: the first so many tiles hold queries in their own block, which need a causal mask; all others see a
            complete block before them.
        hidden: (p m B) the keys that a place of an own tile may not see; the own tiles repeat it with period p.
    """

    rows: Tensor
    block: Tensor
    slot: Tensor
    real: Tensor
    n_own: int
    hidden: Tensor

    def pieces(self, scores_per_row: int) -> Iterator[slice]:
        """All tiles, so many at once that their scores stay in cache."""
        n_tiles, m = self.rows.shape
        step = max(1, SCORES_PER_PIECE // (m * scores_per_row))
        return (slice(i, min(i + step, n_tiles)) for i in range(0, n_tiles, step))

    def mask_(self, scores: Tensor, piece: slice) -> Tensor:
        """Set scores (tiles m heads B) of a piece to -inf, in place, where a query may not see a key."""
        own = scores[: max(0, self.n_own - piece.start)]
        if len(own):
            bias = torch.zeros(self.hidden.shape, dtype=own.dtype, device=own.device)
            bias.masked_fill_(self.hidden, -math.inf)
            turn = torch.arange(piece.start, piece.start + len(own), device=own.device) % len(bias)
            own += bias[turn, :, None]
        return scores


def group_by_block(blocks: Tensor, pos: int, *, n_blocks: int, block_size: int) -> Tiles:
    """The tiles of a choice of blocks (b t g k) by queries at `pos`, as `select_blocks` makes it."""
    b, t, g, k = blocks.shape
    m = max(1, min(block_size, t * k // n_blocks))
    pair = torch.arange(blocks.numel(), device=blocks.device).view_as(blocks)
    sequence = torch.arange(b * g, device=blocks.device).view(b, 1, g, 1)
    block = torch.where(blocks < 0, b * g * n_blocks, sequence * n_blocks + blocks)
    n_chosen = b * g * int((torch.arange(pos, pos + t, device="cpu") // block_size).clamp(max=k - 1).sum())
    own, own_block, hidden = _own_tiles(pair[..., 0], n_blocks, pos, block_size, m)
    chosen, chosen_block = _chosen_tiles(pair[..., 1:], block[..., 1:], n_chosen, b * g * n_blocks, m)
    pairs = torch.cat([own, chosen])
    pairs = torch.where(pairs < 0, blocks.numel(), pairs)
    slot = torch.zeros(blocks.numel() + 1, dtype=torch.long, device=blocks.device)
    slot[pairs.flatten()] = torch.arange(pairs.numel(), device=blocks.device)
    return Tiles(
        rows=pairs // k,
        block=torch.cat([own_block, chosen_block]),
        slot=slot[:-1].view(-1, k),
        real=(blocks >= 0).view(-1, k),
        n_own=len(own),
        hidden=hidden,
    )


def _own_tiles(pair: Tensor, n_blocks: int, pos: int, block_size: int, m: int) -> tuple[Tensor, Tensor, Tensor]:
    """pair (b t g) of each query and its own block -> pairs (T m), -1 where empty; block (T,); hidden (p m B)."""
    b, t, g = pair.shape
    places = torch.arange(-(-block_size // m) * m, device=pair.device)
    blocks = torch.arange(pos // block_size, (pos + t - 1) // block_size + 1, device=pair.device)
    query = blocks[:, None] * block_size + places - pos
    exists = (places < block_size) & (query >= 0) & (query < t)
    pairs = torch.where(exists, pair.transpose(1, 2)[:, :, query.clamp(0, t - 1)], -1)  # (b g blocks places)
    block = torch.arange(b * g, device=pair.device)[:, None] * n_blocks + blocks
    hidden = torch.arange(block_size, device=pair.device) > places[:, None]
    return pairs.view(-1, m), block.flatten().repeat_interleave(len(places) // m), hidden.view(-1, m, block_size)


def _chosen_tiles(pair: Tensor, block: Tensor, n_pairs: int, n_blocks: int, m: int) -> tuple[Tensor, Tensor]:
    """pair and block (b t g k-1), of which n_pairs are real and the others have block n_blocks -> pairs (T m), -1 where
    empty; block (T,). All tiles of a block follow each other."""
    block = block.flatten()
    order = block.argsort(stable=True)[:n_pairs]
    pair, block = pair.flatten()[order], block[order]
    start = torch.searchsorted(block, torch.arange(n_blocks + 1, device=pair.device))
    n_tiles = (start.diff() + m - 1) // m
    end = n_tiles.cumsum(0)
    # A bound stands in for the exact number where that number would have to travel to the host.
    total = int(end[-1]) if pair.device.type == "cpu" else n_pairs // m + min(n_blocks, n_pairs)
    place = (end - n_tiles)[block] * m + torch.arange(n_pairs, device=pair.device) - start[block]
    pairs = torch.full((total * m,), -1, device=pair.device)
    pairs[place] = pair
    tile_block = torch.searchsorted(end, torch.arange(total, device=pair.device), right=True)
    return pairs.view(total, m), tile_block.clamp_(max=n_blocks - 1)


def take(x: Tensor, rows: Tensor) -> Tensor:
    """x (N r c), rows (T m) -> (T m*r c); an empty place takes the last row."""
    return x.index_select(0, rows.flatten().clamp(max=len(x) - 1)).view(len(rows), -1, x.shape[-1])


def tile_scores(q: Tensor, k: Tensor, tiles: Tiles, piece: slice) -> Tensor:
    """Scores (tiles m*r B) of a piece, -inf where a query may not see the key."""
    scores = take(q, tiles.rows[piece]) @ k[tiles.block[piece]].mT
    tiles.mask_(scores.view(len(scores), tiles.rows.shape[1], -1, scores.shape[-1]), piece)
    return scores


def tile_log_weights(q: Tensor, k: Tensor, lse: Tensor, tiles: Tiles, piece: slice) -> Tensor:
    """Logarithms of the attention weights (tiles m*r B) of a piece, given the log-sum-exp (N r) of each row; -inf in
    empty places."""
    lse = pad(lse, (0, 0, 0, 1), value=math.inf)[tiles.rows[piece]]
    return tile_scores(q, k, tiles, piece).sub_(lse.flatten(1)[..., None])


def merge_lse(part_lse: Tensor, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of every place (T*m r) -> of every pair (N k r), -inf where there is no such pair, and row (N r)."""
    pairs = part_lse[tiles.slot].masked_fill_(~tiles.real[..., None], -math.inf)
    return pairs, pairs.logsumexp(1)
