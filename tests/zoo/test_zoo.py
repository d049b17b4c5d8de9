"""The zoo: figures of published models, of which most were computed elsewhere, and what is made of them.

Elements are numbers in a cache, two bytes each.
"""

import csv
import itertools
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from archlab.attn.linear import LinearAttention
from archlab.attn.mla import MultiHeadLatentAttention
from archlab.attn.msa import MiniMaxSparseAttention
from archlab.cli import zoo as command
from archlab.cli.main import main as archlab_main
from archlab.config.compose import load
from archlab.errors import UsageError
from archlab.measure import account
from archlab.model import build_model
from archlab.plugins import conf_dir
from archlab.run.record import read as read_record
from archlab.zoo import compare, figure, report
from archlab.zoo.compare import comparisons, crossings
from archlab.zoo.figure import Curve, spread
from archlab.zoo.models import CONTEXTS, LONGEST, PER_FIRST_TOKEN, PER_TOKEN, Model, build, read, zoo
from archlab.zoo.published import Claim, parse

NAMES = sorted(path.stem for path in (conf_dir() / "zoo").glob("*.yaml"))

TOTALS = {
    "llama_2_7b": 6_738_415_616,
    "llama_3_8b": 8_030_261_248,
    "llama_2_70b": 68_976_648_192,
    "llama_3_70b": 70_553_706_496,
    "mistral_7b": 7_241_732_096,
    "mixtral_8x7b": 46_702_792_704,
    "qwen_3_0_6b": 596_049_920,
    "qwen_3_4b": 4_022_468_096,
    "qwen_3_8b": 8_190_735_360,
    "qwen_3_32b": 32_762_123_264,
    "qwen_3_30b_a3b": 30_532_122_624,
    "qwen_3_next_80b_a3b": 79_674_391_296,
    "deepseek_v2": 235_741_434_880,
    "deepseek_v3": 671_026_404_352,
    "kimi_linear": 49_122_675_072,
    "minimax_m3": 426_174_565_632,
}

BILLIONS = {
    "mixtral_8x7b": {"active": 12.88, "active_non_input_embedding": 12.75},
    "qwen_3_0_6b": {"non_embedding": 0.440},
    "qwen_3_4b": {"non_embedding": 3.634},
    "qwen_3_8b": {"non_embedding": 6.946},
    "qwen_3_32b": {"non_embedding": 31.206},
    "qwen_3_30b_a3b": {"non_embedding": 29.910, "active": 3.353, "active_non_input_embedding": 3.042},
    "deepseek_v2": {"active": 21.376, "active_non_input_embedding": 20.852},
    "deepseek_v3": {"active": 37.552, "active_non_input_embedding": 36.626},
    "kimi_linear": {"non_embedding": 48.37, "active": 3.484, "active_non_input_embedding": 3.107},
    "minimax_m3": {"active": 25.96, "active_non_input_embedding": 24.73, "active_non_embedding": 23.50},
}

ELEMENTS_A_TOKEN = {
    "opt_13b": 409_600,
    "llama_2_7b": 262_144,
    "llama_2_70b": 163_840,
    "llama_3_70b": 163_840,
    "llama_3_8b": 65_536,
    "mixtral_8x7b": 65_536,
    "llama_3_1_405b": 258_048,
    "qwen_2_5_72b": 163_840,
    "qwen_3_0_6b": 57_344,
    "qwen_3_1_7b": 57_344,
    "qwen_3_4b": 73_728,
    "qwen_3_8b": 73_728,
    "qwen_3_32b": 131_072,
    "qwen_3_30b_a3b": 49_152,
    "deepseek_67b": 194_560,
    "deepseek_v2": 34_560,
    "deepseek_v3": 35_136,
    "kimi_linear": 4_032,
    "minimax_m3": 68_736,
    "gpt_oss_120b": 18_432,
}


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return dict(zip(NAMES, zoo(), strict=True))


@pytest.fixture(scope="module")
def compared(models) -> dict[tuple[str, str], compare.Comparison]:
    return {(name, c.baseline.name): c for name, model in models.items() for c in comparisons(model)}


