"""The corpus of the walk-through: one sentence over and over, so small that a tiny model learns it in seconds."""

from archlab.data.codec import encode_characters
from archlab.data.stream import TokenStream
from archlab.data.text import split_stream

SENTENCE = "attention: query few cached blocks. "
"""Few characters repeat, so that a window's first ones say where in the sentence it starts, and the loss can near 0."""


class Phrase(TokenStream):
    """Characters of `SENTENCE`, repeated. The splits share no position, but by design they share every word."""

    def __init__(self, *, context: int, repeats: int, eval_tokens: int | None = None):
        codec, tokens = encode_characters(SENTENCE * repeats)
        splits = split_stream(tokens, context, 0.1, 0.1, f"data.repeats={repeats}")
        super().__init__(name="phrase", codec=codec, splits=splits, context=context, eval_tokens=eval_tokens)
