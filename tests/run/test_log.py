"""Rows on disk come first, and what goes wrong with their mirror ends no run."""

import json
import math
import sys
from types import SimpleNamespace

import pytest
from fake_wandb import FakeRun
from omegaconf import OmegaConf

from archlab.errors import UsageError
from archlab.run.log import EVAL_AXIS, FILE_NAME, TIMEOUTS, TRAIN_AXIS, JsonlLog, Labels, WandbLog, build_log

LABELS = Labels("gqa+moe", group="today/sweep", tags=("gqa", "moe", "seed=1"), config={"seed": 1})


def rows(folder):
    return [json.loads(line, parse_constant=pytest.fail) for line in (folder / FILE_NAME).read_text().splitlines()]


def test_a_row_is_there_once_it_is_logged(tmp_path):
    log = JsonlLog(tmp_path)
    log.log(0, {"train/loss": 3.0})
    log.log(1, {"train/loss": math.nan, "train/lr": math.inf, "quality/val_loss": 2.5})
    assert rows(tmp_path) == [
        {"step": 0, "train/loss": 3.0},
        {"step": 1, "train/loss": None, "train/lr": None, "quality/val_loss": 2.5},
    ]
    log.close()


def test_a_log_without_rows_leaves_no_file(tmp_path):
    JsonlLog(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4])
def test_a_resumed_run_repeats_no_row(tmp_path, first):
    log = JsonlLog(tmp_path)
    for step in range(4):
        log.log(step, {"x": step})
    log.close()
    log = JsonlLog(tmp_path)
    for step in range(first, 6):
        log.log(step, {"x": 10 * step})
        log.log(step, {"quality/val_loss": step})
    log.close()
    kept = [{"step": step, "x": step} for step in range(first)]
    new = [row for s in range(first, 6) for row in ({"step": s, "x": 10 * s}, {"step": s, "quality/val_loss": s})]
    assert rows(tmp_path) == kept + new


def test_a_row_that_a_kill_cut_short_is_dropped(tmp_path):
    (tmp_path / FILE_NAME).write_text('{"step": 0, "x": 1}\n{"step": 1, "x"')
    log = JsonlLog(tmp_path)
    log.log(2, {"x": 3})
    log.close()
    assert rows(tmp_path) == [{"step": 0, "x": 1}, {"step": 2, "x": 3}]


@pytest.fixture
def wandb(monkeypatch):
    """A module in W&B's place, which keeps its runs and what they were made with."""
    fake = SimpleNamespace(runs=[], started=[], failing=(), Settings=dict)

    def init(**kwargs):
        if "init" in fake.failing:
            raise ConnectionError("init: the server is gone")
        fake.started.append(kwargs)
        fake.runs.append(FakeRun(fake.failing))
        return fake.runs[-1]

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def use(log, status="ok"):
    log.log(0, {"train/loss": 3.0})
    log.log(1, {"train/loss": 2.0})
    log.log(1, {"quality/val_loss": 2.5})
    log.summary({"status": status, "quality/val_loss": 2.5})
    log.close()


def test_the_mirror_shows_the_run_under_its_labels(tmp_path, wandb):
    use(WandbLog(tmp_path, LABELS, project="p", entity="e"))
    (started,), (run,) = wandb.started, wandb.runs
    expected = {"project": "p", "entity": "e", "mode": "offline", "dir": str(tmp_path), "group": "today/sweep"}
    expected |= {"name": "gqa+moe", "tags": ["gqa", "moe", "seed=1"], "config": {"seed": 1}}
    assert {key: started[key] for key in expected} == expected
    assert started["settings"].items() >= TIMEOUTS.items()
    assert run.axes == {TRAIN_AXIS: None, "*": TRAIN_AXIS, EVAL_AXIS: None, "quality/*": EVAL_AXIS}
    assert run.rows == [
        {"train/loss": 3.0, TRAIN_AXIS: 0},
        {"train/loss": 2.0, TRAIN_AXIS: 1},
        {"quality/val_loss": 2.5, EVAL_AXIS: 1},
    ]
    assert run.record == {"status": "ok", "quality/val_loss": 2.5}
    assert run.exit_codes == [0]
    assert len(rows(tmp_path)) == 3


