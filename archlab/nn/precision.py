"""Which device and which number format a run uses."""

from contextlib import AbstractContextManager, nullcontext

import torch


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
