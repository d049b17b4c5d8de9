"""Runs as they may be compared: seeds of one variant together, runs of different data apart."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from archlab.errors import UsageError
from archlab.measure.units import contexts
from archlab.run import record
from archlab.study import statistics
from archlab.study.statistics import LEAST_SEEDS

CONTEXT = 8192
"""Tokens of context at which caches and latencies are compared, where they were measured there."""

LOSS = "quality/val_loss"

UNTOLD = ("seed=", "data.seed=", "init_seed=", "hydra.", "train.resume=")
"""Settings that tell no variant from another."""

SHARED = {
    "trained with different budgets": ("data/train_tokens",),
    "timed on different machines or settings": ("env/cpu", "env/device", "env/threads", "env/torch"),
    "timed at different batch sizes or number formats": ("latency/batch", "latency/dtype"),
}
"""What a reader must be told, by the entries that runs must share for it not to be so."""


@dataclass(frozen=True)
class Run:
    """One record, and the file it stands in."""

    path: Path
    entries: dict[str, Any]

    @property
    def status(self) -> str:
        return self.entries["status"]

    @property
    def fault(self) -> str:
        """How it ended, its name, the reason and the file, in one line."""
        e = self.entries
        return f"{self.status}: {e['variant/name']} seed {e['seed']}: {e.get('error', '')} ({self.path})"


@dataclass(frozen=True)
class Variant:
    """The runs of one configuration, which differ in their seed."""

    label: str
    runs: Sequence[Run]

    @cached_property
    def ok(self) -> list[dict[str, Any]]:
        """The records of the runs that ended well."""
        return [run.entries for run in self.runs if run.status == "ok"]

    def values(self, key: str) -> list[float]:
        return [entries[key] for entries in self.ok if entries.get(key) is not None]

    def by_seed(self, key: str) -> dict[int, float]:
        """The same by seed."""
        return {entries["seed"]: entries[key] for entries in self.ok if entries.get(key) is not None}

    def mean(self, key: str) -> float | None:
        values = self.values(key)
        return fmean(values) if values else None

    def deviation(self, key: str) -> float | None:
        """The standard deviation between seeds; None of a single one."""
        values = self.values(key)
        return stdev(values) if len(values) > 1 else None

    def count(self, status: str) -> int:
        return sum(run.status == status for run in self.runs)


@dataclass(frozen=True)
class Comparison:
    """Variants that saw the same data. `shared` holds the settings that all of them have."""

    fingerprint: str | None
    variants: Sequence[Variant]
    context: int = CONTEXT
    shared: Sequence[str] = ()

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        return [entries for variant in self.variants for entries in variant.ok]

    @property
    def title(self) -> str:
        if not self.fingerprint:
            return "no data: static figures"
        names = {run.entries.get("data/name") for variant in self.variants for run in variant.runs} - {None}
        return f"data {'/'.join(sorted(names))} {self.fingerprint[:8]}"

    def measured_context(self, prefix: str) -> int | None:
        """The longest context up to the stated one, else the shortest, that every record with any has."""
        found = [set(c) for c in (contexts(entries, prefix) for entries in self.records) if c]
        common = sorted(set.intersection(*found)) if found else []
        return max((c for c in common if c <= self.context), default=min(common, default=None))

    @cached_property
    def ranks(self) -> dict[str, str]:
        """Place by mean validation loss, of variants with enough seeds. One shares the place of the variant before it
        unless their paired difference over seeds excludes 0, corrected for the number of places (Bonferroni)."""
        able = [v for v in self.variants if len(v.by_seed(LOSS)) >= LEAST_SEEDS]
        places: dict[str, str] = {}
        leader, place = None, 0
        for i, variant in enumerate(sorted(able, key=lambda v: v.mean(LOSS)), start=1):
            if leader is None or _differs(leader, variant, n_tests=max(1, len(able) - 1)):
                leader, place = variant, i
            places[variant.label] = f"{place}{'=' if place != i else ''}"
        return places

    @property
    def notes(self) -> list[str]:
        """What a reader must know before comparing the rows."""
        notes = [what for what, keys in SHARED.items() if any(len(self._distinct(key)) > 1 for key in keys)]
        if any(entries.get("env/parallel_jobs", 1) > 1 for entries in self.records):
            notes.append("timed while other runs shared the machine")
        if len({frozenset(e["seed"] for e in v.ok) for v in self.variants if v.ok}) > 1:
            notes.append("not of the same seeds")
        notes = [f"these runs were {note}" for note in notes]
        if any(0 < len(v.values(LOSS)) < LEAST_SEEDS for v in self.variants):
            notes.append(f"a place in the ranking takes {LEAST_SEEDS} seeds of a variant: fewer rank nothing")
        return notes

    def _distinct(self, key: str) -> set[Any]:
        return {entries[key] for entries in self.records if key in entries}


def _differs(first: Variant, second: Variant, *, n_tests: int) -> bool:
    """Whether two variants differ in their loss, over the seeds that both have."""
    x, y = first.by_seed(LOSS), second.by_seed(LOSS)
    seeds = sorted(x.keys() & y.keys())
    if len(seeds) < LEAST_SEEDS:
        return False
    return statistics.paired([x[s] for s in seeds], [y[s] for s in seeds]).p * n_tests <= 1 - statistics.LEVEL


def read(folders: Iterable[Path]) -> list[Run]:
    """All records at and below the folders. Errors: UsageError for a missing folder or a damaged record."""
    paths = set()
    for folder in folders:
        if not folder.exists():
            raise UsageError(f"there is no {folder}: give a folder that runs have written")
        paths |= {folder} if folder.is_file() else set(folder.rglob(record.RESULT))
    return [Run(path, record.read(path)) for path in sorted(paths, key=_natural)]


def _natural(path: Path) -> list[int | str]:
    """A sorting key by which 2 comes before 10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]


