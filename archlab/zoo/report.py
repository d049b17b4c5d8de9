"""The zoo as tables: what is published beside what is counted, and what each model costs."""

import csv
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from archlab.measure.units import human_context
from archlab.zoo.compare import Comparison, crossings
from archlab.zoo.models import BYTES_AT, CONSTANT, CONTEXTS, FLOPS, PER_FIRST_TOKEN, PER_TOKEN, Model
from archlab.zoo.published import BITS, Claim

IN_WORDS = {
    "params/total": "total",
    "params/non_embedding": "non-embedding",
    "params/active": "active",
    "params/active_non_input_embedding": "active + head",
    "params/active_non_embedding": "active, neither",
    PER_TOKEN: "cache B/token",
    PER_FIRST_TOKEN: "B/1st token",
}
"""Names of figures as a narrow table has room for them; others lose their first part."""

SAVINGS_AT = (1 << 12, 1 << 17, 1 << 20)
FLOPS_AT = CONTEXTS[:2]


@dataclass(frozen=True)
class Sheet:
    """A titled table of text. The first `n_words` columns are words, the others numbers; "\\n" breaks a header."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    n_words: int = 1

    def rich(self) -> Table:
        style = {"box": SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False, "show_edge": False}
        table = Table(title=escape(self.title), title_justify="left", **style)
        for i, name in enumerate(self.header):
            is_word = i < self.n_words
            table.add_column(name, justify="left" if is_word else "right", overflow="fold", no_wrap=not is_word)
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table

    def markdown(self) -> str:
        rule = ["---" if i < self.n_words else "---:" for i in range(len(self.header))]
        lines = [[name.replace("\n", " ") for name in self.header], rule, *self.rows]
        return "\n".join([f"## {self.title}", "", *(f"| {' | '.join(line)} |" for line in lines)])


def sheets(models: Sequence[Model]) -> list[Sheet]:
    return [_claims(models), _parameters(models), _costs(models)]


def claims(models: Iterable[Model]) -> list[tuple[str, Claim]]:
    """Every published figure, with its model's name."""
    return [(model.name, claim) for model in models for claim in model.claims]


def _claims(models: Sequence[Model]) -> Sheet:
    marks = {
        "exact": itertools.repeat("="),
        "differs": itertools.repeat("NO"),
        "explained": map("[{}]".format, itertools.count(1)),
    }
    rows = []
    for name, claim in claims(models):
        figure = IN_WORDS.get(claim.name, claim.name.partition("/")[2])
        rows.append([name, figure, f"{claim.counted:,.0f}", claim.text, next(marks[claim.verdict])])
    title = "Counted against published: = to the last published digit, [n] see below"
    return Sheet(title, ["model", "figure", "counted", "published", ""], rows, n_words=2)


def notes(models: Sequence[Model]) -> list[str]:
    """Why figures differ from the published ones, in the order of the table's marks."""
    explained = [(name, claim) for name, claim in claims(models) if claim.verdict == "explained"]
    return [f"[{i}] {name}: {claim.explained}" for i, (name, claim) in enumerate(explained, start=1)]


def _parameters(models: Sequence[Model]) -> Sheet:
    parts = ("total", "non_embedding", "active", "active_non_input_embedding", "active_non_embedding")
    rows = [[m.name, *(f"{m.entries[f'params/{part}'] / 1e9:,.3f}" for part in parts)] for m in models]
    title = "Parameters in billions; active at a token: all, with head alone, neither"
    return Sheet(title, ["model", "total", "non-\nembedding", "active", "with\nhead", "neither"], rows)


def _costs(models: Sequence[Model]) -> Sheet:
    header = ["model", "B/token", "MiB once"]
    header += [f"GiB\nat {human_context(c)}" for c in CONTEXTS] + [f"GFLOPs\nat {human_context(c)}" for c in FLOPS_AT]
    rows = []
    for m in models:
        stored = [f"{m.entries[f'{BYTES_AT}/{c}'] / 2**30:.3g}" for c in CONTEXTS]
        flops = [f"{m.entries[f'{FLOPS}/{c}'] / 1e9:,.0f}" for c in FLOPS_AT]
        rows.append([m.name, f"{m.entries[PER_TOKEN]:,.0f}", f"{m.entries[CONSTANT] / 2**20:.3g}", *stored, *flops])
    return Sheet("Cache of a sequence, bfloat16 (recurrent states float32), and a decode step", header, rows)


def describe(c: Comparison) -> str:
    """One comparison in a sentence."""
    at = [f"{c.saving(context):.1%} at {human_context(context)}" for context in SAVINGS_AT]
    text = f"{c.model.name} against {c.baseline.name}: cache smaller by {', '.join(at)}, {c.limit:.2%} in the limit"
    if c.claim:
        text += f" (published {c.claim.text}: {c.claim.explained or c.claim.verdict})"
    if c.bits == BITS and (found := crossings(c.model, c.baseline)):
        text += f"; smaller from {found[-1]:,} tokens on"
    return text


def differing(models: Iterable[Model], comparisons: Iterable[Comparison]) -> list[str]:
    """The figures that nobody has explained."""
    found = claims(models) + [(c.model.name, c.claim) for c in comparisons if c.claim]
    return [
        f"{name}: {claim.name} is {claim.counted:,.10g}, but published as {claim.text}"
        for name, claim in found
        if claim.verdict == "differs"
    ]


def show(models: Sequence[Model], comparisons: Sequence[Comparison], console: Console) -> None:
    """Print all of it."""
    for sheet in sheets(models):
        console.print(sheet.rich(), "")
    for line in (*notes(models), *map(describe, comparisons)):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def write(models: Sequence[Model], comparisons: Sequence[Comparison], out: Path) -> list[Path]:
    """Write zoo.csv, zoo.md and the picture; returns the files."""
    from archlab.zoo import figure  # a second to import

    out.mkdir(parents=True, exist_ok=True)
    pictures = figure.draw(models, comparisons, out / "zoo")
    _write_csv(models, out / "zoo.csv")
    parts = ["# Published models, counted", *(sheet.markdown() for sheet in sheets(models))]
    parts += [
        "## What differs, and why",
        _bullets(notes(models)),
        "## Caches compared",
        _bullets(map(describe, comparisons)),
    ]
    parts += [f"![cache bytes against context]({pictures[0].name})", "## What a configuration does not say"]
    parts += [_bullets(f"{m.name}: {'; '.join(m.published.unexpressed)}" for m in models if m.published.unexpressed)]
    parts += [
        "## Sources",
        _bullets(f"{m.name}: {' '.join(m.published.sources)}" for m in models if m.published.sources),
    ]
    (out / "zoo.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return [out / "zoo.csv", out / "zoo.md", *pictures]


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"* {line}" for line in lines)


def _write_csv(models: Sequence[Model], path: Path) -> None:
    """A row a model: every figure, and behind each that some model publishes, what is published and the verdict."""
    stated = {name for model in models for name in model.published.figures}
    keys = list(dict.fromkeys(key for model in models for key in model.entries))
    columns = [column for key in keys for column in (key, *[f"{key}/published", f"{key}/verdict"] * (key in stated))]
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, ["model", *columns, "sources"], restval="")
        table.writeheader()
        for model in models:
            row = {"model": model.name, "sources": " ".join(model.published.sources)} | model.entries
            for claim in model.claims:
                row |= {f"{claim.name}/published": claim.text, f"{claim.name}/verdict": claim.verdict}
            table.writerow(row)
