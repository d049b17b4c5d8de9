"""Lists of theirs that say what stands in each layer."""

from collections.abc import Mapping, Sequence

from archlab.errors import UsageError
from archlab.interop.settings import PerLayer, Setting, collapse, expand

DENSE, SPARSE = "dense", "sparse"


def mixers(names: Mapping[str, str], *, needed: str | None = None) -> Setting:
    """`layer_types` of these names, each that of a plugin of ours; `needed`: one that a layer must have."""

    def read(n_layers: int, layer_types: Sequence[str]) -> tuple:
        for name in layer_types:
            if name not in names:
                raise UsageError(f"layer_types={list(layer_types)} (it has only {' and '.join(names)})")
        return n_layers, collapse([names[name] for name in layer_types])

    def write(n_layers: int, attn: str | PerLayer) -> tuple:
        if needed is not None and needed not in expand(attn, n_layers):
            raise UsageError(f"{attn=} (it needs a layer of {needed})")
        theirs = {ours: name for name, ours in names.items()}
        return n_layers, [theirs[name] for name in expand(attn, n_layers)]

    return Setting(("num_hidden_layers", "layer_types"), ("model.n_layers", "attn"), read, write, per_layer=True)


def mlp_types(n_layers: int, n_dense: int) -> list[str]:
    """Dense first layers, then layers of experts."""
    return [DENSE if i < n_dense else SPARSE for i in range(n_layers)]


def _read_dense(n_layers: int, layer_types: Sequence[str]) -> tuple:
    n_dense = next((i for i, name in enumerate(layer_types) if name != DENSE), n_layers)
    if list(layer_types) != mlp_types(n_layers, n_dense):
        raise UsageError(f"mlp_layer_types={list(layer_types)} (it has only dense layers, then sparse ones)")
    return n_layers, n_dense


FIRST_DENSE = Setting(
    ("num_hidden_layers", "mlp_layer_types"),
    ("model.n_layers", "moe_deepseek.first_dense"),
    _read_dense,
    lambda n_layers, n_dense: (n_layers, mlp_types(n_layers, n_dense)),
)
