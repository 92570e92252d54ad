"""Labels and flow drawn beside a video frame. NumPy and Pillow only."""

from __future__ import annotations

import functools

import numpy as np
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

BACKGROUND, TEXT, BAR, TRACK = (24, 26, 30), (236, 238, 240), (86, 156, 214), (58, 62, 68)


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    # matplotlib brings DejaVu Sans with it, so the same glyphs are there on every machine
    return ImageFont.truetype(font_manager.findfont("DejaVu Sans"), size)


def draw_overlay(frame: np.ndarray, flow: np.ndarray, ranked: list[tuple[str, float]]) -> np.ndarray:
    """A frame, the colour-coded flow to its right, and bars with the labels' probabilities below.

    Args:
        frame, flow: uint8 [H, W, 3].
        ranked: (label, probability in 0..1), best first.
    Returns:
        uint8 [H', W', 3] with even sides, new; H' and W' depend on H, W and the number of labels alone.
    """
    height, width = frame.shape[:2]
    row = max(14, height // 12)
    canvas_width = max(2 * width, 240)
    canvas = Image.new("RGB", (canvas_width + canvas_width % 2, height + row * len(ranked) + row // 2), BACKGROUND)
    canvas.paste(Image.fromarray(frame), (0, 0))
    canvas.paste(Image.fromarray(flow), (width, 0))
    draw = ImageDraw.Draw(canvas)
    font = _font(max(10, int(row * 0.7)))
    middle = canvas_width * 3 // 5  # names on the left, bars on the right
    for place, (label, chance) in enumerate(ranked):
        top = height + row // 4 + place * row
        draw.text((row // 3, top + row // 2), _fit(label, font, middle - row), fill=TEXT, font=font, anchor="lm")
        percent_width = int(font.getlength("100.0 %")) + row // 3
        left, right = middle, canvas_width - percent_width - row // 3
        draw.rectangle((left, top + row // 5, right, top + row - row // 5), fill=TRACK)
        draw.rectangle((left, top + row // 5, left + int((right - left) * chance), top + row - row // 5), fill=BAR)
        draw.text((canvas_width - row // 3, top + row // 2), f"{chance:.1%}", fill=TEXT, font=font, anchor="rm")
    image = np.asarray(canvas)
    return np.pad(image, ((0, image.shape[0] % 2), (0, 0), (0, 0)), mode="edge")


def _fit(label: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    """The label, shortened where it would run into the bars."""
    label = "".join(c if c.isprintable() else "�" for c in label)
    if font.getlength(label) <= width:
        return label
    while label and font.getlength(label + "…") > width:
        label = label[:-1]
    return label + "…"
