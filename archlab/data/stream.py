"""Sequences cut from a text: random windows to train on, consecutive ones to evaluate on."""

import hashlib
import json
import math

import numpy as np

from archlab.data.base import IGNORE, Dataset, Row
from archlab.data.codec import Codec
from archlab.errors import UsageError


class TokenStream(Dataset):
    """Next-token prediction over one stream of tokens a split.

    Evaluation covers a split in windows side by side, each token predicted once; beyond `eval_tokens` it takes evenly
    spaced windows of them.

    Args:
        splits: token ids (n) of "train", "val" and "test"; at least context + 1 to train on, 2 to evaluate on.
        eval_tokens: most tokens of a split that an evaluation reads; None: all.
    """

    def __init__(
        self, *, name: str, codec: Codec, splits: dict[str, np.ndarray], context: int, eval_tokens: int | None
    ):
        super().__init__(context=context, eval_tokens=eval_tokens)
        self.name, self.codec, self.vocab_size, self.splits = name, codec, codec.vocab_size, splits
        for split, tokens in splits.items():
            needed = context + 1 if split == "train" else 2
            if len(tokens) < needed:
                raise UsageError(f"the {split} split of data={name} holds {len(tokens)} tokens; it needs {needed}")
            if tokens.max() >= self.vocab_size:
                raise UsageError(
                    f"token id {tokens.max()} of data={name} is outside its vocabulary of {self.vocab_size}"
                )
        self.n_tokens = {split: len(tokens) for split, tokens in splits.items()}
        self.fingerprint = self._fingerprint()

    def train_row(self, rng: np.random.Generator) -> Row:
        tokens = self.splits["train"]
        start = rng.integers(len(tokens) - self.context)
        window = tokens[start : start + self.context + 1].astype(np.int64)
        return window[:-1], window[1:]

    def _n_windows(self, split: str) -> int:
        return math.ceil((self.n_tokens[split] - 1) / self.context)

    def n_eval_rows(self, split: str) -> int:
        n = self._n_windows(split)
        return n if self.eval_tokens is None else min(n, max(1, self.eval_tokens // self.context))

    def eval_row(self, split: str, i: int) -> Row:
        start = i * self._n_windows(split) // self.n_eval_rows(split) * self.context
        window = self.splits[split][start : start + self.context + 1]
        inputs, targets = np.zeros(self.context, np.int64), np.full(self.context, IGNORE, np.int64)
        inputs[: len(window) - 1], targets[: len(window) - 1] = window[:-1], window[1:]
        return inputs, targets

    def _fingerprint(self) -> str:
        settings = {"context": self.context, "eval_tokens": self.eval_tokens, "n_tokens": self.n_tokens}
        digest = hashlib.sha256(json.dumps([settings, self.codec.to_json()]).encode())
        for tokens in self.splits.values():
            digest.update(np.ascontiguousarray(tokens))
        return digest.hexdigest()
