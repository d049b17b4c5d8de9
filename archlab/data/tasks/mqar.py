"""Multi-query associative recall (Arora et al. 2023, "Zoology", arXiv:2312.04927, section 4 and appendix)."""

from collections.abc import Sequence

import numpy as np

from archlab.data.base import check_whole
from archlab.data.tasks.task import Task, blank, others
from archlab.errors import UsageError


class MultiQueryRecall(Task):
    """n key-value pairs, then each key once more, where its value is to be recalled.

        k1 v1 k2 v2 ... kn vn   x  x  k2 x  k1 x ...

    Keys are drawn from 1 .. V/2 - 1, values from V/2 .. V - 1, both without replacement. A key reappears an even number
    2g of tokens after the pairs, g drawn without replacement with probability ~ (g + 1)^(power - 1). The target at its
    position is its value; every other target is ignored. No filler x is a key of its row, or it would bind that key
    to what follows.

    With `n_forgotten` f, f of the n pairs assign a new value to a key that an earlier pair bound (the "forgetting" form
    of the zoology repository); the latest value is the answer. Such a row has n - f keys, and as many queries.

    Example (n = 2): inputs 3 9 5 8 0 0 5 0 3 0, targets - - - - - - 8 - 9 -.

    Slices: the tokens between a key's value and its query ("distance").

    Args:
        vocab_size: V.
        n_pairs: n, at most context / 4.
        n_forgotten: f, at most half of n.
        power: the smaller, the nearer the queries follow the pairs.
        random_fillers: the slots x are random tokens, else 0.
        eval_tokens: tokens of the rows of each held-out split.
        test_contexts: lengths at which the test split is evaluated beside that of training.
    """

    name = "mqar"
    slice_name = "distance"

    def __init__(
        self,
        *,
        vocab_size: int,
        context: int,
        n_pairs: int,
        n_forgotten: int = 0,
        power: float = 0.01,
        random_fillers: bool = True,
        eval_tokens: int = 65536,
        test_contexts: Sequence[int] = (),
    ):
        super().__init__(vocab_size=vocab_size, context=context, eval_tokens=eval_tokens, test_contexts=test_contexts)
        check_whole("data.n_pairs", n_pairs)
        check_whole("data.n_forgotten", n_forgotten, 0)
        if 4 * n_pairs > context:
            raise UsageError(f"data.n_pairs={n_pairs} needs data.context of at least {4 * n_pairs}, not {context}")
        if n_pairs > vocab_size // 2 - 1:
            raise UsageError(f"data.n_pairs={n_pairs} distinct keys need data.vocab_size={2 * n_pairs + 2} or more")
        if 2 * n_forgotten > n_pairs:
            raise UsageError(f"data.n_forgotten={n_forgotten}: at most half of data.n_pairs={n_pairs} assign anew")
        self.n_pairs, self.n_forgotten, self.power, self.random_fillers = n_pairs, n_forgotten, power, random_fillers
        weight = np.arange(1, (context - 2 * n_pairs) // 2 + 1) ** (power - 1.0)
        self._gap_probability = weight / weight.sum()
        self.finish()

    def row(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        n, half, n_keys = self.n_pairs, self.vocab_size // 2, self.n_pairs - self.n_forgotten
        keys = 1 + rng.choice(half - 1, n_keys, replace=False)
        values = half + rng.choice(self.vocab_size - half, n, replace=False)
        bound = np.concatenate([keys, rng.choice(keys, self.n_forgotten, replace=False)])  # the key of each pair
        last = {key: i for i, key in enumerate(bound)}
        gaps = rng.choice(len(self._gap_probability), n_keys, replace=False, p=self._gap_probability)
        inputs, targets, slices = blank(self.context)
        if self.random_fillers:
            inputs[:] = others(rng, 0, self.vocab_size, keys, self.context)
        inputs[0 : 2 * n : 2], inputs[1 : 2 * n : 2] = bound, values
        queries, answers = 2 * n + 2 * gaps, np.array([last[key] for key in keys])
        inputs[queries], targets[queries] = keys, values[answers]
        slices[queries] = queries - (2 * answers + 1)
        return inputs, targets, slices
