"""Checkpoints: one safetensors file that holds all a run needs to go on, and that loads without running code.

Tensors: `model/<name>`, `optimizer/<parameter>/<moment>`, `rng/<device>`. The header holds a JSON object: what the
trainer passes as `meta`, and the states of Python's and NumPy's generators.
"""

import json
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from archlab.errors import ArchlabError, UsageError, is_full_disk

FILE_NAME = "checkpoint.safetensors"
CODEC_FILE_NAME = "codec.json"
CONFIG_FILE_NAME = "config.yaml"
HEADER = "archlab"
"""The header's only key: with several, their order and so the file's bytes would vary."""


@dataclass
class Checkpoint:
    """What a file held."""

    path: Path
    tensors: dict[str, Tensor]
    meta: dict[str, Any]

    def restore_model(self, model: nn.Module) -> None:
        """Copy the weights and buffers into the model. Errors: UsageError naming one that only one side has."""
        saved, wanted = _below("model/", self.tensors), _model_tensors(model)
        for name in sorted(saved.keys() ^ wanted.keys()):
            side = "has" if name in saved else "lacks"
            raise UsageError(f"{self.path} {side} the tensor {name!r}: it is of another configuration")
        with torch.no_grad():
            for name, tensor in wanted.items():
                if tensor.shape != saved[name].shape:
                    shapes = f"{tuple(saved[name].shape)}, not {tuple(tensor.shape)}"
                    raise UsageError(f"{name!r} in {self.path} is of shape {shapes}: it is of another configuration")
                tensor.copy_(saved[name])

    def restore_optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Set the moments of every parameter that had been stepped."""
        names = {id(p): name for name, p in model.named_parameters()}
        moments: dict[str, dict[str, Tensor]] = {}
        for key, tensor in _below("optimizer/", self.tensors).items():
            name, moment = key.rsplit("/", 1)
            moments.setdefault(name, {})[moment] = tensor.clone()  # the loaded one may be a view of the file
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state = {i: moments[names[id(p)]] for i, p in enumerate(parameters) if names[id(p)] in moments}
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})

    def restore_rng(self) -> None:
        """Set every random number generator that this machine has."""
        version, words, gauss = self.meta["rng"]["python"]
        random.setstate((version, tuple(words), gauss))
        state = self.meta["rng"]["numpy"]
        key = np.array(state["state"]["key"], dtype=np.uint32)
        np.random.set_state(state | {"state": state["state"] | {"key": key}})
        torch.set_rng_state(self.tensors["rng/cpu"])
        for i in range(torch.cuda.device_count()):
            if f"rng/cuda:{i}" in self.tensors:
                torch.cuda.set_rng_state(self.tensors[f"rng/cuda:{i}"], i)
        if torch.backends.mps.is_available() and "rng/mps" in self.tensors:
            torch.mps.set_rng_state(self.tensors["rng/mps"])


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, meta: dict[str, Any]) -> None:
    """Write a checkpoint. A kill or a full disk at any moment leaves the one before it as it was.

    Errors: ArchlabError where the disk is full or refuses.
    """
    tensors = {f"model/{name}": tensor for name, tensor in _model_tensors(model).items()}
    for name, p in model.named_parameters():
        for moment, value in optimizer.state.get(p, {}).items():
            tensors[f"optimizer/{name}/{moment}"] = value
    tensors |= _device_rng()
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    header = json.dumps(meta | {"rng": {"python": random.getstate(), "numpy": _numpy_rng()}}, sort_keys=True)
    _replace(path, tensors, {HEADER: header})


def load(path: Path, *, prefix: str = "") -> Checkpoint:
    """Read a checkpoint, or those of its tensors whose names start with `prefix`, onto the CPU.

    Errors: UsageError where there is none, or the file is not a whole one.
    """
    if not path.is_file():
        raise UsageError(f"no checkpoint at {path}: give the folder of a run that has trained")
    try:
        with safe_open(path, framework="pt") as file:
            meta = json.loads((file.metadata() or {})[HEADER])
            tensors = {name: file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118
    except (SafetensorError, KeyError, OSError) as error:
        raise UsageError(f"{path} is not a checkpoint of archlab, or a damaged one ({error})") from error
    return Checkpoint(path, tensors, meta)


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; a shared weight under its first name."""
    named = dict(model.named_parameters())
    aliases = dict(model.named_parameters(remove_duplicate=False)).keys() - named.keys()
    buffers = {name: t for name, t in model.state_dict().items() if name not in named and name not in aliases}
    return named | buffers


def _device_rng() -> dict[str, Tensor]:
    states = {"rng/cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"rng/cuda:{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    if torch.backends.mps.is_available():
        states["rng/mps"] = torch.mps.get_rng_state()
    return states


def _numpy_rng() -> dict[str, Any]:
    state = np.random.get_state(legacy=False)
    return state | {"state": state["state"] | {"key": state["state"]["key"].tolist()}}


def _replace(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write in a folder beside `path`, flush to the disk, then rename over it."""
    folder = path.with_name(f".{path.name}.draft")
    draft = folder / path.name
    try:
        shutil.rmtree(folder, ignore_errors=True)  # a kill may have left one
        folder.mkdir()
        save_file(tensors, draft, metadata=metadata)
        draft.chmod(folder.stat().st_mode & 0o666)  # safetensors lets none but the owner read
        _flush(draft)
        os.replace(draft, path)
        if os.name == "posix":
            _flush(path.parent)
    except (OSError, SafetensorError) as error:
        n_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
        reason = f"no space left for {n_bytes} bytes; free some" if is_full_disk(error) else f"{error}; check the disk"
        raise ArchlabError(f"the checkpoint {path} cannot be written: {reason}. What was there is kept") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
