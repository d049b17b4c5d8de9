"""Generation against repeated full passes, sampling against its definition, and the command line."""

import os
import subprocess
import sys

import pytest
import torch
from omegaconf import OmegaConf
from training import CPU, VOCAB, Rows, make_model, make_settings

from archlab.cli.generate import main
from archlab.config.compose import load
from archlab.data import build_dataset
from archlab.errors import UsageError
from archlab.model import build_model
from archlab.run.generate import generate, sample
from archlab.run.load import load_run
from archlab.train import checkpoint
from archlab.train.loop import train

DRAWS = 20_000


def continuation(model, prompt, n, **options):
    return torch.stack(list(generate(model, prompt, n, **options)), dim=1)


@pytest.fixture(scope="module")
def model():
    model = make_model(seed=3).double()
    for p in model.parameters():
        p.data.normal_(std=0.5)
    return model


def test_greedy_is_the_argmax_of_full_passes(model):
    prompt = torch.randint(VOCAB, (3, 7))
    tokens = prompt
    for _ in range(9):
        tokens = torch.cat([tokens, model(tokens)[0][:, -1:].argmax(-1)], dim=1)
    assert torch.equal(continuation(model, prompt, 9), tokens[:, 7:])
    assert list(generate(model, prompt, 0)) == []


def test_every_token_costs_one_new_position(model):
    lengths = []
    hook = model.embed.register_forward_hook(lambda module, args, output: lengths.append(args[0].shape[1]))
    continuation(model, torch.zeros(1, 7, dtype=torch.long), 5)
    hook.remove()
    assert lengths == [7, 1, 1, 1, 1]


def test_generating_leaves_the_mode_and_gradients_alone():
    model = make_model(dropout=0.5).train()
    prompt = torch.zeros(2, 3, dtype=torch.long)
    stream = generate(model, prompt, 6)
    first = next(stream)
    assert model.training
    assert all(m.training for m in model.modules())
    rest = list(stream)
    assert torch.equal(torch.stack([first, *rest]), torch.stack(list(generate(model, prompt, 6))))
    assert not any(t.requires_grad or t.is_inference() for t in [first, *rest])


def frequencies(logits, **options):
    options = {"temperature": 1.0, "top_k": None, "top_p": None} | options
    drawn = sample(logits.expand(DRAWS, -1), **options, generator=torch.Generator().manual_seed(0))
    return drawn.bincount(minlength=logits.shape[-1]) / DRAWS


LOGITS = torch.tensor([0.2, 2.0, -1.0, 1.0, 0.5, -3.0]).log_softmax(0)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 2.0}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 3}, [1, 3, 4]),
        ({"top_k": 100}, [0, 1, 2, 3, 4, 5]),
        ({"top_p": 0.7}, [1, 3]),  # probabilities 0.54, 0.20, 0.12, ...: 0.74 is enough
        ({"top_p": 0.5}, [1]),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 2, "top_p": 0.74}, [1, 3]),  # of the two kept, the first has 0.731
        ({"top_k": 2, "top_p": 0.72}, [1]),
        ({"temperature": 0.5, "top_k": 4}, [0, 1, 3, 4]),
    ],
)
def test_draws_follow_the_kept_probabilities(options, kept):
    expected = torch.zeros(6)
    expected[kept] = (LOGITS / options.get("temperature", 1.0))[kept].softmax(0)
    assert (frequencies(LOGITS, **options) - expected).abs().max() < 4 * (0.25 / DRAWS) ** 0.5
    assert set(frequencies(LOGITS, **options).nonzero().flatten().tolist()) <= set(kept)


def test_temperature_near_zero_is_greedy():
    for temperature in (0.0, 1e-3, 1e-30):
        assert frequencies(100 * LOGITS, temperature=temperature)[1] == 1


def test_ties_do_not_widen_top_k():
    assert len(frequencies(torch.zeros(6), top_k=2).nonzero()) == 2


