"""A cell: one run of a study, named by what it is, so that it is done once, whatever study or order asks for it."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from archlab.config.compose import configuration
from archlab.config.identity import cell_hash
from archlab.run import record

DONE = ("ok", "diverged")
"""How a cell ends that running it again would not change."""


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        task, variant: by the names of the study.
        role: "tune" where it chooses a rate, "test" where it is compared.
        seed, lr: of it.
        words: the overrides that make it, those two among them.
        cfg: its whole configuration.
        cells_dir: where cells are kept.
    """

    task: str
    variant: str
    role: str
    seed: int
    lr: float
    words: tuple[str, ...]
    cfg: DictConfig
    cells_dir: Path

    @cached_property
    def folder_name(self) -> str:
        return f"{self.variant}-s{self.seed}-{cell_hash(self.cfg)}"

    @property
    def path(self) -> Path:
        return self.cells_dir / self.folder_name

    @property
    def record(self) -> dict[str, Any] | None:
        """What the run left behind; None before it has ended."""
        path = self.path / record.RESULT
        return record.read(path) if path.exists() else None

    @property
    def status(self) -> str:
        """ "done", "failed" (it will be tried again), "running" or "waiting": by its files alone."""
        if (found := self.record) is not None:
            return "done" if found["status"] in DONE else "failed"
        return "running" if (self.path / record.CONFIG).exists() else "waiting"


class Factory:
    """Makes the cells of a study; composing a configuration takes long, so each variant is composed once."""

    def __init__(self, cells_dir: Path):
        self.cells_dir = cells_dir
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    def configuration(self, words: Sequence[str]) -> DictConfig:
        """The checked configuration of overrides. Errors: UsageError."""
        key = tuple(words)
        if key not in self._composed:
            self._composed[key] = configuration(key)
        return self._composed[key]

    def make(self, task: str, variant: str, role: str, seed: int, lr: float | None, words: Sequence[str]) -> Cell:
        cfg = copy.deepcopy(self.configuration(words))
        lr = cfg.train.lr if lr is None else lr
        own = [f"train.lr={lr!r}", f"seed={seed}"]
        cfg = OmegaConf.merge(cfg, OmegaConf.from_dotlist(own))
        return Cell(task, variant, role, seed, lr, (*words, *own), cfg, self.cells_dir)


def index(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """What a report needs to find the cells again: a line each."""
    return [
        {"task": c.task, "variant": c.variant, "role": c.role, "seed": c.seed, "lr": c.lr, "folder": str(c.path)}
        for c in cells
    ]


def write_index(path: Path, cells: Sequence[Cell]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in index(cells))
    path.write_text(text, encoding="utf-8")
