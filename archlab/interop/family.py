"""A family of models of another library: what its settings and its weights are called here."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

from archlab.errors import UsageError
from archlab.interop.settings import Flat, Setting, plugin_name
from archlab.interop.weights import Weight, same
from archlab.model import LM

Weights = Callable[[Any, Mapping[str, Any]], Iterable[Weight]]
"""A plugin and the other library's settings -> its weights: ours named from the plugin, theirs from the layer."""


@dataclass(frozen=True)
class Family:
    """Two tables.

    Attributes:
        model_type: what Transformers calls it.
        settings: what says the same on both sides.
        weights: the plugins of its layers, and how their weights are laid out there.
        unread: settings of theirs that change nothing of what the model computes.
        spelled_out: settings that only the files of older models have: what they must say, where they say anything.
        training: settings of ours that act on training alone, which an exported model leaves behind; the values are
            those of a model that comes from there.
    """

    model_type: str
    settings: tuple[Setting, ...]
    weights: Mapping[type[nn.Module], Weights]
    unread: tuple[str, ...] = ()
    spelled_out: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def kinds(self) -> dict[str, type[nn.Module]]:
        """Its plugins' classes by name."""
        return {plugin_name(kind): kind for kind in self.weights}

    def to_ours(self, config: Mapping[str, Any]) -> Flat:
        """Their settings in our words. Errors: UsageError naming one that archlab cannot express."""
        flat = dict(self.training)
        known = {name for setting in self.settings for name in setting.theirs}.union(self.unread)
        known |= {name for name, value in self.spelled_out.items() if config.get(name) == value}
        try:
            for name in sorted(config.keys() - known):
                raise UsageError(f"{name}={config[name]!r} (which it does not know)")
            for setting in self.settings:
                values = setting.read(*(config.get(name) for name in setting.theirs))
                flat.update(zip(setting.ours, values, strict=True))
        except UsageError as error:
            raise UsageError(f"archlab cannot express {self.model_type}'s {error}") from error
        return flat

    def to_theirs(self, flat: Flat) -> dict[str, Any]:
        """Our settings in their words. Errors: UsageError naming one that the family cannot express."""
        config: dict[str, Any] = {}
        known = {name for setting in self.settings for name in setting.ours} | self.training.keys()
        try:
            for name in sorted(flat.keys() - known):
                raise UsageError(f"{name}={flat[name]!r} (which it does not know)")
            for setting in self.settings:
                if flat.keys() >= set(setting.ours):  # else it is of a plugin that no layer has
                    config |= setting.written(flat)
        except UsageError as error:
            raise UsageError(f"{self.model_type} cannot express {error}") from error
        return config

    def rules(self, lm: LM, config: Mapping[str, Any]) -> list[Weight]:
        """All weights of a model, given the other library's settings."""
        rules = [same("embed.weight", "model.embed_tokens.weight"), same("norm.weight", "model.norm.weight")]
        if lm.head.weight is not lm.embed.weight:
            rules.append(same("head.weight", "lm_head.weight"))
        for i, block in enumerate(lm.blocks):
            ours, theirs = f"blocks.{i}.", f"model.layers.{i}."
            rules.append(same(f"{ours}mixer_norm.weight", f"{theirs}input_layernorm.weight"))
            rules.append(same(f"{ours}ffn_norm.weight", f"{theirs}post_attention_layernorm.weight"))
            for slot, plugin in (("mixer.", block.mixer), ("ffn.", block.ffn)):
                rules += [w.within(ours + slot, theirs) for w in self.weights[type(plugin)](plugin, config)]
        return rules
