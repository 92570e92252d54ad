"""Runs whose batch grows: through the commands, resumed, on two ranks."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path

import pytest
import torch

import fastactrec as far
from fastactrec import cli
from fastactrec.data.synthetic import make_synthetic
from fastactrec.engine.world import World


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--adaptive-batch", "noise", "--max-batch", 8], "--max-batch 8: --batch 16 already"),
        (["--max-batch", 64], "--max-batch 64: goes with --adaptive-batch noise or decay"),
        (["--adaptive-batch", "decay", "--batch-lr-rule", "linear"], "goes with --adaptive-batch noise"),
        (["--noise-every", 2], "--noise-every 2: goes with --adaptive-batch noise"),
        (["--adaptive-batch", "noise", "--noise-every", 0], "--noise-every 0: must be at least 1"),
        (["--adaptive-batch", "much"], "--adaptive-batch"),
    ],
)
def test_the_command_line_refuses(words, said, capsys):
    assert cli.run("train", [str(word) for word in words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert said in lines[0]


QUICK = [
    "--base-width", 8, "--crop", 40, "--epochs", 4, "--batch", 2, "--segments", 1, "--test-segments", 1,
    "--test-crops", 1, "--log-every", 1, "--streams", "rgb", "--workers", 1, "--dropout", 0.3, "--warmup-epochs", 0.5,
]  # fmt: skip


@pytest.fixture(scope="module")
def pack(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("batch-size")
    make_synthetic(folder / "videos", clips_per_class_train=3, clips_per_class_test=1, seed=1)
    words = [folder / "videos", "--out", folder / "pack", "--size", "48x48", "--workers", 1]
    assert cli.run("prepare", [str(word) for word in words]) == 0
    return folder / "pack"


def train(pack, run, *words) -> int:
    return cli.run("train", [str(word) for word in ("--data", pack, "--run", run, *QUICK, *words)])


def records(run: Path, kind: str) -> list[dict]:
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [entry for entry in entries if entry["kind"] == kind]


@pytest.mark.parametrize("mode", ["noise", "decay"])
def test_a_run_grows_its_batch_and_resumes_bit_for_bit(mode, pack, tmp_path, monkeypatch, one_thread):
    from fastactrec.engine import trainer

    words = ["--adaptive-batch", mode, *(["--noise-every", 2] if mode == "noise" else [])]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(pack, whole, *words) == 0

    class Killed(Exception):
        pass

    def save_and_die(path, state):
        saved(path, state)
        if state["epoch"] == 2:
            raise Killed

    saved = trainer.save_checkpoint
    monkeypatch.setattr(trainer, "save_checkpoint", save_and_die)
    with pytest.raises(Killed):
        train(pack, parts, *words)
    monkeypatch.setattr(trainer, "save_checkpoint", saved)
    assert train(pack, parts, *words, "--resume") == 0
    assert (whole / "rgb.safetensors").read_bytes() == (parts / "rgb.safetensors").read_bytes()
    timeless = {"kind", "epoch", "step", "loss", "lr", "samples", "accumulation", "batch", "noise_scale", "top1"}
    for kind in ("step", "epoch"):
        told = [[{k: r[k] for k in timeless & r.keys()} for r in records(run, kind)] for run in (whole, parts)]
        assert told[0] == told[1]

    epochs, steps = records(whole, "epoch"), records(whole, "step")
    sizes = [epoch["accumulation"] for epoch in epochs]
    # noise: a network at its beginning is far above; decay: epochs begin at 1, 0.95, 0.61 and 0.19 of the peak
    assert sizes == ([1, 2, 4, 8] if mode == "noise" else [1, 1, 1, 5])
    for epoch in epochs:
        inside = [step for step in steps if step["epoch"] == epoch["epoch"]]
        assert epoch["batch"] == 2 * epoch["accumulation"]
        assert sum(step["samples"] for step in inside) == 24
        assert len(inside) == -(-12 // epoch["accumulation"])
        base = trainer.learning_rate(far.open_run(whole).config, 12 * epoch["epoch"] + inside[-1]["step"], 12)
        factor = math.sqrt(epoch["accumulation"]) if mode == "noise" else epoch["accumulation"]
        assert inside[-1]["lr"] == base * factor
        assert inside[-1]["lr"] <= 1e-3 * factor
    if mode == "noise":
        assert all(epoch["grad_variance"] > 0 for epoch in epochs)
    assert "Batch" in (whole / "report.html").read_text()


@pytest.mark.parametrize("sync", ["kavg", "ddp"])
def test_two_ranks_grow_alike(sync, pack, tmp_path, launch):
    run = tmp_path / "run"
    words = ["--data", pack, "--run-folder", run, *QUICK, "--sync", sync, "--adaptive-batch", "noise"]
    words += ["--noise-every", 1, "--max-batch", 16, "--epochs", 3, *(["--period", 2] if sync == "kavg" else [])]
    done = launch(Path(__file__).with_name("train_and_dump.py"), tmp_path, *words, ranks=2)
    assert done.returncode == 0, done.stderr
    first, second = (torch.load(tmp_path / f"rgb-{rank}.pt", weights_only=True) for rank in (0, 1))
    for name, tensor in first.items():
        assert tensor.numpy().tobytes() == second[name].numpy().tobytes(), name
    epochs = records(run, "epoch")
    assert [epoch["batch"] for epoch in epochs] == [4, 8, 16]
    assert "clips per step from epoch 2 on, the gradient noise scale being" in done.stderr


def test_a_first_batch_of_all_ranks_above_the_largest_is_refused(pack, tmp_path, monkeypatch, capsys):
    world = World(0, 2, torch.device("cpu"))
    monkeypatch.setattr("fastactrec.train.open_world", lambda *_: contextlib.nullcontext(world))
    assert train(pack, tmp_path / "run", "--adaptive-batch", "decay", "--max-batch", 3) == 2
    assert "--max-batch 3: --batch 2 on 2 ranks is 4 clips already" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
