"""A run and what it leaves behind, however it ends."""

import errno
import json
import math
import os
import re
import shlex
import signal
from pathlib import Path

import pytest
import torch
from commands import TINY, contents, records
from omegaconf import OmegaConf
from rich.console import Console

import archlab
from archlab.config.compose import load, quote
from archlab.config.identity import config_hash
from archlab.errors import ArchlabError, UsageError
from archlab.measure import equivalence
from archlab.measure.units import human_bytes, human_context, human_count
from archlab.run import card, record, stages
from archlab.run.job import Job
from archlab.run.load import load_run
from archlab.run.progress import Reporter
from archlab.train import checkpoint
from archlab.train.trainer import Diverged

RECORD = {
    "status": str,
    "variant/attn": str,
    "variant/ffn": str,
    "variant/name": str,
    "seed": int,
    "config_hash": str,
    "data/fingerprint": str,
    "data/train_tokens": int,
    "params/total": int,
    "params/active": int,
    "params/non_embedding": int,
    "params/attention": int,
    "params/ffn": int,
    "flops/forward_per_token": float,
    "flops/train_total": float,
    "quality/val_loss": float,
    "quality/val_bits_per_byte": float,
    "quality/test_loss": float,
    "quality/train_loss_final": float,
    "cache/bytes_per_token_stored": float,
    "cache/bytes_constant": float,
    **{f"cache/{kind}_at/{context}": int for kind in ("bytes", "read_bytes") for context in stages.STATIC_CONTEXTS},
    **{f"latency/{name}/8": float for name in ("prefill_ms_p50", "prefill_ms_p90", "decode_limit_ms")},
    **{f"latency/decode_ms_per_token_{q}/8": float for q in ("p50", "p90")},
    "latency/batch": int,
    "latency/dtype": str,
    "train/tokens_per_second": float,
    "train/step_ms_p50": float,
    "train/peak_memory_bytes": int,
    "equivalence/max_abs_error": float,
    "equivalence/tolerance": float,
    "equivalence/passed": bool,
    "equivalence/failed_checks": str,
    "env/torch": str,
    "env/python": str,
    "env/cpu": str,
    "env/threads": int,
    "env/git": (str, type(None)),
}
"""What every record holds at least, and as what."""


def only_run() -> Path:
    (path,) = Path("runs").rglob("config.yaml")
    return path.parent


def test_a_run_leaves_its_record_its_configuration_its_rows_and_a_checkpoint(archlab):
    outcome = archlab.tiny("attn=gqa", "attn.n_heads=4", "seed=3")
    assert outcome.status == 0, outcome.err
    folder = only_run()
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml",
        "metrics.jsonl",
        "result.json",
        "checkpoint.safetensors",
        "codec.json",
        "test_items.safetensors",
    }
    (entries,) = records()
    assert {key: entries.get(key) for key in RECORD if not isinstance(entries.get(key), RECORD[key])} == {}
    assert entries["status"] == "ok"
    assert entries["variant/name"] == "gqa+swiglu attn.n_heads=4"
    assert entries["data/train_tokens"] == 4 * 2 * 12
    assert entries["flops/train_total"] == 3 * entries["flops/forward_per_token"] * 4 * 2 * 12
    assert entries["cache/bytes_at/1024"] == 1024 * entries["cache/bytes_per_token_stored"]
    cfg = OmegaConf.load(folder / "config.yaml")
    assert (cfg.seed, cfg.device, cfg.dtype, cfg.attn.n_heads) == (3, "cpu", "float32", 4)
    assert [json.loads(row)["step"] for row in (folder / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2, 3]
    assert outcome.out.startswith("attn=gqa ffn=swiglu (no ffn given)\n")
    assert "seed 3: ok" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= card.CARD_COLUMNS


def test_a_run_folder_may_be_named_and_its_model_loaded(archlab):
    assert archlab.tiny("hydra.run.dir=here").status == 0
    model, cfg, codec = load_run("here")
    assert codec.decode(codec.encode("the")) == "the"
    assert cfg.model.d_model == model.d_model == 16


@pytest.mark.slow
def test_two_runs_of_one_seed_are_the_same_and_of_two_are_not(archlab):
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert archlab.tiny(f"seed={seed}", f"hydra.run.dir={folder}").status == 0
    a, b, c = (records(Path(folder))[0] for folder in "abc")
    quality = [key for key in a if key.startswith("quality/")]
    assert [a[key] for key in quality] == [b[key] for key in quality]
    assert a["quality/val_loss"] != c["quality/val_loss"]
    assert a["config_hash"] == b["config_hash"] != c["config_hash"]
    assert a["variant/hash"] == c["variant/hash"]
    assert a["data/fingerprint"] == c["data/fingerprint"]


def test_runs_started_at_once_have_folders_of_their_own():
    with open(Path(archlab.__file__).parents[1] / "conf" / "config.yaml") as file:
        hydra = OmegaConf.load(file)._get_node("hydra")
    for folder in (hydra.run._get_node("dir"), hydra.sweep._get_node("dir")):
        assert "%H-%M-%S-%f" in folder._value()


def test_a_folder_that_holds_a_run_is_refused_and_kept(archlab):
    assert archlab.tiny("hydra.run.dir=here").status == 0
    before = contents(Path("here"))
    outcome = archlab.tiny("hydra.run.dir=here", "seed=1")
    assert outcome.status == 2
    assert outcome.err.startswith("error: here already holds a run")
    assert contents(Path("here")) == before


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "result.json", "checkpoint.safetensors"])
def test_any_trace_of_a_run_keeps_another_out(tmp_path, name):
    (tmp_path / name).write_text("x")
    with pytest.raises(UsageError, match="already holds a run"):
        record.claim(tmp_path, load(), resume=False)
    assert (tmp_path / name).read_text() == "x"


