"""What all synthetic tasks share: rows drawn from a generator, held-out rows that never change, accuracy by slice."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from archlab.data.base import IGNORE, Dataset, Row, check_whole, row_rng

FINGERPRINTED_TRAIN_ROWS = 64


class Task(Dataset):
    """A task gives `row`: one sequence, its targets, and for each target the slice that its accuracy is counted in.

    Training rows never repeat: row i comes from a generator of its own, of the seed and i. The rows of the validation
    and the test split are drawn from other generators and are the same for every seed.

    Attributes:
        slice_name: what the slices are, such as "distance"; its values are whole numbers.
        test_contexts: lengths in tokens, beside the training's, at which the test split is evaluated too.
    """

    slice_name: ClassVar[str]

    def __init__(self, *, vocab_size: int, context: int, eval_tokens: int, test_contexts: Sequence[int] = ()):
        super().__init__(context=context, eval_tokens=eval_tokens)
        check_whole("data.vocab_size", vocab_size, 4)
        for length in test_contexts:
            check_whole("data.test_contexts", length)
        self.vocab_size, self.test_contexts = vocab_size, tuple(test_contexts)

    def row(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Inputs, targets and slices of one sequence, each int64 (context); targets of -100 and their slices do not
        count."""
        raise NotImplementedError

    def finish(self) -> None:
        """Called last in a constructor: what follows from the rows."""
        self.n_tokens = {split: self.n_eval_rows(split) * self.context for split in ("val", "test")}
        self.fingerprint = self._fingerprint()

    def train_row(self, rng: np.random.Generator) -> Row:
        return self.row(rng)[:2]

    def n_eval_rows(self, split: str) -> int:
        return max(1, (self.eval_tokens or self.context) // self.context)

    def eval_row(self, split: str, i: int) -> Row:
        return self._eval_row(split, i)[:2]

    def eval_slices(self, split: str, size: int) -> Iterator[np.ndarray]:
        """The slices (b t) of the batches that `eval_batches` yields."""
        n = self.n_eval_rows(split)
        for start in range(0, n, size):
            yield np.stack([self._eval_row(split, i)[2] for i in range(start, min(start + size, n))])

    def longer(self) -> Iterator[Task]:
        """The task at each of `test_contexts`, its other settings as they are."""
        for length in self.test_contexts:
            eval_tokens = (self.eval_tokens or self.context) * length // self.context  # as many rows
            yield type(self)(**self._settings() | {"context": length, "eval_tokens": eval_tokens, "test_contexts": ()})

    def _eval_row(self, split: str, i: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.row(row_rng(split, 0, i))

    def _settings(self) -> dict[str, Any]:
        """The arguments that it was made with: a task keeps each under its name."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(json.dumps([self.name, self._settings()], sort_keys=True, default=list).encode())
        n_rows = {"train": FINGERPRINTED_TRAIN_ROWS} | {split: self.n_eval_rows(split) for split in self.n_tokens}
        for split, n in n_rows.items():
            for i in range(n):
                digest.update(np.concatenate(self._eval_row(split, i)))
        return digest.hexdigest()


def blank(context: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs of 0, targets that do not count, slices of 0: int64 (context) each."""
    return np.zeros(context, np.int64), np.full(context, IGNORE, np.int64), np.zeros(context, np.int64)


def others(rng: np.random.Generator, low: int, high: int, taken: np.ndarray, n: int) -> np.ndarray:
    """n tokens of low .. high - 1 that are none of `taken` (distinct, within those bounds), with replacement."""
    taken = np.sort(taken)
    drawn = rng.integers(low, high - len(taken), n)
    return drawn + np.searchsorted(taken - np.arange(len(taken)), drawn, side="right")
