"""A small model of any variant, and what all checks do with it: draw tokens, cut sequences, compare."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from archlab.config.compose import load
from archlab.model import LM, build_model
from archlab.nn.experts import ExpertLinear

VOCAB = 64

D_MODEL = 32

LENGTH = 37
"""Prime, and longer than every shrunk width."""

WIDTHS = {"block_size": 4, "window": 8, "chunk_size": 8, "conv_size": 3}
"""Shrunk widths in tokens: lengths just below, at and above each are tested."""

SMALL = WIDTHS | {
    "n_heads": 4,
    "head_dim": 8,
    "top_k_blocks": 3,
    "d_index": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "rope_dim": 4,
    "d_ff": 48,
    "d_expert": 24,
}
"""Sizes by parameter name, wherever a plugin's configuration sets one to a larger number."""


@dataclass(frozen=True)
class Variant:
    """One cell of the comparison: an attention and an FFN by name, with command-line overrides of their settings."""

    attn: str = "mha"
    ffn: str = "swiglu"
    overrides: tuple[str, ...] = ()

    def config(self) -> DictConfig:
        cfg = load([f"attn={self.attn}", f"ffn={self.ffn}", f"model.d_model={D_MODEL}"])
        for group in ("attn", "ffn"):
            shrink(cfg[group])
        cfg.model.n_layers = len(cfg.attn.pattern) if cfg.attn.get("pattern") else 2
        cfg.merge_with_dotlist(list(self.overrides))
        return cfg

    def build(self, dtype: torch.dtype = torch.float64, *, seed: int = 0) -> LM:
        """A small model in eval mode with weights of a trained model's scale: small initial weights hide faults."""
        torch.manual_seed(seed)
        model = build_model(self.config(), VOCAB)
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.Embedding):
                    module.weight.normal_()
                elif isinstance(module, nn.Linear | ExpertLinear):
                    module.weight.normal_(std=module.weight.shape[-1 if isinstance(module, nn.Linear) else -2] ** -0.5)
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return model.to(dtype).eval()


def shrink(node: DictConfig) -> None:
    """Set the sizes of a plugin's configuration, nested ones among them, to those of `SMALL` where they are larger."""
    for key, value in node.items():
        if OmegaConf.is_dict(value):
            shrink(value)
        elif isinstance(value, int) and key in SMALL:
            node[key] = min(value, SMALL[key])


def lengths(variant: Variant) -> list[int]:
    """Sequence lengths below, at and above each width that the variant's configuration names, and `LENGTH`."""
    widths = {value for key, value in _leaves(variant.config()) if key in WIDTHS and isinstance(value, int)}
    around = {w + d for w in widths for d in (-1, 0, 1)} | {2 * w + 1 for w in widths}
    return sorted({t for t in around if t > 0} | {1, LENGTH})


def _leaves(node: Any) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if OmegaConf.is_dict(value):
            yield from _leaves(value)
        else:
            yield key, value


def partitions(length: int, *, seed: int = 0) -> list[list[int]]:
    """Ways to feed `length` tokens: at once, one by one, one in front, one behind, and random pieces."""
    rng = random.Random(seed)
    ways = [[length], [1] * length]
    if length > 1:
        ways += [[1, length - 1], [length - 1, 1]]
    for n_cuts in (1, 2, 5):
        cuts = sorted(rng.sample(range(1, length), min(n_cuts, length - 1)))
        ways.append([b - a for a, b in itertools.pairwise([0, *cuts, length])])
    return ways


def tokens(batch: int, length: int, *, seed: int = 0) -> Tensor:
    """Random token ids (batch length)."""
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Tensor, what: str, *, tolerance: float = 1e-10) -> None:
    """Largest difference within `tolerance` of the expected values' scale; NaN is never close."""
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    error = (actual - expected).abs().max().item() if expected.numel() else 0.0
    assert error <= tolerance * scale, f"{what}: off by {error:.3g} at a scale of {scale:.3g} (tolerance {tolerance:g})"
