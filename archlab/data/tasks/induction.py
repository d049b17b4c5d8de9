"""Induction heads (Olsson et al. 2022, arXiv:2209.11895; as a task in Gu & Dao 2023, "Mamba", arXiv:2312.00752)."""

from collections.abc import Sequence

import numpy as np

from archlab.data.base import check_whole
from archlab.data.tasks.task import Task, blank
from archlab.errors import UsageError


class Induction(Task):
    """Random tokens, a special one among them, and the token behind it; at the special token's next occurrence, which
    ends the row, that token is to be said.

        x x x S a x x x x S      target at the last position: a

    The special token is 0, the others 1 .. V - 1. Every row asks once, at its end.

    Example: inputs 4 2 0 7 3 1 6 0, target of the last 7.

    Slices: the tokens between the answer and the question ("distance").

    Args:
        vocab_size: V; 16 in the paper.
        context: tokens of a row; 256 in the paper.
        n_asked: how often the special token asks again, at random places and at the end; 1 in the paper. More train
            faster, and each asks for the same token.
        eval_tokens, test_contexts: as of every task.
    """

    name = "induction"
    slice_name = "distance"

    def __init__(
        self,
        *,
        vocab_size: int,
        context: int,
        n_asked: int = 1,
        eval_tokens: int = 65536,
        test_contexts: Sequence[int] = (),
    ):
        super().__init__(vocab_size=vocab_size, context=context, eval_tokens=eval_tokens, test_contexts=test_contexts)
        check_whole("data.n_asked", n_asked)
        if context < 2 * n_asked + 2:
            raise UsageError(f"data.context={context}: a row that asks {n_asked} times needs {2 * n_asked + 2} tokens")
        self.n_asked = n_asked
        self.finish()

    def row(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        t = self.context
        inputs, targets, slices = blank(t)
        inputs[:] = rng.integers(1, self.vocab_size, t)
        first = int(rng.integers(0, t - 2 * self.n_asked))
        free = np.arange(first + 2, t - 2)
        again = np.concatenate([_no_neighbours(rng, free, self.n_asked - 1), [t - 1]]).astype(np.int64)
        answer = inputs[first + 1]
        inputs[first], inputs[again], targets[again] = 0, 0, answer
        inputs[again[:-1] + 1] = answer  # what a text would say: the answer follows each question
        slices[again] = again - (first + 1)
        return inputs, targets, slices


def _no_neighbours(rng: np.random.Generator, places: np.ndarray, n: int) -> np.ndarray:
    """n of the places, sorted, no two side by side."""
    gaps = np.sort(rng.choice(len(places) - n + 1, n, replace=False)) if n else np.zeros(0, np.int64)
    return places[gaps + np.arange(n)] if n else gaps
