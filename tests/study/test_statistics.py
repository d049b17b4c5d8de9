"""Intervals and findings against scipy's own tests, hand-made cases, and made-up studies whose truth is known."""

import math

import numpy as np
import pytest
from scipy import stats

from archlab.study import statistics
from archlab.study.analysis import compare_values, corrected
from archlab.study.calibrate import calibrate


def test_the_interval_of_a_mean_is_students():
    e = statistics.mean_interval([1.0, 2.0, 4.0])
    half = stats.t.ppf(0.975, 2) * np.std([1, 2, 4], ddof=1) / math.sqrt(3)
    assert (e.low, e.high) == pytest.approx((7 / 3 - half, 7 / 3 + half))
    assert statistics.mean_interval([3.0]).margin is None
    assert statistics.mean_interval([3.0, 3.0]).margin == 0.0


def test_a_paired_difference_takes_out_what_a_seed_gives_to_both():
    seeds = np.array([0.0, 10.0, -7.0, 3.0])
    x, y = seeds + np.array([1.0, 1.1, 0.9, 1.0]), seeds
    d = statistics.paired(x, y)
    assert d.p == pytest.approx(stats.ttest_rel(x, y).pvalue)
    assert d.excludes_zero
    assert not statistics.unpaired(x, y).excludes_zero


def test_what_could_have_been_detected_is_found_with_that_power():
    n, deviation = 6, 2.0
    effect = statistics.detectable(deviation, n)
    rng = np.random.default_rng(0)
    draws = effect + deviation * rng.standard_normal((4000, n))
    found = (stats.ttest_1samp(draws, 0.0, axis=1).pvalue < 0.05).mean()
    assert found == pytest.approx(0.8, abs=0.025)


def test_holm_is_the_published_step_down():
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])
    assert statistics.holm([]) == []


def test_the_interval_of_a_share_is_exact():
    e = statistics.share_interval(5, 5)
    assert (e.low, e.high) == pytest.approx((0.025 ** (1 / 5), 1.0))
    assert statistics.share_bound(5, 5, above=True) == pytest.approx(0.05 ** (1 / 5))
    assert statistics.share_bound(0, 5, above=False) == pytest.approx(1 - 0.05 ** (1 / 5))


def test_the_difference_by_sequence_is_of_nats_a_target():
    first = np.array([[4.0, 2.0], [6.0, 2.0], [8.0, 2.0]])
    second = np.array([[2.0, 2.0], [5.0, 2.0], [6.0, 2.0]])
    assert statistics.by_sequence(first, second).mean == pytest.approx(first.sum(0)[0] / 6 - second.sum(0)[0] / 6)


def compare(x, y, **kwargs):
    return corrected([compare_values("task", ("a", "b"), (x, y), pairs=True, **kwargs)])[0]


def test_two_seeds_rank_nothing():
    assert "nothing is ranked" in compare([1.0, 1.1], [2.0, 2.1]).verdict
    assert "nothing is ranked" in compare([1.0], [2.0]).verdict


def test_an_interval_that_holds_zero_ranks_nothing():
    assert compare([1.0, 2.0, 3.0], [1.1, 1.9, 3.1]).verdict == "no difference shown"
    assert compare([1.0, 2.0, 3.0], [2.0, 3.1, 4.1]).verdict == "lower"


def test_runs_in_two_heaps_are_compared_by_shares():
    """Three of three against none of three looks overwhelming to a t test, and shows nothing."""
    c = compare([1.0, 1.0, 0.999], [0.25, 0.251, 0.249], solved_at=0.98)
    assert c.solved == (3, 0)
    assert c.p == pytest.approx(0.1)
    assert c.verdict == "no difference shown"
    assert compare([1.0] * 6, [0.25, 0.24, 0.25, 0.26, 0.25, 0.25], solved_at=0.98).verdict == "higher"
    assert compare([0.4, 0.41, 0.42], [0.2, 0.22, 0.21], solved_at=0.98).solved is None, "one heap: a mean will do"


@pytest.mark.slow
def test_calibrated_coverage_and_false_findings():
    """300 studies of each kind through the report's own code: 95% within what so many draws can tell."""
    for r in calibrate(300, effects=(0.0,)):
        least = 0.92 if r.spread == "normal" else 0.9
        assert r.coverage >= least, r
        assert r.false_studies <= 0.09, r


def test_the_calibration_notices_a_wrong_interval(monkeypatch):
    """With intervals of half the width, it must go red."""
    own = statistics.mean_interval

    def narrow(values):
        e = own(values)
        return statistics.Estimate(e.mean, (e.low + e.mean) / 2, (e.high + e.mean) / 2, e.n)

    monkeypatch.setattr(statistics, "mean_interval", narrow)
    first = next(iter(calibrate(60, effects=(0.0,))))
    assert first.coverage < 0.9
