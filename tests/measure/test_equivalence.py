"""The gate lets a sound variant pass and stops each planted fault, whatever its kind."""

import contextlib
import math
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from archlab.attn.gqa import GroupedQueryAttention
from archlab.ffn.swiglu import SwiGLU
from archlab.measure import equivalence
from archlab.measure.equivalence import feed, full, gate, poisoned_cache
from archlab.mixer import FFN, Mixer, State
from archlab.model import LM, eval_mode

LENGTH = 41


class PositionIgnored(GroupedQueryAttention):
    """Rotates every new token as if it stood at the position of the first."""

    def project(self, x, pos, history=None):
        return super().project(x, 0)


class FutureSeen(GroupedQueryAttention):
    """In one pass, a token also gets a little of the mean over all tokens, those to come among them."""

    def forward(self, x, *, pos=0, state=None):
        y, aux = super().forward(x, pos=pos, state=state)
        return (y + 0.01 * x.mean(1, keepdim=True) if state is None else y), aux


class NotANumber(GroupedQueryAttention):
    """One NaN in the last step of decoding."""

    def forward(self, x, *, pos=0, state=None):
        y, aux = super().forward(x, pos=pos, state=state)
        return (y.masked_fill(torch.tensor(pos == LENGTH - 1), math.nan) if state is not None else y), aux


class UnwrittenRead(GroupedQueryAttention):
    """Multiplies slots that no token has written by 0, which is right only while they hold numbers."""

    def forward(self, x, *, pos=0, state=None):
        y, aux = super().forward(x, pos=pos, state=state)
        return (y + 0 * state.kv.sum() if state is not None else y), aux


class RoomSeen(GroupedQueryAttention):
    """Right only in a cache that fits."""

    def forward(self, x, *, pos=0, state=None):
        y, aux = super().forward(x, pos=pos, state=state)
        return (y + 1 if state is not None and state.kv.shape[2] > LENGTH else y), aux


class StateOnSelf(GroupedQueryAttention):
    """Attends to what an earlier sequence left on the module."""

    seen = 0.0

    def forward(self, x, *, pos=0, state=None):
        y, aux = super().forward(x, pos=pos, state=state)
        y = y + self.seen
        if state is not None:
            self.seen = 0.1 * x.mean()
        return y, aux


class BatchMixed(FFN):
    """Normalises by how much is in the call, as experts with a capacity do."""

    def __init__(self, d_model):
        super().__init__()
        self.out = torch.nn.Linear(d_model, d_model)

    def forward(self, x):
        return self.out(x) / x.shape[1], {}


@dataclass
class Sums(State):
    total: Tensor


class Accumulator(Mixer):
    """The running sum of the inputs, whose zero must survive the poison."""

    def __init__(self, d_model):
        super().__init__()
        self.out = torch.nn.Linear(d_model, d_model, bias=False)

    def init_state(self, batch, max_len, *, device, dtype):
        return Sums(torch.zeros(batch, self.out.in_features, device=device, dtype=dtype))

    def forward(self, x, *, pos=0, state=None):
        y = x.cumsum(1)
        if state is not None:
            y = y + state.total[:, None]
            state.total.copy_(y[:, -1])
        return self.out(y / 10), {}


class Ties(FFN):
    """Chooses another expert in float32 decoding than in one pass, wherever a channel exceeds `flips`."""

    def __init__(self, d_model, flips):
        super().__init__()
        self.out = torch.nn.Linear(d_model, d_model, bias=False)
        self.flips = flips

    def forward(self, x):
        y = self.out(x)
        if x.dtype == torch.float32 and x.shape[1] == 1:
            y = torch.where(x[..., :1] > self.flips, -y, y)
        return y, {}


def build(attn=GroupedQueryAttention, ffn=SwiGLU, **model):
    torch.manual_seed(0)
    takes_heads = isinstance(attn, type) and issubclass(attn, GroupedQueryAttention)
    kwargs = {"n_heads": 4, "n_kv_heads": 2} if takes_heads else {}
    parts = {"attn": partial(attn, **kwargs), "ffn": ffn}
    return LM(vocab_size=50, d_model=32, n_layers=2, init_std=0.3, **parts, **model)


