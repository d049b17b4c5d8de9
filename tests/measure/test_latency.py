"""Timing against a clock that the test winds itself: no test here depends on how fast the machine is."""

import gc
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf, open_dict

from archlab.attn.gqa import GroupedQueryAttention
from archlab.attn.mla import MultiHeadLatentAttention
from archlab.cli.bench import main as bench_main
from archlab.config.compose import load
from archlab.errors import ArchlabError, UsageError
from archlab.ffn.swiglu import SwiGLU
from archlab.measure import equivalence, mechanisms, timing
from archlab.measure import latency as bench
from archlab.measure import limits as machine
from archlab.measure.latency import BenchSettings, latency
from archlab.measure.ratio import Case, Pair, Suite
from archlab.measure.timing import Effort, interleaved, measure, timed
from archlab.model import LM
from archlab.plugins import build_layer, factory, names
from archlab.testing import LENGTH, Variant

CPU = torch.device("cpu")
PASSED = {"equivalence/passed": True}
FAILED = {
    "equivalence/passed": False,
    "equivalence/max_abs_error": 0.5,
    "equivalence/tolerance": 1e-4,
    "equivalence/failed_checks": "cached_equals_full",
}


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def takes(self, *seconds):
        """A call that takes these seconds in turn, the last ones for ever."""
        remaining = list(seconds)

        def call():
            self.now += remaining.pop(0) if len(remaining) > 1 else remaining[0]

        return call


@pytest.fixture
def clock(monkeypatch):
    fake = Clock()
    monkeypatch.setattr(timing, "clock", fake)
    return fake


def test_a_device_is_waited_for_before_and_after(monkeypatch):
    events = []
    monkeypatch.setattr(timing, "clock", lambda: events.append("clock") or 0.0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append(str(device)))
    timed(lambda: events.append("work"), torch.device("cuda:1"), times=2)
    assert events == ["cuda:1", "clock", "work", "work", "cuda:1", "clock"]
    monkeypatch.setattr(torch.mps, "synchronize", lambda: events.append("mps"))
    events.clear()
    timed(lambda: events.append("work"), torch.device("mps"))
    assert events == ["mps", "clock", "work", "mps", "clock"]


def test_a_repeated_call_is_timed_by_the_mean(clock):
    assert timed(clock.takes(1.0, 3.0), CPU, times=2) == 2.0


def test_a_slow_first_call_is_warm_up(clock):
    samples = measure(clock.takes(1.0, 0.01), CPU, Effort(warmup_calls=1, warmup_s=0.0, calls=5, seconds=0.0))
    assert samples == pytest.approx([0.01] * 5)


def test_warm_up_lasts_until_both_its_time_and_its_count(clock):
    cold = [0.1] * 10
    effort = Effort(warmup_calls=2, warmup_s=0.95, calls=3, seconds=0.0)
    assert measure(clock.takes(*cold, 0.01), CPU, effort) == pytest.approx([0.01] * 3)
    effort = Effort(warmup_calls=10, warmup_s=0.0, calls=3, seconds=0.0)
    assert measure(clock.takes(*cold, 0.01), CPU, effort) == pytest.approx([0.01] * 3)


def test_measuring_lasts_until_both_its_time_and_its_count(clock):
    assert len(measure(clock.takes(0.1), CPU, Effort(calls=3, seconds=0.95))) == 10
    assert len(measure(clock.takes(0.1), CPU, Effort(calls=12, seconds=0.95))) == 12


def test_preparation_runs_before_every_call_and_is_not_timed(clock):
    events = []

    def prepare():
        events.append("prepare")
        clock.now += 100

    def call():
        events.append("call")
        clock.now += 1

    samples = measure(call, CPU, Effort(warmup_calls=2, warmup_s=0.0, calls=3, seconds=0.0), prepare=prepare)
    assert samples == [1, 1, 1]
    assert events == ["prepare", "call"] * 5


def test_the_garbage_collector_rests_meanwhile(clock):
    seen = []
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        measure(lambda: seen.append(gc.isenabled()) or clock.takes(1.0)(), CPU, Effort())
        assert gc.isenabled() is enabled
    gc.enable()
    assert not any(seen)


def test_turns_cancel_a_drift(clock):
    """Every call of this machine is slower than the one before: in turns of order, equals come out equal."""
    order, speed = [], iter(range(1, 100))

    def call(name):
        order.append(name)
        clock.now += next(speed)

    calls = {name: partial(call, name) for name in "ab"}
    samples = interleaved(calls, CPU, rounds=4, sample_s=0.0, warmup_s=0.0)
    assert "".join(order) == "aabb" + "abba" * 2
    assert sum(samples["a"]) == sum(samples["b"])


