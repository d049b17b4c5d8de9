"""The configuration of a training run: its budget and its optimizer."""

from dataclasses import dataclass
from typing import Literal

from archlab.data.base import check_whole
from archlab.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The budget and the optimizer. Every step trains on `batch_size` sequences.

    Attributes:
        steps: optimizer steps; 0 leaves the model as initialised.
        accumulate: pieces that a batch is computed in: less memory, the same gradient.
        lr: peak learning rate.
        min_lr_ratio: last learning rate over the peak.
        warmup_steps: steps up to the peak; at most half of the run is used.
        decay_fraction: share of the run that `wsd` decays over.
        clip: largest norm of the gradient; None leaves it as it is.
        compile: torch.compile the forward pass.
        checkpoint_every: steps between checkpoints beside the first and the last; None: no others.
        eval_every: steps between evaluations on the validation split; None: none while training.
        target_accuracy: of a task: end the training once a validation reaches it; null: train all steps.
        log_every: steps between rows of the log.
        resume: go on from the checkpoint in the run's folder, if it has one; "auto": also begin where there is no run
            yet, so that one command starts a run and goes on with it.
    """

    steps: int
    batch_size: int
    lr: float
    accumulate: int = 1
    min_lr_ratio: float = 0.1
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = 0
    decay_fraction: float = 0.2
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float | None = 1.0
    compile: bool = False
    checkpoint_every: int | None = None
    eval_every: int | None = None
    target_accuracy: float | None = None
    log_every: int = 1
    resume: Literal[False, True, "auto"] = False

    def __post_init__(self):
        for name, least in {"steps": 0, "batch_size": 1, "accumulate": 1, "warmup_steps": 0, "log_every": 1}.items():
            check_whole(f"train.{name}", getattr(self, name), least)
        for name in ("checkpoint_every", "eval_every"):
            if getattr(self, name) is not None:
                check_whole(f"train.{name}", getattr(self, name))
        if self.accumulate > self.batch_size:
            raise UsageError(
                f"train.accumulate={self.accumulate} is more than train.batch_size={self.batch_size}: give less"
            )
        if self.schedule not in ("cosine", "wsd", "constant"):
            raise UsageError(f"train.schedule={self.schedule!r}: give cosine, wsd or constant")
        for name in ("min_lr_ratio", "decay_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"train.{name}={getattr(self, name)}: give a share between 0 and 1")
        if self.target_accuracy is not None and not (0 < self.target_accuracy <= 1 and self.eval_every):
            raise UsageError(
                f"train.target_accuracy={self.target_accuracy}: give a share above 0 and up to 1, and train.eval_every"
            )
        if self.lr <= 0 or (self.clip is not None and self.clip <= 0):
            raise UsageError(f"train.lr={self.lr} and train.clip={self.clip}: give more than 0 (clip=null: no limit)")
