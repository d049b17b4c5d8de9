"""Normalisation layers that a model or a plugin can name."""

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from archlab.errors import UsageError


class RMSNorm(nn.RMSNorm):
    """RMSNorm in the precision of its weight, also where autocast narrowed the input; the result is as the input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class GemmaRMSNorm(nn.RMSNorm):
    """RMSNorm times 1 + weight (Gemma, arXiv:2403.08295), so that weight decay pulls its factor to 1 and not to 0."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
        return rms_norm(x.to(weight.dtype), self.normalized_shape, 1 + weight, self.eps).to(x.dtype)


NORMS = {"rms": RMSNorm, "gemma": GemmaRMSNorm, "layer": nn.LayerNorm}


def build_norm(kind: str, dim: int, eps: float) -> nn.Module:
    """RMSNorm (Zhang & Sennrich 2019), Gemma's, or LayerNorm over the last axis of width `dim`."""
    if kind not in NORMS:
        raise UsageError(f"unknown norm {kind!r}; known: {', '.join(NORMS)}")
    return NORMS[kind](dim, eps=eps)
