"""The contract suite from the command line, without pytest."""

import pytest

from archlab.cli.testing import main
from archlab.testing import CHECKS

LEAKS = """
import torch
from archlab.attn.gqa import GroupedQueryAttention

class Leaky(GroupedQueryAttention):
    def forward(self, x, *, pos=0, state=None):
        y, aux = super().forward(x, pos=pos, state=state)
        return y + x.mean(0, keepdim=True), aux
"""


@pytest.mark.slow
def test_a_good_plugin_passes_every_check(capsys):
    assert main(["+attn=gqa", "attn.n_kv_heads=1"]) == 0
    out = capsys.readouterr().out
    assert out.count("passed") == len(CHECKS)
    assert "attn=gqa ffn=swiglu attn.n_kv_heads=1" in out


@pytest.mark.slow
def test_a_bad_one_is_told_by_check_and_input(capsys, tmp_path, monkeypatch):
    (tmp_path / "leaky.py").write_text(LEAKS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["attn=gqa", "attn._target_=leaky.Leaky"]) == 1
    captured = capsys.readouterr()
    assert "rows are independent" in captured.out
    assert "check_rows_are_independent" in captured.err
    assert "off by" in captured.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["attn=gpa"], "error: unknown attn 'gpa'; did you mean 'gqa'?"),
        (["attn=gqa", "attn.n_head=2"], "did you mean 'attn.n_heads'?"),
        (["train.steps=3"], "error: train.steps=3: give attn=NAME, ffn=NAME and their settings alone"),
    ],
)
def test_what_cannot_be_is_a_sentence(capsys, words, sentence):
    assert main(words) == 2
    assert sentence in capsys.readouterr().err


def test_help_says_what_to_type(capsys):
    assert main(["--help"]) == 0
    assert "attn=NAME" in capsys.readouterr().out
