"""What one run shows of a Transformer: `explain=true` prints each fact, read from live objects, behind the card.

`python -m archlab +experiment=tiny` is the smallest such run: a published walk from one text to its key-value cache.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch

from archlab.data import Dataset
from archlab.errors import UsageError
from archlab.measure.account import training_bytes
from archlab.measure.equivalence import feed, full
from archlab.model import LM, eval_mode
from archlab.run.generate import generate
from archlab.run.log import FILE_NAME
from archlab.train.trainer import Trainer

PROMPT_TOKENS = 8
THIRDS = 3
"""The loss is shown at the first step, the last, and at each third between."""


class Walkthrough:
    """Follows a training run and tells what it saw. Pass `watch` to `archlab.train.train`, then ask for the `lines`.

    Errors: UsageError if `dataset` is no text, which alone can go on.
    """

    def __init__(self, dataset: Dataset):
        if dataset.codec is None:
            raise UsageError(f"explain=true goes on with a text, and data={dataset.name} is none: leave it out")
        self.dataset = dataset
        self.weights: list[str] = []
        self.bytes_held: dict[str, Any] = {}

    def watch(self, trainer: Trainer) -> None:
        """Look at every update, while gradients and moments are there."""

        def after_update(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if trainer.step == trainer.settings.steps - 1:
                self.bytes_held = training_bytes(trainer.model, optimizer)
                self.weights = list(_weights(trainer.model, optimizer))

        trainer.stepper.optimizer.register_step_post_hook(after_update)

    def lines(self, model: LM, run_dir: Path) -> list[str]:
        """The walk, a line a fact."""
        with eval_mode(model), torch.inference_mode():
            return [
                *_losses(run_dir, model.vocab_size),
                *self.weights,
                *_held(self.bytes_held),
                *_decoded(model, self.dataset),
            ]


def _decoded(model: LM, dataset: Dataset) -> list[str]:
    """What a held-out text leaves in the cache, and how it goes on."""
    context = dataset.context
    tokens = next(dataset.eval_batches("val", 1))[0][:1].to(model.embed.weight.device)
    cache = model.init_cache(1, context)
    stepwise = feed(model, tokens, [1] * context, cache)
    whole = full(model, tokens)
    head, n_new = tokens[:, :PROMPT_TOKENS], context - PROMPT_TOKENS
    drift = (full(model, head) - whole[:, :PROMPT_TOKENS]).abs().max().item()
    start, rest = (dataset.codec.decode([int(t) for t in ids]) for ids in (head[0], generate(model, head, n_new)))
    return [
        f"layers cached: {len(cache.states)}",
        *_cache(cache.states),
        f"cache of {context} tokens: {cache.nbytes:,} bytes",
        f"max logits difference, all at once against token by token: {(whole - stepwise).abs().max().item():.8f}",
        f"max logits difference, first {PROMPT_TOKENS} tokens alone against with the rest behind them: {drift:.8f}",
        f"{start!r} goes on {rest!r}",
    ]


def _losses(run_dir: Path, vocab_size: int) -> list[str]:
    rows = [json.loads(line) for line in (run_dir / FILE_NAME).read_text(encoding="utf-8").splitlines()]
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    last = max(losses)
    shown = [last * i // THIRDS for i in range(THIRDS + 1)]
    guess = f"an even guess among {vocab_size} tokens has {math.log(vocab_size):.4f}"
    return [f"step {step} loss {losses[step]:.4f}{f' ({guess})' if step == 0 else ''}" for step in shown]


def _weights(model: LM, optimizer: torch.optim.Optimizer):
    """A line a matrix of the first block, with the moments that AdamW keeps of it."""
    block = model.blocks[0]
    for part, plugin in (("attention", block.mixer), ("ffn", block.ffn)):
        for name, parameter in plugin.named_parameters():
            state = optimizer.state[parameter]
            views = [plugin.matrices(name, t) for t in (parameter.detach(), state["exp_avg"], state["exp_avg_sq"])]
            for title in views[0]:
                weight, m, v = (tuple(view[title].shape) for view in views)
                yield f"block 0 {part}: {title} {weight}, Adam m {m}, Adam v {v}"


def _held(held: dict[str, Any]) -> list[str]:
    kinds = ("weight", "gradient", "moment")
    parts = ", ".join(f"{held[f'train/{kind}_bytes']:,} of {kind}s" for kind in kinds)
    return [f"bytes while training: {parts}; {held['train/bytes_per_param']:g} a parameter"]


def _cache(states) -> list[str]:
    return [
        f"layer {i} cache: " + ", ".join(f"{name} {tuple(t.shape)}" for name, t in state.views().items())
        for i, state in enumerate(states)
    ]
