"""What the trainer and the evaluation see of any source of tokens.

Shapes: b sequences of a batch, t = context tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from archlab.data.codec import Codec
from archlab.errors import UsageError

SPLITS = ("train", "val", "test")
IGNORE = -100
"""A target that no loss counts."""

Row = tuple[np.ndarray, np.ndarray]
"""Inputs and targets of one sequence: int64 (t)."""


class Dataset:
    """Training rows drawn at random, evaluation rows in order. A source gives `train_row`, `n_eval_rows`, `eval_row`.

    Row i of a split depends on the seed, i and the data alone, never on a model, a batch size or what was drawn before:
    two architectures see the same batches, and a resumed run finds its place by a number.

    Attributes:
        name: what the record calls the source.
        vocab_size: number of token ids.
        context: tokens of a sequence.
        n_tokens: tokens of each split; a split that is generated without end is absent.
        fingerprint: sha256 over the tokens and the settings that decide what is trained and evaluated on.
        codec: text to token ids and back; None for a task.
        warning: what a user must know of the data before training on it.
    """

    name: str
    vocab_size: int
    n_tokens: dict[str, int]
    fingerprint: str
    codec: Codec | None = None
    warning: str | None = None

    def __init__(self, *, context: int, eval_tokens: int | None):
        check_whole("data.context", context)
        if eval_tokens is not None:
            check_whole("data.eval_tokens", eval_tokens)
        self.context, self.eval_tokens = context, eval_tokens

    def train_row(self, rng: np.random.Generator) -> Row:
        raise NotImplementedError

    def n_eval_rows(self, split: str) -> int:
        raise NotImplementedError

    def eval_row(self, split: str, i: int) -> Row:
        raise NotImplementedError

    def longer(self) -> Iterable[Dataset]:
        """The same source at the further lengths at which it is to be tested: none unless a task names some."""
        return ()

    def batch(self, index: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
        """Training batch number `index`: inputs and targets (b t) int64 on the CPU, targets of -100 to be ignored."""
        rows = range(index * size, (index + 1) * size)
        return _stack(self.train_row(row_rng("train", seed, i)) for i in rows)

    def eval_batches(self, split: str, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The evaluation rows of a split in order, `size` at a time; the last batch may be shorter."""
        if split not in SPLITS:
            raise UsageError(f"unknown split {split!r}; known: {', '.join(SPLITS)}")
        n = self.n_eval_rows(split)
        for start in range(0, n, size):
            yield _stack(self.eval_row(split, i) for i in range(start, min(start + size, n)))


def check_whole(name: str, value: int, least: int = 1) -> None:
    """Refuse what is not a whole number of at least `least` with a UsageError that names it."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{name}={value}: give a whole number of at least {least}")


def row_rng(split: str, seed: int, i: int) -> np.random.Generator:
    """The generator of one row, so that any row can be had without those before it."""
    if seed < 0:
        raise UsageError(f"seed={seed}: give a whole number of at least 0")
    return np.random.default_rng([SPLITS.index(split), seed, i])


def _stack(rows: Iterable[Row]) -> tuple[Tensor, Tensor]:
    inputs, targets = zip(*rows, strict=True)
    return torch.from_numpy(np.stack(inputs)), torch.from_numpy(np.stack(targets))
