"""Every tensor that hangs on an object, wherever it is hidden: in an attribute, a list, a closure."""

from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

MODULE_INTERNALS = frozenset(vars(nn.Module()))
"""Attributes that every module has; parameters, buffers and submodules are looked up by their own names."""


def held_tensors(root: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """(path, tensor) of every tensor below an object, each once. Modules below it are not entered: they are looked at
    one by one."""
    yield from _walk(root, path, set())


def _walk(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, str | bytes | int | float | complex | type | ModuleType | torch.dtype | torch.device):
        return
    if value is None or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield path, value
        return
    if isinstance(value, dict):
        parts = [(f"{path}[{key!r}]", child) for key, child in value.items()]
    elif isinstance(value, list | tuple | set | frozenset):
        parts = [(f"{path}[{i}]", child) for i, child in enumerate(value)]
    elif isinstance(value, FunctionType):
        parts = [(f"{path}()", cell.cell_contents) for cell in value.__closure__ or () if _filled(cell)]
    elif isinstance(value, nn.Module) and path:
        return
    else:
        parts = [(f"{path}.{name}", child) for name, child in getattr(value, "__dict__", {}).items()]
    for at, child in parts:
        yield from _walk(child, at, seen)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def fingerprint(model: nn.Module) -> dict[str, Any]:
    """What every module below a model holds, by path: copies of its tensors, and its other attributes as text. Whatever
    is kept there from one call to the next shows as a difference."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in MODULE_INTERNALS}
        for at, tensor in held_tensors([*module._parameters.values(), *module._buffers.values(), own], path):
            found[at] = tensor.detach().clone()
        found |= {f"{path}.{name}": repr(v) for name, v in own.items() if not isinstance(v, Tensor | nn.Module)}
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The paths at which two fingerprints differ, sorted."""
    both = before.keys() & after.keys()
    return sorted((before.keys() ^ after.keys()) | {path for path in both if not same(before[path], after[path])})


def same(a: Any, b: Any) -> bool:
    """Equal to the bit; NaN is equal to NaN."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else a == b
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
