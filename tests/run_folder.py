"""Writes run folders as train and evaluate leave them, without training: for the tests of the report."""

import csv
import json
from pathlib import Path

import numpy as np

FAMILIES = "ride,climb,shake,smoke,stand,swing,throw,brush,dribble,fall,handstand,pour,punch,shoot,kick,turn,walk"


def class_names(n: int) -> list[str]:
    """``ride``, ..., then ``ride_bow`` ... : lengths as in HMDB51."""
    base = FAMILIES.split(",")
    endings = ["", "_ball_overhead", "_floor", "_bow", "_hands", "_stairs", "_again"]
    return [base[i % len(base)] + endings[i // len(base)] for i in range(n)]


def write_run(
    folder: Path,
    *,
    classes: list[str],
    clips: int = 60,
    epochs: int = 8,
    steps: int = 12,
    skill=(0.55, 0.7, 0.85),
    seed: int = 0,
    val: bool = True,
    evaluated: bool = True,
    comm: float = 0.03,
    config: dict | None = None,
) -> Path:
    """A run of two streams; ``skill``: chances of rgb, flow, fused; ``comm``: exposed, s per step."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    options = {
        "arch": "resnet18",
        "epochs": epochs,
        "batch": 16,
        "seed": seed,
        "lr": 1e-3,
        "sync": "kavg",
        "period": 4,
    }
    options |= {"data": "pack", "streams": "rgb,flow", "decoupled": True} | (config or {})
    lines = [f"{key} = {json.dumps(value)}\n" for key, value in options.items()]
    (folder / "config.toml").write_text("".join(lines))
    _write_metrics(folder / "metrics.jsonl", rng, len(classes), epochs, steps, val, comm)
    if evaluated:
        _write_results(folder, rng, classes, clips, skill)
    return folder


def _write_metrics(path: Path, rng, classes: int, epochs: int, steps: int, val: bool, comm: float) -> None:
    with open(path, "w") as file:

        def write(entry: dict) -> None:
            file.write(json.dumps(entry) + "\n")

        haste = rng.uniform(1.5, 3.5)
        for stream, slow in (("rgb", 1.0), ("flow", 1.3)):
            for epoch in range(epochs):
                level = np.log(classes) * np.exp(-slow * haste * epoch / epochs)
                lr = 1e-3 * (1 + np.cos(np.pi * epoch / epochs)) / 2
                for step in range(steps):
                    loss = float(level * np.exp(0.15 * rng.standard_normal()))
                    entry = {"kind": "step", "stream": stream, "epoch": epoch, "step": epoch * steps + step}
                    entry |= {"loss": loss, "lr": lr, "samples": 32, "time": 1.7e9 + epoch * 5 + step}
                    write(entry | {"data_s": 0.02, "compute_s": 0.3, "comm_s": comm})
                top1 = float(1 - level / np.log(classes) * 0.9)
                times = {"data_s": 0.02 * steps, "compute_s": 0.3 * steps, "exposed_comm_s": comm * steps}
                seconds = 1.08 * sum(times.values())
                entry = {
                    "kind": "epoch",
                    "stream": stream,
                    "epoch": epoch,
                    "loss": float(level),
                    "top1": top1,
                }
                entry |= {"lr": lr, "seconds": seconds, "clips_per_s": 32 * steps / seconds} | times
                write(entry | ({"val_top1": 0.9 * top1} if val else {}))


def _write_results(folder: Path, rng, classes: list[str], clips: int, skill) -> None:
    labels = np.arange(clips) % len(classes)
    rows, results = [], {}
    for stream, chance in zip(("rgb", "flow", "fused"), skill, strict=True):
        scores = rng.standard_normal((clips, len(classes)))
        # a miss goes to a neighbouring class, so that the matrix shows confusions between alike classes
        miss = np.where(rng.random(clips) < 0.7, (labels + 1) % len(classes), rng.integers(0, len(classes), clips))
        called = np.where(rng.random(clips) < chance, labels, miss)
        scores[np.arange(clips), called] += 8
        rows += [
            [
                f"clip_{k:04d}",
                classes[labels[k]],
                stream,
                classes[called[k]],
                *(f"{v:.4f}" for v in scores[k]),
            ]
            for k in range(clips)
        ]
        recalls = [(called[labels == c] == c).mean() for c in np.unique(labels)]
        ranked = np.argsort(-scores, axis=1)[:, :5]
        results[stream] = {
            "top1": float((called == labels).mean()),
            "mean_class": float(np.mean(recalls)),
            "top5": float((ranked == labels[:, None]).any(axis=1).mean()),
        }
    with open(folder / "scores.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["clip", "label", "stream", "predicted", *(f"s:{name}" for name in classes)])
        writer.writerows(rows)
    summary = {
        "streams": {"rgb": results["rgb"], "flow": results["flow"]},
        "fused": results["fused"],
        "clips": clips,
        "seconds": {"total": 95.0, "data": 4.2, "compute": 68.0, "exposed_comm": 5.5},
        "environment": {
            "python": "3.11.9", "torch": "2.14.1", "fastactrec": "0.1.0", "cpu": "AMD EPYC 9B45, 2 cores",
            "gpu": None, "ranks": 2, "extension": {"isa": "avx512", "cuda": False},
        },
        "classes": classes,
        "split": "default",
        "subset": "test",
        "protocol": {"segments": 3, "crops": 1, "fusion": "logits", "weights": {"rgb": 1.0, "flow": 1.5}},
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary, indent=1))
