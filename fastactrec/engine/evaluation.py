"""The test protocol: scores per stream, fusion, the figures and files of a run folder."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from .. import __version__
from ..config import normalisation
from ..data.loader import TestLoader
from ..data.pack import Pack
from ..errors import InputError
from ..files import write_atomically
from ..machine import cpu_model
from ..models.fusion import fuse
from ..models.streams import StreamNet
from ..ops import build_info
from ..reporting.confusion import count_confusion, write_confusion_csv, write_confusion_png
from .metrics import accuracy_table, predictions
from .run_folder import RunFolder
from .scoring import score_clips
from .world import World


@dataclass(frozen=True)
class Protocol:
    """How clips are tested: segments x crops, fusion weights and kind, which part of which split."""

    segments: int
    crops: int
    weights: dict[str, float]
    fusion: str
    split: str
    subset: str


def evaluate(
    models: dict[str, StreamNet],
    pack: Pack,
    protocol: Protocol,
    *,
    workers: int,
    world: World,
) -> tuple[list[int], np.ndarray, dict[str, np.ndarray]]:
    """Score a part of a pack with every stream and fuse.

    Returns:
        clip indices, labels int64 [clips], and scores float64 [clips, classes] per stream and ``"fused"``.
    Raises:
        InputError: the part has no clips, or the classes are not the run's.
    """
    clips = pack.split(protocol.split)[protocol.subset]
    if not clips:
        raise InputError(f"{pack.path}: split {protocol.split!r} has no {protocol.subset} clips to evaluate")
    scores = {}
    for stream, model in models.items():
        if list(model.spec.classes) != pack.classes:
            raise InputError(
                f"{pack.path}: its classes are not those of the run's {stream} stream; give the run's own pack"
            )
        loader = TestLoader(
            pack,
            clips,
            modality=stream,
            segments=protocol.segments,
            crops=protocol.crops,
            flow_length=model.spec.flow_length,
            crop=model.spec.crop,
            rank=world.rank,
            world=world.size,
            workers=workers,
            **normalisation(stream, model.spec.bound_px),
        )
        model.to(world.device, memory_format=torch.channels_last)
        scores[stream], labels = score_clips(model, loader, clips, world, f"testing {stream}")
    scores["fused"] = fuse(scores, protocol.weights, protocol.fusion)
    return clips, labels, scores


def environment(world: World) -> dict:
    """What the figures were measured on."""
    build = build_info()
    return {
        "fastactrec": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
        "ranks": world.size,
        "isa": build["isa"],
        "cuda_kernels": build["cuda"],
    }


def phase_seconds(records: list[dict]) -> dict[str, float]:
    """Sums over the epochs of metrics.jsonl, all streams, all parts of a resumed run."""
    epochs = [record for record in records if record["kind"] == "epoch"]
    names = {"total": "seconds", "data": "data_s", "compute": "compute_s", "exposed_comm": "exposed_comm_s"}
    return {name: sum(record[key] for record in epochs) for name, key in names.items()}


def write_results(
    folder: Path,
    run: RunFolder,
    pack: Pack,
    protocol: Protocol,
    clips: list[int],
    labels: np.ndarray,
    scores: dict[str, np.ndarray],
    world: World,
) -> dict:
    """Write scores.csv, confusion.csv, confusion.png and summary.json; returns the summary."""
    tables = {name: accuracy_table(value, labels) for name, value in scores.items()}
    fused = tables.pop("fused")
    summary = {
        "streams": tables,
        "fused": fused,
        "clips": len(clips),
        "seconds": phase_seconds(run.records()),
        "environment": environment(world),
        "classes": pack.classes,
        "split": protocol.split,
        "subset": protocol.subset,
        "protocol": {
            "segments": protocol.segments,
            "crops": protocol.crops,
            "fusion": protocol.fusion,
            "weights": {name: protocol.weights[name] for name in tables},
        },
    }
    matrix = count_confusion(labels, predictions(scores["fused"]), len(pack.classes))
    write_atomically(folder / "scores.csv", _scores_csv(pack, clips, scores))
    write_confusion_csv(folder / "confusion.csv", matrix, pack.classes)
    write_confusion_png(folder / "confusion.png", matrix, pack.classes)
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    return summary


def _scores_csv(pack: Pack, clips: list[int], scores: dict[str, np.ndarray]) -> str:
    """One row per clip and stream; nine significant digits, so that thread counts do not show."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["clip", "label", "stream", "predicted", *(f"s:{name}" for name in pack.classes)])
    for place, index in enumerate(clips):
        clip = pack.clips[index]
        for stream, values in scores.items():
            row = values[place]
            names = [clip.id, pack.classes[clip.label], stream, pack.classes[int(row.argmax())]]
            writer.writerow([*names, *(f"{value:.9g}" for value in row)])
    return text.getvalue()


def describe(summary: dict) -> str:
    """The result as a small table of text."""
    protocol = summary["protocol"]
    lines = [
        f"{summary['clips']} {summary['subset']} clips, {protocol['segments']} segments x {protocol['crops']} crops"
    ]
    for name, table in [*summary["streams"].items(), ("fused", summary["fused"])]:
        lines.append(f"  {name:6} top-1 {table['top1']:7.2%}   mean class {table['mean_class']:7.2%}")
    return "\n".join(lines)
