"""Numbers as text, and the two small statistics, against scipy."""

import pytest
from scipy.stats import binomtest

from fastactrec.reporting.svg import ticks
from fastactrec.reporting.units import count, duration, number, percent, points, sign_test, wilson


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (0, "0 s"),
        (0.01234, "12.3 ms"),
        (0.9999, "1.0 s"),
        (59.96, "1 min 00 s"),
        (75.2, "1 min 15 s"),
        (3599.7, "1 h 00 min"),
        (7384, "2 h 03 min"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_shares_and_counts():
    assert percent(0.8421) == "84.2 %"
    assert percent(None) == "–"
    assert points(-0.0123) == "−1.2 points"
    assert count(1, "clip") == "1 clip"
    assert count(1204, "clip") == "1,204 clips"
    assert number(0.001) == "0.001"
    assert number(1e-7) == "1e−07"


@pytest.mark.parametrize(("hits", "n"), [(0, 5), (5, 5), (7, 9), (812, 1000)])
def test_wilson_agrees_with_scipy(hits, n):
    expected = binomtest(hits, n).proportion_ci(method="wilson")
    assert wilson(hits / n, n) == pytest.approx((expected.low, expected.high), abs=1e-6)


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (1, 0), (7, 12), (30, 3)])
def test_sign_test_agrees_with_scipy(wins, losses):
    expected = binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    assert sign_test(wins, losses) == pytest.approx(expected)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.001), (-3.2, 17), (1, 40), (0.98, 1.02), (2, 2)])
def test_ticks_lie_inside_and_are_few(low, high):
    marks = ticks(low, high)
    assert 1 <= len(marks) <= 8
    assert all(low - 1e-9 <= mark <= high + 1e-9 for mark in marks)
