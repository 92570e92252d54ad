"""Interval sweeps against a brute-force count of unit cells, which is exact on whole numbers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastactrec.reporting.intervals import covered_s, exposed_over_ranks_s, exposed_s, overlap_s, union

SPAN = 40
SETS = st.lists(st.tuples(st.integers(0, SPAN), st.integers(0, SPAN)).map(sorted), max_size=25)


def cells(intervals) -> set[int]:
    """The unit cells [k, k + 1) that a set covers."""
    return {k for start, end in intervals for k in range(start, end)}


def as_array(intervals) -> np.ndarray:
    return np.array(intervals, dtype=np.float64).reshape(-1, 2)


@settings(deadline=None, max_examples=300)
@given(SETS, SETS)
def test_against_counted_cells(first, second):
    a, b = as_array(first), as_array(second)
    assert covered_s(a) == len(cells(first))
    assert overlap_s(a, b) == overlap_s(b, a) == len(cells(first) & cells(second))
    assert exposed_s(a, b) == len(cells(first) - cells(second))


@settings(deadline=None, max_examples=300)
@given(SETS)
def test_union_is_sorted_disjoint_and_covers_the_same(intervals):
    merged = union(as_array(intervals))
    assert cells(merged.astype(int).tolist()) == cells(intervals)
    assert (merged[:, 0] < merged[:, 1]).all()
    assert (merged[1:, 0] > merged[:-1, 1]).all()


def test_known_case():
    """Communication 2..6 and 8..9, computation 0..3 and 5..8: hidden are 2..3 and 5..6."""
    assert exposed_s(np.array([[2.0, 6.0], [8.0, 9.0]]), np.array([[0.0, 3.0], [5.0, 8.0]])) == 3.0


def test_ranks_take_the_largest():
    none = np.empty((0, 2))
    hidden = (np.array([[0.0, 5.0]]), np.array([[0.0, 5.0]]))
    assert exposed_over_ranks_s([hidden, (np.array([[1.0, 2.5]]), none)]) == 1.5
    assert exposed_over_ranks_s([]) == 0.0


@pytest.mark.parametrize(
    ("bad", "message"),
    [([[1.0, 0.0]], "ends before"), ([[0.0, np.nan]], "not finite"), ([1.0, 2.0], r"\[N, 2\]")],
)
def test_bad_intervals_are_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        covered_s(np.array(bad))
