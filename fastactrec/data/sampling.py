"""Which frames of a clip a network sees: the segments of TSN (Wang et al. 2016; yjxiong/tsn-pytorch,
dataset.py)."""

from __future__ import annotations

import numpy as np


def train_offsets(frames: int, segments: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """One random start in each segment.

    The clip has P = frames - length + 1 places for a run of ``length`` frames. With d = floor(P / segments)
    at least 1, segment s starts uniformly in [s d, (s + 1) d). With 0 < P < segments: sorted uniform draws
    from all places (TSN's evident intention; its own line draws one number for all). With P <= 0 (the clip is
    shorter than the run): 0, see ``run_indices``.

    Args:
        frames: frames (of flow: flow frames) the clip has, at least 1.
        segments, length: at least 1.
        rng: its draws decide; always ``segments`` numbers are drawn from it.
    Returns:
        int64 [segments], ascending, 0-based.
    """
    places = _places(frames, segments, length)
    if duration := places // segments:
        return np.arange(segments) * duration + rng.integers(duration, size=segments)
    return np.sort(rng.integers(places, size=segments))


def test_offsets(frames: int, segments: int, length: int) -> np.ndarray:
    """The centre of each segment: floor((s + 1/2) P / segments), P as in ``train_offsets`` but at least 1.

    Returns:
        int64 [segments], ascending, 0-based; places repeat where the clip has fewer than segments.
    """
    places = _places(frames, segments, length)
    return (2 * np.arange(segments) + 1) * places // (2 * segments)  # in integers: no rounding to argue about


test_offsets.__test__ = False  # a public name that pytest must not collect


def run_indices(offsets: np.ndarray, frames: int, length: int) -> np.ndarray:
    """The frames of each run, int64 [segments, length]: offset, offset + 1...; past the end the last frame
    repeats."""
    return np.minimum(np.asarray(offsets)[:, None] + np.arange(length), frames - 1)


def _places(frames: int, segments: int, length: int) -> int:
    if min(frames, segments, length) < 1:
        raise ValueError(f"frames {frames}, segments {segments} and length {length} must be at least 1")
    return max(frames - length + 1, 1)
