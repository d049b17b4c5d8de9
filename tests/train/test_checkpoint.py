"""Checkpoints: a run goes on bit by bit from any step, whatever happened to the process or the disk."""

import errno
import json
import multiprocessing
import os
import random
import resource
import time

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from safetensors import SafetensorError
from training import CPU, Rows, Uneven, make_model, make_settings, make_trainer, run

from archlab.data import build_dataset
from archlab.data.codec import ByteCodec
from archlab.errors import ArchlabError, UsageError
from archlab.model import build_model
from archlab.plugins import names
from archlab.run.load import load_run
from archlab.testing import Variant
from archlab.train.checkpoint import CODEC_FILE_NAME, FILE_NAME, HEADER, load, save
from archlab.train.loop import train

STEPS = 4


class Killed(Exception):
    """Stands for the end of the process."""


def kill_in_piece(model, n_forwards):
    """End the run in the training forward pass of that number, counted from 1."""
    count = []

    def hook(module, args):
        if module.training:
            count.append(1)
            if len(count) == n_forwards:
                raise Killed

    model.register_forward_pre_hook(hook)


def scramble():
    """Another process has other random states."""
    random.seed(99)
    np.random.seed(98)
    torch.manual_seed(97)


def trained(path, model, **options):
    """Losses by step, and the bytes of the checkpoint at the end."""
    rows = run(path, model, steps=STEPS, accumulate=2, checkpoint_every=1, warmup_steps=2, **options)[1]
    losses = zip((step for step, _ in rows), rows.column("train/loss"), strict=True)
    return dict(losses), (path / FILE_NAME).read_bytes()


@pytest.mark.parametrize("piece", range(1, 2 * STEPS + 1))
def test_a_run_killed_in_any_piece_goes_on_bit_by_bit(tmp_path, piece):
    losses, expected = trained(tmp_path / "whole", make_model(dropout=0.1))
    model = make_model(dropout=0.1)
    kill_in_piece(model, piece)
    with pytest.raises(Killed):
        trained(tmp_path / "killed", model)
    scramble()
    resumed, found = trained(tmp_path / "killed", make_model(dropout=0.1, seed=5), resume=True)
    first = (piece - 1) // 2
    assert resumed == {step: loss for step, loss in losses.items() if step >= first}
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attn", "ffn"), [(attn, "swiglu") for attn in names("attn")] + [("gqa", ffn) for ffn in names("ffn")]
)
def test_every_plugin_goes_on_bit_by_bit(tmp_path, attn, ffn):
    def model(seed):
        torch.manual_seed(seed)
        cfg = Variant(attn=attn, ffn=ffn, overrides=("model.dropout=0.1",)).config()
        return build_model(cfg, Uneven.vocab_size)

    _, expected = trained(tmp_path / "whole", model(0), data=Uneven(context=19))
    killed = model(0)
    kill_in_piece(killed, 6)
    with pytest.raises(Killed):
        trained(tmp_path / "killed", killed, data=Uneven(context=19))
    scramble()
    assert trained(tmp_path / "killed", model(5), data=Uneven(context=19), resume=True)[1] == expected


def test_a_finished_run_has_nothing_to_go_on_with(tmp_path):
    _, expected = trained(tmp_path, make_model())
    _, rows, record = run(tmp_path, make_model(seed=1), steps=STEPS, accumulate=2, warmup_steps=2, resume=True)
    assert not rows
    assert record["train/steps"] == STEPS
    assert record["quality/train_loss_final"] > 0
    assert (tmp_path / FILE_NAME).read_bytes() == expected


def test_resuming_an_empty_folder_begins_anew(tmp_path):
    assert run(tmp_path, resume=True)[1].column("train/loss") == run(tmp_path / "b")[1].column("train/loss")


def test_the_keys_of_a_checkpoint(tmp_path):
    model = make_model(tied=True)
    run(tmp_path, model)
    saved = load(tmp_path / FILE_NAME)
    parameters = {name for name, _ in model.named_parameters()}
    moments = {f"optimizer/{name}/{m}" for name in parameters for m in ("exp_avg", "exp_avg_sq", "step")}
    assert "head.weight" not in parameters  # the embedding's
    assert set(saved.tensors) == {f"model/{name}" for name in parameters} | moments | {"rng/cpu"}
    assert set(saved.meta) == {
        "config",
        "config_hash",
        "final_losses",
        "fingerprint",
        "n_tokens",
        "progress",
        "rng",
        "seed",
        "step",
        "vocab_size",
    }
    assert set(saved.meta["rng"]) == {"python", "numpy"}
    assert (saved.meta["step"], saved.meta["progress"], saved.meta["n_tokens"]) == (4, 1.0, 4 * 6 * 10)


