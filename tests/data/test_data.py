"""Data: every source gives the same batches to everybody, and no token of one split to another."""

import hashlib
import random
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import TINY
from hypothesis import given, settings
from hypothesis import strategies as st

from archlab.config.compose import load
from archlab.data import IGNORE, Codec, build_dataset
from archlab.data.codec import UNKNOWN, ByteCodec, CharCodec, encode_bytes, encode_characters
from archlab.data.phrase import Phrase
from archlab.data.stdlib import StandardLibrary, _source_files, _split_of
from archlab.data.stream import TokenStream
from archlab.data.tasks.mqar import MultiQueryRecall
from archlab.data.text import Text
from archlab.errors import UsageError
from archlab.plugins import names

SOURCES = {
    "stdlib": lambda: StandardLibrary(context=17, eval_tokens=500),
    "phrase": lambda: Phrase(context=13, repeats=20),
    "mqar": lambda: MultiQueryRecall(vocab_size=64, context=37, n_pairs=5, eval_tokens=400),
}


def stream(n_eval: int, context: int, eval_tokens: int | None) -> TokenStream:
    codec, tokens = encode_bytes(bytes(i % 251 for i in range(500)))
    splits = {"train": tokens, "val": tokens[:n_eval], "test": tokens[:2]}
    return TokenStream(name="bytes", codec=codec, splits=splits, context=context, eval_tokens=eval_tokens)


@pytest.fixture(params=SOURCES)
def dataset(request):
    return SOURCES[request.param]()


def test_batches_are_int64_rows_of_the_vocabulary(dataset):
    inputs, targets = dataset.batch(2, 5, seed=3)
    assert inputs.shape == targets.shape == (5, dataset.context)
    assert inputs.dtype == targets.dtype == torch.int64
    assert 0 <= inputs.min() <= inputs.max() < dataset.vocab_size
    counted = targets[targets != IGNORE]
    assert 0 <= counted.min() <= counted.max() < dataset.vocab_size


def test_a_batch_depends_on_its_index_and_the_seed_alone(dataset):
    first = dataset.batch(7, 4, seed=1)
    dataset.batch(0, 3, seed=9)
    for seed_all in (random.seed, np.random.seed, torch.manual_seed):
        seed_all(123)
    for mine, again in zip(first, dataset.batch(7, 4, seed=1), strict=True):
        assert torch.equal(mine, again)
    assert not torch.equal(first[0], dataset.batch(7, 4, seed=2)[0])
    assert not torch.equal(first[0], dataset.batch(8, 4, seed=1)[0])


def test_rows_do_not_depend_on_the_batch_size(dataset):
    whole = dataset.batch(0, 6, seed=5)
    halves = [dataset.batch(i, 3, seed=5) for i in range(2)]
    for k in range(2):
        assert torch.equal(whole[k], torch.cat([half[k] for half in halves]))
    for k in range(2):
        rows = [torch.cat([b[k] for b in dataset.eval_batches("val", size)]) for size in (1, 4, 1000)]
        assert torch.equal(rows[0], rows[1])
        assert torch.equal(rows[0], rows[2])


def test_a_source_built_twice_is_the_same(dataset, request):
    again = SOURCES[request.node.callspec.params["dataset"]]()
    assert dataset.fingerprint == again.fingerprint
    assert len(bytes.fromhex(dataset.fingerprint)) == hashlib.sha256().digest_size
    assert torch.equal(dataset.batch(0, 2, 0)[0], again.batch(0, 2, 0)[0])


def test_no_generated_row_of_one_split_is_in_another():
    data = SOURCES["mqar"]()
    rows = [data.batch(0, 100, seed=0)[0], *(next(data.eval_batches(split, 100))[0] for split in ("val", "test"))]
    rows = [tuple(row) for part in rows for row in part.tolist()]
    assert len(set(rows)) == len(rows)


def test_an_unknown_split_is_refused(dataset):
    with pytest.raises(UsageError, match="valid"):
        next(dataset.eval_batches("valid", 2))


