"""Synthetic videos to report through the commands, within a minute or so, and what a run must keep to."""

from __future__ import annotations

import csv
import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from fastactrec import cli, open_pack, open_run
from fastactrec.data.synthetic import make_synthetic

QUICK = [
    "--base-width", 8, "--crop", 40, "--epochs", 2, "--batch", 8, "--segments", 2, "--flow-length", 3,
    "--test-segments", 2, "--test-crops", 1, "--period", 2, "--log-every", 1,
]  # fmt: skip


def call(command: str, *words) -> int:
    return cli.run(command, [str(word) for word in words])


@pytest.fixture(scope="module")
def pack(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    make_synthetic(folder / "videos", clips_per_class_train=3, clips_per_class_test=2, seed=1)
    assert call("prepare", folder / "videos", "--out", folder / "pack", "--size", "48x48", "--workers", 1) == 0
    return folder / "pack"


@pytest.fixture(scope="module")
def run(pack) -> Path:
    folder = pack.parent / "run"
    assert call("train", "--data", pack, "--run", folder, *QUICK) == 0
    return folder


def test_a_run_leaves_the_files_of_the_contract(run, pack):
    names = {path.name for path in run.iterdir()}
    assert names >= {
        "config.toml", "metrics.jsonl", "events", "checkpoints", "rgb.safetensors", "flow.safetensors", "scores.csv",
        "summary.json", "report.html", "confusion.csv", "confusion.png",
    }  # fmt: skip
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary["streams"]) == {"rgb", "flow"}
    for table in [*summary["streams"].values(), summary["fused"]]:
        assert 0 <= table["top1"] <= 1
        assert 0 <= table["mean_class"] <= 1
    test_clips = open_pack(pack).split()["test"]
    assert summary["clips"] == len(test_clips) == 16
    seconds = summary["seconds"]
    assert set(seconds) == {"total", "data", "compute", "exposed_comm"}
    assert seconds["total"] >= seconds["data"] + seconds["compute"] > 0
    assert seconds["exposed_comm"] == pytest.approx(0, abs=0.1)  # one rank has nobody to wait for
    assert summary["environment"]["torch"] == torch.__version__
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [(r["stream"], r["epoch"]) for r in records if r["kind"] == "epoch"] == [
        ("rgb", 0), ("rgb", 1), ("flow", 0), ("flow", 1),
    ]  # fmt: skip
    assert sum(r["kind"] == "step" for r in records) == 2 * 2 * 3  # streams, epochs, steps of 24 clips by 8


def test_scores_and_summary_agree(run, pack):
    with open(run / "scores.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 16 * 3
    summary = json.loads((run / "summary.json").read_text())
    for stream, table in [*summary["streams"].items(), ("fused", summary["fused"])]:
        mine = [row for row in rows if row["stream"] == stream]
        assert sum(row["predicted"] == row["label"] for row in mine) / 16 == pytest.approx(table["top1"])
    by_clip = {(row["clip"], row["stream"]): row for row in rows}
    classes = open_pack(pack).classes
    for clip in {row["clip"] for row in rows}:
        for name in classes:
            rgb, flow, fused = (float(by_clip[clip, s][f"s:{name}"]) for s in ("rgb", "flow", "fused"))
            assert fused == pytest.approx((rgb + 1.5 * flow) / 2.5, rel=1e-6, abs=1e-6)


def test_evaluate_repeats_the_figures_of_train(run, tmp_path):
    assert call("evaluate", "--run", run, "--out", tmp_path) == 0
    assert (tmp_path / "scores.csv").read_text() == (run / "scores.csv").read_text()
    assert call("evaluate", "--run", run, "--out", tmp_path, "--subset", "train", "--fusion", "softmax") == 0
    assert json.loads((tmp_path / "summary.json").read_text())["clips"] == 24


def test_predict_labels_videos_and_draws(run, pack, tmp_path, capsys):
    clips = sorted((pack.parent / "videos").rglob("*.mp4"))[:2]
    assert call("predict", "--run", run, *clips, "--json", "--overlay", tmp_path, "--top", 3) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["clip"] for result in results] == [str(clip) for clip in clips]
    for result in results:
        assert len(result["labels"]) == 3
        scores = [label["score"] for label in result["labels"]]
        assert scores == sorted(scores, reverse=True)
        assert set(result["streams"]) == {"rgb", "flow"}
    from fastactrec.data.video import read_frames

    for clip in clips:
        original = list(read_frames(clip, size=(48, 48)))
        drawn = list(read_frames(tmp_path / f"{clip.stem}.overlay.mp4", size=(96, 96)))
        assert len(drawn) == len(original)


