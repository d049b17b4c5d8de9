"""What a run leaves behind: `config.yaml` from its start, and at its end `result.json`, one flat object whose names
carry their units."""

import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from omegaconf import DictConfig, OmegaConf

from archlab.config.identity import config_hash, differences, flatten, seeds
from archlab.errors import UsageError
from archlab.plugins import GROUPS
from archlab.run import log
from archlab.train import checkpoint

CONFIG, RESULT = checkpoint.CONFIG_FILE_NAME, "result.json"


WIDTH = re.compile(r"\.(d_\w+|\w+_dim|\w+_rank)$")
"""What the parameters of plugins that are widths in channels are called."""


def claim(
    run_dir: Path, cfg: DictConfig, *, resume: bool | Literal["auto"], anew: bool = False
) -> dict[str, Any] | None:
    """Make a folder this run's own, with its resolved configuration in it; returns the record of an earlier attempt.

    Errors: UsageError where the folder holds a run, unless `resume` and that run is of the same configuration; where
    there is none to resume, unless `anew`, as for those cells of a sweep that were not reached, or `resume` is "auto".
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    text = OmegaConf.to_yaml(cfg, resolve=True)
    if not resume:
        if any((run_dir / name).exists() for name in (RESULT, log.FILE_NAME, checkpoint.FILE_NAME)):
            raise _taken(run_dir)
        _create(run_dir / CONFIG, text)
        return None
    if not (run_dir / CONFIG).exists():
        if not anew and resume != "auto":
            raise UsageError(f"no run to go on with in {run_dir}: name its folder, hydra.run.dir=...")
        _create(run_dir / CONFIG, text)
        return None
    earlier = OmegaConf.load(run_dir / CONFIG)
    if config_hash(earlier) != config_hash(cfg):
        raise UsageError(f"{run_dir} holds a run of another configuration: {differences(earlier, cfg)}")
    return read(run_dir / RESULT) if (run_dir / RESULT).exists() else None


def _create(path: Path, text: str) -> None:
    """Write a new file, whole or not at all; of two processes at once, one does."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        draft.write_text(text, encoding="utf-8")
        os.link(draft, path)
    except FileExistsError:
        raise _taken(path.parent) from None
    finally:
        draft.unlink(missing_ok=True)


def _taken(folder: Path) -> UsageError:
    return UsageError(f"{folder} already holds a run: name another folder, or go on with it by train.resume=true")


def identity(cfg: DictConfig, choices: Mapping[str, str], overrides: Sequence[str]) -> dict[str, Any]:
    """The entries that say which run this is.

    Args:
        choices: the option chosen in each config group.
        overrides: what was set beside, as `key=value`.
    """
    plugin_keys = [o for o in overrides if o.startswith(("attn.", "ffn."))]
    return {
        "variant/attn": choices["attn"],
        "variant/ffn": choices["ffn"],
        "variant/name": " ".join([f"{choices['attn']}+{choices['ffn']}", *plugin_keys]),
        "variant/hash": config_hash(cfg, with_seed=False),
        "seed": cfg.seed,
        "seed/init": seeds(cfg)[0],
        "seed/data": seeds(cfg)[1],
        "config_hash": config_hash(cfg),
        **{f"config/{group}": choices[group] for group in ("model", "data", "train") if group in choices},
        "overrides": " ".join(overrides),
        "variant/fixed_widths": " ".join(_fixed_widths(cfg)),
    }


def _fixed_widths(cfg: DictConfig) -> list[str]:
    """The widths of the plugins, as `key=value`, that are numbers of their own and do not follow `model.d_model`."""
    flat = flatten({group: OmegaConf.to_container(cfg[group], resolve=True) for group in GROUPS})
    return [f"{key}={value}" for key, value in flat.items() if value and WIDTH.search(key)]


def environment(device: torch.device) -> dict[str, Any]:
    """The entries that say where it ran."""
    return {
        "env/torch": torch.__version__,
        "env/python": platform.python_version(),
        "env/cpu": _cpu_name(),
        "env/device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "env/threads": torch.get_num_threads(),
        "env/git": _commit(),
    }


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record whole or not at all; a number that is not finite becomes null."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        with draft.open("w", encoding="utf-8") as file:
            json.dump({k: _plain(v) for k, v in record.items()}, file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def read(path: Path) -> dict[str, Any]:
    """A record. Errors: UsageError where the file is not one."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return record | {"status": record["status"]}
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UsageError(f"{path} is not the record of a run ({error}): leave it out, or run it again") from error


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the checkout that archlab runs from, with `-dirty` where files differ from it; None elsewhere."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, encoding="utf-8", check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