def test_a_fast_call_is_repeated_for_a_sample(clock):
    counts = {"fast": 0, "slow": 0}

    def call(name, seconds):
        counts[name] += 1
        clock.now += seconds

    calls = {"fast": partial(call, "fast", 0.01), "slow": partial(call, "slow", 5.0)}
    samples = interleaved(calls, CPU, rounds=3, sample_s=0.1, warmup_s=0.0)
    assert samples == {"fast": pytest.approx([0.01] * 3), "slow": pytest.approx([5.0] * 3)}
    assert counts == {"fast": 2 + 3 * 10, "slow": 2 + 3}


class Stub(LM):
    """A small model on a fake clock: a prefill takes what it is told, the first decode step 1 s, each other 2 ms."""

    def __init__(self, clock, prefill_s=1.0, **model):
        attn = partial(GroupedQueryAttention, n_heads=2)
        super().__init__(vocab_size=11, d_model=8, n_layers=1, attn=attn, ffn=SwiGLU, **model)
        self.calls = []
        self.clock, self.prefill_s, self.decode = clock, prefill_s, clock.takes(1.0, 0.002)

    def forward(self, tokens, cache=None, *, last=False):
        written = cache.states[0].kv[:, :, : cache.pos].abs().sum(dim=(0, 1, 3)).count_nonzero().item()
        self.calls.append((tokens.shape, cache.pos, written, cache.max_len, last, self.training))
        if tokens.shape[1] > 1:
            self.clock.now += self.prefill_s
        else:
            self.decode()
        return super().forward(tokens, cache, last=last)


QUICK = Effort(warmup_calls=1, warmup_s=0.0, calls=4, seconds=0.0)


def settings(**kwargs):
    return BenchSettings(**({"contexts": [8, 5], "batch": 3, "prefill": QUICK, "decode": QUICK} | kwargs))


@pytest.fixture
def rates(monkeypatch):
    """A machine of 1000 B/s and 10 FLOP/s."""
    monkeypatch.setattr(bench, "read_bandwidth", lambda n_bytes, device: 1000.0)
    monkeypatch.setattr(bench, "gemm_rate", lambda device, dtype: 10.0)


@pytest.mark.usefixtures("rates")
def test_latency_of_a_stub(clock):
    record = latency(Stub(clock), settings(), dtype=torch.float32, gate=PASSED)
    for context in (5, 8):
        assert record[f"latency/prefill_ms_p50/{context}"] == pytest.approx(1000)
        assert record[f"latency/prefill_ms_p90/{context}"] == pytest.approx(1000)
        assert record[f"latency/decode_ms_per_token_p50/{context}"] == pytest.approx(2)
        assert record[f"latency/decode_ms_per_token_p90/{context}"] == pytest.approx(2)
    assert record["latency/batch"] == 3
    assert record["latency/dtype"] == "float32"
    assert record["latency/capacity_tokens"] == 9


@pytest.mark.usefixtures("rates")
def test_quantiles_of_the_measured_calls(clock):
    """Of 1, 2, ... 10 ms, in any order."""
    model = Stub(clock)
    model.decode = clock.takes(*(n / 1000 for n in (900, 3, 1, 10, 2, 5, 4, 9, 6, 8, 7)))
    decode = Effort(warmup_calls=1, warmup_s=0.0, calls=10, seconds=0.0)
    record = latency(model, settings(contexts=[8], decode=decode), dtype=torch.float32, gate=PASSED)
    assert record["latency/decode_ms_per_token_p50/8"] == pytest.approx(5.5)
    assert record["latency/decode_ms_per_token_p90/8"] == pytest.approx(9.1)


@pytest.mark.usefixtures("rates")
def test_prefill_is_not_in_decode(clock):
    records = [latency(Stub(clock, s), settings(), dtype=torch.float32, gate=PASSED) for s in (1.0, 10.0)]
    decode, prefill = "latency/decode_ms_per_token_p50/8", "latency/prefill_ms_p50/8"
    assert records[1][decode] == pytest.approx(records[0][decode])
    assert records[1][prefill] == pytest.approx(10 * records[0][prefill])


