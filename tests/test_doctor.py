"""The doctor: what it says of a machine with and without a GPU, of packs, and of data not prepared yet."""

import csv
import re
from types import SimpleNamespace

import numpy as np
import pynvml
import pytest
import simplejpeg

from fastactrec import doctor
from fastactrec.cli import run as run_command
from fastactrec.config import DoctorConfig, PrepareConfig
from fastactrec.errors import InputError


def write_frames(folder, frames: int = 4, first: int = 1) -> None:
    """A clip as denseflow leaves it: frames and their flow, so that preparing it computes no flow."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(frames)
    for k in range(frames):
        colour = rng.integers(0, 255, (24, 32, 3), dtype=np.uint8)
        (folder / f"img_{k + first:05d}.jpg").write_bytes(simplejpeg.encode_jpeg(colour))
        if k + 1 < frames:
            for axis in "xy":
                gray = np.full((24, 32, 1), 128, np.uint8)
                data = simplejpeg.encode_jpeg(gray, colorspace="GRAY")
                (folder / f"flow_{axis}_{k + first:05d}.jpg").write_bytes(data)


@pytest.fixture
def pack(tmp_path):
    """12 clips of 2 classes, UCF101 names, so that they have groups."""
    from fastactrec import prepare

    for label in ("Jump", "Walk"):
        for group in range(1, 4):
            for clip in range(1, 3):
                write_frames(tmp_path / "frames" / label / f"v_{label}_g{group:02d}_c{clip:02d}")
    out = tmp_path / "pack"
    prepare.run(PrepareConfig(tmp_path / "frames", out, size="32x24", workers=1))
    return out


def rewrite(path, change) -> None:
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    rows = change(rows)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_machine(capsys):
    assert run_command("doctor", []) == 0
    out = capsys.readouterr().out
    for words in (
        "python",
        "memory",
        "disk free here",
        "C++ compiler",
        "nvcc",
        "NVIDIA driver",
        "NCCL of torch",
    ):
        assert words in out
    assert re.search(r"CPU +\w+ in use, of base", out)
    assert "cupy-cuda13x" in out
    assert "MISSING" not in out


def test_without_driver(monkeypatch):
    def fail():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert doctor.gpu_rows() == [("NVIDIA driver", "no NVIDIA driver")]


def test_driver_that_does_not_answer(monkeypatch):
    def fail():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    assert "driver does not answer" in doctor.gpu_rows()[0][1]


def test_with_two_gpus(monkeypatch):
    """A recording stand-in for NVML: the tests' machine need not have a GPU."""
    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.65.06",
        "nvmlSystemGetCudaDriverVersion": lambda: 13020,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: f"Card {handle}",
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=80 << 30, free=79 << 30),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    assert doctor.gpu_rows() == [
        ("NVIDIA driver", "580.65.06, CUDA up to 13.2"),
        ("GPU 0", "Card 0, sm_90, 80.0 GiB, 79.0 GiB free"),
        ("GPU 1", "Card 1, sm_90, 80.0 GiB, 79.0 GiB free"),
    ]


def test_tool_that_does_not_run(tmp_path, monkeypatch):
    tool = tmp_path / "nvcc"
    tool.write_text("#!/bin/sh\nexit 3\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "does not run" in doctor._tool("nvcc")
    assert doctor._tool("icpx") == "none on PATH (looked for icpx)"


def test_good_pack(pack, capsys):
    assert doctor.check_pack(pack) == []
    out = capsys.readouterr().out
    assert "12 of 2 classes, 48 frames" in out
    assert "±20 px" in out
    assert "flow k is frame k -> k+1" in out
    assert re.search(r"all +train 8, val 0, test 4", out)
    assert re.search(r"Walk +train 4, val 0, test 2", out)
    assert re.search(r"shared groups +none", out)


def test_group_in_two_parts(pack, capsys):
    def leak(rows):
        for row in rows:
            if "g02_c01" in row["id"]:
                row["part"] = "test"
            elif "g02" in row["id"]:
                row["part"] = "train"
        return rows

    rewrite(pack / "splits" / "default.csv", leak)
    with pytest.raises(InputError, match=r"pack: 1 problem, listed above"):
        doctor.run(DoctorConfig(pack))
    out = capsys.readouterr().out
    assert "v_Jump_g02, v_Walk_g02" in out
    assert "2 groups are in train and in test" in out


def test_class_that_is_tested_but_not_trained(pack, capsys):
    def move(rows):
        return [row | {"part": "val" if "Walk" in row["id"] else row["part"]} for row in rows]

    rewrite(pack / "splits" / "default.csv", move)
    assert doctor.check_pack(pack) == ["split default: val has classes that train lacks: Walk"]


def test_damaged_shard_gives_exit_code_2(pack, capsys):
    shard = pack / "shards" / "000000.tar"
    data = bytearray(shard.read_bytes())
    data[data.index(b"\xff\xd8\xff")] = 0
    shard.write_bytes(data)
    assert run_command("doctor", ["--data", str(pack)]) == 2
    captured = capsys.readouterr()
    assert "SHA-256 is not the manifest's" in captured.out
    assert "1 of 10 images are not whole JPEG files" in captured.out
    assert captured.err.strip() == f"fastactrec doctor: {pack}: 2 problems, listed above"


def test_split_that_names_no_clip(pack):
    rewrite(pack / "splits" / "default.csv", lambda rows: [rows[0] | {"id": "nobody"}, *rows[1:]])
    assert "'nobody'" in doctor.check_pack(pack)[0]


def test_videos_and_frames_that_are_not_prepared(tmp_path, capsys):
    write_frames(tmp_path / "data" / "Walk" / "one", first=0)
    write_frames(tmp_path / "data" / "Walk" / "two")
    write_frames(tmp_path / "data" / "walk" / "three", frames=5)
    (tmp_path / "data" / "walk" / "three" / "img_00003.jpg").unlink()
    (tmp_path / "data" / "Walk" / "four.mp4").write_bytes(b"no video")
    problems = doctor.check_data(tmp_path / "data")
    out = capsys.readouterr().out
    assert re.search(r"Walk +3 clips in 3 groups", out)
    assert re.search(r"first frame number +0 \(1 clip\), 1 \(1 clip\)", out)
    assert "three: frame 3 is missing" in problems[1]
    assert "four.mp4" in problems[0]
    assert problems[2:] == ["classes 'Walk' and 'walk' differ in case only"]


def test_csv_with_missing_files_and_wrong_case(tmp_path, capsys):
    write_frames(tmp_path / "clips" / "One")
    text = "path,label\nclips/One,a\nclips/one,b\nclips/gone.mp4,a\nclips/One,\n"
    (tmp_path / "clips.csv").write_text(text)
    problems = doctor.check_data(tmp_path / "clips.csv")
    assert "layout" in capsys.readouterr().out
    assert any(problem.endswith("clips/gone.mp4: no such file") for problem in problems)
    assert any(problem.endswith("the folder has it as 'One'; correct the case") for problem in problems)
    assert any("no label" in problem for problem in problems)


def test_real_clips(shared_data, capsys):
    assert doctor.check_data(shared_data / "dark-clips") == []
    assert "12 of 11 classes" in capsys.readouterr().out


def test_long_lists_are_cut():
    lines = [str(k) for k in range(50)]
    assert doctor._some(lines) == [*lines[:20], "and 30 more"]
