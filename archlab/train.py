"""The trainer: batches, the optimizer, checkpoints. It knows nothing of decoding.

Shapes: b sequences, t tokens.
"""

import math
import random
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from archlab import checkpoint
from archlab.data import IGNORE, Dataset
from archlab.errors import ArchlabError, UsageError
from archlab.evaluate import eval_mode, evaluate, token_losses
from archlab.log import Log
from archlab.mixer import Aux
from archlab.model import LM
from archlab.optim import build_optimizer, learning_rate
from archlab.precision import autocast, weight_dtype, widest_dtype
from archlab.record import differences
from archlab.train_settings import TrainSettings

try:
    import resource
except ImportError:  # Windows has none
    resource = None

UNTIMED_STEPS = 3
"""The first steps of a process, which allocate and compile, enter no speed figure."""

FINAL_STEPS = 10
"""The final training loss is a mean over so many last steps: one batch is a noisy sample."""

COMPARED = {"config_hash": "another configuration", "seed": "another seed", "fingerprint": "other data"}
"""What a checkpoint must share with the run that goes on from it."""


class Diverged(ArchlabError):
    """The loss or the gradient is no longer a number."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C: the step that was under way is done and a checkpoint written."""


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
    device: torch.device,
    dtype: torch.dtype,
    log: Log,
    run_dir: Path,
    config_hash: str,
    progress: Progress | None = None,
    watch: Callable[["Trainer"], None] | None = None,
) -> dict[str, float]:
    """Train the model in place; returns the entries of the run's record.

    `run_dir` receives the checkpoint and the codec. Row n of the log holds what step n saw, at weights of n updates,
    and the validation after it where one is due. `watch` is called once, before the first step, with the trainer.

    Returns:
        `train/steps`; `data/train_tokens`: tokens read, resumed ones among them; `quality/train_loss_final`: nats, no
        auxiliary loss in it, mean over the last `FINAL_STEPS`; `train/tokens_per_second`, `train/step_ms_p50`: of this
        process without its first `UNTIMED_STEPS`, evaluations and checkpoints; `train/first_step_ms`: with compiling;
        `train/peak_memory_bytes`: of the CUDA allocator while training, elsewhere of the process so far.

    Errors: Diverged; Interrupted; UsageError where a checkpoint to go on from is of another run; ArchlabError where no
    checkpoint can be written.
    """
    trainer = Trainer(
        model, dataset, settings, seed=seed, device=device, dtype=dtype, run_dir=run_dir, config_hash=config_hash
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
            if step == settings.steps:
                break
            stop = asked()
            if stop or (settings.checkpoint_every and step % settings.checkpoint_every == 0):
                trainer.save()
            if stop:
                raise Interrupted(f"interrupted after step {step} of {settings.steps}: train.resume=true goes on")
        trainer.save()
    return trainer.record()


class Trainer:
    """A training run, a step at a time.

    Attributes:
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
        self.dataset, self.settings, self.seed, self.device, self.dtype = dataset, settings, seed, device, dtype
        self.run_dir, self.path, self.config_hash = run_dir, run_dir / checkpoint.FILE_NAME, config_hash
        self.model = model.to(device, weight_dtype(dtype)).train()
        self.forward = _compiled(model) if settings.compile else model
        self.optimizer = build_optimizer(model, settings)
        self.step, self.n_tokens = 0, 0
        self.final_losses: deque[float] = deque(maxlen=FINAL_STEPS)
        self.step_seconds: list[float] = []

    @property
    def progress(self) -> float:
        """The share of the training that is done."""
        return self.step / self.settings.steps if self.settings.steps else 1.0

    def start(self) -> None:
        """Begin anew, with a first checkpoint, or go on from the run's own."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
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
        """One optimizer step; returns its loss, its auxiliary losses, and what else is worth logging."""
        start, s = time.perf_counter(), self.settings
        lr = learning_rate(self.step, s)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        inputs, targets = self.dataset.batch(self.step, s.batch_size, self.seed)
        losses = self._backward(inputs, targets)
        losses["train/grad_norm"] = clip_grad_norm_(self.model.parameters(), math.inf if s.clip is None else s.clip)
        wide = widest_dtype(self.device)
        # The only transfer to the host in a step, and before the update: weights never take one that is not finite.
        values = dict(zip(losses, torch.stack([v.to(wide) for v in losses.values()]).tolist(), strict=True))
        self._require_finite(values["train/loss"] + values["train/grad_norm"])
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.model.after_step(self.progress)
        self.n_tokens += inputs.numel()
        self.final_losses.append(values["train/loss"])
        self.step_seconds.append(time.perf_counter() - start)
        return values | {"train/lr": lr, "train/tokens_per_second": inputs.numel() / self.step_seconds[-1]}

    def _backward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Add up the gradients of a batch (b t), piece by piece; returns its loss and auxiliary losses, detached.

        Every target of the batch weighs the same, in whichever piece it stands.
        """
        n_pieces, n_targets = self.settings.accumulate, max(1, int((targets != IGNORE).sum()))
        sums: dict[str, Tensor] = {}
        for x, y in zip(inputs.tensor_split(n_pieces), targets.tensor_split(n_pieces), strict=True):
            loss, aux = self._losses(self.forward, x, y)
            parts = {"train/loss": loss / n_targets} | {f"train/aux/{k}": v / n_pieces for k, v in aux.items()}
            sum(parts.values()).backward()
            for name, value in parts.items():
                sums[name] = sums[name] + value.detach() if name in sums else value.detach()
        return sums

    def _losses(self, forward: Callable, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Aux]:
        """Cross-entropy summed over the targets of (b t) that count, and the auxiliary losses."""
        inputs, targets = self._to_device(inputs), self._to_device(targets)
        with autocast(self.device, self.dtype):
            logits, aux = forward(inputs)
        return token_losses(logits, targets).sum(), aux

    def _to_device(self, tensor: Tensor) -> Tensor:
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)

    def validate(self) -> dict[str, float]:
        return evaluate(
            self.model,
            self.dataset,
            "val",
            batch_size=self.settings.batch_size,
            device=self.device,
            dtype=self.dtype,
        )

    def save(self) -> None:
        """Write a checkpoint. Weights that the last update ruined are Diverged: they may not replace good ones."""
        inputs, targets = self.dataset.batch(self.step, self.settings.batch_size, self.seed)
        with torch.no_grad(), eval_mode(self.model):
            n_rows = -(-len(inputs) // self.settings.accumulate)
            self._require_finite(self._losses(self.model, inputs[:n_rows], targets[:n_rows])[0].item())
        checkpoint.save(self.path, self.model, self.optimizer, self._meta())

    def _meta(self) -> dict[str, Any]:
        config = self.run_dir / "config.yaml"
        return {
            "config": config.read_text(encoding="utf-8") if config.is_file() else "",
            "config_hash": self.config_hash,
            "final_losses": list(self.final_losses),
            "fingerprint": self.dataset.fingerprint,
            "n_tokens": self.n_tokens,
            "progress": self.progress,
            "seed": self.seed,
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
        saved.restore_optimizer(self.model, self.optimizer)
        saved.restore_rng()
        self.step, self.n_tokens = saved.meta["step"], saved.meta["n_tokens"]
        self.final_losses.extend(saved.meta["final_losses"])

    def _require_finite(self, value: float) -> None:
        if math.isfinite(value):
            return
        kept = f"the last good checkpoint is {self.path}" if self.path.is_file() else "there is no good checkpoint"
        raise Diverged(
            f"the loss or its gradient is {value} at step {self.step} of {self.settings.steps}: lower train.lr="
            f"{self.settings.lr:g} or raise train.warmup_steps; {kept}"
        )

    def record(self) -> dict[str, float]:
        """The entries of the run's record: see `train`."""
        record = {"train/steps": self.step, "data/train_tokens": self.n_tokens}
        if self.final_losses:
            record["quality/train_loss_final"] = statistics.fmean(self.final_losses)
        if self.step_seconds:
            timed = self.step_seconds[UNTIMED_STEPS:] or self.step_seconds[-1:]
            record |= {
                "train/tokens_per_second": self.settings.batch_size * self.dataset.context / statistics.fmean(timed),
                "train/step_ms_p50": 1e3 * statistics.median(timed),
                "train/first_step_ms": 1e3 * self.step_seconds[0],
            }
        return record | {"train/peak_memory_bytes": peak_memory_bytes(self.device)}


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held at once: by the CUDA allocator since its last reset, elsewhere by the process; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _compiled(model: LM) -> Callable:
    """The compiled forward pass. Errors: UsageError where compiling fails, in its first call."""
    from torch._dynamo.exc import TorchDynamoException  # a second to import, for those who compile

    forward = torch.compile(model)

    def call(tokens: Tensor) -> tuple[Tensor, Aux]:
        try:
            return forward(tokens)
        except TorchDynamoException as error:
            reason = " ".join(str(error).split("\n\n")[0].split())
            raise UsageError(f"train.compile=true does not work here ({reason}): give train.compile=false") from error

    return call


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


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
