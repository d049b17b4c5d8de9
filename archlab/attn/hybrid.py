"""Hybrid stacks: each layer takes its mixer from a named part. An FFN can be chosen so too.

Kimi Linear (arXiv:2510.26692) puts one global attention after three layers of KDA and ends with a global one; gpt-oss
alternates a sliding window and full attention.
"""

from collections.abc import Callable, Sequence

from archlab.errors import UsageError
from archlab.mixer import Mixer
from archlab.plugins import build_layer, nearest


def hybrid(
    d_model: int,
    *,
    layer_idx: int,
    n_layers: int,
    parts: dict[str, Callable[..., Mixer]],
    pattern: Sequence[str] | None = None,
    layers: Sequence[str] | None = None,
    last: str | None = None,
) -> Mixer:
    """The mixer of one layer of a stack.

    Args:
        parts: factories of mixers by name.
        pattern: part names repeated over the layers: a list, or a string of one-letter names.
        layers: the part of every layer, in place of a pattern.
        last: with a pattern, the part of the last layer, whatever the pattern says of it.

    Errors: UsageError for a name that is not in `parts`, for a list of another length than the stack, for neither.
    """
    stack = _stack(n_layers, pattern, layers, last)
    for name in stack:
        if name not in parts:
            raise UsageError(f"the hybrid has no part {name!r}; {nearest(name, parts)}")
    return build_layer(parts[stack[layer_idx]], d_model, layer_idx=layer_idx, n_layers=n_layers)


def _stack(n_layers: int, pattern: Sequence[str] | None, layers: Sequence[str] | None, last: str | None) -> list[str]:
    """The part name of every layer."""
    if layers:
        if len(layers) != n_layers:
            raise UsageError(f"a hybrid's key layers names {len(layers)} layers, but the model has n_layers={n_layers}")
        return list(layers)
    if not pattern:
        raise UsageError("a hybrid needs its key pattern, a list of parts to repeat, or layers, one part a layer")
    stack = [pattern[i % len(pattern)] for i in range(n_layers)]
    return stack if last is None else [*stack[:-1], last]
