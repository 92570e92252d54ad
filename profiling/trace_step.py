"""Trace a few training steps of one stream: milliseconds per phase, exposed communication, a Chrome trace.

    python profiling/trace_step.py --out trace
    torchrun --nproc-per-node 2 profiling/trace_step.py --out trace --period 2

The step is the trainer's (decode in a thread, copy, forward, backward, FusedAdam, ParameterAverager) on a
torchvision ResNet with random JPEGs: it needs no data. README.md in this folder says how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import threading
from pathlib import Path

import numpy as np
import simplejpeg
import torch
import torch.distributed as dist
import torchvision
from torch import nn

import fastactrec as far
from fastactrec.phases import COLORS, COMMUNICATION, COMPUTE, PhaseRecorder
from fastactrec.reporting.intervals import covered_s, exposed_s

FORMAT, VERSION = "fastactrec-phases", 1
CLASSES = 51


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("trace"), help="folder to write to (default: trace)")
    parser.add_argument("--modality", choices=("rgb", "flow"), default="rgb", help="what the stream reads")
    parser.add_argument("--flow-length", type=int, default=5, help="flow frames per stack (default: 5)")
    parser.add_argument("--arch", default="resnet18", help="torchvision ResNet (default: resnet18)")
    parser.add_argument("--batch", type=int, default=8, help="clips per rank and step (default: 8)")
    parser.add_argument("--size", type=int, default=112, help="side of the input, pixels (default: 112)")
    parser.add_argument("--steps", type=int, default=8, help="steps traced (default: 8)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before, not traced (default: 2)")
    parser.add_argument("--period", type=int, default=4, help="steps between averagings (default: 4)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--overlap", action="store_true", help="GPU: do not wait at phase borders; times are then the host's"
    )
    return parser.parse_args()


class Batches:
    """Decodes random JPEGs in a thread, two batches ahead, as the loader does."""

    def __init__(self, options: argparse.Namespace, recorder: PhaseRecorder, count: int):
        rng = np.random.default_rng(0)
        side = options.size
        self.options, self.recorder, self.count = options, recorder, count
        self.channels = 3 if options.modality == "rgb" else 2 * options.flow_length
        # smooth pictures: noise would decode several times slower than real frames
        coarse = rng.integers(0, 255, (side // 8 + 1, side // 8 + 1, 3), dtype=np.uint8)
        picture = np.ascontiguousarray(coarse.repeat(8, 0).repeat(8, 1)[:side, :side])
        self.rgb = simplejpeg.encode_jpeg(picture, quality=95)
        self.gray = simplejpeg.encode_jpeg(picture[..., :1].copy(), quality=95, colorspace="GRAY")
        self.queue: queue.Queue = queue.Queue(maxsize=2)
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        for _ in range(self.count):
            with self.recorder.phase("decode"):
                clips = np.stack([self._clip() for _ in range(self.options.batch)])
            self.queue.put(torch.from_numpy(clips))

    def _clip(self) -> np.ndarray:
        if self.channels == 3:
            return simplejpeg.decode_jpeg(self.rgb).transpose(2, 0, 1)
        planes = [simplejpeg.decode_jpeg(self.gray, colorspace="GRAY")[..., 0] for _ in range(self.channels)]
        return np.stack(planes)

    def next(self) -> torch.Tensor:
        """uint8 [N, C, H, W]"""
        return self.queue.get()


def train(options: argparse.Namespace, recorder: PhaseRecorder) -> None:
    """Warm up, reset the recorder, run the traced steps."""
    torch.manual_seed(0)
    device = torch.device(options.device)
    batches = Batches(options, recorder, options.warmup + options.steps)
    model = torchvision.models.get_model(options.arch, num_classes=CLASSES)
    if batches.channels != 3:
        model.conv1 = nn.Conv2d(batches.channels, model.conv1.out_channels, 7, 2, 3, bias=False)
    model.to(device, memory_format=torch.channels_last)
    adam = far.FusedAdam(far.FlatBuckets(model), lr=1e-3)
    averager = far.ParameterAverager(adam, period=options.period) if dist.is_initialized() else None
    labels = torch.arange(options.batch, device=device) % CLASSES
    phase = recorder.phase
    for step in range(options.warmup + options.steps):
        if step == options.warmup:
            if averager is not None:
                averager.average_all()  # the traced steps begin with a round
                dist.barrier()
            recorder.reset()
        with phase("data"):
            batch = batches.next()
        with phase("h2d"):
            batch = batch.to(device, memory_format=torch.channels_last)
            inputs = batch.to(torch.float32).div_(255)
        with phase("forward"):
            loss = nn.functional.cross_entropy(model(inputs), labels)
        with phase("backward"):
            loss.backward()
        with phase("optimizer"):
            adam.step()
            adam.zero_grad()
        if averager is not None:
            with phase("averaging"):
                averager.step(samples=options.batch)


def rank_report(rank: int, spans: dict[str, np.ndarray], steps: int) -> dict:
    """Milliseconds per step of one rank: per phase, and communication that no computation hides."""
    compute = np.concatenate([spans[name] for name in COMPUTE])
    communication = np.concatenate([spans[name] for name in COMMUNICATION])
    per_step = 1e3 / steps
    return {
        "rank": rank,
        "phases_ms": {name: per_step * covered_s(spans[name]) for name in COLORS if len(spans[name])},
        "exposed_comm_ms": per_step * exposed_s(communication, compute),
    }


def wire_ms(ranks: list[dict[str, np.ndarray]], steps: int) -> float:
    """Milliseconds per step that the averagings took on the wire: of each, the rank that waited least."""
    durations = [spans["averaging"][:, 1] - spans["averaging"][:, 0] for spans in ranks]
    return 1e3 / steps * float(np.min(durations, axis=0).sum())


def chrome_trace(ranks: list[dict[str, np.ndarray]]) -> dict:
    """For chrome://tracing or ui.perfetto.dev: a process per rank, decoding in a row of its own."""
    origin = min(spans[name].min() for spans in ranks for name in COLORS if len(spans[name]))
    events = []
    for rank, spans in enumerate(ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for row, name in enumerate(("step", "decode")):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": row, "args": {"name": name}})
        events += [
            {
                "ph": "X", "name": name, "cat": name, "pid": rank, "tid": int(name == "decode"),
                "ts": 1e6 * (start - origin), "dur": 1e6 * (end - start),
            }
            for name in COLORS
            for start, end in spans[name].tolist()
        ]  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def print_table(reports: list[dict], wire: float | None) -> None:
    names = [name for name in COLORS if any(name in report["phases_ms"] for report in reports)]
    columns = [f"rank {report['rank']}" for report in reports]
    print(f"{'ms per step':16}" + "".join(f"{column:>10}" for column in columns))
    for name in names:
        print(f"{name:16}" + "".join(f"{report['phases_ms'].get(name, 0.0):10.2f}" for report in reports))
    print(f"{'exposed comm.':16}" + "".join(f"{report['exposed_comm_ms']:10.2f}" for report in reports))
    if wire is not None:
        worst = max(report["exposed_comm_ms"] for report in reports)
        print(f"exposed communication, largest of the ranks: {worst:.2f} ms per step; on the wire {wire:.2f}")


def main() -> None:
    options = arguments()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("nccl" if options.device.startswith("cuda") else "gloo")
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    wait = torch.cuda.synchronize if options.device.startswith("cuda") and not options.overlap else None
    recorder = PhaseRecorder(synchronize=wait)
    train(options, recorder)
    spans = {name: recorder.intervals(name) for name in COLORS}
    ranks = [spans]
    if world > 1:
        ranks = [None] * world
        dist.all_gather_object(ranks, spans)
    if int(os.environ.get("RANK", "0")) == 0:
        reports = [rank_report(rank, spans, options.steps) for rank, spans in enumerate(ranks)]
        wire = wire_ms(ranks, options.steps) if world > 1 else None
        device = torch.cuda.get_device_name() if options.device.startswith("cuda") else platform.processor()
        result = {
            "format": FORMAT,
            "version": VERSION,
            "options": {name: value for name, value in vars(options).items() if name != "out"},
            "environment": {
                "torch": torch.__version__,
                "device": device or platform.machine(),
                "ranks": world,
                "threads": torch.get_num_threads(),
            },
            "ranks": reports,
            "wire_ms": wire,
            "intervals_s": [{name: spans[name].tolist() for name in COLORS} for spans in ranks],
        }
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "phases.json").write_text(json.dumps(result) + "\n")
        (options.out / "trace.json").write_text(json.dumps(chrome_trace(ranks)) + "\n")
        print_table(reports, wire)
        print(f"written: {options.out / 'phases.json'}, {options.out / 'trace.json'}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
