"""The language model around the plugins: embedding, pre-norm blocks, head. No plugin is named here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from archlab.errors import UsageError
from archlab.mixer import FFN, Aux, Cache, Mixer
from archlab.nn.experts import ExpertLinear
from archlab.nn.norm import build_norm
from archlab.plugins import GROUPS, build_layer, check_keys, factory


class Block(nn.Module):
    """x + mixer(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, mixer: Mixer, ffn: FFN, norms: tuple[nn.Module, nn.Module], dropout: float):
        super().__init__()
        self.mixer, self.ffn = mixer, ffn
        self.mixer_norm, self.ffn_norm = norms
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, pos, state) -> tuple[Tensor, list[Aux]]:
        mixed, mixer_aux = self.mixer(self.mixer_norm(x), pos=pos, state=state)
        x = x + self.dropout(mixed)
        y, ffn_aux = self.ffn(self.ffn_norm(x))
        return x + self.dropout(y), [mixer_aux, ffn_aux]


class LM(nn.Module):
    """A decoder-only language model.

    Args:
        vocab_size: number of token ids.
        attn, ffn: factories of one layer's mixer and FFN: called with `d_model`, and with `layer_idx` and `n_layers` if
            their signatures name them.
        norm: "rms", "gemma" (rms times 1 + weight) or "layer".
        positions: "none" beside those of the attention plugin, or "learned": a table of `max_positions` rows.
        tied: the head shares the embedding's weight.
        init_std: standard deviation of all linear and embedding weights; those that write into the residual stream are
            scaled by 1/sqrt(2 n_layers) on top if `depth_scaled_init` (GPT-2).
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        attn: Callable[..., Mixer],
        ffn: Callable[..., FFN],
        d_model: int,
        n_layers: int,
        norm: str = "rms",
        norm_eps: float = 1e-5,
        positions: str = "none",
        max_positions: int | None = None,
        tied: bool = True,
        dropout: float = 0.0,
        init_std: float = 0.02,
        depth_scaled_init: bool = True,
    ):
        super().__init__()
        _check_sizes(vocab_size, d_model, n_layers, positions, max_positions, dropout)
        self.vocab_size, self.d_model, self.max_positions = vocab_size, d_model, max_positions
        self.embed = nn.Embedding(vocab_size, d_model)
        self.positions = nn.Embedding(max_positions, d_model) if positions == "learned" else None
        self.dropout = nn.Dropout(dropout)

        def block(i: int) -> Block:
            mixer, mlp = (build_layer(f, d_model, layer_idx=i, n_layers=n_layers) for f in (attn, ffn))
            norms = (build_norm(norm, d_model, norm_eps), build_norm(norm, d_model, norm_eps))
            return Block(mixer, mlp, norms, dropout)

        self.blocks = nn.ModuleList(block(i) for i in range(n_layers))
        self.norm = build_norm(norm, d_model, norm_eps)
        self.head = nn.Linear(d_model, vocab_size, bias=False)
        self._init_weights(init_std, depth_scaled_init)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, cache: Cache | None = None, *, last: bool = False) -> tuple[Tensor, Aux]:
        """tokens (b t) -> logits (b t vocab), or (b 1 vocab) of the last token alone with `last`; auxiliary losses by
        name, summed over layers.

        With a cache, the tokens follow those that it has seen; it is updated in place and its `pos` advanced by t.
        """
        pos, states = (0, [None] * len(self.blocks)) if cache is None else (cache.pos, cache.states)
        self._check_room(tokens.shape[1], cache)
        x = self.embed(tokens)
        if self.positions is not None:
            x = x + self.positions(_positions(pos, tokens))
        x, aux = self.dropout(x), {}
        for block, state in zip(self.blocks, states, strict=True):
            x, parts = block(x, pos, state)
            for name, value in ((n, v) for part in parts for n, v in part.items()):
                aux[name] = aux[name] + value if name in aux else value
        if cache is not None:
            cache.pos = pos + tokens.shape[1]
        return self.head(self.norm(x[:, -1:] if last else x)), aux

    def init_cache(
        self, batch: int, max_len: int, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Cache:
        """An empty cache for `batch` sequences of up to `max_len` tokens; device and dtype default to the weights'."""
        device = torch.device(device or self.embed.weight.device)
        dtype = dtype or self.embed.weight.dtype
        states = [b.mixer.init_state(batch, max_len, device=device, dtype=dtype) for b in self.blocks]
        return Cache(states, 0, max_len)

    def plugins(self) -> list[Mixer | FFN]:
        """The mixer and the FFN of every layer, in order."""
        return [plugin for block in self.blocks for plugin in (block.mixer, block.ffn)]

    def after_step(self, progress: float) -> None:
        """Pass the share of training done, in [0, 1], to every plugin."""
        for plugin in self.plugins():
            plugin.after_step(progress)

    def metrics(self) -> dict[str, float]:
        """Every plugin's metrics, averaged over the layers that report them."""
        values: dict[str, list[float]] = {}
        for plugin in self.plugins():
            for name, value in plugin.metrics().items():
                values.setdefault(name, []).append(value)
        return {name: sum(v) / len(v) for name, v in values.items()}

    def _check_room(self, t: int, cache: Cache | None) -> None:
        if cache is not None and isinstance(cache.pos, int) and cache.pos + t > cache.max_len:
            raise ValueError(f"{t} tokens at position {cache.pos} exceed the cache's max_len={cache.max_len}")
        end = t if cache is None or not isinstance(cache.pos, int) else cache.pos + t
        if self.positions is not None and end > self.max_positions:
            raise UsageError(
                f"a context of {end} tokens is longer than the learned position table: raise model.max_positions="
                f"{self.max_positions}, or use positions that an attention plugin computes (model.positions=none)"
            )

    def _init_weights(self, std: float, depth_scaled: bool) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding | ExpertLinear):
                residual = depth_scaled and name.endswith(".out")
                nn.init.normal_(module.weight, std=std / math.sqrt(2 * len(self.blocks)) if residual else std)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)


