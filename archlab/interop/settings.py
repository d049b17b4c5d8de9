"""Settings of a model in archlab's words and in another library's.

In archlab's words they are flat: `model.<name>`; `attn` and `ffn`, the plugin of a layer, called as its file is; and
`<plugin>.<name>` for each parameter of a plugin's constructor. A value that differs between the layers it belongs to is
`PerLayer`.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from archlab.attn.hybrid import hybrid
from archlab.errors import UsageError
from archlab.mixer import Plugin
from archlab.model import LM
from archlab.nn.norm import NORMS
from archlab.plugins import HARNESS_ARGS

Flat = dict[str, Any]


class PerLayer(tuple):
    """One value for each layer: of the stack, or of those that a plugin holds."""


@dataclass(frozen=True)
class Setting:
    """Settings `theirs` of another library that say what `ours` say: any number on either side.

    Attributes:
        read, write: values of theirs -> values of ours, and back. What the other side has no words for is a UsageError
            of the form "name=value (what there is)".
        per_layer: ours may differ between layers.
    """

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    read: Callable[..., tuple]
    write: Callable[..., tuple]
    per_layer: bool = False

    def written(self, flat: Flat) -> dict[str, Any]:
        """Theirs for a model of these settings of ours."""
        values = [flat[name] for name in self.ours]
        for name, value in zip(self.ours, values, strict=True):
            if isinstance(value, PerLayer) and not self.per_layer:
                raise UsageError(f"{name}={list(value)} (it has one value for all layers)")
        return dict(zip(self.theirs, self.write(*values), strict=True))


def same(theirs: str, ours: str) -> Setting:
    """One value under two names."""
    return Setting((theirs,), (ours,), lambda value: (value,), lambda value: (value,))


def fixed(theirs: str, value: Any) -> Setting:
    """A setting of the other library's that has one value in archlab."""
    return Setting((theirs,), (), lambda given: _demand(theirs, given, value, "archlab"), lambda: (value,))


def only(ours: str, value: Any) -> Setting:
    """A setting of archlab's that has one value in the other library."""
    return Setting((), (ours,), lambda: (value,), lambda given: _demand(ours, given, value, "it"))


def without_effect(ours: str, value: Any) -> Setting:
    """A setting of archlab's that does not change what such a model computes; `value` is that of one from there."""
    return Setting((), (ours,), lambda: (value,), lambda _: (), per_layer=True)


def _demand(name: str, given: Any, value: Any, side: str) -> tuple:
    if given != value:
        raise UsageError(f"{name}={given!r} ({side} has only {value!r})")
    return ()


def plugin_name(kind: type) -> str:
    """What a plugin's class is called here: as its file."""
    return kind.__module__.rsplit(".", 1)[-1]


def describe(lm: LM) -> Flat:
    """The settings of a model, read off its modules. Those of initialisation alone are not among them."""
    flat = {
        "model.vocab_size": lm.vocab_size,
        "model.d_model": lm.d_model,
        "model.n_layers": len(lm.blocks),
        "model.norm": next(name for name, kind in NORMS.items() if type(lm.norm) is kind),
        "model.norm_eps": lm.norm.eps,
        "model.positions": "none" if lm.positions is None else "learned",
        "model.tied": lm.head.weight is lm.embed.weight,
        "model.dropout": lm.dropout.p if lm.training else 0.0,  # in evaluation it does nothing
    }
    for slot, plugins in (("attn", [b.mixer for b in lm.blocks]), ("ffn", [b.ffn for b in lm.blocks])):
        flat[slot] = collapse([plugin_name(type(p)) for p in plugins])
        for kind in dict.fromkeys(type(p) for p in plugins):
            layers = [plugin_settings(p) for p in plugins if type(p) is kind]
            flat |= {f"{plugin_name(kind)}.{name}": collapse([one[name] for one in layers]) for name in layers[0]}
    return flat


def plugin_settings(plugin: Plugin) -> dict[str, Any]:
    """A plugin's constructor parameters with their values. Errors: UsageError for one that it does not keep."""
    names = [n for n in inspect.signature(type(plugin)).parameters if n not in HARNESS_ARGS]
    for name in names:
        if not hasattr(plugin, name):
            raise UsageError(f"{type(plugin).__name__} does not keep its setting {name!r}: set self.{name}")
    return {name: getattr(plugin, name) for name in names}


def collapse(values: Sequence[Any]) -> Any:
    """The value that all layers share, or all of them."""
    return values[0] if all(value == values[0] for value in values) else PerLayer(values)


def expand(value: Any, n_layers: int) -> Sequence[Any]:
    """The value of every layer."""
    return value if isinstance(value, PerLayer) else [value] * n_layers


def configuration(flat: Flat, kinds: Mapping[str, type]) -> dict[str, Any]:
    """The nodes `model`, `attn` and `ffn` of a run's configuration. `kinds`: the plugins' classes by name."""
    n_layers = flat["model.n_layers"]
    model = {name: value for key, value in flat.items() for group, _, name in [key.partition(".")] if group == "model"}
    return {"model": {"_target_": _path(LM), "_partial_": True} | model} | {
        slot: _stack(_layers(flat, slot, n_layers, kinds)) for slot in ("attn", "ffn")
    }


def _layers(flat: Flat, slot: str, n_layers: int, kinds: Mapping[str, type]) -> list[dict[str, Any]]:
    """The configuration of every layer's plugin."""
    names = expand(flat[slot], n_layers)
    nodes, seen = [], dict.fromkeys(names, 0)
    for name in names:
        settings = {key.removeprefix(f"{name}."): v for key, v in flat.items() if key.startswith(f"{name}.")}
        settings = {key: v[seen[name]] if isinstance(v, PerLayer) else v for key, v in settings.items()}
        nodes.append({"_target_": _path(kinds[name]), "_partial_": True} | settings)
        seen[name] += 1
    return nodes


def _stack(nodes: list[dict[str, Any]]) -> dict[str, Any]:
    """One node for all layers: theirs if they are equal, else a hybrid of the different ones."""
    parts: dict[str, dict[str, Any]] = {}
    for node in nodes:
        if node not in parts.values():
            parts[f"part_{len(parts)}"] = node
    if len(parts) == 1:
        return nodes[0]
    layers = [next(name for name, part in parts.items() if part == node) for node in nodes]
    return {"_target_": _path(hybrid), "_partial_": True, "parts": parts, "layers": layers}


def _path(target: Any) -> str:
    return f"{target.__module__}.{target.__qualname__}"
