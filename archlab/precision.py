"""Which device and which number format a run uses."""

from contextlib import AbstractContextManager, nullcontext

import torch

from archlab.errors import UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def resolve_device(name: str) -> torch.device:
    """The device of that name; "auto" is the first of cuda, mps, cpu that is there. Errors: UsageError."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True, "meta": True}
    if name == "auto":
        return torch.device(next(kind for kind, there in available.items() if there))
    kind, _, index = name.partition(":")
    if kind not in available or (index and not index.isdecimal()):
        raise UsageError(f"device={name}: give auto, {', '.join(available)}, or one by its number such as cuda:1")
    if not available[kind] or (kind == "cuda" and int(index or 0) >= torch.cuda.device_count()):
        raise UsageError(f"device={name} is not on this machine: give device=auto or device=cpu")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The number format of that name; "auto" is what the device computes fast: bfloat16 on a CUDA device that has
    instructions for it, else float32. Errors: UsageError."""
    if name == "auto":
        narrow = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if narrow else torch.float32
    if name not in DTYPES:
        raise UsageError(f"dtype={name}: give auto, {', '.join(DTYPES)}")
    if name == "float64" and device.type == "mps":
        raise UsageError("dtype=float64 is not supported by device=mps: give dtype=float32 or device=cpu")
    return DTYPES[name]


def weight_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the weights are kept in: float32 also where autocast computes in bfloat16."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widest_dtype(device: torch.device) -> torch.dtype:
    """For long sums."""
    return torch.float32 if device.type == "mps" else torch.float64


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """The context of a forward pass in `dtype`."""
    return torch.autocast(device.type, dtype) if dtype == torch.bfloat16 else nullcontext()


def without_autocast(device: torch.device) -> AbstractContextManager:
    """The context of what must compute in the number format of its inputs."""
    known = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if known else nullcontext()


def widen(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or as it is where that is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