@pytest.mark.usefixtures("rates")
def test_decode_stands_at_the_stated_context_on_a_filled_cache(clock):
    model = Stub(clock).train()
    latency(model, settings(), dtype=torch.float32, gate=PASSED)
    expected = []
    for context in (5, 8):
        expected += [((3, context), 0, 0, 9, True, False)] * 5 + [((3, 1), context, context, 9, True, False)] * 5
    assert model.calls == expected
    assert model.training


@pytest.mark.usefixtures("rates")
def test_every_prefill_starts_from_an_empty_cache(clock, monkeypatch):
    filled = []
    model = Stub(clock)
    forward = type(model.blocks[0].mixer).forward

    def record(self, x, *, pos, state):
        filled.append(state.kv.any().item())
        return forward(self, x, pos=pos, state=state)

    monkeypatch.setattr(GroupedQueryAttention, "forward", record)
    latency(model, settings(contexts=[8]), dtype=torch.float32, gate=PASSED)
    assert filled == [False] * 5 + [True] * 5


@pytest.mark.usefixtures("rates")
def test_a_long_context_is_given_in_pieces(clock):
    model = Stub(clock)
    record = latency(model, settings(contexts=[8], prefill_chunk=3), dtype=torch.float32, gate=PASSED)
    assert [(shape[1], pos) for shape, pos, *_ in model.calls[:3]] == [(3, 0), (3, 3), (2, 6)]
    assert record["latency/prefill_ms_p50/8"] == pytest.approx(3000)
    assert record["latency/prefill_chunk_tokens"] == 3


@pytest.mark.usefixtures("rates")
def test_contexts_beyond_a_learned_table_are_left_out(clock):
    record = latency(Stub(clock, positions="learned", max_positions=8), settings(), dtype=torch.float32, gate=PASSED)
    assert "latency/decode_ms_per_token_p50/5" in record
    assert not any(key.endswith("/8") for key in record)


@pytest.mark.usefixtures("rates")
@pytest.mark.parametrize("attn", names("attn"))
def test_every_attention_can_be_proved_and_timed(attn):
    model = Variant(attn, "moe").build(torch.float32)
    proof = equivalence.gate(model, length=LENGTH, batch=2, dtype=torch.float32)
    record = latency(model, settings(contexts=[LENGTH, 3], batch=2), dtype=torch.float32, gate=proof)
    for context in (3, LENGTH):
        for figure in ("prefill_ms_p50", "prefill_ms_p90", "decode_ms_per_token_p50", "decode_ms_per_token_p90"):
            assert record[f"latency/{figure}/{context}"] > 0
        assert 0 < record[f"latency/decode_limit_ms/{context}"] < float("inf")


def test_a_variant_that_failed_the_gate_is_not_timed(clock):
    model = Stub(clock)
    with pytest.raises(ArchlabError, match=r"differs from one full pass .*by 0.5, and 0.0001 is allowed"):
        latency(model, settings(), dtype=torch.float32, gate=FAILED)
    assert model.calls == []


@pytest.mark.usefixtures("rates")
@pytest.mark.parametrize(("flops", "limit_ms"), [(1, 7000), (10**4, 3 * 10**6)])
def test_the_limit_is_the_slower_of_reading_and_computing(clock, monkeypatch, flops, limit_ms):
    """7000 B at 1000 B/s take 7 s; three sequences of 10^4 FLOPs at 10 FLOP/s take 3000 s."""
    asked = []
    monkeypatch.setattr(bench, "decode_flops", lambda model, context: asked.append(context) or flops)
    monkeypatch.setattr(bench, "decode_read_bytes", lambda *args, batch: asked.append((args[1], batch)) or 7000)
    record = latency(Stub(clock), settings(contexts=[8]), dtype=torch.float32, gate=PASSED)
    assert record["latency/decode_limit_ms/8"] == limit_ms
    assert record["latency/read_bandwidth_bytes_per_s/8"] == 1000
    assert record["latency/gemm_flops_per_s"] == 10
    assert set(asked) == {9, (9, 3)}


def test_settings_refuse_what_cannot_be():
    for name in ("batch", "prefill_chunk", "gate_length", "gate_batch"):
        with pytest.raises(UsageError, match=f"bench.{name}=0: give a whole number"):
            settings(**{name: 0})
    for contexts in ([8, 0], ["x"], 8):
        with pytest.raises(UsageError, match=r"bench.contexts=.*: give a list of whole numbers"):
            settings(contexts=contexts)


