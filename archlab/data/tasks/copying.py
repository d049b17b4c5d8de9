"""Copying and its mirror image: a string, a separator, the string again, forwards or backwards."""

from collections.abc import Sequence

import numpy as np

from archlab.data.tasks.task import Task, blank
from archlab.errors import UsageError


class Copy(Task):
    """x1 ... xn | x1 ... xn (Jelassi et al. 2024, arXiv:2402.01032). Loss on what follows the separator 0; the string
    is of 1 .. V - 1.

    Example (n = 3): inputs 5 2 7 0 5 2, targets - - - 5 2 7.

    Slices: which of the n tokens is asked for, from 0 ("place").

    Args:
        vocab_size: V.
        context: tokens of a row, even: n = context / 2.
        eval_tokens, test_contexts: as of every task.
    """

    name = "copy"
    slice_name = "place"
    backwards = False

    def __init__(self, *, vocab_size: int, context: int, eval_tokens: int = 65536, test_contexts: Sequence[int] = ()):
        super().__init__(vocab_size=vocab_size, context=context, eval_tokens=eval_tokens, test_contexts=test_contexts)
        if context % 2:
            raise UsageError(f"data.context={context}: a string and its copy take an even number of tokens")
        self.finish()

    def row(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        n = self.context // 2
        inputs, targets, slices = blank(self.context)
        string = rng.integers(1, self.vocab_size, n)
        said = string[::-1] if self.backwards else string
        inputs[:n], inputs[n + 1 :] = string, said[:-1]
        targets[n:], slices[n:] = said, np.arange(n)
        return inputs, targets, slices


class Palindrome(Copy):
    """x1 ... xn | xn ... x1 (Kimi Linear, arXiv:2510.26692, synthetic tests): the last token is asked for first.

    Example (n = 3): inputs 5 2 7 0 7 2, targets - - - 7 2 5.
    """

    name = "palindrome"
    backwards = True
