"""What a table may compare, what it must say, and that its picture can be read."""

import csv
import io
import itertools
import json
import random
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from rich.console import Console

from archlab.cli.report import main
from archlab.errors import UsageError
from archlab.report import figure
from archlab.report.comparison import Run, compare, read
from archlab.report.table import show


def make(attn="gqa", ffn="moe", seed=0, loss=2.0, *, data="d" * 64, status="ok", **entries):
    """A record as a run leaves it, as far as a report reads it."""
    name = f"{attn}+{ffn}"
    record = {"status": status, "variant/attn": attn, "variant/ffn": ffn, "variant/name": name, "variant/hash": name}
    record |= {"seed": seed, "config_hash": f"{name}-{seed}", "overrides": "", "config/train": "default"}
    if status != "ok":
        return record | {"error": "the loss is nan at step 7"} | entries
    record |= {"data/name": "stdlib", "data/fingerprint": data, "data/train_tokens": 1000, "quality/val_loss": loss}
    record |= {"params/total": 3_280_000, "cache/bytes_per_token_stored": 2048.0, "env/threads": 2, "latency/batch": 1}
    for context in (1024, 8192):
        record |= {f"cache/bytes_at/{context}": 2048 * context, f"cache/read_bytes_at/{context}": 2048 * context}
        record |= {f"latency/decode_ms_per_token_p50/{context}": context / 1024}
    return record | entries


def leave(folder, *all_entries):
    for i, entries in enumerate(all_entries):
        (folder / f"{i:02}").mkdir()
        (folder / f"{i:02}" / "result.json").write_text(json.dumps(entries))
        (folder / f"{i:02}" / "metrics.jsonl").write_bytes(b"\xff not to be read")
    return folder


def runs(*all_entries):
    return [Run(Path(f"runs/{i:02}/result.json"), entries) for i, entries in enumerate(all_entries)]


def text(some_runs, width=120):
    console = Console(file=io.StringIO(), width=width)
    show(some_runs, console)
    return console.file.getvalue()


