"""Continue a text: prefill the prompt into a cache, then decode token by token. `python -m archlab.generate --help`.

Shapes: b sequences, t prompt tokens, v vocabulary.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from archlab.checkpoint import CODEC_FILE_NAME, load_run
from archlab.errors import UsageError, guarded
from archlab.evaluate import eval_mode
from archlab.mixer import Cache
from archlab.model import LM
from archlab.precision import resolve_device


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


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status: 2 for what cannot be asked, 1 for all else that fails."""
    args = _parser().parse_args(argv)
    return guarded(lambda: _stream(args))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="archlab.generate", description="Continue a text with a trained run.")
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--tokens", type=int, default=200, help="how many to add (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest token")
    parser.add_argument("--top-k", type=int, help="draw from the k likeliest tokens")
    parser.add_argument("--top-p", type=float, help="draw from the likeliest that together have this probability")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    return parser


def _stream(args: argparse.Namespace) -> None:
    """Write the prompt and its continuation to stdout as it comes."""
    device = resolve_device(args.device)
    model, _, codec = load_run(args.run, device=device)
    if codec is None:
        raise UsageError(
            f"{args.run} has no {CODEC_FILE_NAME}: it was trained on a task, or elsewhere with another tokenizer, "
            "not on text in bytes or characters; it continues no prompt"
        )
    prompt = torch.tensor([codec.encode(args.prompt)], dtype=torch.long, device=device)
    draws = torch.Generator(device).manual_seed(args.seed)
    tokens = generate(
        model,
        prompt,
        args.tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        generator=draws,
    )
    sys.stdout.reconfigure(errors="replace")
    try:
        for text in chain([args.prompt], codec.stream(int(token) for token in tokens), ["\n"]):
            print(text, end="", flush=True)
    except BrokenPipeError:  # whoever reads has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
