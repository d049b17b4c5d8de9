"""Which plugins exist, and how a layer is built from one.

A plugin is a yaml file in the config group `attn` or `ffn`; its file name is the plugin's name. Other packages add
theirs through the entry point group `archlab.plugins`, whose value names a package with folders `attn/` and `ffn/`.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
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
HARNESS_ARGS = ("d_model", "layer_idx", "n_layers")
"""What the harness passes to a plugin's constructor; a yaml file may not set them."""


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


def load(overrides: Iterable[str] = ()) -> DictConfig:
    """The composed configuration of the given command-line overrides (outside a running Hydra application)."""
    register()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def factory(group: str, node: DictConfig | dict[str, Any]) -> Callable[..., Any]:
    """The layer factory that a plugin's configuration describes; unknown and reserved keys are a UsageError."""
    node = OmegaConf.create(node)
    for key in HARNESS_ARGS:
        if key in node:
            raise UsageError(f"{group}.{key} is set by the harness, so a plugin's configuration may not set it")
    check_keys(group, node)
    try:
        return instantiate(node, _convert_="all", _partial_=True)
    except InstantiationException as error:
        raise UsageError(f"{group}: {error}") from error


def check_keys(path: str, node: Any) -> None:
    """Compare the keys of every `_target_` node below `path` with its target's signature.

    Raises UsageError naming the key and the nearest parameter, before anything is built.
    """
    if not OmegaConf.is_dict(node):
        return
    if "_target_" in node:
        known = list(inspect.signature(get_object(node["_target_"])).parameters)
        for key in node:
            if not str(key).startswith("_") and key not in known:
                settable = [k for k in known if k not in HARNESS_ARGS]
                raise UsageError(f"{path} ({node['_target_']}) has no key {key!r}; {nearest(key, settable)}")
    for key in node:
        if not OmegaConf.is_missing(node, key):
            check_keys(f"{path}.{key}", node[key])


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