def test_sixteen_models_at_least():
    assert len(NAMES) >= 16


@pytest.mark.parametrize("name", NAMES)
def test_what_is_published_is_counted_or_the_difference_explained(models, name):
    model = models[name]
    assert any(claim.name.startswith("params/") for claim in model.claims)
    assert model.published.sources
    for claim in model.claims:
        assert claim.verdict != "differs", claim
        assert bool(claim.explained) == (claim.verdict == "explained"), claim


@pytest.mark.parametrize("name", TOTALS)
def test_totals(models, name):
    assert models[name].entries["params/total"] == TOTALS[name]


@pytest.mark.parametrize("name", BILLIONS)
def test_parameters_in_use(models, name):
    for part, billions in BILLIONS[name].items():
        half_digit = 0.5 * 10 ** -len(f"{billions}".partition(".")[2])
        assert models[name].entries[f"params/{part}"] / 1e9 == pytest.approx(billions, abs=half_digit), part


@pytest.mark.parametrize("name", ELEMENTS_A_TOKEN)
def test_cache_elements_a_token(models, name):
    assert models[name].entries[PER_TOKEN] == 2 * ELEMENTS_A_TOKEN[name]


def test_gpt_oss_lacks_its_biases_and_sinks(models):
    layers, d, experts, heads, kv_heads, width = 36, 2880, 128, 64, 8, 64
    of_experts = layers * experts * (2 * d + d)
    of_routers = layers * experts
    of_attention = layers * (heads * width + 2 * kv_heads * width + d)
    sinks = layers * heads
    model = models["gpt_oss_120b"]
    missing = of_experts + of_routers + of_attention + sinks
    assert model.entries["params/total"] + missing == 116_829_156_672
    assert f"{missing:,}" in model.published.explained["params/total"]
    assert f"{of_experts + of_routers:,}" in model.published.explained["params/ffn"]


def test_opt_has_2048_tokens_in_1_6_gb(models):
    assert models["opt_13b"].cache_bytes(2048) == 2048 * 819_200


def test_windows(models):
    mistral, gpt_oss = models["mistral_7b"], models["gpt_oss_120b"]
    for n in (1, 127, 129, 4095, 4097, 100_000):
        assert mistral.cache_bytes(n) == 131_072 * min(n, 4096)
        assert gpt_oss.cache_bytes(n) == 2 * 18_432 * (n + min(n, 128))
    assert mistral.entries[PER_TOKEN] == 0
    assert mistral.entries[PER_FIRST_TOKEN] == 131_072


def test_kimi_linear_has_the_released_layers(models):
    blocks = models["kimi_linear"].lm.blocks
    glob = [i for i, block in enumerate(blocks, start=1) if isinstance(block.mixer, MultiHeadLatentAttention)]
    assert glob == [4, 8, 12, 16, 20, 24, 27]
    assert sum(isinstance(block.mixer, LinearAttention) for block in blocks) == 20
    assert all(block.mixer.n_rot == 0 for i, block in enumerate(blocks, start=1) if i in glob)


def test_kimi_linear_has_a_constant_state(models):
    recurrent, convolution = 20 * 524_288, 737_280
    assert models["kimi_linear"].entries["cache/bytes_constant"] == 4 * recurrent + 2 * convolution


def test_kimi_linear_against_latent_attention_in_every_layer(compared):
    c = compared["kimi_linear", "its layers all MLA"]
    assert c.baseline.entries[PER_TOKEN] == 27 * 576 * 2
    assert c.saving(4096) == pytest.approx(0.40, abs=0.005)
    assert c.saving(1 << 17) == pytest.approx(0.730, abs=0.0005)
    assert c.saving(1 << 20) == pytest.approx(0.739, abs=0.0005)
    assert c.limit == pytest.approx(20 / 27)
    assert c.claim.verdict == "explained"
    [crossing] = crossings(c.model, c.baseline)
    assert crossing - 1 == 1884
    assert c.saving(1884) < 0 < c.saving(1885)


