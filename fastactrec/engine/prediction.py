"""Scores of a video file: the same frames, flow, crops and networks as in evaluation, computed on the fly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from ..config import normalisation, parse_size
from ..data.flow import encode_flow, to_gray, tvl1
from ..data.loader import clip_inputs
from ..data.sampling import run_indices, test_offsets
from ..data.video import read_frames
from ..errors import DecodeError
from ..models.streams import StreamNet, StreamSpec

FRAMES_IN_MEMORY = 512
"""Longer videos are decoded twice, so that memory does not grow with the clip."""


def video_frames(path: Path, spec: StreamSpec) -> Iterator[np.ndarray]:
    """uint8 [H, W, 3] frames of a video, resized and stepped as the stream was trained."""
    return read_frames(path, size=parse_size(spec.frame_size), step=spec.frame_step)


class ClipFrames:
    """Chosen frames of a video, without holding the whole of a long one."""

    def __init__(self, path: Path, spec: StreamSpec):
        self.path, self.spec = path, spec
        self.count = 0
        self._kept: list[np.ndarray] | None = []
        for frame in video_frames(path, spec):
            self.count += 1
            if self._kept is not None:
                self._kept.append(frame)
                if self.count > FRAMES_IN_MEMORY:
                    self._kept = None
        if self.count < 2:
            raise DecodeError(f"{path}: {self.count} frame, but motion needs two")

    def take(self, wanted: np.ndarray) -> dict[int, np.ndarray]:
        """The frames of these numbers."""
        numbers = {int(number) for number in wanted.ravel()}
        source = self._kept if self._kept is not None else video_frames(self.path, self.spec)
        last = max(numbers)
        found = {}
        for number, frame in enumerate(source):
            if number in numbers:
                found[number] = frame
            if number == last:
                break
        return found


@torch.no_grad()
def score_video(
    frames: ClipFrames, models: dict[str, StreamNet], *, segments: int, crops: int, device: torch.device
) -> dict[str, np.ndarray]:
    """Logits of a video per stream, float64 [classes], averaged over segments and crops."""
    scores = {}
    for stream, model in models.items():
        spec = model.spec
        inputs = torch.cat(list(_segment_inputs(frames, spec, segments, crops)))
        views = model.to(device).eval()(inputs.to(device)[:, None])
        scores[stream] = views.double().mean(0).cpu().numpy()
    return scores


def _segment_inputs(frames: ClipFrames, spec: StreamSpec, segments: int, crops: int) -> Iterator[torch.Tensor]:
    """Per segment, float32 [crops, C, H, W]."""
    flow = spec.stream == "flow"
    count, length = (frames.count - 1, spec.flow_length) if flow else (frames.count, 1)
    runs = run_indices(test_offsets(count, segments, length), count, length)
    images = frames.take(np.concatenate([runs, runs + 1]) if flow else runs)
    common = {
        "segments": 1,
        "crops": crops,
        "flow_length": length,
        "crop": spec.crop,
        "bound_px": spec.bound_px,
    }
    codes = _flow_codes(images, np.unique(runs), spec.bound_px) if flow else {}
    for run in runs:
        chosen = np.stack([codes[k] if flow else images[k] for k in run.tolist()])
        yield clip_inputs(chosen, modality=spec.stream, **common, **normalisation(spec.stream, spec.bound_px))


def _flow_codes(images: dict[int, np.ndarray], numbers: np.ndarray, bound_px: float) -> dict[int, np.ndarray]:
    """uint8 [2, H, W] codes of the flow k -> k + 1 for every k in ``numbers``."""
    gray = {k: to_gray(image) for k, image in images.items()}
    codes = {}
    for k in numbers.tolist():
        codes[k] = np.asarray(encode_flow(tvl1(gray[k], gray[k + 1]), bound_px))
    return codes
