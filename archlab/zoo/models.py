"""A configuration becomes a model on the meta device, and that its figures, counted by `archlab.account`."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.overrides import TorchFunctionMode
from yaml import YAMLError

from archlab.config.check import check_config
from archlab.config.compose import configuration, load, quote, top_level
from archlab.data import build_dataset
from archlab.errors import UsageError
from archlab.measure import account
from archlab.model import LM, build_model
from archlab.plugins import GROUPS, names
from archlab.zoo.published import Published

CONTEXTS = (1 << 13, 1 << 17, 1 << 20)
"""Tokens of context at which caches and decode steps are counted."""

DTYPE = torch.bfloat16
"""Of cached activations: what published figures mean where they say nothing."""

LONGEST = max(CONTEXTS)

WANTED = "give the config.yaml of a run, or a file like those of conf/zoo"

PER_TOKEN, CONSTANT, BYTES_AT = "cache/bytes_per_token_stored", "cache/bytes_constant", "cache/bytes_at"
PER_FIRST_TOKEN, FLOPS = "cache/bytes_per_first_token", "flops/decode_per_token_at"


class Model:
    """A model without weights, and its figures.

    Attributes:
        name: as its authors write it, or as its file is called.
        published: what they state of it.
        claims: each of these figures beside the counted one.
        entries: the figures by their names in the record; beside those of `account`, `params/active_non_embedding`
            (active ones but embedding and head) and `cache/bytes_per_first_token` (before any window is full).
    """

    def __init__(self, cfg: DictConfig, name: str):
        self.cfg = cfg
        self.published = Published.read(OmegaConf.to_container(cfg, resolve=True).get("published", {}), name)
        self.name = self.published.name
        self.lm = build(cfg)
        self._bytes: dict[int, int] = {}
        self.entries = self._count()
        self.claims = self.published.claims(self.entries)

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
    """The model of a user's file: the `config.yaml` of a run, or what could stand in `conf/zoo`. Without a published
    name it has that of the file, or of the run's folder.

    Errors: UsageError where there is none, where it is no configuration, or where that holds an unknown key.
    """
    try:
        return Model(_configuration(path), path.absolute().parent.name if path.stem == "config" else path.stem)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from error


def _configuration(path: Path) -> DictConfig:
    cfg = _load(path)
    if not all(OmegaConf.is_dict(cfg.get(group)) and "_target_" in cfg[group] for group in (*GROUPS, "model")):
        return _compose(path)
    groups, scalars = top_level()
    check_config(cfg, {k: v for k, v in scalars.items() if k in cfg}, [group for group in groups if group in cfg])
    return cfg


def _load(path: Path) -> DictConfig:
    try:
        cfg = OmegaConf.load(path)
    except FileNotFoundError:
        raise UsageError(f"there is no such file; {WANTED}") from None
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"it cannot be read ({' '.join(str(error).split())}); {WANTED}") from error
    if not OmegaConf.is_dict(cfg):
        raise UsageError(f"it holds no configuration; {WANTED}")
    return cfg


def _compose(path: Path) -> DictConfig:
    """The file on top of the default configuration, as `conf/zoo` is: Hydra finds it as the option of a group."""
    with tempfile.TemporaryDirectory() as folder:
        option = Path(folder, "yours", "model.yaml")
        option.parent.mkdir()
        option.write_bytes(path.read_bytes())
        return configuration([f"hydra.searchpath=[{quote(f'file://{folder}')}]", "+yours@_global_=model"])