def test_deepseek_v2_saves_elements(compared):
    c = compared["deepseek_v2", "DeepSeek 67B, element by element"]
    assert c.limit == 1 - 34_560 / 194_560
    assert f"{c.limit:.2%}" == "82.24%"


def test_deepseek_v2_saves_bits(compared):
    c = compared["deepseek_v2", "DeepSeek 67B, with 6 bits an element"]
    assert c.limit == pytest.approx(1 - (34_560 * 6) / (194_560 * 16))
    assert f"{c.limit:.2%}" == "93.34%"
    assert c.claim.verdict == "exact"
    assert c.saving(4096) == pytest.approx(c.limit)


def test_deepseek_v2_saves_against_its_own_heads(compared):
    c = compared["deepseek_v2", "multi-head attention of its shape"]
    assert c.baseline.entries[PER_TOKEN] == 2 * 60 * 2 * 128 * 128
    assert f"{c.limit:.2%}" == "98.24%"


def test_minimax_m3_is_dense_then_sparse(models):
    blocks = models["minimax_m3"].lm.blocks
    assert [isinstance(block.mixer, MiniMaxSparseAttention) for block in blocks] == [False] * 3 + [True] * 57


@pytest.mark.parametrize(
    ("elements", "overrides"),
    [
        (41_984 + 5_248, ["attn=msa", "attn.n_heads=64", "attn.n_kv_heads=4", "attn.d_index=128", "model.n_layers=41"]),
        (860_160, ["attn=mha", "attn.n_heads=56", "model.n_layers=60"]),
    ],
    ids=["the paper's MSA model", "DeepSeek-V2's comparison with MHA"],
)
def test_caches_of_models_that_are_not_released(elements, overrides):
    lm = build(load([*overrides, "attn.head_dim=128", "++model.vocab_size=2"]))
    assert account.cache_growth(lm, torch.bfloat16)[PER_TOKEN] == 2 * elements


def test_nothing_is_built_and_all_is_counted_by_account(models):
    model = models["minimax_m3"]
    assert all(p.is_meta for p in model.lm.parameters())
    static = account.static(model.lm, train_context=1, contexts=CONTEXTS, dtype=torch.bfloat16)
    static = {key: n for key, n in static.items() if not key.startswith(("flops/forward", "flops/train"))}
    assert static.items() <= model.entries.items()


def test_leaving_out_initialisation_leaves_out_nothing_else():
    cfg = load(["attn=kda_mla", "ffn=moe_deepseek"])
    drawn, undrawn = build_model(cfg, 256, device="meta"), build(cfg)
    shapes = [{name: t.shape for name, t in lm.state_dict().items()} for lm in (drawn, undrawn)]
    assert shapes[0] == shapes[1]
    built = build_model(cfg, 256)
    assert built.head.weight.std() > 0.01


@pytest.mark.parametrize(
    ("name", "text", "value", "half_digit"),
    [
        ("params/total", "8.03B", 8.03e9, 5e6),
        ("params/total", "46.7B", 46.7e9, 5e7),
        ("params/active", "1T", 1e12, 5e11),
        ("params/non_embedding", "1981884416", 1_981_884_416, 0.5),
        ("cache/bytes_per_token_stored", "70.272 kB", 70_272, 0.5),
        ("cache/bytes_per_token_stored", "512 KiB", 524_288, 512),
        ("cache/bytes_per_token_stored", "34.6k elements", 69_200, 100),
        ("cache/bytes_at/2048", "1.6 GiB", 1.6 * 2**30, 0.05 * 2**30),
        ("saving", "93.3%", 0.933, 0.0005),
    ],
)
def test_figures_and_their_rounding(name, text, value, half_digit):
    assert parse(name, text) == pytest.approx((value, half_digit))
    for counted, verdict in (
        (value, "exact"),
        (value - 0.99 * half_digit, "exact"),
        (value + 1.1 * half_digit, "differs"),
    ):
        assert Claim(name, text, counted).verdict == verdict
    assert Claim(name, text, 2 * value, "doubled").verdict == "explained"
    assert Claim(name, text, value, "doubled").verdict == "exact"