def test_predict_agrees_with_evaluate_up_to_jpeg(run, pack):
    from fastactrec.engine.prediction import ClipFrames, score_video

    folder, opened = open_run(run), open_pack(pack)
    models = {stream: folder.model(stream) for stream in folder.streams}
    with open(run / "scores.csv", newline="") as file:
        rows = {(row["clip"], row["stream"]): row for row in csv.DictReader(file)}
    for index in opened.split()["test"][:4]:
        clip = opened.clips[index]
        frames = ClipFrames(pack.parent / "videos" / clip.source, models["rgb"].spec)
        assert frames.count == clip.frames
        scores = score_video(frames, models, segments=2, crops=1, device=torch.device("cpu"))
        for stream, value in scores.items():
            stored = torch.tensor([float(rows[clip.id, stream][f"s:{name}"]) for name in opened.classes])
            difference = (torch.from_numpy(value) - stored).abs().max() / stored.std()
            assert difference < 0.25, (clip.id, stream, difference)  # worst seen 0.08: JPEG's share


def parameter_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_resume_continues_bit_for_bit(run, pack, tmp_path, monkeypatch, capsys):
    """Stop after each epoch of each stream in turn, as a kill would, and continue."""
    from fastactrec.engine import trainer

    class Killed(Exception):
        pass

    saved = trainer.save_checkpoint

    def save_and_die(*args):
        saved(*args)
        raise Killed

    folder = tmp_path / "run"
    monkeypatch.setattr(trainer, "save_checkpoint", save_and_die)
    for _ in range(4):
        with pytest.raises(Killed):
            call("train", "--data", pack, "--run", folder, *QUICK, "--resume")
    monkeypatch.setattr(trainer, "save_checkpoint", saved)
    assert call("train", "--data", pack, "--run", folder, *QUICK, "--resume") == 0
    for stream in ("rgb", "flow"):
        name = f"{stream}.safetensors"
        assert parameter_hash(folder / name) == parameter_hash(run / name)
    assert (folder / "scores.csv").read_text() == (run / "scores.csv").read_text()

    def told(path):  # everything but times
        records = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        return [{k: r[k] for k in ("kind", "stream", "epoch", "loss", "lr")} for r in records]

    assert told(folder) == told(run)


def test_a_run_is_not_overwritten_or_mixed(run, pack, capsys):
    before = parameter_hash(run / "rgb.safetensors")
    assert call("train", "--data", pack, "--run", run, *QUICK) == 2
    assert "holds a run already; add --resume" in capsys.readouterr().err
    assert call("train", "--data", pack, "--run", run, *QUICK, "--resume", "--lr", 0.5) == 2
    assert "lr was 0.001, now 0.5" in capsys.readouterr().err
    assert parameter_hash(run / "rgb.safetensors") == before


def test_wrong_packs_and_checkpoints_leave_nothing_behind(run, pack, tmp_path, capsys):
    def refused(*words) -> str:
        target = tmp_path / "new"
        assert call("train", "--run", target, *QUICK, *words) == 2
        assert not target.exists()
        text = capsys.readouterr().err
        assert len(text.strip().splitlines()) == 1
        return text

    assert "manifest.json" in refused("--data", tmp_path)
    other = tmp_path / "other"
    shutil.copytree(pack, other)
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))
    text = refused("--data", other)
    assert "99" in text
    assert "manifest.json" in text
    assert re.search(r"split 'official7'|official7", refused("--data", pack, "--split", "official7"))

    folder = tmp_path / "changed"
    shutil.copytree(run, folder)
    (folder / "rgb.safetensors").unlink()
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("base_width = 8", "base_width = 16"))
    words = [16 if word == 8 and QUICK[i - 1] == "--base-width" else word for i, word in enumerate(QUICK)]
    assert call("train", "--data", pack, "--run", folder, *words, "--resume") == 2
    error = capsys.readouterr().err
    assert "rgb.pt: of another network (base_width 8, not 16)" in error