def test_the_command_prints_the_table_and_writes_it_and_the_picture(tmp_path, capsys):
    leave(
        tmp_path, *(make(attn, seed=s, loss=l + s / 100) for attn, l in (("gqa", 2), ("mla", 1.9)) for s in (0, 1, 2))
    )
    assert main([str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "mla+moe" in printed
    out = tmp_path / "report"
    assert {path.name for path in out.iterdir()} == {
        "report.csv",
        "report.md",
        "report.html",
        "records.csv",
        "records.parquet",
        *(f"report{kind}.{suffix}" for kind in ("", "-contexts") for suffix in ("png", "svg")),
    }
    rows = list(csv.DictReader((out / "report.csv").open()))
    by_name = {row["variant"]: row for row in rows}
    assert float(by_name["gqa+moe"]["quality/val_loss"]) == pytest.approx(2.01)
    assert float(by_name["gqa+moe"]["quality/val_loss/sd"]) == pytest.approx(0.01)
    assert by_name["mla+moe"]["n_ok"] == "3"
    markdown = (out / "report.md").read_text()
    assert "| mla+moe | 3 ok | 1 | 1.9100±0.0100 |" in markdown
    assert "(report.svg)" in markdown
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "report.svg").read_text().startswith("<?xml")


def test_the_files_go_where_they_are_wanted(tmp_path, capsys):
    leave(tmp_path, make())
    assert main([str(tmp_path / "00"), "--out", str(tmp_path / "there")]) == 0
    assert (tmp_path / "there" / "report.csv").exists()


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_its_terminal(width):
    wide = text(runs(*(make(seed=s, loss=2 + s / 50) for s in range(2)), make("kda_mla", "moe_deepseek")), width)
    assert max(map(len, wide.splitlines()[:12])) <= width
    assert "16.0 MiB" in wide


def test_the_seeds_of_a_variant_are_one_row():
    (c,) = compare(runs(*(make(seed=seed, loss=2 + seed) for seed in range(3))))
    (variant,) = c.variants
    assert variant.mean("quality/val_loss") == 3
    assert variant.deviation("quality/val_loss") == 1


def test_a_ranking_takes_three_seeds_and_a_difference_that_excludes_none():
    twice = runs(*(make(attn, seed=s, loss=l) for attn, l in (("gqa", 2.0), ("mla", 1.9)) for s in (0, 1)))
    assert compare(twice)[0].ranks == {}
    assert "fewer rank nothing" in text(twice)
    assert "rank" not in text(twice).splitlines()[2]

    def ranks(**losses):
        made = [make(name, seed=s, loss=x) for name, values in losses.items() for s, x in enumerate(values)]
        return compare(runs(*made))[0].ranks

    assert ranks(mla=[1.9, 1.92, 1.91], gqa=[2.0, 2.021, 2.01]) == {"mla+moe": "1", "gqa+moe": "2"}
    # Seeds that do not overlap, but three pairs whose difference is as wide as itself.
    assert ranks(mla=[1.0, 1.1, 1.2], gqa=[1.21, 1.6, 1.9]) == {"mla+moe": "1", "gqa+moe": "1="}
    # Seeds that do overlap, and pairs that all say the same.
    assert ranks(mla=[1.0, 2.0, 3.0], gqa=[1.1, 2.101, 3.099]) == {"mla+moe": "1", "gqa+moe": "2"}


def test_figures_of_different_data_stand_in_different_tables(tmp_path, capsys):
    some = (make("gqa", data="a" * 64), make("mla", data="b" * 64))
    printed = text(runs(*some))
    assert "2 data sets: figures of different data are no comparison" in printed
    assert printed.count("data stdlib") == 2
    assert main([str(leave(tmp_path, *some))]) == 0
    assert {path.stem for path in (tmp_path / "report").glob("*.png") if "contexts" not in path.stem} == {
        "report-aaaaaaaa",
        "report-bbbbbbbb",
    }


@pytest.mark.parametrize(
    ("other", "note"),
    [
        ({"data/train_tokens": 2000}, "different budgets"),
        ({"env/threads": 1}, "timed on different machines or settings"),
        ({"env/cpu": "other"}, "timed on different machines or settings"),
        ({"latency/batch": 8}, "different batch sizes"),
        ({"env/parallel_jobs": 2}, "while other runs shared the machine"),
        ({"seed": 5}, "not of the same seeds"),
    ],
)
def test_what_a_reader_must_know_is_said(other, note):
    equal = runs(make("gqa", **{"env/cpu": "one"}), make("mla", **{"env/cpu": "one"}))
    unequal = runs(make("gqa", **{"env/cpu": "one"}), make("mla", **({"env/cpu": "one"} | other)))
    assert note not in text(equal)
    assert note in text(unequal)


def test_runs_that_did_not_end_well_are_counted_and_named():
    some = runs(make(seed=0), make(seed=1, status="diverged"), make("mla", status="failed"))
    printed = text(some)
    assert "1 ok, 1 diverged" in printed
    assert "1 failed" in printed
    assert "diverged: gqa+moe seed 1: the loss is nan at step 7 (runs/01/result.json)" in printed
    assert "failed: mla+moe seed 0: the loss is nan at step 7 (runs/02/result.json)" in printed
    assert len(compare(some)) == 1


def test_a_repeated_seed_adds_no_evidence():
    some = runs(make(loss=9.0), make(loss=2.0), make(status="failed"))
    (c,) = compare(some)
    assert c.variants[0].values("quality/val_loss") == [2.0]
    assert "2 of 3 runs repeat a variant and seed" in text(some)


def test_variants_of_one_name_are_told_apart_by_what_differs():
    shared = {"overrides": "train.steps=5 train.lr=1"}
    other = {"overrides": "train.steps=5 train.lr=2", "variant/hash": "x", "config_hash": "x"}
    third = {"overrides": "train.steps=5 train.lr=2", "variant/hash": "y", "config_hash": "y", "config/train": "smoke"}
    labels = {v.label for v in compare(runs(make(**shared), make(**other), make(**third)))[0].variants}
    assert labels == {
        "gqa+moe train=default train.lr=1",
        "gqa+moe train=default train.lr=2",
        "gqa+moe train=smoke train.lr=2",
    }


def test_figures_are_compared_at_a_context_that_all_have():
    short = {f"latency/decode_ms_per_token_p50/{8192}": None}
    mixed = [make("gqa"), {k: v for k, v in make("mla").items() if k not in short}]
    (c,) = compare(runs(*mixed))
    assert c.measured_context("latency/decode_ms_per_token_p50") == 1024
    assert c.measured_context("cache/bytes_at") == 8192
    assert compare(runs(*mixed), context=1024)[0].measured_context("cache/bytes_at") == 1024
    assert c.measured_context("nothing") is None


def test_static_cards_are_a_table_and_curves(tmp_path, capsys):
    static = {k: v for k, v in make().items() if not k.startswith(("data/", "quality/", "latency/"))}
    assert main([str(leave(tmp_path, static))]) == 0
    assert "no data: static figures" in capsys.readouterr().out
    assert [path.stem for path in (tmp_path / "report").glob("*.png")] == ["report-contexts"], (
        "no loss, so no trade-off"
    )


def test_what_cannot_be_read_is_a_sentence(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere")]) == 2
    assert re.fullmatch(r"error: there is no .*nowhere: .*\n", capsys.readouterr().err)
    assert main([str(tmp_path)]) == 2
    assert re.fullmatch(r"error: no result\.json at or below .*\n", capsys.readouterr().err)
    (tmp_path / "result.json").write_text("{")
    assert main([str(tmp_path)]) == 2
    assert re.fullmatch(r"error: .*result\.json is not the record of a run .*\n", capsys.readouterr().err)
    with pytest.raises(UsageError):
        read([tmp_path])


def test_cells_come_in_the_order_of_their_numbers(tmp_path):
    for name in ("10-b", "9-a", "2-c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "result.json").write_text(json.dumps(make()))
    assert [run.path.parent.name for run in read([tmp_path])] == ["2-c", "9-a", "10-b"]


def test_one_run_is_found_once(tmp_path):
    leave(tmp_path, make(), make(seed=1))
    assert len(read([tmp_path, tmp_path / "00", tmp_path / "00" / "result.json"])) == 2


@pytest.mark.parametrize("n", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (12, 24, 60))])
def test_names_in_the_picture_cover_neither_each_other_nor_a_point(tmp_path, monkeypatch, n):
    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *args, **kwargs: (drawn.append(self), save(self, *args, **kwargs))
    )
    rng = random.Random(n)
    entries = []
    for i in range(n):
        size = 2 ** rng.uniform(12, 26)
        caches = {"cache/bytes_at/8192": size, "latency/decode_ms_per_token_p50/8192": rng.uniform(1, 3)}
        loss = 2 + rng.gauss(0, 0.1)
        attn, ffn = f"attention{i % 12}", ("swiglu", "moe")[i // 12 % 2]
        entries += [
            make(
                attn,
                ffn,
                seed=s,
                loss=loss + rng.gauss(0, 0.01),
                **caches,
                **{"variant/hash": str(i), "config_hash": f"{i}-{s}"},
            )
            for s in (0, 1)
        ]
    (c,) = compare(runs(*entries))
    files = figure.draw(c, tmp_path / "report")
    assert [file.suffix for file in files] == [".png", ".svg"]
    picture = drawn[0]
    picture.canvas.draw()
    for ax in picture.axes:
        boxes = [Text.get_window_extent(name) for name in ax.texts]  # without its line to the point
        assert len(boxes) == (n if n <= figure.MOST_LABELS else 0)
        assert not [1 for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]
        points = ax.transData.transform(
            [line.get_xydata()[0] for line in ax.lines if line.get_marker() in figure.MARKERS]
        )
        assert not [1 for box in boxes for point in points if box.contains(*point)]
        assert all(ax.bbox.x0 <= box.x0 and box.x1 <= ax.bbox.x1 for box in boxes)
    assert bool(picture.legends) == (n > figure.MOST_LABELS)
