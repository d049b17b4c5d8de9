"""The two ways a user can be told no: one sentence each, and an exit status."""

import errno
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

FULL_ERROR = "HYDRA_FULL_ERROR"
"""Environment variable: set to 1, every error comes with its traceback."""


class ArchlabError(Exception):
    """Ends the program with one sentence and no traceback. The message names the offending value and the fix."""

    exit_status = 1


class UsageError(ArchlabError):
    """What was asked for cannot be: a misspelt key, an impossible size, a missing path."""

    exit_status = 2


def exit_status(error: BaseException) -> int:
    """The status that a command ends with for this error: 2 for what was asked, 130 for Ctrl-C, 1 for all else."""
    error = foreseen(error)
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, HydraException | OmegaConfBaseException):
        return UsageError.exit_status
    return getattr(error, "exit_status", 1)


def sentence(error: BaseException) -> str:
    """One line for people: what went wrong, and for an error that nobody foresaw, where."""
    error = foreseen(error)
    text = " ".join(str(error).split())
    if isinstance(error, KeyboardInterrupt):
        return text or "interrupted"
    if is_full_disk(error):
        return f"no space left on the device ({text}): what was written before is intact; free some and run again"
    if isinstance(error, ArchlabError | HydraException | OmegaConfBaseException | OSError):
        return text or type(error).__name__
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return f"out of memory: make train.batch_size or the model smaller ({text})"
    return f"{type(error).__name__}: {text} (at {_origin(error)}; {FULL_ERROR}=1 shows the traceback)"


def is_full_disk(error: BaseException) -> bool:
    """Whether a write failed for want of room; libraries that write from C++ tell it only in their message."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)


def guarded(command: Callable[[], int | None]) -> int:
    """Run a command line and return its exit status; an error becomes one sentence on stderr."""
    try:
        return command() or 0
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get(FULL_ERROR) == "1":
            traceback.print_exc()
        print(f"error: {sentence(error)}", file=sys.stderr)
        return exit_status(error)


def foreseen(error: BaseException) -> BaseException:
    """The `ArchlabError` that another error wraps, as Hydra's instantiation does; else the error."""
    cause = error
    while cause is not None and not isinstance(cause, ArchlabError):
        cause = cause.__cause__
    return error if cause is None else cause


def _origin(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "an unknown place"
