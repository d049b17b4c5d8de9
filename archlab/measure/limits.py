"""What this machine can do at best, measured in this process with torch's own kernels: the limit beside a latency."""

from functools import cache

import torch

from archlab.measure.timing import Effort, measure

LEAST_BYTES = 1 << 20
MOST_BYTES = 1 << 27
"""Sizes between which the bandwidth is measured: below, the call itself costs as much as the reading; above, no cache
holds anything."""

BRIEF = Effort(warmup_calls=2, warmup_s=0.01, calls=5, seconds=0.05)
LONG_ENOUGH_S = 0.01


def read_bandwidth(n_bytes: int, device: torch.device) -> float:
    """Bytes a second at which a buffer of `n_bytes` (rounded up to a power of two) is read again and again: from a
    cache level where it fits one, as a small model's weights and state do between two decode steps. The faster of a sum
    and a matrix-vector product.
    """
    size = min(max(n_bytes, LEAST_BYTES), MOST_BYTES)
    return _read_bandwidth(1 << (size - 1).bit_length(), device)


@cache
def _read_bandwidth(n_bytes: int, device: torch.device) -> float:
    matrix = torch.ones(n_bytes // 4 // 256, 256, device=device)
    vector = torch.ones(256, device=device)
    best = min(min(measure(call, device, BRIEF)) for call in (matrix.sum, lambda: matrix @ vector))
    return n_bytes / best


@cache
def gemm_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs a second (2 per multiply-add) of the fastest square matrix product; sizes double until one takes long."""
    best, n = 0.0, 512
    while True:
        matrix = torch.ones(n, n, device=device, dtype=dtype)
        seconds = min(measure(lambda matrix=matrix: matrix @ matrix, device, BRIEF))
        best = max(best, 2 * n**3 / seconds)
        if seconds >= LONG_ENOUGH_S:
            return best
        n *= 2
