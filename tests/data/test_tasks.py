"""Every synthetic task: its rows can be answered, from what stands before the question, and in one way alone."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from archlab.config.compose import load
from archlab.data import IGNORE, build_dataset
from archlab.data.base import row_rng
from archlab.data.tasks.copying import Copy, Palindrome
from archlab.data.tasks.induction import Induction
from archlab.data.tasks.memorise import Memorise
from archlab.data.tasks.motifs import FuzzyRecall, NoisyRecall
from archlab.data.tasks.mqar import MultiQueryRecall
from archlab.data.tasks.needle import Needle
from archlab.data.tasks.selective_copy import SelectiveCopy
from archlab.data.tasks.stack import Stack
from archlab.errors import UsageError

SMALL = {"eval_tokens": 200}
TASKS = {
    "mqar": lambda: MultiQueryRecall(vocab_size=64, context=32, n_pairs=8, **SMALL),
    "mqar of one vocabulary": lambda: MultiQueryRecall(vocab_size=18, context=32, n_pairs=8, **SMALL),
    "mqar forgetting": lambda: MultiQueryRecall(vocab_size=40, context=41, n_pairs=8, n_forgotten=3, **SMALL),
    "mqar blank": lambda: MultiQueryRecall(vocab_size=40, context=33, n_pairs=4, random_fillers=False, **SMALL),
    "induction": lambda: Induction(vocab_size=16, context=23, **SMALL),
    "induction often": lambda: Induction(vocab_size=8, context=40, n_asked=4, **SMALL),
    "selective_copy": lambda: SelectiveCopy(vocab_size=16, context=30, n_tokens_to_copy=5, **SMALL),
    "copy": lambda: Copy(vocab_size=9, context=14, **SMALL),
    "palindrome": lambda: Palindrome(vocab_size=9, context=14, **SMALL),
    "stack": lambda: Stack(vocab_size=20, context=33, n_stacks=3, **SMALL),
    "noisy_recall": lambda: NoisyRecall(vocab_size=12, context=31, **SMALL),
    "in-context recall": lambda: NoisyRecall(vocab_size=12, context=31, n_noise_tokens=0, noise_fraction=0.0, **SMALL),
    "fuzzy_recall": lambda: FuzzyRecall(vocab_size=16, context=41, **SMALL),
    "memorise": lambda: Memorise(vocab_size=20, context=14, **SMALL),
    "needle": lambda: Needle(vocab_size=11, context=37, n_passkey_tokens=2, **SMALL),
}


def recall(task, row):
    """The value that last followed a key before the question (mqar): pairs lie at even places."""
    inputs, at = row
    pairs = inputs[: 2 * task.n_pairs].reshape(-1, 2)
    return [v for k, v in pairs if k == inputs[at]][-1]


def pairs_seen(task, row):
    inputs, at = row
    return next(inputs[i + 1] for i in range(at - 1, -1, -1) if inputs[i] == inputs[at])


def after_marker(task, row):
    """What followed token 0 when it first stood, as far as the question has got."""
    inputs, at = row
    end = task.context - getattr(task, "n_passkey_tokens", 1)
    first = int(np.flatnonzero(inputs == 0)[0])
    return inputs[first + 1 + (at - end if isinstance(task, Needle) else 0)]


def popped(task, row):
    inputs, at = row
    held = {}
    for push, stack, element in inputs[: at - at % 3].reshape(-1, 3):
        held.setdefault(stack, []).append(element) if push == 0 else held[stack].pop()
    return held[inputs[at]][-1]


def fuzzy(task, row):
    """Parse the row from its start into keys (of the lower half) and values, and look the last key up."""
    inputs, at = row
    half, bound, i = task.vocab_size // 2, {}, 0
    while i <= at:
        j = i
        while j < len(inputs) and inputs[j] < half:
            j += 1
        k = j
        while k < len(inputs) and inputs[k] >= half:
            k += 1
        key = tuple(inputs[i:j])
        if k > at:
            return bound[key][at - j + 1]
        bound.setdefault(key, tuple(inputs[j:k]))
        i = k
    raise AssertionError("the question was not reached")


ANSWER = {
    "mqar": recall,
    "induction": after_marker,
    "needle": after_marker,
    "selective_copy": lambda task, row: row[0][: task.context - task.n_tokens_to_copy][
        row[0][: task.context - task.n_tokens_to_copy] >= 2
    ][row[1] - (task.context - task.n_tokens_to_copy)],
    "copy": lambda task, row: row[0][row[1] - task.context // 2],
    "palindrome": lambda task, row: row[0][task.context // 2 - 1 - (row[1] - task.context // 2)],
    "stack": popped,
    "noisy_recall": pairs_seen,
    "fuzzy_recall": fuzzy,
    "memorise": lambda task, row: task._value_of[row[0][row[1] - 1]],
}
"""An independent reader of each task, that sees the tokens up to the question alone."""


@pytest.mark.parametrize("name", TASKS)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_every_question_has_the_one_answer_that_the_row_gives(name, seed):
    task = TASKS[name]()
    inputs, targets, slices = task.row(np.random.default_rng(seed))
    asked = np.flatnonzero(targets != IGNORE)
    assert len(asked), "a row asks at least once"
    for part in (inputs, targets, slices):
        assert part.shape == (task.context,)
        assert part.dtype == np.int64
    assert 0 <= inputs.min() <= inputs.max() < task.vocab_size
    assert 0 <= targets[asked].min() <= targets[asked].max() < task.vocab_size
    for at in asked:
        seen = inputs.copy()
        seen[at + 1 :] = task.vocab_size + 5  # what comes later is hidden from the reader
        assert ANSWER[task.name](task, (seen, at)) == targets[at], f"at {at} of {inputs.tolist()}"


@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith("mqar")])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_no_filler_binds_a_key_again(name, seed):
    """A key of the row stands in its pairs and at its own query, and nowhere else."""
    task = TASKS[name]()
    inputs, targets, _ = task.row(np.random.default_rng(seed))
    keys = set(inputs[: 2 * task.n_pairs : 2].tolist())
    fillers = np.delete(inputs, np.concatenate([np.arange(2 * task.n_pairs), np.flatnonzero(targets != IGNORE)]))
    assert not keys & set(fillers.tolist())


@pytest.mark.parametrize("name", ["noisy_recall", "in-context recall"])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_no_noise_is_a_key(name, seed):
    task = TASKS[name]()
    inputs, _, _ = task.row(np.random.default_rng(seed))
    bound = {}
    for a, b in itertools.pairwise(inputs):
        if a < task.n_symbols // 2:
            assert bound.setdefault(a, b) == b


@pytest.mark.parametrize("name", TASKS)
def test_rows_depend_on_seed_and_place_alone(name):
    one, other = TASKS[name](), TASKS[name]()
    assert one.fingerprint == other.fingerprint
    for a, b in zip(one.batch(3, 4, seed=7), other.batch(3, 4, seed=7), strict=True):
        assert (a == b).all()
    assert not (one.batch(3, 4, seed=7)[0] == one.batch(3, 4, seed=8)[0]).all()
    assert not (one.batch(3, 4, seed=7)[0] == one.batch(4, 4, seed=7)[0]).all()


@pytest.mark.parametrize("name", TASKS)
def test_validation_and_test_share_no_row(name):
    task = TASKS[name]()
    rows = {split: {task.eval_row(split, i)[0].tobytes() for i in range(5)} for split in ("val", "test")}
    assert not rows["val"] & rows["test"]
    assert row_rng("val", 0, 0).random() != row_rng("test", 0, 0).random() != row_rng("train", 0, 0).random()


def test_slices_belong_to_the_batches():
    task = TASKS["needle"]()
    for (inputs, targets), slices in zip(task.eval_batches("test", 3), task.eval_slices("test", 3), strict=True):
        assert slices.shape == targets.shape
        for row, places in zip(inputs, slices, strict=True):
            depth = 10 * int((row == 0).nonzero()[0]) // (task.context - 4)
            assert places[-1] == depth


def test_longer_rows_are_the_same_task():
    task = MultiQueryRecall(vocab_size=64, context=32, n_pairs=4, eval_tokens=320, test_contexts=[48, 64])
    longer = list(task.longer())
    assert [t.context for t in longer] == [48, 64]
    assert {t.n_eval_rows("test") for t in longer} == {10}
    assert {t.n_pairs for t in longer} == {4}


def test_fuzzy_keys_do_not_begin_with_each_other():
    task = TASKS["fuzzy_recall"]()
    inputs, _, _ = task.row(np.random.default_rng(3))
    half = task.vocab_size // 2
    starts = [int(b) for a, b in zip([half, *inputs], inputs, strict=False) if a >= half > b > 0]
    assert len(set(starts)) <= task.n_keys


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["data=mqar", "data.n_forgotten=3"], "data.n_forgotten=3: at most half"),
        (["data=copy", "data.context=7"], "data.context=7: a string and its copy"),
        (["data=stack", "data.context=10"], "data.context=10: operations are of three tokens"),
        (["data=stack", "data.vocab_size=6"], "data.vocab_size=6: 4 stacks need"),
        (["data=selective_copy", "data.context=9"], "data.context=9: copying 8 tokens takes 16"),
        (["data=noisy_recall", "data.noise_fraction=1.5"], "data.noise_fraction=1.5: give a share"),
        (["data=fuzzy_recall", "data.context=20"], "data.context=20: 4 pairs"),
        (["data=needle", "data.n_passkey_tokens=0"], "data.n_passkey_tokens=0"),
        (["data=memorise", "data.vocab_size=9"], "data.vocab_size=9: give an even number"),
        (["data=induction", "data.n_asked=40"], "data.context=64: a row that asks 40 times"),
    ],
)
def test_impossible_sizes_are_a_sentence(words, sentence):
    with pytest.raises(UsageError, match=sentence):
        build_dataset(load(words).data)
