"""A small set of action clips as real MP4 files, made so that neither stream can name all its classes alone.

Eight classes in four pairs. A scene number fixes background, place, size, speed and texture for both members
of a pair, so that they differ in one thing only:

- square_rises / square_falls and ring_grows / ring_shrinks: one is the other played backwards. Each picture,
  and each unordered set of pictures taken symmetrically in time, is as likely in one as in the other: only
  motion tells them.
- disc_red_slides / disc_blue_slides and bar_green_turns / bar_purple_turns: the same brightness everywhere,
  another hue. Flow is computed from brightness: only appearance tells them. Both slide and turn either way.

Shapes and motions name the pair to either stream. So one stream alone can reach 75 %, both together 100 %.
"""

from __future__ import annotations

import csv
import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..files import write_atomically
from .video import write_video


@dataclass(frozen=True)
class Action:
    """One class: a shape with its motion, its hue (degrees in the plane of Cb, Cr), played forwards or
    not."""

    shape: str
    hue: float
    backwards: bool = False


ACTIONS = {
    "bar_green_turns": Action("bar", hue=230),
    "bar_purple_turns": Action("bar", hue=45),
    "disc_blue_slides": Action("disc", hue=345),
    "disc_red_slides": Action("disc", hue=110),
    "ring_grows": Action("ring", hue=280),
    "ring_shrinks": Action("ring", hue=280, backwards=True),
    "square_falls": Action("square", hue=170),
    "square_rises": Action("square", hue=170, backwards=True),
}
SHAPES = ("bar", "disc", "ring", "square")
PAIRS = {shape: tuple(n for n, action in ACTIONS.items() if action.shape == shape) for shape in SHAPES}
NOISE = 2.0  # standard deviation of the sensor noise, levels


def make_synthetic(
    folder: str | Path,
    *,
    clips_per_class_train: int,
    clips_per_class_test: int,
    seed: int,
    frames: int = 15,
    size: int = 64,
    workers: int = 2,
) -> Path:
    """Write the clips of all classes as ``folder/CLASS/PART_NNN.mp4`` with ``folder/clips.csv``.

    Args:
        folder: made if missing; files of these names in it are replaced.
        clips_per_class_train, clips_per_class_test: scenes of each part. Clips of one scene number share a
            group; the parts' scenes are drawn from disjoint seeds.
        seed: the set is a function of it and the other arguments.
        frames: per clip. An odd multiple of 3 keeps three TSN segments symmetric in time.
        size: side of the square pictures, pixels, even; everything in the picture scales with it.
        workers: writing threads.
    Returns:
        The path of clips.csv: columns path (relative), label, group, split (train or test).
    """
    folder = Path(folder)
    rows = []
    for part, count in (("train", clips_per_class_train), ("test", clips_per_class_test)):
        for scene in range(count):
            group = f"{part}_{scene:03d}"
            rows += [(f"{name}/{group}.mp4", name, group, part) for name in ACTIONS]
    for name in ACTIONS:
        (folder / name).mkdir(parents=True, exist_ok=True)

    def write(row) -> None:
        path, name, group, part = row
        scene = (int(part == "test"), int(group.rpartition("_")[2]))
        write_video(folder / path, film(name, scene, seed=seed, frames=frames, size=size), fps=25.0)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(write, rows))
    table = folder / "clips.csv"
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("path", "label", "group", "split"), *rows])
    write_atomically(table, text.getvalue())  # last: the table says that the set is complete
    return table


def film(name: str, scene: tuple[int, int], *, seed: int, frames: int, size: int) -> np.ndarray:
    """The noisy pictures of one clip, uint8 [frames, size, size, 3] RGB; ``scene`` is (part, number)."""
    shape = SHAPES.index(ACTIONS[name].shape)
    clean = render(name, np.random.default_rng((seed, *scene, shape, 0)), frames, size)
    grain = np.random.default_rng((seed, *scene, shape, 1 + PAIRS[ACTIONS[name].shape].index(name)))
    noisy = clean + grain.normal(scale=NOISE, size=(*clean.shape[:3], 1))
    return np.clip(np.rint(noisy), 0, 255).astype(np.uint8)


def render(name: str, rng: np.random.Generator, frames: int, size: int) -> np.ndarray:
    """The pictures without noise, float64 [frames, size, size, 3]; all that is random comes from ``rng``."""
    action, unit = ACTIONS[name], size / 64
    time = np.arange(frames)[:, None, None] - (frames - 1) / 2  # [T, 1, 1]
    y, x = (np.mgrid[:size, :size] - (size - 1) / 2) / unit  # all lengths below are in 1/64 of the side
    light = rng.choice((60.0, 195.0))
    ground = light + texture(x, y, rng, amplitude=14)
    ground_chroma = rng.uniform(-8, 8, size=2)

    cover, u, v = place(action.shape, -time if action.backwards else time, x, y, rng, pace=15 / frames)
    figure = rng.uniform(115, 140) + texture(u, v, rng, amplitude=16)
    hue = np.deg2rad(action.hue + rng.uniform(-12, 12))
    chroma = rng.uniform(42, 55) * np.array([np.cos(hue), np.sin(hue)])

    luma = ground + cover * (figure - ground)  # [T, H, W]
    cb, cr = (g + cover * (f - g) for g, f in zip(ground_chroma, chroma, strict=True))
    return np.stack([luma + 1.402 * cr, luma - 0.344136 * cb - 0.714136 * cr, luma + 1.772 * cb], axis=-1)


def place(shape: str, time: np.ndarray, x: np.ndarray, y: np.ndarray, rng: np.random.Generator, pace: float):
    """How much of each pixel the shape covers [T, H, W], and each pixel's place (u, v) on the shape.

    Time runs symmetrically around 0, and the ranges keep the shape inside the central 7/8 of the picture.
    """
    u, v = x - rng.uniform(-6, 6), y - rng.uniform(-6, 6)
    half, speed = rng.uniform(8, 11), pace * rng.uniform(0.8, 1.4)
    way = rng.choice((-1.0, 1.0))
    if shape == "square":
        v = v - speed * time
        inside = half - np.maximum(abs(u), abs(v))
    elif shape == "disc":
        u = u - way * speed * time
        inside = half - np.hypot(u, v)
    elif shape == "ring":
        scale = 1 + 0.045 * speed * time
        u, v = u / scale, v / scale
        inside = scale * (4 - abs(np.hypot(u, v) - half))
    else:
        angle = rng.uniform(0, np.pi) + way * 0.09 * speed * time
        u, v = np.cos(angle) * u + np.sin(angle) * v, np.cos(angle) * v - np.sin(angle) * u
        inside = np.minimum(2 * half - abs(u), 5 - abs(v))
    u, v, inside = np.broadcast_arrays(u, v, inside)
    return np.clip(inside * x.shape[0] / 64 + 0.5, 0, 1), u, v


def texture(u: np.ndarray, v: np.ndarray, rng: np.random.Generator, amplitude: float) -> np.ndarray:
    """A sum of random plane waves, 6 to 16 lengths long: smooth, so that it can be sampled anywhere."""
    waves = 5
    angle, phase = rng.uniform(0, 2 * np.pi, size=(2, waves))
    rate = 2 * np.pi / rng.uniform(6, 16, size=waves)
    total = sum(np.sin(k * (np.cos(a) * u + np.sin(a) * v) + p) for a, p, k in zip(angle, phase, rate, strict=True))
    return amplitude * np.sqrt(2 / waves) * total
