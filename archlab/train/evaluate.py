"""Quality on a held-out split. Auxiliary losses never enter a reported figure. `python -m archlab.evaluate --help`.

Shapes: b sequences, t tokens, v vocabulary.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from archlab.data import IGNORE, Dataset
from archlab.model import LM, eval_mode
from archlab.nn.precision import autocast, widest_dtype


@torch.no_grad()
def evaluate(
    model: LM, dataset: Dataset, split: str, *, batch_size: int, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """`quality/<split>_loss`: cross-entropy in nats, averaged over the targets that are not ignored, whatever the
    batch size. For text `quality/<split>_bits_per_byte`, over the bytes of those targets; for a task
    `quality/<split>_accuracy`, the share of those targets that have the highest logit.
    """
    token_bytes = None
    if dataset.codec is not None:
        token_bytes = torch.from_numpy(dataset.codec.token_bytes).to(device)
    total = torch.zeros(4, dtype=widest_dtype(device), device=device)  # nats, targets, hits, bytes
    with eval_mode(model), autocast(device, dtype):
        for inputs, targets in dataset.eval_batches(split, batch_size):
            total += _sums(model(inputs.to(device))[0], targets.to(device), token_bytes).to(total.dtype)
    nats, n, hits, n_bytes = total.tolist()
    values = {f"quality/{split}_loss": nats / n}
    if token_bytes is None:
        values[f"quality/{split}_accuracy"] = hits / n
    else:
        values[f"quality/{split}_bits_per_byte"] = nats / math.log(2) / n_bytes
    return values


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats of each target (b t), in float32 or wider; 0 where ignored."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
    return losses.view_as(targets)


def _sums(logits: Tensor, targets: Tensor, token_bytes: Tensor | None) -> Tensor:
    counted = targets != IGNORE
    nats = token_losses(logits, targets).to(widest_dtype(logits.device)).sum()
    hits = ((logits.argmax(dim=-1) == targets) & counted).sum()
    n_bytes = counted.sum() if token_bytes is None else (token_bytes[targets.clamp(min=0)] * counted).sum()
    return torch.stack([nats, counted.sum(), hits, n_bytes])
