"""Evaluation against one row at a time, and what may not move its figures: batch size, dropout, auxiliary losses."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from training import CPU, VOCAB, AuxFFN, Uneven, make_model

from archlab.data import IGNORE
from archlab.data.tasks.mqar import MultiQueryRecall
from archlab.data.text import Text
from archlab.model import eval_mode
from archlab.train.evaluate import evaluate, token_losses


def figures(model, data, *, batch_size=3, split="val", dtype=torch.float32):
    return evaluate(model, data, split, batch_size=batch_size, device=CPU, dtype=dtype)


def rows(data, split):
    for inputs, targets in data.eval_batches(split, 1):
        yield inputs, targets[0]


@pytest.mark.parametrize("split", ["val", "test"])
def test_the_loss_is_that_of_every_target_alone(split):
    model, data = make_model().double(), Uneven()
    nats, hits = [], []
    for inputs, targets in rows(data, split):
        log_p = model(inputs)[0][0].log_softmax(-1)
        for t, target in enumerate(targets.tolist()):
            if target != IGNORE:
                nats.append(-log_p[t, target].item())
                hits.append(log_p[t].argmax().item() == target)
    found = figures(model, data, split=split, dtype=torch.float64)
    assert set(found) == {f"quality/{split}_loss", f"quality/{split}_accuracy"}
    assert found[f"quality/{split}_loss"] == pytest.approx(np.mean(nats), abs=1e-12)
    assert found[f"quality/{split}_accuracy"] == np.mean(hits)


@pytest.mark.parametrize("context", [7, 16])
def test_the_batch_size_does_not_matter(tmp_path, context):
    (tmp_path / "t").write_bytes(bytes(np.random.default_rng(0).integers(VOCAB, size=2000, dtype=np.uint8)))
    data = Text(path=str(tmp_path / "t"), context=context, tokens="characters", val_fraction=0.1)
    model = make_model()
    one, two, seven = (figures(model, data, batch_size=n) for n in (1, 2, 7))
    for other in (two, seven):
        assert one == pytest.approx(other, abs=1e-6)


def test_bits_per_byte_count_the_bytes_of_the_targets(tmp_path):
    text = "aé€" * 200
    (tmp_path / "t").write_text(text, encoding="utf-8")
    data = Text(path=str(tmp_path / "t"), context=9, tokens="characters", val_fraction=0.1)
    model = make_model()
    found = figures(model, data)
    n_bytes = len(data.codec.decode(data.splits["val"][1:]).encode())
    nats = found["quality/val_loss"] * (data.n_tokens["val"] - 1)
    assert set(found) == {"quality/val_loss", "quality/val_bits_per_byte"}
    assert found["quality/val_bits_per_byte"] == pytest.approx(nats / math.log(2) / n_bytes, rel=1e-6)


def test_accuracy_of_recall_counts_the_queries_alone():
    data = MultiQueryRecall(vocab_size=VOCAB - 1, context=20, n_pairs=2, eval_tokens=400)
    answers = {tuple(x[0].tolist()): y for x, y in rows(data, "val")}
    half = iter(range(10**6))

    class Oracle(torch.nn.Module):
        """Right at every second query, and at no other position."""

        def forward(self, tokens):
            logits = torch.zeros(*tokens.shape, VOCAB)
            for row, x in enumerate(tokens.tolist()):
                for t, target in enumerate(answers[tuple(x)].tolist()):
                    if target != IGNORE and next(half) % 2 == 0:
                        logits[row, t, target] = 1
            return logits, {}

    assert figures(Oracle(), data, batch_size=7)["quality/val_accuracy"] == 0.5


def test_auxiliary_losses_are_never_in_it():
    torch.manual_seed(1)
    with_aux = make_model(ffn=AuxFFN)
    plain = make_model()
    plain.load_state_dict(with_aux.state_dict(), strict=False)
    assert with_aux(torch.zeros(1, 4, dtype=torch.long))[1]["probe"] > 0
    assert figures(with_aux, Uneven()) == figures(plain, Uneven())


def test_there_is_no_dropout_and_the_mode_comes_back():
    model = make_model(dropout=0.5).train()
    model.blocks[1].eval()
    modes = {name: m.training for name, m in model.named_modules()}
    assert len({figures(model, Uneven())["quality/val_loss"] for _ in range(3)}) == 1
    assert {name: m.training for name, m in model.named_modules()} == modes
    with pytest.raises(RuntimeError), eval_mode(model):
        raise RuntimeError
    assert {name: m.training for name, m in model.named_modules()} == modes
    x = torch.arange(8)[None]
    assert not torch.equal(model(x)[0], model(x)[0])


def test_autocast_narrows_the_products_not_the_loss():
    model, seen = make_model(), []
    model.head.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    narrow = figures(model, Uneven(), dtype=torch.bfloat16)
    assert set(seen) == {torch.bfloat16}
    assert narrow["quality/val_loss"] == pytest.approx(figures(model, Uneven())["quality/val_loss"], abs=0.02)
    logits = torch.randn(2, 3, VOCAB, dtype=torch.bfloat16)
    targets = torch.randint(VOCAB, (2, 3))
    expected = cross_entropy(logits.double().flatten(0, 1), targets.flatten(), reduction="none").view(2, 3)
    torch.testing.assert_close(token_losses(logits, targets).double(), expected, atol=1e-6, rtol=0)
