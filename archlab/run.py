"""One run: the only file that knows all the stages, from data and model to the record."""

import os
import re
import shlex
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import joblib
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from archlab import account, bench, equivalence, evaluate, record, train
from archlab.card import Reporter, card, human_count
from archlab.data import Dataset, build_dataset
from archlab.errors import ArchlabError, UsageError, foreseen, sentence
from archlab.log import Labels, Log, build_log
from archlab.model import LM, build_model
from archlab.plugins import GROUPS, PRESETS
from archlab.precision import resolve_device, resolve_dtype
from archlab.walkthrough import Walkthrough

STATIC_CONTEXTS = (1 << 10, 1 << 13, 1 << 17, 1 << 20)
"""Tokens of context at which every cache is weighed."""

OWN = "own"
"""In place of an option's name where a configuration holds a plugin that is none of the group's."""

TRACEBACK = "traceback.txt"

PLAIN_VALUE = re.compile(r"[\w./:+\-]+")


@dataclass(frozen=True)
class Job:
    """Which run this is, beside its configuration.

    Attributes:
        run_dir: its folder.
        choices: the option chosen in each config group.
        overrides: what the command line set, as `key=value`, groups among it.
        sweep_dir: the folder of the sweep that it is a cell of.
        n_parallel: runs that share the machine with it, itself among them.
    """

    run_dir: Path
    choices: Mapping[str, str]
    overrides: tuple[str, ...] = ()
    sweep_dir: Path | None = None
    n_parallel: int = 1

    @classmethod
    def current(cls) -> "Job":
        """The job that Hydra is running."""
        hydra = HydraConfig.get()
        return cls(
            run_dir=Path(os.path.relpath(hydra.runtime.output_dir)),
            choices=dict.fromkeys(GROUPS, OWN) | {k: v for k, v in hydra.runtime.choices.items() if v is not None},
            overrides=tuple(override.lstrip("+") for override in hydra.overrides.task),
            sweep_dir=Path(hydra.sweep.dir) if hydra.mode == RunMode.MULTIRUN else None,
            n_parallel=_n_parallel(hydra.launcher.get("n_jobs", 1)),
        )

    @property
    def settings(self) -> list[str]:
        """The overrides that are not the choice of a group's option."""
        return [o for o in self.overrides if o.partition("=")[0] not in self.choices]

    @property
    def headline(self) -> str:
        """The variant, and whether anybody asked for it."""
        names = " ".join(f"{group}={self.choices[group]}" for group in GROUPS)
        presets = " ".join(f"{group}={self.choices[group]}" for group in PRESETS if group in self.choices)
        if presets:
            return f"{presets}: {names}"
        absent = [group for group in GROUPS if not any(o.startswith(f"{group}=") for o in self.overrides)]
        asked = f" (no {' or '.join(absent)} given)" if absent else ""
        return f"{'baseline: ' if absent == list(GROUPS) else ''}{names}{asked}"

    def resuming(self) -> str:
        """The command that goes on with this run."""
        kept = [o for o in self.overrides if not o.startswith("train.resume=")]
        return shlex.join(
            ["python", "-m", "archlab", *kept, "train.resume=true", f"hydra.run.dir={quote(str(self.run_dir))}"]
        )


def run(cfg: DictConfig, job: Job) -> tuple[dict[str, Any], Exception | None]:
    """Go through all the stages. Returns the record, which `result.json` in the run's folder holds too, and the error
    that ended the run, if one did.

    Errors: UsageError where the run cannot begin; KeyboardInterrupt, once the record is written; OSError where it
    cannot be written.
    """
    began, console = time.perf_counter(), Console()
    console.print(job.headline, highlight=False, markup=False, soft_wrap=True)
    cfg, device, dtype = resolve(cfg)
    earlier = record.claim(job.run_dir, cfg, resume=cfg.train.resume, anew=job.sweep_dir is not None)
    if earlier and earlier["status"] == "ok":
        console.print(f"done already: {job.run_dir}", highlight=False, markup=False, soft_wrap=True)
        return earlier, None
    entries = {"status": "ok"} | record.identity(cfg, job.choices, job.settings) | record.environment(device)
    entries["env/parallel_jobs"] = job.n_parallel
    reporter = Reporter(console, cfg.train.steps, stages=job.sweep_dir is None, quiet=job.n_parallel > 1)
    error = None
    with closing(build_log(cfg.log, job.run_dir, _labels(cfg, job, entries))) as log, closing(reporter):
        try:
            for part in _stages(cfg, job.run_dir, device, dtype, log, reporter):
                entries |= part
        except (Exception, KeyboardInterrupt) as raised:
            error = raised
            entries |= {"status": _status(error), "error": sentence(error)}
            _keep_traceback(job.run_dir, error)
        entries["run/wall_s"] = time.perf_counter() - began
        record.write(job.run_dir / record.RESULT, entries)
        log.summary(entries)
    _say(console, job, entries, reporter.appendix)
    if isinstance(error, KeyboardInterrupt):
        raise error
    return entries, error


