"""Normalisation layers that a model or a plugin can name."""

from torch import nn

from archlab.errors import UsageError

NORMS = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}


def build_norm(kind: str, dim: int, eps: float) -> nn.Module:
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm over the last axis of width `dim`."""
    if kind not in NORMS:
        raise UsageError(f"unknown norm {kind!r}; known: {', '.join(NORMS)}")
    return NORMS[kind](dim, eps=eps)