def fake(constant: int, per_token: int, window: int | None) -> SimpleNamespace:
    return SimpleNamespace(cache_bytes=lambda n: constant + per_token * np.minimum(n, window or LONGEST).astype(int))


def test_crossings_are_those_of_a_scan_over_all_contexts():
    draw = random.Random(0)
    contexts, n_found = np.arange(1, LONGEST + 1), 0
    for _ in range(60):
        a, b = (
            fake(draw.choice([0, 10**5, 10**8]), draw.randint(1, 3000), draw.choice([None, None, 512, 70_000]))
            for _ in range(2)
        )
        sign = np.sign(a.cache_bytes(contexts) - b.cache_bytes(contexts))
        told, sign = contexts[sign != 0], sign[sign != 0]
        expected = told[1:][sign[1:] != sign[:-1]].tolist()
        n_found += len(expected)
        found = crossings(a, b)
        if len(expected) == 1 or not found:
            assert found == expected
        else:
            assert set(found) <= set(expected)
    assert n_found > 15


@pytest.mark.parametrize("constant", [1000, 1024])
def test_where_two_caches_are_equal_neither_is_the_smaller(constant):
    assert crossings(fake(0, 2, None), fake(constant, 1, None)) == [constant + 1]
    assert crossings(fake(0, 2, constant), fake(constant, 1, constant)) == []


def test_names_are_spread_as_near_as_can_be():
    draw = random.Random(0)
    for _ in range(50):
        wanted = sorted(draw.uniform(0, 100) for _ in range(draw.randint(1, 12)))
        places = spread(wanted, 5.0, 1000.0)
        assert all(b - a >= 5 - 1e-9 for a, b in itertools.pairwise(places))
        cost = sum((p - w) ** 2 for p, w in zip(places, wanted, strict=True))
        for _ in range(200):
            moved = sorted(p + draw.gauss(0, 2) for p in places)
            if all(b - a >= 5 for a, b in itertools.pairwise(moved)):
                assert sum((p - w) ** 2 for p, w in zip(moved, wanted, strict=True)) >= cost - 1e-9
    assert spread([1.0, 50.0], 5.0, 1000.0) == [1.0, 50.0]
    assert max(spread([90.0, 99.0, 99.5], 5.0, 100.0)) == 100.0


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path


MINE = """\
defaults:
  - override /attn: mla
model: {n_layers: 2}
published:
  figures: {params/total: %s}
  against:
    gqa: {overrides: [attn=gqa, model.n_layers=2]}
"""


def test_a_file_like_those_of_the_zoo(tmp_path):
    model = read(write(tmp_path, MINE % "2M"))
    assert model.entries == Model(load(["attn=mla", "model.n_layers=2"]), "same").entries
    assert model.name == "mine"
    assert [claim.verdict for claim in model.claims] == ["exact"]
    [c] = comparisons(model)
    assert c.baseline.name == "gqa"
    assert c.claim is None
    assert Curve([model]).is_yours


@pytest.mark.parametrize("name", ["minimax_m3", "kimi_linear"])
def test_the_configuration_of_a_run(models, name, tmp_path, monkeypatch, capsys):
    """`zoo` is a config group of the main command too, and a run's folder can go back to the zoo."""
    monkeypatch.chdir(tmp_path)
    assert archlab_main([f"+zoo={name}", "train.steps=0", "device=meta", "hydra.run.dir=run"]) == 0
    assert f"zoo={name}" in capsys.readouterr().out
    assert read_record(Path("run/result.json"))["params/total"] == models[name].entries["params/total"]
    again = read(Path("run/config.yaml"))
    assert again.name == models[name].name
    assert again.entries == models[name].entries
    assert again.claims == models[name].claims


def test_a_run_without_a_vocabulary_of_its_own_has_that_of_its_data(tmp_path):
    cfg = load(["data=mqar", "data.vocab_size=50"])
    OmegaConf.save(cfg, tmp_path / "config.yaml")
    model = read(tmp_path / "config.yaml")
    assert model.lm.vocab_size == 50
    assert model.name == tmp_path.name


