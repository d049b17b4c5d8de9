"""The short convolution against its sum written out, and its history against one pass."""

import pytest
import torch
from torch.nn.functional import conv1d, pad

from archlab.nn.conv import ShortConv, SlidingSum

F64 = torch.float64


def rand(*shape):
    return torch.randn(*shape, dtype=F64)


def written_out(x, weight):
    y = torch.zeros_like(x)
    for i in range(x.shape[1]):
        for age in range(min(len(weight), i + 1)):
            y[:, i] += weight[len(weight) - 1 - age] * x[:, i - age]
    return y


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("t", [1, 2, 3, 4, 5, 13])
def test_is_the_sum_over_a_token_and_those_before_it(size, t):
    conv, x = ShortConv(5, size).double(), rand(2, t, 5)
    torch.testing.assert_close(conv(x), written_out(x, conv.weight))


@pytest.mark.parametrize("size", [1, 3, 4])
def test_gradients(size):
    x, w = rand(2, 6 + size, 3).requires_grad_(), rand(size, 3).requires_grad_()
    assert torch.autograd.gradcheck(SlidingSum.apply, (x, w))
    conv, x, weight = ShortConv(5, size).double(), rand(2, 9, 5).requires_grad_(), rand(2, 9, 5)
    library = conv1d(pad(x.mT, (size - 1, 0)), conv.weight.T[:, None], groups=5).mT
    actual = torch.autograd.grad((conv(x) * weight).sum(), [x, conv.weight])
    expected = torch.autograd.grad((library * weight).sum(), [x, conv.weight])
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_history_continues_one_pass_at_every_cut(size):
    conv, x = ShortConv(5, size).double(), rand(2, 9, 5)
    whole = conv(x)
    for first in range(1, 9):
        for second in range(first + 1, 9):
            history = conv.init_history(2, device=x.device, dtype=F64)
            pieces = [conv(piece, history) for piece in x.tensor_split([first, second], dim=1)]
            torch.testing.assert_close(torch.cat(pieces, dim=1), whole)
            assert torch.equal(history, x[:, 9 - (size - 1) :])


def test_a_history_is_moved_on_in_place_in_its_own_dtype():
    conv = ShortConv(4, 3)
    history = conv.init_history(1, device=torch.device("cpu"), dtype=torch.bfloat16)
    address = history.data_ptr()
    conv(torch.ones(1, 1, 4), history)
    assert history.data_ptr() == address
    assert history.dtype == torch.bfloat16
    assert history[0, :, 0].tolist() == [0, 1]


@pytest.mark.parametrize("t", [1, 5])
def test_narrow_inputs_are_summed_in_the_weights_dtype(t):
    conv, x = ShortConv(4, 3), torch.randn(2, t, 4).bfloat16().requires_grad_()
    y = conv(x)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(y, written_out(x.float(), conv.weight))
