"""The command line, run inside the test's own process, on a model and a budget of a second."""

import json
from dataclasses import dataclass
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra

from archlab.cli.main import main

TINY = (
    "model.d_model=16",
    "model.n_layers=1",
    "data=phrase",
    "data.context=12",
    "data.eval_tokens=60",
    "train.steps=4",
    "train.batch_size=2",
    "bench=smoke",
    "bench.contexts=[4,8]",
    "bench.gate_length=9",
    "bench.decode.calls=1",
    "bench.prefill.calls=1",
)


@dataclass
class Outcome:
    """How a command ended, and what it said."""

    status: int
    out: str
    err: str


class Commands:
    """`archlab("attn=gqa")` runs a command line where the test stands."""

    def __init__(self, capsys):
        self.capsys = capsys

    def __call__(self, *words: str) -> Outcome:
        GlobalHydra.instance().clear()
        self.capsys.readouterr()
        try:
            status = main(words)
        except SystemExit as stop:  # of the argument parser
            status = stop.code
        captured = self.capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    def tiny(self, *words: str) -> Outcome:
        return self(*TINY, *words)


def records(folder: Path = Path("runs")) -> list[dict]:
    """All records below a folder, by path."""
    return [json.loads(path.read_text()) for path in sorted(folder.rglob("result.json"))]


def contents(folder: Path) -> dict[Path, bytes]:
    """Every file below a folder."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
