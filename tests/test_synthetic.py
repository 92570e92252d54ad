"""The synthetic classes are told apart as claimed: by simple oracles over pictures and OpenCV's flow."""

import csv
from functools import cache
from itertools import pairwise

import av
import cv2
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fastactrec.data.synthetic import ACTIONS, PAIRS, film, make_synthetic, render

FRAMES, SIZE = 15, 64
MOTION, APPEARANCE = ("ring", "square"), ("bar", "disc")
TRAIN, TEST = [(0, i) for i in range(8)], [(1, i) for i in range(8)]
GRAY = np.array([0.299, 0.587, 0.114])


@cache
def clip(name, scene):
    return film(name, scene, seed=3, frames=FRAMES, size=SIZE)


@cache
def flows(name, scene):
    gray = [cv2.cvtColor(f, cv2.COLOR_RGB2GRAY) for f in clip(name, scene)]
    dis = cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)
    dis.setFinestScale(0)
    return np.stack([dis.calc(a, b, None) for a, b in list(pairwise(gray))[1::3]])  # [5, H, W, 2]


def accuracy(shape, features):
    """Test accuracy of logistic regression inside a pair; ``features`` gives some vectors for each clip."""

    def gather(scenes):
        found = [(features(name, scene), k) for scene in scenes for k, name in enumerate(PAIRS[shape])]
        return np.concatenate([x for x, _ in found]), np.concatenate([[k] * len(x) for x, k in found])

    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000)).fit(*gather(TRAIN))
    return model.score(*gather(TEST))


def small(pictures):
    """[T, H, W, 3] -> [T, 768]."""
    return np.stack([cv2.resize(p, (16, 16), interpolation=cv2.INTER_AREA).ravel() for p in pictures])


def any_picture(name, scene):
    return small(clip(name, scene)).astype(np.float64)


def mean_of_segments(name, scene):
    return small(clip(name, scene)[[2, 7, 12]]).mean(axis=0, keepdims=True)  # the centres of three segments


def shape_colour(name, scene):
    """Mean (R - Y, B - Y) of the most colourful pixels."""
    pictures = clip(name, scene).reshape(-1, 3).astype(np.float64)
    chroma = (pictures - pictures @ GRAY[:, None])[:, [0, 2]]
    return [chroma[np.hypot(*chroma.T) > 35].mean(axis=0)]


def flow_moments(name, scene):
    """Mean vertical motion and mean divergence, the signs of the motion pairs."""
    flow = flows(name, scene)
    grown = np.gradient(flow[..., 0], axis=2) + np.gradient(flow[..., 1], axis=1)
    edge = np.hypot(*np.moveaxis(flow, -1, 0)) > 0.3
    return [[flow[..., 1].mean(), grown[edge].mean()]]


def flow_histogram(name, scene):
    flow = flows(name, scene)
    x, y = flow[..., 0].ravel(), flow[..., 1].ravel()
    counts, *_ = np.histogram2d(x, y, bins=np.linspace(-4, 4, 9))
    return [np.log1p(counts.ravel())]


@pytest.mark.parametrize("shape", MOTION)
def test_motion_pairs_are_one_clip_played_backwards(shape):
    for seed in range(5):
        forwards, backwards = (render(name, np.random.default_rng(seed), FRAMES, SIZE) for name in PAIRS[shape])
        np.testing.assert_array_equal(forwards, backwards[::-1])


@pytest.mark.parametrize("shape", APPEARANCE)
def test_appearance_pairs_have_equal_brightness_and_unequal_colour(shape):
    for seed in range(5):
        first, second = (render(name, np.random.default_rng(seed), FRAMES, SIZE) for name in PAIRS[shape])
        np.testing.assert_allclose(first @ GRAY, second @ GRAY, rtol=0, atol=0.01)
        assert abs(first - second).max() > 60
        assert min(first.min(), second.min()) > -20  # little is clipped, and clipping would show in the flow
        assert max(first.max(), second.max()) < 275


@pytest.mark.parametrize("name", ACTIONS)
def test_shapes_stay_inside_the_test_crop(name):
    """Beyond the central 7/8 nothing moves, so that a centre crop never loses the motion."""
    for seed in range(20):
        pictures = render(name, np.random.default_rng(seed), FRAMES, SIZE)
        changed = (abs(pictures - pictures[0]) > 1e-9).any(axis=(0, 3))
        assert not changed[:4].any()
        assert not changed[-4:].any()
        assert not changed[:, :4].any()
        assert not changed[:, -4:].any()


@pytest.mark.parametrize("shape", APPEARANCE)
def test_colour_tells_the_appearance_pairs_and_flow_does_not(shape):
    assert accuracy(shape, shape_colour) == 1
    assert 0.3 <= accuracy(shape, flow_histogram) <= 0.7
    assert 0.3 <= accuracy(shape, flow_moments) <= 0.7


@pytest.mark.parametrize("shape", MOTION)
def test_flow_tells_the_motion_pairs_and_pictures_do_not(shape):
    assert accuracy(shape, flow_moments) == 1
    for pictures in (any_picture, mean_of_segments):
        assert 0.35 <= accuracy(shape, pictures) <= 0.65


def test_files_table_and_decoded_pictures(tmp_path):
    table = make_synthetic(tmp_path / "set", clips_per_class_train=2, clips_per_class_test=1, seed=3)
    rows = list(csv.DictReader(table.open()))
    assert list(rows[0]) == ["path", "label", "group", "split"]
    assert len(rows) == 8 * 3
    assert {row["label"] for row in rows} == set(ACTIONS)
    parts = {part: {row["group"] for row in rows if row["split"] == part} for part in ("train", "test")}
    assert [len(groups) for groups in parts.values()] == [2, 1]
    assert not parts["train"] & parts["test"]
    for row in rows:
        with av.open(str(table.parent / row["path"])) as container:
            pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        assert np.shape(pictures) == (FRAMES, SIZE, SIZE, 3)
        scene = (int(row["split"] == "test"), int(row["group"][-3:]))
        loss = np.abs(np.float64(pictures) @ GRAY - clip(row["label"], scene) @ GRAY).mean()
        assert loss < 5  # levels: the codec blurs the grain, and keeps the rest


def test_the_seed_decides_everything():
    again = film("disc_red_slides", (0, 1), seed=3, frames=FRAMES, size=SIZE)
    np.testing.assert_array_equal(again, clip("disc_red_slides", (0, 1)))
    for other in ((1, 1), (0, 2)):
        assert (clip("disc_red_slides", other) != again).mean() > 0.5
    assert (film("disc_red_slides", (0, 1), seed=4, frames=FRAMES, size=SIZE) != again).mean() > 0.5
