"""Multi-query associative recall (Arora et al. 2023, "Zoology", arXiv:2312.04927, section 4 and appendix)."""

import hashlib
import json

import numpy as np

from archlab.data.base import IGNORE, Dataset, Row, check_whole, row_rng
from archlab.errors import UsageError

FINGERPRINTED_TRAIN_ROWS = 64


class MultiQueryRecall(Dataset):
    """n key-value pairs, then each key once more, where its value is to be recalled.

        k1 v1 k2 v2 ... kn vn   x  x  k2 x  k1 x ...

    Keys are drawn from 1 .. V/2 - 1, values from V/2 .. V - 1, both without replacement. A key reappears an even number
    2g of tokens after the pairs, g drawn without replacement with probability ~ (g + 1)^(power - 1). The target at its
    position is its value; every other target is ignored. Training rows never repeat; evaluation rows are fixed.

    Args:
        vocab_size: V.
        n_pairs: n, at most context / 4.
        power: the smaller, the nearer the queries follow the pairs.
        random_fillers: the slots x are random tokens, else 0.
        eval_tokens: tokens of the rows of each held-out split.
    """

    name = "mqar"

    def __init__(
        self,
        *,
        vocab_size: int,
        context: int,
        n_pairs: int,
        power: float = 0.01,
        random_fillers: bool = True,
        eval_tokens: int = 65536,
    ):
        super().__init__(context=context, eval_tokens=eval_tokens)
        check_whole("data.vocab_size", vocab_size)
        check_whole("data.n_pairs", n_pairs)
        if 4 * n_pairs > context:
            raise UsageError(f"data.n_pairs={n_pairs} needs data.context of at least {4 * n_pairs}, not {context}")
        if n_pairs > vocab_size // 2 - 1:
            raise UsageError(f"data.n_pairs={n_pairs} distinct keys need data.vocab_size={2 * n_pairs + 2} or more")
        self.vocab_size, self.n_pairs, self.random_fillers = vocab_size, n_pairs, random_fillers
        weight = np.arange(1, (context - 2 * n_pairs) // 2 + 1) ** (power - 1.0)
        self._gap_probability = weight / weight.sum()
        self.n_tokens = {split: self.n_eval_rows(split) * context for split in ("val", "test")}
        self.fingerprint = self._fingerprint(power)

    def train_row(self, rng: np.random.Generator) -> Row:
        n, half = self.n_pairs, self.vocab_size // 2
        keys = 1 + rng.choice(half - 1, n, replace=False)
        values = half + rng.choice(self.vocab_size - half, n, replace=False)
        gaps = rng.choice(len(self._gap_probability), n, replace=False, p=self._gap_probability)
        fillers = rng.integers(self.vocab_size, size=self.context)
        inputs = fillers if self.random_fillers else np.zeros_like(fillers)
        targets = np.full_like(inputs, IGNORE)
        inputs[0 : 2 * n : 2], inputs[1 : 2 * n : 2] = keys, values
        queries = 2 * n + 2 * gaps
        inputs[queries], targets[queries] = keys, values
        return inputs, targets

    def n_eval_rows(self, split: str) -> int:
        return max(1, self.eval_tokens // self.context)

    def eval_row(self, split: str, i: int) -> Row:
        return self.train_row(row_rng(split, 0, i))

    def _fingerprint(self, power: float) -> str:
        settings = [self.vocab_size, self.context, self.n_pairs, power, self.random_fillers, self.eval_tokens]
        digest = hashlib.sha256(json.dumps([self.name, settings]).encode())
        n_rows = {"train": FINGERPRINTED_TRAIN_ROWS} | {split: self.n_eval_rows(split) for split in self.n_tokens}
        for split, n in n_rows.items():
            for i in range(n):
                digest.update(np.concatenate(self.eval_row(split, i)))
        return digest.hexdigest()
