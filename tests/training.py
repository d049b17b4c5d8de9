"""A model, data and a run small enough to train many times in a test."""

from functools import partial

import numpy as np
import torch
from torch import nn

from archlab.attn.gqa import GroupedQueryAttention
from archlab.data import IGNORE
from archlab.data.base import Dataset
from archlab.ffn.swiglu import SwiGLU
from archlab.model import LM
from archlab.train.loop import train
from archlab.train.settings import TrainSettings
from archlab.train.trainer import Trainer

CPU = torch.device("cpu")
VOCAB = 23


class Uneven(Dataset):
    """Random rows whose number of counted targets differs, none among them."""

    name, vocab_size, fingerprint = "uneven", VOCAB, "uneven"
    n_tokens = {"val": 40, "test": 40}  # noqa: RUF012

    def __init__(self, context: int = 10):
        super().__init__(context=context, eval_tokens=None)

    def train_row(self, rng):
        inputs, targets = rng.integers(VOCAB, size=(2, self.context))
        return inputs, np.where(np.arange(self.context) < rng.integers(self.context), targets, IGNORE)

    def n_eval_rows(self, split):
        return 4

    def eval_row(self, split, i):
        return self.train_row(np.random.default_rng(i))


class Rows(list):
    def log(self, step, values):
        self.append((step, values))

    def column(self, name):
        return [values[name] for _, values in self]


class AuxFFN(SwiGLU):
    """Adds an auxiliary loss of known gradient: the mean over tokens of a learned weight times the squared input."""

    def __init__(self, d_model, *, d_ff=None):
        super().__init__(d_model, d_ff=d_ff)
        self.probe = nn.Parameter(torch.ones(d_model))
        self.seen = []

    def forward(self, x):
        return super().forward(x)[0], {"probe": (self.probe * x.detach() ** 2).mean()}

    def after_step(self, progress):
        self.seen.append(progress)

    def metrics(self):
        return {"probe_norm": float(self.probe.detach().norm())}


def make_settings(**overrides) -> TrainSettings:
    return TrainSettings(**{"steps": 4, "batch_size": 6, "lr": 1e-2} | overrides)


def make_model(*, ffn=SwiGLU, seed=0, **model) -> LM:
    torch.manual_seed(seed)
    attn = partial(GroupedQueryAttention, n_heads=4, n_kv_heads=2)
    return LM(vocab_size=VOCAB, attn=attn, ffn=ffn, d_model=16, n_layers=2, **model)


def make_trainer(path, model=None, data=None, *, seed=0, dtype=torch.float64, **overrides) -> Trainer:
    model = make_model() if model is None else model
    data, s = data or Uneven(), make_settings(**overrides)
    return Trainer(model, data, s, seed=seed, data_seed=seed, device=CPU, dtype=dtype, run_dir=path, config_hash="hash")


def run(path, model=None, data=None, *, seed=0, dtype=torch.float32, progress=None, **overrides):
    model = make_model() if model is None else model
    rows, s = Rows(), make_settings(**overrides)
    record = train(
        model,
        data or Uneven(),
        s,
        seed=seed,
        data_seed=seed,
        device=CPU,
        dtype=dtype,
        log=rows,
        run_dir=path,
        config_hash="hash",
        progress=progress,
    )
    return model, rows, record
