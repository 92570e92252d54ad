"""A rank that dies, torchrun's restart, and other options of averaging through the command, in real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fastactrec import cli
from fastactrec.data.synthetic import make_synthetic

REPO = Path(__file__).resolve().parent.parent
OPTIONS = [
    "--streams", "flow", "--base-width", 8, "--crop", 40, "--epochs", 4, "--batch", 4, "--segments", 1,
    "--flow-length", 2, "--test-segments", 1, "--test-crops", 1, "--period", 2, "--log-every", 1,
]  # fmt: skip
RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]


@pytest.fixture(scope="module")
def pack(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("restart")
    make_synthetic(folder / "videos", clips_per_class_train=3, clips_per_class_test=2, seed=1)
    words = ["prepare", folder / "videos", "--out", folder / "pack", "--size", "48x48", "--workers", 1]
    assert cli.run(str(words[0]), [str(word) for word in words[1:]]) == 0
    return folder / "pack"


def start(pack: Path, run: Path, *options) -> subprocess.Popen:
    words = [*RANKS, "-m", "fastactrec.train", "--data", pack, "--run-folder", run, *OPTIONS, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    return subprocess.Popen(
        [sys.executable, *map(str, words)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ranks_of(parent: int) -> dict[int, int]:
    """pid by rank, of the processes that torchrun started."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                status, environment = (folder / "status").read_text(), (folder / "environ").read_bytes()
            except OSError:  # it has ended meanwhile
                continue
            rank = re.search(rb"\0RANK=(\d+)", environment)
            if rank and int(re.search(r"PPid:\s+(\d+)", status)[1]) == parent:
                found[int(rank[1])] = int(folder.name)
    return found


@pytest.mark.slow
def test_torchrun_restarts_from_the_last_checkpoint_and_ends_alike(pack, tmp_path):
    undisturbed = start(pack, tmp_path / "undisturbed")
    assert undisturbed.wait(120) == 0
    disturbed = start(pack, tmp_path / "disturbed")
    checkpoint, until = tmp_path / "disturbed" / "checkpoints" / "flow.pt", time.monotonic() + 60
    while not checkpoint.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(ranks_of(disturbed.pid)[1], signal.SIGKILL)
    _, errors = disturbed.communicate(timeout=120)
    assert disturbed.returncode == 0, errors
    assert re.search(r"flow: continuing at epoch [234]", errors)
    first, second = (
        torch.load(tmp_path / name / "checkpoints" / "flow.pt", weights_only=True)["model"]
        for name in ("undisturbed", "disturbed")
    )
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.slow
def test_options_of_averaging_reach_it(pack, tmp_path):
    options = ["--compression", "int8", "--outer-momentum", 0.2, "--warmup-sync", 2, "--quadratic", 0.002]
    done = start(pack, tmp_path / "run", *options, "--moments", "frozen_v")
    output, errors = done.communicate(timeout=120)
    assert done.returncode == 0, errors
    assert "finished in" in output
    state = torch.load(tmp_path / "run" / "checkpoints" / "flow.pt", weights_only=True)["averager"]
    assert state["outer_momentum"]
    assert state["warm_left"] == 0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--delay", 2, "--period", 4, "--outer-lr", 0.7], "delay and an outer step do not go together"),
        (["--delay", 4, "--period", 4], "give less than period=4"),
        (["--hierarchy", "4"], "--hierarchy 4: give none, auto"),
        (["--sync", "ddp", "--delay", 2], "--delay 2: goes with --sync kavg"),
    ],
)
def test_options_that_do_not_fit_leave_no_run_folder(options, sentence, pack, tmp_path, capsys):
    words = ["--data", pack, "--run", tmp_path / "run", *options]
    assert cli.run("train", [str(word) for word in words]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
