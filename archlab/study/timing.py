"""Latency of every variant, one after the other on a machine that does nothing else, once all cells are done.

Cells that run side by side slow each other down; what they learned does not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from rich.console import Console

from archlab.config.compose import configuration
from archlab.config.device import resolve_device, resolve_dtype
from archlab.measure import equivalence
from archlab.measure.latency import latency
from archlab.nn.precision import weight_dtype
from archlab.run.load import load_run
from archlab.study.cells import Cell


def path_of(study_dir: Path, task: str, variant: str) -> Path:
    """The file of one variant's figures."""
    return study_dir / "timing" / f"{task}-{variant}.json"


def read(study_dir: Path, task: str, variant: str) -> dict[str, Any]:
    """The `latency/*` entries of a variant; none where it was not timed."""
    path = path_of(study_dir, task, variant)
    return json.loads(path.read_text(encoding="utf-8"))["entries"] if path.exists() else {}


def time_all(study_dir: Path, cells: Sequence[Cell], words: Sequence[str], console: Console) -> None:
    """Time the model of each cell, unless its file is of that very cell already. `words` choose what is timed, as
    `bench=default`. Errors: ArchlabError for a model whose gate is red."""
    settings = instantiate(configuration(words).bench, _convert_="all")
    for cell in cells:
        path = path_of(study_dir, cell.task, cell.variant)
        key = [cell.folder_name, *words]
        if path.exists() and json.loads(path.read_text(encoding="utf-8"))["of"] == key:
            continue
        console.print(f"timing {cell.variant}", highlight=False)
        device = resolve_device(cell.cfg.device)
        dtype = resolve_dtype(cell.cfg.dtype, device)
        model = load_run(cell.path, device=device)[0].to(weight_dtype(dtype))
        proof = equivalence.gate(model, length=settings.gate_length, batch=settings.gate_batch, dtype=dtype)
        entries = latency(model, settings, dtype=dtype, gate=proof) | {"latency/threads": torch.get_num_threads()}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"of": key, "entries": entries}, indent=1), encoding="utf-8")