def judge(model, dtype=torch.float32, length=LENGTH):
    return gate(model, length=length, batch=2, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attn", [GroupedQueryAttention, Accumulator])
def test_sound_variants_pass(attn, dtype):
    model = build(attn).to(torch.float64 if dtype == torch.float64 else torch.float32)
    record = judge(model, dtype)
    assert record["equivalence/passed"] is True
    assert 0 <= record["equivalence/max_abs_error"] <= record["equivalence/tolerance"]
    assert record["equivalence/dtype"] == str(dtype).removeprefix("torch.")
    assert record["equivalence/length_tokens"] == LENGTH


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", [PositionIgnored, FutureSeen, NotANumber, UnwrittenRead, RoomSeen, StateOnSelf])
def test_planted_faults_fail(fault, dtype):
    model = build(fault).to(torch.float64 if dtype == torch.float64 else torch.float32)
    record = judge(model, dtype)
    assert record["equivalence/passed"] is False
    assert not record["equivalence/max_abs_error"] <= record["equivalence/tolerance"]


def test_an_ffn_that_sees_the_call_fails():
    assert not judge(build(ffn=BatchMixed))["equivalence/passed"]


def test_a_window_that_only_training_has_fails():
    """Decoding sees more than one pass did (the single-token path forgot the window)."""
    model = build()
    for block in model.blocks:
        block.mixer.window = 8
        block.mixer.init_state = partial(_without_window, block.mixer)
    assert not judge(model)["equivalence/passed"]


def _without_window(mixer, *args, **kwargs):
    mixer.window = None
    return GroupedQueryAttention.init_state(mixer, *args, **kwargs)


@pytest.mark.parametrize(("flips", "passes"), [(2.5, True), (1.5, False), (-9.0, False)])
def test_a_tie_is_told_from_a_fault_by_exact_arithmetic(flips, passes):
    """What float32 chooses otherwise in one sequence of four is a tie; in most of them it is a fault."""
    record = gate(build(ffn=partial(Ties, flips=flips)), length=LENGTH, batch=4, dtype=torch.float32)
    assert record["equivalence/passed"] is passes
    assert record["equivalence/dtype"] == ("float64" if passes else "float32")


class OneSequence(GroupedQueryAttention):
    """Puts a number into the first sequence of a batch where it is decoded, in the arithmetic named."""

    def __init__(self, d_model, *, number, dtypes):
        super().__init__(d_model, n_heads=2)
        self.number, self.dtypes = number, dtypes

    def forward(self, x, *, pos=0, state=None):
        y, aux = super().forward(x, pos=pos, state=state)
        if state is not None and x.dtype in self.dtypes:
            y = torch.cat([torch.full_like(y[:1], self.number), y[1:]])
        return y, aux


@pytest.mark.parametrize(
    ("number", "dtypes", "passes"),
    [
        (1.0, [torch.float32], True),
        (math.nan, [torch.float32], False),
        (math.inf, [torch.float32], False),
        (1.0, [torch.float32, torch.float64], False),
    ],
)
def test_what_strikes_one_sequence_alone(number, dtypes, passes):
    """It may be a tie, unless it is no number or happens in exact arithmetic too; the record is then float32's."""
    model = build(partial(OneSequence, number=number, dtypes=dtypes))
    record = gate(model, length=LENGTH, batch=4, dtype=torch.float32)
    assert record["equivalence/passed"] is passes
    assert record["equivalence/dtype"] == ("float64" if passes else "float32")


def test_bfloat16_decodes_from_a_bfloat16_cache(monkeypatch):
    seen = []
    monkeypatch.setattr(equivalence, "feed", lambda *args: seen.append(args[3].states[0].kv.dtype) or feed(*args))
    judge(build(), torch.bfloat16)
    assert seen == [torch.float32, torch.bfloat16]


def test_the_gate_leaves_the_model_as_it_was():
    for training in (True, False):
        model = build(dropout=0.5).train(training)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        assert judge(model)["equivalence/passed"], "dropout must be off in the gate"
        assert model.training is training
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())


