"""A codec as a tokenizer of Transformers with the same ids, and back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from archlab.data import Codec
from archlab.data.codec import ByteCodec, CharCodec
from archlab.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast


def to_tokenizer(codec: Codec, context: int) -> PreTrainedTokenizerFast:
    """The tokenizer that every user of Transformers knows, without special tokens, for sequences of `context` tokens.

    Errors: UsageError where Transformers is not installed.
    """
    try:
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise UsageError("Transformers is not installed: pip install 'archlab[hf]'") from error
    return PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(codec), model_max_length=context, clean_up_tokenization_spaces=False
    )


def to_codec(tokenizer: PreTrainedTokenizerFast) -> Codec | None:
    """The codec whose ids those of a tokenizer are; None where it is not such a one as `to_tokenizer` makes."""
    if not hasattr(tokenizer, "backend_tokenizer"):
        return None
    vocabulary = tokenizer.get_vocab()
    characters = sorted(vocabulary, key=vocabulary.get)
    for codec in (ByteCodec(), CharCodec("".join(characters))):
        if len(vocabulary) == codec.vocab_size and _rules(tokenizer) == _rules(to_tokenizer(codec, context=1)):
            return codec
    return None


def _tokenizer(codec: Codec) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    if isinstance(codec, ByteCodec):
        tokenizer = Tokenizer(models.BPE(vocab=_byte_alphabet(), merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer = Tokenizer(models.WordLevel(vocab={c: i for i, c in enumerate(codec.characters)}))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _byte_alphabet() -> dict[str, int]:
    """The visible character that stands for each byte in the library: itself, where it is one of Latin-1."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(visible))
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _rules(tokenizer: PreTrainedTokenizerFast) -> dict:
    """All that decides which ids a text has."""
    described = json.loads(tokenizer.backend_tokenizer.to_str())
    return {name: described[name] for name in ("normalizer", "pre_tokenizer", "model", "decoder", "post_processor")}
