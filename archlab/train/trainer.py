"""A training run as a whole: which batch comes next, at which rate, and the checkpoint that it can go on from."""

import random
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

from archlab.config.identity import differences
from archlab.data import Dataset
from archlab.errors import ArchlabError, UsageError
from archlab.model import LM
from archlab.train import checkpoint
from archlab.train.evaluate import evaluate
from archlab.train.schedule import learning_rate
from archlab.train.settings import TrainSettings
from archlab.train.speed import peak_memory_bytes, speed
from archlab.train.step import NotFinite, Stepper

FINAL_STEPS = 10
"""The final training loss is a mean over so many last steps: one batch is a noisy sample."""

COMPARED = {"config_hash": "another configuration", "seed": "another seed", "fingerprint": "other data"}
"""What a checkpoint must share with the run that goes on from it."""


class Diverged(ArchlabError):
    """The loss or the gradient is no longer a number."""


class Trainer:
    """A training run, a step at a time.

    Attributes:
        stepper: the model and its optimizer.
        step: optimizer steps done: also the position in the schedule and in the data.
        n_tokens: tokens read.
    """

    def __init__(
        self,
        model: LM,
        dataset: Dataset,
        settings: TrainSettings,
        *,
        seed: int,
        data_seed: int,
        device: torch.device,
        dtype: torch.dtype,
        run_dir: Path,
        config_hash: str,
    ):
        if dataset.vocab_size > model.vocab_size:
            raise UsageError(
                f"data={dataset.name} has token ids up to {dataset.vocab_size - 1}, "
                f"outside the model's vocabulary of {model.vocab_size}"
            )
        self.model, self.dataset, self.settings, self.seed, self.data_seed = model, dataset, settings, seed, data_seed
        self.run_dir, self.path, self.config_hash = run_dir, run_dir / checkpoint.FILE_NAME, config_hash
        self.stepper = Stepper(model, settings, device=device, dtype=dtype)
        self.step, self.n_tokens = 0, 0
        self.steps_to_target: int | None = None
        self.final_losses: deque[float] = deque(maxlen=FINAL_STEPS)
        self.step_seconds: list[float] = []

    @property
    def progress(self) -> float:
        """The share of the training that is done."""
        return self.step / self.settings.steps if self.settings.steps else 1.0

    def start(self) -> None:
        """Begin anew, with a first checkpoint, or go on from the run's own."""
        if self.stepper.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.stepper.device)
        _seed_everything(self.seed)
        resumed = self.settings.resume and self.path.is_file()
        if resumed:
            self._load()
        self.model.after_step(self.progress)
        if not resumed:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if self.dataset.codec is not None:
                (self.run_dir / checkpoint.CODEC_FILE_NAME).write_text(self.dataset.codec.to_json(), encoding="utf-8")
            self.save()

    def advance(self) -> dict[str, float]:
        """One optimizer step; returns its loss, its auxiliary losses, and what else is worth logging.

        Errors: Diverged.
        """
        start = time.perf_counter()
        lr = learning_rate(self.step, self.settings)
        inputs, targets = self._batch()
        try:
            values = self.stepper.step(inputs, targets, lr)
        except NotFinite as error:
            raise self._diverged(error) from error
        self.step += 1
        self.model.after_step(self.progress)
        self.n_tokens += inputs.numel()
        self.final_losses.append(values["train/loss"])
        self.step_seconds.append(time.perf_counter() - start)
        return values | {"train/lr": lr, "train/tokens_per_second": inputs.numel() / self.step_seconds[-1]}

    def validate(self) -> dict[str, float]:
        place = {"device": self.stepper.device, "dtype": self.stepper.dtype}
        return evaluate(self.model, self.dataset, "val", batch_size=self.settings.batch_size, **place)

    def reached_target(self, values: dict[str, float]) -> bool:
        """Whether a step's values hold a validation as good as was asked for; the step is then kept for the record."""
        target, accuracy = self.settings.target_accuracy, values.get("quality/val_accuracy")
        if target is None or accuracy is None or accuracy < target:
            return False
        self.steps_to_target = self.step
        return True

    def save(self) -> None:
        """Write a checkpoint. Weights that the last update ruined are Diverged: they may not replace good ones."""
        try:
            self.stepper.check(*self._batch())
        except NotFinite as error:
            raise self._diverged(error) from error
        checkpoint.save(self.path, self.model, self.stepper.optimizer, self._meta())

    def record(self) -> dict[str, float]:
        """The entries of the run's record: see `archlab.train.loop.train`."""
        entries: dict[str, float] = {"train/steps": self.step, "data/train_tokens": self.n_tokens}
        if self.steps_to_target is not None:
            entries["train/steps_to_target"] = self.steps_to_target
        if self.final_losses:
            entries["quality/train_loss_final"] = statistics.fmean(self.final_losses)
        entries |= speed(self.step_seconds, self.settings.batch_size * self.dataset.context)
        return entries | {"train/peak_memory_bytes": peak_memory_bytes(self.stepper.device)}

    def _batch(self) -> tuple[Tensor, Tensor]:
        """The batch of the step that comes next."""
        return self.dataset.batch(self.step, self.settings.batch_size, self.data_seed)

    def _meta(self) -> dict[str, Any]:
        config = self.run_dir / checkpoint.CONFIG_FILE_NAME
        return {
            "config": config.read_text(encoding="utf-8") if config.is_file() else "",
            "config_hash": self.config_hash,
            "final_losses": list(self.final_losses),
            "fingerprint": self.dataset.fingerprint,
            "n_tokens": self.n_tokens,
            "progress": self.progress,
            "seed": [self.seed, self.data_seed],
            "step": self.step,
            "vocab_size": self.model.vocab_size,
        }

    def _load(self) -> None:
        saved = checkpoint.load(self.path)
        now = self._meta()
        for key, what in COMPARED.items():
            if saved.meta[key] != now[key]:
                differing = differences(*(OmegaConf.create(meta["config"]) for meta in (saved.meta, now)))
                raise UsageError(
                    f"{self.path} is of {what}{f' ({differing})' if differing else ''}: "
                    "go on with the settings that it was made with, or start a run in another folder"
                )
        saved.restore_model(self.model)
        saved.restore_optimizer(self.model, self.stepper.optimizer)
        saved.restore_rng()
        self.step, self.n_tokens = saved.meta["step"], saved.meta["n_tokens"]
        self.final_losses.extend(saved.meta["final_losses"])

    def _diverged(self, error: NotFinite) -> Diverged:
        kept = f"the last good checkpoint is {self.path}" if self.path.is_file() else "there is no good checkpoint"
        return Diverged(
            f"{error} at step {self.step} of {self.settings.steps}: lower train.lr="
            f"{self.settings.lr:g} or raise train.warmup_steps; {kept}"
        )


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
