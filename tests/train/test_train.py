"""The trainer against slow obvious references: gradients, AdamW, schedules; and what ends a run early."""

import itertools
import math
import os
import random
import signal

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy
from training import CPU, VOCAB, AuxFFN, Uneven, make_model, make_settings, make_trainer, run

from archlab.config.compose import load
from archlab.config.device import resolve_device, resolve_dtype
from archlab.data import IGNORE, build_dataset
from archlab.errors import UsageError
from archlab.model import build_model
from archlab.plugins import names
from archlab.testing import Variant
from archlab.train import checkpoint
from archlab.train.loop import Interrupted
from archlab.train.optimizer import build_optimizer, param_groups
from archlab.train.schedule import learning_rate
from archlab.train.trainer import Diverged


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@given(steps=st.integers(2, 60), warmup=st.integers(0, 80), ratio=st.floats(0, 1), decay=st.floats(0, 1))
@settings(max_examples=80, deadline=None)
def test_schedules_rise_to_the_peak_and_never_again(schedule, steps, warmup, ratio, decay):
    s = make_settings(
        steps=steps, warmup_steps=warmup, schedule=schedule, min_lr_ratio=ratio, decay_fraction=decay, lr=0.5
    )
    rates = [learning_rate(step, s) for step in range(steps)]
    peak = max(min(warmup, steps // 2) - 1, 0)
    assert rates[0] > 0
    assert rates[peak] == pytest.approx(0.5)
    assert rates[-1] == pytest.approx(0.5 if schedule == "constant" else 0.5 * ratio)
    assert all(a < b for a, b in itertools.pairwise(rates[: peak + 1]))
    assert all(a >= b - 1e-12 for a, b in itertools.pairwise(rates[peak:]))


def test_schedules_by_hand():
    rates = {}
    for name, more in {"cosine": {"min_lr_ratio": 0.2}, "wsd": {"decay_fraction": 0.34}, "constant": {}}.items():
        s = make_settings(steps=9, warmup_steps=2, lr=1.0, schedule=name, **more)
        rates[name] = [learning_rate(i, s) for i in range(9)]
    cosine = [0.2 + 0.8 * (1 + math.cos(math.pi * i / 7)) / 2 for i in range(8)]
    assert rates["cosine"] == pytest.approx([0.5, *cosine])
    assert rates["wsd"] == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.7, 0.4, 0.1])
    assert rates["constant"] == pytest.approx([0.5] + [1] * 8)


def test_a_run_of_one_step_takes_the_peak():
    assert learning_rate(0, make_settings(steps=1, warmup_steps=20, min_lr_ratio=0.0)) == 1e-2


def test_every_parameter_is_in_one_group():
    model = make_model(tied=True, norm="layer", positions="learned", max_positions=12)
    mixer = model.blocks[0].mixer
    mixer.A_log, mixer.dt_bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(2, 3))
    mixer.conv = nn.Parameter(torch.ones(4, 3))
    decayed, others = param_groups(model, 0.1)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    names_of = {id(p): name for name, p in model.named_parameters()}
    groups = [{names_of[id(p)] for p in group["params"]} for group in (decayed, others)]
    assert len(decayed["params"]) + len(others["params"]) == len(names_of)
    assert groups[0] | groups[1] == set(names_of.values())
    assert {"blocks.0.mixer.qkv.weight", "blocks.0.mixer.conv", "blocks.1.ffn.out.weight"} <= groups[0]
    assert {"embed.weight", "positions.weight", "blocks.0.mixer.A_log", "blocks.0.mixer.dt_bias"} <= groups[1]
    assert {"norm.weight", "norm.bias", "blocks.1.ffn_norm.weight"} <= groups[1]


def test_an_untied_head_decays_and_a_tied_one_does_not():
    for tied in (True, False):
        model = make_model(tied=tied)
        decayed = {id(p) for p in param_groups(model, 0.1)[0]["params"]}
        assert (id(model.head.weight) in decayed) is not tied
        assert id(model.embed.weight) not in decayed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attn", "ffn"), [(attn, "swiglu") for attn in names("attn")] + [("mha", ffn) for ffn in names("ffn")]
)
def test_no_plugin_has_a_decayed_gate(attn, ffn):
    model = Variant(attn=attn, ffn=ffn).build()
    names_of = {id(p): name for name, p in model.named_parameters()}
    decayed = {names_of[id(p)] for p in param_groups(model, 0.1)[0]["params"]}
    assert not any(name.endswith(("A_log", "dt_bias", ".bias", "norm.weight", "embed.weight")) for name in decayed)


