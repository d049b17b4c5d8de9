"""What is counted is what is there."""

from __future__ import annotations

import torch

from archlab.measure.account import static
from archlab.measure.equivalence import feed
from archlab.testing.variant import LENGTH, Variant, tokens


def check_weighed_bytes(variant: Variant) -> None:
    """The bytes on record are those of a live cache after a prefill, and decoding does not add to them."""
    model = variant.build(torch.float32)
    for context in (1, 5, LENGTH, 200):
        cache = model.init_cache(1, context)
        feed(model, tokens(1, context), [context], cache)
        live = sum(t.untyped_storage().nbytes() for state in cache.states for t in state.tensors().values())
        record = static(model, train_context=LENGTH, contexts=(context,), dtype=torch.float32)
        stored, read = record[f"cache/bytes_at/{context}"], record[f"cache/read_bytes_at/{context}"]
        assert stored == cache.nbytes == live, (
            f"{stored} B on record, {cache.nbytes} B named, {live} B live at {context}"
        )
        assert 0 < read <= stored, f"{read} B read of {stored} B stored at {context}"
    cache = model.init_cache(1, LENGTH)
    empty = cache.nbytes
    feed(model, tokens(1, LENGTH), [1] * LENGTH, cache)
    assert cache.nbytes == empty, f"the cache grew from {empty} to {cache.nbytes} bytes while decoding"


def check_parameter_parts(variant: Variant) -> None:
    """Counted parameters are those of the live model, and their parts sum to the whole."""
    model = variant.build(torch.float32)
    record = static(model, train_context=LENGTH, contexts=(LENGTH,), dtype=torch.float32)
    total = sum(p.numel() for p in model.parameters())
    assert record["params/total"] == total, f"{record['params/total']} parameters on record, {total} live"
    mixers = sum(p.numel() for b in model.blocks for p in b.mixer.parameters())
    assert record["params/attention"] == mixers, f"{record['params/attention']} on record, {mixers} in the mixers"
    assert 0 < record["params/active"] <= total, f"{record['params/active']} active of {total}"
