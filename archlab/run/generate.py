"""Continue a text: prefill the prompt into a cache, then decode token by token. `python -m archlab.generate --help`.

Shapes: b sequences, t prompt tokens, v vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from archlab.errors import UsageError
from archlab.mixer import Cache
from archlab.model import LM, eval_mode


def generate(
    model: LM,
    prompt: Tensor,
    n_new: int,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yield `n_new` times the next token (b) of each sequence of `prompt` (b t).

    Args:
        temperature: 0 takes the likeliest token; else logits are divided by it, and a token is drawn.
        top_k: draw from the k likeliest tokens alone.
        top_p: draw from the fewest likeliest tokens that together have this probability.
        generator: where the draws come from, on the model's device; None is torch's global one.

    Errors: UsageError, before anything is computed.
    """
    _check_sampling(n_new, temperature, top_k, top_p)
    _check_prompt(model, prompt, n_new)
    return _decode(model, prompt, n_new, temperature, top_k, top_p, generator)


def _decode(model, prompt, n_new, temperature, top_k, top_p, generator) -> Iterator[Tensor]:
    cache = model.init_cache(prompt.shape[0], prompt.shape[1] + n_new)
    tokens = prompt
    for _ in range(n_new):
        chosen = sample(_next_logits(model, tokens, cache), temperature, top_k, top_p, generator)
        yield chosen
        tokens = chosen[:, None]


@torch.no_grad()
def _next_logits(model: LM, tokens: Tensor, cache: Cache) -> Tensor:
    with eval_mode(model):
        return model(tokens, cache, last=True)[0][:, -1]


def sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """Logits (b v) -> token ids (b)."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits, order = logits.to(torch.promote_types(logits.dtype, torch.float32)).sort(dim=-1, descending=True)
    # The largest first: however small the temperature, nothing overflows.
    probability = ((logits - logits[:, :1]) / temperature).softmax(dim=-1)
    if top_k is not None:
        probability[:, top_k:] = 0
    if top_p is not None:
        probability /= probability.sum(dim=-1, keepdim=True)
        before = probability.cumsum(dim=-1) - probability
        probability[:, 1:] = probability[:, 1:].masked_fill(before[:, 1:] >= top_p, 0)
    return order.gather(-1, torch.multinomial(probability, 1, generator=generator)).squeeze(-1)


def _check_sampling(n_new: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    if n_new < 0:
        raise UsageError(f"tokens={n_new}: give a whole number of at least 0")
    if not 0 <= temperature < float("inf"):
        raise UsageError(f"temperature={temperature}: give 0 (the likeliest token) or more")
    if top_k is not None and top_k < 1:
        raise UsageError(f"top_k={top_k}: give at least 1, or leave it out")
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(f"top_p={top_p}: give a probability above 0 and up to 1, or leave it out")


def _check_prompt(model: LM, prompt: Tensor, n_new: int) -> None:
    if prompt.shape[1] == 0:
        raise UsageError("the prompt is empty: give at least one token")
    for token in (int(prompt.min()), int(prompt.max())):
        if not 0 <= token < model.vocab_size:
            raise UsageError(f"token id {token} of the prompt is outside the vocabulary of {model.vocab_size}")
    # The last new token is never read, so it needs no position.
    room = model.max_positions - prompt.shape[1] + 1 if model.positions is not None else n_new
    if n_new > room:
        raise UsageError(
            f"{n_new} tokens after a prompt of {prompt.shape[1]} exceed the learned position table of "
            f"{model.max_positions}: ask for at most {max(room, 0)}, or train with more model.max_positions"
        )
