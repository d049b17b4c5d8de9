"""In-context recall over a stream of pairs (Poli et al. 2024, "MAD", arXiv:2403.17844): noisy, and with fuzzy keys.

A row binds each key to one value, at random, and shows pairs again and again; a value is asked for wherever its key was
bound before.
"""

from collections.abc import Sequence

import numpy as np

from archlab.data.base import check_whole
from archlab.data.tasks.task import Task, blank
from archlab.errors import UsageError


class NoisyRecall(Task):
    """Pairs of a key and its value, and noise tokens between them; a value is asked for where its key was seen before.

        k1 v1 k2 v2 z k1 v1 z z k2 v2        targets at the second k1 and k2

    The vocabulary is half keys, half values, and above them the noise, so that a noise token is never a key.

    Example: inputs 1 9 2 8 17 1 9 2, targets - - - - - 9 - 8.

    Slices: how many pairs were shown since the key's last ("distance").

    Args:
        vocab_size: keys and values, without the noise: even.
        context: tokens of a row.
        n_noise_tokens: other tokens, that mean nothing; 0: the plain in-context recall of MAD.
        noise_fraction: the share of places that hold noise in place of a pair.
        eval_tokens, test_contexts: as of every task.
    """

    name = "noisy_recall"
    slice_name = "distance"

    def __init__(
        self,
        *,
        vocab_size: int,
        context: int,
        n_noise_tokens: int = 16,
        noise_fraction: float = 0.2,
        eval_tokens: int = 65536,
        test_contexts: Sequence[int] = (),
    ):
        super().__init__(vocab_size=vocab_size, context=context, eval_tokens=eval_tokens, test_contexts=test_contexts)
        check_whole("data.n_noise_tokens", n_noise_tokens, 0)
        if vocab_size % 2:
            raise UsageError(f"data.vocab_size={vocab_size}: half are keys and half values; give an even number")
        if not 0 <= noise_fraction < 1 or (noise_fraction and not n_noise_tokens):
            raise UsageError(
                f"data.noise_fraction={noise_fraction}: give a share in [0, 1), and 0 where data.n_noise_tokens=0"
            )
        if context < 4:
            raise UsageError(f"data.context={context}: a pair and its repetition take 4 tokens")
        self.n_noise_tokens, self.noise_fraction = n_noise_tokens, noise_fraction
        self.n_symbols, self.vocab_size = vocab_size, vocab_size + n_noise_tokens
        self.finish()

    def _settings(self):
        return super()._settings() | {"vocab_size": self.n_symbols}

    def row(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        inputs, targets, slices = blank(self.context)
        half = self.n_symbols // 2
        value_of = half + rng.integers(half, size=half)
        shown: dict[int, int] = {}
        at = n_pairs = 0
        while at < self.context:
            asks_at_last = at >= self.context - 2 and not (targets >= 0).any()
            if at == self.context - 1 or (not asks_at_last and rng.random() < self.noise_fraction):
                inputs[at] = self._filler(rng)
                at += 1
                continue
            key = int(rng.choice(list(shown))) if asks_at_last else int(rng.integers(half))
            inputs[at : at + 2] = key, value_of[key]
            if key in shown:
                targets[at], slices[at] = value_of[key], n_pairs - shown[key]
            shown[key] = n_pairs
            at, n_pairs = at + 2, n_pairs + 1
        return inputs, targets, slices

    def _filler(self, rng: np.random.Generator) -> int:
        """A token that is no key: noise, or where there is none a value."""
        n = self.n_noise_tokens
        return self.n_symbols + int(rng.integers(n)) if n else self.n_symbols // 2


class FuzzyRecall(Task):
    """Keys and values are motifs of one to three tokens; a value is asked for where its key was seen before.

    Key motifs are of the first half of the vocabulary, value motifs of the second, without repetition inside a motif.
    No key motif begins with another one, so a row never leaves open where a key ends.

    Example: inputs 1 4 9 2 12 11 1 4 9, targets - - - - - - - 9 - (the key 1 4 is bound to 9).

    Slices: how many tokens the key has ("key_tokens").

    Args:
        vocab_size: tokens, even: half in keys, half in values.
        context: tokens of a row.
        n_keys: motifs that a row binds.
        longest: most tokens of a motif.
        eval_tokens, test_contexts: as of every task.
    """

    name = "fuzzy_recall"
    slice_name = "key_tokens"

    def __init__(
        self,
        *,
        vocab_size: int,
        context: int,
        n_keys: int = 4,
        longest: int = 3,
        eval_tokens: int = 65536,
        test_contexts: Sequence[int] = (),
    ):
        super().__init__(vocab_size=vocab_size, context=context, eval_tokens=eval_tokens, test_contexts=test_contexts)
        check_whole("data.n_keys", n_keys)
        check_whole("data.longest", longest)
        if vocab_size % 2 or vocab_size // 2 < max(longest, n_keys + 1):
            raise UsageError(
                f"data.vocab_size={vocab_size}: give an even number, half of which is at least data.longest={longest} "
                f"and more than data.n_keys={n_keys}"
            )
        least = 2 * longest * (n_keys + 1) + 1
        if context < least:
            raise UsageError(f"data.context={context}: {n_keys} pairs and one repetition take up to {least}")
        self.n_keys, self.longest = n_keys, longest
        self.finish()

    def row(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        inputs, targets, slices = blank(self.context)
        half = self.vocab_size // 2
        # Keys start with tokens of their own, so that none begins with another.
        starts = 1 + rng.choice(half - 1, self.n_keys, replace=False)
        keys = [self._motif(rng, 1, half, int(start)) for start in starts]
        values = [self._motif(rng, half, self.vocab_size, int(rng.integers(half, self.vocab_size))) for _ in keys]
        order = [*rng.permutation(self.n_keys)]  # every key once, then any again
        at, i = 0, 0
        while True:
            which = int(order[i]) if i < self.n_keys else int(rng.integers(self.n_keys))
            key, value = keys[which], values[which]
            if at + len(key) + len(value) > self.context:
                return inputs, targets, slices
            inputs[at : at + len(key)] = key
            inputs[at + len(key) : at + len(key) + len(value)] = value
            if i >= self.n_keys:
                asked = at + len(key) - 1 + np.arange(len(value))
                targets[asked], slices[asked] = value, len(key)
            at, i = at + len(key) + len(value), i + 1

    def _motif(self, rng: np.random.Generator, low: int, high: int, start: int) -> np.ndarray:
        rest = np.setdiff1d(np.arange(low, high), [start])
        n = int(rng.integers(min(self.longest, len(rest) + 1)))
        return np.concatenate([[start], rng.choice(rest, n, replace=False)])
