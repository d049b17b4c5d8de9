"""How fast training went, and how much memory it took."""

import statistics
import sys
from collections.abc import Sequence

import torch

try:
    import resource
except ImportError:  # Windows has none
    resource = None

UNTIMED_STEPS = 3
"""The first steps of a process, which allocate and compile, enter no speed figure."""


def speed(step_seconds: Sequence[float], tokens_per_step: int) -> dict[str, float]:
    """`train/tokens_per_second` and `train/step_ms_p50`, without the first `UNTIMED_STEPS`; `train/first_step_ms`.
    Nothing of a process that made no step."""
    if not step_seconds:
        return {}
    timed = step_seconds[UNTIMED_STEPS:] or step_seconds[-1:]
    return {
        "train/tokens_per_second": tokens_per_step / statistics.fmean(timed),
        "train/step_ms_p50": 1e3 * statistics.median(timed),
        "train/first_step_ms": 1e3 * step_seconds[0],
    }


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held at once: by the CUDA allocator since its last reset, elsewhere by the process; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
