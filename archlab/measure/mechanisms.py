"""What the formulation of each mechanism is worth: the pairs of calls whose times are compared.

`conf/bench/mechanisms.yaml` names the cases, their sizes and what is aimed at.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, normalize, silu

from archlab.config.compose import load
from archlab.measure.ratio import Pair
from archlab.measure.timing import Call
from archlab.mixer import FFN, Mixer
from archlab.model import LM, build_model
from archlab.nn.delta_reference import delta_rule_reference
from archlab.nn.delta_rule import chunked, recurrent
from archlab.plugins import build_layer, factory, names

VOCAB_SIZE = 256
LOOPS = {"definition": delta_rule_reference, "products": recurrent}


def capacity(*, length: int, times: int, attn: Sequence[str] | None = None) -> Iterator[Pair]:
    """A model's decode step at `length` tokens, in a cache with room for `times` as many over a fitting one: of each
    attention plugin named, by default of all."""
    for name in attn or names("attn"):
        model = _model(name)
        roomy, fitting = (_decode_step(model, length, room) for room in (times * (length + 1), length + 1))
        yield Pair(roomy, fitting, name)


def contexts(*, attn: str, long: int, short: int) -> Iterator[Pair]:
    """A model's decode step at a long context over that at a short one."""
    model = _model(attn)
    yield Pair(*(_decode_step(model, context, context + 1) for context in (long, short)))


def decode(*, over: Sequence[str], under: Sequence[str], context: int, d_model: int) -> Iterator[Pair]:
    """One layer's decode step: one attention over another at the same context, each given by its overrides."""
    yield Pair(*(_layer_step(_mixer(side, d_model), d_model, context) for side in (over, under)))


def prefill(*, over: Sequence[str], under: Sequence[str], context: int, d_model: int) -> Iterator[Pair]:
    """One layer's pass over a whole context into an empty cache, likewise."""
    yield Pair(*(_layer_prefill(_mixer(side, d_model), d_model, context) for side in (over, under)))


def latent_forms(*, attn: str, context: int, d_model: int) -> Iterator[Pair]:
    """One layer's decode step of latent attention: the context expanded to keys and values, over the absorbed form."""
    absorbed = _mixer([f"attn={attn}"], d_model)
    expanded = copy.deepcopy(absorbed)
    expanded.absorbs = lambda t, s: False
    calls = (_layer_step(mixer, d_model, context) for mixer in (expanded, absorbed))
    yield Pair(*calls)


def chunks(*, loop: str, tokens: int, heads: int, width: int, chunk_size: int) -> Iterator[Pair]:
    """Forward and backward of the delta rule with a decay for each channel: token by token over chunk by chunk. The
    loop is that of the `definition`, or of fused `products`."""
    q, k, v, g = torch.randn(4, 1, tokens, heads, width).unbind()
    inputs = [normalize(q, dim=-1), normalize(k, dim=-1), v, logsigmoid(g), torch.rand(1, tokens, heads)]
    inputs = [x.requires_grad_() for x in inputs]
    state = torch.zeros(1, heads, width, width)
    forms = (partial(LOOPS[loop], *inputs, state), partial(chunked, *inputs, state, chunk_size=chunk_size))
    yield Pair(*(_training_step(lambda form=form: form()[0]) for form in forms))


def experts(*, ffn: str, n_experts: int, top_k: int, tokens: int, d_model: int) -> Iterator[Pair]:
    """Forward and backward of a mixture of experts: every expert computing every token, as one wide product, over the
    plugin's own dispatch."""
    cfg = load([f"ffn={ffn}", f"ffn.n_experts={n_experts}", f"ffn.top_k={top_k}"])
    layer = build_layer(factory("ffn", cfg.ffn), d_model, layer_idx=0, n_layers=1)
    x = torch.randn(1, tokens, d_model, requires_grad=True)
    forms = (lambda: every_expert(layer, x), lambda: layer(x)[0])
    yield Pair(*map(_training_step, forms))


def every_expert(layer: FFN, x: Tensor) -> Tensor:
    """The output of `archlab.ffn.moe` (... d), where each token runs through all experts, most of them at weight 0."""
    logits = layer.router(x)
    weights, chosen = layer.choose(logits)
    weights = torch.zeros_like(logits).scatter(-1, chosen, weights)
    h = x @ layer.experts.gate_up.weight.transpose(0, 1).flatten(1)
    gate, up = h.unflatten(-1, (logits.shape[-1], -1)).chunk(2, dim=-1)
    return (silu(gate) * up * weights[..., None]).flatten(-2) @ layer.experts.out.weight.flatten(0, 1)


def _training_step(forward: Callable[[], Tensor]) -> Call:
    def step() -> None:
        y = forward()
        y.backward(y.detach())

    return step


def adamw(*, attn: str) -> Iterator[Pair]:
    """One AdamW step over a model's parameters: torch's default implementation over the fused one."""
    yield Pair(*(_optimizer_step(_model(attn), fused) for fused in (None, True)))


def _optimizer_step(model: nn.Module, fused: bool | None) -> Call:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return torch.optim.AdamW(model.parameters(), fused=fused).step


def _model(attn: str) -> LM:
    return build_model(load([f"attn={attn}"]), VOCAB_SIZE).eval()


def _mixer(overrides: Sequence[str], d_model: int) -> Mixer:
    return build_layer(factory("attn", load(overrides).attn), d_model, layer_idx=0, n_layers=1).eval()


def _decode_step(model: LM, context: int, capacity: int) -> Call:
    tokens = torch.randint(VOCAB_SIZE, (1, context + 1))
    with torch.inference_mode():
        cache = model.init_cache(1, capacity)
        model(tokens[:, :context], cache, last=True)

    def step() -> None:
        cache.pos = context
        model(tokens[:, context:], cache, last=True)

    return torch.inference_mode(step)


def _layer_step(mixer: Mixer, d_model: int, context: int) -> Call:
    x = torch.randn(1, context + 1, d_model)
    state = mixer.init_state(1, context + 1, device=x.device, dtype=x.dtype)
    with torch.inference_mode():
        mixer(x[:, :context], state=state)
    return torch.inference_mode(lambda: mixer(x[:, context:], pos=context, state=state))


def _layer_prefill(mixer: Mixer, d_model: int, context: int) -> Call:
    x = torch.randn(1, context, d_model)
    state = mixer.init_state(1, context, device=x.device, dtype=x.dtype)
    return torch.inference_mode(lambda: mixer(x, state=state))