def compare(runs: Sequence[Run], context: int = CONTEXT) -> list[Comparison]:
    """One comparison for each data set, each variant in it once."""
    kept = newest(runs)
    by_data: dict[str | None, list[Run]] = {}
    for run in kept:
        by_data.setdefault(_fingerprint(run, kept), []).append(run)
    return [
        Comparison(fingerprint, _variants(group), context, shared_settings(group))
        for fingerprint, group in by_data.items()
    ]


def _variants(runs: Sequence[Run]) -> list[Variant]:
    labels, by_hash = _labels(runs), {}
    for run in runs:
        by_hash.setdefault(run.entries["variant/hash"], []).append(run)
    return [Variant(labels[key], group) for key, group in by_hash.items()]


def newest(runs: Sequence[Run]) -> list[Run]:
    """One run for each variant and seed: repeating a seed adds no evidence. A good one before others, then the last."""
    kept: dict[str, Run] = {}
    for run in runs:
        key = run.entries["config_hash"]
        if key not in kept or run.status == "ok" or kept[key].status != "ok":
            kept[key] = run
    return list(kept.values())


def _fingerprint(run: Run, runs: Sequence[Run]) -> str | None:
    """Of the data of a run; of one that failed before it had any, that of its variant or the only one there is."""
    own = run.entries.get("data/fingerprint")
    if own or run.status == "ok":
        return own
    found = {r.entries["variant/hash"]: f for r in runs if (f := r.entries.get("data/fingerprint"))}
    only = next(iter(found.values())) if len(set(found.values())) == 1 else None
    return found.get(run.entries["variant/hash"], only)


def _labels(runs: Sequence[Run]) -> dict[str, str]:
    """By variant hash, its attention and FFN, with the settings that not all of the runs share."""
    common, labels = set(shared_settings(runs)), {}
    for run in runs:
        own = [s for s in _settings(run.entries) if s not in common]
        labels[run.entries["variant/hash"]] = " ".join([_stack(run.entries), *own])
    again = {label for label, n in Counter(labels.values()).items() if n > 1}
    return {key: f"{label} #{key[:6]}" if label in again else label for key, label in labels.items()}


def shared_settings(runs: Sequence[Run]) -> list[str]:
    """The settings that every run has, as `key=value`: said once, they need not stand in each label."""
    found = [_settings(run.entries) for run in runs]
    return [s for s in found[0] if all(s in other for other in found)] if found else []


def _stack(entries: dict[str, Any]) -> str:
    return f"{entries['variant/attn']}+{entries['variant/ffn']}"


def _settings(entries: dict[str, Any]) -> list[str]:
    """What was set for a run beside its attention and its FFN, each once; its seed is a column of its own."""
    chosen = [f"{key.removeprefix('config/')}={value}" for key, value in entries.items() if key.startswith("config/")]
    words = [*chosen, *entries["overrides"].split()]
    return [s for s in dict.fromkeys(words) if not s.startswith(UNTOLD)]
