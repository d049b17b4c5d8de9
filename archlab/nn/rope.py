"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864): interleaved pairs (2i, 2i+1), one complex product."""

import torch
from torch import Tensor

from archlab.mixer import Position

_tables: dict[tuple, Tensor] = {}


def _phases(pos: Tensor, dim: int, theta: float) -> Tensor:
    """exp(i * pos * theta^(-2j/dim)), j < dim/2: complex (*pos, dim/2)."""
    # Angles in float64 (which MPS lacks): at position 10^6 a float32 angle is already off by 0.03 rad.
    wide = torch.float32 if pos.device.type == "mps" else torch.float64
    inv_freq = theta ** (-torch.arange(0, dim, 2, dtype=wide, device=pos.device) / dim)
    angles = pos.to(wide)[..., None] * inv_freq
    return torch.polar(torch.ones_like(angles), angles)


def _table(n_positions: int, dim: int, theta: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Phases of positions 0, 1, ...: one table for all layers, grown by doubling."""
    key = (dim, theta, device, dtype)
    table = _tables.get(key)
    if table is None or table.shape[0] < n_positions:
        rows = max(1024, 1 << (n_positions - 1).bit_length())
        with torch.inference_mode(False):  # a table first made while decoding must serve training too
            table = _phases(torch.arange(rows, device="meta" if device.type == "meta" else "cpu"), dim, theta)
            table = _tables[key] = table.to(device, dtype)
    return table


def rotate(x: Tensor, pos: Position, *, n_rot: int, theta: float) -> Tensor:
    """`rotate_` of a copy."""
    return rotate_(x.clone(), pos, n_rot=n_rot, theta=theta)


def rotate_(x: Tensor, pos: Position, *, n_rot: int, theta: float) -> Tensor:
    """Rotate the first `n_rot` channels of each head by the token's absolute position, in place; returns x.

    Args:
        x: (b t h c), the tokens of one call. `n_rot` is even and at most c; 0 leaves x as it is.
        pos: position of the first token, an int or (b,).
    """
    if n_rot == 0:
        return x
    t, dtype = x.shape[1], torch.complex128 if x.dtype == torch.float64 else torch.complex64
    if isinstance(pos, int):
        phase = _table(pos + t, n_rot, theta, x.device, dtype)[pos : pos + t, None]  # (t 1 n_rot/2)
    else:
        positions = pos[:, None] + torch.arange(t, device=x.device)
        phase = _phases(positions, n_rot, theta).to(dtype)[:, :, None]  # (b t 1 n_rot/2)
    part = x[..., :n_rot]
    if _views_as_complex(part):
        torch.view_as_complex(part.unflatten(-1, (-1, 2))).mul_(phase)
    else:
        wide = part.to(phase.real.dtype).contiguous().unflatten(-1, (-1, 2))
        part.copy_(torch.view_as_real(torch.view_as_complex(wide) * phase).flatten(-2))
    return x


def _views_as_complex(x: Tensor) -> bool:
    """Whether pairs of x's last axis are complex numbers in place: wide enough, and starting at even offsets."""
    if torch.compiler.is_compiling():  # which gets in-place products of complex views wrong (torch 2.13)
        return False
    wide = x.dtype in (torch.float32, torch.float64)
    return wide and x.storage_offset() % 2 == 0 and all(stride % 2 == 0 for stride in x.stride()[:-1])
