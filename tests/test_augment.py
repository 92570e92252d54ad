"""Crop geometry against TSN's rules, worked out by hand."""

import numpy as np
import pytest
import torch

from fastactrec.data import augment

SCALES = (1, 0.875, 0.75, 0.66)


def test_training_crops_have_tsn_sides_and_positions():
    # short side 256: 256, 224, 192, 168 (0.66 * 256 = 168.96)
    rng = np.random.default_rng(0)
    boxes = [augment.train_crop(340, 256, SCALES, rng) for _ in range(6000)]
    sizes = {(h, w) for _, _, h, w in boxes}
    near = [(256, 256), (224, 224), (192, 192), (168, 168), (256, 224), (224, 192), (192, 168)]
    assert sizes == set(near) | {(w, h) for h, w in near}
    # 168x168 in 340x256: steps (340 - 168) // 4 = 43, (256 - 168) // 4 = 22; TSN's 13 positions
    places = {(top // 22, left // 43) for top, left, h, w in boxes if (h, w) == (168, 168)}
    quarters = {(0, 0), (0, 4), (4, 0), (4, 4), (2, 2), (2, 0), (2, 4), (4, 2), (0, 2)}
    assert places == quarters | {(1, 1), (1, 3), (3, 1), (3, 3)}


@pytest.mark.parametrize(("width", "height"), [(340, 256), (64, 64), (33, 47), (1, 9)])
def test_training_crops_stay_inside(width, height):
    rng = np.random.default_rng(0)
    for _ in range(300):
        top, left, h, w = augment.train_crop(width, height, SCALES, rng)
        assert min(top, left) >= 0
        assert min(h, w) >= 1
        assert top + h <= height
        assert left + w <= width


def test_ten_crops_of_340x256_are_tsn_offsets():
    # TSN: steps (340 - 224) // 4 = 29 and (256 - 224) // 4 = 8
    got = augment.test_crops(340, 256, 224, 10)
    corners = [(0, 0), (0, 116), (32, 0), (32, 116), (16, 58)]
    assert got == [(*corner, 224, 224, flip) for corner in corners for flip in (False, True)]
    assert augment.test_crops(340, 256, 224, 5) == got[::2]
    assert augment.test_crops(340, 256, 224, 1) == [(16, 58, 224, 224, False)]


def test_crops_scale_with_the_frame():
    # input 112 is cut from a short side of 128; in a frame of short side 200 that is 200 * 112 / 128 = 175
    assert augment.test_crops(300, 200, 112, 1) == [(12, 62, 175, 175, False)]
    assert augment.test_crops(64, 64, 64, 1) == [(4, 4, 56, 56, False)]  # 64 * 64 / 73 = 56.1


def test_other_numbers_of_crops_are_refused():
    with pytest.raises(ValueError, match="1, 5 or 10"):
        augment.test_crops(64, 64, 64, 3)


def test_resize_is_an_average_when_it_halves_and_leaves_flow_values_alone():
    image = torch.rand(2, 4, 32, 32)
    small = augment.resize(image, 16)
    # antialiased bilinear at factor 2: the triangle (1, 3, 3, 1) / 8 around each output pixel
    weights = torch.tensor([1.0, 3, 3, 1]) / 8
    windows = image[..., 1:-1, 1:-1].unfold(2, 4, 2).unfold(3, 4, 2)
    want = torch.einsum("nchwij,i,j->nchw", windows, weights, weights)
    torch.testing.assert_close(small[..., 1:-1, 1:-1], want, rtol=0, atol=1e-6)
    constant = torch.full((1, 2, 20, 20), 3.5)
    torch.testing.assert_close(augment.resize(constant, 64), torch.full((1, 2, 64, 64), 3.5))
    assert augment.resize(image, 32) is image