def test_buffers_are_in_it_unless_they_are_not_persistent(tmp_path):
    model = make_model()
    model.register_buffer("kept", torch.tensor([3.0]))
    model.register_buffer("dropped", torch.tensor([4.0]), persistent=False)
    run(tmp_path, model)
    saved = load(tmp_path / FILE_NAME)
    assert saved.tensors["model/kept"] == 3
    assert "model/dropped" not in saved.tensors


def test_saving_what_was_loaded_gives_the_same_bytes(tmp_path):
    trainer = make_trainer(tmp_path, dtype=torch.float32)
    trainer.start()
    trainer.advance()
    trainer.save()
    before = trainer.path.read_bytes()
    scramble()
    other = make_trainer(tmp_path, make_model(seed=4), dtype=torch.float32, resume=True)
    other.start()
    saved = load(other.path)
    save(tmp_path / "again", other.model, other.stepper.optimizer, {k: v for k, v in saved.meta.items() if k != "rng"})
    assert (tmp_path / "again").read_bytes() == before


def test_every_generator_comes_back(tmp_path):
    trainer = make_trainer(tmp_path)
    trainer.start()
    np.random.standard_normal()  # leaves a second normal number waiting

    def draw():
        return random.random(), random.gauss(0, 1), np.random.standard_normal(3).tolist(), torch.rand(3).tolist()

    trainer.save()
    expected = draw()
    scramble()
    load(trainer.path).restore_rng()
    assert draw() == expected


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    config = {"train": {"lr": 0.01, "resume": False}, "attn": {"n_heads": 4}}
    OmegaConf.save(config, tmp_path / "config.yaml")
    trainer = make_trainer(tmp_path)
    trainer.start()
    before = trainer.path.read_bytes()
    OmegaConf.save(config | {"attn": {"n_heads": 8}, "train": {"lr": 0.01, "resume": True}}, tmp_path / "config.yaml")
    other = make_trainer(tmp_path, resume=True)
    other.config_hash = "another"
    with pytest.raises(UsageError, match=r"another configuration \(attn\.n_heads=4, now 8\)"):
        other.start()
    with pytest.raises(UsageError, match="another seed"):
        make_trainer(tmp_path, resume=True, seed=1).start()
    data = Uneven()
    data.fingerprint = "changed"
    with pytest.raises(UsageError, match="other data"):
        make_trainer(tmp_path, data=data, resume=True).start()
    assert trainer.path.read_bytes() == before


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"tied": False}, "lacks the tensor 'head.weight'"),
        ({"norm": "layer"}, "lacks the tensor 'blocks.0.ffn_norm.bias'"),
        ({"positions": "learned", "max_positions": 4}, "lacks the tensor 'positions.weight'"),
    ],
)
def test_weights_of_another_shape_are_refused(tmp_path, other, words):
    run(tmp_path)
    with pytest.raises(UsageError, match=words):
        load(tmp_path / FILE_NAME).restore_model(make_model(**other))


