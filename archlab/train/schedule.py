"""The learning rate over a run."""

import math

from archlab.train.settings import TrainSettings


def learning_rate(step: int, settings: TrainSettings) -> float:
    """The learning rate of step 0 <= step < settings.steps.

    Linear warm-up, whose last step is at the peak; it takes at most half of the run. Then `constant`; or `cosine`, down
    to `min_lr_ratio` of the peak at the last step; or `wsd` (warm-up, stable, decay; Hu et al. 2024, arXiv:2404.06395):
    the peak, then a line down to `min_lr_ratio` of it over the last `decay_fraction` of the run.
    """
    s, last = settings, settings.steps - 1
    warmup = min(s.warmup_steps, s.steps // 2)
    if step < warmup:
        return s.lr * (step + 1) / warmup
    peak = max(warmup - 1, 0)
    if s.schedule == "constant":
        share = 1.0
    elif s.schedule == "wsd":
        start = max(peak, last - max(1, round(s.decay_fraction * s.steps)))
        share = 1 - max(0, step - start) / max(1, last - start)
    else:
        share = (1 + math.cos(math.pi * (step - peak) / max(1, last - peak))) / 2
    return s.lr * (s.min_lr_ratio + (1 - s.min_lr_ratio) * share)
