"""The Python standard library's own source, read from the running interpreter as bytes: real text, always there."""

import hashlib
import os
import sysconfig
from pathlib import Path

from archlab.data.codec import encode_bytes
from archlab.data.stream import TokenStream
from archlab.errors import UsageError

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Folders left out: other people's packages, and tests, which outweigh the library itself."""

HELD_OUT_FILES = {"val": 16, "test": 16}
"""Files of 256 that go to each held-out split."""


class StandardLibrary(TokenStream):
    """Bytes of all the library's .py files. Whole files are held out, chosen by a hash of their path.

    Another Python version has another library, hence another fingerprint: compare runs of one interpreter.
    """

    def __init__(self, *, context: int, eval_tokens: int | None = None):
        files = {split: [] for split in ("train", *HELD_OUT_FILES)}
        for name, path in _source_files(Path(sysconfig.get_path("stdlib"))):
            files[_split_of(name)].append(path.read_bytes())
        codec, _ = encode_bytes(b"")
        splits = {split: encode_bytes(b"".join(contents))[1] for split, contents in files.items()}
        super().__init__(name="stdlib", codec=codec, splits=splits, context=context, eval_tokens=eval_tokens)


def _source_files(root: Path) -> list[tuple[str, Path]]:
    """(path below root with forward slashes, path) of each source file, sorted."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED]
        # What the build wrote about its machine is not the library.
        sources = (n for n in names if n.endswith(".py") and not n.startswith("_sysconfigdata"))
        found += [(path.relative_to(root).as_posix(), path) for path in (Path(folder, n) for n in sources)]
    if not found:
        raise UsageError(f"this Python keeps no source files below {root}: give data=text data.path=FILE")
    return sorted(found)


def _split_of(name: str) -> str:
    bucket = hashlib.sha256(name.encode()).digest()[0]
    for split, n_files in HELD_OUT_FILES.items():
        if bucket < n_files:
            return split
        bucket -= n_files
    return "train"
