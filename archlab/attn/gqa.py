"""Grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) with rotary positions.

As many KV heads as query heads is multi-head attention, one KV head is multi-query attention; with a window it is
sliding-window attention (Mistral 7B, arXiv:2310.06825), whose cache is a ring of `window` slots.

Shapes: b batch, t new tokens, h query heads, g KV heads, c head width, s cached tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from archlab.errors import UsageError
from archlab.mixer import Aux, Mixer, Position, State
from archlab.nn.attention import append, causal_attention, last_position
from archlab.nn.conv import build_conv, init_history
from archlab.nn.norm import build_norm
from archlab.nn.rope import rotate_


@dataclass
class KVState(State):
    """kv (b 2g s c): the keys, normed and rotated, of g heads, then their values. One tensor, so one write a step.
    conv (b conv_size-1 (h+2g)*c): the last inputs of the short convolution; (b 0 ..) where there is none."""

    kv: Tensor
    conv: Tensor

    @property
    def k(self) -> Tensor:
        return self.kv[:, : self.kv.shape[1] // 2]

    @property
    def v(self) -> Tensor:
        return self.kv[:, self.kv.shape[1] // 2 :]

    def views(self) -> dict[str, Tensor]:
        return {"K": self.k, "V": self.v}


class GroupedQueryAttention(Mixer):
    """Softmax attention of `n_heads` query heads over `n_kv_heads` shared key and value heads.

    Args:
        n_heads, n_kv_heads: query and KV heads; None means as many KV heads as query heads.
        head_dim: width of a head; None means d_model / n_heads.
        qk_norm: a norm over each head's query and key before the rotation (Qwen3), with epsilon `norm_eps`.
        norm: its kind: "rms", or "gemma" (times 1 + weight).
        rope_dim: how many channels of a head rotate; None means all, 0 none (NoPE).
        rope_theta: base of the rotation's wavelengths.
        window: tokens that a query sees, its own among them; None means all.
        conv_size: tokens that a short depthwise convolution over queries, keys and values sees, as in the linear
            family; 0: none. Its last inputs are part of the state.
        out_gate: multiply the output of attention by the sigmoid of a projection of the input (arXiv:2505.06708).
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        qk_norm: bool = False,
        rope_dim: int | None = None,
        rope_theta: float = 10_000.0,
        window: int | None = None,
        conv_size: int = 0,
        norm: str = "rms",
        norm_eps: float = 1e-5,
        out_gate: bool = False,
    ):
        super().__init__()
        self.n_heads = n_heads
        self.n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        self.head_dim = width_of_head(d_model, n_heads) if head_dim is None else head_dim
        self.rope_dim = self.head_dim if rope_dim is None else rope_dim
        self.rope_theta, self.window = rope_theta, window
        self.qk_norm, self.norm, self.norm_eps, self.out_gate = qk_norm, norm, norm_eps, out_gate
        self.conv_size = conv_size
        check_heads(self.n_heads, self.n_kv_heads, self.head_dim, self.rope_dim)
        if window is not None and window < 1:
            raise UsageError(f"window={window}: a query must at least see its own token; give 1 or more, or null")
        self.qkv = nn.Linear(d_model, (self.n_heads + 2 * self.n_kv_heads) * self.head_dim, bias=False)
        self.conv = build_conv(self.qkv.out_features, conv_size)
        self.out = nn.Linear(self.n_heads * self.head_dim, d_model, bias=False)
        self.gate = nn.Linear(d_model, self.n_heads * self.head_dim, bias=False) if out_gate else None
        self.q_norm = build_norm(norm, self.head_dim, norm_eps) if qk_norm else None
        self.k_norm = build_norm(norm, self.head_dim, norm_eps) if qk_norm else None

    def init_state(self, batch: int, max_len: int, *, device: torch.device, dtype: torch.dtype) -> KVState:
        slots = max_len if self.window is None else min(max_len, self.window)
        kv = torch.zeros(batch, 2 * self.n_kv_heads, slots, self.head_dim, device=device, dtype=dtype)
        return KVState(kv, init_history(self.conv, batch, self.qkv.out_features, device=device, dtype=dtype))

    def forward(self, x: Tensor, *, pos: Position = 0, state: KVState | None = None) -> tuple[Tensor, Aux]:
        q, kv = self.project(x, pos, None if state is None else state.conv)
        if state is None:
            y = self._attend(q, kv, 0)
        elif self.window is None:
            y = self._attend(q, append(state.kv, kv, pos), pos)
        else:
            y = self._attend_ring(q, kv, pos, state)
        y = y.transpose(1, 2).flatten(2)
        return self.out(y if self.gate is None else y * torch.sigmoid(self.gate(x))), {}

    def project(self, x: Tensor, pos: Position, history: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x (b t d) -> queries (b h t c) and keys-then-values (b 2g t c), convolved, normed and rotated."""
        h, g = self.n_heads, self.n_kv_heads
        qkv = self.qkv(x)
        if self.conv is not None:
            qkv = self.conv(qkv, history).to(qkv.dtype)
        qkv = qkv.unflatten(-1, (h + 2 * g, self.head_dim))
        if self.q_norm is not None:
            q, k, v = qkv.split([h, g, g], dim=2)
            qkv = torch.cat([self.q_norm(q), self.k_norm(k), v], dim=2)
        rotate_(qkv[:, :, : h + g], pos, n_rot=self.rope_dim, theta=self.rope_theta)
        qkv = qkv.transpose(1, 2)
        return qkv[:, :h], qkv[:, h:]

    def matrices(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        if name != "qkv.weight":
            return super().matrices(name, tensor)
        rows = [n * self.head_dim for n in (self.n_heads, self.n_kv_heads, self.n_kv_heads)]
        return dict(zip(("Wq", "Wk", "Wv"), tensor.split(rows), strict=True))

    def _attend(self, q: Tensor, kv: Tensor, pos: Position) -> Tensor:
        k, v = kv.chunk(2, dim=1)
        return causal_attention(q, k, v, pos=pos, window=self.window)

    def _attend_ring(self, q: Tensor, kv: Tensor, pos: Position, state: KVState) -> Tensor:
        """A token at position p lives in slot p mod n. Several tokens at once need the old window beside them, since
        the last of them may overwrite what the first still sees."""
        n, t = state.kv.shape[2], q.shape[2]
        if t == 1:
            append(state.kv, kv, pos % n)
            newest = min(pos, n - 1) if isinstance(pos, int) else pos.clamp(max=n - 1)
            k, v = state.kv[:, :, : last_position(newest, n) + 1].chunk(2, dim=1)
            return causal_attention(q, k, v, pos=newest)
        if not isinstance(pos, int):
            raise ValueError(f"a sliding window takes ragged rows one token at a time, not {t}")
        n_old = min(pos, n)
        old = state.kv[:, :, torch.arange(pos - n_old, pos, device=q.device) % n]
        y = self._attend(q, torch.cat([old, kv.to(old.dtype)], dim=2), n_old)
        kept = torch.arange(max(0, t - n), t, device=q.device)
        state.kv[:, :, (pos + kept) % n] = kv[:, :, kept].to(state.kv.dtype)
        return y

    def mix_flops(self, context: int) -> int:
        seen = context if self.window is None else min(context, self.window)
        return 4 * self.n_heads * self.head_dim * seen


def width_of_head(d_model: int, n_heads: int) -> int:
    """d_model / n_heads, or a UsageError that names both."""
    if n_heads < 1 or d_model % n_heads:
        raise UsageError(f"d_model={d_model} is not divisible by n_heads={n_heads}; change one, or set head_dim")
    return d_model // n_heads


def check_heads(n_heads: int, n_kv_heads: int, head_dim: int, rope_dim: int) -> None:
    """Refuse impossible head counts and widths with a UsageError that names the value."""
    if n_kv_heads < 1 or n_heads % n_kv_heads:
        raise UsageError(f"n_heads={n_heads} is not divisible by n_kv_heads={n_kv_heads}; change one")
    if head_dim < 1:
        raise UsageError(f"head_dim={head_dim}: a head is at least 1 wide")
    if rope_dim % 2 or not 0 <= rope_dim <= head_dim:
        raise UsageError(
            f"rope_dim={rope_dim}: channels rotate in pairs; give an even number up to head_dim={head_dim}"
        )
