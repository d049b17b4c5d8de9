"""`python -m archlab.bench`: gate and latency of one model, or ratios between formulations.

`python -m archlab.bench +attn=gqa` times an untrained model of a configuration, `python -m archlab.bench run=FOLDER`
that of a run or an import, `python -m archlab.bench +bench=mechanisms` measures what the formulation of each mechanism
is worth. Any key can be set as for `python -m archlab`. All print a table and one line of JSON, which `out=FILE` keeps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from archlab.config.device import resolve_device, resolve_dtype
from archlab.errors import UsageError, guarded
from archlab.measure import equivalence
from archlab.measure.latency import BenchSettings, latency
from archlab.measure.ratio import Suite
from archlab.model import LM, build_model
from archlab.nn.precision import weight_dtype
from archlab.plugins import GROUPS
from archlab.run.load import load_run

VOCAB_SIZE = 256
"""Of the untrained model that this file's command line times."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    words = sys.argv[1:] if argv is None else list(argv)
    return guarded(lambda: _command(words))


def _command(words: list[str]) -> None:
    from archlab.config.compose import configuration

    if {"-h", "--help"} & set(words):
        print(__doc__)
        return
    own, overrides = _own_words(words)
    if "out" in own and (own["out"].exists() or not own["out"].parent.is_dir()):
        raise UsageError(f"out={own['out']}: name a new file in a folder that exists")
    given = [word for word in overrides if word.lstrip("+").partition("=")[0].split(".")[0] in ("model", *GROUPS)]
    if "run" in own and given:
        raise UsageError(f"{given[0]}: run={own['run']} has its model already; leave one of them out")
    cfg = configuration(overrides)
    device = resolve_device(cfg.device)
    bench = instantiate(cfg.bench, _convert_="all")
    if isinstance(bench, Suite):
        result = bench.run(device)
    else:
        dtype = resolve_dtype(cfg.dtype, device)
        model = load_run(own["run"], device=device)[0] if "run" in own else _untrained(cfg, device)
        result = _timed(model.to(weight_dtype(dtype)), bench, dtype)
    line = json.dumps(result)
    print(line)
    if "out" in own:
        own["out"].write_text(line + "\n", encoding="utf-8")


def _own_words(words: list[str]) -> tuple[dict[str, Path], list[str]]:
    """`out=FILE` and `run=FOLDER`, which are this command's own, and the overrides of the configuration."""
    own = [word for word in words if word.startswith(("out=", "run="))]
    pairs = (word.split("=", 1) for word in own)
    return {key: Path(value) for key, value in pairs}, [word for word in words if word not in own]


def _untrained(cfg: DictConfig, device: torch.device) -> LM:
    """A model with random weights: time does not depend on what it has learned."""
    torch.manual_seed(cfg.seed)
    return build_model(cfg, cfg.model.get("vocab_size") or VOCAB_SIZE, device=device)


def _timed(model: LM, settings: BenchSettings, dtype: torch.dtype) -> dict[str, Any]:
    """Gate and latency, shown as a table."""
    proof = equivalence.gate(model, length=settings.gate_length, batch=settings.gate_batch, dtype=dtype)
    record = proof | latency(model, settings, dtype=dtype, gate=proof)
    table = Table("figure", "value")
    for name, value in record.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)
    return record
