"""A study end to end, small: what it computes once, what it refuses, and what it says."""

import json
import re
from pathlib import Path

import pytest
import torch
from commands import contents

from archlab.cli.study import main
from archlab.cli.watch import main as watch
from archlab.config.compose import configuration
from archlab.errors import UsageError
from archlab.plugins import names
from archlab.study import statements
from archlab.study.analysis import Analysis
from archlab.study.match import counts, matched, nearest_count
from archlab.study.plan import Plan
from archlab.study.spec import build, load_spec
from archlab.study.tune import Point, best, beyond, point

FILE = """
# @package _global_
says: nothing much
reference: a
seeds: [3, 4, 5]
tune: {lrs: [1.0e-3, 3.0e-3], seeds: [0], extend: 1}
match: params
launcher: basic
settings: [data=phrase, data.context=12, data.eval_tokens=60, model.d_model=32, model.n_layers=1, train.steps=3,
  train.batch_size=2, bench=smoke, "bench.contexts=[]", bench.gate_length=9]
variants:
  a: [attn=gqa, attn.n_heads=4]
  "<script>": [attn=kda, attn.n_heads=2]
statements:
  - {says: "=b is lower", kind: lower, first: "<script>", second: a, task: all, entry: quality/test_loss}
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mini.yaml").write_text(FILE, encoding="utf-8")
    return lambda *words: main(["mini.yaml", *words])


@pytest.mark.slow
def test_a_study_is_run_once_and_only_what_changed_again(study, capsys):
    assert study() == 0
    out = capsys.readouterr().out
    assert "statements: " in out
    folder = Path("runs/study/mini")
    wanted = {"report.html", "report.md", "cells.jsonl", "study.yaml", "records.csv"}
    assert wanted <= {path.name for path in folder.iterdir()}
    cells = contents(Path("runs/cells"))
    assert study() == 0
    assert contents(Path("runs/cells")) == cells, "nothing is done twice"
    capsys.readouterr()
    assert study("seeds=[3,4,5,6]") == 0
    assert "seeds 6 were added after a report had been read" in capsys.readouterr().out.replace("\n", " ")
    grown = contents(Path("runs/cells"))
    assert cells.items() <= grown.items()
    assert len({p.parent for p in grown}) == len({p.parent for p in cells}) + 2
    assert watch([str(folder), "--once"]) == 0
    assert re.search(r"all\s+a\s+\d+", capsys.readouterr().out)


@pytest.mark.slow
def test_every_text_of_a_record_is_text_in_the_report(study):
    assert study() == 0
    page = Path("runs/study/mini/report.html").read_text(encoding="utf-8")
    body = page[page.index("<body>") :]
    assert "<script>-s" not in body
    assert "&lt;script&gt;" in body
    assert body.count("<script>") == 1, "the page's own"
    table = Path("runs/study/mini/records.csv").read_text(encoding="utf-8")
    assert "variant/name" in table


@pytest.mark.slow
def test_a_cell_that_diverges_is_counted_and_enters_no_mean(study, capsys):
    words = ("tune=null", "seeds=[0,1,2]")
    assert study(*words) == 0
    runs = [json.loads(line) for line in Path("runs/study/mini/cells.jsonl").read_text(encoding="utf-8").splitlines()]
    broken = Path(next(r["folder"] for r in runs if r["variant"] == "a" and r["seed"] == 1)) / "result.json"
    record = json.loads(broken.read_text(encoding="utf-8"))
    broken.write_text(json.dumps(record | {"status": "diverged", "quality/test_loss": 1e9}), encoding="utf-8")
    capsys.readouterr()
    assert study(*words) == 0
    report = Path("runs/study/mini/report.md").read_text(encoding="utf-8")
    assert "| a | 2, 1 diverged |" in report
    assert "000000" not in report


@pytest.mark.slow
def test_a_cell_that_fails_ends_the_study_with_a_status(study, capsys):
    text = FILE.replace("attn=kda, attn.n_heads=2", "attn=kda, attn.n_heads=5")
    Path("mini.yaml").write_text(text.replace("match: params", "match: null"), encoding="utf-8")
    assert study("tune=null") in (1, 2)
    assert "n_heads=5" in capsys.readouterr().err


def test_a_dry_run_says_what_would_be_done(study, capsys):
    assert study("--dry-run") == 0
    out = capsys.readouterr().out
    assert "10 cells" in out
    assert "ffn.d_ff=" in out
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["recal"], "unknown study 'recal'; did you mean 'recall'?"),
        (["nowhere.yaml"], "there is no file nowhere.yaml"),
        (["mini.yaml", "sees=[1]"], "a study has no key 'sees'; did you mean 'seeds'?"),
        (["mini.yaml", "reference=gpa"], "reference=gpa: "),
        (["mini.yaml", "match=param"], "match=param: did you mean 'params'?"),
        (["mini.yaml", "tune.seeds=[3]"], "tune.seeds=[3]: the seeds that choose a rate may not be compared too"),
        (["mini.yaml", "tune.lrs=[1e-3]"], "give at least two rates"),
        (["mini.yaml", "variants.a=['attn=gpa']"], "unknown attn 'gpa'; did you mean 'gqa'?"),
        (["mini.yaml", "launcher=slrum", "tune=null"], "launcher=slrum"),
    ],
)
def test_what_cannot_be_is_one_sentence(study, capsys, words, sentence):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("name", names("study"))
def test_every_shipped_study_composes(name):
    plan = Plan(load_spec([name]))
    for task, variant in plan.contests():
        cfg = configuration(plan.words(task, variant))
        assert cfg.train.steps > 0
    known = Analysis(plan, {key: plan.test_cells(*key) for key in plan.contests()}) if plan.spec.tune is None else None
    assert known is None or known.rows
    for statement in plan.spec.statements:
        assert statement["kind"] in statements.KINDS
        for key in {"variant", "first", "second"} & statement.keys():
            assert statement[key] in plan.spec.variants_of(statement["task"])


# Matching


@pytest.mark.parametrize("count", ["params", "active_params", "train_flops"])
@pytest.mark.parametrize(("attn", "ffn"), [("kda", "swiglu"), ("mla", "mlp"), ("gqa", "moe")])
def test_a_matched_model_has_the_reference_count(count, attn, ffn):
    small = ["model.d_model=64", "model.n_layers=2", "data=phrase"]
    wanted = counts(configuration(["attn=mha", *small]))[count]
    words = [f"attn={attn}", f"ffn={ffn}", *small]
    changed = matched(configuration(words), wanted, count, "ffn_width")
    assert abs(counts(configuration([*words, *changed]))[count] - wanted) <= 0.01 * wanted


def test_by_depth_or_width_of_the_model_too():
    wanted = counts(configuration(["attn=mha", "model.d_model=64", "model.n_layers=4", "data=phrase"]))["cache_at_8k"]
    words = ["attn=gqa", "attn.n_heads=8", "attn.n_kv_heads=4", "model.d_model=64", "model.n_layers=4", "data=phrase"]
    assert matched(configuration(words), wanted, "cache_at_8k", "n_layers") == ["model.n_layers=8"]


def test_a_count_out_of_reach_is_an_error_with_the_nearest():
    words = ["attn=gqa", "model.d_model=64", "model.n_layers=2", "data=phrase"]
    with pytest.raises(UsageError, match=r"brings it to [\d,]+ at the nearest"):
        matched(configuration(words), 1.0, "params", "ffn_width")
    with pytest.raises(UsageError, match=r"match=cache_at_8k: ffn\.d_ff"):
        matched(configuration(words), 1e9, "cache_at_8k", "ffn_width")


@pytest.mark.parametrize("wanted", [1, 7, 99, 1000, 12345])
def test_the_nearest_count_is_found_where_some_numbers_have_none(wanted):
    value, count = nearest_count(lambda n: 3 * n + 5 if n % 4 == 0 else None, wanted)
    every = {n: 3 * n + 5 for n in range(4, 1 << 13, 4)}
    assert abs(count - wanted) == min(abs(c - wanted) for c in every.values())
    assert every[value] == count


# Tuning


def losses(**by_lr):
    return [Point(float(lr.removeprefix("lr").replace("_", "e-")), 1, 1, loss) for lr, loss in by_lr.items()]


def test_the_best_rate_is_inside_or_the_grid_grows():
    assert beyond(losses(lr1_3=2.0, lr3_3=1.0, lr9_3=3.0)) is None
    assert beyond(losses(lr1_3=2.0, lr3_3=1.0)) == pytest.approx(9e-3)
    assert beyond(losses(lr1_3=1.0, lr3_3=2.0)) == pytest.approx(3.33e-4)


def test_a_rate_at_which_a_run_fails_is_never_the_best():
    ok = {"status": "ok", "quality/val_loss": 1.0}
    curve = [point(1e-3, [ok, ok], None), point(3e-3, [ok | {"quality/val_loss": 0.1}, {"status": "diverged"}], None)]
    assert best(curve).lr == 1e-3
    assert beyond([*curve, point(3e-4, [ok | {"quality/val_loss": 2.0}], None)]) is None


def test_of_rates_that_solve_a_task_the_soonest_is_the_best():
    def run(accuracy, steps):
        return {"status": "ok", "quality/val_loss": 1.0, "quality/val_accuracy": accuracy, "train/steps": steps}

    curve = [point(1e-3, [run(1.0, 300)], 0.98), point(3e-3, [run(1.0, 100)], 0.98), point(9e-3, [run(0.9, 50)], 0.98)]
    assert best(curve).lr == 3e-3


# Seeds


def test_one_of_two_seeds_can_be_held():
    words = ("model.d_model=16", "model.n_layers=1", "data=phrase", "data.context=8")
    from archlab.config.identity import config_hash, seeds

    cfg = configuration([*words, "seed=3", "data.seed=9"])
    assert seeds(cfg) == (3, 9)
    assert seeds(configuration([*words, "seed=3", "init_seed=1"])) == (1, 3)
    assert config_hash(cfg, with_seed=False) == config_hash(configuration([*words, "seed=4"]), with_seed=False)
    assert config_hash(cfg) != config_hash(configuration([*words, "seed=3"]))


@pytest.mark.slow
def test_data_order_and_weights_follow_their_own_seed(archlab):
    from archlab.run.load import load_run

    for name, words in {"a": ["seed=1"], "b": ["seed=1", "data.seed=2"], "c": ["seed=2", "init_seed=1"]}.items():
        assert archlab.tiny(*words, "train.steps=1", f"hydra.run.dir={name}").status == 0
    first = {n: json.loads((Path(n) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[0]) for n in "abc"}
    assert first["b"]["train/loss"] == first["c"]["train/loss"] != first["a"]["train/loss"]
    weights = [load_run(n)[0].embed.weight for n in "bc"]
    assert torch.equal(*weights)


def test_a_spec_without_a_needed_key_says_so():
    with pytest.raises(UsageError, match="a study needs the key 'reference'"):
        build({"name": "x", "says": "y", "dir": "z", "variants": {}, "seeds": []})
