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
from .data.video import video_fps, write_video
from .engine.prediction import ClipFrames, score_video, video_frames
from .engine.run_folder import open_run
from .engine.world import open_world
from .errors import DecodeError, InputError
from .models.fusion import fuse, softmax
from .models.streams import StreamSpec
from .progress import say, track
from .reporting.overlay import draw_overlay


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
            if config.overlay is not None:
                _write_overlay(config, clip, spec, ranked)
    if failed:
        raise InputError(f"{failed} of {len(config.clips)} clips could not be read (named above); the others are done")


def _print(clip: Path, ranked, logits: dict[str, np.ndarray], classes: list[str], as_json: bool) -> None:
    if as_json:
        labels = [{"label": label, "score": round(score, 6)} for label, score in ranked]
        streams = {name: classes[int(value.argmax())] for name, value in logits.items()}
        print(json.dumps({"clip": str(clip), "labels": labels, "streams": streams}), flush=True)
        return
    print(clip)
    for label, score in ranked:
        print(f"  {score:7.2%}  {label}")


def _write_overlay(config: PredictConfig, clip: Path, spec: StreamSpec, ranked) -> None:
    target = config.overlay
    if len(config.clips) > 1:
        target = target / f"{clip.stem}.overlay.mp4"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_video(target, _overlay_frames(clip, spec, ranked), fps=video_fps(clip) / spec.frame_step)
    say(f"written {target}")


def _overlay_frames(clip: Path, spec: StreamSpec, ranked) -> Iterator[np.ndarray]:
    """Each frame with the labels and the flow to the next one drawn beside it; the last repeats its flow."""
    previous, flow = None, None
    for frame in video_frames(clip, spec):
        if previous is not None:
            flow = flow_to_color(np.asarray(tvl1(to_gray(previous), to_gray(frame))), max_px=spec.bound_px / 4)
            yield draw_overlay(previous, flow, ranked)
        previous = frame
    if previous is not None and flow is not None:
        yield draw_overlay(previous, flow, ranked)


if __name__ == "__main__":
    sys.exit(cli.run("predict"))
