"""The contract suite: what every plugin must satisfy, as functions that any package can run on its own plugin.

    from archlab.testing import CHECKS, Variant
    for check in CHECKS:
        check(Variant(attn="mine", ffn="swiglu"))

A check builds small models of the variant and raises AssertionError where the contract is broken. Sizes are shrunk by
parameter name (`SMALL`), so that a sequence of 37 tokens crosses every block, window, chunk and convolution.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from archlab.account import static
from archlab.equivalence import feed, full, poisoned_cache
from archlab.mixer import Cache
from archlab.model import LM, build_model
from archlab.nn.experts import ExpertLinear
from archlab.plugins import load

VOCAB = 64
D_MODEL = 32
LENGTH = 37
"""Prime, and longer than every shrunk width."""

WIDTHS = {"block_size": 4, "window": 8, "chunk_size": 8, "conv_size": 3}
"""Shrunk widths in tokens: lengths just below, at and above each are tested."""

SMALL = WIDTHS | {
    "n_heads": 4,
    "head_dim": 8,
    "top_k_blocks": 3,
    "d_index": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "rope_dim": 4,
    "d_ff": 48,
    "d_expert": 24,
}
"""Sizes by parameter name, wherever a plugin's configuration sets one to a larger number."""


@dataclass(frozen=True)
class Variant:
    """One cell of the comparison: an attention and an FFN by name, with command-line overrides of their settings."""

    attn: str = "mha"
    ffn: str = "swiglu"
    overrides: tuple[str, ...] = ()

    def config(self) -> DictConfig:
        cfg = load([f"attn={self.attn}", f"ffn={self.ffn}", f"model.d_model={D_MODEL}"])
        for group in ("attn", "ffn"):
            shrink(cfg[group])
        cfg.model.n_layers = len(cfg.attn.pattern) if cfg.attn.get("pattern") else 2
        cfg.merge_with_dotlist(list(self.overrides))
        return cfg

    def build(self, dtype: torch.dtype = torch.float64, *, seed: int = 0) -> LM:
        """A small model in eval mode with weights of a trained model's scale: small initial weights hide faults."""
        torch.manual_seed(seed)
        model = build_model(self.config(), VOCAB)
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.Embedding):
                    module.weight.normal_()
                elif isinstance(module, nn.Linear | ExpertLinear):
                    module.weight.normal_(std=module.weight.shape[-1 if isinstance(module, nn.Linear) else -2] ** -0.5)
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        return model.to(dtype).eval()


def shrink(node: DictConfig) -> None:
    """Set the sizes of a plugin's configuration, nested ones among them, to those of `SMALL` where they are larger."""
    for key, value in node.items():
        if OmegaConf.is_dict(value):
            shrink(value)
        elif isinstance(value, int) and key in SMALL:
            node[key] = min(value, SMALL[key])


def lengths(variant: Variant) -> list[int]:
    """Sequence lengths below, at and above each width that the variant's configuration names, and `LENGTH`."""
    widths = {value for key, value in _leaves(variant.config()) if key in WIDTHS and isinstance(value, int)}
    around = {w + d for w in widths for d in (-1, 0, 1)} | {2 * w + 1 for w in widths}
    return sorted({t for t in around if t > 0} | {1, LENGTH})


def _leaves(node: Any) -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if OmegaConf.is_dict(value):
            yield from _leaves(value)
        else:
            yield key, value


def partitions(length: int, *, seed: int = 0) -> list[list[int]]:
    """Ways to feed `length` tokens: at once, one by one, one in front, one behind, and random pieces."""
    rng = random.Random(seed)
    ways = [[length], [1] * length]
    if length > 1:
        ways += [[1, length - 1], [length - 1, 1]]
    for n_cuts in (1, 2, 5):
        cuts = sorted(rng.sample(range(1, length), min(n_cuts, length - 1)))
        ways.append([b - a for a, b in itertools.pairwise([0, *cuts, length])])
    return ways


