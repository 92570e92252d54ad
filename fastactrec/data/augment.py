"""Where to crop: TSN's multi-scale corner crops for training, 1, 5 or 10 crops for testing
(yjxiong/tsn-pytorch, transforms.py). All in pixels of the JPEG; a crop is then resized to the network's
square input.

Resizing a flow crop moves its samples and leaves their values alone, as TSN does: a displacement stays what
it was in the JPEG's pixels, whatever the scale of the crop.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch.nn.functional as F
from torch import Tensor

Box = tuple[int, int, int, int]
NATIVE_RATIO = 224, 256  # the input's side against the short side of the frame it is cut from

# In quarters of the free space (x, y): corners and centre; then TSN's "more_fix_crop".
CORNERS_CENTRE = ((0, 0), (4, 0), (0, 4), (4, 4), (2, 2))
POSITIONS = (*CORNERS_CENTRE, (0, 2), (4, 2), (2, 4), (2, 0), (1, 1), (3, 1), (1, 3), (3, 3))


def train_crop(width: int, height: int, scales: Sequence[float], rng: np.random.Generator) -> Box:
    """One random crop: its width and its height are each scale x short side, at most one scale step apart,
    all such pairs equally likely, at one of TSN's 13 fixed positions.

    TSN also snaps a side within 2 pixels of the network input to the input; that is left out here because it
    would tie the crop to the input size; the resize that follows makes up for it.

    Args:
        width, height: of the picture, pixels.
        scales: in (0, 1], in steps' order.
    Returns:
        (top, left, height, width), pixels.
    """
    short = min(width, height)
    sides = [max(int(short * scale), 1) for scale in scales]
    pairs = [(w, h) for i, h in enumerate(sides) for j, w in enumerate(sides) if abs(i - j) <= 1]
    w, h = pairs[rng.integers(len(pairs))]
    return _place(width, height, w, h, *POSITIONS[rng.integers(len(POSITIONS))])


def test_crops(width: int, height: int, size: int, crops: int) -> list[tuple[int, int, int, int, bool]]:
    """The crops of a test frame.

    TSN scales the frame so that its short side is 256 for an input of 224 (here round(size * 256 / 224)) and
    cuts size x size from it; the same squares are given here in the pixels of the frame as it is.

    Args:
        width, height: of the picture, pixels.
        size: side of the network's input.
        crops: 1 (centre), 5 (upper left, upper right, lower left, lower right, centre) or 10 (each of the 5,
            mirrored after plain).
    Returns:
        (top, left, height, width, flip) each.
    """
    if crops not in (1, 5, 10):
        raise ValueError(f"crops must be 1, 5 or 10, not {crops}")
    scaled_short = round(size * NATIVE_RATIO[1] / NATIVE_RATIO[0])
    side = max(round(min(width, height) * size / scaled_short), 1)
    if crops == 1:
        return [(round((height - side) / 2), round((width - side) / 2), side, side, False)]
    flips = (False, True) if crops == 10 else (False,)
    return [(*_place(width, height, side, side, *where), flip) for where in CORNERS_CENTRE for flip in flips]


test_crops.__test__ = False  # a public name that pytest must not collect


def _place(width: int, height: int, w: int, h: int, quarters_x: int, quarters_y: int) -> Box:
    return quarters_y * ((height - h) // 4), quarters_x * ((width - w) // 4), h, w


def resize(images: Tensor, size: int) -> Tensor:
    """[N, C, h, w] to [N, C, size, size]: bilinear, antialiased when it shrinks; the images themselves if
    they fit."""
    if images.shape[-2:] == (size, size):
        return images
    return F.interpolate(images, size=(size, size), mode="bilinear", antialias=True, align_corners=False)
