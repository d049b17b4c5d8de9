"""The device and the number format that a configuration names."""

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