def press_ctrl_c(monkeypatch, step: int) -> None:
    """Ctrl-C while training, after that step."""

    def update(self, done, *_):
        if done == step:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Reporter, "update", update)


def test_an_interrupted_run_says_how_to_go_on_and_ends_as_if_nothing_had_happened(archlab, monkeypatch):
    assert archlab.tiny("hydra.run.dir=whole").status == 0
    with monkeypatch.context() as patch:
        press_ctrl_c(patch, 2)
        stopped = archlab.tiny("hydra.run.dir=part")
    assert stopped.status == 130
    (entries,) = records(Path("part"))
    assert entries["status"] == "interrupted"
    command = re.search(r"^to go on: python -m archlab (.*)$", stopped.out, re.MULTILINE)[1]
    resumed = archlab(*shlex.split(command))
    assert resumed.status == 0, resumed.err
    whole, part = (records(Path(folder))[0] for folder in ("whole", "part"))
    assert {k: v for k, v in whole.items() if k.startswith("quality/")} == {
        k: v for k, v in part.items() if k.startswith("quality/")
    }
    assert whole["config_hash"] == part["config_hash"]
    rows = [json.loads(row) for row in Path("part/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_run_that_is_done_is_not_done_again(archlab):
    archlab.tiny("hydra.run.dir=here")
    before = contents(Path("here"))
    again = archlab.tiny("hydra.run.dir=here", "train.resume=true")
    assert again.status == 0
    assert "done already: here" in again.out
    assert contents(Path("here")) == before


@pytest.mark.slow
def test_only_the_same_configuration_goes_on(archlab):
    archlab.tiny("hydra.run.dir=here")
    before = contents(Path("here"))
    other = archlab.tiny("hydra.run.dir=here", "train.resume=true", "model.d_model=32")
    assert other.status == 2
    assert "model.d_model=16, now 32" in other.err
    nowhere = archlab.tiny("hydra.run.dir=there", "train.resume=true")
    assert nowhere.status == 2
    assert nowhere.err == "error: no run to go on with in there: name its folder, hydra.run.dir=...\n"
    assert contents(Path("here")) == before


def test_a_run_that_diverges_says_so(archlab):
    outcome = archlab.tiny("train.lr=1e18", "train.clip=null", "train.warmup_steps=0", "train.steps=30")
    assert outcome.status == 1
    (entries,) = records()
    assert entries["status"] == "diverged"
    assert entries["error"] == outcome.err.removeprefix("error: ").strip()
    assert "latency/batch" not in entries
    assert (only_run() / "checkpoint.safetensors").exists()


def test_no_latency_of_a_variant_that_fails_the_gate(archlab, monkeypatch):
    proof = {"equivalence/max_abs_error": math.nan, "equivalence/tolerance": 1e-4, "equivalence/passed": False}
    proof["equivalence/failed_checks"] = "cached_equals_full"
    monkeypatch.setattr(equivalence, "gate", lambda *args, **kwargs: proof)
    outcome = archlab.tiny()
    assert outcome.status == 1
    assert outcome.err.startswith("error: no latency: ")
    (entries,) = records()
    assert entries["status"] == "failed"
    assert entries["equivalence/passed"] is False
    assert entries["equivalence/max_abs_error"] is None
    assert entries["quality/val_loss"] > 0
    assert not [key for key in entries if key.startswith("latency/")]


def test_a_bug_leaves_a_record_a_place_and_its_traceback(archlab, monkeypatch):
    def fail(*args, **kwargs):
        raise ZeroDivisionError("in a plugin")

    monkeypatch.setattr(stages, "train", fail)
    outcome = archlab.tiny()
    assert outcome.status == 1
    assert outcome.err.startswith("error: ZeroDivisionError: in a plugin (at test_run.py:")
    assert records()[0]["status"] == "failed"
    assert "in fail\n" in (only_run() / stages.TRACEBACK).read_text()


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        (["attn.n_heads=3"], 2, "d_model=16 is not divisible by n_heads=3; change one, or set head_dim"),
        (["model.d_model=0"], 2, "model.d_model=0: give a whole number of at least 1"),
        (["model.positions=learned", "model.max_positions=8"], 2, "a context of 12 tokens is longer than the learned"),
        (["data=text", "data.path=/nowhere"], 2, "data.path=/nowhere does not exist"),
        (["+model.vocab_size=4"], 2, "outside the model's vocabulary of 4"),
    ],
)
def test_a_run_that_cannot_be_leaves_a_record_that_says_why(archlab, words, status, sentence):
    outcome = archlab(*words) if words[0] == "data=text" else archlab.tiny(*words)
    assert outcome.status == status
    assert sentence in outcome.err
    assert outcome.err.count("\n") == 1
    (entries,) = records()
    assert entries["status"] == "failed"
    assert sentence in entries["error"]
    assert not (only_run() / stages.TRACEBACK).exists()


