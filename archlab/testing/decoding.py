"""Decoding with a cache is one full pass, and no sequence disturbs another."""

from __future__ import annotations

import torch
from torch import Tensor

from archlab.measure.equivalence import feed, full, poisoned_cache
from archlab.measure.held import changed, fingerprint, same
from archlab.measure.isolation import undeclared
from archlab.mixer import Cache
from archlab.testing.variant import LENGTH, VOCAB, Variant, close, lengths, partitions, tokens


def check_cached_equals_full(variant: Variant) -> None:
    """One pass = any partition of it onto a cache, at lengths around every width, in float64, unwritten slots NaN."""
    model = variant.build()
    for t in lengths(variant):
        x = tokens(2, t, seed=t)
        expected = full(model, x)
        assert expected.isfinite().all(), f"{t} tokens: the full pass is not finite"
        for pieces in partitions(t, seed=t):
            cache = poisoned_cache(model, 2, t)
            close(feed(model, x, pieces, cache), expected, f"{t} tokens fed as {pieces}")
            assert cache.pos == t, f"{t} tokens were fed, but the cache's pos is {cache.pos}"


def check_float32(variant: Variant) -> None:
    """The same in float32, token by token and in pieces."""
    model = variant.build(torch.float32)
    x = tokens(3, LENGTH)
    expected = full(model, x)
    for pieces in partitions(LENGTH):
        cached = feed(model, x, pieces, poisoned_cache(model, 3, LENGTH))
        close(cached, expected, f"float32, fed as {pieces}", tolerance=1e-4)


def check_bfloat16(variant: Variant) -> None:
    """Under bf16 autocast, decoding is no further from the float32 logits than a few times the full pass is."""
    model = variant.build(torch.float32)
    x = tokens(2, LENGTH)
    exact = full(model, x)
    with torch.autocast("cpu", torch.bfloat16):
        error = (full(model, x) - exact).abs().mean().item()
        cache = model.init_cache(2, LENGTH, dtype=torch.bfloat16)
        cached_error = (feed(model, x, [20] + [1] * (LENGTH - 20), cache) - exact).abs().mean().item()
    assert error > 0, "autocast had no effect"
    assert cached_error <= 3 * error, f"bf16 decoding is off by {cached_error:.3g}, the full pass by {error:.3g}"


def check_capacity(variant: Variant) -> None:
    """A cache larger than needed changes nothing."""
    model = variant.build()
    x = tokens(2, LENGTH)
    pieces = [11, 1, 1, 7, *[1] * (LENGTH - 20)]
    fitting = feed(model, x, pieces, poisoned_cache(model, 2, LENGTH))
    for capacity in (LENGTH + 1, 3 * LENGTH):
        roomy = feed(model, x, pieces, poisoned_cache(model, 2, capacity))
        close(roomy, fitting, f"capacity {capacity} for {LENGTH} tokens", tolerance=1e-12)


def check_ragged_rows(variant: Variant) -> None:
    """Rows of different lengths decode together as each does alone; what lies beyond a row's end does not matter."""
    model = variant.build()
    starts = [1, 9, 20, 14]
    x = tokens(len(starts), LENGTH)
    expected = full(model, x)
    rows = []
    for row, start in enumerate(starts):
        rows.append(poisoned_cache(model, 1, LENGTH, poison=50.0))
        feed(model, x[row : row + 1, :start], [start], rows[-1])
    cache = Cache.cat(rows)
    for step in range(LENGTH - max(starts)):
        at = torch.tensor(starts) + step
        logits = feed(model, x.gather(1, at[:, None]), [1], cache)[:, 0]
        close(logits, expected[torch.arange(len(starts)), at], f"ragged rows at positions {at.tolist()}")


def check_interleaved_caches(variant: Variant) -> None:
    """Two sequences decoded in turn on one model do not disturb each other."""
    model = variant.build()
    x, y = tokens(1, LENGTH, seed=1), tokens(1, LENGTH, seed=2)
    cache_x, cache_y = poisoned_cache(model, 1, LENGTH), poisoned_cache(model, 1, LENGTH)
    out_x, out_y = [], []
    for start in range(0, LENGTH, 3):
        out_x.append(feed(model, x[:, start : start + 3], [len(x[0, start : start + 3])], cache_x))
        out_y.append(feed(model, y[:, start : start + 3], [1] * len(y[0, start : start + 3]), cache_y))
    close(torch.cat(out_x, 1), full(model, x), "first of two interleaved caches")
    close(torch.cat(out_y, 1), full(model, y), "second of two interleaved caches")


