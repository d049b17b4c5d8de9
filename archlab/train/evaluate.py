"""Quality on a held-out split. Auxiliary losses never enter a reported figure. `python -m archlab.evaluate --help`.

Shapes: b sequences, t tokens, v vocabulary.
"""

import itertools
import math
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from archlab.data import IGNORE, Dataset
from archlab.data.tasks.task import Task
from archlab.model import LM, eval_mode
from archlab.nn.precision import autocast, widest_dtype

MOST_SLICES = 16


@dataclass(frozen=True)
class Sums:
    """What an evaluation found, a row for each sequence of the split: float64 (n) each.

    Attributes:
        nats: cross-entropy summed over the sequence's targets.
        targets: how many count.
        hits: how many of them have the highest logit.
        n_bytes: of text that they stand for; of a task, the targets again.
        slices: {slice: [hits, targets]} over the whole split, of a task.
    """

    nats: np.ndarray
    targets: np.ndarray
    hits: np.ndarray
    n_bytes: np.ndarray
    slices: dict[int, list[int]]


def evaluate(
    model: LM, dataset: Dataset, split: str, *, batch_size: int, device: torch.device, dtype: torch.dtype
) -> dict[str, float]:
    """The entries of the record of one split: see `entries`."""
    sums = measure(model, dataset, split, batch_size=batch_size, device=device, dtype=dtype)
    return entries(sums, dataset, split)


@torch.no_grad()
def measure(
    model: LM, dataset: Dataset, split: str, *, batch_size: int, device: torch.device, dtype: torch.dtype
) -> Sums:
    """Every sequence of a split once, in order, `batch_size` at a time."""
    token_bytes = None
    if dataset.codec is not None:
        token_bytes = torch.from_numpy(dataset.codec.token_bytes).to(device)
    slices = dataset.eval_slices(split, batch_size) if isinstance(dataset, Task) else itertools.repeat(None)
    rows, by_slice = [], defaultdict(lambda: [0, 0])
    with eval_mode(model), autocast(device, dtype):
        for (inputs, targets), places in zip(dataset.eval_batches(split, batch_size), slices, strict=False):
            logits, targets = model(inputs.to(device))[0], targets.to(device)
            rows.append(_sums(logits, targets, token_bytes).to("cpu", torch.float64))
            if places is not None:
                _add_slices(by_slice, logits.argmax(-1) == targets, targets, places)
    return Sums(*torch.cat(rows, dim=1).numpy(), slices=dict(by_slice))


def entries(sums: Sums, dataset: Dataset, split: str) -> dict[str, float]:
    """`quality/<split>_loss`: cross-entropy in nats, averaged over the targets that are not ignored, whatever the
    batch size. For text `quality/<split>_bits_per_byte`, over the bytes of those targets; for a task
    `quality/<split>_accuracy`, the share of those targets that have the highest logit, and of the test split
    `quality/test_accuracy_at/<slice>/<value>`, the same of the targets of one slice.
    """
    nats, n = sums.nats.sum(), sums.targets.sum()
    values = {f"quality/{split}_loss": float(nats / n)}
    if dataset.codec is not None:
        return values | {f"quality/{split}_bits_per_byte": float(nats / math.log(2) / sums.n_bytes.sum())}
    values[f"quality/{split}_accuracy"] = float(sums.hits.sum() / n)
    if split == "test" and isinstance(dataset, Task):
        for value, (hits, targets) in sorted(_binned(sums.slices).items()):
            values[f"quality/test_accuracy_at/{dataset.slice_name}/{value}"] = hits / targets
    return values


def _add_slices(by_slice: dict[int, list[int]], hit: Tensor, targets: Tensor, places: np.ndarray) -> None:
    counted = (targets != IGNORE).cpu().numpy()
    for value, was_hit in zip(places[counted].tolist(), hit.cpu().numpy()[counted].tolist(), strict=True):
        by_slice[value][0] += was_hit
        by_slice[value][1] += 1


def _binned(slices: dict[int, list[int]]) -> dict[int, list[int]]:
    """Slices of more values than a table can show, by powers of two: each named after its least value."""
    if len(slices) <= MOST_SLICES:
        return slices
    bins: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for value, counts in slices.items():
        least = 1 << (value.bit_length() - 1) if value > 0 else 0
        bins[least] = [a + b for a, b in zip(bins[least], counts, strict=True)]
    return bins


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats of each target (b t), in float32 or wider; 0 where ignored."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="none")
    return losses.view_as(targets)


def _sums(logits: Tensor, targets: Tensor, token_bytes: Tensor | None) -> Tensor:
    """Nats, targets, hits and bytes of each sequence (4 b)."""
    counted = targets != IGNORE
    wide = widest_dtype(logits.device)
    nats = token_losses(logits, targets).to(wide).sum(1)
    hits = ((logits.argmax(dim=-1) == targets) & counted).sum(1)
    n_bytes = counted if token_bytes is None else token_bytes[targets.clamp(min=0)] * counted
    return torch.stack([x.to(wide) for x in (nats, counted.sum(1), hits, n_bytes.sum(1))])
