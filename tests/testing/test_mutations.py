"""The contract suite can fail: each planted fault below must turn the named check red.

A fault is one replacement in one file. archlab is imported anew with the changed source, the check runs on a variant
that the fault should harm, and an AssertionError is demanded: a crash would prove nothing.
"""

import importlib.abc
import importlib.util
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

import archlab

PACKAGE = Path(archlab.__file__).parent


@dataclass(frozen=True)
class Fault:
    """What goes wrong, where it is planted, and the check and variant that must notice."""

    name: str
    file: str
    old: str
    new: str
    check: str
    attn: str = "gqa"
    ffn: str = "swiglu"


FAULTS = [
    Fault(
        "decode forgets the position of its tokens",
        "nn/rope.py", "[pos : pos + t, None]", "[0:t, None]",
        "cached_equals_full",
    ),
    Fault(
        "ragged rows all rotate as if at position 0",
        "nn/rope.py", "positions = pos[:, None] + torch", "positions = 0 * pos[:, None] + torch",
        "ragged_rows",
    ),
    Fault(
        "query heads tiled over KV heads, not interleaved",
        "nn/attention.py", ".view(b, h, t, v.shape[-1])", ".unflatten(2, (h // g, t)).transpose(1, 2).reshape(b, h, t, v.shape[-1])",
        "cached_equals_full",
    ),
    Fault(
        "causal mask aligned to the first key, not the last",
        "nn/attention.py", "query = query + pos if isinstance(pos, int) else", "query = query if isinstance(pos, int) else",
        "cached_equals_full",
    ),
    Fault(
        "no causal mask in the full pass",
        "nn/attention.py", "is_causal=True", "is_causal=False",
        "causality",
    ),
    Fault(
        "a ragged row's tokens written one slot off",
        "nn/attention.py", "slots[rows, :, pos[:, None] + torch", "slots[rows, :, pos[:, None] - 1 + torch",
        "ragged_rows",
    ),
    Fault(
        "the whole capacity is read under a mask, unwritten slots with it",
        "nn/attention.py", "return slots[:, :, : pos + t]", "return slots",
        "capacity",
    ),
    Fault(
        "window one token too wide",
        "nn/attention.py", "(age < window)", "(age <= window)",
        "cached_equals_full", attn="swa",
    ),
    Fault(
        "ring written one slot off",
        "attn/gqa.py", "append(state.kv, kv, pos % n)", "append(state.kv, kv, (pos + 1) % n)",
        "cached_equals_full", attn="swa",
    ),
    Fault(
        "tokens of a long piece overwritten before they are seen",
        "attn/gqa.py", "torch.cat([old, kv.to(old.dtype)], dim=2), n_old)", "kv, 0)",
        "cached_equals_full", attn="swa",
    ),
    Fault(
        "keys kept on the module",
        "attn/gqa.py", "q, kv = self.project(x, pos, None if state is None else state.conv)", "q, kv = self.project(x, pos, None if state is None else state.conv)\n        self.last = kv",
        "module_is_stateless",
    ),
    Fault(
        "the cache stays where it was",
        "model.py", "cache.pos = pos + tokens.shape[1]", "cache.pos = pos",
        "cached_equals_full",
    ),
    Fault(
        "a clone shares its tensors",
        "mixer.py", "{name: t.clone() for name", "{name: t for name",
        "snapshots",
    ),
    Fault(
        "a fork takes the first rows, whichever were asked for",
        "mixer.py", "t.index_select(0, rows)", "t[: len(rows)]",
        "snapshots",
    ),
    Fault(
        "latent attention without its scale when absorbed",
        "attn/mla.py", "y = causal_attention(q, latent, v, pos=pos, scale=self.scale)", "y = causal_attention(q, latent, v, pos=pos)",
        "cached_equals_full", attn="mla",
    ),
    Fault(
        "absorbed queries pair their rotary channels otherwise",
        "attn/mla.py", "q_rope.transpose(1, 2)], dim=-1)", "q_rope.transpose(1, 2).unflatten(-1, (2, -1)).mT.flatten(-2)], dim=-1)",
        "cached_equals_full", attn="mla",
    ),
    Fault(
        "the latent cached before its norm",
        "attn/mla.py", "latent = append(state.latent[:, None], latent, pos)", "latent = append(state.latent[:, None], torch.cat([self.down(x)[..., self.d_query : self.d_query + self.dc], latent[:, 0, :, self.dc :]], dim=-1)[:, None], pos)",
        "cached_equals_full", attn="mla",
    ),
    Fault(
        "expanded keys and values cached under the name of a latent",
        "attn/mla.py", "latent = torch.zeros(batch, max_len, self.dc + self.dr, device=device, dtype=dtype)", "latent = torch.zeros(batch, max_len, self.n_heads * (self.dn + self.dr + self.dv), device=device, dtype=dtype)[..., : self.dc + self.dr]",
        "weighed_bytes", attn="mla",
    ),
    Fault(
        "a piece sees too little of the window before it",
        "nn/attention.py", "torch.cat([old[:, :, -window:], x], dim=2)", "torch.cat([old[:, :, -window + 2 :], x], dim=2)",
        "cached_equals_full", attn="swa",
    ),
    Fault(
        "the last token of a piece is not kept in the ring",
        "attn/gqa.py", "kept = torch.arange(max(0, t - n), t, device=q.device)", "kept = torch.arange(max(0, t - n), t - 1, device=q.device)",
        "cached_equals_full", attn="swa",
    ),
    Fault(
        "decay applied after the error of the delta rule",
        "nn/delta_rule.py", "v_i = torch.baddbmm(v_i, k_i, flat, alpha=-1) * beta_i", "v_i = torch.baddbmm(v_i, k_i, flat / decay.mT, alpha=-1) * beta_i",
        "cached_equals_full", attn="kda",
    ),
    Fault(
        "chunks begin without the state that came before",
        "nn/delta_rule.py", "state.reshape(b * h, width, -1))", "0 * state.reshape(b * h, width, -1))",
        "cached_equals_full", attn="gdn",
    ),
    Fault(
        "the output reads the state before its update",
        "nn/delta_rule.py", "outputs.append(torch.bmm(q_i, flat))", "outputs.append(torch.bmm(q_i, flat - k_i.mT @ v_i))",
        "cached_equals_full", attn="deltanet",
    ),
    Fault(
        "the history of the convolution is dropped",
        "nn/conv.py", "history.copy_(seen[:, x.shape[1] :])", "history.zero_()",
        "cached_equals_full", attn="kda",
    ),
    Fault(
        "the convolution sees the next token",
        "nn/conv.py", "(x, (0, 0, self.size - 1, 0))", "(x, (0, 0, self.size - 2, 1))",
        "causality", attn="kda",
    ),
    Fault(
        "decay as a ratio of exponentials, which overflows",
        "nn/chunk_ops.py", "return *scores, *(x * since for x in rows), k * until, since[:, -1].clone()", "return *scores, *(x * since for x in rows), k * since[:, -1:] / since, since[:, -1].clone()",
        "extremes", attn="kda",
    ),
    Fault(
        "the gradient of a whole chunk's decay is forgotten",
        "nn/chunk_ops.py", "(kept * k).sum(1) + d_whole * since[:, -1]", "(kept * k).sum(1)",
        "gradient_values", attn="kda",
    ),
    Fault(
        "the gradient of attention over tiles forgets what the softmax sums to",
        "nn/sparse.py", ".sub_(take(dot, rows)).mul_(weights)", ".mul_(weights)",
        "gradient_values", attn="msa",
    ),
    Fault(
        "the gradient of the convolution is one token off",
        "nn/conv.py", "d_x[:, j : j + t].addcmul_(d_y, w[j])", "d_x[:, j : j + t].addcmul_(d_y, w[-1 - j])",
        "gradient_values", attn="gdn",
    ),
    Fault(
        "experts trained by rows that are not theirs",
        "nn/experts.py", "return rows.index_select(0, place).unflatten", "return rows.index_select(0, order).unflatten",
        "cached_equals_full", ffn="moe",
    ),
    Fault(
        "blocks of the future can be chosen",
        "nn/select.py", "device=q.device) >= own, _LOWEST)", "device=q.device) > own + 1, _LOWEST)",
        "causality", attn="msa",
    ),
    Fault(
        "decoding attends to everything",
        "attn/msa.py", "if self.dense or ", "if self.dense or state is not None or ",
        "cached_equals_full", attn="msa",
    ),
    Fault(
        "the divergence loss reaches the backbone",
        "attn/msa.py", "self.project_index(x.detach(), pos)", "self.project_index(x, pos)",
        "gradients", attn="msa",
    ),
    Fault(
        "no loss for the index branch",
        "attn/msa.py", "self.training and state is None", "False",
        "gradients", attn="msa",
    ),
    Fault(
        "index keys rotate as if from position 0",
        "attn/msa.py", "rotate_(index, pos, n_rot", "rotate_(index, 0, n_rot",
        "cached_equals_full", attn="msa",
    ),
    Fault(
        "the balance loss detached from the router",
        "ffn/moe.py", "balance_loss(logits.softmax(-1)[None], counts)", "balance_loss(logits.detach().softmax(-1)[None], counts)",
        "auxiliary_losses", ffn="moe",
    ),
    Fault(
        "auxiliary losses in evaluation too",
        "ffn/moe.py", "chosen.flatten(0, 1)) if self.training else {}", "chosen.flatten(0, 1)) if True else {}",
        "auxiliary_losses", ffn="moe",
    ),
    Fault(
        "routing depends on the rest of the batch",
        "ffn/moe_deepseek.py", "biased = scores.detach() + self.selection_bias", "biased = scores.detach() - scores.detach().mean((0, 1)) + self.selection_bias",
        "rows_are_independent", ffn="moe_deepseek",
    ),
    Fault(
        "the selection bias moves while decoding",
        "ffn/moe_deepseek.py", "scores = self.score(self.router(x))", "scores = self.score(self.router(x))\n        self.selection_bias += 0.01",
        "module_is_stateless", ffn="moe_deepseek",
    ),
    Fault(
        "a bias step without new loads",
        "ffn/moe_deepseek.py", "load = self.load.end_step()", "load = self.load.end_step() + self.selection_bias",
        "after_step", ffn="moe_deepseek",
    ),
    Fault(
        "bytes on record that no cache holds",
        "measure/account.py", "return model.init_cache(1, context, device=torch.device(\"meta\"), dtype=dtype).nbytes", "return 2 * model.init_cache(1, context, device=torch.device(\"meta\"), dtype=dtype).nbytes",
        "weighed_bytes",
    ),
    Fault(
        "more bytes read than there are",
        "measure/account.py", "return sum(mixer.read_bytes(context, dtype.itemsize) for mixer in _mixers(model))", "return 3 * sum(mixer.read_bytes(context, dtype.itemsize) for mixer in _mixers(model))",
        "weighed_bytes", attn="kda",
    ),
]  # fmt: skip


