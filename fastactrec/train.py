"""``train``: streams one after the other, then the test protocol and the report."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from . import cli, prepare, report
from .config import PrepareConfig, ReportConfig, TrainConfig, parse_streams, parse_weights
from .data.pack import Pack, open_pack
from .data.synthetic import make_synthetic
from .engine.evaluation import Protocol, describe, evaluate, write_results
from .engine.run_folder import RunFolder
from .engine.trainer import StreamTrainer, averaging_options, stream_spec
from .engine.world import World, open_world
from .errors import InputError
from .models.streams import read_stream, require_fit
from .progress import say


def run(config: TrainConfig) -> None:
    start = time.monotonic()
    one_rank_only = "--sync none trains on one process; use --sync kavg or ddp" if config.sync == "none" else ""
    with open_world(config.device, one_rank_only) as world:
        config.check_max_batch(world.size)
        averaging_options(config)
        if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):  # torchrun --max-restarts started us once more
            config = dataclasses.replace(config, resume=True)
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        run_path = _run_path(config, world)
        folder = RunFolder(run_path)
        config = dataclasses.replace(config, run=run_path, data=config.data and config.data.resolve())
        pack_path = config.data or run_path / "synthetic" / "pack"

        def set_up() -> None:
            if config.data is not None:
                # what is wrong with the input must be said before there is a run folder
                _require_initial_weights(config, _open_for(config, pack_path, world))
            folder.start(config)
            if config.data is None:
                _make_synthetic_pack(run_path / "synthetic", config.seed)

        world.on_rank_zero(set_up)
        pack = _open_for(config, pack_path, world)
        streams = parse_streams(config.streams)
        for stream in streams:
            _train_stream(config, stream, pack, world, folder)
        _test_and_report(config, streams, pack, world, folder)
        if world.rank == 0:
            print(f"finished in {time.monotonic() - start:.0f} s: {os.path.relpath(run_path / 'report.html')}")


def _run_path(config: TrainConfig, world: World) -> Path:
    """The run folder, the same on every rank: --run, or runs/NAME, numbered when taken."""
    path = config.run
    if path is None:
        stem = config.name or (config.data.resolve().name if config.data else "synthetic")
        path = Path("runs") / stem
        if not config.name:
            number = 1
            taken = path
            while taken.exists():
                path, number = taken, number + 1
                taken = Path("runs") / f"{stem}-{number}"
            if not config.resume or not path.exists():
                path = taken
    paths = [str(path.resolve())]
    if world.distributed:
        dist.broadcast_object_list(paths, src=0)
    return Path(paths[0])


def _open_for(config: TrainConfig, path: Path, world: World) -> Pack:
    """The pack, when there is something in it to train on."""
    pack = open_pack(path)
    clips = len(pack.split(config.split)["train"])
    if not clips:
        raise InputError(f"{pack.path}: split {config.split!r} has no training clips; choose another --split")
    if world.size > clips:
        raise InputError(f"{world.size} ranks, but only {clips} training clips in {pack.path}: use fewer ranks")
    return pack


def _require_initial_weights(config: TrainConfig, pack: Pack) -> None:
    for stream in parse_streams(config.streams):
        if (path := getattr(config, f"init_{stream}")) is not None:
            require_fit(read_stream(path)[0], stream_spec(config, stream, pack), path)


def _make_synthetic_pack(folder: Path, seed: int) -> None:
    videos = folder / "videos"
    if not (videos / "clips.csv").is_file():
        make_synthetic(videos, clips_per_class_train=16, clips_per_class_test=8, seed=seed)
    prepare.run(PrepareConfig(src=videos, out=folder / "pack", size="64x64"))


def _train_stream(config: TrainConfig, stream: str, pack: Pack, world: World, folder: RunFolder) -> None:
    if folder.weights_path(stream).is_file():
        say(f"{stream}: finished already")
        return
    trainer = StreamTrainer(config, stream, pack, world, folder)
    with contextlib.ExitStack() as stack:
        events = None
        if world.rank == 0:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and of no use to other ranks

            events = stack.enter_context(SummaryWriter(str(folder.path / "events")))
        trainer.fit(events)
    world.on_rank_zero(lambda: None)  # the weights are on disk before any rank reads them


def _test_and_report(config: TrainConfig, streams, pack: Pack, world: World, folder: RunFolder) -> None:
    protocol = Protocol(
        segments=config.test_segments,
        crops=config.test_crops,
        weights=parse_weights(config.fusion_weights, streams),
        fusion=config.fusion,
        split=config.split,
        subset="test",
    )
    if not pack.split(config.split)["test"]:
        say(f"{pack.path}: split {config.split!r} has no test clips, so nothing was evaluated")
        world.on_rank_zero(lambda: report.write_report(ReportConfig(runs=(folder.path,))))
        return
    models = {stream: folder.model(stream) for stream in streams}
    clips, labels, scores = evaluate(models, pack, protocol, workers=config.workers, world=world)

    def write() -> None:
        print(describe(write_results(folder.path, folder, pack, protocol, clips, labels, scores, world)))
        report.write_report(ReportConfig(runs=(folder.path,)))

    world.on_rank_zero(write)


if __name__ == "__main__":
    sys.exit(cli.run("train"))
