"""What `export` writes is read by those who have never heard of archlab, and what `import` reads is a run."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import contents
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from training import CPU

from archlab.cli import export
from archlab.cli.evaluate import main as evaluate_run
from archlab.cli.generate import main as generate
from archlab.cli.interop import main as import_model
from archlab.config.compose import load
from archlab.data import build_dataset
from archlab.data.codec import ByteCodec, CharCodec
from archlab.interop import hf, tokenizer
from archlab.interop.import_run import import_run
from archlab.measure import equivalence
from archlab.measure import latency as bench
from archlab.measure.timing import Effort
from archlab.model import build_model
from archlab.run.load import load_run
from archlab.train import checkpoint
from archlab.train.evaluate import evaluate

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="needs the extra archlab[hf]")

CONTEXT, WINDOWS = 16, 9
SPLIT = 1 + CONTEXT * WINDOWS
TEXT = 'Größe: 3 €\n\n\tdef f(x):\r\n  """日本語 🙂"""\n <s> é\u0301  x\x00.'
SIZES = ["attn.n_heads=4", "model.d_model=16", "model.n_layers=2"]
VARIANTS = {
    "bytes": ["attn=gqa", "ffn=swiglu", "data.tokens=bytes"],
    "characters": ["attn=mla", "ffn=moe_deepseek", "data.tokens=characters"],
}


def measure(text, tokens):
    return len(text.encode() if tokens == "bytes" else text)


def text_of(n, tokens):
    """Real text of exactly `n` tokens, whole characters first and last."""
    text = ""
    while measure(text + TEXT, tokens) <= n:
        text += TEXT
    return text + "." * (n - measure(text, tokens))


def make_run(path, overrides, *, dtype=torch.float32):
    """A folder as a run leaves it, of a model whose weights all matter, trained on a text of four equal parts: two
    train, the third validates."""
    path.mkdir()
    cfg = load(["data=text", f"data.path={path}/text", f"data.context={CONTEXT}", *SIZES, *overrides])
    cfg.data.val_fraction = cfg.data.test_fraction = 0.25
    (path / "text").write_text(text_of(SPLIT, cfg.data.tokens) * 4, encoding="utf-8", newline="")
    OmegaConf.save(cfg, path / "config.yaml")
    data = build_dataset(cfg.data)
    torch.manual_seed(0)
    model = build_model(cfg, data.vocab_size).to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(std=0.3).add_("norm" in name)
    save(path, model, data.codec)
    return path


def save(path, model, codec):
    meta = {"vocab_size": model.vocab_size, "progress": 1.0}
    checkpoint.save(path / checkpoint.FILE_NAME, model, torch.optim.SGD(model.parameters()), meta)
    (path / checkpoint.CODEC_FILE_NAME).write_text(codec.to_json(), encoding="utf-8")


@pytest.fixture(scope="module", params=VARIANTS)
def run(request, tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / request.param, VARIANTS[request.param])


@pytest.fixture(scope="module")
def exported(run):
    folder = run.with_name(f"{run.name}-exported")
    assert export.main([str(run), str(folder)]) == 0
    return folder


OUTSIDER = """
import sys
sys.modules["archlab"] = None  # importing it fails
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, text, out = sys.argv[1:]
tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
text = open(text, encoding="utf-8", newline="").read()
ids = tokenizer(text, return_tensors="pt")["input_ids"]
prompt = ids[:, :5]
torch.save({
    "ids": ids,
    "text": tokenizer.decode(ids[0]),
    "logits": model(ids[:, :37]).logits,
    "continuation": model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False),
    "context": (tokenizer.model_max_length, model.config.max_position_embeddings),
}, out)
"""


@pytest.mark.slow
@torch.no_grad()
def test_who_has_no_archlab_computes_the_same(run, exported, tmp_path):
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in exported.iterdir()} == names
    subprocess.run([sys.executable, "-c", OUTSIDER, exported, run / "text", tmp_path / "out"], check=True)
    seen = torch.load(tmp_path / "out")
    model, _, codec = load_run(run)
    text = (run / "text").read_bytes().decode()
    assert seen["ids"][0].tolist() == codec.encode(text)
    assert seen["text"] == text
    assert seen["context"] == (CONTEXT, CONTEXT)
    expected = model(seen["ids"][:, :37])[0]
    assert (seen["logits"] - expected).abs().max() < 2e-5 * expected.abs().max()
    tokens = seen["continuation"]
    assert tokens.shape == (1, 13)
    assert torch.equal(model(tokens)[0].argmax(-1)[:, 4:-1], tokens[:, 5:])


def test_there_and_back_is_the_same_run(run, exported, tmp_path, capsys):
    assert import_model(["import", str(exported), str(tmp_path / "run")]) == 0
    assert "it continues no text" not in capsys.readouterr().out
    (model, cfg, codec), (again, _, again_codec) = (load_run(p) for p in (run, tmp_path / "run"))
    assert again_codec.to_json() == codec.to_json()
    assert not again.training
    mine, theirs = hf.tensors(model), hf.tensors(again)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    data = [f"data.path={run}/text", "data.val_fraction=0.25", "data.test_fraction=0.25"]
    assert evaluate_run([str(tmp_path / "run"), *data, "--device", "cpu"]) == 0
    settings = {"batch_size": cfg.train.batch_size, "device": CPU, "dtype": torch.float32}
    assert json.loads(capsys.readouterr().out) == evaluate(model, build_dataset(cfg.data), "val", **settings)
    assert equivalence.gate(again, length=19, batch=2, dtype=torch.float32)["equivalence/passed"]
    for path in (run, tmp_path / "run"):
        assert generate([str(path), "--prompt", "def f", "--tokens", "6", "--device", "cpu"]) == 0
    first, second = capsys.readouterr().out.split("def f")[1:]
    assert first == second


def test_an_imported_run_is_timed(exported, tmp_path):
    import_run(exported, tmp_path / "run")
    model, _, _ = load_run(tmp_path / "run")
    effort = Effort(warmup_calls=0, warmup_s=0.0, calls=1, seconds=0.0)
    settings = bench.BenchSettings(contexts=[5], prefill=effort, decode=effort)
    proof = equivalence.gate(model, length=19, batch=2, dtype=torch.float32)
    assert bench.latency(model, settings, dtype=torch.float32, gate=proof)["latency/decode_ms_per_token_p50/5"] > 0


def test_narrow_weights_are_widened_and_wide_ones_kept(tmp_path):
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        name = str(dtype)
        path = make_run(tmp_path / name, VARIANTS["bytes"], dtype=dtype)
        export.export(path, tmp_path / f"{name}-there")
        import_run(tmp_path / f"{name}-there", tmp_path / f"{name}-back")
        model, (again, cfg, _) = load_run(path)[0], load_run(tmp_path / f"{name}-back")
        assert cfg.dtype == str(expected).removeprefix("torch.")
        assert torch.equal(again.embed.weight, model.embed.weight.to(expected))


@pytest.mark.parametrize("codec", [ByteCodec(), CharCodec("".join(sorted(set(TEXT))))], ids=["bytes", "characters"])
def test_a_tokenizer_has_the_ids_of_the_codec(codec):
    theirs = tokenizer.to_tokenizer(codec, 5)
    for text in (TEXT, *TEXT, "", "\n\n", "  x", " .", "x  .", "<s>"):
        assert theirs(text)["input_ids"] == codec.encode(text)
        assert theirs.decode(codec.encode(text)) == text
    assert len(theirs) == codec.vocab_size
    assert tokenizer.to_codec(theirs).to_json() == codec.to_json()
    theirs.add_tokens("def")
    assert tokenizer.to_codec(theirs) is None


def test_a_character_that_the_vocabulary_lacks_has_no_id():
    with pytest.raises(Exception, match="UNK"):
        tokenizer.to_tokenizer(CharCodec("ab"), 5)("abc")


def test_who_has_no_tokenizer_of_ours_continues_no_text(exported, tmp_path, capsys):
    for path in exported.iterdir():
        if "tokenizer" not in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    assert import_model(["import", str(tmp_path), str(tmp_path / "run")]) == 0
    assert "it continues no text" in capsys.readouterr().out
    assert load_run(tmp_path / "run")[2] is None
    assert generate([str(tmp_path / "run"), "--prompt", "x"]) == 2
    assert "another tokenizer" in capsys.readouterr().err
    assert export.main([str(tmp_path / "run"), str(tmp_path / "again")]) == 0
    assert "it has no tokenizer" in capsys.readouterr().out
    assert not (tmp_path / "again/tokenizer.json").exists()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["data.path=absent"], "data.path=absent does not exist"),
        (["train.steps=3"], "train.steps=3: give settings of the data alone"),
        (["data.pat=x"], "no key 'pat'"),
        (["data.tokens={other}"], "of the run"),
        (["data._target_=archlab.data.tasks.mqar.MultiQueryRecall"], "no key 'path'"),
    ],
)
def test_what_cannot_be_evaluated_is_a_sentence(run, capsys, settings, named):
    other = "bytes" if run.name == "characters" else "characters"
    assert evaluate_run([str(run), *(word.format(other=other) for word in settings)]) == 2
    out = capsys.readouterr()
    assert named in out.err
    assert (out.out, out.err.count("\n")) == ("", 1)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["{runs}/absent", "{new}"], "no run at"),
        (["{run}", "{run}"], "exists already"),
        (["{run}", "{new}/below"], "make it first"),
        (["import", "{runs}", "{new}"], "no model at"),
        (["import", "{damaged}", "{new}"], "cannot be read as a model"),
        (["import", "{gpt2}", "{new}"], "does not know the model type 'gpt2'"),
        (["import", "{exported}", "{run}"], "exists already"),
    ],
)
def test_refusals_are_sentences_and_leave_everything_as_it_was(run, exported, tmp_path, capsys, words, named):
    (tmp_path / "gpt2").mkdir()
    transformers.GPT2Config().save_pretrained(tmp_path / "gpt2")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/config.json").write_text("{")
    before = contents(run.parent) | contents(tmp_path)
    places = {"runs": run.parent, "run": run, "exported": exported, "new": tmp_path / "new"}
    places |= {name: tmp_path / name for name in ("gpt2", "damaged")}
    command = import_model if words[0] == "import" else export.main
    assert command([word.format(**places) for word in words]) == 2
    out = capsys.readouterr()
    assert named in out.err
    assert (out.out, out.err.count("\n")) == ("", 1)
    assert contents(run.parent) | contents(tmp_path) == before


def test_weights_that_are_not_there_are_not_left_at_random(exported, tmp_path, capsys):
    for path in exported.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(exported / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert import_model(["import", str(tmp_path), str(tmp_path / "run")]) == 2
    assert "lacks the weight 'model.norm.weight'" in capsys.readouterr().err
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    assert import_model(["import", str(tmp_path), str(tmp_path / "run")]) == 2
    assert "cannot be read as a model" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_variant_that_no_family_has_names_its_setting(tmp_path, capsys):
    run = make_run(tmp_path / "run", ["attn=gqa", "model.norm=layer"])
    assert export.main([str(run), str(tmp_path / "new")]) == 2
    assert "model.norm='layer'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


TASK = """
task: local_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="needs the extra archlab[lm-eval]")
def test_lm_eval_finds_the_bits_per_byte_of_evaluate(run, exported, tmp_path):
    """The split is one document. Its windows are those of archlab where each is full, and where the token before the
    document, which lm_eval asks for, is the split's first."""
    model, cfg, codec = load_run(run)
    data = build_dataset(cfg.data)
    first, *rest = data.splits["val"].tolist()
    assert len(rest) == WINDOWS * CONTEXT
    (tmp_path / "documents.json").write_text(json.dumps({"text": codec.decode(rest)}) + "\n")
    (tmp_path / "task.yaml").write_text(TASK.format(path=tmp_path / "documents.json"))
    settings = f"pretrained={exported},prefix_token_id={first},dtype=float32"
    command = f"-m lm_eval --model hf --model_args {settings} --device cpu --batch_size 2 --tasks local_text"
    command = [sys.executable, *command.split(), "--include_path", tmp_path, "--output_path", tmp_path / "out"]
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=os.environ | offline, cwd=tmp_path)
    (result,) = Path(tmp_path / "out").rglob("results*.json")
    theirs = json.loads(result.read_text())["results"]["local_text"]["bits_per_byte,none"]
    ours = evaluate(model, data, "val", batch_size=2, device=CPU, dtype=torch.float32)["quality/val_bits_per_byte"]
    assert theirs == pytest.approx(ours, abs=1e-4)
