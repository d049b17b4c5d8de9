"""The contract between a plugin and the harness. This is the one file that the author of a plugin reads.

A plugin is one Python file (a `Mixer` for attention, an `FFN` for the feed-forward slot) and one yaml file in
`conf/attn/` or `conf/ffn/` that names its class and its hyper-parameters.

    class Mine(Mixer):
        def __init__(self, d_model, *, n_heads, layer_idx): ...

* The harness passes `d_model`, and `layer_idx` and `n_layers` to a constructor that names them; everything else comes
  from the yaml file. Parameters are explicit: with `**kwargs` a misspelt key would be silently ignored.
* A module keeps its parameters under their names, defaults filled in: an export reads them there.
* The linear layer that writes into the residual stream is called `out`: the depth-scaled initialisation finds it so.
* Nothing that belongs to a sequence is stored on the module: it lives in the `State` that the caller passes.

Shapes: b = batch, t = new tokens of this call, d = d_model.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

Aux = dict[str, Tensor]
"""Auxiliary training losses: {name: scalar}, each already multiplied by its coefficient."""

Position = int | Tensor
"""Absolute position of the first new token: an int, or a LongTensor (b,) when the rows stand at different lengths."""


@dataclass
class State:
    """What one layer remembers of a batch of sequences. A plugin declares a subclass with its tensors as fields.

    Axis 0 of every tensor is the batch; from that alone follow snapshot, fork and re-batching for every plugin.
    """

    def tensors(self) -> dict[str, Tensor]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def views(self) -> dict[str, Tensor]:
        """What a person would look for in it, by the names of the literature: by default the tensors as they are."""
        return self.tensors()

    @property
    def nbytes(self) -> int:
        """Bytes held by this state's tensors, as allocated."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def clone(self) -> State:
        return type(self)(**{name: t.clone() for name, t in self.tensors().items()})

    def select(self, rows: Tensor) -> State:
        """A new state of the given batch rows (LongTensor), in that order; a row may be taken more than once."""
        return type(self)(**{name: t.index_select(0, rows) for name, t in self.tensors().items()})

    @classmethod
    def cat(cls, states: list[State]) -> State:
        """One state of all rows of several, in order. Their capacities must be equal."""
        parts = [s.tensors() for s in states]
        return cls(**{name: torch.cat([p[name] for p in parts]) for name in parts[0]})


@dataclass
class Cache:
    """The states of all layers, and where the sequences stand. It belongs to the caller; `LM.forward` advances `pos`.

    Attributes:
        states: one `State` a layer.
        pos: tokens seen so far: an int, or a LongTensor (b,) when rows differ.
        max_len: the capacity in tokens.
    """

    states: list[State]
    pos: Position
    max_len: int

    @property
    def nbytes(self) -> int:
        """Bytes held by the tensors of all layers, as allocated."""
        return sum(s.nbytes for s in self.states)

    def clone(self) -> Cache:
        pos = self.pos.clone() if isinstance(self.pos, Tensor) else self.pos
        return Cache([s.clone() for s in self.states], pos, self.max_len)

    def select(self, rows: Tensor) -> Cache:
        """A new cache of the given batch rows (LongTensor), in that order."""
        pos = self.pos.index_select(0, rows) if isinstance(self.pos, Tensor) else self.pos
        return Cache([s.select(rows) for s in self.states], pos, self.max_len)

    @classmethod
    def cat(cls, caches: list[Cache]) -> Cache:
        """One ragged cache of the rows of several, of equal `max_len`: how rows of different lengths are batched."""
        if len({c.max_len for c in caches}) != 1:
            raise ValueError(f"caches of unequal max_len {sorted({c.max_len for c in caches})} cannot be joined")
        states = [type(layer[0]).cat(list(layer)) for layer in zip(*(c.states for c in caches), strict=True)]
        return cls(states, torch.cat([c._row_pos() for c in caches]), caches[0].max_len)

    def _row_pos(self) -> Tensor:
        if isinstance(self.pos, Tensor):
            return self.pos
        like = next(iter(self.states[0].tensors().values()))
        return torch.full((like.shape[0],), self.pos, dtype=torch.long, device=like.device)


class Plugin(nn.Module):
    """What attention and FFN plugins have in common: all of it is optional.

    Attributes:
        aux_only: {child module or parameter: auxiliary loss}: what learns from that loss alone. The language-model loss
            does not reach it, and that auxiliary loss reaches nothing else.
    """

    aux_only: ClassVar[dict[str, str]] = {}

    def after_step(self, progress: float) -> None:
        """Called after every optimizer step with the share of training done, in [0, 1], and once more before the first
        step and after a checkpoint was loaded: schedules and bias updates live here. A call without a training forward
        since the last one must change nothing but what `progress` alone decides."""

    def matrices(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """The matrices of the literature that a parameter of that name holds, as views of `tensor`: the parameter, or
        something of its shape, like an optimizer's moment. By default it holds itself."""
        return {name: tensor}

    def metrics(self) -> dict[str, float]:
        """What is worth plotting after a training step (router load, block recall). Names carry their unit."""
        return {}


class Mixer(Plugin):
    """A token mixer: everything that may stand in the attention slot of a block."""

    def init_state(self, batch: int, max_len: int, *, device: torch.device, dtype: torch.dtype) -> State:
        """Room for `max_len` tokens of `batch` sequences, zeroed: what no token has written must not matter, but in a
        ragged batch a masked slot is still multiplied by a weight of 0.

        `dtype` is that of cached activations; a plugin may keep an accumulator wider.
        """
        raise NotImplementedError(f"{type(self).__name__} must define init_state")

    def forward(self, x: Tensor, *, pos: Position = 0, state: State | None = None) -> tuple[Tensor, Aux]:
        """Mix `x` (b t d) causally -> (b t d), and auxiliary losses.

        Without a state: one full causal pass from position 0. With a state: t >= 1 new tokens at absolute position
        `pos`, written into the state in place, each attending to all that came before. `pos` is a LongTensor (b,) when
        rows stand at different lengths; that must work at least for t = 1.
        """
        raise NotImplementedError(f"{type(self).__name__} must define forward")

    def mix_flops(self, context: int) -> int:
        """FLOPs (2 per multiply-add) of one token at that context length in a full forward pass, beside the
        `nn.Linear` layers: those are counted from their weights."""
        raise NotImplementedError(f"{type(self).__name__} must define mix_flops")

    def decode_flops(self, context: int) -> int:
        """Like `mix_flops`, of one decode step with a state, where its formulation differs."""
        return self.mix_flops(context)

    def read_bytes(self, context: int, itemsize: int) -> int:
        """Bytes of state that one decode step of one sequence reads at that context; by default all that is stored.

        `itemsize` is the width in bytes of cached activations.
        """
        dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[itemsize]
        return self.init_state(1, context, device=torch.device("meta"), dtype=dtype).nbytes


class FFN(Plugin):
    """A position-wise feed-forward network. Its output at a token depends on that token alone, or cached decoding could
    not equal the full pass: a mixture of experts must be dropless."""

    def forward(self, x: Tensor) -> tuple[Tensor, Aux]:
        """(b t d) -> (b t d), and auxiliary losses."""
        raise NotImplementedError(f"{type(self).__name__} must define forward")
