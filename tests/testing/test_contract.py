"""The contract suite over the whole registry: every attention with every FFN. A new plugin edits nothing here."""

import pytest

from archlab.plugins import names
from archlab.testing import CHECKS, Variant

BASE = Variant()


def cells():
    """Every combination; those away from both axes of the table are the slow part."""
    for attn in names("attn"):
        for ffn in names("ffn"):
            on_axis = BASE.attn == attn or BASE.ffn == ffn
            yield pytest.param(Variant(attn, ffn), id=f"{attn}-{ffn}", marks=[] if on_axis else pytest.mark.slow)


SETTINGS = [
    *(Variant(attn, overrides=("attn.conv_size=3",)) for attn in ("gqa", "swa", "mla", "msa")),
    Variant("mla", overrides=("attn.conv_size=3", "attn.q_lora_rank=20")),
]
"""Settings that change what a state holds, and are off by default."""


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("variant", SETTINGS, ids=lambda v: " ".join([v.attn, *v.overrides]))
def test_contract_of_settings(variant, check):
    check(variant)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("variant", list(cells()))
def test_contract(variant, check):
    check(variant)
