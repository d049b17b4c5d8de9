"""Fair by size: one number of a variant is changed until a count of its model equals the reference's.

Everything is counted on the meta device, so no weight is ever made.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from omegaconf import DictConfig, OmegaConf

from archlab.data import build_dataset
from archlab.errors import UsageError
from archlab.measure.account import static
from archlab.model import build_model
from archlab.study.spec import COUNTS

TOLERANCE = 0.01
"""Largest distance from the reference's count, as a share of it."""

CONTEXT = 8192
"""Tokens of context at which caches are matched."""

FFN_WIDTHS = ("d_expert", "d_ff")
"""What the width of an FFN is called; that of experts first, where there are some."""

MOST = 1 << 16


def counts(cfg: DictConfig) -> dict[str, float]:
    """The four counts of `COUNTS` of a configuration's model."""
    vocab_size = cfg.model.get("vocab_size") or build_dataset(cfg.data).vocab_size
    model = build_model(cfg, vocab_size, device="meta")
    record = static(model, train_context=cfg.data.context, contexts=(CONTEXT,), dtype=torch.float32)
    return {name: record[entry] for name, entry in COUNTS.items()}


def matched(cfg: DictConfig, wanted: float, count: str, knob: str) -> list[str]:
    """The overrides that bring a count of the model within `TOLERANCE` of a wanted one: none where it is already.

    Errors: UsageError naming the nearest count that can be reached.
    """
    key = _key(cfg, knob)

    def counted(value: int) -> float | None:
        """The count at a value of the knob; None for a size that the model refuses."""
        changed = OmegaConf.merge(cfg, OmegaConf.from_dotlist([f"{key}={value}"]))
        try:
            return counts(changed)[count]
        except UsageError:
            return None

    own = counts(cfg)[count]
    if abs(own - wanted) <= TOLERANCE * wanted:
        return []
    value, reached = nearest_count(counted, wanted)
    if abs(reached - wanted) > TOLERANCE * wanted:
        raise UsageError(
            f"match={count}: {key} brings it to {reached:,.0f} at the nearest (at {value}), and {wanted:,.0f} within "
            f"{TOLERANCE:.0%} is wanted; match another count, or by another of ffn_width, n_layers, d_model"
        )
    return [f"{key}={value}"]


def nearest_count(counted: Callable[[int], float | None], wanted: float) -> tuple[int, float]:
    """The whole number from 1 to `MOST` whose count is nearest to the wanted one, and that count. The count grows with
    the number; numbers without one are passed over."""
    low, high = 1, 1
    while high < MOST and (_next(counted, high)[1] or 0) < wanted:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        value, count = _next(counted, middle)
        if value >= high or count is None:
            break
        low, high = (value, high) if count < wanted else (low, middle)
    near = {v: c for v in range(max(1, low - 8), high + 9) if (c := counted(v)) is not None}
    return min(near.items(), key=lambda pair: abs(pair[1] - wanted))


def _next(counted: Callable[[int], float | None], value: int) -> tuple[int, float | None]:
    """The first number from `value` on that has a count, looking 64 ahead."""
    for candidate in range(value, value + 64):
        if (count := counted(candidate)) is not None:
            return candidate, count
    return value, None


def _key(cfg: DictConfig, knob: str) -> str:
    if knob != "ffn_width":
        return f"model.{knob}"
    for name in FFN_WIDTHS:
        if name in cfg.ffn:
            return f"ffn.{name}"
    raise UsageError(f"match_by=ffn_width: {cfg.ffn._target_} has no width; give match_by=n_layers or d_model")
