"""Interval algebra over traces: how much communication no computation hides.

All times are float64 seconds on one clock; an interval is half-open, [start, end).
"""

from __future__ import annotations

import numba
import numpy as np


def union(intervals: np.ndarray) -> np.ndarray:
    """Disjoint, sorted intervals with gaps between them that cover the same times.

    Args:
        intervals: float64 [N, 2], start <= end, in any order, overlapping or not.
    Returns:
        float64 [M, 2], M <= N; empty intervals vanish.
    Raises:
        ValueError: another shape, an end before its start, or a time that is not finite.
    """
    return _merge(_sorted(intervals))


def covered_s(intervals: np.ndarray) -> float:
    """Seconds covered by at least one interval."""
    return _length(union(intervals))


def overlap_s(first: np.ndarray, second: np.ndarray) -> float:
    """Seconds covered by both sets."""
    return float(_overlap(union(first), union(second)))


def exposed_s(communication: np.ndarray, computation: np.ndarray) -> float:
    """Exposed communication of a rank: |union comm| - |union comm and union compute|, in seconds."""
    merged = union(communication)
    return _length(merged) - float(_overlap(merged, union(computation)))


def exposed_over_ranks_s(ranks: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """The exposed communication of a step on several ranks: the largest, since the others wait for it.

    Args:
        ranks: (communication, computation) of each rank; 0 for no ranks.
    """
    return max((exposed_s(communication, computation) for communication, computation in ranks), default=0.0)


def _length(merged: np.ndarray) -> float:
    return float((merged[:, 1] - merged[:, 0]).sum())


def _sorted(intervals: np.ndarray) -> np.ndarray:
    array = np.asarray(intervals, dtype=np.float64)
    if array.size == 0:
        return np.empty((0, 2))
    if array.ndim != 2 or array.shape[1] != 2:
        raise ValueError(f"intervals are [N, 2], not {list(array.shape)}")
    if not np.isfinite(array).all():
        raise ValueError("an interval has a time that is not finite")
    if (array[:, 1] < array[:, 0]).any():
        raise ValueError("an interval ends before it starts")
    return np.ascontiguousarray(array[np.argsort(array[:, 0], kind="stable")])


@numba.njit(cache=True)
def _merge(intervals):  # pragma: no cover, compiled
    merged = np.empty_like(intervals)
    count = 0
    for start, end in intervals:
        if end == start:
            continue
        if count and start <= merged[count - 1, 1]:
            merged[count - 1, 1] = max(merged[count - 1, 1], end)
        else:
            merged[count, 0] = start
            merged[count, 1] = end
            count += 1
    return merged[:count].copy()


@numba.njit(cache=True)
def _overlap(first, second):  # pragma: no cover, compiled
    """Both disjoint and sorted: one sweep over both."""
    total = 0.0
    i = j = 0
    while i < len(first) and j < len(second):
        shared = min(first[i, 1], second[j, 1]) - max(first[i, 0], second[j, 0])
        if shared > 0:
            total += shared
        if first[i, 1] < second[j, 1]:
            i += 1
        else:
            j += 1
    return total