def test_bandwidth_is_that_of_the_size_asked_for(monkeypatch):
    sizes = []
    seconds = iter([[2.0, 1.0], [4.0, 3.0]] * 3)
    monkeypatch.setattr(machine, "measure", lambda call, device, effort: sizes.append(call().numel()) or next(seconds))
    machine._read_bandwidth.cache_clear()
    assert machine.read_bandwidth(3 << 20, CPU) == 4 << 20
    assert machine.read_bandwidth(4 << 20, CPU) == 4 << 20
    assert machine.read_bandwidth(1, CPU) == machine.LEAST_BYTES
    assert sizes == [1, (4 << 20) // 1024, 1, machine.LEAST_BYTES // 1024], "a sum and a product, measured once a size"
    machine._read_bandwidth.cache_clear()


def test_gemm_rate_is_the_best_until_one_takes_long(monkeypatch):
    seconds = {512: 0.004, 1024: 0.009, 2048: 0.2}
    monkeypatch.setattr(machine, "measure", lambda call, device, effort: [seconds[len(call())]])
    machine.gemm_rate.cache_clear()
    assert machine.gemm_rate(CPU, torch.float32) == pytest.approx(2 * 1024**3 / 0.009)
    machine.gemm_rate.cache_clear()


def test_command_line(capsys, tmp_path):
    out = tmp_path / "latency.json"
    argv = ["+attn=gqa", "bench=smoke", f"out={out}", "bench.contexts=[4,8]", "model.n_layers=1", "model.d_model=32"]
    assert bench_main(argv) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == json.loads(out.read_text())
    assert printed["equivalence/passed"] is True
    for context in (4, 8):
        assert printed[f"latency/decode_ms_per_token_p50/{context}"] > 0
        assert printed[f"latency/decode_limit_ms/{context}"] > 0


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["bench=nothing"], "unknown bench 'nothing'; installed: default, full, mechanisms, smoke"),
        (["bench.batch=0"], "bench.batch=0: give a whole number of at least 1"),
        (["bench.contexts=3"], "bench.contexts=3: give a list of whole numbers of at least 1"),
        (["+bench.bach=2"], "unknown key 'bench.bach'; did you mean 'bench.batch'?"),
        (["+bench=mechanisms", "bench.only=[latnt]"], "bench.only: there is no case 'latnt'; did you mean 'latent'?"),
        (["out=tests"], "out=tests: name a new file in a folder that exists"),
        (["run=nowhere"], "no run at nowhere: give a folder that a run has written, with its config.yaml"),
        (["run=nowhere", "+attn=mla"], "+attn=mla: run=nowhere has its model already; leave one of them out"),
        (["out=nowhere/x.json"], "out=nowhere/x.json: name a new file in a folder that exists"),
    ],
)
def test_command_line_refuses_with_a_sentence(capsys, argv, sentence, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert bench_main(argv) == 2
    assert capsys.readouterr().err == f"error: {sentence}\n"


def test_the_model_of_a_run_is_timed(archlab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert archlab.tiny("attn=mla", "hydra.run.dir=run").status == 0
    assert bench_main(["run=run", "bench=smoke", "bench.contexts=[4]", "out=times.json"]) == 0
    timed = json.loads((tmp_path / "times.json").read_text())
    assert timed["equivalence/passed"] is True
    assert timed["latency/decode_ms_per_token_p50/4"] > 0


def test_command_line_helps(capsys):
    assert bench_main(["--help"]) == 0
    assert "+bench=mechanisms" in capsys.readouterr().out


@pytest.mark.parametrize("name", names("bench"))
def test_every_shipped_setting_can_be_built(name):
    settings = instantiate(load([f"bench={name}"]).bench, _convert_="all")
    assert isinstance(settings, BenchSettings | Suite)
    if isinstance(settings, BenchSettings) and name != "smoke":
        assert len(settings.contexts) >= 3, "a headline at one context length says little"


def tiny(node):
    """Sizes of a suite's configuration, made small by their names."""
    small = {"length": 9, "times": 16, "long": 40, "short": 8, "context": 40, "tokens": 6, "d_model": 64}
    for key, value in node.items():
        if key in small:
            node[key] = small[key]
        elif key == "cases" or (isinstance(key, str) and hasattr(value, "items")):
            tiny(value)
    return node


@pytest.mark.parametrize("case", load(["bench=mechanisms"]).bench.cases)
def test_every_mechanism_is_measured(case, capsys):
    cfg = tiny(load(["bench=mechanisms", "bench.rounds=1", "bench.sample_s=0", "bench.warmup_s=0"]).bench)
    with open_dict(cfg):
        cfg = OmegaConf.merge(cfg, {"only": [case], "cases": {case: {"rounds": 1}}})
    if case == "capacity":
        cfg.cases.capacity.pairs.attn = ["gqa", "swa"]
    ratios = instantiate(cfg, _convert_="all").run(CPU)["ratios"]
    assert ratios
    for ratio in ratios:
        assert ratio["name"].partition("/")[0] == case
        assert 0 < ratio["ratio_p25"] <= ratio["ratio"] <= ratio["ratio_p75"]
        assert ratio["over_ms_p50"] > 0
        assert ratio["under_ms_p50"] > 0
    assert case in capsys.readouterr().out


def test_capacity_is_measured_of_every_attention(monkeypatch):
    monkeypatch.setattr(mechanisms, "_model", lambda attn: attn)
    monkeypatch.setattr(mechanisms, "_decode_step", lambda model, context, capacity: (model, context, capacity))
    pairs = {pair.name: (pair.over, pair.under) for pair in mechanisms.capacity(length=5, times=16)}
    assert pairs == {name: ((name, 5, 96), (name, 5, 6)) for name in names("attn")}


def test_a_ratio_is_the_median_of_the_rounds(clock):
    """Pairs of (over, under) seconds 6/2, 8/2, 20/2; the two warm-up calls of each come first."""
    over, under = clock.takes(1, 1, 6, 8, 20), clock.takes(1, 1, 2)
    case = Case(pairs=lambda: iter([Pair(over, under)]), at_least=4.0)
    suite = Suite(cases={"c": case}, rounds=3, sample_s=0.0, warmup_s=0.0)
    (ratio,) = suite.run(CPU)["ratios"]
    assert ratio == {
        "name": "c",
        "ratio": pytest.approx(4.0),
        "ratio_p25": pytest.approx(3.5),
        "ratio_p75": pytest.approx(7.0),
        "over_ms_p50": pytest.approx(8000),
        "under_ms_p50": pytest.approx(2000),
        "aim": ">= 4",
        "met": True,
    }


def test_an_aim_is_met_from_its_side():
    least, most, none = Case(pairs=iter, at_least=2.0), Case(pairs=iter, at_most=1.1), Case(pairs=iter)
    assert [c.aim() for c in (least, most, none)] == [">= 2", "<= 1.1", ""]
    assert none.met(1.0) is None
    assert [least.met(r) for r in (1.9, 2.0, 9.0)] == [False, True, True]
    assert [most.met(r) for r in (0.5, 1.1, 1.2)] == [True, True, False]


def test_every_expert_computes_what_the_plugin_does():
    layer = build_layer(factory("ffn", load(["ffn=moe"]).ffn), 24, layer_idx=0, n_layers=1).double()
    x = torch.randn(2, 7, 24, dtype=torch.float64, requires_grad=True)
    ours, every = layer(x)[0], mechanisms.every_expert(layer, x)
    torch.testing.assert_close(every, ours)
    grads = [torch.autograd.grad(y.square().sum(), [x, *layer.parameters()]) for y in (ours, every)]
    torch.testing.assert_close(*grads)


def test_the_forms_of_latent_attention(monkeypatch):
    expanded = []
    own = MultiHeadLatentAttention.expanded
    monkeypatch.setattr(MultiHeadLatentAttention, "expanded", lambda *args: expanded.append(args[4]) or own(*args))
    (pair,) = mechanisms.latent_forms(attn="mla", context=5, d_model=64)
    expanded.clear()
    pair.under()
    assert expanded == []
    pair.over()
    assert expanded == [5]


def test_the_optimizers_of_the_suite(monkeypatch):
    fused = []
    monkeypatch.setattr(mechanisms, "_optimizer_step", lambda model, f: fused.append(f) or (lambda: f))
    (pair,) = mechanisms.adamw(attn="mha")
    assert (pair.over(), pair.under()) == (None, True)
    monkeypatch.undo()
    step = mechanisms._optimizer_step(torch.nn.Linear(2, 2), True)
    assert step.__self__.defaults["fused"] is True


def test_a_decode_step_of_the_suite_stays_in_place():
    model = mechanisms._model("gqa")
    at = []
    model.register_forward_pre_hook(lambda module, args: at.append((args[0].shape[1], args[1].pos, args[1].max_len)))
    step = mechanisms._decode_step(model, 5, 40)
    step()
    step()
    assert at == [(5, 0, 40), (1, 5, 40), (1, 5, 40)]
