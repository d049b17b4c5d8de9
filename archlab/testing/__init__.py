"""The contract suite: what every plugin must satisfy, as functions that any package can run on its own plugin.

    from archlab.testing import CHECKS, Variant
    for check in CHECKS:
        check(Variant(attn="mine", ffn="swiglu"))

or `python -m archlab.testing attn=mine`. A check builds small models of the variant and raises AssertionError where the
contract is broken. Sizes are shrunk by parameter name (`SMALL`), so that a sequence of 37 tokens crosses every block,
window, chunk and convolution.
"""

from archlab.testing import accounting, decoding, training
from archlab.testing.variant import LENGTH, SMALL, VOCAB, WIDTHS, Variant, close, partitions, tokens

__all__ = ["CHECKS", "LENGTH", "SMALL", "VOCAB", "WIDTHS", "Variant", "close", "partitions", "tokens"]

CHECKS = [
    decoding.check_cached_equals_full,
    decoding.check_float32,
    decoding.check_bfloat16,
    decoding.check_capacity,
    decoding.check_ragged_rows,
    decoding.check_interleaved_caches,
    decoding.check_snapshots,
    decoding.check_module_is_stateless,
    decoding.check_state_is_declared,
    decoding.check_causality,
    decoding.check_rows_are_independent,
    training.check_gradients,
    training.check_gradient_values,
    training.check_auxiliary_losses,
    training.check_training_forward,
    training.check_after_step,
    training.check_extremes,
    accounting.check_weighed_bytes,
    accounting.check_parameter_parts,
]
"""Every check of the contract, each a function of a `Variant`."""
