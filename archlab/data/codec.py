"""Text to token ids and back."""

import codecs
import json
from collections.abc import Iterable, Iterator

import numpy as np

from archlab.errors import UsageError

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class Codec:
    """A vocabulary of `vocab_size` ids. `token_bytes` holds the bytes of text that each id stands for."""

    vocab_size: int
    token_bytes: np.ndarray

    def encode(self, text: str) -> list[int]:
        """Errors: UsageError naming the first character that the vocabulary lacks."""
        raise NotImplementedError

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        """The text of tokens that arrive one by one, as soon as it is known; `UNKNOWN` for what stands for no text."""
        raise NotImplementedError

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(self.stream(tokens))

    def to_json(self) -> str:
        raise NotImplementedError

    @staticmethod
    def from_json(text: str) -> "Codec":
        fields = json.loads(text)
        return ByteCodec() if fields["tokens"] == "bytes" else CharCodec(fields["characters"])


class ByteCodec(Codec):
    """A token is a byte of UTF-8."""

    vocab_size = 256
    token_bytes = np.ones(256, dtype=np.int64)

    def encode(self, text: str) -> list[int]:
        try:
            # An argument of the command line carries bytes that are not UTF-8 as surrogates.
            return list(text.encode("utf-8", "surrogateescape"))
        except UnicodeEncodeError as error:
            raise UsageError(f"the character {text[error.start]!r} has no UTF-8 form: leave it out") from error

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token in tokens:
            if text := decoder.decode(bytes([token])) if token < self.vocab_size else UNKNOWN:
                yield text
        if rest := decoder.decode(b"", final=True):
            yield rest

    def to_json(self) -> str:
        return json.dumps({"tokens": "bytes"})


class CharCodec(Codec):
    """A token is one of the given distinct characters."""

    def __init__(self, characters: str):
        self.characters, self.vocab_size = characters, len(characters)
        self.token_bytes = np.array([len(c.encode()) for c in characters], dtype=np.int64)
        self._ids = {c: i for i, c in enumerate(characters)}

    def encode(self, text: str) -> list[int]:
        for c in text:
            if c not in self._ids:
                raise UsageError(
                    f"the character {c!r} is not among the {self.vocab_size} of the training text: leave it out"
                )
        return [self._ids[c] for c in text]

    def stream(self, tokens: Iterable[int]) -> Iterator[str]:
        return (self.characters[token] if token < self.vocab_size else UNKNOWN for token in tokens)

    def to_json(self) -> str:
        return json.dumps({"tokens": "characters", "characters": self.characters})


def encode_bytes(data: bytes) -> tuple[ByteCodec, np.ndarray]:
    """The byte codec and `data` as token ids (n)."""
    return ByteCodec(), np.frombuffer(data, dtype=np.uint8)


def encode_characters(text: str) -> tuple[CharCodec, np.ndarray]:
    """The codec of the text's distinct characters, sorted, and the text as token ids (n)."""
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    distinct, tokens = np.unique(points, return_inverse=True)
    return CharCodec("".join(map(chr, distinct))), tokens.astype(np.min_scalar_type(max(len(distinct) - 1, 0)))
