"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): the cache holds one low-rank latent and one rotary key a
token, whatever the number of heads.

Two forms of the same function. Expanded, the latents become keys and values of every head: cheapest where many queries
share them (training, prefill). Absorbed, the up-projections move to the query and to the output, and all heads attend
to the latents themselves (multi-query attention with one wide head): nothing is expanded, so a decode step reads only
the cache. A rotation between the latent and the key would forbid that, so position has channels of its own.

Shapes: b batch, t new tokens, s cached tokens, h heads, dc latent width, dn / dr / dv width of a head's plain query and
key / rotary query and key / value.
"""

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import pad

from archlab.attn.gqa import width_of_head
from archlab.errors import UsageError
from archlab.mixer import Aux, Mixer, Position, State
from archlab.nn.attention import append, causal_attention, wants_one_width
from archlab.nn.conv import build_conv, init_history
from archlab.nn.norm import RMSNorm
from archlab.nn.rope import rotate_


@dataclass
class LatentState(State):
    """latent (b s dc+dr): a token's normed latent, then its rotated key, which all heads share.
    conv (b conv_size-1 c): the last inputs of the short convolution; (b 0 c) where there is none."""

    latent: Tensor
    conv: Tensor


class MultiHeadLatentAttention(Mixer):
    """Softmax attention of `n_heads` heads whose keys and values are linear in one latent of `kv_lora_rank` channels.

    Args:
        n_heads: heads of queries, keys and values.
        kv_lora_rank: dc, channels of the cached latent; None means four times d_model / n_heads (the paper's choice).
        q_lora_rank: channels of a latent for the queries; None means queries straight from the input.
        qk_nope_head_dim: dn, channels of a head's query and key that carry no position; None means d_model / n_heads.
        qk_rope_head_dim: dr, those that rotate; the key's are shared by all heads; None means half of dn, made even.
        v_head_dim: dv, channels of a head's value; None means d_model / n_heads.
        rope: False leaves the dr channels unrotated (NoPE, as in Kimi Linear, arXiv:2510.26692).
        rope_theta: base of the rotation's wavelengths.
        conv_size: tokens that a short depthwise convolution over queries (or their latent), latent and rotary key sees,
            as in the linear family; 0: none.
        norm_eps: epsilon of the RMSNorm over each latent.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_heads: int,
        kv_lora_rank: int | None = None,
        qk_nope_head_dim: int | None = None,
        qk_rope_head_dim: int | None = None,
        v_head_dim: int | None = None,
        q_lora_rank: int | None = None,
        rope: bool = True,
        rope_theta: float = 10_000.0,
        conv_size: int = 0,
        norm_eps: float = 1e-6,
    ):
        super().__init__()
        self.n_heads, self.rope, self.norm_eps = n_heads, rope, norm_eps
        if None in (kv_lora_rank, qk_nope_head_dim, v_head_dim):
            width = width_of_head(d_model, n_heads)
            kv_lora_rank = 4 * width if kv_lora_rank is None else kv_lora_rank
            qk_nope_head_dim = width if qk_nope_head_dim is None else qk_nope_head_dim
            v_head_dim = width if v_head_dim is None else v_head_dim
        if qk_rope_head_dim is None:
            qk_rope_head_dim = 2 * -(-qk_nope_head_dim // 4)
        self.kv_lora_rank = self.dc = kv_lora_rank
        self.q_lora_rank = q_lora_rank
        self.qk_nope_head_dim = self.dn = qk_nope_head_dim
        self.qk_rope_head_dim = self.dr = qk_rope_head_dim
        self.v_head_dim = self.dv = v_head_dim
        self.scale = (self.dn + self.dr) ** -0.5
        self.n_rot, self.rope_theta = qk_rope_head_dim if rope else 0, rope_theta
        _check_sizes(n_heads, kv_lora_rank, q_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, rope)
        q_width = n_heads * (self.dn + self.dr)
        self.d_query = q_lora_rank or q_width
        self.down = nn.Linear(d_model, self.d_query + self.dc + self.dr, bias=False)
        self.conv_size, self.conv = conv_size, build_conv(self.down.out_features, conv_size)
        self.q_norm = RMSNorm(q_lora_rank, eps=norm_eps) if q_lora_rank else None
        self.q_up = nn.Linear(q_lora_rank, q_width, bias=False) if q_lora_rank else None
        self.kv_norm = RMSNorm(self.dc, eps=norm_eps)
        self.kv_up = nn.Linear(self.dc, n_heads * (self.dn + self.dv), bias=False)
        self.out = nn.Linear(n_heads * self.dv, d_model, bias=False)

    def init_state(self, batch: int, max_len: int, *, device: torch.device, dtype: torch.dtype) -> LatentState:
        latent = torch.zeros(batch, max_len, self.dc + self.dr, device=device, dtype=dtype)
        return LatentState(latent, init_history(self.conv, batch, self.down.out_features, device=device, dtype=dtype))

    def forward(self, x: Tensor, *, pos: Position = 0, state: LatentState | None = None) -> tuple[Tensor, Aux]:
        q_nope, q_rope, latent = self.project(x, pos, None if state is None else state.conv)
        if state is None:
            return self.out(self.expanded(q_nope, q_rope, latent, 0)), {}
        latent = append(state.latent[:, None], latent, pos)
        attend = self.absorbed if self.absorbs(x.shape[1], latent.shape[2]) else self.expanded
        return self.out(attend(q_nope, q_rope, latent, pos)), {}

    def project(self, x: Tensor, pos: Position, history: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """x (b t d) -> plain queries (b t h dn), rotated queries (b t h dr), latents (b 1 t dc+dr): one KV head, as
        it is cached."""
        down = self.down(x)
        if self.conv is not None:
            down = self.conv(down, history).to(down.dtype)
        q, c, k_rope = down.split([self.d_query, self.dc, self.dr], dim=-1)
        if self.q_up is not None:
            q = self.q_up(self.q_norm(q))
        q_nope, q_rope = q.unflatten(-1, (self.n_heads, self.dn + self.dr)).split([self.dn, self.dr], dim=-1)
        rope = rotate_(torch.cat([q_rope, k_rope[:, :, None]], dim=2), pos, n_rot=self.n_rot, theta=self.rope_theta)
        latent = torch.cat([self.kv_norm(c), rope[:, :, -1]], dim=-1)
        return q_nope, rope[:, :, :-1], latent[:, None]

    def absorbs(self, t: int, s: int) -> bool:
        """Whether t queries over s cached tokens cost fewer FLOPs absorbed: 2h times

        absorbed: t dc (dn + dv) + t s (2 dc + dr), expanded: s dc (dn + dv) + t s (dn + dr + dv).

        One token never expands the cache.
        """
        saved_by_expanding = t * s * (2 * self.dc - self.dn - self.dv)
        return t == 1 or saved_by_expanding <= (s - t) * self.dc * (self.dn + self.dv)

    def expanded(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, pos: Position) -> Tensor:
        """Attention with keys and values of every head, made from latents (b 1 s dc+dr) -> (b t h*dv)."""
        c, k_rope = latent[:, 0].to(q_nope.dtype).split([self.dc, self.dr], dim=-1)
        k_nope, v = self.kv_up(c).unflatten(-1, (self.n_heads, self.dn + self.dv)).split([self.dn, self.dv], dim=-1)
        q = torch.cat([q_nope, q_rope], dim=-1)
        k = torch.cat([k_nope, k_rope[:, :, None].expand(-1, -1, self.n_heads, -1)], dim=-1)
        if wants_one_width(q.device):
            q, k, v = _widen(q, k, v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = causal_attention(q, k, v, pos=pos, scale=self.scale)[..., : self.dv]
        return rearrange(y, "b h t v -> b t (h v)")

    def absorbed(self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, pos: Position) -> Tensor:
        """The same of the latents themselves: W_UK moves into the query, W_UV behind the attention -> (b t h*dv)."""
        b, t = q_nope.shape[:2]
        w_uk, w_uv = self.kv_up.weight.unflatten(0, (self.n_heads, -1)).split([self.dn, self.dv], dim=1)
        q = torch.bmm(q_nope.flatten(0, 1).transpose(0, 1), w_uk)  # (h b*t dc)
        q = torch.cat([q.unflatten(1, (b, t)).transpose(0, 1), q_rope.transpose(1, 2)], dim=-1)
        # As values the latents carry dr channels too many, dropped below.
        v = latent if wants_one_width(q.device) else latent[..., : self.dc]
        y = causal_attention(q, latent, v, pos=pos, scale=self.scale)
        y = y[..., : self.dc].transpose(0, 1).flatten(1, 2)  # (h b*t dc)
        return torch.bmm(y, w_uv.mT).transpose(0, 1).reshape(b, t, -1)

    def mix_flops(self, context: int) -> int:
        """Expanded; kv_up is an `nn.Linear`, and one token's latent passes it once."""
        return 2 * self.n_heads * (self.dn + self.dr + self.dv) * context

    def decode_flops(self, context: int) -> int:
        """Absorbed; kv_up's weights are used once there too, half on the query and half on the output."""
        return 2 * self.n_heads * (2 * self.dc + self.dr) * context


def _widen(*parts: Tensor) -> list[Tensor]:
    """Zeros behind the last axis of the narrower parts."""
    width = max(part.shape[-1] for part in parts)
    return [part if part.shape[-1] == width else pad(part, (0, width - part.shape[-1])) for part in parts]


def _check_sizes(
    n_heads: int, kv_lora_rank: int, q_lora_rank: int | None, nope: int, rope_dim: int, v_head_dim: int, rope: bool
) -> None:
    sizes = {"n_heads": n_heads, "kv_lora_rank": kv_lora_rank, "qk_nope_head_dim": nope, "v_head_dim": v_head_dim}
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"{name}={size}: give a whole number of at least 1")
    if q_lora_rank is not None and q_lora_rank < 1:
        raise UsageError(f"q_lora_rank={q_lora_rank}: give a whole number of at least 1, or null for no query latent")
    if rope_dim < 0 or (rope and (rope_dim == 0 or rope_dim % 2)):
        raise UsageError(
            f"qk_rope_head_dim={rope_dim}: the rotary key needs channels of its own, in pairs; give an even number of "
            "at least 2, or set rope=false"
        )
