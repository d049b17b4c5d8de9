"""AdamW and the learning rate over a run."""

import math

import torch
from torch import nn

from archlab.train_settings import TrainSettings

NO_DECAY_NAMES = ("A_log", "dt_bias")
"""Parameters of decay and gate whose size is their meaning, whatever their shape."""

FUSED_DEVICES = ("cpu", "cuda", "mps")


def build_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) over all parameters, fused where the device can."""
    fused = next(model.parameters()).device.type in FUSED_DEVICES
    groups = param_groups(model, settings.weight_decay)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=tuple(settings.betas), eps=settings.eps, fused=fused)


def param_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Every parameter in one of two groups: decayed, and not (1-D parameters, embeddings, `NO_DECAY_NAMES`).

    A weight that several modules share stands in one group once.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    decayed, others = [], []
    for name, p in model.named_parameters():
        exempt = p.ndim < 2 or id(p) in embeddings or name.rpartition(".")[2] in NO_DECAY_NAMES
        (others if exempt else decayed).append(p)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


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
