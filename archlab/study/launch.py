"""Runs the cells that are missing through one of Hydra's launchers, and shows how far they are."""

from __future__ import annotations

import contextlib
import io
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, open_dict
from rich.console import Console
from rich.live import Live

from archlab.config.compose import normalise, quote, top_level
from archlab.errors import UsageError
from archlab.plugins import conf_dir, register
from archlab.run.job import Job
from archlab.run.stages import run
from archlab.study.cells import Cell
from archlab.study.progress import Progress, table

POLL_S = 2.0
PLAIN_LINE_EVERY_S = 30.0


def launch(cells: Sequence[Cell], *, launcher: str, n_jobs: int, console: Console, progress: Progress) -> None:
    """Run the cells that are not done, each into its own folder. What fails leaves a record that says so."""
    missing = {cell.folder_name: cell for cell in cells if cell.status != "done"}
    if not missing:
        return
    register()
    groups, _ = top_level()
    jobs = [
        [
            *(normalise(word, groups) for word in cell.words),
            "++train.resume=auto",
            f"hydra.sweep.subdir={quote(cell.folder_name)}",
        ]
        for cell in missing.values()
    ]
    folder = next(iter(missing.values())).cells_dir
    with _watched(console, progress), _hydra(launcher, n_jobs, folder) as (context, config):
        Plugins.instance().instantiate_launcher(hydra_context=context, task_function=run_cell, config=config).launch(
            jobs, initial_job_idx=0
        )


def run_cell(cfg: DictConfig) -> None:
    """One cell, in silence: its record says how it went."""
    with contextlib.redirect_stdout(io.StringIO()):
        run(cfg, Job.current())


@contextlib.contextmanager
def _hydra(launcher: str, n_jobs: int, folder: Path) -> Iterator[tuple[HydraContext, DictConfig]]:
    """What a launcher needs of Hydra: its context, and a configuration in which sweeps go to `folder`."""
    logging.getLogger("hydra").addHandler(logging.NullHandler())
    words = [f"hydra/launcher={launcher}", f"hydra.sweep.dir={quote(str(folder))}"]
    if launcher == "joblib":
        words.append(f"hydra.launcher.n_jobs={n_jobs}")
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        try:
            config = loader.load_configuration("config", overrides=words, run_mode=RunMode.MULTIRUN)
        except Exception as error:
            raise UsageError(f"launcher={launcher}: {' '.join(str(error).split())[:300]}") from error
        with open_dict(config):
            config.hydra.job.name = "study"
        HydraConfig.instance().set_config(config)
        yield HydraContext(config_loader=loader, callbacks=Callbacks()), config


@contextlib.contextmanager
def _watched(console: Console, progress: Progress) -> Iterator[None]:
    """A table that lives while cells run; without a terminal, a line now and then."""
    ended = threading.Event()
    live = Live(table(progress), console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def watch() -> None:
        waited = PLAIN_LINE_EVERY_S
        while not ended.wait(POLL_S):
            waited += POLL_S
            if live is not None:
                live.update(table(progress), refresh=True)
            elif waited >= PLAIN_LINE_EVERY_S:
                waited = 0.0
                console.print(progress.line(), highlight=False, markup=False, soft_wrap=True)

    thread = threading.Thread(target=watch, daemon=True)
    with live or contextlib.nullcontext():
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
