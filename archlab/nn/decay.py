"""How fast a linear attention's state forgets: learned and fixed log-decays.

Shapes: b batch, t tokens, h heads, d channels of a head that decay apart (1: the whole head decays alike).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus

GLA_TEMPERATURE = 16.0
"""The root that gated linear attention takes of its forget gate (arXiv:2312.06635)."""


class LearnedDecay(nn.Module):
    """Log-decay g <= 0 of a pre-activation z (b t h*d) -> (b t h d), in float32 at least; z gets a bias first.

    gate:
        "softplus": g = -exp(A_log) softplus(z), unbounded (Mamba, Gated DeltaNet, Kimi Linear).
        "bounded": g = floor sigmoid(exp(A_log) z), between `floor` and 0 (the safe gate of later KDA models).
        "logsigmoid": g = logsigmoid(z) / 16 (gated linear attention), without A_log.

    Parameters: A_log (h), dt_bias (h*d). Weight decay would pull both to a meaning of its own.
    """

    def __init__(self, n_heads: int, width: int, *, gate: str, floor: float):
        super().__init__()
        self.n_heads, self.gate, self.floor = n_heads, gate, floor
        if gate == "logsigmoid":
            self.dt_bias = nn.Parameter(torch.zeros(n_heads * width))
            return
        rate = torch.empty(n_heads).uniform_(1, 16) if gate == "softplus" else torch.ones(n_heads)
        self.A_log = nn.Parameter(rate.log())
        step = torch.empty(n_heads * width).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(step + (-torch.expm1(-step)).log())  # softplus(dt_bias) = step

    def forward(self, z: Tensor) -> Tensor:
        z = (z.to(torch.promote_types(z.dtype, torch.float32)) + self.dt_bias).unflatten(-1, (self.n_heads, -1))
        if self.gate == "logsigmoid":
            return logsigmoid(z) / GLA_TEMPERATURE
        rate = self.A_log.exp()[:, None]
        return -rate * softplus(z) if self.gate == "softplus" else self.floor * torch.sigmoid(rate * z)


class FixedDecay(nn.Module):
    """Head i keeps 1 - 2^(-5-i) of its state a token (RetNet, arXiv:2307.08621): g (b t h 1) for any z (b t 0)."""

    def __init__(self, n_heads: int):
        super().__init__()
        self.n_heads = n_heads

    def forward(self, z: Tensor) -> Tensor:
        # Not a buffer: rounded to float32 once, it would be another decay in float64.
        head = torch.arange(self.n_heads, dtype=torch.promote_types(z.dtype, torch.float32), device=z.device)
        return torch.log1p(-torch.exp2(-5 - head))[:, None].expand(*z.shape[:2], -1, -1)
