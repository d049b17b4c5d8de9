"""A configuration becomes a model on the meta device, and that its figures, counted by `archlab.account`."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.overrides import TorchFunctionMode
from yaml import YAMLError

from archlab import account
from archlab.check import check_config
from archlab.cli import top_level
from archlab.data import build_dataset
from archlab.errors import UsageError
from archlab.model import LM, build_model
from archlab.plugins import GROUPS, load, names
from archlab.zoo.published import Published

CONTEXTS = (1 << 13, 1 << 17, 1 << 20)
"""Tokens of context at which caches and decode steps are counted."""

DTYPE = torch.bfloat16
"""Of cached activations: what published figures mean where they say nothing."""

LONGEST = max(CONTEXTS)

PER_TOKEN, CONSTANT, BYTES_AT = "cache/bytes_per_token_stored", "cache/bytes_constant", "cache/bytes_at"
PER_FIRST_TOKEN, FLOPS = "cache/bytes_per_first_token", "flops/decode_per_token_at"


class Model:
    """A model without weights, and its figures.

    Attributes:
        name: as its authors write it, or as its file is called.
        published: what they state of it.
        entries: the figures by their names in the record; beside those of `account`, `params/active_non_embedding`
            (active ones but embedding and head) and `cache/bytes_per_first_token` (before any window is full).
    """

    def __init__(self, cfg: DictConfig, name: str):
        self.cfg = cfg
        self.published = Published.read(cfg.get("published") or {}, name)
        self.name = self.published.name
        self.lm = build(cfg)
        self._bytes: dict[int, int] = {}
        self.entries = self._count()

    def cache_bytes(self, context: int) -> int:
        """Of one sequence."""
        if context not in self._bytes:
            self._bytes[context] = account.cache_bytes(self.lm, context, DTYPE)
        return self._bytes[context]

    def _count(self) -> dict[str, int | float]:
        params = account.parameters(self.lm)
        ends = params["total"] - params["non_embedding"]
        params["active_non_embedding"] = params["active"] - ends
        entries = {f"params/{part}": n for part, n in params.items()} | account.cache_growth(self.lm, DTYPE)
        entries[PER_FIRST_TOKEN] = self.cache_bytes(2) - self.cache_bytes(1)
        for context in sorted({*CONTEXTS, *self.published.contexts(BYTES_AT)}):
            entries[f"{BYTES_AT}/{context}"] = self.cache_bytes(context)
            entries[f"cache/read_bytes_at/{context}"] = account.cache_read_bytes(self.lm, context, DTYPE)
            entries[f"{FLOPS}/{context}"] = account.decode_flops(self.lm, context)
        return entries


def build(cfg: DictConfig) -> LM:
    """The model of a configuration, on the meta device."""
    with _Undrawn():
        return build_model(cfg, cfg.model.get("vocab_size") or build_dataset(cfg.data).vocab_size, device="meta")


class _Undrawn(TorchFunctionMode):
    """Leaves initialisation out: on the meta device there are no numbers to draw, and trying takes half the time."""

    def __torch_function__(self, func, types, args=(), kwargs=None) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return (kwargs or {}).get("tensor", *args[:1])
        return func(*args, **(kwargs or {}))


def zoo() -> list[Model]:
    """Every model of `conf/zoo`."""
    return [Model(load([f"zoo={name}"]), name) for name in names("zoo")]


def read(path: Path) -> Model:
    """The model of a user's file: the `config.yaml` of a run, or what could stand in `conf/zoo`.

    Errors: UsageError where there is none, where it is no configuration, or where that holds an unknown key.
    """
    cfg = _load(path)
    composed = all(OmegaConf.is_dict(cfg.get(group)) and "_target_" in cfg[group] for group in (*GROUPS, "model"))
    cfg = cfg if composed else _compose(path)
    groups, scalars = top_level()
    known = OmegaConf.create({key: value for key, value in cfg.items() if key != "published"})
    check_config(known, {k: v for k, v in scalars.items() if k in known}, [g for g in groups if g in known])
    return Model(cfg, str(path))


def _load(path: Path) -> DictConfig:
    try:
        cfg = OmegaConf.load(path)
    except FileNotFoundError:
        raise UsageError(f"there is no {path}: give a run's config.yaml, or a file like those of conf/zoo") from None
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not OmegaConf.is_dict(cfg):
        raise UsageError(f"{path} holds no configuration: give a run's config.yaml, or a file like those of conf/zoo")
    return cfg


def _compose(path: Path) -> DictConfig:
    """The file on top of the default configuration, as `conf/zoo` is: found by Hydra as the option of a group."""
    with tempfile.TemporaryDirectory() as folder:
        option = Path(folder, "yours", "model.yaml")
        option.parent.mkdir()
        option.write_bytes(path.read_bytes())
        return load([f"hydra.searchpath=[file://{folder}]", "+yours@_global_=model"])
