"""How long a step of a configuration takes on this machine, from a few of them."""

import time

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from archlab.config.device import resolve_device, resolve_dtype
from archlab.data import build_dataset
from archlab.model import build_model
from archlab.train.step import Stepper

WARMUP_STEPS, TIMED_STEPS = 1, 2


def seconds_of_step(cfg: DictConfig) -> float:
    """Seconds of one optimizer step, as the mean of `TIMED_STEPS` after `WARMUP_STEPS`."""
    device = resolve_device(cfg.device)
    dataset = build_dataset(cfg.data)
    torch.manual_seed(0)
    model = build_model(cfg, cfg.model.get("vocab_size") or dataset.vocab_size)
    settings = instantiate(cfg.train, _convert_="all")
    stepper = Stepper(model, settings, device=device, dtype=resolve_dtype(cfg.dtype, device))
    began = 0.0
    for step in range(WARMUP_STEPS + TIMED_STEPS):
        if step == WARMUP_STEPS:
            began = time.perf_counter()
        stepper.step(*dataset.batch(step, settings.batch_size, 0), settings.lr)
    return (time.perf_counter() - began) / TIMED_STEPS