def test_the_mode_is_restored_after_an_error():
    model = build().train()
    with contextlib.suppress(KeyError), eval_mode(model):
        assert not model.training
        raise KeyError
    assert model.training


def test_a_learned_position_table_bounds_the_length():
    record = judge(build(positions="learned", max_positions=20))
    assert record["equivalence/passed"]
    assert record["equivalence/length_tokens"] == 20


@pytest.mark.parametrize("length", [1, 2, 3, 200])
def test_every_length_can_be_judged(length):
    assert judge(build(), length=length)["equivalence/passed"]


def test_other_seeds_are_other_sequences():
    errors = {
        gate(build(), length=LENGTH, batch=1, dtype=torch.float32, seed=s)["equivalence/max_abs_error"] for s in (0, 1)
    }
    assert len(errors) == 2


def test_poison_fills_slots_and_spares_accumulators():
    slots = poisoned_cache(build(), 2, 7, dtype=torch.bfloat16).states[0].kv
    assert slots.isnan().all()
    assert slots.dtype == torch.bfloat16
    assert (poisoned_cache(build(Accumulator), 2, 7).states[0].total == 0).all()
    assert (poisoned_cache(build(), 2, 7, poison=50.0).states[0].kv == 50).all()


def test_poison_spares_whole_numbers():
    class Counting(Accumulator):
        def init_state(self, batch, max_len, *, device, dtype):
            return Sums(torch.zeros(batch, max_len, device=device, dtype=torch.long))

    assert (poisoned_cache(build(Counting), 2, 7).states[0].total == 0).all()


def test_full_and_feed_agree():
    model = build().eval()
    tokens = torch.randint(50, (3, 9))
    fed = feed(model, tokens, [4, 1, 3, 1], model.init_cache(3, 9))
    torch.testing.assert_close(fed, full(model, tokens))


# What one cache at a time does not show


class MemoryOnModule(Accumulator):
    """Right for one sequence after the other: it starts anew where a sequence does."""

    memory = None

    def forward(self, x, *, pos=0, state=None):
        if state is None:
            return super().forward(x)
        y = x.cumsum(1) + (0 if pos == 0 else self.memory[:, None])
        self.memory = y[:, -1].clone()
        return self.out(y / 10), {}


class MemoryHiddenInState(Accumulator):
    """What it needs grows in an attribute that is no field: nothing of it is weighed, or cloned."""

    def forward(self, x, *, pos=0, state=None):
        if state is None:
            return super().forward(x)
        state.seen = [*getattr(state, "seen", []), x]
        y = torch.cat(state.seen, dim=1).cumsum(1)[:, -x.shape[1] :]
        return self.out(y / 10), {}


class RowsMixed(Accumulator):
    """A sequence is moved by the mean of the batch."""

    def forward(self, x, *, pos=0, state=None):
        y, aux = super().forward(x, pos=pos, state=state)
        return y + x.mean(0, keepdim=True), aux


class MemoryInAList(MemoryOnModule):
    """Hidden from who looks at tensors alone."""

    def __init__(self, d_model):
        super().__init__(d_model)
        self._kept = {}

    def forward(self, x, *, pos=0, state=None):
        y, aux = Accumulator.forward(self, x, pos=pos, state=state)
        self._kept["last"] = [x.detach().clone()]
        return y, aux


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        (MemoryOnModule, {"caches_interleaved", "clone_goes_on", "module_unchanged"}),
        (MemoryHiddenInState, {"clone_goes_on", "state_declared"}),
        (RowsMixed, {"rows_alone"}),
        (MemoryInAList, {"module_unchanged"}),
        (Accumulator, set()),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_names_how_sequences_are_mixed_up(fault, names, dtype):
    record = judge(build(fault), dtype)
    assert set(filter(None, record["equivalence/failed_checks"].split(", "))) == names
    assert record["equivalence/passed"] is not bool(names)


def test_a_red_gate_is_a_sentence():
    text = equivalence.explain(judge(build(MemoryHiddenInState)))
    assert "a cloned cache does not go on" in text
    assert "none of its fields" in text
