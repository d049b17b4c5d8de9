"""Kimi Delta Attention (Kimi Linear, arXiv:2510.26692) and, by settings, its relatives: a state of fixed size that
decays, learns from its error and is read by queries, in place of a cache that grows.

               decay     delta   queries and keys     output norm, gate
    kda        channel   yes     conv, SiLU, l2       rms, low-rank sigmoid
    gdn        scalar    yes     conv, SiLU, l2       rms, SiLU              Gated DeltaNet, arXiv:2412.06464
    deltanet   none      yes     conv, SiLU, l2       rms                    arXiv:2406.06484
    gla        channel   no      plain                rms, SiLU              arXiv:2312.06635
    retnet     fixed     no      rotated              rms, SiLU              arXiv:2307.08621
    linear     none      no      conv, SiLU, elu + 1  sum of the weights     arXiv:2006.16236

Shapes: b batch, t new tokens, h query and key heads, g value heads (key head i serves the value heads i*g/h and on),
k key width, v value width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import elu, pad, silu

from archlab.attn.gqa import width_of_head
from archlab.errors import UsageError
from archlab.mixer import Aux, Mixer, Position, State
from archlab.nn.conv import build_conv, init_history
from archlab.nn.decay import FixedDecay, LearnedDecay
from archlab.nn.delta_rule import chunked_flops, delta_rule, recurrent_flops
from archlab.nn.rope import rotate

L2_EPS = 1e-6
SUM_EPS = 1e-6


@dataclass
class LinearState(State):
    """memory (b g k v): what the heads remember, float32 at least; with norm "sum" a last column sums the keys.
    conv (b conv_size-1 c): the last inputs of the short convolution, queries, keys and values side by side."""

    memory: Tensor
    conv: Tensor


class LinearAttention(Mixer):
    """Linear attention: per head, a k x v state that every token decays, corrects and reads (`nn/delta_rule.py`).

    Args:
        n_heads, head_dim: query and key heads and their width; None means d_model / n_heads.
        n_v_heads, v_head_dim: value heads, a multiple of n_heads, and their width; None means as those of the keys.
        conv_size: tokens that the short convolution before queries, keys and values sees, SiLU after it; 0: neither.
        feature_map: of queries and keys: "l2" (unit length), "elu" (elu(x) + 1, for norm "sum") or "none".
        rope_dim: channels of a query and key that rotate by position; None means all, 0 none.
        rope_theta: base of the rotation's wavelengths.
        delta: the state learns its error times beta = beta_max sigmoid(.), else the value itself.
        beta_max: 1, or 2 for a state that can also reflect (negative eigenvalues, arXiv:2411.12537).
        decay: "channel" (each key channel its own), "scalar" (a head its own), "fixed" (by head) or "none".
        decay_gate, decay_floor: of learned decays, see `LearnedDecay`.
        decay_rank: of the two matrices that make a channel decay; None means head_dim.
        norm: of each head's output: "rms" (RMSNorm), "sum" (divided by the sum of its query's weights, one for each
            token, as in Katharopoulos et al. 2020) or "none".
        norm_eps: epsilon of the RMSNorm.
        gate: on the normed output: "low_rank" (of v_head_dim), "full" or "none".
        gate_act: "sigmoid" or "silu".
        chunk_size: tokens that are computed together, a power of two. It changes the speed, not the function.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int,
        head_dim: int | None = None,
        n_v_heads: int | None = None,
        v_head_dim: int | None = None,
        conv_size: int = 4,
        feature_map: str = "l2",
        rope_dim: int | None = 0,
        rope_theta: float = 10_000.0,
        delta: bool = True,
        beta_max: float = 1.0,
        decay: str = "channel",
        decay_gate: str = "softplus",
        decay_floor: float = -5.0,
        decay_rank: int | None = None,
        norm: str = "rms",
        norm_eps: float = 1e-5,
        gate: str = "low_rank",
        gate_act: str = "sigmoid",
        chunk_size: int = 32,
    ):
        super().__init__()
        self.n_heads = n_heads
        self.n_v_heads = n_heads if n_v_heads is None else n_v_heads
        self.head_dim = width_of_head(d_model, n_heads) if head_dim is None else head_dim
        self.v_head_dim = self.head_dim if v_head_dim is None else v_head_dim
        self.rope_dim = self.head_dim if rope_dim is None else rope_dim
        self.feature_map, self.rope_theta, self.chunk_size = feature_map, rope_theta, chunk_size
        self.conv_size, self.delta, self.beta_max = conv_size, delta, beta_max
        self.decay, self.decay_gate, self.decay_floor = decay, decay_gate, decay_floor
        self.decay_rank = self.head_dim if decay_rank is None else decay_rank
        self.norm, self.norm_eps, self.gate, self.gate_act = norm, norm_eps, gate, gate_act
        self._check_sizes()
        _check_choices(feature_map, decay, decay_gate, decay_floor, norm, gate, gate_act, beta_max)

        qkv, v_width = 2 * n_heads * self.head_dim + self.n_v_heads * self.v_head_dim, self.n_v_heads * self.v_head_dim
        self.decay_width = {"channel": self.head_dim, "scalar": 1, "fixed": 1, "none": 0}[decay]
        decay_in = {"channel": self.decay_rank, "scalar": self.n_v_heads, "fixed": 0, "none": 0}[decay]
        gate_in = {"low_rank": self.v_head_dim, "full": v_width, "none": 0}[gate]
        self.splits = [qkv, self.n_v_heads if delta else 0, decay_in, gate_in]
        self.in_proj = nn.Linear(d_model, sum(self.splits), bias=False)
        self.conv = build_conv(qkv, conv_size)
        self.decay_up = (
            nn.Linear(self.decay_rank, self.n_v_heads * self.head_dim, bias=False) if decay == "channel" else None
        )
        self.forget = _build_decay(decay, self.n_v_heads, self.decay_width, decay_gate, decay_floor)
        self.out_norm = nn.RMSNorm(self.v_head_dim, eps=norm_eps) if norm == "rms" else None
        self.gate_up = nn.Linear(self.v_head_dim, v_width, bias=False) if gate == "low_rank" else None
        self.out = nn.Linear(v_width, d_model, bias=False)

    def init_state(self, batch: int, max_len: int, *, device: torch.device, dtype: torch.dtype) -> LinearState:
        wide = torch.promote_types(dtype, torch.float32)
        history = init_history(self.conv, batch, self.splits[0], device=device, dtype=dtype)
        return LinearState(self._empty_memory(batch, device, wide), history)

    def _empty_memory(self, batch: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        return torch.zeros(batch, self.n_v_heads, self.head_dim, self._memory_width, device=device, dtype=dtype)

    @property
    def _memory_width(self) -> int:
        return self.v_head_dim + (self.norm == "sum")

    def forward(self, x: Tensor, *, pos: Position = 0, state: LinearState | None = None) -> tuple[Tensor, Aux]:
        qkv, beta, z, gate = self.in_proj(x).split(self.splits, dim=-1)
        q, k, v = self._queries_keys_values(qkv, pos, None if state is None else state.conv)
        beta = self.beta_max * torch.sigmoid(beta.to(q.dtype)) if self.delta else None
        memory = self._empty_memory(len(x), x.device, q.dtype) if state is None else state.memory
        in_place = state is not None and not torch.is_grad_enabled()
        y, last = delta_rule(q, k, v, self._log_decay(z), beta, memory, chunk_size=self.chunk_size, in_place=in_place)
        if state is not None and not in_place:
            state.memory.copy_(last)
        return self.out(self._finish(y, gate).to(x.dtype)), {}

    def _queries_keys_values(self, qkv: Tensor, pos: Position, history: Tensor | None) -> tuple[Tensor, ...]:
        """(b t c) -> queries and keys (b t g k), values (b t g v), in float32 at least."""
        if self.conv is not None:
            qkv = silu(self.conv(qkv, history))
        qkv = qkv.to(torch.promote_types(qkv.dtype, torch.float32))
        n_qk = 2 * self.n_heads * self.head_dim
        qk = qkv[..., :n_qk].unflatten(-1, (2 * self.n_heads, self.head_dim))
        v = qkv[..., n_qk:].unflatten(-1, (self.n_v_heads, self.v_head_dim))
        if self.rope_dim:
            qk = rotate(qk, pos, n_rot=self.rope_dim, theta=self.rope_theta)
        if self.feature_map == "l2":
            qk = qk * (qk.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()
        elif self.feature_map == "elu":
            qk = elu(qk) + 1
        if self.n_v_heads != self.n_heads:
            qk = qk.repeat_interleave(self.n_v_heads // self.n_heads, dim=2)
        q, k = qk.chunk(2, dim=2)
        if self.norm == "sum":
            v = pad(v, (0, 1), value=1.0)
        return q * self.head_dim**-0.5, k, v

    def _log_decay(self, z: Tensor) -> Tensor | None:
        """(b t rank), or (b t g), or (b t 0) -> (b t g k), or (b t g 1), or None."""
        if self.forget is None:
            return None
        return self.forget(z if self.decay_up is None else self.decay_up(z))

    def _finish(self, y: Tensor, gate: Tensor) -> Tensor:
        """Norm and gate: (b t g v) -> (b t g*v)."""
        if self.out_norm is not None:
            y = self.out_norm(y)
        elif self.norm == "sum":
            y = y[..., :-1] / (y[..., -1:] + SUM_EPS)
        y = y.flatten(2)
        if not self.splits[-1]:
            return y
        gate = (gate if self.gate_up is None else self.gate_up(gate)).to(y.dtype)
        return y * (torch.sigmoid(gate) if self.gate_act == "sigmoid" else silu(gate))

    def mix_flops(self, context: int) -> int:
        """Chunkwise, at any context. Convolution, norms, decays and gates are elementwise and not counted."""
        return self.n_v_heads * chunked_flops(
            self.head_dim, self._memory_width, self.chunk_size, delta=self.delta, decay_width=self.decay_width
        )

    def decode_flops(self, context: int) -> int:
        """Token by token, at any context."""
        return self.n_v_heads * recurrent_flops(self.head_dim, self._memory_width, delta=self.delta)

    def _check_sizes(self) -> None:
        for name in ("n_heads", "head_dim", "v_head_dim"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)}: give a whole number of at least 1")
        if self.n_v_heads < 1 or self.n_v_heads % self.n_heads:
            raise UsageError(f"n_v_heads={self.n_v_heads} is not a multiple of n_heads={self.n_heads}; change one")
        if self.rope_dim % 2 or not 0 <= self.rope_dim <= self.head_dim:
            raise UsageError(f"rope_dim={self.rope_dim}: give an even number up to head_dim={self.head_dim}")
        if self.decay_rank < 1:
            raise UsageError(f"decay_rank={self.decay_rank}: give at least 1, or null for head_dim")
        if self.chunk_size < 1 or self.chunk_size & (self.chunk_size - 1):
            raise UsageError(f"chunk_size={self.chunk_size}: chunks are halved down to tokens; give a power of two")


def _build_decay(decay: str, n_heads: int, width: int, gate: str, floor: float) -> nn.Module | None:
    if decay == "none":
        return None
    return FixedDecay(n_heads) if decay == "fixed" else LearnedDecay(n_heads, width, gate=gate, floor=floor)


def _check_choices(
    feature_map: str, decay: str, decay_gate: str, floor: float, norm: str, gate: str, gate_act: str, beta_max: float
) -> None:
    """Refuse what is not offered with a UsageError that names it."""
    for name, value, known in (
        ("feature_map", feature_map, ("l2", "elu", "none")),
        ("decay", decay, ("channel", "scalar", "fixed", "none")),
        ("decay_gate", decay_gate, ("softplus", "bounded", "logsigmoid")),
        ("norm", norm, ("rms", "sum", "none")),
        ("gate", gate, ("low_rank", "full", "none")),
        ("gate_act", gate_act, ("sigmoid", "silu")),
    ):
        if value not in known:
            raise UsageError(f"{name}={value}: give {', '.join(known[:-1])} or {known[-1]}")
    if norm == "sum" and feature_map != "elu":
        raise UsageError(f"norm=sum divides by a sum that only feature_map=elu keeps positive, not {feature_map}")
    if floor >= 0:
        raise UsageError(f"decay_floor={floor}: the strongest log-decay of a bounded gate is below 0")
    if not 0 < beta_max <= 2:
        raise UsageError(f"beta_max={beta_max}: the state stays bounded for at most 2; give 1 or 2")
