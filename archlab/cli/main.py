"""The command line: `python -m archlab [-m] [+]group=option ... key=value ...`, or `--help`.

It is Hydra's, with both spellings of a group (`attn=gqa`, `+attn=gqa`), and with every key and value checked before
anything starts: a sweep is refused as a whole.

Exit status:
    0    every run ended ok
    1    a run failed or diverged, as its result.json says, or the machine gave out: disk, memory, a killed worker
    2    what was asked for cannot be: a misspelt key, an impossible size, a missing path, a folder that holds a run
    130  interrupted with Ctrl-C; the last line says how to go on
An error is one sentence on stderr; with HYDRA_FULL_ERROR=1 its traceback stands above it.
"""

import argparse
import logging
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from archlab.config.compose import compose_cells, normalise, quote, top_level, without_hydra
from archlab.errors import FULL_ERROR, guarded
from archlab.plugins import conf_dir, register

OVERRIDE = re.compile(r"[+~]|[\w.@/]+=")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    return guarded(lambda: _command(sys.argv[1:] if argv is None else list(argv)))


def _command(words: list[str]) -> int:
    logging.getLogger("hydra").addHandler(logging.NullHandler())  # it logs what it raises too
    register()
    groups, scalars = top_level()
    # Hydra's parser takes overrides in one piece; a flag may stand among them.
    words = sorted((normalise(word, groups) for word in words), key=lambda w: bool(OVERRIDE.match(w)))
    args = get_args_parser().parse_args(words)
    if args.help or args.hydra_help or args.cfg or args.info or args.shell_completion or args.experimental_rerun:
        return _hydra(words, lambda cfg: None)
    multirun = args.multirun or "hydra.mode=MULTIRUN" in args.overrides
    cells = _check(args, multirun, groups, scalars)
    return _sweep(words, cells) if multirun else _run_one(words)


def _run_one(words: list[str]) -> int:
    from archlab.run.job import Job  # torch takes a second to import, and --help needs none
    from archlab.run.stages import run

    errors = []

    def task(cfg: DictConfig) -> None:
        try:
            errors.append(run(cfg, Job.current())[1])
        except Exception as error:  # which Hydra would introduce with a line of its own
            errors.append(error)

    _hydra(words, task)
    for error in filter(None, errors):
        raise error
    return 0


def _sweep(words: list[str], cells: list[DictConfig]) -> int:
    from archlab.cli import sweep

    folder = Path(cells[0].hydra.sweep.dir)
    sweep.claim(folder, resume=cells[0].train.resume)
    words = [word for word in words if not word.startswith("hydra.sweep.dir=")]
    words.append(f"hydra.sweep.dir={quote(str(folder))}")
    try:
        _hydra(words, _run_cell)
    except KeyboardInterrupt:
        again = (word.removeprefix("++") for word in (*words, "train.resume=true"))
        print(f"to go on: {shlex.join(['python', '-m', 'archlab', *again])}")
        raise
    finally:
        n_bad = sweep.summarise(folder, _subfolders(cells))
    return 1 if n_bad else 0


def _subfolders(cells: list[DictConfig]) -> list[str]:
    """The folder of every cell within the sweep's, as Hydra names it when it comes to run it."""
    found = []
    for i, cell in enumerate(cells):
        with open_dict(cell):
            cell.hydra.job.num = i
        HydraConfig.instance().set_config(cell)
        found.append(cell.hydra.sweep.subdir)
    return found


def _run_cell(cfg: DictConfig) -> float:
    """The validation loss of one cell of a sweep, nan if it has none: an exception here would end the others."""
    from archlab.run.job import Job
    from archlab.run.stages import run

    record, _ = run(cfg, Job.current())
    loss = record.get("quality/val_loss")
    return float("nan") if loss is None or record["status"] != "ok" else loss


def _check(args: argparse.Namespace, multirun: bool, groups: list[str], scalars: dict[str, Any]) -> list[DictConfig]:
    """The configuration of every cell, Hydra's own in it, once each can be run."""
    from archlab.run.stages import resolve

    cells = compose_cells(args, multirun, groups, scalars)
    for cell in cells:
        resolve(without_hydra(cell))
    return cells


def _hydra(words: list[str], task: Callable[[DictConfig], Any]) -> int:
    app = hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(task)
    with _raising(), _arguments(words):
        app()
    return 0


@contextmanager
def _arguments(words: list[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, [sys.argv[0], *words]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _raising() -> Iterator[None]:
    """Make Hydra raise its errors, which it otherwise prints and turns into an exit of its own."""
    before = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[FULL_ERROR]
        else:
            os.environ[FULL_ERROR] = before
