"""A sweep: every cell leaves a record, none takes another with it, and the end names each that failed."""

import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import contents, records
from fake_wandb import FakeRun

from archlab.cli import sweep
from archlab.run import job
from archlab.run.progress import Reporter

FAILS = "attn.n_heads=4,3,2"  # 16 channels are not divisible among 3 heads


def statuses(folder="s"):
    return [entries["status"] for entries in records(Path(folder))]


def cell(seed):
    """The folder of the one cell of a seed."""
    (folder,) = Path("s").glob(f"*-s{seed}-*")
    return folder


def test_a_cell_that_fails_is_named_and_the_others_go_on(archlab):
    outcome = archlab.tiny("-m", "attn=gqa", "attn.n_kv_heads=1", FAILS, "hydra.sweep.dir=s")
    assert outcome.status == 1
    assert outcome.err == ""
    assert sorted(statuses()) == ["failed", "ok", "ok"]
    assert len(list(Path("s").glob("gqa+swiglu-s0-*"))) == 3
    named = [line for line in outcome.out.splitlines() if line.startswith("failed: ")]
    assert len(named) == 1
    assert "attn.n_heads=3" in named[0]
    assert "d_model=16 is not divisible by n_heads=3" in named[0]
    assert re.search(r"s/gqa\+swiglu-s0-[0-9a-f]{8}/result.json", named[0])
    assert outcome.out.count("data phrase") == 1


def test_a_cell_that_diverges_is_named_as_such(archlab):
    outcome = archlab.tiny("-m", "train.lr=1e18,1e-3", "train.steps=30", "train.clip=null", "hydra.sweep.dir=s")
    assert outcome.status == 1
    assert sorted(statuses()) == ["diverged", "ok"]
    assert re.search(r"^diverged: mha\+swiglu seed 0: .* \(s/", outcome.out, re.MULTILINE)


@pytest.mark.slow
def test_a_sweep_that_is_good_ends_so(archlab):
    outcome = archlab.tiny("-m", "+attn=gqa,mha", "+seed=0,1", "hydra.sweep.dir=s")
    assert (outcome.status, outcome.err) == (0, "")
    assert [(r["variant/attn"], r["seed"]) for r in records(Path("s"))] == [
        ("gqa", 0),
        ("gqa", 1),
        ("mha", 0),
        ("mha", 1),
    ]
    assert len({r["data/fingerprint"] for r in records(Path("s"))}) == 1
    for name in ("gqa+swi", "mha+swi"):
        assert re.search(rf"^ {re.escape(name)}", outcome.out, re.MULTILINE)


@pytest.mark.slow
def test_a_sweep_goes_on_where_it_stopped(archlab, monkeypatch):
    words = ("-m", "seed=0,1,2,3", "hydra.sweep.dir=s")
    updates = []

    def update(self, *_):
        updates.append(1)
        if len(updates) == 4 + 4 + 2:  # in the third cell
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Reporter, "update", update)
        stopped = archlab.tiny(*words)
    assert stopped.status == 130
    assert sorted(statuses()) == ["interrupted", "ok", "ok"]
    assert "not started: 1 of 4 cells" in stopped.out
    before = contents(cell(0)) | contents(cell(1))
    command = re.search(r"^to go on: python -m archlab (.*)$", stopped.out, re.MULTILINE)[1]
    resumed = archlab(*shlex.split(command))
    assert (resumed.status, resumed.err) == (0, "")
    assert statuses() == ["ok"] * 4
    assert before.items() <= contents(Path("s")).items()
    rows = (cell(2) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_folder_that_holds_a_sweep_is_refused_and_kept(archlab):
    words = ("-m", "seed=0,1", "hydra.sweep.dir=s")
    archlab.tiny(*words)
    before = contents(Path("s"))
    outcome = archlab.tiny(*words)
    assert outcome.status == 2
    assert outcome.err.startswith("error: s already holds a sweep")
    assert contents(Path("s")) == before


def test_a_cell_without_a_record_counts_as_failed(tmp_path, capsys):
    for cell in ("0", "1"):
        (tmp_path / cell).mkdir()
        (tmp_path / cell / "config.yaml").touch()
    assert sweep.summarise(tmp_path, [*"01234"]) == 5
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("ended without a record: ")] == [
        f"ended without a record: {tmp_path / cell}" for cell in ("0", "1")
    ]
    assert "not started: 3 of 5 cells" in lines


def test_each_cell_is_a_run_of_its_own_in_the_mirror_even_one_that_fails(archlab, monkeypatch):
    runs, started = [], []

    def init(**kwargs):
        assert len(runs) == sum(len(r.exit_codes) for r in runs), "the run before is still open"
        started.append(kwargs)
        runs.append(FakeRun())
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    archlab.tiny("-m", "attn=gqa", "attn.n_kv_heads=1", FAILS, "hydra.sweep.dir=today/s", "log=wandb")
    assert [r.exit_codes for r in runs] == [[0], [1], [0]]
    assert {kwargs["group"] for kwargs in started} == {"today/s"}
    assert len({kwargs["name"] for kwargs in started}) == 3
    assert len({kwargs["id"] for kwargs in started}) == 3


@pytest.mark.slow
def test_cells_side_by_side(archlab, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    outcome = archlab.tiny(
        "-m",
        "attn=gqa",
        "attn.n_kv_heads=1",
        FAILS,
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
        "hydra.sweep.dir=s",
        "log=wandb",
    )
    assert outcome.status == 1
    assert sorted(statuses()) == ["failed", "ok", "ok"]
    assert outcome.out.count("data phrase") == 1
    assert sum(line.startswith("failed: ") for line in outcome.out.splitlines()) == 1
    assert len(list(Path("s").glob("*/wandb/offline-run-*"))) == 3
    for entries in records(Path("s")):
        assert entries["env/parallel_jobs"] == 2
        assert entries["env/threads"] <= max(1, os.cpu_count() // 2)


@pytest.mark.parametrize(("n_jobs", "n"), [(1, 1), (3, 3), (-1, 8), (-2, 7), (-100, 1)])
def test_jobs_side_by_side_are_counted_as_joblib_does(monkeypatch, n_jobs, n):
    monkeypatch.setattr("joblib.cpu_count", lambda: 8)
    assert job._n_parallel(n_jobs) == n


@pytest.mark.slow
def test_a_sweep_grows_without_doing_anything_again(archlab):
    words = ("hydra.sweep.dir=s", "train.resume=auto")
    assert archlab.tiny("-m", "attn=gqa", "seed=0,1", "attn.n_kv_heads=1", *words).status == 0
    before = contents(Path("s"))
    grown = archlab.tiny("-m", "attn=gqa,mha", "seed=1,0", "attn.n_kv_heads=1", *words)
    assert grown.status == 0
    assert grown.out.count("done already") == 2
    kept = {path: data for path, data in before.items() if path.name != "multirun.yaml"}
    assert kept.items() <= contents(Path("s")).items()
    assert statuses() == ["ok"] * 4


@pytest.mark.slow
def test_cells_that_differ_in_how_they_are_timed_are_apart(archlab):
    assert archlab.tiny("-m", "bench.batch=1,2", "hydra.sweep.dir=s").status == 0
    assert sorted(r["latency/batch"] for r in records(Path("s"))) == [1, 2]
