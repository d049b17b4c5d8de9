"""A study file: which variants are compared, on which data, with which seeds, and what is to come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from archlab.data.base import check_whole
from archlab.errors import UsageError
from archlab.plugins import conf_dir, names, nearest

COUNTS = {
    "params": "params/total",
    "active_params": "params/active",
    "train_flops": "flops/train_per_token",
    "cache_at_8k": "cache/bytes_at/8192",
}
"""What can be matched, by the entry of the record that counts it."""

KNOBS = ("ffn_width", "n_layers", "d_model")
"""What may be changed to match a count."""


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How each variant finds its learning rate on each task: on the validation split, with seeds of its own.

    Attributes:
        lrs: learning rates, ascending, each a constant factor over the one before.
        seeds: seeds that choose; no seed of the comparison is among them.
        extend: how often the grid may grow by one rate beyond an end that is the best.
    """

    lrs: Sequence[float]
    seeds: Sequence[int]
    extend: int = 2


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A study as its file describes it.

    Attributes:
        name: of the file; says: what it is about, in a sentence.
        variants: overrides by name.
        tasks: settings by name, with which every variant runs, or those that `only` names.
        reference: the variant that the others are compared with.
        seeds: of the runs that are compared.
        tune: how learning rates are chosen; None: each run takes that of the configuration.
        match: a key of `COUNTS` that shall equal the reference's within 1%; None: nothing.
        match_by: what is changed for that, one of `KNOBS`.
        settings: overrides of all runs; tuning_settings: of those that choose a rate, on top.
        metric: the entry of the record that is compared, the smaller the better, unless `higher_is_better`.
        solved_at: of a task that is solved or not: the test accuracy from which on it is; None: losses are compared.
        seed_shift: {variant: n}: its seeds are n more, so that it has no pairs with the others: the reference under
            another name, which must come out as no difference.
        only: {task: variants} where not all variants take part.
        statements: what the study tests (see `archlab.study.statements`).
        ladder: whether the tasks are sizes, through whose losses a power law is laid (`archlab.study.ladder`).
        timing: what of each variant is timed, alone, once all runs are done, as `bench=default`; nothing if empty.
        launcher: Hydra's, with its settings.
        cells_dir, dir: where runs are kept, whatever study asked for them, and where this study is.
    """

    name: str
    says: str
    variants: dict[str, list[str]]
    reference: str
    seeds: Sequence[int]
    tasks: dict[str, list[str]] = field(default_factory=lambda: {"all": []})
    tune: Tuning | None = None
    match: str | None = None
    match_by: str = "ffn_width"
    settings: Sequence[str] = ()
    tuning_settings: Sequence[str] = ()
    metric: str = "quality/test_loss"
    higher_is_better: bool = False
    solved_at: float | None = None
    seed_shift: dict[str, int] = field(default_factory=dict)
    only: dict[str, list[str]] = field(default_factory=dict)
    statements: Sequence[dict[str, Any]] = ()
    ladder: bool = False
    timing: Sequence[str] = ()
    launcher: str = "joblib"
    n_jobs: int = 2
    cells_dir: str = "runs/cells"
    dir: str

    def __post_init__(self):
        _check_name("reference", self.reference, self.variants)
        if self.match is not None:
            _check_name("match", self.match, COUNTS)
        _check_name("match_by", self.match_by, KNOBS)
        for task, variants in self.only.items():
            _check_name("only", task, self.tasks)
            for variant in variants:
                _check_name(f"only.{task}", variant, self.variants)
        for variant in self.seed_shift:
            _check_name("seed_shift", variant, self.variants)
        for seed in (*self.seeds, *(self.tune.seeds if self.tune else ())):
            check_whole("seeds", seed, 0)
        if self.tune and (shared := set(self.seeds) & set(self.tune.seeds)):
            raise UsageError(f"tune.seeds={sorted(shared)}: the seeds that choose a rate may not be compared too")
        if self.tune and (len(self.tune.lrs) < 2 or sorted(set(self.tune.lrs)) != list(self.tune.lrs)):
            raise UsageError(f"tune.lrs={list(self.tune.lrs)}: give at least two rates, ascending")

    def seeds_of(self, variant: str) -> list[int]:
        """The seeds of a variant's runs that are compared."""
        return [seed + self.seed_shift.get(variant, 0) for seed in self.seeds]

    def variants_of(self, task: str) -> list[str]:
        """The variants that take part in a task."""
        return self.only.get(task, list(self.variants))


def load_spec(words: Sequence[str]) -> Spec:
    """The study that the first word names (an option of `conf/study`, or a yaml file), with the others as overrides.

    Errors: UsageError for a study or a key that there is not, or a value that cannot be.
    """
    name, overrides = words[0], [word.lstrip("+") for word in words[1:]]
    for word in overrides:
        if "=" not in word:
            raise UsageError(f"{word!r} is not of the form key=value (python -m archlab.study --help)")
    cfg = _compose(name, overrides)
    found: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    found.setdefault("name", Path(name).stem)
    found.setdefault("dir", f"runs/study/{found['name']}")
    return build(found)


def build(settings: dict[str, Any]) -> Spec:
    """The spec of plain settings. Errors: UsageError naming the key."""
    known = Spec.__dataclass_fields__
    for key in settings:
        if key not in known:
            raise UsageError(f"a study has no key {key!r}; {nearest(key, known)}")
    for key, default in known.items():
        if key not in settings and default.default is default.default_factory:
            raise UsageError(f"a study needs the key {key!r}")
    tune = settings.get("tune")
    try:
        return Spec(**settings | {"tune": Tuning(**tune) if tune else None})
    except TypeError as error:
        raise UsageError(f"the study cannot be read: {error}") from error


def _compose(name: str, overrides: Sequence[str]) -> DictConfig:
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise UsageError(f"there is no file {name}")
        folder, config = path.parent.absolute(), path.stem
    else:
        if name not in names("study"):
            raise UsageError(f"unknown study {name!r}; {nearest(name, names('study'))}; a file of yours ends in .yaml")
        folder, config = conf_dir() / "study", name
    try:
        with initialize_config_dir(str(folder), version_base="1.3"):
            return compose(config, overrides=[f"++{word}" for word in overrides])
    except HydraException as error:
        raise UsageError(f"{name}: {' '.join(str(error).split())}") from error


def _check_name(key: str, value: str, known: Any) -> None:
    if value not in known:
        raise UsageError(f"{key}={value}: {nearest(value, known)}")