def test_the_fingerprint_follows_tokens_and_settings():
    prints = {stream(*args).fingerprint for args in [(50, 7, None), (49, 7, None), (50, 8, None), (50, 7, 14)]}
    assert len(prints) == 4
    codec, tokens = encode_bytes(b"abc" * 40)
    other = tokens.copy()
    other[-1] += 1
    splits = [{"train": tokens, "val": tokens, "test": t} for t in (tokens, other)]
    one, two = (TokenStream(name="x", codec=codec, splits=s, context=5, eval_tokens=None) for s in splits)
    assert one.fingerprint != two.fingerprint
    recall = {"vocab_size": 64, "context": 32, "n_pairs": 4, "eval_tokens": 64}
    changed = [recall, recall | {"power": 0.02}, recall | {"random_fillers": False}, recall | {"n_pairs": 3}]
    assert len({MultiQueryRecall(**c).fingerprint for c in changed}) == 4


def test_targets_are_the_inputs_shifted_by_one():
    data = Phrase(context=13, repeats=20)
    inputs, targets = data.batch(0, 8, seed=0)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    text = data.codec.decode(data.splits["train"])
    for x, y in zip(inputs.tolist(), targets.tolist(), strict=True):
        assert data.codec.decode([x[0], *y]) in text


@given(st.integers(2, 200), st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_evaluation_predicts_every_token_once(n, context):
    data = stream(n, context, None)
    batches = list(data.eval_batches("val", 3))
    targets = torch.cat([t.flatten() for _, t in batches])
    inputs = torch.cat([x.flatten() for x, _ in batches])
    assert targets[targets != IGNORE].tolist() == data.splits["val"][1:].tolist()
    assert inputs[targets != IGNORE].tolist() == data.splits["val"][:-1].tolist()


def test_a_capped_evaluation_reads_spaced_windows():
    data = stream(401, 10, 80)  # 40 windows, room for 8
    targets = torch.cat([t for _, t in data.eval_batches("val", 3)])
    assert targets.shape == (8, 10)
    assert targets[:, 0].tolist() == [(1 + 50 * i) % 251 for i in range(8)]


def test_every_start_of_a_training_window_occurs():
    data = stream(10, 495, None)
    starts = {int(row[0]) for row in data.batch(0, 200, seed=0)[0]}
    assert starts == {0, 1, 2, 3, 4}


def test_stdlib_holds_out_whole_files_of_the_library():
    files = _source_files(Path(sysconfig.get_path("stdlib")))
    assert files == sorted(files)
    listed = {name for name, _ in files}
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= listed
    assert not any({"test", "site-packages"} & set(name.split("/")) for name in listed)
    splits = {}
    for name, path in files:
        splits.setdefault(_split_of(name), []).append(path.read_bytes())
    data = StandardLibrary(context=8)
    for split in ("train", "val", "test"):
        assert data.splits[split].tobytes() == b"".join(splits[split])
    assert data.codec.vocab_size == data.vocab_size == 256


@pytest.mark.slow
def test_the_same_library_in_another_process(tmp_path):
    code = "from archlab.data.stdlib import StandardLibrary as S; print(S(context=17, eval_tokens=500).fingerprint)"
    env = {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=env, check=True
    )
    assert done.stdout.strip() == SOURCES["stdlib"]().fingerprint


def test_text_is_cut_in_head_middle_and_tail(tmp_path):
    (tmp_path / "a.txt").write_text("".join(map(chr, range(100, 300))), encoding="utf-8")
    data = Text(path=str(tmp_path / "a.txt"), tokens="characters", context=5, val_fraction=0.1, test_fraction=0.2)
    assert data.n_tokens == {"train": 140, "val": 20, "test": 40}
    parts = [data.codec.decode(data.splits[s]) for s in ("train", "val", "test")]
    assert "".join(parts) == "".join(map(chr, range(100, 300)))
    assert data.vocab_size == 200


def test_a_folder_is_read_in_the_order_of_names_from_where_the_user_stands(tmp_path, monkeypatch):
    (tmp_path / "texts/sub").mkdir(parents=True)
    for name, letter in {"b.txt": "b", "a.txt": "a", "sub/c.txt": "c", ".hidden": "x"}.items():
        (tmp_path / "texts" / name).write_text(letter * 100)
    monkeypatch.chdir(tmp_path)
    data = Text(path="texts", context=5)
    assert b"".join(t.tobytes() for t in data.splits.values()) == b"a" * 100 + b"b" * 100 + b"c" * 100


@pytest.mark.parametrize(
    ("content", "overrides", "words"),
    [
        (None, {}, ["absent.txt", "does not exist"]),
        (b"", {}, ["0 tokens", "needed: 40"]),
        (b"x" * 39, {}, ["39 tokens", "needed: 40"]),
        (b"x" * 100, {"context": 99}, ["100 tokens", "needed: 112", "data.context=99"]),
        (b"abc\xff" * 50, {"tokens": "characters"}, ["0xff", "offset 3", "data.tokens=bytes"]),
        (b"x" * 100, {"tokens": "words"}, ["words", "bytes or characters"]),
        (b"x" * 100, {"val_fraction": 0.6}, ["data.val_fraction=0.6"]),
        (b"x" * 100, {"context": 0}, ["data.context=0"]),
        (b"x" * 100, {"eval_tokens": 0}, ["data.eval_tokens=0"]),
    ],
)
def test_bad_text_is_a_sentence(tmp_path, content, overrides, words):
    path = tmp_path / "absent.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as error:
        Text(**{"path": str(path), "context": 7} | overrides)
    for word in words:
        assert word.removeprefix("needed: ") in str(error.value)


def test_exactly_enough_text_is_enough(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 112)
    data = Text(path=str(tmp_path / "a"), context=99)
    assert data.batch(0, 1, 0)[0].shape == (1, 99)
    assert all(next(data.eval_batches(split, 2)) for split in ("val", "test"))


def test_a_token_outside_the_vocabulary_is_refused():
    tokens = np.array([0, 1, 2] * 9)
    splits = {"train": tokens, "val": tokens, "test": tokens}
    with pytest.raises(UsageError, match="token id 2 of data=x is outside its vocabulary of 2"):
        TokenStream(name="x", codec=CharCodec("ab"), splits=splits, context=3, eval_tokens=None)


@given(st.text())
@settings(max_examples=100, deadline=None)
def test_codecs_round_trip(text):
    for codec in (ByteCodec(), encode_characters(text)[0]):
        codec = Codec.from_json(codec.to_json())
        tokens = codec.encode(text)
        assert codec.decode(tokens) == text
        assert sum(codec.token_bytes[t] for t in tokens) == len(text.encode())
    codec, tokens = encode_characters(text)
    assert codec.encode(text) == tokens.tolist()
    assert codec.vocab_size == len(set(text))


def test_bytes_stream_as_soon_as_a_character_is_whole():
    codec = ByteCodec()
    pieces = list(codec.stream(codec.encode("aé€")))
    assert pieces == ["a", "é", "€"]
    assert codec.decode([0xC3, 0x41, 0xE2]) == UNKNOWN + "A" + UNKNOWN
    assert codec.decode([0x41, 300]) == "A" + UNKNOWN
    assert CharCodec("ab").decode([1, 2]) == "b" + UNKNOWN
    assert codec.encode("\udcff") == [0xFF]  # a byte of the command line that is not UTF-8


def test_a_character_outside_the_vocabulary_is_named():
    with pytest.raises(UsageError, match="'é'"):
        CharCodec("abc").encode("abé")
    with pytest.raises(UsageError, match="ud800"):
        ByteCodec().encode("\ud800")


def test_recall_rows_are_what_the_paper_says():
    vocab, t, n = 64, 37, 5
    data = MultiQueryRecall(vocab_size=vocab, context=t, n_pairs=n)
    inputs, targets = data.batch(0, 50, seed=0)
    for x, y in zip(inputs.tolist(), targets.tolist(), strict=True):
        pairs = dict(zip(x[0 : 2 * n : 2], x[1 : 2 * n : 2], strict=True))
        assert len(pairs) == len(set(pairs.values())) == n
        assert all(1 <= k < vocab // 2 <= v < vocab for k, v in pairs.items())
        asked = [i for i in range(t) if y[i] != IGNORE]
        assert sorted(x[i] for i in asked) == sorted(pairs)
        assert all(i >= 2 * n and i % 2 == 0 and y[i] == pairs[x[i]] for i in asked)


def test_recall_fillers():
    zeros = MultiQueryRecall(vocab_size=64, context=36, n_pairs=4, random_fillers=False).batch(0, 9, seed=0)
    fillers = zeros[0][:, 8:][zeros[1][:, 8:] == IGNORE]
    assert fillers.count_nonzero() == 0
    drawn = MultiQueryRecall(vocab_size=64, context=36, n_pairs=4).batch(0, 200, seed=0)
    fillers = drawn[0][:, 8:][drawn[1][:, 8:] == IGNORE]
    assert len(fillers.unique()) == 64
    for k in range(2):  # the fillers are all that differs
        asked = drawn[1][:9] != IGNORE
        assert torch.equal(zeros[k][asked], drawn[k][:9][asked])


def test_recall_gaps_follow_the_power_law():
    power, t = 0.3, 22
    data = MultiQueryRecall(vocab_size=16, context=t, n_pairs=1, power=power)
    targets = data.batch(0, 4000, seed=0)[1]
    seen = np.bincount([(int(row.nonzero()[0]) - 2) // 2 for row in targets != IGNORE], minlength=10) / 4000
    weights = [(g + 1) ** (power - 1) for g in range(10)]
    expected = np.array(weights) / sum(weights)
    assert np.abs(seen - expected).max() < 4 * np.sqrt(expected[0] / 4000)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"n_pairs": 10}, "data.n_pairs=10 needs data.context of at least 40"),
        ({"n_pairs": 0}, "data.n_pairs=0"),
        ({"n_pairs": 8, "vocab_size": 16}, "data.vocab_size=18"),
    ],
)
def test_impossible_recall_is_a_sentence(overrides, words):
    with pytest.raises(UsageError, match=words):
        MultiQueryRecall(**{"vocab_size": 64, "context": 39, "n_pairs": 4} | overrides)


