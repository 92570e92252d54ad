"""TSN's indices: values worked out by hand from the published formulas."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastactrec.data import sampling

counts = st.integers(1, 60)


@pytest.mark.parametrize(
    ("frames", "segments", "length", "want"),
    [
        # P = 30, tick 10: 5, 15, 25
        (30, 3, 1, [5, 15, 25]),
        # P = 100 - 5 + 1 = 96, tick 32: 16, 48, 80
        (100, 3, 5, [16, 48, 80]),
        # P = 11, tick 11/3: 1.83, 5.5, 9.17
        (15, 3, 5, [1, 5, 9]),
        # P = 4, tick 4/5: 0.4, 1.2, 2.0, 2.8, 3.6; 2.0 exactly is 2
        (4, 5, 1, [0, 1, 2, 2, 3]),
        # P = 25, 25 segments: each place once
        (29, 25, 5, list(range(25))),
        # shorter than the stack
        (3, 4, 5, [0, 0, 0, 0]),
        (1, 2, 1, [0, 0]),
    ],
)
def test_centres(frames, segments, length, want):
    assert sampling.test_offsets(frames, segments, length).tolist() == want


def test_training_offsets_are_uniform_in_each_segment():
    # P = 23 - 5 + 1 = 19, d = floor(19 / 3) = 6: [0, 6), [6, 12), [12, 18); place 18 is never used
    rng = np.random.default_rng(0)
    draws = np.stack([sampling.train_offsets(23, 3, 5, rng) for _ in range(3000)])
    for s in range(3):
        values, hits = np.unique(draws[:, s], return_counts=True)
        assert values.tolist() == list(range(6 * s, 6 * s + 6))
        assert (abs(hits - 500) < 100).all()  # 5 standard deviations of 20.4


def test_training_with_fewer_places_than_segments_draws_sorted_from_all():
    rng = np.random.default_rng(0)
    draws = np.stack([sampling.train_offsets(6, 4, 5, rng) for _ in range(200)])  # 2 places
    assert set(draws.ravel().tolist()) == {0, 1}
    assert (np.diff(draws, axis=1) >= 0).all()
    assert len(np.unique(draws, axis=0)) == 5  # 0000 0001 0011 0111 1111


@given(counts, counts, counts, st.integers(0, 9))
def test_runs_lie_inside_the_clip(frames, segments, length, seed):
    rng = np.random.default_rng(seed)
    for offsets in (
        sampling.train_offsets(frames, segments, length, rng),
        sampling.test_offsets(frames, segments, length),
    ):
        runs = sampling.run_indices(offsets, frames, length)
        assert runs.shape == (segments, length)
        assert runs.min() >= 0
        assert runs.max() < frames
        assert (np.diff(offsets) >= 0).all()
        if frames >= length:
            assert (np.diff(runs, axis=1) == 1).all()


def test_past_the_end_the_last_frame_repeats():
    assert sampling.run_indices([0], 3, 5).tolist() == [[0, 1, 2, 2, 2]]


@pytest.mark.parametrize("wrong", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_nothing_to_sample_is_refused(wrong):
    with pytest.raises(ValueError, match="at least 1"):
        sampling.test_offsets(*wrong)