REFUSED = {
    "seed: [": "cannot be read",
    "hello": "unknown key 'hello'",
    "- 1": "holds no configuration",
    "atn: {n_heads: 4}": "did you mean 'attn'?",
    "attn: {n_heeds: 4}": "did you mean 'attn.n_heads'?",
    "attn: {n_heads: 7}": "not divisible by n_heads=7",
    "seed: many": "seed=many: give a whole number",
    "defaults:\n  - override /attn: gqaa": "unknown attn 'gqaa'; did you mean 'gqa'? installed: ",
    "published: 3": "published=3: give a mapping",
    "published: {figurs: {}}": "did you mean 'figures'?",
    "published: {figures: [1]}": "published.figures is [1]: give a mapping",
    "published: {figures: {params/totl: 1B}}": "did you mean 'params/total'?",
    "published: {explained: {params/totl: so}}": "did you mean 'params/total'?",
    "published: {figures: {params/total: many}}": "'many' is no figure; give a number and a unit: k, M, B, T",
    "published: {against: {gqa: {bits: 6}}}": "published.against.gqa lacks overrides",
}


@pytest.mark.parametrize("text", REFUSED)
def test_a_bad_file_gets_a_sentence(text, tmp_path):
    with pytest.raises(UsageError, match=r"mine\.yaml: ") as error:
        read(write(tmp_path, text))
    assert REFUSED[text] in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file_and_a_folder_get_a_sentence(tmp_path, capsys):
    for path in (tmp_path / "none.yaml", tmp_path):
        assert command.main([str(path), "--out", str(tmp_path / "out")]) == 2
        assert str(path) in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture
def quick(models, monkeypatch):
    """The command with models that are built already."""
    monkeypatch.setattr(
        command, "zoo", lambda: [models[name] for name in ("deepseek_v3", "kimi_linear", "qwen_3_30b_a3b")]
    )
    monkeypatch.setenv("COLUMNS", "80")


def test_the_command(models, quick, tmp_path, capsys):
    out = tmp_path / "out"
    assert command.main([str(write(tmp_path, MINE % "2M")), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    page = (out / "zoo.md").read_text()
    for text in (shown, page):
        assert "671,026,404,352" in text
        assert "3.35 billion are cut off" in text
        assert "from 1,885 tokens on" in text
        assert "mine against gqa" in text
    assert (out / "zoo.png").stat().st_size > 10_000
    assert (out / "zoo.svg").read_text().startswith("<?xml")
    assert all(
        len(line) <= 80 for line in shown.splitlines() if line.startswith(("DeepSeek-V3 ", "Kimi Linear 48B-A3B  "))
    )
    rows = {row["model"]: row for row in csv.DictReader((out / "zoo.csv").open())}
    kimi = rows["Kimi Linear 48B-A3B"]
    assert int(kimi["params/total"]) == models["kimi_linear"].entries["params/total"]
    assert (kimi["params/total/published"], kimi["params/total/verdict"]) == ("48B", "explained")
    assert {key for key, n in kimi.items() if n} >= models["kimi_linear"].entries.keys()
    assert len(rows) == 4


def test_a_figure_that_differs_ends_the_command_with_1(quick, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(figure, "draw", lambda *_: [Path("undrawn.png")])
    assert command.main([str(write(tmp_path, MINE % "3M")), "--out", str(tmp_path / "out")]) == 1
    told = capsys.readouterr()
    assert "mine: params/total is" in told.err
    assert "but published as 3M" in told.err
    assert " NO" in told.out
    assert (tmp_path / "out/zoo.csv").exists()


def test_notes_are_numbered_as_the_marks_of_the_table(models):
    sheet = report.sheets(list(models.values()))[0]
    marks = [row[-1] for row in sheet.rows if row[-1].startswith("[")]
    assert marks == [note.partition(" ")[0] for note in report.notes(list(models.values()))]
    assert len(set(marks)) == len(marks) > 3
