"""A needle in a haystack (the passkey form of RULER, Hsieh et al. 2024, arXiv:2404.06654)."""

from collections.abc import Sequence

import numpy as np

from archlab.data.base import check_whole
from archlab.data.tasks.task import Task, blank
from archlab.errors import UsageError


class Needle(Task):
    """Somewhere in a long row stands a marker and a passkey; at the end, the marker stands again and asks for it.

        x x x M p1 p2 x x x x M p1        targets from the last M on: p1 p2

    0 is the marker, the hay x and the passkey are of 1 .. V - 1: the marker alone tells where to look.

    Example (2 passkey tokens): inputs 4 0 7 2 5 1 0 7, targets - - - - - - 7 2.

    Slices: where the needle stands, in tenths of the row from its start ("depth").

    Args:
        vocab_size: V.
        context: tokens of a row.
        n_passkey_tokens: how many tokens are asked for.
        eval_tokens, test_contexts: as of every task.
    """

    name = "needle"
    slice_name = "depth"

    def __init__(
        self,
        *,
        vocab_size: int,
        context: int,
        n_passkey_tokens: int = 1,
        eval_tokens: int = 65536,
        test_contexts: Sequence[int] = (),
    ):
        super().__init__(vocab_size=vocab_size, context=context, eval_tokens=eval_tokens, test_contexts=test_contexts)
        check_whole("data.n_passkey_tokens", n_passkey_tokens)
        if context < 2 * n_passkey_tokens + 2:
            raise UsageError(
                f"data.context={context}: a needle of {n_passkey_tokens} tokens needs {2 * n_passkey_tokens + 2}"
            )
        self.n_passkey_tokens = n_passkey_tokens
        self.finish()

    def row(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        n, end = self.n_passkey_tokens, self.context - self.n_passkey_tokens
        inputs, targets, slices = blank(self.context)
        inputs[:] = rng.integers(1, self.vocab_size, self.context)
        at = int(rng.integers(0, end - n))
        passkey = inputs[at + 1 : at + 1 + n].copy()
        inputs[at], inputs[end], inputs[end + 1 :] = 0, 0, passkey[:-1]
        targets[end:], slices[end:] = passkey, 10 * at // (end - n)
        return inputs, targets, slices
