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
import itertools
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
from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import DictConfig, OmegaConf

from archlab import sweep
from archlab.check import check_config, dotted_keys, suggest
from archlab.errors import FULL_ERROR, UsageError, guarded
from archlab.plugins import GROUPS, PRESETS, conf_dir, config_loader, names, register
from archlab.run import Job, quote, resolve, run

OVERRIDE = re.compile(r"[+~]|[\w.@/]+=")
ASSIGNMENT = re.compile(r"(\+{0,2})([\w.]+)=(.*)", re.DOTALL)


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
        n_bad = sweep.summarise(folder, len(cells))
    return 1 if n_bad else 0


def _run_cell(cfg: DictConfig) -> float:
    """The validation loss of one cell of a sweep, nan if it has none: an exception here would end the others."""
    record, _ = run(cfg, Job.current())
    loss = record.get("quality/val_loss")
    return float("nan") if loss is None or record["status"] != "ok" else loss


def top_level() -> tuple[list[str], dict[str, Any]]:
    """The config groups of the defaults list, and the other top-level keys with their default values."""
    cfg = OmegaConf.load(conf_dir() / "config.yaml")
    groups = [str(group) for entry in cfg.defaults if OmegaConf.is_dict(entry) for group in entry]
    groups = [group for group in groups if not group.startswith("override ")]
    return groups, {str(k): v for k, v in cfg.items() if k not in ("defaults", "hydra")}


def normalise(word: str, groups: Sequence[str]) -> str:
    """One command-line word as Hydra wants it, with or without a plus.

    Every group stands in the defaults list, so that Hydra takes it without a plus only. A key gets two, which take what
    is there and what is new: which keys may be is for the check of the configuration, which knows their targets.
    """
    match = ASSIGNMENT.fullmatch(word)
    if not match or match[2].startswith("hydra."):
        return word
    return f"{match[2]}={match[3]}" if match[2] in groups else f"++{match[2]}={match[3]}"


def configuration(words: Sequence[str]) -> DictConfig:
    """The checked configuration of overrides alone, for a command beside the main job. Errors: UsageError."""
    register()
    groups, scalars = top_level()
    overrides = [normalise(word, groups) for word in words]
    args = argparse.Namespace(overrides=overrides, config_dir=None, config_name=None)
    (cell,) = _compose_cells(args, False, groups, scalars)
    return _without_hydra(cell)


def _check(args: argparse.Namespace, multirun: bool, groups: list[str], scalars: dict[str, Any]) -> list[DictConfig]:
    """The configuration of every cell, Hydra's own in it, once each can be run."""
    cells = _compose_cells(args, multirun, groups, scalars)
    for cell in cells:
        resolve(_without_hydra(cell))
    return cells


def _without_hydra(cell: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(cell, [key for key in cell if key != "hydra"])


def _compose_cells(
    args: argparse.Namespace, multirun: bool, groups: list[str], scalars: dict[str, Any]
) -> list[DictConfig]:
    """The same, once each is composed and its keys and values are checked."""
    for word in args.overrides:
        if "=" not in word and not word.startswith("~"):
            raise UsageError(f"{word!r} is not of the form key=value (python -m archlab --help shows what to type)")
    with initialize_config_dir(str(conf_dir()), version_base="1.3"), config_loader() as loader:
        for group in GROUPS:
            names(group)  # refuses a name that two packages define
        overrides = OverridesParser.create(config_loader=loader).parse_overrides(args.overrides)
        _check_several(overrides, multirun, groups)
        found = [f"hydra.searchpath=[file://{os.path.abspath(args.config_dir)}]"] if args.config_dir else []
        cells = [_compose(args.config_name or "config", [*found, *cell]) for cell in _cells(overrides)]
    for cell in cells:
        check_config(_without_hydra(cell), scalars, [group for group in groups if group not in PRESETS])
    return cells


def _check_several(overrides: Sequence[Override], multirun: bool, groups: Sequence[str]) -> None:
    """Refuse several values where one run can have but one, which Hydra would merge or explain at length."""
    seen = {}
    for override in overrides:
        key, text = override.key_or_group, override.input_line.partition("=")[2]
        if override.is_sweep_override():
            if not multirun:
                raise UsageError(f"{key}={text} names several values: add -m to run each of them")
        elif key in groups and isinstance(override.value(), list):
            raise UsageError(f"{key}={text}: a run has one {key}; to run several, write -m {key}={text.strip('[]')}")
        if key in groups and key in seen:
            raise UsageError(f"{key} is given twice, as {seen[key]} and {text}; for both: -m {key}={seen[key]},{text}")
        seen[key] = text


def _cells(overrides: Sequence[Override]) -> list[list[str]]:
    """The product of all sweeps, as the basic sweeper makes it. What only another sweeper can expand is left out."""
    axes = []
    for override in overrides:
        if override.is_discrete_sweep():
            axes.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
            if not axes[-1]:
                raise UsageError(f"{override.input_line} names nothing that is installed")
        elif not override.is_sweep_override():
            axes.append([override.input_line])
    return [list(cell) for cell in itertools.product(*axes)]


def _compose(config_name: str, overrides: list[str]) -> DictConfig:
    try:
        return compose(config_name, overrides=overrides, return_hydra_config=True)
    except MissingConfigException as error:
        if not error.options:
            raise
        group, _, name = error.missing_cfg_file.rpartition("/")
        raise UsageError(f"unknown {group} {name!r}; installed: {', '.join(sorted(error.options))}") from error
    except ConfigCompositionException as error:
        match = re.search(r"Could not override '(hydra\.[\w.]+)'", str(error))
        if not match:
            raise
        known = dotted_keys(OmegaConf.to_container(compose(config_name, return_hydra_config=True)))
        raise UsageError(f"unknown key {match[1]!r}; {suggest(match[1], known)}") from error


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
