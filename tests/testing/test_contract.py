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


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("variant", list(cells()))
def test_contract(variant, check):
    check(variant)
