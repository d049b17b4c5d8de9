"""Mixture of SwiGLU experts behind a softmax router (Mixtral, arXiv:2401.04088), with the balance loss of Switch
(arXiv:2101.03961) and the z-loss of ST-MoE (arXiv:2202.08906).

Shapes: b batch, t tokens, d model width, e experts, k experts a token.
"""

from torch import Tensor

from archlab.errors import UsageError
from archlab.ffn.swiglu import swiglu_width
from archlab.mixer import FFN, Aux
from archlab.nn.experts import Experts, Load, Router, balance_loss, expert_counts


class MixtureOfExperts(FFN):
    """y = sum over the k experts of largest logit of weight * SwiGLU_e(x).

    Args:
        n_experts, top_k: experts, and how many of them a token runs through.
        d_expert: width of an expert; None shares out the width of the dense SwiGLU, so that active weights are as many.
        norm_topk_prob: the weights are the softmax over the chosen logits, which sum to 1 (Mixtral, Qwen3); else they
            are those of the softmax over all (Switch). With top_k 1, normalised weights teach the router nothing.
        balance_coef, z_coef: coefficients of the auxiliary losses, each a layer's mean over tokens.
    """

    def __init__(
        self,
        d_model: int,
        *,
        n_experts: int,
        top_k: int,
        d_expert: int | None = None,
        norm_topk_prob: bool = True,
        balance_coef: float = 0.01,
        z_coef: float = 0.001,
    ):
        super().__init__()
        check_experts(n_experts, top_k)
        self.n_experts, self.top_k, self.norm_topk_prob = n_experts, top_k, norm_topk_prob
        self.balance_coef, self.z_coef = balance_coef, z_coef
        self.router = Router(d_model, n_experts)
        self.d_expert = expert_width(d_model, top_k) if d_expert is None else d_expert
        self.experts = Experts(d_model, d_expert=self.d_expert, n_experts=n_experts, top_k=top_k)
        self.load = Load(n_experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Aux]:
        logits = self.router(x)
        weights, chosen = self.choose(logits)
        y = self.experts(x, weights, chosen)
        return y, self._losses(logits.flatten(0, 1), chosen.flatten(0, 1)) if self.training else {}

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """logits (... e) -> weights and experts (... k)."""
        top, chosen = logits.topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            return top.softmax(-1), chosen
        return logits.softmax(-1).gather(-1, chosen), chosen

    def _losses(self, logits: Tensor, chosen: Tensor) -> Aux:
        """logits (n e), chosen (n k); the whole batch is balanced as one. Counts the load by the way."""
        counts = expert_counts(chosen[None], logits.shape[-1])
        self.load.add(counts)
        return {
            "router_balance": self.balance_coef * balance_loss(logits.softmax(-1)[None], counts),
            "router_z": self.z_coef * logits.logsumexp(-1).square().mean(),
        }

    def after_step(self, progress: float) -> None:
        self.load.end_step()

    def metrics(self) -> dict[str, float]:
        return self.load.metrics()


def expert_width(d_model: int, n_active: int) -> int:
    """Width of each of `n_active` experts that together are as wide as the dense SwiGLU, rounded up to a multiple of 8:
    what a grouped product in bfloat16 can take."""
    return -(-swiglu_width(d_model) // (8 * n_active)) * 8


def check_experts(n_experts: int, top_k: int) -> None:
    """Refuse impossible counts with a UsageError that names the value."""
    if not 1 <= top_k <= n_experts:
        raise UsageError(f"top_k={top_k}: a token runs through at least 1 and at most n_experts={n_experts} experts")
