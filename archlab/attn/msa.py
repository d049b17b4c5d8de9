"""MiniMax Sparse Attention: grouped-query attention over a few blocks of the context, chosen by a small index branch.

One index query a group of heads and one index key a token score the context; a group attends exactly to the tokens of
its best blocks, its own block among them. Choosing has no gradient: the index branch learns to follow the attention by
a divergence loss, which touches nothing else, since its input and its teacher are detached. Only the index branch is
quadratic in the length, with `d_index` channels for a whole group of heads.

Shapes: b batch, t new tokens, h query heads, g KV heads (groups), c head width, e index width, s cached tokens,
k chosen blocks of B tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from archlab.attn.gqa import GroupedQueryAttention, KVState
from archlab.errors import UsageError
from archlab.mixer import Aux, Position
from archlab.nn.align import block_recall, prefix_divergence
from archlab.nn.attention import append, causal_attention
from archlab.nn.norm import build_norm
from archlab.nn.rope import rotate_
from archlab.nn.select import select_blocks
from archlab.nn.sparse import gathered_attention, tiled_attention


@dataclass
class SparseState(KVState):
    """Beside keys and values, index_k (b s e): a token's index key, normed and rotated."""

    index_k: Tensor


class MiniMaxSparseAttention(GroupedQueryAttention):
    """Grouped-query attention of each group of heads over `top_k_blocks` blocks of `block_size` tokens.

    Where no more blocks than those are visible it is grouped-query attention, and computed as such.

    Args:
        n_heads, n_kv_heads, head_dim, qk_norm, rope_dim, rope_theta, conv_size: of the attention, as in grouped-query
            attention.
        norm, norm_eps: kind ("rms", or "gemma", times 1 + weight) and epsilon of all norms over queries and keys.
        block_size: B, consecutive tokens chosen together.
        top_k_blocks: k, blocks that a query of a group attends to; its own, always chosen, is one of them.
        d_index: e, width of the index queries and keys; None means half a head, made even.
        index_norm: a norm over each index query and key, as in the released MiniMax-M3 (the paper shows none).
        index_rope_dim: channels of them that rotate, as there (the paper shows none); None means all, 0 none. Without
            rotation, equal tokens in a first layer score equally wherever they stand.
        kl_coef: weight of the divergence loss.
        warmup: share of training in which attention is dense and the index branch follows it over the whole prefix.
    """

    aux_only: ClassVar[dict[str, str]] = {"index": "msa_kl", "index_q_norm": "msa_kl", "index_k_norm": "msa_kl"}

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        block_size: int,
        top_k_blocks: int,
        d_index: int | None = None,
        qk_norm: bool = False,
        rope_dim: int | None = None,
        rope_theta: float = 10_000.0,
        conv_size: int = 0,
        index_norm: bool = False,
        index_rope_dim: int | None = None,
        norm: str = "rms",
        norm_eps: float = 1e-5,
        kl_coef: float = 1.0,
        warmup: float = 0.0,
    ):
        super().__init__(
            d_model,
            n_heads=n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=head_dim,
            qk_norm=qk_norm,
            rope_dim=rope_dim,
            rope_theta=rope_theta,
            conv_size=conv_size,
            norm=norm,
            norm_eps=norm_eps,
        )
        d_index = 2 * -(-self.head_dim // 4) if d_index is None else d_index
        self.block_size, self.top_k_blocks, self.d_index = block_size, top_k_blocks, d_index
        self.index_rope_dim = d_index if index_rope_dim is None else index_rope_dim
        self.index_norm, self.kl_coef, self.warmup = index_norm, kl_coef, warmup
        _check_sizes(block_size, top_k_blocks, d_index, self.index_rope_dim, warmup)
        self.index = nn.Linear(d_model, (self.n_kv_heads + 1) * d_index, bias=False)
        self.index_q_norm = build_norm(norm, d_index, norm_eps) if index_norm else None
        self.index_k_norm = build_norm(norm, d_index, norm_eps) if index_norm else None
        self.dense = False
        self._recall: Tensor | None = None

    def after_step(self, progress: float) -> None:
        self.dense = progress < self.warmup

    def metrics(self) -> dict[str, float]:
        """Of a sample of the last training batch's queries, in [0, 1]: the share of the k most attended blocks that the
        index branch chooses, and that share weighted by their attention."""
        if self._recall is None:
            return {}
        return dict(zip(("msa_block_recall", "msa_score_recall"), self._recall.tolist(), strict=True))

    def init_state(self, batch: int, max_len: int, *, device: torch.device, dtype: torch.dtype) -> SparseState:
        parts = super().init_state(batch, max_len, device=device, dtype=dtype).tensors()
        return SparseState(**parts, index_k=torch.zeros(batch, max_len, self.d_index, device=device, dtype=dtype))

    def forward(self, x: Tensor, *, pos: Position = 0, state: SparseState | None = None) -> tuple[Tensor, Aux]:
        q, kv = self.project(x, pos, None if state is None else state.conv)
        index_q, index_k = self.project_index(x.detach(), pos)
        if state is not None:
            kv = append(state.kv, kv, pos)
            index_k = append(state.index_k[:, None], index_k[:, None], pos)[:, 0]
        attend = self._attend_uncompiled if torch.compiler.is_compiling() else self._attend
        y, aux = attend(q, kv, (index_q, index_k), pos, state)
        return self.out(y.transpose(1, 2).flatten(2)), aux

    def _attend(
        self, q: Tensor, kv: Tensor, index: tuple[Tensor, Tensor], pos: Position, state: SparseState | None
    ) -> tuple[Tensor, Aux]:
        """q (b h t c) over the chosen blocks of kv (b 2g s c) -> (b h t c), and the index branch's loss."""
        k, v = kv.chunk(2, dim=1)
        learns = self.training and state is None
        if self.dense or self._sees_all(k.shape[2]):
            y = causal_attention(q, k, v, pos=pos)
            divergence = prefix_divergence(*index, q, k) if learns else None
            return y, self._learn(divergence, index, q, k)
        blocks = select_blocks(*index, pos, block_size=self.block_size, top_k=self.top_k_blocks)
        if self._gathers(q.shape[2], k.shape[2], pos):
            return gathered_attention(q, state.kv, blocks, pos, length=k.shape[2], block_size=self.block_size), {}
        follow = index if learns else None
        y, divergence = tiled_attention(q, k, v, blocks, pos, block_size=self.block_size, index=follow)
        return y, self._learn(divergence, index, q, k)

    # The shapes of a choice are not known beforehand; unrolled over pieces it would take minutes to compile.
    _attend_uncompiled = torch._disable_dynamo(_attend)

    def _learn(self, divergence: Tensor | None, index: tuple[Tensor, Tensor], q: Tensor, k: Tensor) -> Aux:
        """The index branch's loss of a training forward; its recall is measured beside."""
        if divergence is None:
            return {}
        if not self._sees_all(k.shape[2]):
            self._recall = block_recall(*index, q, k, block_size=self.block_size, top_k=self.top_k_blocks)
        b, t, g, _ = index[0].shape
        return {"msa_kl": divergence * (self.kl_coef / (b * t * g))}

    def project_index(self, x: Tensor, pos: Position) -> tuple[Tensor, Tensor]:
        """x (b t d) -> index queries (b t g e) and keys (b t e), normed and rotated."""
        g = self.n_kv_heads
        index = self.index(x).unflatten(-1, (g + 1, self.d_index))
        if self.index_q_norm is not None:
            q, k = index.split([g, 1], dim=2)
            index = torch.cat([self.index_q_norm(q), self.index_k_norm(k)], dim=2)
        rotate_(index, pos, n_rot=self.index_rope_dim, theta=self.rope_theta)
        return index[:, :, :g], index[:, :, g]

    def matrices(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        if name != "index.weight":
            return super().matrices(name, tensor)
        rows = [self.n_kv_heads * self.d_index, self.d_index]
        return dict(zip(("Wq_index", "Wk_index"), tensor.split(rows), strict=True))

    def _sees_all(self, length: int) -> bool:
        """Whether no query has more blocks before it than it may choose."""
        return -(-length // self.block_size) <= self.top_k_blocks

    def _gathers(self, t: int, length: int, pos: Position) -> bool:
        """Whether t queries gather fewer tokens than there are; rows that stand at different lengths always gather."""
        return not isinstance(pos, int) or t * self.top_k_blocks * self.block_size < length

    def mix_flops(self, context: int) -> int:
        """Scores of every index query with every index key, and attention to at most k * B tokens (the paper's eq. 12,
        which does not clip at the context). The divergence loss of training is not counted."""
        attended = min(context, self.top_k_blocks * self.block_size)
        return 2 * self.n_kv_heads * self.d_index * context + 4 * self.n_heads * self.head_dim * attended

    def decode_flops(self, context: int) -> int:
        """Where all blocks are attended to, none is scored."""
        return super().mix_flops(context) if self._sees_all(context) else self.mix_flops(context)

    def read_bytes(self, context: int, itemsize: int) -> int:
        """The keys and values of the chosen blocks, and all index keys where there is a choice."""
        if self._sees_all(context):
            return 2 * self.n_kv_heads * self.head_dim * context * itemsize
        attended = self.top_k_blocks * self.block_size
        return (self.d_index * context + 2 * self.n_kv_heads * self.head_dim * attended) * itemsize


def _check_sizes(block_size: int, top_k_blocks: int, d_index: int, index_rope_dim: int, warmup: float) -> None:
    for name, value in {"block_size": block_size, "top_k_blocks": top_k_blocks, "d_index": d_index}.items():
        if value < 1:
            raise UsageError(f"{name}={value}: give a whole number of at least 1")
    if index_rope_dim % 2 or not 0 <= index_rope_dim <= d_index:
        raise UsageError(
            f"index_rope_dim={index_rope_dim}: channels rotate in pairs; give an even number up to d_index={d_index}"
        )
    if not 0 <= warmup <= 1:
        raise UsageError(f"warmup={warmup} is a share of training; give a number from 0 to 1")
