"""What models with the gated delta rule share.

Shapes: c channels of the convolution, w its width in tokens.
"""

from archlab.errors import UsageError
from archlab.interop.families.common import norm_eps
from archlab.interop.settings import Setting, only, without_effect
from archlab.interop.weights import Weight


def _write_conv_size(conv_size: int) -> tuple:
    if conv_size < 1:
        raise UsageError(f"linear.conv_size={conv_size} (it always has a convolution)")
    return (conv_size,)


DELTA = (
    Setting(("linear_conv_kernel_dim",), ("linear.conv_size",), lambda size: (size,), _write_conv_size),
    norm_eps("linear"),
    only("linear.feature_map", "l2"),
    only("linear.rope_dim", 0),
    only("linear.delta", True),
    only("linear.beta_max", 1.0),
    only("linear.decay_gate", "softplus"),
    only("linear.norm", "rms"),
    without_effect("linear.rope_theta", 10_000.0),
    without_effect("linear.decay_floor", -5.0),
    without_effect("linear.chunk_size", 32),
)


def conv_weight(theirs: str) -> Weight:
    """(w c), there (c 1 w)."""
    return Weight(
        "conv.weight",
        (theirs,),
        lambda tensors: [tensors[0].mT[:, None]],
        lambda tensors: [tensors[0][:, 0].mT],
    )
