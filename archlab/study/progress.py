"""How far a study is, by the files of its cells: whoever sees the folder sees the same."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from archlab.errors import UsageError
from archlab.run import record
from archlab.study.cells import DONE

INDEX = "cells.jsonl"
STATES = ("done", "running", "waiting", "failed")


@dataclass
class Progress:
    """The cells of a study by (task, variant); `began` is when this process started."""

    folders: dict[tuple[str, str], list[Path]]
    began: float = field(default_factory=time.monotonic)
    done_before: int = 0

    def __post_init__(self):
        self.done_before = self.counts()["done"]

    def states(self, key: tuple[str, str]) -> Counter[str]:
        return Counter(map(state, self.folders[key]))

    def counts(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for key in self.folders:
            total += self.states(key)
        return total

    def line(self) -> str:
        """Cells by state, and the time that is left at the speed so far."""
        counts = self.counts()
        text = ", ".join(f"{counts[s]} {s}" for s in STATES if counts[s])
        new, left = counts["done"] - self.done_before, counts["running"] + counts["waiting"]
        if not new or not left:
            return text
        return f"{text}; about {_span((time.monotonic() - self.began) / new * left)} left"


def state(folder: Path) -> str:
    """ "done", "failed", "running" or "waiting"."""
    result = folder / record.RESULT
    if result.exists():
        return "done" if record.read(result)["status"] in DONE else "failed"
    return "running" if (folder / record.CONFIG).exists() else "waiting"


def read(study_dir: Path) -> Progress:
    """The progress of the study in a folder. Errors: UsageError where there is none."""
    path = study_dir / INDEX
    if not path.is_file():
        raise UsageError(f"no study at {study_dir}: give the folder that python -m archlab.study names")
    folders: dict[tuple[str, str], list[Path]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        cell = json.loads(line)
        folders.setdefault((cell["task"], cell["variant"]), []).append(Path(cell["folder"]))
    return Progress(folders)


def table(progress: Progress) -> Table:
    found = Table(box=SIMPLE_HEAD, title=progress.line(), title_justify="left")
    for i, name in enumerate(("task", "variant", *STATES)):
        found.add_column(name, justify="right" if i > 1 else "left")
    for key in progress.folders:
        states = progress.states(key)
        if any(states[s] for s in STATES if s != "waiting"):
            found.add_row(*key, *(str(states[s] or "") for s in STATES))
    return found


def grouped(cells: Sequence) -> dict[tuple[str, str], list[Path]]:
    """The folders of cells by (task, variant)."""
    folders: dict[tuple[str, str], list[Path]] = {}
    for cell in cells:
        folders.setdefault((cell.task, cell.variant), []).append(cell.path)
    return folders


def _span(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
