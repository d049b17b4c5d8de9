"""A text of one's own: a file, or all files of a folder."""

import math
from pathlib import Path

import numpy as np
from hydra.utils import to_absolute_path

from archlab.data.codec import Codec, encode_bytes, encode_characters
from archlab.data.stream import TokenStream
from archlab.errors import UsageError

MOST_INVALID_SHARE = 0.3
"""Up to that share of bytes that are not UTF-8, a text may be one in another encoding."""


class Text(TokenStream):
    """The head of the text trains, the middle validates, the tail tests.

    Args:
        path: a file, or a folder whose files are read in the order of their names; from the folder that the user
            stands in.
        tokens: "bytes", or "characters" of UTF-8.
        val_fraction, test_fraction: shares of the tokens that are held out.
    """

    def __init__(
        self,
        *,
        path: str | None,
        context: int,
        tokens: str = "bytes",
        val_fraction: float = 0.05,
        test_fraction: float = 0.05,
        eval_tokens: int | None = None,
    ):
        if path is None:
            raise UsageError("data=text needs a text: give data.path=FILE or data.path=FOLDER")
        if tokens not in ("bytes", "characters"):
            raise UsageError(f"data.tokens={tokens!r}: give bytes or characters")
        data = _read(Path(to_absolute_path(str(Path(path).expanduser()))), path)
        codec, ids = _encode(data, tokens, path)
        splits = split_stream(ids, context, val_fraction, test_fraction, f"data.path={path}")
        super().__init__(name="text", codec=codec, splits=splits, context=context, eval_tokens=eval_tokens)
        self.warning = _warning(data, path)


def _warning(data: bytes, given: str) -> str | None:
    """That a text is none, with the share of its bytes that no text holds: NUL, and what is not UTF-8."""
    n_zeros, n_invalid = data.count(0), len(data) - len(data.decode("utf-8", "ignore").encode())
    if not n_zeros and n_invalid <= MOST_INVALID_SHARE * len(data):
        return None
    shares = f"{n_zeros / len(data):.1%} of its bytes are NUL, {n_invalid / len(data):.1%} are not UTF-8"
    return f"data.path={given} does not look like text: {shares}"


def split_stream(
    ids: np.ndarray, context: int, val_fraction: float, test_fraction: float, name: str
) -> dict[str, np.ndarray]:
    """Cut the stream into head, middle and tail. Errors: UsageError naming the length that the context needs."""
    for key, share in {"val_fraction": val_fraction, "test_fraction": test_fraction}.items():
        if not 0 < share < 0.5:
            raise UsageError(f"data.{key}={share}: give a share between 0 and 0.5")
    train_fraction = 1 - val_fraction - test_fraction
    needed = math.ceil(max((context + 1) / train_fraction, 2 / val_fraction, 2 / test_fraction))
    if len(ids) < needed:
        raise UsageError(
            f"{name} holds {len(ids)} tokens, too few: data.context={context} and its three splits need {needed}"
        )
    n_val, n_test = int(val_fraction * len(ids)), int(test_fraction * len(ids))
    head, middle, tail = np.split(ids, [len(ids) - n_val - n_test, len(ids) - n_test])
    return {"train": head, "val": middle, "test": tail}


def _read(path: Path, given: str) -> bytes:
    if not path.exists():
        raise UsageError(f"data.path={given} does not exist: give a file or a folder of text")
    files = [path]
    if path.is_dir():
        below = (p for p in path.rglob("*") if not any(part.startswith(".") for part in p.relative_to(path).parts))
        files = sorted(p for p in below if p.is_file())
    try:
        return b"".join(p.read_bytes() for p in files)
    except OSError as error:
        raise UsageError(f"data.path={given} cannot be read: {error.strerror} ({error.filename})") from error


def _encode(data: bytes, tokens: str, given: str) -> tuple[Codec, np.ndarray]:
    if tokens == "bytes":
        return encode_bytes(data)
    try:
        return encode_characters(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(
            f"data.path={given} is not UTF-8 text: byte {data[error.start]:#04x} at offset {error.start}; "
            "convert it, or give data.tokens=bytes"
        ) from error
