"""``predict``: ranked labels for video files, as text, JSON or drawn into a copy of the video."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from . import cli
from .config import PredictConfig, parse_weights
from .data.flow import flow_to_color, to_gray, tvl1
from .data.video import read_frames, video_fps, write_video
from .engine.prediction import ClipFrames, score_video
from .engine.run_folder import open_run
from .engine.world import open_world
from .errors import DecodeError, InputError
from .models.fusion import fuse, softmax
from .models.streams import StreamSpec
from .progress import say, track
from .reporting.overlay import draw_overlay

OVERLAY_SHORT_SIDE = 256  # pixels; what the networks see is often too small to look at


def run(config: PredictConfig) -> None:
    folder = open_run(config.run)
    trained = folder.config
    classes = folder.classes
    models = {stream: folder.model(stream) for stream in folder.streams}
    weights = parse_weights(trained.fusion_weights, folder.streams)
    segments, crops = config.test_segments or trained.test_segments, config.test_crops or trained.test_crops
    spec = next(iter(models.values())).spec
    for clip in config.clips:
        if not clip.is_file():
            raise InputError(f"{clip}: no such video file")
    overlays = _overlay_paths(config)
    failed = 0
    with open_world(config.device, "predict runs on one process") as world:
        for clip in config.clips if len(config.clips) == 1 else track(config.clips, "predict"):
            try:
                frames = ClipFrames(clip, spec)
                logits = score_video(frames, models, segments=segments, crops=crops, device=world.device)
            except DecodeError as error:
                say(f"fastactrec predict: {error}")
                failed += 1
                continue
            fused = fuse({name: value[None] for name, value in logits.items()}, weights, trained.fusion)[0]
            chances = fused / fused.sum() if trained.fusion == "softmax" else softmax(fused)
            ranked = [(classes[i], float(chances[i])) for i in np.argsort(-chances, kind="stable")[: config.top]]
            _print(clip, ranked, logits, classes, config.json)
            if overlays:
                _write_overlay(overlays[clip], clip, spec, ranked)
    if failed:
        raise InputError(f"{failed} of {len(config.clips)} clips could not be read, named above")


def _print(clip: Path, ranked, logits: dict[str, np.ndarray], classes: list[str], as_json: bool) -> None:
    if as_json:
        labels = [{"label": label, "score": round(score, 6)} for label, score in ranked]
        streams = {name: classes[int(value.argmax())] for name, value in logits.items()}
        print(json.dumps({"clip": str(clip), "labels": labels, "streams": streams}), flush=True)
        return
    print(clip)
    for label, score in ranked:
        print(f"  {score:7.2%}  {label}")


def _overlay_paths(config: PredictConfig) -> dict[Path, Path]:
    """Where each clip's overlay goes; raises InputError when one would replace another file of this command."""
    if config.overlay is None:
        return {}
    many = len(config.clips) > 1 or config.overlay.is_dir()
    paths = {clip: config.overlay / f"{clip.stem}.overlay.mp4" if many else config.overlay for clip in config.clips}
    taken = {clip.resolve() for clip in config.clips}
    for clip, path in paths.items():
        if path.resolve() in taken:
            raise InputError(
                f"--overlay {path}: {clip} would replace another file of this command; choose another place"
            )
        taken.add(path.resolve())
    return paths


def _write_overlay(target: Path, clip: Path, spec: StreamSpec, ranked) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_video(target, _overlay_frames(clip, spec, ranked), fps=(video_fps(clip) or 25.0) / spec.frame_step)
    except OSError as error:
        raise InputError(f"--overlay {target}: cannot be written: {error.strerror}") from error
    say(f"written {target}")


def _overlay_frames(clip: Path, spec: StreamSpec, ranked) -> Iterator[np.ndarray]:
    """Each frame with the labels and the flow to the next one drawn beside it; the last repeats its flow."""
    size, previous, flow = (OVERLAY_SHORT_SIDE, None), None, None
    for frame in read_frames(clip, size=size, step=spec.frame_step):
        if previous is not None:
            motion = np.asarray(tvl1(to_gray(previous), to_gray(frame)))
            # full colour for the fastest hundredth, so that slow motion shows; a still picture stays white
            fastest_px = float(np.quantile(np.hypot(*motion), 0.99))
            flow = flow_to_color(motion, max_px=max(1.0, fastest_px))
            yield draw_overlay(previous, flow, ranked)
        previous = frame
    if previous is not None and flow is not None:
        yield draw_overlay(previous, flow, ranked)


if __name__ == "__main__":
    sys.exit(cli.run("predict"))
