"""One run: the only file that knows all the stages, from data and model to the record."""

import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from safetensors.torch import save_file

from archlab.config.device import resolve_device, resolve_dtype
from archlab.config.identity import config_hash, seeds
from archlab.data import Dataset, build_dataset
from archlab.errors import ArchlabError, UsageError, foreseen, sentence
from archlab.measure import account, equivalence
from archlab.measure.latency import BenchSettings, latency
from archlab.measure.units import human_count
from archlab.model import LM, build_model
from archlab.run import record
from archlab.run.card import card
from archlab.run.job import Job
from archlab.run.log import Labels, Log, build_log
from archlab.run.progress import Reporter
from archlab.run.walkthrough import Walkthrough
from archlab.train.evaluate import entries as quality_entries
from archlab.train.evaluate import evaluate, measure
from archlab.train.loop import train
from archlab.train.trainer import Diverged

STATIC_CONTEXTS = (1 << 10, 1 << 13, 1 << 17, 1 << 20)
"""Tokens of context at which every cache is weighed."""

TRACEBACK = "traceback.txt"

ITEMS, ITEMS_FILE_NAME = ("nats", "targets", "hits"), "test_items.safetensors"
"""What is kept of each test sequence, and where."""


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
    if not issubclass(get_object(cfg.bench._target_), BenchSettings):
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
    if dataset.warning:
        print(f"warning: {dataset.warning}", file=sys.stderr)
    yield _data_entries(dataset)
    model = _build(cfg, cfg.model.get("vocab_size") or dataset.vocab_size, "cpu")
    yield (static := weigh(model))
    reporter.stage(f"training {human_count(static['params/total'])} parameters on {dataset.name}")
    place = {"device": device, "dtype": dtype}
    files = {"log": log, "run_dir": run_dir, "config_hash": config_hash(cfg)}
    walk = Walkthrough(dataset) if cfg.explain else None
    eyes = {"progress": reporter, "watch": walk.watch if walk else None}
    trained = train(model, dataset, settings, seed=seeds(cfg)[0], data_seed=seeds(cfg)[1], **place, **files, **eyes)
    yield trained | {"flops/train_total": static["flops/train_per_token"] * trained["data/train_tokens"]}
    if settings.steps:  # the loss of weights that have learned nothing compares nothing
        reporter.stage("evaluating")
        yield from _quality(model, dataset, run_dir, {"batch_size": settings.batch_size, **place})
    reporter.stage("proving that cached decoding is the full pass")
    length, batch = timing.gate_length, timing.gate_batch
    yield (proof := equivalence.gate(model, length=length, batch=batch, dtype=dtype, seed=cfg.seed))
    reporter.stage("timing prefill and decode")
    yield latency(model, timing, dtype=dtype, gate=proof)
    if walk:
        reporter.appendix += walk.lines(model, run_dir)


def _quality(model: LM, dataset: Dataset, run_dir: Path, how: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Loss and accuracy on both held-out splits, of a task also at the further lengths that it names. What each test
    sequence contributed goes into a file of its own, by which two runs can be compared sequence by sequence."""
    yield evaluate(model, dataset, "val", **how)
    sums = measure(model, dataset, "test", **how)
    save_file({name: torch.from_numpy(getattr(sums, name)) for name in ITEMS}, run_dir / ITEMS_FILE_NAME)
    yield quality_entries(sums, dataset, "test")
    for task in dataset.longer():
        found = evaluate(model, task, "test", **how)
        for name in ("loss", "accuracy"):
            yield {f"quality/test_{name}_at/context/{task.context}": found[f"quality/test_{name}"]}


def _build(cfg: DictConfig, vocab_size: int, device: torch.device | str) -> LM:
    torch.manual_seed(seeds(cfg)[0])
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
    return "diverged" if isinstance(error, Diverged) else "failed"


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
