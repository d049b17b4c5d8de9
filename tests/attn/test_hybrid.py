"""Hybrid stacks: which layer gets which part, and how the command line reaches into a part."""

import pytest
import torch
from hydra.errors import ConfigCompositionException

from archlab.attn.gqa import GroupedQueryAttention
from archlab.attn.hybrid import hybrid
from archlab.attn.mla import MultiHeadLatentAttention
from archlab.config.compose import load
from archlab.errors import UsageError
from archlab.mixer import Mixer
from archlab.model import build_model
from archlab.plugins import build_layer, factory


class Named(Mixer):
    """A mixer that says which part made it, and for which layer."""

    def __init__(self, d_model, *, name, layer_idx, n_layers):
        super().__init__()
        self.name, self.place = name, (layer_idx, n_layers)


class Plain(Mixer):
    """A mixer that wants to know no place."""

    def __init__(self, d_model, *, width=1):
        super().__init__()
        self.name, self.place = "plain", (d_model, width)


def part(name):
    def make(d_model, *, layer_idx, n_layers):
        return Named(d_model, name=name, layer_idx=layer_idx, n_layers=n_layers)

    return make


PARTS = {"a": part("a"), "b": part("b"), "cc": part("cc")}


def stack(n_layers, **settings):
    return [hybrid(16, layer_idx=i, n_layers=n_layers, parts=PARTS, **settings).name for i in range(n_layers)]


@pytest.mark.parametrize(
    ("n_layers", "settings", "names"),
    [
        (4, {"pattern": ["a", "b"]}, "a b a b"),
        (5, {"pattern": "aab"}, "a a b a a"),
        (5, {"pattern": ["a", "a", "cc"], "last": "cc"}, "a a cc a cc"),
        (1, {"pattern": "ab", "last": "b"}, "b"),
        (2, {"pattern": "aaab"}, "a a"),
        (3, {"layers": ["cc", "a", "b"]}, "cc a b"),
        (3, {"layers": ["cc", "a", "b"], "pattern": "a", "last": "a"}, "cc a b"),
        (3, {"layers": "aab"}, "a a b"),
    ],
)
def test_list_beats_pattern_and_last_ends_a_pattern(n_layers, settings, names):
    assert stack(n_layers, **settings) == names.split()


def test_a_part_is_told_its_place_if_it_asks():
    mixer = hybrid(16, layer_idx=2, n_layers=3, parts=PARTS, pattern="ab")
    assert mixer.place == (2, 3)
    assert hybrid(16, layer_idx=0, n_layers=1, parts={"p": Plain}, pattern="p").place == (16, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pattern": ["a", "d"]}, "no part 'd'"),
        ({"pattern": ["a", "ccc"]}, "did you mean 'cc'"),
        ({"pattern": "a", "last": "x"}, "no part 'x'"),
        ({"pattern": "cc"}, "no part 'c'"),
        ({"layers": ["a", "b"]}, "2 layers, but the model has n_layers=3"),
        ({"layers": ["a", "b", "a", "b"]}, "4 layers"),
        ({"layers": ["a", "b", "nope"]}, "no part 'nope'"),
        ({}, "needs its key pattern"),
        ({"pattern": []}, "needs its key pattern"),
    ],
)
def test_impossible_stacks_are_refused_at_the_first_layer(settings, message):
    with pytest.raises(UsageError, match=message):
        hybrid(16, layer_idx=0, n_layers=3, parts=PARTS, **settings)


def mixers(*overrides, n_layers=4):
    make = factory("attn", load(overrides).attn)
    return [build_layer(make, 64, layer_idx=i, n_layers=n_layers) for i in range(n_layers)]


def test_swa_gqa_alternates():
    layers = mixers("attn=swa_gqa", "attn.parts.swa.window=16")
    assert [type(m) for m in layers] == [GroupedQueryAttention] * 4
    assert [m.window for m in layers] == [16, None, 16, None]


def test_kda_mla_is_three_to_one_and_ends_global_without_positions():
    layers = mixers("attn=kda_mla", n_layers=6)
    latent = [isinstance(m, MultiHeadLatentAttention) for m in layers]
    assert latent == [False, False, False, True, False, True]
    assert layers[3].n_rot == 0
    x = torch.randn(1, 5, 64)
    with torch.no_grad():
        torch.testing.assert_close(layers[3](x[:, [2, 0, 1, 3, 4]])[0][:, -1], layers[3](x)[0][:, -1])


def test_the_published_layers_of_kimi_linear():
    published = {3, 7, 11, 15, 19, 23, 26}
    overrides = ("attn=kda_mla", "model.n_layers=27")
    latent = [isinstance(m, MultiHeadLatentAttention) for m in mixers(*overrides, n_layers=27)]
    assert {i for i, global_layer in enumerate(latent) if global_layer} == published


def test_the_command_line_reaches_into_a_part():
    layers = mixers("attn=kda_mla", "attn.parts.mla.kv_lora_rank=48", "attn.pattern=[mla,kda]")
    assert layers[0].dc == layers[2].dc == 48
    with pytest.raises(UsageError, match=r"attn.parts.mla .*'kv_lora_rnk'; did you mean 'kv_lora_rank'"):
        mixers("attn=kda_mla", "+attn.parts.mla.kv_lora_rnk=48")
    with pytest.raises(UsageError, match=r"attn.parts.mla.d_model is set by the harness"):
        mixers("attn=kda_mla", "+attn.parts.mla.d_model=48")
    with pytest.raises(ConfigCompositionException):
        mixers("attn=kda_mla", "attn.parts.mla.kv_lora_rnk=48")


def test_a_part_of_another_kind_can_be_added():
    layers = mixers("attn=swa_gqa", "+attn@attn.parts.mla=mla", "attn.pattern=[swa,mla]")
    assert isinstance(layers[1], MultiHeadLatentAttention)
    assert layers[1].n_rot > 0


def test_a_hybrid_model_decodes_as_it_trains():
    cfg = load(["attn=swa_gqa", "attn.parts.swa.window=5", "model.d_model=32", "model.n_layers=3"])
    model = build_model(cfg, 50).double().eval()
    tokens = torch.randint(50, (2, 17))
    cache = model.init_cache(2, 17)
    assert [s.kv.shape[2] for s in cache.states] == [5, 17, 5]
    with torch.no_grad():
        logits = torch.cat([model(piece, cache)[0] for piece in tokens.split([3, 7, 1, 6], dim=1)], dim=1)
        torch.testing.assert_close(logits, model(tokens)[0], rtol=1e-10, atol=1e-10)
