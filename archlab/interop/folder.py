"""Folders that are there whole or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from archlab.errors import UsageError


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A draft beside `path` to write into, which takes its name at the end; after an error nothing is left.

    Errors: UsageError where `path` exists already, or the folder that it is to be in does not.
    """
    if path.exists() or path.is_symlink():
        raise UsageError(f"{path} exists already: name a new folder")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} to make {path.name} in: make it first")
    draft = path.with_name(f".{path.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)  # a kill may have left one
    try:
        draft.mkdir()
        yield draft
        draft.rename(path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
