"""``evaluate``: test a run on a pack."""

from __future__ import annotations

import sys

from . import cli
from .config import EvaluateConfig, parse_weights
from .data.pack import open_pack
from .engine.evaluation import Protocol, describe, evaluate, write_results
from .engine.run_folder import open_run
from .engine.world import open_world
from .errors import InputError


def run(config: EvaluateConfig) -> None:
    folder = open_run(config.run)
    trained = folder.config
    _ = folder.classes  # raises when no stream has been trained to its end
    out = config.out or folder.path
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: cannot be made ({error.strerror}); give a folder") from error
    data = config.data or trained.data
    if data is None:
        data = folder.path / "synthetic" / "pack"
    protocol = Protocol(
        segments=config.test_segments or trained.test_segments,
        crops=config.test_crops or trained.test_crops,
        weights=parse_weights(config.fusion_weights or trained.fusion_weights, folder.streams),
        fusion=config.fusion or trained.fusion,
        split=config.split or trained.split,
        subset=config.subset,
    )
    pack = open_pack(data)
    models = {stream: folder.model(stream) for stream in folder.streams}
    with open_world(config.device) as world:
        clips, labels, scores = evaluate(models, pack, protocol, workers=config.workers, world=world)

        def write() -> None:
            print(describe(write_results(out, folder, pack, protocol, clips, labels, scores, world)))
            print(f"written to {out}")

        world.on_rank_zero(write)


if __name__ == "__main__":
    sys.exit(cli.run("evaluate"))