def test_the_mirror_shows_a_run_that_failed_as_failed(tmp_path, wandb):
    use(WandbLog(tmp_path, LABELS), status="diverged")
    assert wandb.runs[0].exit_codes == [1]


def test_a_resumed_run_goes_on_in_its_own_mirror_where_there_is_a_server(tmp_path, wandb):
    for _ in range(2):
        WandbLog(tmp_path, LABELS, mode="online").close()
    WandbLog(tmp_path / "other", LABELS, mode="online").close()
    first, second, other = wandb.started
    assert first["id"] == second["id"] != other["id"]
    assert first["resume"] == "allow"


@pytest.mark.parametrize(
    ("failing", "unsent"),
    [
        (["init"], "the run, step 0, 2 more, the record"),
        (["log"], "step 0, step 1, step 1"),
        (["summary"], "the record"),
        (["finish"], "the end of the run"),
        (["log", "summary", "finish"], "step 0, step 1, 2 more, the end of the run"),
    ],
)
def test_what_was_not_sent_is_said_and_the_rows_are_on_disk(tmp_path, wandb, capsys, failing, unsent):
    wandb.failing = failing
    use(WandbLog(tmp_path, LABELS, mode="online"))
    first, last = capsys.readouterr().err.splitlines()
    assert first == f"W&B: {failing[0]}: the server is gone. The run goes on without it"
    assert last == f"W&B: not sent: {unsent}. The run's folder has it all"
    assert len(rows(tmp_path)) == 3


def test_a_run_is_finished_whatever_failed_before(tmp_path, wandb):
    wandb.failing = ["log", "summary"]
    use(WandbLog(tmp_path, LABELS))
    assert len(wandb.runs[0].exit_codes) == 1


def test_without_wandb_the_run_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    use(WandbLog(tmp_path, LABELS))
    assert "wandb" in capsys.readouterr().err.splitlines()[0]
    assert len(rows(tmp_path)) == 3


def test_a_mode_that_is_none_is_refused(tmp_path, wandb):
    with pytest.raises(UsageError, match=r"log\.mode=live: give offline or online"):
        WandbLog(tmp_path, LABELS, mode="live")


def test_the_configuration_names_the_sink(tmp_path, wandb):
    log = build_log(OmegaConf.create({"_target_": "archlab.run.log.WandbLog", "project": "p"}), tmp_path, LABELS)
    assert isinstance(log, WandbLog)
    assert wandb.started[0]["project"] == "p"
    assert type(build_log(OmegaConf.create({"_target_": "archlab.run.log.JsonlLog"}), tmp_path, LABELS)) is JsonlLog


def test_a_run_is_mirrored_and_its_mirror_closed_however_it_ends(archlab, wandb):
    assert archlab.tiny("attn=gqa", "seed=2", "log=wandb").status == 0
    assert archlab.tiny("attn.n_heads=3", "log=wandb").status == 2
    good, bad = wandb.runs
    assert (good.exit_codes, bad.exit_codes) == ([0], [1])
    assert wandb.started[0]["tags"] == ["gqa", "swiglu", "seed=2"]
    assert wandb.started[0]["group"] is None
    assert [row[TRAIN_AXIS] for row in good.rows] == [0, 1, 2, 3]
    assert good.record["quality/val_loss"] > 0
    assert bad.record["status"] == "failed"


@pytest.mark.slow
def test_offline_needs_no_network_and_stays_in_the_runs_folder(archlab, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    outcome = archlab.tiny("log=wandb", "hydra.run.dir=here")
    sync = "wandb sync here/wandb/offline-run-* does"
    assert (outcome.status, outcome.err) == (0, f"W&B: offline, so nothing was sent; {sync}\n")
    (mirror,) = (tmp_path / "here" / "wandb").glob("offline-run-*/run-*.wandb")
    assert mirror.stat().st_size > 0
    assert len(rows(tmp_path / "here")) == 4
    assert not (tmp_path / "wandb").exists()


@pytest.mark.slow
def test_online_without_an_account_or_a_server_trains_all_the_same(archlab, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    outcome = archlab.tiny("log=wandb", "log.mode=online", "hydra.run.dir=here")
    assert outcome.status == 0
    assert "The run goes on without it" in outcome.err
    assert "not sent: the run, step 0, " in outcome.err
    assert len(rows(tmp_path / "here")) == 4