def tokens(batch: int, length: int, *, seed: int = 0) -> Tensor:
    """Random token ids (batch length)."""
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Tensor, what: str, *, tolerance: float = 1e-10) -> None:
    """Largest difference within `tolerance` of the expected values' scale; NaN is never close."""
    scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
    error = (actual - expected).abs().max().item() if expected.numel() else 0.0
    assert error <= tolerance * scale, f"{what}: off by {error:.3g} at a scale of {scale:.3g} (tolerance {tolerance:g})"


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
            assert all(map(_same, held, _tensors(snapshot))), f"a clone made at position {t} shares its tensors"
            close(feed(model, x[:, t:], [1] * (LENGTH - t), snapshot), expected[:, t:], f"restored at {t}")


def _tensors(cache: Cache) -> list[Tensor]:
    return [tensor.clone() for state in cache.states for tensor in state.tensors().values()]


def check_module_is_stateless(variant: Variant) -> None:
    """Decoding changes nothing on any module: no attribute appears, disappears or changes."""
    model = variant.build()
    x = tokens(2, LENGTH)
    before = _fingerprint(model)
    feed(model, x, [20] + [1] * (LENGTH - 20), model.init_cache(2, LENGTH))
    full(model, x)
    after = _fingerprint(model)
    assert before.keys() == after.keys(), f"attributes appeared or vanished: {sorted(before.keys() ^ after.keys())}"
    changed = [name for name in before if not _same(before[name], after[name])]
    assert not changed, f"decoding changed {changed}"


def _fingerprint(model: LM) -> dict[str, Any]:
    found = {}
    for path, module in model.named_modules():
        values = {k: v for k, v in vars(module).items() if not k.startswith("_")}
        values |= {k: v for k, v in module._buffers.items() if v is not None} | dict(module._parameters)
        for name, value in values.items():
            found[f"{path}.{name}"] = value.detach().clone() if isinstance(value, Tensor) else repr(value)
    return found


def _same(a: Any, b: Any) -> bool:
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) if isinstance(a, Tensor) else a == b


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
    for changed, how in ((alone, "alone"), (onward, "with all that follows")):
        logits = full(model, changed)
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


def check_gradients(variant: Variant) -> None:
    """Every parameter learns from the loss that should train it. A plugin's `aux_only` names the parameters that learn
    from one auxiliary loss alone; the language-model loss never reaches those, nor that auxiliary loss any other."""
    model = variant.build().train()
    aux_only = {
        f"{path}.{name}": aux
        for path, module in model.named_modules()
        for prefix, aux in getattr(module, "aux_only", {}).items()
        for name, _ in module.named_parameters()
        if name.split(".")[0] == prefix
    }
    for progress in (0.0, 1.0):
        model.after_step(progress)
        x = tokens(3, LENGTH + 1)
        logits, aux = model(x[:, :-1])
        _expect_gradients(model, cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()), "lm", aux_only)
        for name in set(aux_only.values()):
            assert name in aux, f"parameters wait for the auxiliary loss {name!r}, but there is only {sorted(aux)}"
            _expect_gradients(model, aux[name], name, aux_only)


def _expect_gradients(model: LM, loss: Tensor, name: str, aux_only: dict[str, str]) -> None:
    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, retain_graph=True)
    for (path, _), grad in zip(parameters.items(), grads, strict=True):
        reached = grad is not None and bool(grad.abs().max() > 0)
        assert grad is None or grad.isfinite().all(), f"the gradient of {path} from the {name} loss is not finite"
        assert reached == (aux_only.get(path, "lm") == name), (
            f"{path} gets {'a' if reached else 'no'} gradient from the {name} loss"
        )


