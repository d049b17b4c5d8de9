"""Where a run's measurements go while it runs: always `metrics.jsonl`, and Weights & Biases as a mirror of it."""

import hashlib
import importlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from archlab.errors import UsageError

FILE_NAME = "metrics.jsonl"

TIMEOUTS = {"init_timeout": 30.0, "finish_timeout": 60.0, "finish_timeout_raises": True}
"""W&B settings, in seconds: how long a server that does not answer may hold up a run."""

TRAIN_AXIS, EVAL_AXIS = "train/step", "eval/step"
"""The axes of W&B's plots, sent with each row. Its own step counter would drop rows that come out of order."""


@dataclass(frozen=True)
class Labels:
    """What tells a run from others where many are shown: `group` is the sweep, `name` the variant."""

    name: str
    group: str | None = None
    tags: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)


class Log(Protocol):
    """One sink. `close` is called whatever happened."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Values measured at an optimizer step."""

    def summary(self, record: Mapping[str, Any]) -> None:
        """The record of the finished run."""

    def close(self) -> None: ...


def build_log(cfg: DictConfig, run_dir: Path, labels: Labels) -> Log:
    """The sink that `cfg` (the config group `log`) describes."""
    settings = OmegaConf.to_container(cfg, resolve=True)
    return get_object(settings.pop("_target_"))(run_dir, labels, **settings)


class JsonlLog:
    """One JSON object a line: `step`, and the values; null where one is not finite.

    A resumed run repeats the steps after its checkpoint, so the first row drops what the file holds from its step on.
    """

    def __init__(self, run_dir: Path, labels: Labels | None = None):
        self.path = Path(run_dir) / FILE_NAME
        self.file = None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if self.file is None:
            _cut(self.path, step)
            self.file = self.path.open("a", encoding="utf-8")
        row = {"step": step} | {name: value if math.isfinite(value) else None for name, value in values.items()}
        print(json.dumps(row), file=self.file, flush=True)

    def summary(self, record: Mapping[str, Any]) -> None:
        """The record is a file of its own."""

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def _cut(path: Path, step: int) -> None:
    """Drop the rows at and after a step, and a last one that a kill cut short."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        end = 0
        for line in file:
            if not line.endswith(b"\n") or json.loads(line)["step"] >= step:
                break
            end += len(line)
        file.truncate(end)


class WandbLog(JsonlLog):
    """The file, and its mirror at Weights & Biases. What fails there is said once, and the run goes on.

    Args:
        mode: "offline" keeps the mirror in the run's folder, for `wandb sync`; "online" sends it.
        project, entity: where it belongs.
    """

    def __init__(
        self,
        run_dir: Path,
        labels: Labels,
        *,
        mode: Literal["offline", "online"] = "offline",
        project: str = "archlab",
        entity: str | None = None,
    ):
        super().__init__(run_dir)
        if mode not in ("offline", "online"):
            raise UsageError(f"log.mode={mode}: give offline or online")
        self.run, self.unsent, self.exit_code, self.offline = None, [], 0, mode == "offline"
        self._attempt("the run", lambda: self._start(labels, mode, project, entity))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        super().log(step, values)
        axis = EVAL_AXIS if any(name.startswith("quality/") for name in values) else TRAIN_AXIS
        self._attempt(f"step {step}", lambda: self._started().log({**values, axis: step}))

    def summary(self, record: Mapping[str, Any]) -> None:
        self.exit_code = 0 if record["status"] == "ok" else 1
        self._attempt("the record", lambda: self._started().summary.update(dict(record)))

    def close(self) -> None:
        super().close()
        if self.run is not None:
            self._attempt("the end of the run", lambda: self.run.finish(exit_code=self.exit_code))
            if self.offline:
                here = self.path.parent / "wandb" / "offline-run-*"
                print(f"W&B: offline, so nothing was sent; wandb sync {here} does", file=sys.stderr)
        if self.unsent:
            print(f"W&B: not sent: {_shortened(self.unsent)}. The run's folder has it all", file=sys.stderr)

    def _started(self) -> Any:
        if self.run is None:
            raise ConnectionError("no run to send to")
        return self.run

    def _start(self, labels: Labels, mode: str, project: str, entity: str | None) -> None:
        wandb = importlib.import_module("wandb")  # a second to import, and it may be missing
        self.run = wandb.init(
            project=project,
            entity=entity,
            mode=mode,
            dir=str(self.path.parent),
            id=hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:16],
            resume="allow" if mode == "online" else None,
            group=labels.group,
            name=labels.name,
            tags=list(labels.tags),
            config=labels.config,
            settings=wandb.Settings(silent=True, console="off", **TIMEOUTS),
        )
        for axis, names in ((TRAIN_AXIS, "*"), (EVAL_AXIS, "quality/*")):
            self.run.define_metric(axis, hidden=True)
            self.run.define_metric(names, step_metric=axis)

    def _attempt(self, what: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:
            if not self.unsent:
                print(f"W&B: {' '.join(str(error).split())}. The run goes on without it", file=sys.stderr)
            self.unsent.append(what)


def _shortened(names: list[str]) -> str:
    return ", ".join(names if len(names) < 5 else [*names[:2], f"{len(names) - 3} more", names[-1]])
