"""To and from the models of Transformers, which is imported only here and only when asked for.

A model that goes there computes the same function; weights keep their every bit. What stays behind belongs to training:
initialisation, the coefficients of auxiliary losses, and the experts' load within an unfinished step.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from omegaconf import OmegaConf
from torch import Tensor, nn

from archlab.errors import UsageError
from archlab.interop import settings, weights
from archlab.interop.families import FAMILIES
from archlab.interop.family import Family
from archlab.model import LM, build_model
from archlab.nn.experts import ExpertLinear, grouped_mm_takes

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
"""A vocabulary of archlab's has none, and a family's default would name some token of it."""


def from_hf(model: PreTrainedModel) -> LM:
    """A copy of a causal language model of Transformers, in the precision of its weights and in its mode.

    Errors: UsageError for a family that archlab does not know, or naming a setting that archlab cannot express.
    """
    family, flat = _family_of(model.config)
    cfg = OmegaConf.create(settings.configuration(flat, family.kinds))
    with torch.random.fork_rng(devices=[]):
        lm = build_model(cfg, flat["model.vocab_size"]).to(model.dtype)
    _fill(lm, weights.to_ours(rules(lm, model.config), tensors(model)))
    return lm.to(model.device).train(model.training)


def to_hf(lm: LM) -> PreTrainedModel:
    """A copy of the model as the first family of Transformers that can express it, in its precision and in its mode.

    Errors: UsageError naming the setting that each family of this attention and FFN cannot express.
    """
    flat = settings.describe(lm)
    refusals = []
    for family in _candidates(lm):
        try:
            model = _build(family.model_type, family.to_theirs(flat), lm.embed.weight.dtype)
        except UsageError as error:
            refusals.append(str(error))
            continue
        _fill(model, weights.to_theirs(rules(lm, model.config), tensors(lm)))
        if not all(grouped_mm_takes(m.weight) for m in lm.modules() if isinstance(m, ExpertLinear)):
            model.set_experts_implementation("eager")  # the default would refuse the weights
        return model.to(lm.embed.weight.device).train(lm.training)
    raise UsageError("; ".join(refusals))


def configuration(config: PreTrainedConfig) -> dict[str, Any]:
    """The nodes `model`, `attn` and `ffn` of a run's configuration for a model of these settings.

    Errors: as of `from_hf`.
    """
    family, flat = _family_of(config)
    return settings.configuration(flat, family.kinds)


def rules(lm: LM, config: PreTrainedConfig) -> list[weights.Weight]:
    """How the weights of a model, their gradients and moments are laid out in a Transformers model of these settings.

    Errors: as of `from_hf`.
    """
    return _family_of(config)[0].rules(lm, _settings(config))


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, a shared weight under its first name; without empty ones, and without
    the load counted within a training step."""
    saved = {name for name in model.state_dict() if not name.endswith(".load.current")}
    named = dict(model.named_parameters()) | {name: t for name, t in model.named_buffers() if name in saved}
    return {name: tensor for name, tensor in named.items() if tensor.numel()}


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Those of the family, without those that every configuration of the library has."""
    every = _transformers().PreTrainedConfig().to_dict().keys()
    return {name: value for name, value in config.to_dict().items() if name not in every}


def _family_of(config: PreTrainedConfig) -> tuple[Family, settings.Flat]:
    """The first family of that type that archlab can express, and its settings in our words."""
    families = [family for family in FAMILIES if family.model_type == config.model_type]
    if not families:
        known = ", ".join(dict.fromkeys(family.model_type for family in FAMILIES))
        raise UsageError(f"archlab does not know the model type {config.model_type!r} of Transformers; known: {known}")
    for family in families:
        with suppress(UsageError):
            return family, family.to_ours(_settings(config))
    return families[-1], families[-1].to_ours(_settings(config))


def _candidates(lm: LM) -> list[Family]:
    """The families that have the model's plugins."""
    kinds = dict.fromkeys(type(plugin) for plugin in lm.plugins())
    found = [family for family in FAMILIES if family.weights.keys() >= kinds.keys()]
    if not found:
        stack = " and ".join(settings.plugin_name(kind) for kind in kinds)
        raise UsageError(f"archlab knows no family of Transformers with layers of {stack}")
    return found


def _build(model_type: str, config: dict[str, Any], dtype: torch.dtype) -> PreTrainedModel:
    """A model of that family. Errors: UsageError where the family itself refuses the sizes."""
    transformers = _transformers()
    try:
        built = transformers.AutoConfig.for_model(model_type, **config, **NO_SPECIAL_TOKENS)
    except Exception as error:  # of several kinds, after the library's checker of sizes
        raise UsageError(f"{model_type} refuses these sizes: {' '.join(str(error).split())}") from error
    with torch.random.fork_rng(devices=[]):
        return transformers.AutoModelForCausalLM.from_config(built, dtype=dtype)


def _fill(model: nn.Module, new: dict[str, Tensor]) -> None:
    """Put tensors in the place of the model's own, in whatever precision they have."""
    own = tensors(model)
    weights.check_names(own.keys(), new.keys())
    for name, tensor in own.items():
        tensor.data = new[name]


def _transformers():
    try:
        import transformers
    except ImportError as error:
        raise UsageError("Transformers is not installed: pip install 'archlab[hf]'") from error
    return transformers