def test_updates_are_those_of_adamw_written_out(tmp_path):
    trainer = make_trainer(tmp_path, clip=0.05, weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6, warmup_steps=2)
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in weights.items()}
    trainer.start()
    for t in range(1, 4):
        inputs, targets = trainer.dataset.batch(t - 1, 6, 0)
        logits, _ = trainer.model(inputs)
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
        grads = dict(zip(weights, torch.autograd.grad(loss, list(trainer.model.parameters())), strict=True))
        norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
        lr = learning_rate(t - 1, trainer.settings)
        for name, w in weights.items():
            g, (m, v) = grads[name] * min(1, 0.05 / (norm + 1e-6)), moments[name]
            m.mul_(0.8).add_(0.2 * g)
            v.mul_(0.9).add_(0.1 * g**2)
            decay = 0.3 if w.ndim == 2 and name != "embed.weight" else 0
            w.mul_(1 - lr * decay).sub_(lr * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-6))
        values = trainer.advance()
        assert values["train/loss"] == pytest.approx(loss.item(), rel=1e-12)
        assert values["train/grad_norm"] == pytest.approx(norm, rel=1e-12)
        assert values["train/lr"] == lr
        for name, p in trainer.model.named_parameters():
            torch.testing.assert_close(p.detach(), weights[name], rtol=0, atol=1e-12, msg=name)


def test_the_optimizer_is_fused():
    assert all(group["fused"] for group in build_optimizer(make_model(), make_settings()).param_groups)


@pytest.mark.parametrize("accumulate", [1, 2, 4, 6])
def test_accumulated_gradients_are_those_of_the_batch(tmp_path, accumulate):
    trainer = make_trainer(tmp_path, accumulate=accumulate)
    inputs, targets = trainer.dataset.batch(0, 6, 0)
    assert len({int(n) for n in (targets != IGNORE).sum(1)}) > 2
    targets[2] = IGNORE  # a whole piece without a target, where pieces are single rows
    values = trainer.stepper._backward(inputs, targets)
    found = gradients(trainer.model)
    trainer.model.zero_grad()
    loss = cross_entropy(trainer.model(inputs)[0].flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    loss.backward()
    assert float(values["train/loss"]) == pytest.approx(loss.item(), abs=1e-12)
    for name, expected in gradients(trainer.model).items():
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-10, msg=name)


def test_a_batch_without_targets_changes_nothing_but_costs_no_crash(tmp_path):
    trainer = make_trainer(tmp_path)
    inputs, targets = trainer.dataset.batch(0, 6, 0)
    assert float(trainer.stepper._backward(inputs, torch.full_like(targets, IGNORE))["train/loss"]) == 0.0


@pytest.mark.parametrize("accumulate", [1, 3])
def test_auxiliary_losses_train_and_are_logged_apart(tmp_path, accumulate):
    trainer = make_trainer(tmp_path, make_model(ffn=AuxFFN), accumulate=accumulate)
    inputs, targets = trainer.dataset.batch(0, 6, 0)
    values = trainer.stepper._backward(inputs, targets)
    found = gradients(trainer.model)
    trainer.model.zero_grad()
    logits, aux = trainer.model(inputs)
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE)
    (loss + aux["probe"]).backward()
    assert float(values["train/loss"]) == pytest.approx(loss.item(), abs=1e-12)
    assert float(values["train/aux/probe"]) == pytest.approx(aux["probe"].item(), abs=1e-12)
    for name, expected in gradients(trainer.model).items():
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-10, msg=name)


def test_logged_losses_do_not_depend_on_accumulation(tmp_path):
    one, four = (run(tmp_path / str(n), dtype=torch.float64, accumulate=n)[1] for n in (1, 4))
    assert one.column("train/loss") == pytest.approx(four.column("train/loss"), abs=1e-10)


def test_the_record_and_the_log(tmp_path):
    model, rows, record = run(tmp_path, make_model(ffn=AuxFFN), steps=15, log_every=7, eval_every=5)
    assert [step for step, _ in rows] == [0, 4, 7, 9, 14]
    assert [step for step, values in rows if "quality/val_loss" in values] == [4, 9]
    assert set(rows[0][1]) == {
        "train/loss",
        "train/aux/probe",
        "train/grad_norm",
        "train/lr",
        "train/tokens_per_second",
        "model/probe_norm",
    }
    assert set(record) == {
        "train/steps",
        "train/tokens_per_second",
        "train/step_ms_p50",
        "train/first_step_ms",
        "train/peak_memory_bytes",
        "data/train_tokens",
        "quality/train_loss_final",
    }
    assert record["train/steps"] == 15
    assert record["data/train_tokens"] == 15 * 6 * 10
    assert record["train/peak_memory_bytes"] > 2**20
    assert model.blocks[0].ffn.seen == [0.0, *(pytest.approx(i / 15) for i in range(1, 16))]


