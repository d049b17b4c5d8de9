"""Gated activations of a feed-forward network."""

import torch
from torch import Tensor
from torch.nn.functional import silu

SLOPE = 1.702
"""With which x sigmoid(SLOPE x) is close to GELU (arXiv:1606.08415)."""


def glu(gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
    """silu(gate) * up (SwiGLU); with a limit, as gpt-oss (arXiv:2508.10925) and MiniMax-M3 have it:
    gate sigmoid(1.702 gate) * (up + 1), of a gate of at most `limit` and an up within +-`limit`."""
    if limit is None:
        return silu(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(SLOPE * gate) * (up + 1)