def check_snapshots(variant: Variant) -> None:
    """A cache can be cloned, forked by rows and returned to at any point, and the original goes on unharmed."""
    model = variant.build()
    x, other = tokens(3, LENGTH, seed=1), tokens(3, LENGTH, seed=2)
    expected = full(model, x)
    cache = poisoned_cache(model, 3, LENGTH)
    rows = torch.tensor([2, 0, 0])
    for t in range(LENGTH):
        snapshot = cache.clone()
        fork = cache.select(rows)
        close(feed(model, x[:, t : t + 1], [1], cache), expected[:, t : t + 1], f"position {t} after earlier forks")
        if t % 5 == 2:
            close(feed(model, x[rows, t:], [LENGTH - t], fork), expected[rows, t:], f"rows {rows.tolist()} from {t}")
            held = _tensors(snapshot)
            feed(model, other[:, t:], [LENGTH - t], snapshot.clone())
            assert all(map(same, held, _tensors(snapshot))), f"a clone made at position {t} shares its tensors"
            close(feed(model, x[:, t:], [1] * (LENGTH - t), snapshot), expected[:, t:], f"restored at {t}")


def _tensors(cache: Cache) -> list[Tensor]:
    return [tensor.clone() for state in cache.states for tensor in state.tensors().values()]


def check_module_is_stateless(variant: Variant) -> None:
    """Decoding changes nothing on any module: no attribute appears, disappears or changes."""
    model = variant.build()
    x = tokens(2, LENGTH)
    before = fingerprint(model)
    feed(model, x, [20] + [1] * (LENGTH - 20), model.init_cache(2, LENGTH))
    full(model, x)
    found = changed(before, fingerprint(model))
    assert not found, f"decoding changed {found}"


def check_state_is_declared(variant: Variant) -> None:
    """All tensors that hang on a state are its fields: what is weighed, cloned and forked is all that there is."""
    model = variant.build()
    cache = model.init_cache(2, LENGTH)
    feed(model, tokens(2, LENGTH), [20] + [1] * (LENGTH - 20), cache)
    for i, state in enumerate(cache.states):
        hidden = list(undeclared(state))
        assert not hidden, f"layer {i}: {type(state).__name__} holds tensors that are none of its fields: {hidden}"


def check_causality(variant: Variant) -> None:
    """Whatever comes later, logits at earlier positions stay: each position in turn is changed, alone and with all that
    follows. This is apart from cached = full, which holds also where both leak."""
    model = variant.build()
    base = tokens(1, LENGTH)
    alone, onward = base.repeat(LENGTH, 1), base.repeat(LENGTH, 1)
    noise = tokens(LENGTH, LENGTH, seed=9)
    for p in range(LENGTH):
        alone[p, p] = (base[0, p] + 1 + noise[p, p] % (VOCAB - 1)) % VOCAB
        onward[p, p:] = noise[p, p:]
    expected = full(model, base)[0]
    for other, how in ((alone, "alone"), (onward, "with all that follows")):
        logits = full(model, other)
        for p in range(1, LENGTH):
            close(logits[p, :p], expected[:p], f"logits before position {p}, which was changed {how}")
        assert not torch.allclose(logits[0, 0], expected[0]), "logits do not depend on the token at their position"


def check_rows_are_independent(variant: Variant) -> None:
    """A sequence's logits do not depend on what else is in the batch, nor on its place there."""
    model = variant.build()
    x = tokens(4, LENGTH)
    expected = full(model, x)
    order = torch.tensor([2, 0, 3, 1])
    close(full(model, x[order]), expected[order], "permuted rows")
    replaced = torch.cat([x[:1], tokens(3, LENGTH, seed=5)])
    close(full(model, replaced)[0], expected[0], "row 0 beside other rows")
    close(full(model, x[:1]), expected[:1], "row 0 alone")
    cached = feed(model, replaced, [9] + [1] * (LENGTH - 9), poisoned_cache(model, 4, LENGTH))
    close(cached[0], expected[0], "row 0 decoded beside other rows")
