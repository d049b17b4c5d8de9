"""Selective copying (Gu & Dao 2023, "Mamba", arXiv:2312.00752; Jing et al. 2019): copy the tokens, not the blanks."""

from collections.abc import Sequence

import numpy as np

from archlab.data.base import check_whole
from archlab.data.tasks.task import Task, blank
from archlab.errors import UsageError


class SelectiveCopy(Task):
    """n tokens to be copied, blanks at random places among them; after a marker, they are to be said in order.

        a _ _ b _ c _ _ M        targets from M on: a b c

    0 is the blank, 1 the marker, 2 .. V - 1 the tokens. Where a token stands depends on the row, so what to keep must
    be decided from what is read.

    Example (n = 2): inputs 0 5 0 0 3 0 1 5, targets - - - - - - 5 3.

    Slices: which of the n tokens is asked for, from 0 ("place").

    Args:
        vocab_size: V.
        context: tokens of a row: the part to read, the marker, and n - 1 answers that are shown.
        n_tokens_to_copy: n.
        eval_tokens, test_contexts: as of every task.
    """

    name = "selective_copy"
    slice_name = "place"

    def __init__(
        self,
        *,
        vocab_size: int,
        context: int,
        n_tokens_to_copy: int,
        eval_tokens: int = 65536,
        test_contexts: Sequence[int] = (),
    ):
        super().__init__(vocab_size=vocab_size, context=context, eval_tokens=eval_tokens, test_contexts=test_contexts)
        check_whole("data.n_tokens_to_copy", n_tokens_to_copy)
        if context < 2 * n_tokens_to_copy:
            raise UsageError(f"data.context={context}: copying {n_tokens_to_copy} tokens takes {2 * n_tokens_to_copy}")
        self.n_tokens_to_copy = n_tokens_to_copy
        self.finish()

    def row(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        n, end = self.n_tokens_to_copy, self.context - self.n_tokens_to_copy
        inputs, targets, slices = blank(self.context)
        kept = rng.integers(2, self.vocab_size, n)
        inputs[np.sort(rng.choice(end, n, replace=False))] = kept
        inputs[end], inputs[end + 1 :] = 1, kept[:-1]
        targets[end:], slices[end:] = kept, np.arange(n)
        return inputs, targets, slices
