"""AdamW and the learning rate over a run."""

import torch
from torch import nn

from archlab.train.settings import TrainSettings

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
