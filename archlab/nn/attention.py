"""Exact causal softmax attention of new tokens over a context, in the formulation that is fastest for each case.

Shapes: b batch, h query heads, g KV heads (query head i reads KV head i // (h/g)), t queries, s keys, c head width.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from archlab.mixer import Position

PACKED_QUERIES = 16
"""Up to so many query tokens, the query heads of a KV head are packed as query length: K and V are then read once a KV
head instead of once a query head."""

WINDOW_CHUNK = 32
"""Least queries a piece of a windowed pass; a piece sees its own tokens and one window before them."""


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, pos: Position = 0, scale: float | None = None, window: int | None = None
) -> Tensor:
    """q (b h t c), k and v (b g s c) -> (b h t c). Key slot j holds absolute position j, query i stands at pos + i and
    sees the keys j with pos + i - window < j <= pos + i. With a ragged `pos` (b,), slots after a row's end are ignored.
    """
    t, s, dtype = q.shape[2], k.shape[2], q.dtype
    q = q.to(k.dtype)  # a narrow cache decides the precision of the product
    if window is not None and window < s:
        y = _windowed(q, k, v, pos, scale, window)
    elif isinstance(pos, int) and t == 1 and s == pos + 1:
        y = _packed(q, k, v, None, scale)
    elif isinstance(pos, int) and pos == 0 and t == s:
        y = sdpa(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    else:
        y = masked_attention(q, k, v, visible(pos, t, s, device=q.device), scale)
    return y.to(dtype)


def wants_one_width(device: torch.device) -> bool:
    """Whether the kernels that never hold the score matrix refuse values of another width than the keys."""
    return device.type in ("cpu", "cuda")


def last_position(pos: Position, capacity: int) -> int:
    """A bound on the positions of a call, so that no slot beyond it is read: exact where that costs no transfer to the
    host, else the last slot of the capacity."""
    if isinstance(pos, int):
        return pos
    return int(pos.max()) if pos.device.type == "cpu" else capacity - 1


def append(slots: Tensor, new: Tensor, pos: Position) -> Tensor:
    """Write new (b n t c) at `pos` of slots (b n s c); returns the slots up to the last written one."""
    t = new.shape[2]
    if isinstance(pos, int):
        slots[:, :, pos : pos + t] = new
        return slots[:, :, : pos + t]
    rows = torch.arange(len(pos), device=new.device)[:, None]
    # Indexing axes 0 and 2 together puts them first: (b t n c).
    slots[rows, :, pos[:, None] + torch.arange(t, device=new.device)] = new.transpose(1, 2).to(slots.dtype)
    return slots[:, :, : last_position(pos, slots.shape[2]) + t]


def visible(pos: Position, t: int, s: int, *, device: torch.device, window: int | None = None) -> Tensor:
    """Which keys each query sees: bool (t s), or (b 1 t s) for a ragged pos."""
    query = torch.arange(t, device=device)
    query = query + pos if isinstance(pos, int) else query + pos[:, None, None]  # (t) or (b 1 t)
    age = query[..., None] - torch.arange(s, device=device)
    return age >= 0 if window is None else (age >= 0) & (age < window)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """Attention under a bool mask (t s) or (b 1 t s), True where a query sees a key; at least one True a query."""
    if q.shape[2] <= PACKED_QUERIES:
        return _packed(q, k, v, mask, scale)
    return sdpa(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def _packed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    b, h, t, c = q.shape
    g = k.shape[1]
    if mask is not None and h != g:
        mask = mask.repeat(*[1] * (mask.dim() - 2), h // g, 1)
    return sdpa(q.reshape(b, g, h // g * t, c), k, v, attn_mask=mask, scale=scale).view(b, h, t, v.shape[-1])


def _windowed(q: Tensor, k: Tensor, v: Tensor, pos: Position, scale: float | None, window: int) -> Tensor:
    """Pieces of the queries over the keys that they can see: linear in t for a fixed window."""
    t, n = q.shape[2], max(window, WINDOW_CHUNK)
    first = max(0, pos - window) if isinstance(pos, int) else 0
    if t <= n or not isinstance(pos, int):
        mask = visible(pos - first, t, k.shape[2] - first, device=q.device, window=window)
        return masked_attention(q, k[:, :, first:], v[:, :, first:], mask, scale)
    keys, values, pieces = k[:, :, first:pos], v[:, :, first:pos], []
    # Split and joined, not sliced: the gradient of each of many slices would be as long as the whole.
    for piece, *new in zip(*(x.split(n, dim=2) for x in (q, k[:, :, pos:], v[:, :, pos:])), strict=True):
        keys, values = (torch.cat([old[:, :, -window:], x], dim=2) for old, x in zip((keys, values), new, strict=True))
        mask = visible(keys.shape[2] - piece.shape[2], piece.shape[2], keys.shape[2], device=q.device, window=window)
        pieces.append(masked_attention(piece, keys, values, mask, scale))
    return torch.cat(pieces, dim=2)
