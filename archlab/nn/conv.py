"""Causal depthwise convolution over a few tokens, with its own history.

Shapes: b batch, t tokens, c channels, w width in tokens.
"""

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from archlab.errors import UsageError


class ShortConv(nn.Module):
    """Each output channel is a weighted sum of its own input at the token and at the `size` - 1 tokens before it.

    weight (size channels): its last row weighs the token itself. No bias. Before the first token the input is 0.
    """

    def __init__(self, channels: int, size: int):
        super().__init__()
        self.size = size
        self.weight = nn.Parameter(torch.empty(size, channels))
        nn.init.uniform_(self.weight, -(size**-0.5), size**-0.5)

    def init_history(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The inputs before the first token: zeros (b size-1 c), oldest first."""
        return torch.zeros(batch, self.size - 1, self.weight.shape[1], device=device, dtype=dtype)

    def forward(self, x: Tensor, history: Tensor | None = None) -> Tensor:
        """x (b t c) -> (b t c) in the wider dtype of input and weight; a `history` is read, then moved on by t tokens
        in place."""
        if history is None:
            seen = nn.functional.pad(x, (0, 0, self.size - 1, 0))
        else:
            seen = torch.cat([history, x], dim=1)
            history.copy_(seen[:, x.shape[1] :])
        if x.shape[1] == 1:
            return (seen * self.weight).sum(dim=1, keepdim=True)
        return SlidingSum.apply(seen.to(torch.promote_types(seen.dtype, self.weight.dtype)), self.weight)


def build_conv(channels: int, size: int) -> ShortConv | None:
    """A convolution over `size` tokens, or None for 0. Errors: UsageError for a size below 0."""
    if size < 0:
        raise UsageError(f"conv_size={size}: give the tokens that a convolution sees, or 0 for none")
    return ShortConv(channels, size) if size else None


def init_history(
    conv: ShortConv | None, batch: int, channels: int, *, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """The history of a convolution that may be none: then (b 0 c), which holds nothing and weighs nothing."""
    if conv is None:
        return torch.zeros(batch, 0, channels, device=device, dtype=dtype)
    return conv.init_history(batch, device=device, dtype=dtype)


class SlidingSum(Function):
    """y[i] = sum_j x[i + j] w[j] of x (b t+w-1 c) and w (w c) -> (b t c): tokens and channels stay as the linear layers
    around have them, where a library's convolution would transpose them."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        t = x.shape[1] - len(w) + 1
        y = x[:, :t] * w[0]
        for j in range(1, len(w)):
            y.addcmul_(x[:, j : j + t], w[j])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, d_y: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        d_x, t = torch.zeros_like(x), d_y.shape[1]
        for j in range(len(w)):
            d_x[:, j : j + t].addcmul_(d_y, w[j])
        d_w = torch.stack([(d_y * x[:, j : j + t]).sum(dim=(0, 1)) for j in range(len(w))])
        return d_x, d_w