def test_the_final_loss_is_the_mean_of_the_last_ten(tmp_path):
    _, rows, record = run(tmp_path, steps=12)
    assert record["quality/train_loss_final"] == pytest.approx(sum(rows.column("train/loss")[2:]) / 10)


def test_speed_figures_leave_out_the_first_steps(tmp_path):
    trainer = make_trainer(tmp_path, steps=6)
    trainer.step_seconds = [9.0, 5.0, 5.0, 0.1, 0.2, 0.6]
    record = trainer.record()
    assert record["train/step_ms_p50"] == pytest.approx(200)
    assert record["train/tokens_per_second"] == pytest.approx(6 * 10 * 3 / 0.9)
    assert record["train/first_step_ms"] == 9000


def test_no_steps_leave_the_model_as_it_was_with_a_checkpoint(tmp_path):
    before = {name: t.clone() for name, t in make_model().state_dict().items()}
    model, rows, record = run(tmp_path, steps=0)
    assert not rows
    assert record["train/steps"] == record["data/train_tokens"] == 0
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert checkpoint.load(tmp_path / checkpoint.FILE_NAME).meta["progress"] == 1.0


def test_two_runs_of_one_seed_give_the_same_bits(tmp_path):
    def once(name, seed):
        random.seed(name)
        np.random.seed(len(name))
        torch.manual_seed(len(name))
        model, rows, _ = run(tmp_path / name, make_model(dropout=0.2), seed=seed)
        return rows.column("train/loss"), model.state_dict()

    one, two, other = once("one", 3), once("second", 3), once("third one", 4)
    assert one[0] == two[0] != other[0]
    assert all(torch.equal(one[1][name], two[1][name]) for name in one[1])


def test_the_seed_decides_the_data(tmp_path):
    losses = [run(tmp_path / str(seed), seed=seed)[1].column("train/loss") for seed in (0, 1)]
    assert losses[0][0] != losses[1][0]


def test_dropout_is_on_while_training_also_after_an_evaluation(tmp_path):
    trainer = make_trainer(tmp_path, make_model(dropout=0.5))
    trainer.start()
    trainer.validate()
    inputs, targets = trainer.dataset.batch(0, 6, 0)
    losses = {float(trainer.stepper._backward(inputs, targets)["train/loss"]) for _ in range(3)}
    assert len(losses) == 3


def test_evaluating_does_not_change_the_training(tmp_path):
    one = run(tmp_path / "1", make_model(dropout=0.3))[1].column("train/loss")
    two = run(tmp_path / "2", make_model(dropout=0.3), eval_every=1, checkpoint_every=1)[1].column("train/loss")
    assert one == two


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_number_formats(tmp_path, dtype):
    seen = []
    model = make_model()
    model.blocks[0].mixer.qkv.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    _, rows, _ = run(tmp_path, model, dtype=dtype)
    assert set(seen) == {dtype}
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    assert {p.dtype for p in model.parameters()} == {wanted}
    assert all(math.isfinite(x) for x in rows.column("train/loss"))


@pytest.mark.slow
def test_the_compiled_forward_trains_the_same(tmp_path, monkeypatch):
    calls, compile_ = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda module: calls.append(module) or compile_(module, backend="eager"))
    one, two = (run(tmp_path / str(c), compile=c, accumulate=2)[1].column("train/loss") for c in (False, True))
    assert one == pytest.approx(two, abs=1e-5)
    assert len(calls) == 1


@pytest.mark.slow
def test_a_forward_that_does_not_compile_is_a_sentence(tmp_path, monkeypatch):
    def backend(*args):
        raise RuntimeError("no compiler")

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module: compile_(module, backend=backend))
    with pytest.raises(UsageError, match=r"does not work here \(.*no compiler.*train\.compile=false"):
        run(tmp_path, compile=True)


