"""What a configuration may hold: every key known and in its place, every value of the type that its target wants.

Hydra's own check stops `attn.typo=1`, but lets `+attn.typo=1`, a typo in a yaml file and `train.steps=abc` through.
"""

import difflib
import inspect
import math
from collections.abc import Iterator, Sequence
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from archlab.errors import UsageError
from archlab.plugins import GROUPS, HARNESS_ARGS, PLAIN, check_keys

SEEDS = ("seed", "init_seed", "data.seed")
"""Keys whose value is a seed: the last two, where they have none, follow the first."""

MOST_WHOLE = 2**63 - 1
"""What 64 bits hold: seeds and sizes go into tensors."""

RESERVED = {"attn": HARNESS_ARGS, "ffn": HARNESS_ARGS, "model": GROUPS, "log": ("run_dir", "labels")}
"""By config group: the parameters that the harness passes to a target, so that no configuration may."""


def check_config(cfg: DictConfig, scalars: dict[str, Any], groups: Sequence[str]) -> None:
    """Refuse what no target knows or takes, with a UsageError that names the key and the nearest.

    Args:
        cfg: a composed configuration.
        scalars: the top-level keys beside the groups, each with a value of its type: plain, or a mapping.
        groups: the config groups that a run needs.
    """
    for group in groups:
        if not OmegaConf.is_dict(cfg.get(group)):
            raise UsageError(f"{group}={cfg.get(group)}: a run needs one, {group}=NAME")
    known = [*scalars, *groups, *SEEDS, *_keys_below(cfg)]
    for path, node in _nodes(cfg):
        for name in node:
            key = f"{path}.{name}" if path else str(name)
            if key not in known and not str(name).startswith("_"):
                raise UsageError(f"unknown key {key!r}; {suggest(key, known)}")
            if OmegaConf.is_missing(node, name):
                raise UsageError(f"{key} has no value: give {key}=...")
    _check_numbers(cfg)
    for key, default in scalars.items():
        if key not in SEEDS and type(cfg[key]) is not type(default):
            raise UsageError(f"{key}={cfg[key]}: give {PLAIN.get(type(default), 'a mapping')}")
    for key in SEEDS:
        _check_seed(key, OmegaConf.select(cfg, key))
    for group in groups:
        own = {name for name in ("seed",) if f"{group}.{name}" in SEEDS}
        node = OmegaConf.masked_copy(cfg[group], [name for name in cfg[group] if name not in own])
        check_keys(group, node, reserved=RESERVED.get(group, ()))


def _check_seed(key: str, value: Any) -> None:
    if not (value is None and key != "seed") and (type(value) is not int or value < 0):
        raise UsageError(f"{key}={value}: give a whole number of at least 0")


def _check_numbers(cfg: DictConfig) -> None:
    """Refuse every number, however deep, that is none or that no machine word holds. Errors: UsageError."""
    for key, value in _leaves(OmegaConf.to_container(cfg, throw_on_missing=False)):
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"{key}={value}: give a finite number")
        if isinstance(value, int) and abs(value) > MOST_WHOLE:
            raise UsageError(f"{key}={value}: give a whole number of at most {MOST_WHOLE}")


def _leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, value) of what stands in nested mappings and lists."""
    if not isinstance(node, dict | list):
        yield path, node
        return
    for name, child in node.items() if isinstance(node, dict) else enumerate(node):
        yield from _leaves(child, f"{path}.{name}" if path else str(name))


def suggest(key: str, known: Sequence[str]) -> str:
    """'did you mean X?' for a key that is misspelt or in the wrong place, else what there is in its place."""
    parent, _, leaf = key.rpartition(".")
    here = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == parent}
    anywhere = {k.rpartition(".")[2]: k for k in reversed(known)}
    for names, cutoff in ((anywhere, 1.0), (here, 0.6), (anywhere, 0.75)):
        for best in difflib.get_close_matches(leaf, names, n=1, cutoff=cutoff):
            return f"did you mean {names[best]!r}?"
    return f"known: {', '.join(here.values() or [k for k in known if '.' not in k])}"


def dotted_keys(node: Any, path: str = "") -> list[str]:
    """The path of every key in nested dicts."""
    if not isinstance(node, dict):
        return []
    paths = {f"{path}.{name}" if path else str(name): child for name, child in node.items()}
    return [key for at, child in paths.items() for key in (at, *dotted_keys(child, at))]


def _nodes(cfg: DictConfig, path: str = "") -> Iterator[tuple[str, DictConfig]]:
    """(dotted path, mapping) of a configuration and of every mapping in it."""
    yield path, cfg
    for name in cfg:
        if not OmegaConf.is_missing(cfg, name) and OmegaConf.is_dict(cfg[name]):
            yield from _nodes(cfg[name], f"{path}.{name}" if path else str(name))


def _keys_below(cfg: DictConfig) -> list[str]:
    """The dotted keys that the groups' files may hold: the parameters of each target; where there is none, what is
    there."""
    return [f"{path}.{name}" for path, node in _nodes(cfg) if path for name in _parameters(path, node)]


def _parameters(path: str, node: DictConfig) -> list[str]:
    if "_target_" not in node:
        return [str(name) for name in node]
    try:
        parameters = inspect.signature(get_object(node["_target_"])).parameters
    except (ImportError, ValueError):
        return [str(name) for name in node]  # check_keys says what cannot be imported
    return [name for name in parameters if name not in RESERVED.get(path.split(".")[0], ())]