def resolve(cfg: DictConfig) -> tuple[DictConfig, torch.device, torch.dtype]:
    """The configuration with its device and number format by name, and both. Errors: UsageError."""
    device = resolve_device(cfg.device)
    dtype = resolve_dtype(cfg.dtype, device)
    if device.type == "meta" and cfg.train.steps:
        raise UsageError("device=meta has shapes but no numbers to train: add train.steps=0 for the static card")
    if not issubclass(get_object(cfg.bench._target_), bench.BenchSettings):
        raise UsageError(f"a run cannot time {cfg.bench._target_}: python -m archlab.bench does")
    named = {"device": str(device), "dtype": str(dtype).removeprefix("torch.")}
    return OmegaConf.merge(cfg, named), device, dtype


def _stages(
    cfg: DictConfig, run_dir: Path, device: torch.device, dtype: torch.dtype, log: Log, reporter: Reporter
) -> Iterator[dict[str, Any]]:
    """The entries of the record, stage by stage, so that a run that fails keeps those it had."""
    weigh = partial(account.static, train_context=cfg.data.context, contexts=STATIC_CONTEXTS, dtype=dtype)
    if device.type == "meta":
        yield weigh(_build(cfg, cfg.model.get("vocab_size") or build_dataset(cfg.data).vocab_size, device))
        return
    settings, timing = instantiate(cfg.train, _convert_="all"), instantiate(cfg.bench, _convert_="all")
    dataset = build_dataset(cfg.data)
    yield _data_entries(dataset)
    model = _build(cfg, cfg.model.get("vocab_size") or dataset.vocab_size, "cpu")
    yield (static := weigh(model))
    reporter.stage(f"training {human_count(static['params/total'])} parameters on {dataset.name}")
    place = {"device": device, "dtype": dtype}
    files = {"log": log, "run_dir": run_dir, "config_hash": record.config_hash(cfg)}
    walk = Walkthrough(dataset) if cfg.explain else None
    eyes = {"progress": reporter, "watch": walk.watch if walk else None}
    trained = train.train(model, dataset, settings, seed=cfg.seed, **place, **files, **eyes)
    yield trained | {"flops/train_total": static["flops/train_per_token"] * trained["data/train_tokens"]}
    reporter.stage("evaluating")
    for split in ("val", "test"):
        yield evaluate.evaluate(model, dataset, split, batch_size=settings.batch_size, **place)
    reporter.stage("proving that cached decoding is the full pass")
    length, batch = timing.gate_length, timing.gate_batch
    yield (proof := equivalence.gate(model, length=length, batch=batch, dtype=dtype, seed=cfg.seed))
    reporter.stage("timing prefill and decode")
    yield bench.latency(model, timing, dtype=dtype, gate=proof)
    if walk:
        reporter.appendix += walk.lines(model, run_dir)


def _build(cfg: DictConfig, vocab_size: int, device: torch.device | str) -> LM:
    torch.manual_seed(cfg.seed)
    return build_model(cfg, vocab_size, device=device)


def _data_entries(dataset: Dataset) -> dict[str, Any]:
    facts = {"name": dataset.name, "fingerprint": dataset.fingerprint, "context": dataset.context}
    facts |= {f"{split}_tokens_available": n for split, n in dataset.n_tokens.items()}
    return {f"data/{name}": value for name, value in facts.items()}


def _labels(cfg: DictConfig, job: Job, entries: Mapping[str, Any]) -> Labels:
    return Labels(
        name=entries["variant/name"],
        group=None if job.sweep_dir is None else "/".join(job.sweep_dir.parts[-2:]),
        tags=(job.choices["attn"], job.choices["ffn"], f"seed={cfg.seed}"),
        config=OmegaConf.to_container(cfg, resolve=True),
    )


def _status(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "diverged" if isinstance(error, train.Diverged) else "failed"


def _keep_traceback(run_dir: Path, error: BaseException) -> None:
    """Of an error that nobody foresaw, for whoever wrote the plugin."""
    if not isinstance(foreseen(error), ArchlabError | KeyboardInterrupt | OSError):
        (run_dir / TRACEBACK).write_text("".join(traceback.format_exception(error)), encoding="utf-8")


def _say(console: Console, job: Job, entries: Mapping[str, Any], appendix: Sequence[str]) -> None:
    where, status = str(job.run_dir / record.RESULT), entries["status"]
    if job.sweep_dir is not None:
        told = [status, entries.get("error")]
        if "quality/val_loss" in entries:
            told.insert(1, f"val loss {entries['quality/val_loss']:.4f}")
        lines = [f"{entries['variant/name']} seed {entries['seed']}: {', '.join(filter(None, told))}"]
    elif status == "ok":
        console.print(card(entries, where))
        lines = appendix
    elif status == "interrupted":
        lines = [f"to go on: {job.resuming()}"]
    else:
        lines = [f"{status}: what there is stands in {where}"]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def quote(value: str) -> str:
    """A string as the value of a Hydra override."""
    if PLAIN_VALUE.fullmatch(value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _n_parallel(n_jobs: int) -> int:
    """Runs side by side for joblib's `n_jobs`, which counts down from all cores where it is negative."""
    return n_jobs if n_jobs > 0 else max(1, joblib.cpu_count() + 1 + n_jobs)