@pytest.mark.slow
def test_the_phrase_is_learned(tmp_path):
    cfg = load(["data=phrase", "attn=mha", "attn.n_heads=4", "model.d_model=32", "model.n_layers=2"])
    data = build_dataset(cfg.data)
    model = build_model(cfg, data.vocab_size)
    _, rows, _ = run(tmp_path, model, data, steps=301, batch_size=16, lr=3e-3, schedule="constant")
    losses = rows.column("train/loss")
    assert losses[0] == pytest.approx(math.log(data.vocab_size), abs=0.1)
    assert losses[300] < 0.05


def test_divergence_is_named_and_leaves_the_last_good_checkpoint(tmp_path):
    model = make_model()
    with pytest.raises(Diverged, match=r"at step [1-9]\d* of 30.*last good checkpoint.*checkpoint\.safetensors"):
        run(tmp_path, model, steps=30, lr=1e30, clip=None)
    saved = checkpoint.load(tmp_path / checkpoint.FILE_NAME)
    assert saved.meta["step"] == 0
    saved.restore_model(model)
    assert torch.isfinite(model(torch.arange(8)[None])[0]).all()


def test_a_last_update_that_ruins_the_weights_is_a_divergence(tmp_path):
    with pytest.raises(Diverged):
        run(tmp_path, steps=1, lr=3e38, clip=None)
    assert checkpoint.load(tmp_path / checkpoint.FILE_NAME).meta["step"] == 0


def test_weights_never_take_a_gradient_that_is_not_finite(tmp_path):
    model = make_model()
    model.blocks[0].mixer.qkv.weight.register_hook(lambda grad: grad * math.nan)
    with pytest.raises(Diverged, match="at step 0 of 4"):
        run(tmp_path, model)
    assert all(torch.isfinite(p).all() for p in model.parameters())


class Press:
    """Ctrl-C while the given step is shown, so many times."""

    def __init__(self, step, times=1):
        self.step, self.times, self.shown = step, times, []

    def update(self, step, loss, tokens_per_second):
        self.shown.append(step)
        if step == self.step:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_finishes_the_step_and_saves(tmp_path):
    before, press = signal.getsignal(signal.SIGINT), Press(2)
    with pytest.raises(Interrupted, match=r"after step 2 of 4.*train\.resume=true"):
        run(tmp_path, progress=press)
    assert press.shown == [1, 2]
    assert checkpoint.load(tmp_path / checkpoint.FILE_NAME).meta["step"] == 2
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_stops_at_once(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as error:
        run(tmp_path, progress=Press(2, times=2))
    assert not isinstance(error.value, Interrupted)
    assert checkpoint.load(tmp_path / checkpoint.FILE_NAME).meta["step"] == 0
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_in_the_last_step_lets_the_run_finish(tmp_path):
    assert run(tmp_path, progress=Press(4))[2]["train/steps"] == 4


def test_data_with_more_tokens_than_the_model_are_refused(tmp_path):
    data = Uneven()
    data.vocab_size = VOCAB + 1
    with pytest.raises(UsageError, match=f"up to {VOCAB}, outside the model's vocabulary of {VOCAB}"):
        run(tmp_path, data=data)


@pytest.mark.parametrize(
    "overrides",
    [
        {"steps": -1},
        {"batch_size": 0},
        {"accumulate": 7},
        {"schedule": "linear"},
        {"lr": 0.0},
        {"clip": 0.0},
        {"min_lr_ratio": 1.5},
        {"decay_fraction": -0.1},
        {"checkpoint_every": 0},
        {"log_every": 0},
        {"steps": 2.5},
    ],
)
def test_impossible_settings_are_a_sentence(overrides):
    with pytest.raises(UsageError, match=f"train.{next(iter(overrides))}="):
        make_settings(**overrides)


@pytest.mark.parametrize("name", names("train"))
def test_every_yaml_is_valid(name):
    assert instantiate(load([f"train={name}"]).train, _convert_="all").steps > 0


def test_devices_and_number_formats_by_name():
    assert resolve_device("cpu") == CPU
    assert resolve_device("meta").type == "meta"
    assert resolve_dtype("bfloat16", CPU) == torch.bfloat16
    assert resolve_dtype("auto", CPU) == torch.float32
    for name in ("gpu", "cuda:x", "cuda:99"):
        with pytest.raises(UsageError, match=f"device={name}"):
            resolve_device(name)
    with pytest.raises(UsageError, match="dtype=half"):
        resolve_dtype("half", CPU)
    with pytest.raises(UsageError, match="mps"):
        resolve_dtype("float64", torch.device("mps"))
