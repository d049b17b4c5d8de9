"""Which run this is, beside its configuration."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from archlab.config.compose import quote
from archlab.plugins import GROUPS, PRESETS

OWN = "own"
"""In place of an option's name where a configuration holds a plugin that is none of the group's."""


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


def _n_parallel(n_jobs: int) -> int:
    """Runs side by side for joblib's `n_jobs`, which counts down from all cores where it is negative."""
    import joblib  # for those who run side by side

    return n_jobs if n_jobs > 0 else max(1, joblib.cpu_count() + 1 + n_jobs)
