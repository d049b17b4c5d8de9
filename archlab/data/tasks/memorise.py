"""Memorisation (Poli et al. 2024, "MAD", arXiv:2403.17844): facts that stand in no context, only in the weights."""

from collections.abc import Sequence

import numpy as np

from archlab.data.tasks.task import Task, blank
from archlab.errors import UsageError


class Memorise(Task):
    """One fixed map from keys to values for all rows; a row shows keys alone, each before a token that asks.

        k1 ? k2 ? ...        targets at each ?: the values

    The map is drawn once, from a generator of `map_seed`; no row shows a value, so that parameters must hold it.

    Example: inputs 3 0 7 0, targets - 12 - 9.

    Slices: the key ("key").

    Args:
        vocab_size: V, even: 0 asks, 1 .. V/2 - 1 are keys, V/2 .. V - 1 values.
        context: tokens of a row, even.
        map_seed: which map; the same for every seed of a run.
        eval_tokens, test_contexts: as of every task.
    """

    name = "memorise"
    slice_name = "key"

    def __init__(
        self,
        *,
        vocab_size: int,
        context: int,
        map_seed: int = 0,
        eval_tokens: int = 65536,
        test_contexts: Sequence[int] = (),
    ):
        super().__init__(vocab_size=vocab_size, context=context, eval_tokens=eval_tokens, test_contexts=test_contexts)
        for name, value in {"vocab_size": vocab_size, "context": context}.items():
            if value % 2:
                raise UsageError(f"data.{name}={value}: give an even number")
        self.map_seed = map_seed
        half = vocab_size // 2
        self._value_of = half + np.random.default_rng(map_seed).permutation(half)
        self.finish()

    def row(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        inputs, targets, slices = blank(self.context)
        keys = rng.integers(1, self.vocab_size // 2, self.context // 2)
        inputs[::2], targets[1::2], slices[1::2] = keys, self._value_of[keys], keys
        return inputs, targets, slices
