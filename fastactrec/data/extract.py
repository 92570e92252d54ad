"""One clip to its images: what every worker process of ``prepare`` runs.

The result is a piece in OUT/work, made of two files: NNNNNNNN.jpegs, the images one after another, and then
NNNNNNNN.json, which says where they are, or why there are none. Both appear whole (written aside, flushed to
disk, renamed), so a process killed at any moment leaves nothing that a second start could mistake; what is
made does not depend on who made it, or when. assemble.py turns the pieces into a pack.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ..config import FlowConfig
from ..errors import DecodeError
from ..files import atomic_file
from .frames import FrameFolder, read_frame_folder
from .jpeg import encode_gray, encode_rgb, read_jpeg
from .sources import ClipSource
from .video import Size, count_frames, read_frames, resize_image, video_fps

BATCH = 16  # frames in memory at a time; each flow call gets 16 pairs


@dataclass(frozen=True)
class Extraction:
    """How every clip of a pack is turned into images."""

    root: Path  # of the source: ends the search for flow beside frame folders
    work: Path
    size: Size
    frame_step: int
    max_frames: int
    bound_px: float
    quality: int
    given_flow: bool
    flow: FlowConfig
    threads: int | None  # of the flow; results do not depend on it


def extract_clip(job: Extraction, number: int, clip: ClipSource) -> dict:
    """Make clip ``number``'s piece; returns what its JSON file says: frames, or a rejection's reason."""
    images = piece(job.work, number, "jpegs")
    try:
        with atomic_file(images) as file:
            record = _extract(job, clip, file)
    except DecodeError as error:
        record = {"reason": str(error).removeprefix(f"{clip.path}: ")}
    with atomic_file(piece(job.work, number, "json")) as file:
        file.write(json.dumps(record).encode())
    return record


def write_rejection(work: Path, number: int, reason: str) -> None:
    """The piece of a clip that need not be opened to be rejected."""
    with atomic_file(piece(work, number, "json")) as file:
        file.write(json.dumps({"reason": reason}).encode())


def read_record(work: Path, number: int) -> dict | None:
    """What ``extract_clip`` returned for a clip that is done, else None."""
    try:
        return json.loads(piece(work, number, "json").read_bytes())
    except FileNotFoundError:
        return None


def _extract(job: Extraction, clip: ClipSource, file) -> dict:
    if clip.path.is_dir():
        folder = read_frame_folder(clip.path, job.root)
        last = len(folder.frames) if clip.end is None else min(clip.end, len(folder.frames))
        kept = range(*_middle(job, len(range(clip.start, last, job.frame_step)), clip.start, last))
        if len(kept) < 2:
            raise DecodeError(_too_short(len(kept)))
        if job.given_flow:
            return _store_given(folder, kept, job, file)
        frames = (resize_image(read_jpeg(folder.frames[k])[1], job.size) for k in kept)
        return _store(frames, 0.0, job, file)
    start, end, step = clip.start, clip.end, job.frame_step
    if job.max_frames:
        start, end, step = _middle(job, count_frames(clip.path, start=start, end=end, step=step), start, end)
    fps = video_fps(clip.path) / step
    return _store(read_frames(clip.path, size=job.size, start=start, end=end, step=step), fps, job, file)


def _middle(job: Extraction, count: int, start: int, end: int | None) -> tuple[int, int | None, int]:
    """(start, end, step) of the frames to keep, out of ``count`` that come from ``start`` on."""
    step = job.frame_step
    if job.max_frames and count > job.max_frames:
        start += (count - job.max_frames) // 2 * step
        end = start + job.max_frames * step
    return start, end, step


def _store(frames: Iterator[np.ndarray], fps: float, job: Extraction, file) -> dict:
    """Write frames and their TV-L1 flow, a batch at a time."""
    from .flow import encode_flow, to_gray, tvl1  # needs torch, which the front door can do without

    rgb, flow, last, shape = [], [], None, None
    for batch in _batches(frames, BATCH):
        shape = shape or batch[0].shape
        if any(frame.shape != shape for frame in batch):
            raise DecodeError(f"frames of different sizes after resizing, {shape[1]}x{shape[0]} at first")
        rgb += [_append(file, encode_rgb(frame, job.quality)) for frame in batch]
        gray = np.asarray(to_gray(np.stack(batch)))
        gray = gray if last is None else np.concatenate([last, gray])
        last = gray[-1:]
        if len(gray) > 1:
            motion = tvl1(gray[:-1], gray[1:], **asdict(job.flow), threads=job.threads)
            codes = np.asarray(encode_flow(motion, job.bound_px))
            flow += [_append(file, encode_gray(plane, job.quality)) for pair in codes for plane in pair]
    if len(rgb) < 2:
        raise DecodeError(_too_short(len(rgb)))
    return {"frames": len(rgb), "width": shape[1], "height": shape[0], "fps": fps, "rgb": rgb, "flow": flow}


def _store_given(folder: FrameFolder, kept: range, job: Extraction, file) -> dict:
    """Write another tool's frames and flow, byte for byte; frames are resized only to fit their flow."""
    rgb, flow, shape = [], [], None
    for k in kept[:-1]:
        for path in (folder.flow_x[k], folder.flow_y[k]):
            data, plane = read_jpeg(path, gray=True)
            shape = shape or plane.shape
            if plane.shape != shape:
                raise DecodeError(
                    f"{path.name}: {plane.shape[1]}x{plane.shape[0]}, others {shape[1]}x{shape[0]} pixels"
                )
            flow.append(_append(file, data))
    for k in kept:
        data, image = read_jpeg(folder.frames[k])
        if image.shape[:2] != shape:
            data = encode_rgb(resize_image(image, (shape[1], shape[0])), job.quality)
        rgb.append(_append(file, data))
    return {"frames": len(rgb), "width": shape[1], "height": shape[0], "fps": 0.0, "rgb": rgb, "flow": flow}


def _too_short(frames: int) -> str:
    return f"{frames} frame{'' if frames == 1 else 's'}: no flow"


def _batches(items: Iterator, size: int) -> Iterator[list]:
    while batch := list(itertools.islice(items, size)):
        yield batch


def _append(file, data: bytes) -> tuple[int, int]:
    """Write at the end; returns (offset, length)."""
    offset = file.tell()
    file.write(data)
    return offset, len(data)


def piece(work: Path, number: int, kind: str) -> Path:
    return work / f"{number:08d}.{kind}"
