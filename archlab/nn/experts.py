"""The weights of many experts as one tensor."""

import torch
from torch import Tensor, nn


class ExpertLinear(nn.Module):
    """One bias-free linear layer an expert. Counted as `top_k / n_experts` of its weights where active ones are meant.

    weight (e in out): row-major by input, as a grouped product wants it.
    """

    def __init__(self, n_experts: int, top_k: int, d_in: int, d_out: int):
        super().__init__()
        self.n_experts, self.top_k = n_experts, top_k
        self.weight = nn.Parameter(torch.empty(n_experts, d_in, d_out))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x (n in), rows sorted by expert; ends (e,) int32, the row after each expert's last -> (n out)."""
        return torch.nn.functional.grouped_mm(x, self.weight, offs=ends)