def test_damaged_or_foreign_files_are_refused(tmp_path):
    path = tmp_path / FILE_NAME
    with pytest.raises(UsageError, match="no checkpoint at"):
        load(path)
    run(tmp_path)
    whole = path.read_bytes()
    for part in (b"", whole[:7], whole[: len(whole) // 2], whole[:-1]):
        path.write_bytes(part)
        with pytest.raises(UsageError, match="damaged"):
            load(path)
    torch.save({"a": 1}, path)  # a pickle, which could run code, is never opened as one
    with pytest.raises(UsageError, match="damaged"):
        load(path)


@pytest.fixture
def small_disk():
    """Files of this process may not grow beyond 4096 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_write_that_fails_leaves_the_checkpoint_before(tmp_path, request):
    trainer = make_trainer(tmp_path)
    trainer.start()
    before = trainer.path.read_bytes()
    trainer.advance()
    request.getfixturevalue("small_disk")
    with pytest.raises(ArchlabError, match="cannot be written"):
        trainer.save()
    assert trainer.path.read_bytes() == before
    assert os.listdir(tmp_path) == [FILE_NAME]


@pytest.mark.parametrize("stage", ["save_file", "_flush", "os.replace"])
@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), ArchlabError),
        (SafetensorError("I/O error: No space left on device (os error 28)"), ArchlabError),
        (KeyboardInterrupt("no space left for another reason"), KeyboardInterrupt),
    ],
)
def test_an_error_at_any_stage_leaves_the_checkpoint_before(tmp_path, monkeypatch, stage, error, expected):
    trainer = make_trainer(tmp_path)
    trainer.start()
    before = trainer.path.read_bytes()

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(f"archlab.train.checkpoint.{stage}", fail)
    with pytest.raises(expected, match="no space left"):
        trainer.save()
    assert trainer.path.read_bytes() == before
    assert os.listdir(tmp_path) == [FILE_NAME]


def test_a_checkpoint_is_as_readable_as_other_files(tmp_path):
    make_trainer(tmp_path).start()
    (tmp_path / "other").touch()
    assert (tmp_path / FILE_NAME).stat().st_mode == (tmp_path / "other").stat().st_mode


def test_a_file_is_flushed_before_it_takes_the_name(tmp_path, monkeypatch):
    order = []
    for name, call in {"fsync": os.fsync, "replace": os.replace}.items():
        monkeypatch.setattr(os, name, lambda *args, name=name, call=call: order.append(name) or call(*args))
    make_trainer(tmp_path).start()
    assert order == ["fsync", "replace", "fsync"]


def save_for_ever(path, steps):
    model = torch.nn.Linear(1000, 1000)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(10**6):
        torch.nn.init.constant_(model.weight, step)
        save(path, model, optimizer, {"step": step})
        steps.value = step


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    path, rng, fork = tmp_path / FILE_NAME, random.Random(0), multiprocessing.get_context("fork")
    for _ in range(12):
        steps = fork.Value("l", -1)
        process = fork.Process(target=save_for_ever, args=(path, steps))
        process.start()
        while steps.value < 0:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        process.join()
        saved = load(path)
        assert saved.meta["step"] in (steps.value, steps.value + 1)
        assert (saved.tensors["model/weight"] == saved.meta["step"]).all()
    model = torch.nn.Linear(2, 2)
    save(path, model, torch.optim.AdamW(model.parameters()), {})
    assert os.listdir(tmp_path) == [FILE_NAME]  # what the kills left is gone


@pytest.fixture
def run_dir(tmp_path):
    """A folder as a run leaves it, and its model."""
    cfg = Variant(attn="gqa", ffn="swiglu", overrides=("data.context=16", "model.tied=true")).config()
    OmegaConf.save(cfg, tmp_path / "config.yaml")
    data = build_dataset(cfg.data)
    torch.manual_seed(0)
    model = build_model(cfg, data.vocab_size)
    options = {"seed": 0, "device": CPU, "dtype": torch.float64, "log": Rows(), "config_hash": ""}
    train(model, data, make_settings(steps=2), run_dir=tmp_path, data_seed=0, **options)
    return tmp_path, model


def test_a_run_is_loaded_from_its_folder_alone(run_dir):
    path, model = run_dir
    loaded, cfg, codec = load_run(str(path))
    assert not any(m.training for m in loaded.modules())
    x = torch.arange(12)[None]
    assert torch.equal(loaded(x)[0], model.eval()(x)[0])
    assert loaded.head.weight is loaded.embed.weight
    assert cfg.data.context == 16
    assert isinstance(codec, ByteCodec)
    (path / CODEC_FILE_NAME).unlink()
    assert load_run(path)[2] is None


def test_loading_tells_the_plugins_how_far_training_was(run_dir, monkeypatch):
    path, _ = run_dir
    seen = []
    monkeypatch.setattr("archlab.model.LM.after_step", lambda self, progress: seen.append(progress))
    load_run(path)
    assert seen == [1.0]


def test_a_folder_without_a_run_is_a_sentence(run_dir):
    path, _ = run_dir
    with pytest.raises(UsageError, match=r"no run at .*absent"):
        load_run(path / "absent")
    (path / FILE_NAME).unlink()
    with pytest.raises(UsageError, match="no checkpoint at"):
        load_run(path)


def test_the_header_is_one_json_object(tmp_path):
    run(tmp_path)
    raw = (tmp_path / FILE_NAME).read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert set(header["__metadata__"]) == {HEADER}
    assert json.loads(header["__metadata__"][HEADER])["step"] == 4
