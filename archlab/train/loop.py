"""A training run from its first step to its last: steps, validation, log, checkpoints, Ctrl-C."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from archlab.data import Dataset
from archlab.model import LM
from archlab.train.settings import TrainSettings
from archlab.train.trainer import Trainer


class Interrupted(KeyboardInterrupt):
    """Ctrl-C: the step that was under way is done and a checkpoint written."""


class Log(Protocol):
    """Where measurements go while the run trains."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Values measured at an optimizer step."""


class Progress(Protocol):
    """Whoever shows how far the training is."""

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Called after every step: how many are done, the last one's loss and speed."""


def train(
    model: LM,
    dataset: Dataset,
    settings: TrainSettings,
    *,
    seed: int,
    data_seed: int,
    device: torch.device,
    dtype: torch.dtype,
    log: Log,
    run_dir: Path,
    config_hash: str,
    progress: Progress | None = None,
    watch: Callable[["Trainer"], None] | None = None,
) -> dict[str, float]:
    """Train the model in place; returns the entries of the run's record.

    `seed` is that of dropout, `data_seed` that of the order of the batches. `run_dir` receives the checkpoint and the
    codec. Row n of the log holds what step n saw, at weights of n updates, and the validation after it where one is
    due. `watch` is called once, before the first step, with the trainer.

    Returns:
        `train/steps`; `train/steps_to_target`: of a task that reached `target_accuracy`; `data/train_tokens`: tokens
        read, resumed ones among them; `quality/train_loss_final`: nats, no auxiliary loss in it, mean over the last
        `FINAL_STEPS`; `train/tokens_per_second`, `train/step_ms_p50`: of this process, without its first steps,
        evaluations and checkpoints; `train/first_step_ms`: with compiling; `train/peak_memory_bytes`: of the CUDA
        allocator while training, elsewhere of the process so far.

    Errors: Diverged; Interrupted; UsageError where a checkpoint to go on from is of another run; ArchlabError where no
    checkpoint can be written.
    """
    trainer = Trainer(
        model,
        dataset,
        settings,
        seed=seed,
        data_seed=data_seed,
        device=device,
        dtype=dtype,
        run_dir=run_dir,
        config_hash=config_hash,
    )
    trainer.start()
    if watch is not None:
        watch(trainer)
    with _interruption() as asked:
        while trainer.step < settings.steps:
            values, step = trainer.advance(), trainer.step
            if progress is not None:
                progress.update(step, values["train/loss"], values["train/tokens_per_second"])
            validate = bool(settings.eval_every) and step % settings.eval_every == 0 and step < settings.steps
            if validate:
                values |= trainer.validate()
            if validate or (step - 1) % settings.log_every == 0:
                log.log(step - 1, values | {f"model/{k}": v for k, v in model.metrics().items()})
            if step == settings.steps or trainer.reached_target(values):
                break
            stop = asked()
            if stop or (settings.checkpoint_every and step % settings.checkpoint_every == 0):
                trainer.save()
            if stop:
                raise Interrupted(f"interrupted after step {step} of {settings.steps}: train.resume=true goes on")
        trainer.save()
    return trainer.record()


@contextmanager
def _interruption() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: the first press only asks to stop, a second one stops at once."""
    presses = []

    def press(signum, frame) -> None:
        if presses:
            raise KeyboardInterrupt
        presses.append(signum)

    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread alone
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(presses)
    finally:
        signal.signal(signal.SIGINT, before)
