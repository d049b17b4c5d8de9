"""The power law through losses that were made from one."""

import numpy as np
import pytest

from archlab.study.ladder import Size, crossing, fit


def sizes(e, a, exponent, *, noise=0.0, n=6, tuned=True, seeds=4):
    rng = np.random.default_rng(0)
    flops = [1e12 * 3**i for i in range(n)]
    return [Size(c, e + a * (c / 1e12) ** -exponent + noise * rng.standard_normal(seeds), tuned) for c in flops]


def test_a_law_is_found_again():
    found = fit(sizes(1.2, 0.8, 0.35))
    assert found.law == pytest.approx((1.2, 0.8, 0.35), rel=1e-3)
    assert found.loss(9e12) == pytest.approx(1.2 + 0.8 * 9**-0.35, rel=1e-3)


def test_the_interval_holds_the_exponent_and_widens_with_noise():
    quiet, loud = (fit(sizes(1.2, 0.8, 0.35, noise=noise, seeds=16)) for noise in (0.002, 0.02))
    assert quiet.exponent_low < 0.35 < quiet.exponent_high
    assert loud.exponent_high - loud.exponent_low > quiet.exponent_high - quiet.exponent_low


def test_untuned_sizes_are_not_fitted():
    some = sizes(1.2, 0.8, 0.35)
    spoilt = [*some[:5], Size(some[5].flops, [9.0], tuned=False)]
    assert fit(spoilt).law == pytest.approx((1.2, 0.8, 0.35), rel=1e-3)
    assert fit(some[:3]) is None
    assert fit(sizes(1.2, 0.8, 0.35, tuned=False)) is None


def test_where_two_laws_cross_and_how_far_outside():
    first, second = fit(sizes(1.0, 1.0, 0.3)), fit(sizes(1.0, 0.8, 0.2))
    at = crossing(first, second, largest_flops=1e12 * 3**5)
    assert at.flops == pytest.approx(1e12 * (1 / 0.8) ** 10, rel=0.02)
    assert at.beyond == pytest.approx(at.flops / (1e12 * 3**5))
    assert crossing(first, fit(sizes(1.1, 1.2, 0.3)), largest_flops=3e14) is None
