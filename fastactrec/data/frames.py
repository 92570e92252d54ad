"""Folders of extracted frames, as three families of tools leave them; the layout is detected, never assumed.

========================  ====================  ================================  ============================
made by                   frames                flow                              flow k belongs to
========================  ====================  ================================  ============================
dense_flow (TSN)          img_00001.jpg, N - 1  flow_x_00001.jpg, N - 1           frames k-1 -> k, a step late
denseflow, MMAction2      img_00000.jpg, N      flow_x_00000.jpg or x_..., N - 1  frames k -> k+1
gpu_flow (Feichtenhofer)  frame000001.jpg, N    u/VIDEO/frame000001.jpg and v/    frames k -> k+1
                                                (or x/, y/), N - 1
========================  ====================  ================================  ============================

As many flows as frames is TSN's way, which drops the first frame: its flows are shifted by one, so that
flow k is k -> k+1 as everywhere in this package.
"""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path
from typing import NamedTuple

from ..errors import DecodeError

_FRAME = re.compile(r"(?:img|image|frame)_?(\d+)\.jpe?g", re.IGNORECASE)
_FLOW = re.compile(r"(?:flow_)?([xy])_(\d+)\.jpe?g", re.IGNORECASE)
_PAIRS = (("u", "v"), ("x", "y"))


class FrameFolder(NamedTuple):
    """One clip as files: N frames, and N - 1 flows (x and y of k -> k+1) or none."""

    frames: list[Path]
    flow_x: list[Path]
    flow_y: list[Path]


def is_frame_folder(names) -> bool:
    """Whether a folder with these file names is a clip."""
    return any(_FRAME.fullmatch(name) for name in names)


def is_flow_branch(path: Path) -> bool:
    """Whether a folder is the u, v, x or y half of a flow tree, whose file names are those of frames."""
    for pair in _PAIRS:
        if path.name in pair:
            other = pair[1 - pair.index(path.name)]
            return (path.parent / other).is_dir()
    return False


def read_frame_folder(folder: Path, root: Path) -> FrameFolder:
    """The files of one clip in order; ``root`` ends the search for a separate flow tree above ``folder``.

    Raises:
        DecodeError: a frame or flow is missing from the numbering, or the counts fit no known layout.
    """
    names = sorted(os.listdir(folder))
    frames = _numbered(folder, {int(m[1]): name for name in names if (m := _FRAME.fullmatch(name))}, "frame")
    flows = {"x": {}, "y": {}}
    for name in names:
        if found := _FLOW.fullmatch(name):
            flows[found[1].lower()][int(found[2])] = name
    if flows["x"] or flows["y"]:
        flow_x, flow_y = (_numbered(folder, flows[axis], f"{axis} flow") for axis in "xy")
    else:
        flow_x, flow_y = _separate_flow(folder, root)
    if len(flow_x) != len(flow_y):
        raise DecodeError(f"{folder}: {len(flow_x)} x flows but {len(flow_y)} y flows")
    if flow_x and len(flow_x) == len(frames):
        flow_x, flow_y = flow_x[1:], flow_y[1:]
    elif flow_x and len(flow_x) != len(frames) - 1:
        raise DecodeError(f"{folder}: {len(frames)} frames but {len(flow_x)} flows, neither as many nor one less")
    return FrameFolder(frames, flow_x, flow_y)


def _separate_flow(folder: Path, root: Path) -> tuple[list[Path], list[Path]]:
    """Flow of ``folder`` in u/ and v/ (or x/ and y/) below it, or in a tree of the same shape beside it."""
    places = [(folder, Path())]
    for base in folder.parents:
        inside = folder.relative_to(base)
        roots, tails = (base, base / "tvl1_flow"), (inside, Path(*inside.parts[1:]))
        places += itertools.product(roots, tails)
        if base == root:
            break
    for base, relative in places:
        for pair in _PAIRS:
            halves = [base / half / relative for half in pair]
            if all(half.is_dir() for half in halves) and folder not in halves:
                lists = []
                for half in halves:
                    numbers = {int(m[1]): name for name in os.listdir(half) if (m := _FRAME.fullmatch(name))}
                    lists.append(_numbered(half, numbers, "flow"))
                if any(lists):
                    return lists[0], lists[1]
    return [], []


def _numbered(folder: Path, numbers: dict[int, str], what: str) -> list[Path]:
    """The files in numerical order; a gap is an error, since what follows would be out of step."""
    order = sorted(numbers)
    for before, after in itertools.pairwise(order):
        if after != before + 1:
            raise DecodeError(f"{folder}: {what} {before + 1} is missing")
    return [folder / numbers[number] for number in order]
