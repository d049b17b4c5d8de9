"""When two configurations are of the same run: what decides its results, as a hash, and what differs."""

import hashlib
import json
from typing import Any

from omegaconf import DictConfig, OmegaConf

DECIDING = ("attn", "ffn", "model", "data", "train")
"""The config groups that decide a run's results, beside its seed and dtype."""

INDIFFERENT = {"data": ("seed",), "train": ("resume", "checkpoint_every", "eval_every", "log_every")}
"""Their keys that do not."""


def seeds(cfg: DictConfig) -> tuple[int, int]:
    """Of the weights (and of dropout), and of the order of the data: `seed` for either that has none of its own."""
    own = (cfg.get("init_seed"), cfg.data.get("seed"))
    return tuple(cfg.seed if seed is None else seed for seed in own)


def config_hash(cfg: DictConfig, *, with_seed: bool = True) -> str:
    """16 hexadecimal digits of everything in a configuration that decides the results; without its seed, what the runs
    of one variant have in common."""
    deciding = {group: OmegaConf.to_container(cfg[group], resolve=True) for group in DECIDING}
    for group, keys in INDIFFERENT.items():
        deciding[group] = {k: v for k, v in deciding[group].items() if k not in keys}
    deciding |= {"dtype": cfg.dtype} | ({"seeds": seeds(cfg)} if with_seed else {})
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:16]


def cell_hash(cfg: DictConfig) -> str:
    """8 hexadecimal digits of a whole configuration but Hydra's own part and whether to resume: the name of a cell of a
    sweep, whatever else the sweep holds."""
    plain = {
        key: OmegaConf.to_container(cfg[key], resolve=True) if OmegaConf.is_config(cfg[key]) else cfg[key]
        for key in cfg
        if key != "hydra"
    }
    plain["train"] = {k: v for k, v in plain["train"].items() if k != "resume"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:8]


OmegaConf.register_new_resolver("cell_hash", lambda *, _root_: cell_hash(_root_), replace=True)


def differences(earlier: DictConfig, now: DictConfig) -> str:
    """Every key whose value differs, with both values, in one line."""
    before, after = (flatten(OmegaConf.to_container(cfg, resolve=True)) for cfg in (earlier, now))
    keys = [key for key in sorted(before | after) if before.get(key) != after.get(key) and key != "train.resume"]
    return ", ".join(f"{key}={before.get(key)}, now {after.get(key)}" for key in keys)


def flatten(node: Any, path: str = "") -> dict[str, Any]:
    """The values of nested dicts by dotted key."""
    if not isinstance(node, dict):
        return {path: node}
    return {k: v for name, child in node.items() for k, v in flatten(child, f"{path}.{name}".lstrip(".")).items()}
