"""The delta rule against the plain PyTorch references of flash-linear-attention: outputs and last states, forward only
(its chunked references exponentiate before they mask, so their gradients are not finite at strong decay)."""

import importlib.metadata
import importlib.util

import pytest
import torch
from torch.nn.functional import logsigmoid, normalize

from archlab.nn.delta_rule import delta_rule

B, H, K, V = 2, 3, 8, 12

try:
    FLA = importlib.metadata.distribution("fla-core")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("needs fla-core, of the extra archlab[dev]", allow_module_level=True)


def reference(rule: str):
    """A `naive.py` of the package by itself: importing the package would ask for Triton."""
    spec = importlib.util.spec_from_file_location(f"fla_{rule}", FLA.locate_file(f"fla/ops/{rule}/naive.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def inputs(t: int):
    """q, k, v, channel decays, head decays, beta and a first state, float32."""
    q, k = (normalize(torch.randn(B, t, H, K), dim=-1) for _ in range(2))
    v, state = torch.randn(B, t, H, V), torch.randn(B, H, K, V)
    return q, k, v, logsigmoid(torch.randn(B, t, H, K)), logsigmoid(torch.randn(B, t, H)), torch.rand(B, t, H), state


def agree(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("t", [1, 15, 37, 64, 130])
def test_kda(t):
    q, k, v, g, _, beta, state = inputs(t)
    ours = delta_rule(q * K**-0.5, k, v, g, beta, state, chunk_size=32)
    fla = reference("kda")
    agree(ours, fla.naive_recurrent_kda(q, k, v, g, beta, initial_state=state, output_final_state=True))
    if t % 64 == 0:
        agree(ours, fla.naive_chunk_kda(q, k, v, g, beta, initial_state=state, output_final_state=True))


@pytest.mark.parametrize("t", [1, 15, 37, 64, 130])
def test_gated_delta_rule(t):
    q, k, v, _, g, beta, state = inputs(t)
    ours = delta_rule(q * K**-0.5, k, v, g[..., None], beta, state, chunk_size=32)
    fla = reference("gated_delta_rule")
    named = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": state, "output_final_state": True}
    agree(ours, fla.naive_recurrent_gated_delta_rule(**named))
    agree(ours, fla.naive_chunk_gated_delta_rule(**named))


@pytest.mark.parametrize("t", [1, 15, 37, 64, 130])
def test_delta_rule(t):
    q, k, v, _, _, beta, state = inputs(t)
    y, last = delta_rule(q * K**-0.5, k, v, None, beta, state, chunk_size=32)
    theirs = reference("delta_rule").delta_rule_recurrence(*(x.transpose(1, 2) for x in (q, k, v, beta)), state)
    agree((y.transpose(1, 2), last), theirs)


@pytest.mark.parametrize("t", [1, 15, 37, 64, 130])
def test_gated_linear_attention(t):
    q, k, v, g, _, _, state = inputs(t)
    ours = delta_rule(q * K**-0.5, k, v, g, None, state, chunk_size=32)
    agree(ours, reference("gla").naive_recurrent_gla(q, k, v, g, state, output_final_state=True))