def test_a_full_disk_is_a_sentence_and_what_was_there_is_kept(archlab, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_flush", lambda path: None)
        patch.setattr(record.os, "fsync", full)
        outcome = archlab.tiny("hydra.run.dir=here")
    assert outcome.status == 1
    assert outcome.err.startswith("error: no space left on the device")
    assert outcome.err.count("\n") == 1
    assert {p.name for p in Path("here").iterdir()} >= {"config.yaml", "metrics.jsonl", "checkpoint.safetensors"}
    assert not list(Path("here").glob("*draft*"))
    assert archlab.tiny("hydra.run.dir=here", "train.resume=true").status == 0


def test_a_record_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    record.write(path, {"status": "ok", "x": math.inf, "y": math.nan, "z": 1.5})
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {"status": "ok", "x": None, "y": None, "z": 1.5}
    before = path.read_text()
    monkeypatch.setattr(record.os, "replace", lambda *args: (_ for _ in ()).throw(OSError("torn off")))
    with pytest.raises(OSError, match="torn off"):
        record.write(path, {"status": "failed"})
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"status": "ok"'])
def test_what_is_no_record_is_named(tmp_path, text):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(UsageError, match=r"result\.json is not the record of a run"):
        record.read(tmp_path / "result.json")


DECIDING = (
    "seed=1",
    "attn.n_heads=4",
    "ffn.d_ff=7",
    "model.norm=layer",
    "data.context=8",
    "train.lr=1",
    "dtype=float64",
)
INDIFFERENT = ("log.mode=x", "bench.batch=7", "explain=true", "train.resume=true", "train.log_every=7", "device=cuda")


def test_the_hash_is_of_what_decides_the_results():
    cfg = load()

    def hashed(word: str, **kwargs) -> str:
        OmegaConf.set_struct(cfg, False)
        return config_hash(OmegaConf.merge(cfg, OmegaConf.from_dotlist([word])), **kwargs)

    base = config_hash(cfg)
    assert len({base, *map(hashed, DECIDING)}) == 1 + len(DECIDING)
    assert {base, *map(hashed, INDIFFERENT)} == {base}
    assert hashed("seed=1", with_seed=False) == config_hash(cfg, with_seed=False)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_static_card_of_a_model_that_no_machine_holds(archlab, dtype):
    sizes = (
        "model.d_model=16384",
        "model.n_layers=126",
        "+model.vocab_size=128256",
    )
    outcome = archlab(
        "attn=gqa",
        "attn.n_heads=128",
        "attn.n_kv_heads=8",
        *sizes,
        "train.steps=0",
        "device=meta",
        f"dtype={dtype}",
        "data=text",
    )
    assert outcome.status == 0, outcome.err
    (entries,) = records()
    itemsize = {"float32": 4, "bfloat16": 2}[dtype]
    assert entries["cache/bytes_per_token_stored"] == 126 * 2 * 8 * 128 * itemsize
    assert entries["params/total"] > 3e11
    assert {path.name for path in only_run().iterdir()} == {"config.yaml", "result.json"}
    for tokens in ("1k", "8k", "128k", "1M"):
        assert f" {tokens} tokens" in outcome.out


@pytest.mark.slow
def test_the_walk_is_told_behind_the_card_where_it_is_asked_for(archlab):
    lines = archlab.tiny("explain=true").out.splitlines()
    end = next(i for i, line in enumerate(lines) if line.startswith("╰"))
    assert lines[end + 1].startswith("step 0 loss ")
    assert any(line.startswith("layers cached: 1") for line in lines[end:])
    assert "layers cached" not in archlab.tiny().out


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (10 * 2**20, "10.0 MiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_bytes_for_people(n, text):
    assert human_bytes(n) == text


@pytest.mark.parametrize(("n", "text"), [(0, "0"), (999, "999"), (1000, "1.00k"), (12_345, "12.3k"), (3.3e9, "3.30B")])
def test_counts_for_people(n, text):
    assert human_count(n) == text


@pytest.mark.parametrize(("n", "text"), [(1000, "1000"), (1024, "1k"), (131072, "128k"), (2**20, "1M")])
def test_contexts_for_people(n, text):
    assert human_context(n) == text


def told(reporter: Reporter, console: Console) -> str:
    with console.capture() as capture:
        reporter.stage("training")
        for step in range(1, 4):
            reporter.update(step, 2.5, 1234.0)
        reporter.stage("evaluating")
        reporter.close()
    return capture.get()


def test_progress_is_lines_where_there_is_no_terminal():
    console = Console(force_terminal=False)
    lines = told(Reporter(console, 3), console).splitlines()
    assert lines[0] == "training"
    assert lines[1] == "step 1/3: loss 2.500, 1.23k tokens/s"
    assert lines[2] == "step 3/3: loss 2.500, 1.23k tokens/s, 0 s left"
    assert lines[-1] == "evaluating"


def test_progress_is_a_bar_in_a_terminal():
    console = Console(force_terminal=True, width=80, legacy_windows=False)
    text = told(Reporter(console, 3), console)
    assert "3/3" in text
    assert "loss 2.500, 1.23k tokens/s" in text
    assert "step 1/3" not in text


def test_jobs_side_by_side_show_no_progress():
    for terminal in (True, False):
        console = Console(force_terminal=terminal)
        assert told(Reporter(console, 3, quiet=True), console).strip() == ""


@pytest.mark.slow
def test_values_are_quoted_for_hydra(archlab):
    folder = 'a folder, with "all" of=it'
    assert archlab.tiny(f"hydra.run.dir={quote(folder)}").status == 0
    assert records(Path(folder))[0]["status"] == "ok"


def test_a_run_needs_no_command_line(tmp_path):
    job = Job(tmp_path / "x", {"attn": "mha", "ffn": "swiglu"})
    entries, error = stages.run(load(TINY), job)
    assert error is None
    assert entries["status"] == "ok"
    assert entries["env/threads"] == torch.get_num_threads()


def test_meta_and_training_do_not_go_together():
    with pytest.raises(UsageError, match=r"device=meta .* train\.steps=0"):
        stages.resolve(load(["device=meta"]))
    assert issubclass(Diverged, ArchlabError)


@pytest.mark.slow
def test_one_command_starts_a_run_goes_on_with_it_and_leaves_it_when_done(archlab, monkeypatch):
    words = ("hydra.run.dir=here", "train.resume=auto")
    updates = []

    def update(self, step, *_):
        updates.append(step)
        if step == 2 and len(updates) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Reporter, "update", update)
        assert archlab.tiny(*words).status == 130
        assert archlab.tiny(*words).status == 0
    assert updates == [1, 2, 3, 4], "the second start went on where the first stopped"
    before = contents(Path("here"))
    again = archlab.tiny(*words)
    assert (again.status, "done already" in again.out) == (0, True)
    assert contents(Path("here")) == before


def test_a_kill_before_the_first_checkpoint_is_a_fresh_start(archlab):
    Path("here").mkdir()
    (Path("here") / ".config.yaml.1.draft").write_text("half of a", encoding="utf-8")
    assert archlab.tiny("hydra.run.dir=here", "train.resume=auto").status == 0
