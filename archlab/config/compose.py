"""A configuration from the words of a command line, composed by Hydra, with every key and value checked."""

import argparse
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, MissingConfigException
from omegaconf import DictConfig, OmegaConf

from archlab.config import identity  # noqa: F401 - config.yaml uses the resolver that it registers
from archlab.config.check import check_config, dotted_keys, suggest
from archlab.errors import UsageError
from archlab.plugins import GROUPS, PRESETS, conf_dir, config_loader, names, nearest, register

ASSIGNMENT = re.compile(r"(\+{0,2})([\w.]+)=(.*)", re.DOTALL)
PLAIN_VALUE = re.compile(r"[\w./:+\-]+")


def quote(value: str) -> str:
    """A string as the value of a Hydra override."""
    if PLAIN_VALUE.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def top_level() -> tuple[list[str], dict[str, Any]]:
    """The config groups of the defaults list, and the other top-level keys with their default values."""
    cfg = OmegaConf.load(conf_dir() / "config.yaml")
    groups = [str(group) for entry in cfg.defaults if OmegaConf.is_dict(entry) for group in entry]
    groups = [group for group in groups if not group.startswith("override ")]
    return groups, {str(k): v for k, v in cfg.items() if k not in ("defaults", "hydra", *groups)}


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
    (cell,) = compose_cells(args, False, groups, scalars)
    return without_hydra(cell)


def without_hydra(cell: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(cell, [key for key in cell if key != "hydra"])


def compose_cells(
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
        check_config(without_hydra(cell), scalars, [group for group in groups if group not in PRESETS])
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


def _options(name: str, options: Sequence[str]) -> str:
    """'did you mean X?' for a name that is close to an option, and the list of them all."""
    guess = nearest(name, options) if name else ""
    return f"{guess + ' ' if guess.startswith('did') else ''}installed: {', '.join(sorted(options))}"


def _compose(config_name: str, overrides: list[str]) -> DictConfig:
    try:
        return compose(config_name, overrides=overrides, return_hydra_config=True)
    except MissingConfigException as error:
        if not error.options:
            raise
        group, _, name = error.missing_cfg_file.rpartition("/")
        raise UsageError(f"unknown {group} {name!r}; {_options(name, error.options)}") from error
    except ConfigCompositionException as error:
        match = re.search(r"Could not override '(hydra\.[\w.]+)'", str(error))
        if not match:
            raise
        known = dotted_keys(OmegaConf.to_container(compose(config_name, return_hydra_config=True)))
        raise UsageError(f"unknown key {match[1]!r}; {suggest(match[1], known)}") from error


def load(overrides: Iterable[str] = ()) -> DictConfig:
    """The composed configuration of the given command-line overrides (outside a running Hydra application)."""
    register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=list(overrides))
