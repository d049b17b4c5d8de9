"""Which plugins exist, and how a layer is built from one.

A plugin is a yaml file in the config group `attn` or `ffn`; its file name is the plugin's name. Other packages add
theirs through the entry point group `archlab.plugins`, whose value names a package with folders `attn/` and `ffn/`.
"""

import difflib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import InstantiationException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf

from archlab.errors import UsageError

GROUPS = ("attn", "ffn")
PRESETS = ("experiment", "zoo")
"""Config groups whose options set keys of all the others; a run needs none of them."""
HARNESS_ARGS = ("d_model", "layer_idx", "n_layers")
"""What the harness passes to a plugin's constructor; a yaml file may not set them."""
PLAIN = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
"""Types whose values are judged before a constructor sees them, as a user calls them."""


def conf_dir() -> Path:
    """The folder of yaml files: beside the package in a checkout, inside it in a wheel."""
    here = Path(__file__).resolve().parent
    return here / "conf" if (here / "conf").is_dir() else here.parent / "conf"


class EntryPointSearchPath(SearchPathPlugin):
    """Appends the conf packages of other distributions to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        known = {element.path for element in search_path.get_path()}
        for entry in entry_points(group="archlab.plugins"):
            if f"pkg://{entry.value}" not in known:
                search_path.append(provider=entry.name, path=f"pkg://{entry.value}")


def register() -> None:
    """Make other packages' plugins visible to Hydra. Call before `hydra.main` or `compose`."""
    Plugins.instance().register(EntryPointSearchPath)


@contextmanager
def config_loader() -> Iterator[ConfigLoader]:
    """Hydra's loader: that of the running application, or one over archlab's own configuration."""
    if GlobalHydra.instance().is_initialized():
        yield GlobalHydra.instance().config_loader()
        return
    register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        yield GlobalHydra.instance().config_loader()


def names(group: str) -> list[str]:
    """All installed options of a config group, sorted. A name that two packages define is a UsageError."""
    with config_loader() as loader:
        found: dict[str, str] = {}
        for source in loader.get_sources():
            if not source.available() or not source.is_group(group):
                continue
            for name in source.list(group, results_filter=ObjectType.CONFIG):
                if name in found:
                    raise UsageError(
                        f"{group}={name} is defined twice, by {found[name]} and by {source.full_path()}: rename one"
                    )
                found[name] = source.full_path()
        return sorted(found)


def factory(group: str, node: DictConfig | dict[str, Any]) -> Callable[..., Any]:
    """The layer factory that a plugin's configuration describes; unknown and reserved keys are a UsageError."""
    node = OmegaConf.create(node)
    check_keys(group, node, reserved=HARNESS_ARGS)
    try:
        return instantiate(node, _convert_="all", _partial_=True)
    except InstantiationException as error:
        raise UsageError(f"{group}: {' '.join(str(error).split())}") from error


def check_keys(path: str, node: Any, *, reserved: Collection[str] = ()) -> None:
    """Compare every `_target_` node at and below `path` with its target's signature: keys, and values of plain types.

    Raises UsageError naming the key and the nearest parameter, before anything is built.
    """
    if not OmegaConf.is_dict(node):
        return
    if "_target_" in node:
        _check_target(path, node, reserved)
    for key in node:
        if not OmegaConf.is_missing(node, key):
            check_keys(f"{path}.{key}", node[key], reserved=reserved)


def _check_target(path: str, node: DictConfig, reserved: Collection[str]) -> None:
    try:
        target = get_object(node["_target_"])
    except (ImportError, ValueError) as error:
        raise UsageError(f"{path}._target_={node['_target_']} cannot be loaded: {error.__cause__ or error}") from error
    known = inspect.signature(target).parameters
    hints = _hints(target)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        raise UsageError(
            f"{path} ({node['_target_']}) takes any key by **kwargs, so that a misspelt one would be lost: "
            "name its parameters"
        )
    for key in (k for k in node if not str(k).startswith("_")):
        if key in reserved:
            raise UsageError(f"{path}.{key} is set by the harness, so a plugin's configuration may not set it")
        if key not in known:
            settable = [k for k in known if k not in reserved]
            raise UsageError(f"{path} ({node['_target_']}) has no key {key!r}; {nearest(key, settable)}")
        if not OmegaConf.is_missing(node, key) and not _fits(node[key], hints.get(key, Any)):
            raise UsageError(f"{path}.{key}={node[key]!r} must be {_spelled(hints[key])}")


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(target.__init__ if isinstance(target, type) else target)
    except NameError:  # names that only a type checker imports
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the annotated type; plain types, unions of them and literals are judged."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    kinds = _kinds(hint)
    if not set(kinds) <= PLAIN.keys():
        return True
    wider = (*kinds, int) if float in kinds else kinds
    return isinstance(value, wider) and (not isinstance(value, bool) or bool in kinds)


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _spelled(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(str(x).lower() if isinstance(x, bool) else str(x) for x in get_args(hint))
    return " or ".join(PLAIN[kind] for kind in _kinds(hint))


def nearest(word: str, known: Iterable[str]) -> str:
    """'did you mean X?' where a known word is close, else the list of them."""
    known = sorted(known)
    close = difflib.get_close_matches(str(word), known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"


def build_layer(make: Callable[..., Any], d_model: int, *, layer_idx: int, n_layers: int) -> Any:
    """One layer's module from a factory, passing those of `layer_idx` and `n_layers` that its signature names."""
    wanted = inspect.signature(make).parameters
    place = {k: v for k, v in {"layer_idx": layer_idx, "n_layers": n_layers}.items() if k in wanted}
    try:
        return make(d_model, **place)
    except TypeError as error:
        target = make.func if isinstance(make, partial) else make
        raise UsageError(f"{target.__module__}.{target.__qualname__}: {error}") from error