def test_a_negative_seed_is_a_sentence():
    with pytest.raises(UsageError, match="seed=-1"):
        SOURCES["phrase"]().batch(0, 1, seed=-1)


@pytest.mark.parametrize("name", names("data"))
def test_every_yaml_builds(name, tmp_path):
    (tmp_path / "text").write_bytes(b"some text " * 1000)
    cfg = load([f"data={name}", *([f"data.path={tmp_path}/text"] if name == "text" else [])])
    data = build_dataset(cfg.data)
    assert data.batch(0, 2, seed=0)[0].shape == (2, cfg.data.context)
    assert data.n_tokens["val"] > 0


def test_configuration_errors_are_sentences():
    cfg = load(["data=phrase", "+data.contxt=3"])
    with pytest.raises(UsageError, match="did you mean 'context'"):
        build_dataset(cfg.data)
    with pytest.raises(UsageError, match=r"data\.path=FILE"):
        build_dataset(load(["data=text"]).data)


@pytest.mark.parametrize(
    ("data", "share"),
    [
        (b"a\x00b\x00" * 400, "50.0% of its bytes are NUL"),
        (bytes(range(128, 256)) * 10, "100.0% are not UTF-8"),
        ("h\u00e9 " * 400, None),
        (("gr\u00fcn und wei\u00df, " * 99).encode("latin-1"), None),
    ],
)
def test_a_text_that_is_none_is_named_with_its_share_of_bytes(tmp_path, data, share):
    path = tmp_path / "text"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    warning = Text(path=str(path), context=8).warning
    assert (share is None and warning is None) or share in warning


def test_the_warning_reaches_the_user(archlab, tmp_path):
    (tmp_path / "text").write_bytes(b"ab\x00" * 400)
    words = [word for word in TINY if word != "data=phrase"]
    outcome = archlab("data=text", f"data.path={tmp_path / 'text'}", *words)
    assert outcome.status == 0
    assert re.search(r"warning: data.path=.* 33.3% of its bytes are NUL", outcome.err)