def check_gradient_values(variant: Variant) -> None:
    """The gradient of the language-model loss is that of the loss: along a random direction of each parameter it is the
    central difference. Chosen blocks and experts are the same on both sides of so small a step."""
    model = variant.build().train()
    model.after_step(1.0)
    x = tokens(2, LENGTH + 1)

    def loss() -> Tensor:
        return cross_entropy(model(x[:, :-1])[0].flatten(0, 1), x[:, 1:].flatten())

    parameters = dict(model.named_parameters())
    grads = torch.autograd.grad(loss(), list(parameters.values()), allow_unused=True)
    for (name, parameter), grad in zip(parameters.items(), grads, strict=True):
        direction, step = torch.randn_like(parameter), 1e-7
        with torch.no_grad():
            ahead, behind = (_shifted(loss, parameter, sign * step * direction) for sign in (1, -1))
        slope = 0.0 if grad is None else (grad * direction).sum().item()
        difference = (ahead - behind) / (2 * step)
        scale = 1e-3 if grad is None else 1e-3 + grad.norm().item()
        assert abs(slope - difference) <= 1e-5 * scale, f"{name}: gradient {slope:.8g}, difference {difference:.8g}"


def _shifted(loss: Callable[[], Tensor], parameter: nn.Parameter, shift: Tensor) -> float:
    """The loss with a parameter moved by `shift`; it is put back."""
    kept = parameter.clone()
    parameter.add_(shift)
    value = loss().item()
    parameter.copy_(kept)
    return value


def check_auxiliary_losses(variant: Variant) -> None:
    """Auxiliary losses are finite scalars with a gradient in training, and none are computed in evaluation."""
    model = variant.build()
    x = tokens(2, LENGTH)
    assert model(x)[1] == {}, "an auxiliary loss was computed in evaluation mode"
    for name, value in model.train()(x)[1].items():
        assert value.dim() == 0, f"{name} is not a scalar"
        assert value.isfinite(), f"{name} is {value.item()}"
        assert value.requires_grad, f"{name} trains nothing"


def check_training_forward(variant: Variant) -> None:
    """Training and evaluation compute the same logits, whichever schedule the plugin has reached by the end."""
    model = variant.build()
    x = tokens(2, LENGTH)
    model.after_step(1.0)
    expected = full(model, x)
    close(model.train()(x)[0].detach(), expected, "training forward")


def check_after_step(variant: Variant) -> None:
    """`after_step` without a training forward since the last one changes nothing but what progress decides."""
    model = variant.build().train()
    model(tokens(2, LENGTH))
    model.after_step(0.5)
    before = _fingerprint(model)
    model.after_step(0.5)
    changed = [name for name, value in _fingerprint(model).items() if not _same(value, before[name])]
    assert not changed, f"a second after_step changed {changed}"
    assert all(isinstance(v, float) for v in model.metrics().values()), "metrics must be floats"


def check_extremes(variant: Variant) -> None:
    """Large weights, and gates at strong decay, leave outputs and gradients finite in float32 and bf16."""
    for dtype, gain in ((torch.float32, 1.0), (torch.float32, 30.0), (torch.bfloat16, 30.0)):
        model = variant.build(torch.float32).train()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("dt_bias"):
                    parameter.add_(gain)  # a log-decay of -gain * exp(A_log) a token
                elif "mixer." in name and parameter.dim() == 2:
                    parameter.mul_(gain**0.5)
        x = tokens(2, 3 * LENGTH + 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            logits, aux = model(x[:, :-1])
            loss = cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten()) + sum(aux.values())
        loss.backward()
        assert logits.isfinite().all(), f"logits at gain {gain:g} in {dtype} are not finite"
        bad = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
        assert not bad, f"gradients at gain {gain:g} in {dtype} are not finite: {bad}"


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


CHECKS = [
    check_cached_equals_full,
    check_float32,
    check_bfloat16,
    check_capacity,
    check_ragged_rows,
    check_interleaved_caches,
    check_snapshots,
    check_module_is_stateless,
    check_causality,
    check_rows_are_independent,
    check_gradients,
    check_gradient_values,
    check_auxiliary_losses,
    check_training_forward,
    check_after_step,
    check_extremes,
    check_weighed_bytes,
    check_parameter_parts,
]
"""Every check of the contract, each a function of a `Variant`."""
