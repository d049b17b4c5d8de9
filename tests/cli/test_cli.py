"""What may be typed, what is refused and how, and the exit status."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import TINY
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser

from archlab import cli
from archlab.config import compose
from archlab.config.check import check_config, suggest
from archlab.config.compose import load
from archlab.errors import ArchlabError, UsageError, exit_status, guarded, sentence
from archlab.plugins import PRESETS, conf_dir, config_loader, names
from archlab.run.job import Job

GROUPS, SCALARS = compose.top_level()
PACKAGE = Path(cli.__file__).parents[1]
NUMBERS = ("seed", "train.lr", "train.steps", "train.weight_decay", "model.d_model", "attn.n_heads", "bench.batch")

REFUSED = {
    "attn=gqq": ("unknown attn 'gqq'", "installed: ", "mha"),
    "attn=gpa": ("unknown attn 'gpa'", "did you mean 'gqa'?"),
    "+ffn=moo": ("unknown ffn 'moo'", "swiglu"),
    "train=fast": ("unknown train 'fast'", "default, smoke"),
    "hydra/launcher=fast": ("unknown hydra/launcher 'fast'", "joblib"),
    "attn=": ("unknown attn ''",),
    "+attn=[gqa,mla]": ("a run has one attn", "-m attn=gqa,mla"),
    "-m attn=[gqa,mla]": ("a run has one attn", "-m attn=gqa,mla"),
    "attn=gqa,mla": ("names several values: add -m",),
    "seed=0,1": ("names several values: add -m",),
    "attn=glob(*)": ("names several values: add -m",),
    "-m attn=glob(zz*)": ("names nothing that is installed",),
    "attn=gqa attn=mla": ("attn is given twice", "-m attn=gqa,mla"),
    "model.d_modl=3": ("unknown key 'model.d_modl'", "did you mean 'model.d_model'?"),
    "+model.typo=1": ("unknown key 'model.typo'", "known: ", "model.dropout"),
    "+attn.typo=1": ("unknown key 'attn.typo'", "attn.n_heads"),
    "++attn.n_head=1": ("unknown key 'attn.n_head'", "did you mean 'attn.n_heads'?"),
    "attn=kda_mla attn.parts.mla.kv_lora_rang=1": ("did you mean 'attn.parts.mla.kv_lora_rank'?",),
    "train.n_heads=4": ("unknown key 'train.n_heads'", "did you mean 'attn.n_heads'?"),
    "n_layers=4": ("did you mean 'model.n_layers'?",),
    "sed=1": ("unknown key 'sed'", "did you mean 'seed'?"),
    "+foo=1": ("unknown key 'foo'", "known: seed, "),
    "hydra.run.dri=x": ("unknown key 'hydra.run.dri'", "did you mean 'hydra.run.dir'?"),
    "attn.layer_idx=1": ("unknown key 'attn.layer_idx'",),
    "model.attn=mla": ("unknown key 'model.attn'", "did you mean 'attn'?"),
    "-m +attn.typo=1,2 seed=0,1": ("unknown key 'attn.typo'",),
    "-m attn=gqa,mla attn.n_kv_heads=1": ("unknown key 'attn.n_kv_heads'", "did you mean 'attn.n_heads'?"),
    "-m attn=gqa,mlx": ("unknown attn 'mlx'",),
    "train.steps=abc": ("train.steps='abc' must be a whole number",),
    "train.steps=1.5": ("train.steps=1.5 must be a whole number",),
    "train.compile=3": ("train.compile=3 must be true or false",),
    "train.schedule=slow": ("train.schedule='slow' must be cosine or wsd or constant",),
    "log=wandb log.mode=on": ("log.mode='on' must be offline or online",),
    "seed=abc": ("seed=abc: give a whole number",),
    "explain=1": ("explain=1: give true or false",),
    "device=tpu": ("device=tpu", "cpu"),
    "dtype=float8": ("dtype=float8", "float32"),
    "device=meta": ("device=meta", "train.steps=0"),
    "bench=mechanisms": ("archlab.measure.ratio.Suite", "python -m archlab.bench"),
    "attn._target_=no.such.Thing": ("attn._target_=no.such.Thing cannot be loaded",),
    "~attn": ("a run needs one, attn=NAME",),
    "gqa": ("'gqa' is not of the form key=value",),
    "train.betas=[0.9": ("[0.9",),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_one_sentence_and_status_2(archlab, words):
    outcome = archlab(*words.split())
    assert outcome.status == 2
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    assert not [part for part in REFUSED[words] if part not in outcome.err], outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.out == ""
    assert not Path("runs").exists()


def test_the_traceback_comes_with_the_sentence_where_it_is_asked_for(archlab, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    outcome = archlab("sed=1")
    assert outcome.status == 2
    assert "Traceback" in outcome.err
    assert outcome.err.endswith("error: unknown key 'sed'; did you mean 'seed'?\n")
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


def test_a_command_leaves_the_process_as_it_was(archlab, monkeypatch):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    before = list(sys.argv)
    assert archlab("--cfg", "job").status == 0
    assert "HYDRA_FULL_ERROR" not in os.environ
    assert sys.argv == before


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_a_group_is_the_same_with_and_without_a_plus(archlab, group):
    name = names(group)[-1]
    printed = {archlab(f"{plus}{group}={name}", "--cfg", "job").out for plus in ("", "+", "++")}
    assert len(printed) == 1
    assert printed != {""}


@pytest.mark.parametrize("word", ["attn.n_heads=4", "+attn.n_heads=4", "++attn.n_heads=4"])
def test_a_key_is_the_same_with_and_without_a_plus(archlab, word):
    assert "n_heads: 4\n" in archlab(word, "--cfg", "job").out


def test_a_flag_may_stand_among_the_overrides(archlab):
    outcome = archlab("attn=gqa", "--cfg", "job", "seed=3")
    assert "seed: 3" in outcome.out


@pytest.mark.parametrize("word", ["hydra.run.dir=x", "hydra/launcher=joblib", "-m", "~attn", "attn@attn.parts.a=mla"])
def test_what_is_hydras_own_is_left_alone(word):
    assert compose.normalise(word, GROUPS) == word


def test_cells_are_those_that_hydra_runs():
    words = ["attn=gqa,mla", "ffn=swiglu", "++seed=range(0,3)", "++train.lr=1e-3,2e-3", "++train.betas=[0.9,0.99]"]
    with config_loader() as loader:
        overrides = OverridesParser.create(config_loader=loader).parse_overrides(words)
    cells = compose._cells(overrides)
    assert [sorted(cell) for cell in cells] == [sorted(c) for c in BasicSweeper.split_arguments(overrides, None)[0]]
    assert len(cells) == 2 * 3 * 2


@pytest.mark.parametrize(
    ("overrides", "headline"),
    [
        ([], "baseline: attn=mha ffn=swiglu (no attn or ffn given)"),
        (["attn.n_heads=2"], "baseline: attn=mha ffn=swiglu (no attn or ffn given)"),
        (["attn=mha"], "attn=mha ffn=swiglu (no ffn given)"),
        (["ffn=swiglu"], "attn=mha ffn=swiglu (no attn given)"),
        (["attn=mha", "ffn=swiglu"], "attn=mha ffn=swiglu"),
    ],
)
def test_the_first_line_says_what_nobody_asked_for(overrides, headline):
    assert Job(Path("x"), {"attn": "mha", "ffn": "swiglu"}, tuple(overrides)).headline == headline


def test_help_names_what_to_type(archlab):
    outcome = archlab("--help")
    assert outcome.status == 0
    for part in ("python -m archlab attn=gqa ffn=moe", "train.resume=true", "archlab.report", "hydra/launcher=joblib"):
        assert part in outcome.out
    for group in GROUPS:
        assert f"\n{group}: " in outcome.out


NO_OPTIONS = ("base", "study", "zoo")
SHIPPED = sorted((p.parent.name, p.stem) for p in conf_dir().glob("*/*.yaml") if p.parent.name not in NO_OPTIONS)


@pytest.mark.parametrize(("group", "name"), SHIPPED)
def test_every_shipped_option_passes_the_check(group, name):
    check_config(load([f"{group}={name}"]), SCALARS, [g for g in GROUPS if g not in PRESETS])


def test_what_is_typed_wins_over_an_experiment():
    cfg = load(["experiment=tiny", "attn=gqa", "attn.n_heads=2", "train.steps=7"])
    assert (cfg.attn.n_kv_heads, cfg.attn.n_heads, cfg.train.steps) == (2, 2, 7)
    assert (cfg.model.d_model, cfg.train.batch_size) == (32, 16)


@pytest.mark.parametrize(
    ("key", "best"),
    [
        ("attn.n_haeds", "attn.n_heads"),  # misspelt
        ("train.n_heads", "attn.n_heads"),  # misplaced
        ("n_heads", "attn.n_heads"),
        ("train.n_haeds", "attn.n_heads"),  # both
        ("train.dropot", "model.dropout"),
    ],
)
def test_the_nearest_key(key, best):
    known = ["seed", "attn", "train", "attn.n_heads", "attn.window", "train.steps", "model.dropout"]
    assert suggest(key, known) == f"did you mean {best!r}?"


def test_where_nothing_is_near_what_there_is():
    known = ["seed", "attn", "attn.n_heads", "attn.window"]
    assert suggest("attn.xyzzy", known) == "known: attn.n_heads, attn.window"
    assert suggest("xyzzy.a", known) == "known: seed, attn"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UsageError("no"), 2),
        (ArchlabError("no"), 1),
        (OSError(28, "No space left on device"), 1),
        (KeyboardInterrupt(), 130),
        (MemoryError(), 1),
        (ZeroDivisionError("x"), 1),
    ],
)
def test_errors_end_as_a_status_and_a_line(capsys, monkeypatch, error, status):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def fail():
        raise error

    assert guarded(fail) == status
    assert re.fullmatch(r"error: .+\n", capsys.readouterr().err)


def test_an_error_inside_another_is_told_as_itself():
    wrapped = RuntimeError("in between")
    wrapped.__cause__ = UsageError("n_heads=3: give 4")
    assert sentence(wrapped) == "n_heads=3: give 4"
    assert exit_status(wrapped) == 2


def test_an_error_that_nobody_foresaw_says_where():
    with pytest.raises(ZeroDivisionError) as caught:
        raise ZeroDivisionError("by zero")
    assert re.match(r"ZeroDivisionError: by zero \(at test_cli\.py:\d+; HYDRA_FULL_ERROR=1", sentence(caught.value))


@pytest.mark.slow
def test_the_program_runs_anywhere_and_ends_with_its_status(tmp_path):
    def archlab(*words):
        return subprocess.run([sys.executable, "-m", "archlab", *words], cwd=tmp_path, capture_output=True, text=True)

    good = archlab(*TINY, "+attn=gqa")
    assert good.returncode == 0, good.stderr
    assert good.stdout.startswith("attn=gqa ffn=swiglu (no ffn given)\n")
    assert len(list(tmp_path.glob("runs/*/*/result.json"))) == 1
    bad = archlab("sed=1")
    assert (bad.returncode, bad.stdout, bad.stderr) == (2, "", "error: unknown key 'sed'; did you mean 'seed'?\n")


@pytest.mark.parametrize("key", [*NUMBERS])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "99999999999999999999"])
def test_no_number_that_is_none_gets_in(archlab, key, value):
    outcome = archlab(f"{key}={value}", "train=smoke", "bench=smoke")
    assert outcome.status == 2
    assert re.fullmatch(rf"error: {re.escape(key)}=\S+( must be|: give) .*\n", outcome.err), outcome.err


def test_numbers_deep_in_lists_are_judged_too(archlab):
    assert archlab("train.betas=[0.9,nan]").err == "error: train.betas.1=nan: give a finite number\n"


def test_help_lists_every_command(archlab):
    out = archlab("--help").out
    commands = [
        ".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts) for p in PACKAGE.rglob("*.py") if is_command(p)
    ]
    commands = {command.removesuffix(".__main__") for command in commands}
    assert {"archlab.report", "archlab.bench", "archlab.study.calibrate", "archlab.interop.hf"} <= commands
    assert not [command for command in commands if command not in out]


def is_command(path):
    return "sys.exit(main())" in path.read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_file_and_process_names_its_encoding(tmp_path):
    """A default that differs between machines would garble a text on some of them."""
    env = os.environ | {"PYTHONWARNDEFAULTENCODING": "1"}
    words = [w for w in TINY if w != "train.steps=4"] + ["train.steps=2", "log=wandb"]
    for command in (["archlab", *words, "hydra.run.dir=run"], ["archlab.report", "run"], ["archlab", "--help"]):
        code = "import warnings, runpy, sys; sys.argv = sys.argv[1:]; " + (
            "warnings.filterwarnings('error', category=EncodingWarning, module=r'archlab'); "
            "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *command], cwd=tmp_path, env=env, capture_output=True, encoding="utf-8"
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_help_and_the_parsing_of_words_need_no_torch():
    code = "import sys; from archlab.cli.main import main; main(['--help']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
