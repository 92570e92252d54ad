"""Video files in and out, through PyAV (FFmpeg inside).

Headers are not believed: frames are counted by decoding them, one by one, so that memory does not grow with
the clip. Decoding uses one thread (FFmpeg's frame threads can deadlock and hold many frames); clips are what
runs in parallel.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from av.video.reformatter import Interpolation, VideoReformatter

from ..errors import DecodeError
from ..files import atomic_path

Size = tuple[int, int | None]  # as config.parse_size returns: (short side, None) or (width, height)
MAX_SIDE = 8192
# Bilinear in swscale widens its kernel when it shrinks, so it does not alias; the two flags make the bytes
# the same on every CPU, at no cost (0.92 ms against 1.06 ms, 1280x720 -> 340x256).
RESIZE_NAME = "swscale bilinear"
_RESIZE = int(Interpolation.BILINEAR | Interpolation.ACCURATE_RND | Interpolation.BITEXACT)


def fit(width: int, height: int, size: Size) -> tuple[int, int]:
    """(width, height) in pixels after the resize rule ``size``; short:N keeps the aspect, rounded."""
    if size[1] is not None:
        return size[0], size[1]
    scale = size[0] / min(width, height)
    return (size[0], round(height * scale)) if width <= height else (round(width * scale), size[0])


def read_frames(
    path: str | os.PathLike,
    *,
    size: Size = (256, None),
    start: int = 0,
    end: int | None = None,
    step: int = 1,
) -> Iterator[np.ndarray]:
    """Decode a video and resize its frames, upright as a player shows them.

    Args:
        path: video file; any name, also with a leading dash, colons or bytes that are not UTF-8.
        size: (short side, None) or (width, height), pixels.
        start, end: frames [start, end), counted as they come out of the decoder; an end behind the last frame
            keeps what there is.
        step: keep every step-th frame, beginning with ``start``.
    Yields:
        uint8 [H, W, 3] RGB, all of one size even where the video's own size changes.
    Raises:
        DecodeError: the file is missing, empty, has no picture, breaks off, or has no frame in the range.
    """
    with _decoded(path) as frames:
        target = None
        reformatter = VideoReformatter()
        for frame in itertools.islice(frames, start, end, step):
            turns = round(frame.rotation / 90) % 4  # counterclockwise; FFmpeg players do the same
            if target is None:
                shown = (frame.height, frame.width) if turns % 2 else (frame.width, frame.height)
                target = fit(*shown, size)
                if max(target) > MAX_SIDE:
                    raise DecodeError(f"{path}: {shown[0]}x{shown[1]} would become {target[0]}x{target[1]} pixels")
            width, height = target[::-1] if turns % 2 else target
            image = reformatter.reformat(frame, width, height, "rgb24", interpolation=_RESIZE).to_ndarray()
            yield np.ascontiguousarray(np.rot90(image, turns)) if turns else image
    if target is None:
        where = f"no frame in {start} to {end}" if start or end is not None else "no frame decodes"
        raise DecodeError(f"{path}: {where}")


def count_frames(path: str | os.PathLike, *, start: int = 0, end: int | None = None, step: int = 1) -> int:
    """How many frames ``read_frames`` gives for the same arguments (or 0). Decodes the file."""
    with _decoded(path) as frames:
        return sum(1 for _ in itertools.islice(frames, start, end, step))


def video_fps(path: str | os.PathLike) -> float:
    """Frames per second as the container states it (an average where the rate varies), or 0."""
    with _open(path) as (_, stream):
        return float(stream.average_rate or stream.guessed_rate or 0)


def resize_image(image: np.ndarray, size: Size) -> np.ndarray:
    """uint8 [H, W, 3] RGB to the size ``size`` asks for, by the filter that ``read_frames`` uses."""
    height, width = image.shape[:2]
    target = fit(width, height, size)
    if target == (width, height):
        return image
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
    return frame.reformat(*target, "rgb24", interpolation=_RESIZE).to_ndarray()


def write_video(
    path: str | os.PathLike, frames: Iterable[np.ndarray], fps: float = 25.0, codec: str = "libx264"
) -> None:
    """Write an MP4 file, whole or not at all.

    Args:
        path: the file to write; replaced when it exists.
        frames: uint8 [H, W, 3] RGB, at least one, all of one size. An odd side is continued by one pixel,
            since 4:2:0 video has even sides only.
        fps: frames per second.
        codec: FFmpeg's name of the encoder; mpeg4 where this build of FFmpeg lacks it.
    Raises:
        ValueError: no frames, or a frame of another shape or type.
    """
    path = Path(path)
    if codec not in av.codecs_available:
        codec = "mpeg4"
    with atomic_path(path) as partial, av.open(f"file:{partial}", "w", format="mp4") as container:
        stream, shape = None, None
        for frame in frames:
            if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
                raise ValueError(f"write_video: a frame is {frame.dtype} {frame.shape}, not uint8 [H, W, 3]")
            if stream is None:
                shape = frame.shape
                stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(100_000))
                stream.height, stream.width = (side + side % 2 for side in shape[:2])
                stream.pix_fmt = "yuv420p"
                stream.codec_context.thread_count = 1  # the same bytes on every machine
                stream.options = {"crf": "16"} if codec == "libx264" else {"qscale": "2"}
            if frame.shape != shape:
                raise ValueError(f"write_video: a frame is {frame.shape}, the first was {shape}")
            even = np.pad(frame, ((0, shape[0] % 2), (0, shape[1] % 2), (0, 0)), mode="edge")
            container.mux(stream.encode(av.VideoFrame.from_ndarray(even, format="rgb24")))
        if stream is None:
            raise ValueError(f"{path}: write_video got no frames")
        container.mux(stream.encode(None))


@contextlib.contextmanager
def _open(path) -> Iterator[tuple]:
    """An open container and its video stream; every failure becomes a DecodeError that says why."""
    try:
        if os.stat(path).st_size == 0:
            raise DecodeError(f"{path}: empty file (0 bytes)")
        # "file:" keeps FFmpeg from taking a colon in the name for a protocol; metadata come in any encoding.
        with av.open(f"file:{os.fspath(path)}", metadata_errors="ignore") as container:
            stream = container.streams.best("video")
            if stream is None or stream.disposition & av.stream.Disposition.attached_pic:
                kinds = ", ".join(sorted({s.type for s in container.streams})) or "nothing"
                raise DecodeError(f"{path}: no video in it ({kinds} only)")
            if stream.codec_context is None:
                raise DecodeError(f"{path}: no decoder for its video in this build of FFmpeg")
            stream.codec_context.thread_count = 1
            yield container, stream
    except av.error.FFmpegError as error:  # before OSError: some are both
        hint = ": truncated, or not a video" if isinstance(error, av.error.InvalidDataError) else ""
        raise DecodeError(f"{path}: {error.strerror}{hint}") from error
    except OSError as error:
        raise DecodeError(f"{path}: {error.strerror or error}") from error


@contextlib.contextmanager
def _decoded(path) -> Iterator[Iterator[av.VideoFrame]]:
    with _open(path) as (container, stream):
        yield container.decode(stream)
