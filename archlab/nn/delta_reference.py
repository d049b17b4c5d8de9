"""The gated delta rule, written as it is defined: the reference that the fast forms are held to.

Shapes: b batch, t tokens, h heads, k key width, v value width.
"""

import torch
from torch import Tensor


def delta_rule_reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Token after token: the state decays, learns by how much it recalls the value wrongly, and is read.

    Arguments and results are those of `archlab.nn.delta_rule.delta_rule`; here every product is spelled out.
    """
    outputs = []
    for i in range(q.shape[1]):
        q_i, k_i, v_i = q[:, i, :, :, None], k[:, i, :, :, None], v[:, i, :, None, :]
        if g is not None:
            state = g[:, i, :, :, None].exp() * state
        if beta is not None:
            recalled = (k_i * state).sum(dim=2, keepdim=True)
            v_i = beta[:, i, :, None, None] * (v_i - recalled)
        state = state + k_i * v_i
        outputs.append((q_i * state).sum(dim=2))
    return torch.stack(outputs, dim=1), state
