"""What every mixture of experts needs: the router's logits, the way of the tokens to their experts and back, the load.

Dropless: each chosen expert computes all of its tokens and no other's, so that a token's output does not depend on
what else is in the batch.

Shapes: n tokens, k experts a token, p = n k rows, one for each token and expert it chose, e experts, d model width,
f expert width, s groups of tokens that a balance loss looks at one by one.
"""

import math

import torch
from torch import Tensor, nn
from torch.amp import is_autocast_available
from torch.nn.functional import grouped_mm, linear

from archlab.nn.glu import glu
from archlab.nn.precision import without_autocast


class Router(nn.Linear):
    """x (... d) -> logits (... e), in float32 or wider also under autocast: rounding can choose another expert."""

    def __init__(self, d_model: int, n_experts: int):
        super().__init__(d_model, n_experts, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        with without_autocast(x.device):
            return linear(x.to(wide), self.weight.to(wide))


class ExpertLinear(nn.Module):
    """One bias-free linear layer an expert. Counted as `top_k / n_experts` of its weights where active ones are meant.

    weight (e in out): row-major by input, as a grouped product wants it.
    """

    def __init__(self, n_experts: int, top_k: int, d_in: int, d_out: int):
        super().__init__()
        self.n_experts, self.top_k = n_experts, top_k
        self.weight = nn.Parameter(torch.empty(n_experts, d_in, d_out))
        nn.init.uniform_(self.weight, -(d_in**-0.5), d_in**-0.5)  # as nn.Linear does

    # Not compiled: the compiler takes the grouped product in bfloat16 alone. torch.compiler.disable would load it here.
    @torch._disable_dynamo
    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x (p in), rows sorted by expert; ends (e,) int32, the row after each expert's last -> (p out)."""
        weight = self.weight.to(x.dtype)
        if grouped_mm_takes(weight):
            return grouped_mm(x, weight, offs=ends)
        counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
        # Not weight[i]: its backward would make a gradient of the full size for each expert.
        return torch.cat([rows @ w for rows, w in zip(x.split(counts), weight.unbind(0), strict=True)])

    def each(self, x: Tensor, experts: Tensor) -> Tensor:
        """x (p in), row i through expert experts[i] -> (p out): for few rows in any order."""
        if x.device.type == "cpu":
            pairs = zip(x.split(1), experts.tolist(), strict=True)
            return torch.cat([row @ self.weight[i].to(x.dtype) for row, i in pairs])
        # A copy of the weights, but nothing goes to the host.
        return torch.bmm(x[:, None], self.weight.index_select(0, experts).to(x.dtype))[:, 0]


def grouped_mm_takes(weight: Tensor) -> bool:
    """Whether torch's grouped product takes experts' weights (e in out) of that type and of those widths."""
    aligned = all(width * weight.element_size() % 16 == 0 for width in weight.shape[1:])
    return aligned and weight.dtype != torch.float64 and weight.device.type in ("cpu", "cuda")


class Experts(nn.Module):
    """SwiGLU experts of width f: y = sum over a token's k experts of weight * W_out (silu(W_gate x) * W_up x).

    limit: that of the clamped form (`nn/glu.py`); None: the plain one.
    """

    def __init__(self, d_model: int, *, d_expert: int, n_experts: int, top_k: int, limit: float | None = None):
        super().__init__()
        self.limit = limit
        self.gate_up = ExpertLinear(n_experts, top_k, d_model, 2 * d_expert)
        self.out = ExpertLinear(n_experts, top_k, d_expert, d_model)

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x (... d), the chosen experts (... k) and their weights (... k) -> (... d)."""
        tokens = x.flatten(0, -2).to(_matmul_dtype(x))
        weights, chosen = weights.flatten(0, -2), chosen.flatten(0, -2)
        # Hardly two of few rows share an expert whose weights sorting would read once. On meta no row has a place.
        few = len(chosen) == 1 or 2 * chosen.numel() <= self.out.n_experts
        alone = x.is_meta or (few and not torch.is_grad_enabled())
        mix = self._row_by_row if alone else self._sorted
        return mix(tokens, weights, chosen).view(x.shape)

    def _row_by_row(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        experts, k = chosen.flatten(), chosen.shape[-1]
        h = self._activate(self.gate_up.each(tokens.repeat_interleave(k, 0), experts), weights.flatten())
        return self.out.each(h, experts).unflatten(0, (-1, k)).sum(1)

    def _sorted(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        experts, order = chosen.flatten().sort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        ids = torch.arange(self.out.n_experts, device=order.device)
        ends = torch.searchsorted(experts, ids, right=True, out_int32=True)
        rows = _Dispatch.apply(tokens, order, place, chosen.shape[-1])
        h = self._activate(self.gate_up(rows, ends), weights.flatten().index_select(0, order))
        return _Combine.apply(self.out(h, ends), order, place, chosen.shape[-1])

    def _activate(self, h: Tensor, weights: Tensor) -> Tensor:
        """h (p 2f), weights (p,) -> (p f)."""
        return (glu(*h.chunk(2, dim=-1), self.limit) * weights[:, None]).to(h.dtype)


def _matmul_dtype(x: Tensor) -> torch.dtype:
    """What `x @ w` would compute in: autocast does not know the grouped product."""
    device = x.device.type
    casts = x.dtype != torch.float64 and is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if casts else x.dtype


class _Dispatch(torch.autograd.Function):
    """tokens (n d) -> rows (p d) in the order of their experts.

    Row i is number order[i] of the unsorted ones, of which token j has numbers j k to j k + k - 1; place is the inverse
    of order. Both directions gather: where one scatters, some devices leave the order of a sum to chance.
    """

    @staticmethod
    def forward(ctx, tokens: Tensor, order: Tensor, place: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order, place)
        ctx.k = k
        return tokens.index_select(0, order // k)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Combine.apply(grad, *ctx.saved_tensors, ctx.k), None, None, None


class _Combine(torch.autograd.Function):
    """The transpose of `_Dispatch`: rows (p d) -> the sum of each token's k rows (n d)."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, place: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order, place)
        ctx.k = k
        return rows.index_select(0, place).unflatten(0, (-1, k)).sum(1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _Dispatch.apply(grad, *ctx.saved_tensors, ctx.k), None, None, None


class Load(nn.Module):
    """Rows that each expert got in training forwards.

    Buffers: `current` (e,) since the last optimizer step, in checkpoints because a bias update may depend on it; `last`
    (e,) in the step before; `fresh`, whether this process has added to `current`.
    """

    def __init__(self, n_experts: int):
        super().__init__()
        self.register_buffer("current", torch.zeros(n_experts, dtype=torch.long))
        self.register_buffer("last", torch.zeros(n_experts, dtype=torch.long), persistent=False)
        self.register_buffer("fresh", torch.zeros((), dtype=torch.bool), persistent=False)

    def add(self, counts: Tensor) -> None:
        """counts (s e), of a forward in training mode; without gradients it is no training."""
        if torch.is_grad_enabled():
            self.current += counts.sum(0)
            self.fresh.fill_(True)

    def end_step(self) -> Tensor:
        """The load (e,) of the optimizer step that ends. Zeros where no forward has run since the last call; a load
        that a checkpoint brought from within a step then stays for that step's end."""
        load = self.current * self.fresh
        self.last.copy_(torch.where(self.fresh, load, self.last))
        self.current -= load
        self.fresh.fill_(False)
        return load

    def metrics(self) -> dict[str, float]:
        """Of the last step that trained: largest load over the mean, share of experts without a token, entropy (at
        most ln e)."""
        load = self.last.tolist()
        if not any(load):
            return {}
        shares = [count / sum(load) for count in load]
        return {
            "router_load_max_over_mean": max(shares) * len(shares),
            "router_dead_expert_share": load.count(0) / len(load),
            "router_load_entropy_nats": -sum(share * math.log(share) for share in shares if share),
        }


def expert_counts(chosen: Tensor, n_experts: int) -> Tensor:
    """chosen (s n k) -> rows of each expert (s e), int64."""
    rows = chosen.flatten(1)
    return rows.new_zeros(len(rows), n_experts).scatter_add_(1, rows, torch.ones_like(rows))


def balance_loss(probs: Tensor, counts: Tensor) -> Tensor:
    """e * sum_e share of rows * mean probability, averaged over s: 1 where routing is uniform, whatever k.

    probs (s n e), each token's summing to 1; counts (s e). Switch Transformer (Fedus et al. 2021, arXiv:2101.03961),
    equation 4, with the shares of DeepSeek (arXiv:2412.19437, equation 18), which are of rows and not of tokens.
    """
    shares = counts / counts.sum(-1, keepdim=True)
    return counts.shape[-1] * (shares * probs.mean(1)).sum(-1).mean()