@pytest.mark.parametrize("sync", ["kavg", "ddp"])
def test_two_ranks_end_with_the_same_bytes(sync, pack, tmp_path, launch):
    folder = tmp_path / "run"
    words = ["--data", pack, "--run-folder", folder, *QUICK, "--sync", sync, "--period", 4]
    done = launch(Path(__file__).with_name("train_and_dump.py"), tmp_path, *words, ranks=2)
    assert done.returncode == 0, done.stderr
    for stream in ("rgb", "flow"):
        first, second = (torch.load(tmp_path / f"{stream}-{rank}.pt", weights_only=True) for rank in (0, 1))
        assert any("running_var" in name for name in first)
        for name, tensor in first.items():
            assert tensor.numpy().tobytes() == second[name].numpy().tobytes(), name
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    epochs = [r for r in records if r["kind"] == "epoch"]
    assert len(epochs) == 4
    assert all(r["exposed_comm_s"] > 0 for r in epochs)
    one = launch("-m", "fastactrec.evaluate", "--run-folder", folder, "--out", tmp_path / "one")
    assert one.returncode == 0, one.stderr
    three = launch("-m", "fastactrec.evaluate", "--run-folder", folder, "--out", tmp_path / "three", ranks=3)
    assert three.returncode == 0, three.stderr
    figures = [json.loads((p / "summary.json").read_text()) for p in (folder, tmp_path / "one", tmp_path / "three")]
    assert figures[0]["streams"] == figures[1]["streams"] == figures[2]["streams"]
    assert figures[0]["fused"] == figures[1]["fused"] == figures[2]["fused"]
    assert figures[2]["clips"] == 16


def test_a_world_that_does_not_fit(pack, tmp_path, launch):
    folder = tmp_path / "run"
    words = ["-m", "fastactrec.train", "--data", pack, "--run-folder", folder, *QUICK, "--sync", "none"]
    done = launch(*words, ranks=2)
    assert done.returncode != 0
    assert "WORLD_SIZE is 2, but --sync none trains on one process; use --sync kavg or ddp" in done.stderr
    assert not folder.exists()


def test_overlays_replace_no_other_file(run, pack, tmp_path, capsys):
    first, second = (pack.parent / "videos" / f"{name}/train_000.mp4" for name in ("ring_grows", "ring_shrinks"))
    assert call("predict", "--run", run, first, second, "--overlay", tmp_path) == 2
    assert "would replace another file of this command" in capsys.readouterr().err
    before = first.read_bytes()
    assert call("predict", "--run", run, first, "--overlay", first) == 2
    assert first.read_bytes() == before
    (tmp_path / "file").touch()
    assert call("predict", "--run", run, first, "--overlay", tmp_path / "file" / "o.mp4") == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["model", "optimizer", "epoch", "ranks", "spec"])
def test_a_checkpoint_that_does_not_fit_together_is_named(part, run, pack, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    (folder / "rgb.safetensors").unlink()
    path = folder / "checkpoints" / "rgb.pt"
    state = torch.load(path, weights_only=True)
    for damage in ({}, "x"):
        torch.save({**state, part: damage}, path)
        assert call("train", "--data", pack, "--run", folder, *QUICK, "--resume") == 2
        error = capsys.readouterr().err
        assert f"{path}: damaged" in error
        assert len(error.strip().splitlines()) == 1
    path.write_bytes(b"\x80\x04not a checkpoint")
    assert call("train", "--data", pack, "--run", folder, *QUICK, "--resume") == 2
    assert "weights_only" not in capsys.readouterr().err


def test_input_that_is_wrong_leaves_no_run_folder(run, pack, tmp_path, capsys):
    target = tmp_path / "new"
    words = ["--data", pack, "--run", target, *QUICK, "--streams", "rgb"]
    assert call("train", *words, "--init-rgb", run / "flow.safetensors") == 2
    assert "stream is flow, the network to train has rgb" in capsys.readouterr().err
    assert call("train", *words, "--seed", -1) == 2
    assert call("train", *words, "--split", "../clips") == 2
    assert not target.exists()


def test_labels_that_cannot_be_shown_are_refused(pack, tmp_path, capsys):
    source = pack.parent / "videos" / "ring_grows" / "train_000.mp4"
    for label in (b"caf\xe9", b"two\x00lines"):
        (tmp_path / "clips.csv").write_bytes(b"path,label\n" + str(source).encode() + b"," + label + b"\n")
        assert call("prepare", tmp_path, "--out", tmp_path / "pack") == 2
        assert len(capsys.readouterr().err.strip().splitlines()) == 1
        assert not (tmp_path / "pack").exists()
    (tmp_path / "clips.csv").write_text(f"path,label\n{source},a\n{source},b\n")
    assert call("prepare", tmp_path, "--out", tmp_path / "pack") == 2
    assert "listed as 'a' and as 'b'" in capsys.readouterr().err
