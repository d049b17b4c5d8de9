"""Mixture of experts of DeepSeek-V3 (arXiv:2412.19437): shared experts, sigmoid scores, and a selection bias where
others have a large balance loss. By settings also that of DeepSeek-V2 (arXiv:2405.04434), with softmax scores.

Shapes: b batch, t tokens, d model width, e routed experts in g groups, k of them a token.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from archlab.errors import UsageError
from archlab.ffn.moe import check_experts, expert_width
from archlab.ffn.swiglu import SwiGLU, swiglu_width
from archlab.mixer import FFN, Aux
from archlab.nn.experts import Experts, Load, Router, balance_loss, expert_counts


class DeepSeekMoE(FFN):
    """y = shared(x) + sum over k chosen experts of weight * SwiGLU_e(x).

    Experts are chosen by score + bias, within the groups of highest score; weights are the scores alone. After each
    step the bias of an expert with less than the mean load rises by `bias_rate`, of one with more it falls.

    Args:
        n_experts, top_k: routed experts, and how many of them a token runs through.
        n_shared: experts that every token runs through, computed as one of that many times the width.
        d_expert: width of an expert; None shares out the width of the dense SwiGLU, so that active weights are as many.
        first_dense, d_ff: the first so many layers are a dense SwiGLU of width d_ff (None: 8/3 d_model).
        n_groups, top_k_groups: groups of experts, and how many of them a token's experts may come from.
        scoring: scores are the sigmoid of the logits (DeepSeek-V3), or their softmax (DeepSeek-V2).
        group_score: a group is worth the sum of its two best experts (DeepSeek-V3), or its best one (DeepSeek-V2).
        norm_topk_prob: divide the weights by their sum.
        routed_scaling: factor of the weights: the sum of k experts is smaller than one expert's output.
        shared_gate: multiply the output of the shared experts by the sigmoid of a projection of the input (Qwen2-MoE).
        limit: of the clamped SwiGLU in all experts and dense layers (`nn/glu.py`); None: the plain one.
        bias_rate: step of the selection bias.
        balance_coef: coefficient of the balance loss within each sequence; 0 leaves it out.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_experts: int,
        top_k: int,
        n_shared: int,
        layer_idx: int,
        d_expert: int | None = None,
        first_dense: int = 0,
        d_ff: int | None = None,
        n_groups: int = 1,
        top_k_groups: int = 1,
        scoring: Literal["sigmoid", "softmax"] = "sigmoid",
        group_score: Literal["top2", "max"] = "top2",
        norm_topk_prob: bool = True,
        routed_scaling: float = 1.0,
        shared_gate: bool = False,
        limit: float | None = None,
        bias_rate: float = 0.001,
        balance_coef: float = 0.0001,
    ):
        super().__init__()
        check_experts(n_experts, top_k)
        _check_groups(n_experts, top_k, n_groups, top_k_groups)
        _check_names(scoring, group_score)
        if shared_gate and not n_shared:
            raise UsageError("shared_gate=true gates shared experts; give n_shared of at least 1")
        self.n_experts, self.top_k, self.n_shared = n_experts, top_k, n_shared
        self.n_groups, self.top_k_groups = n_groups, top_k_groups
        self.scoring, self.group_score = scoring, group_score
        self.norm_topk_prob, self.routed_scaling = norm_topk_prob, routed_scaling
        self.shared_gate, self.limit = shared_gate, limit
        self.bias_rate, self.balance_coef = bias_rate, balance_coef
        self.first_dense, self.is_dense = first_dense, layer_idx < first_dense
        self.d_ff = swiglu_width(d_model) if d_ff is None else d_ff
        self.d_expert = expert_width(d_model, top_k + n_shared) if d_expert is None else d_expert
        shared_width = self.d_ff if self.is_dense else n_shared * self.d_expert
        self.shared = SwiGLU(d_model, d_ff=shared_width, limit=limit) if self.is_dense or n_shared else None
        if self.is_dense:
            return
        self.router = Router(d_model, n_experts)
        self.gate = nn.Linear(d_model, 1, bias=False) if shared_gate else None
        self.experts = Experts(d_model, d_expert=self.d_expert, n_experts=n_experts, top_k=top_k, limit=limit)
        self.load = Load(n_experts)
        self.register_buffer("selection_bias", torch.zeros(n_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Aux]:
        if self.is_dense:
            return self.shared(x)
        scores = self.score(self.router(x))
        weights, chosen = self.choose(scores)
        y = self.experts(x, weights, chosen)
        if self.shared is not None:
            shared = self.shared(x)[0]
            y = y + (shared if self.gate is None else shared * torch.sigmoid(self.gate(x)))
        return y, self._losses(scores, chosen) if self.training else {}

    def score(self, logits: Tensor) -> Tensor:
        """logits (... e) -> scores (... e)."""
        return logits.sigmoid() if self.scoring == "sigmoid" else logits.softmax(-1)

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores (... e) -> weights and experts (... k)."""
        biased = scores.detach() + self.selection_bias
        if self.top_k_groups < self.n_groups:
            biased = self._mask_groups(biased)
        chosen = biased.topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.routed_scaling, chosen

    def _mask_groups(self, biased: Tensor) -> Tensor:
        """Minus infinity in all but the best groups."""
        grouped = biased.unflatten(-1, (self.n_groups, -1))
        n_best = min(2, grouped.shape[-1]) if self.group_score == "top2" else 1
        worth = grouped.topk(n_best, dim=-1).values.sum(-1)
        best = worth.topk(self.top_k_groups, dim=-1).indices
        dropped = torch.ones_like(worth, dtype=torch.bool).scatter_(-1, best, False)
        return grouped.masked_fill(dropped[..., None], -torch.inf).flatten(-2)

    def _losses(self, scores: Tensor, chosen: Tensor) -> Aux:
        """scores (b t e), chosen (b t k); each sequence is balanced on its own. Counts the load by the way."""
        counts = expert_counts(chosen, scores.shape[-1])
        self.load.add(counts)
        if not self.balance_coef:
            return {}
        probs = scores / (scores.sum(-1, keepdim=True) + 1e-20)
        return {"router_balance": self.balance_coef * balance_loss(probs, counts)}

    def after_step(self, progress: float) -> None:
        if not self.is_dense:
            load = self.load.end_step()
            self.selection_bias += self.bias_rate * (load.sum() - len(load) * load).sign()

    def metrics(self) -> dict[str, float]:
        return {} if self.is_dense else self.load.metrics()


def _check_names(scoring: str, group_score: str) -> None:
    if scoring not in ("sigmoid", "softmax"):
        raise UsageError(f"scoring={scoring!r}: give sigmoid or softmax")
    if group_score not in ("top2", "max"):
        raise UsageError(f"group_score={group_score!r}: give top2 or max")


def _check_groups(n_experts: int, top_k: int, n_groups: int, top_k_groups: int) -> None:
    if n_groups < 1 or n_experts % n_groups:
        raise UsageError(f"n_experts={n_experts} is not divisible by n_groups={n_groups}; change one")
    if not 1 <= top_k_groups <= n_groups:
        raise UsageError(f"top_k_groups={top_k_groups}: give at least 1 and at most n_groups={n_groups}")
    if top_k > top_k_groups * (n_experts // n_groups):
        raise UsageError(
            f"top_k={top_k} experts do not fit into top_k_groups={top_k_groups} groups of {n_experts // n_groups}; "
            "raise top_k_groups or lower top_k"
        )