def test_a_seed_repeats_the_draws(model):
    prompt = torch.zeros(2, 3, dtype=torch.long)

    def once(seed):
        torch.manual_seed(torch.seed())
        return continuation(model, prompt, 12, temperature=1.0, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(once(1), once(1))
    assert not torch.equal(once(1), once(2))


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([], {}, "prompt is empty"),
        ([VOCAB], {}, f"token id {VOCAB} of the prompt is outside the vocabulary of {VOCAB}"),
        ([-1], {}, "token id -1"),
        ([1], {"n_new": -1}, "tokens=-1"),
        ([1], {"temperature": -0.1}, "temperature=-0.1"),
        ([1], {"temperature": float("nan")}, "temperature=nan"),
        ([1], {"top_k": 0}, "top_k=0"),
        ([1], {"top_p": 0.0}, "top_p=0.0"),
        ([1], {"top_p": 1.1}, "top_p=1.1"),
    ],
)
def test_what_cannot_be_asked_is_a_sentence_before_anything_runs(model, prompt, options, words):
    with pytest.raises(UsageError, match=words):
        generate(model, torch.tensor([prompt], dtype=torch.long), **{"n_new": 3} | options)


def test_a_learned_position_table_bounds_the_context():
    model = make_model(positions="learned", max_positions=10)
    prompt = torch.zeros(1, 4, dtype=torch.long)
    assert continuation(model, prompt, 7).shape == (1, 7)
    with pytest.raises(UsageError, match=r"at most 7.*max_positions"):
        generate(model, prompt, 8)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A folder as a run leaves it, of a model that has learned nothing yet."""
    path = tmp_path_factory.mktemp("run")
    (path / "text").write_text("héllo wörld €. " * 60, encoding="utf-8")
    sizes = ["attn=gqa", "attn.n_heads=4", "model.d_model=16", "model.n_layers=1"]
    cfg = load([*sizes, "data=text", f"data.path={path}/text", "data.context=8", "data.tokens=characters"])
    OmegaConf.save(cfg, path / "config.yaml")
    data = build_dataset(cfg.data)
    model = build_model(cfg, data.vocab_size)
    options = {"seed": 0, "device": CPU, "dtype": torch.float32, "log": Rows(), "config_hash": ""}
    train(model, data, make_settings(steps=20, lr=3e-3), run_dir=path, data_seed=0, **options)
    return path


def test_the_command_streams_prompt_and_continuation(run_dir, capsys):
    assert main([str(run_dir), "--prompt", "wör", "--tokens", "12", "--device", "cpu"]) == 0
    model, _, codec = load_run(run_dir)
    expected = codec.decode(continuation(model, torch.tensor([codec.encode("wör")]), 12)[0].tolist())
    assert capsys.readouterr().out == "wör" + expected + "\n"


def test_sampling_options_reach_the_command(run_dir, capsys):
    def once(*options):
        assert main([str(run_dir), "--prompt", "h", "--tokens", "30", "--device", "cpu", *options]) == 0
        return capsys.readouterr().out

    assert once("--temperature", "1") == once("--temperature", "1", "--seed", "0")
    assert once("--temperature", "1") != once("--temperature", "1", "--seed", "1")
    greedy = once()
    assert greedy == once("--temperature", "1", "--top-k", "1") == once("--temperature", "1", "--top-p", "1e-6")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{run}/absent", "--prompt", "h"], "no run at"),
        (["{run}", "--prompt", "hX"], "'X'"),
        (["{run}", "--prompt", ""], "prompt is empty"),
        (["{run}", "--prompt", "h", "--top-k", "0"], "top_k=0"),
        (["{run}", "--prompt", "h", "--device", "gpu"], "device=gpu"),
    ],
)
def test_bad_requests_end_with_status_2_and_one_sentence(run_dir, capsys, arguments, words):
    assert main([a.format(run=run_dir) for a in arguments]) == 2
    out = capsys.readouterr()
    assert words in out.err
    assert out.err.count("\n") == 1
    assert out.out == ""


def test_a_task_continues_no_prompt(tmp_path, run_dir, capsys):
    for name in ("config.yaml", checkpoint.FILE_NAME):
        (tmp_path / name).write_bytes((run_dir / name).read_bytes())
    assert main([str(tmp_path), "--prompt", "h"]) == 2
    assert "not on text" in capsys.readouterr().err


@pytest.mark.slow
def test_a_reader_that_stops_is_no_error(run_dir):
    command = [sys.executable, "-m", "archlab.generate", str(run_dir), "--prompt", "h", "--tokens", "5000"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as process:
        assert process.stdout.read(1) == b"h"
        process.stdout.close()
        errors = process.stderr.read()
    assert (process.returncode, errors) == (0, b"")
