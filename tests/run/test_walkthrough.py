"""`+experiment=tiny` shows what the published walk shows: losses, shapes, bytes, equality, a continuation."""

import math
import re
from contextlib import redirect_stdout
from io import StringIO

import pytest

from archlab.cli.main import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def walk(tmp_path_factory):
    text = StringIO()
    with redirect_stdout(text):
        assert main(["+experiment=tiny", f"hydra.run.dir={tmp_path_factory.mktemp('walk') / 'run'}"]) == 0
    return text.getvalue()


def figure(walk: str, pattern: str) -> float:
    return float(re.search(pattern, walk).group(1).replace(",", ""))


def test_the_loss_falls_from_an_even_guess_to_nearly_nothing(walk):
    first = figure(walk, r"step 0 loss ([\d.]+) \(an even guess among 22 tokens")
    assert abs(first - math.log(22)) < 0.1
    losses = [first, *(figure(walk, rf"step {step} loss ([\d.]+)") for step in (100, 200, 300))]
    assert losses[3] < losses[2] < losses[1] < losses[0]
    assert losses[3] < 0.05


def test_shapes_are_those_of_the_published_walk(walk):
    for matrix in ("Wq", "Wk", "Wv"):
        assert f"{matrix} (32, 32), Adam m (32, 32), Adam v (32, 32)" in walk
    assert "layers cached: 2" in walk
    for layer in (0, 1):
        assert f"layer {layer} cache: K (1, 4, 48, 8), V (1, 4, 48, 8)" in walk


def test_bytes_are_sixteen_a_parameter_and_two_tensors_a_layer(walk):
    assert figure(walk, r"bytes while training: .*; ([\d.]+) a parameter") == 16
    assert figure(walk, r"cache of 48 tokens: ([\d,]+) bytes") == 2 * 2 * 48 * 4 * 8 * 4


def test_cached_and_full_agree_and_text_goes_on(walk):
    assert figure(walk, r"all at once against token by token: ([\d.]+)") < 1e-5
    assert figure(walk, r"alone against with the rest behind them: ([\d.]+)") < 1e-5
    assert re.search(r"'.{8}' goes on '.{40}'", walk)