class _Mutant(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Imports one module from changed source; all others are left to the ordinary finders."""

    def __init__(self, file: str, source: str):
        self.path = PACKAGE / file
        self.module = ".".join(["archlab", *Path(file).with_suffix("").parts])
        self.source = source

    def find_spec(self, fullname, path=None, target=None):
        if fullname == self.module:
            return importlib.util.spec_from_loader(fullname, self, origin=str(self.path))
        return None

    def get_filename(self, fullname):
        return str(self.path)

    def get_data(self, path):
        return self.source.encode()


def _forget_archlab() -> dict:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "archlab"}


@contextmanager
def planted(fault: Fault):
    """`archlab.testing`, imported anew over the faulty source."""
    source = (PACKAGE / fault.file).read_text()
    assert source.count(fault.old) == 1, f"{fault.file} holds {source.count(fault.old)} times {fault.old!r}"
    mutant = _Mutant(fault.file, source.replace(fault.old, fault.new))
    healthy = _forget_archlab()
    sys.meta_path.insert(0, mutant)
    try:
        yield importlib.import_module("archlab.testing")
    finally:
        sys.meta_path.remove(mutant)
        _forget_archlab()
        sys.modules.update(healthy)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_fault_turns_the_suite_red(fault):
    with planted(fault) as testing:
        check = next(c for c in testing.CHECKS if c.__name__ == f"check_{fault.check}")
        with pytest.raises(AssertionError):
            check(testing.Variant(fault.attn, fault.ffn))


def test_there_are_enough_faults():
    assert len(FAULTS) >= 25