def _positions(pos, tokens: Tensor) -> Tensor:
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    return pos + steps if isinstance(pos, int) else pos[:, None] + steps


def _check_sizes(vocab_size, d_model, n_layers, positions, max_positions, dropout) -> None:
    for name, value in {"vocab_size": vocab_size, "model.d_model": d_model, "model.n_layers": n_layers}.items():
        if not isinstance(value, int) or value < 1:
            raise UsageError(f"{name}={value}: give a whole number of at least 1")
    if positions not in ("none", "learned"):
        raise UsageError(f"model.positions={positions!r}: give none or learned")
    if positions == "learned" and not max_positions:
        raise UsageError("model.positions=learned needs model.max_positions: the longest context in tokens")
    if not 0 <= dropout < 1:
        raise UsageError(f"model.dropout={dropout}: give a probability in [0, 1)")


def build_model(cfg: DictConfig, vocab_size: int, *, device: torch.device | str = "cpu") -> LM:
    """The model of a composed configuration (`attn`, `ffn`, `model`), with weights drawn from torch's global generator.

    Errors: UsageError for an unknown key or an impossible size.
    """
    check_keys("model", cfg.model)
    parts = {group: factory(group, cfg[group]) for group in GROUPS}
    settings = OmegaConf.to_container(cfg.model, resolve=True) | parts | {"vocab_size": vocab_size}
    build = get_object(settings.pop("_target_"))
    settings.pop("_partial_", None)
    # With meta tensors, torch's random fills do nothing but import its compiler, for a second.
    with _Unfilled() if torch.device(device).type == "meta" else nullcontext(), torch.device(device):
        return build(**settings)


class _Unfilled(TorchFunctionMode):
    """Leaves tensors as they are where they would be filled at random."""

    FILLS = (Tensor.normal_, Tensor.uniform_, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in self.FILLS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """No dropout inside; afterwards every module is in the mode that it was in."""
    training = [m for m in model.modules() if m.training]
    for m in training:
        m.training = False
    try:
        yield
    finally:
        for m in training:
            m.training = True
