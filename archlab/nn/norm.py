"""Normalisation layers that a model or a plugin can name."""

from torch import Tensor, nn

from archlab.errors import UsageError


class RMSNorm(nn.RMSNorm):
    """RMSNorm in the precision of its weight, also where autocast narrowed the input; the result is as the input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


NORMS = {"rms": RMSNorm, "layer": nn.LayerNorm}


def build_norm(kind: str, dim: int, eps: float) -> nn.Module:
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm over the last axis of width `dim`."""
    if kind not in NORMS:
        raise UsageError(f"unknown norm {kind!r}; known: {', '.join(NORMS)}")
    return NORMS[kind](dim, eps=eps)
