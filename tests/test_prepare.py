"""prepare from end to end: real clips to a pack, killed and continued, refused and cleaned up."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import simplejpeg

import fastactrec.data.assemble as assemble
import fastactrec.data.extract as extract
from fastactrec import cli, progress
from fastactrec.config import PrepareConfig
from fastactrec.data.flow import decode_codes, to_gray, tvl1
from fastactrec.data.jpeg import encode_gray, encode_rgb
from fastactrec.data.pack import open_pack
from fastactrec.data.video import read_frames, write_video
from fastactrec.errors import InputError
from fastactrec.prepare import run

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture
def said(monkeypatch):
    lines = []
    monkeypatch.setattr(progress, "say", lines.append)
    return lines


def clips_csv(path, data, *rows, columns="path,label,group"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([columns, *(f"{data}/{row}" for row in rows)]) + "\n")
    return path


@pytest.fixture(scope="session")
def fight(shared_data, tmp_path_factory):
    """A CSV of eight short real clips of six groups, of several sizes."""
    with open(shared_data / "surveillance-fight" / "clips.csv", newline="") as file:
        rows = list(csv.DictReader(file))[::21]
    lines = [f"{row['path']},{row['label']},{row['group']}" for row in rows]
    return clips_csv(tmp_path_factory.mktemp("csv") / "clips.csv", shared_data / "surveillance-fight", *lines)


def config(src, out, **options):
    return replace(PrepareConfig(src, out, size="short:48", max_frames=5, workers=1), **options)


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_real_clips_give_frames_flow_and_splits(fight, tmp_path, said):
    run(config(fight, tmp_path / "pack"))
    pack = open_pack(tmp_path / "pack")
    assert pack.verify() == []
    assert (len(pack.clips), pack.manifest["frames"], pack.manifest["rejected"]) == (8, 40, 0)
    assert [line for line in said if "8 clips, 40 frames" in line and "frames/s" in line]
    assert sorted(os.listdir(tmp_path / "pack")) == [
        "clips.csv", "index.npy", "manifest.json", "rejected.csv", "shards", "splits",
    ]  # fmt: skip
    assert pack.manifest["flow"]["algorithm"] == "tvl1"
    assert pack.manifest["flow"]["rounding"] == "half-even"
    assert {"fastactrec", "av", "simplejpeg"} <= set(pack.manifest["versions"])
    for clip in pack.clips[:3]:
        with open(fight, newline="") as file:
            path = list(csv.DictReader(file))[clip.index]["path"]
        everything = list(read_frames(path, size=(48, None)))
        middle = (len(everything) - 5) // 2
        frames = np.stack(everything[middle : middle + 5])
        assert frames.shape[1:3] == (clip.height, clip.width)
        stored = [simplejpeg.decode_jpeg(bytes(data)) for data in pack.rgb_jpegs(clip.index, range(5))]
        # JPEG quality 95 with 4:2:0 chroma: worst mean seen 3.3 levels.
        assert np.abs(np.stack(stored).astype(int) - frames).mean() < 5
        codes = [simplejpeg.decode_jpeg(bytes(j), "GRAY")[:, :, 0] for j in pack.flow_jpegs(clip.index, 0, 4)]
        codes = np.stack(codes).reshape(4, 2, clip.height, clip.width)
        gray = np.asarray(to_gray(frames))
        flow = np.asarray(tvl1(gray[:-1], gray[1:], **pack.manifest["flow"]["parameters"]))
        error = np.abs(np.asarray(decode_codes(codes, 20.0)) - flow.clip(-20, 20))
        # One code is 0.157 px: rounding costs a mean of 0.04, JPEG the rest; worst mean seen 0.075 px.
        assert error.mean() < 0.1
    parts = pack.split()
    assert parts["train"]
    assert parts["test"]


def test_the_pack_does_not_depend_on_workers_or_batches(fight, tmp_path, monkeypatch):
    run(config(fight, tmp_path / "one"))
    run(config(fight, tmp_path / "two", workers=2))
    monkeypatch.setattr("fastactrec.data.extract.BATCH", 2)
    run(config(fight, tmp_path / "small batches"))
    assert contents(tmp_path / "one") == contents(tmp_path / "two") == contents(tmp_path / "small batches")


def test_finished_and_foreign_folders(fight, tmp_path, said):
    options = config(fight, tmp_path / "pack", max_frames=2, size="short:16")
    run(options)
    before = contents(tmp_path / "pack")
    run(replace(options, workers=2))
    assert said[-1] == f"{tmp_path / 'pack'}: already complete"
    with pytest.raises(InputError, match=r"made differently: size \(short:16 there, short:32 now\); delete it"):
        run(replace(options, size="short:32"))
    with pytest.raises(InputError, match=r"differently: flow.bound_px \(20.0 there, 15.0 now\), split.seed"):
        run(replace(options, bound_px=15.0, seed=3))
    with pytest.raises(InputError, match="made differently: the source's clips"):
        run(replace(options, classes="fight"))
    assert contents(tmp_path / "pack") == before
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    with pytest.raises(InputError, match="notes: not empty and not a pack"):
        run(replace(options, out=tmp_path / "notes"))
    with pytest.raises(InputError, match=r"mine.txt: is a file; --out needs a folder"):
        run(replace(options, out=tmp_path / "notes" / "mine.txt"))
    assert os.listdir(tmp_path / "notes") == ["mine.txt"]


def test_odd_media_are_taken_or_rejected_with_a_reason(shared_data, tmp_path):
    names = [name for name in sorted(os.listdir(shared_data / "odd-media")) if name != "README.md"]
    rows = [f"{name},odd" for name in names] + ["no-such-file.mp4,odd"]
    src = clips_csv(tmp_path / "clips.csv", shared_data / "odd-media", *rows, columns="path,label")
    run(config(src, tmp_path / "pack", size="32x32", max_frames=3))
    pack = open_pack(tmp_path / "pack")
    with open(tmp_path / "pack" / "rejected.csv", newline="") as file:
        rejected = {Path(row["path"]).name: row["reason"] for row in csv.DictReader(file)}
    assert rejected == {
        "result.webm": "empty file (0 bytes)",
        "nasa_13013.mp4.audio.mp3": "no video in it (audio only)",
        "sine_mono_s16.wav": "no video in it (audio only)",
        "testsrc2_mpeg4.mp4": "1 frame: no flow",
        "transparent.gif": "1 frame: no flow",
        "frame_exceeds_screen.gif": "1 frame: no flow",
        "no-such-file.mp4": "no such file",
    }
    assert {Path(clip.id).name for clip in pack.clips} == set(names) - set(rejected)
    assert {(clip.frames, clip.width, clip.height) for clip in pack.clips} == {(3, 32, 32)}
    assert [clip.index for clip in pack.clips] == list(range(len(pack.clips)))  # rejections leave no gaps
    assert pack.verify() == []


def test_ranges_steps_and_middles(tmp_path):
    """Frames of known brightness: which ones are kept can be read off."""
    levels = [10 * k for k in range(25)]
    write_video(tmp_path / "a.mp4", [np.full((32, 32, 3), level, np.uint8) for level in levels])
    rows = [
        "path,label,start_frame,end_frame",
        "a.mp4,x,,",
        "a.mp4,x,4,9",
        "a.mp4,y,20,99",
        "a.mp4,y,24,25",
        "a.mp4,y,30,40",
    ]
    (tmp_path / "clips.csv").write_text("\n".join(rows) + "\n")

    def kept(**options):
        out = tmp_path / f"pack{len(os.listdir(tmp_path))}"
        run(config(tmp_path, out, size="short:16", **options))
        pack = open_pack(out)
        frames = {}
        for clip in pack.clips:
            means = [simplejpeg.decode_jpeg(bytes(j)).mean() for j in pack.rgb_jpegs(clip.index, range(clip.frames))]
            frames[clip.id] = [round(mean / 10) for mean in means]
        return frames

    everything = kept(max_frames=0)
    assert everything == {
        "a.mp4": list(range(25)), "a.mp4:4-9": [4, 5, 6, 7, 8], "a.mp4:20-99": [20, 21, 22, 23, 24],
    }  # fmt: skip
    assert kept(max_frames=0, frame_step=3)["a.mp4"] == list(range(0, 25, 3))
    middle = kept(max_frames=3, frame_step=2)
    assert middle == {"a.mp4": [10, 12, 14], "a.mp4:4-9": [4, 6, 8], "a.mp4:20-99": [20, 22, 24]}


# Frame folders of other tools


def make_frames(folder, count, first, flows=None):
    """Frames of brightness 10, 20 ...; flow number k is gray of brightness 100 + k (x), 150 + k (y)."""
    folder.mkdir(parents=True)
    for k in range(first, first + count):
        (folder / f"img_{k:05d}.jpg").write_bytes(encode_rgb(np.full((24, 32, 3), 10 * (k + 1), np.uint8), 95))
    for k in flows or ():
        for axis, base in (("x", 100), ("y", 150)):
            (folder / f"flow_{axis}_{k:05d}.jpg").write_bytes(encode_gray(np.full((24, 32), base + k, np.uint8), 95))


def read_levels(pack, clip):
    rgb = [simplejpeg.decode_jpeg(bytes(j)).mean() for j in pack.rgb_jpegs(clip.index, range(clip.frames))]
    flow = [simplejpeg.decode_jpeg(bytes(j), "GRAY").mean() for j in pack.flow_jpegs(clip.index, 0, clip.flow_frames)]
    return [round(level) for level in rgb], [round(level) for level in flow]


def test_given_flow_is_taken_as_it_is_and_put_in_step(tmp_path):
    make_frames(tmp_path / "src" / "a" / "denseflow", 4, 0, range(3))
    make_frames(tmp_path / "src" / "b" / "tsn", 4, 1, range(1, 5))
    make_frames(tmp_path / "src" / "b" / "odd", 6, 1, range(1, 4))
    run(config(tmp_path / "src", tmp_path / "pack", max_frames=0, bound_px=32.0))
    pack = open_pack(tmp_path / "pack")
    flow = pack.manifest["flow"]
    assert (flow["algorithm"], flow["rounding"], flow["bound_px"], pack.bound_px) == (
        "given",
        "given",
        32.0,
        32.0,
    )
    denseflow, tsn = pack.clips
    assert (denseflow.width, denseflow.height) == (32, 24)
    assert read_levels(pack, denseflow) == ([10, 20, 30, 40], [100, 150, 101, 151, 102, 152])
    # TSN's img k is the second frame of flow k, so flow 2 is the motion from img 1 to img 2
    assert read_levels(pack, tsn) == ([20, 30, 40, 50], [102, 152, 103, 153, 104, 154])
    as_given = (tmp_path / "src" / "b" / "tsn" / "flow_x_00002.jpg").read_bytes()
    assert bytes(pack.flow_jpegs(tsn.index, 0, 1)[0]) == as_given
    assert "6 frames but 3 flows" in (tmp_path / "pack" / "rejected.csv").read_text()


def test_given_flow_with_a_middle_and_with_a_step(tmp_path, said):
    make_frames(tmp_path / "src" / "a" / "tsn", 8, 1, range(1, 9))
    run(config(tmp_path / "src", tmp_path / "pack", max_frames=4))
    pack = open_pack(tmp_path / "pack")
    assert read_levels(pack, pack.clips[0]) == ([40, 50, 60, 70], [104, 154, 105, 155, 106, 156])
    run(config(tmp_path / "src", tmp_path / "stepped", frame_step=2, max_frames=0, size="short:24"))
    pack = open_pack(tmp_path / "stepped")
    assert pack.manifest["flow"]["algorithm"] == "tvl1"
    assert read_levels(pack, pack.clips[0])[0] == [20, 40, 60, 80]
    assert any("not used, --frame-step" in line for line in said)


def test_real_frame_folders_get_flow_of_their_own(shared_data, tmp_path):
    run(config(shared_data / "frames" / "demo_dataset", tmp_path / "pack", max_frames=0))
    pack = open_pack(tmp_path / "pack")
    assert [(clip.id, clip.frames) for clip in pack.clips] == [("jumping/0001", 17), ("running/0001", 15)]
    assert pack.manifest["source"]["layout"] == "frames"
    assert pack.verify() == []


# Killed, continued


def test_killed_and_continued_gives_the_same_bytes(fight, tmp_path):
    options = ["--size", "short:128", "--max-frames", "8", "--workers"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert cli.run("prepare", [str(fight), "--out", str(whole), *options, "1"]) == 0
    command = [sys.executable, "-m", "fastactrec.prepare", str(fight), "--out", str(killed), *options, "2"]
    with subprocess.Popen(command, cwd=REPO, stderr=subprocess.PIPE) as process:
        while process.poll() is None and len(list(killed.glob("work/0*.json"))) < 3:
            time.sleep(0.005)
        assert process.poll() is None, process.stderr.read()
        workers = _children(process.pid)
        process.send_signal(signal.SIGKILL)
    assert workers
    _wait_until(lambda: not any(map(_alive, workers)))
    assert not (killed / "manifest.json").exists()
    assert cli.run("prepare", [str(fight), "--out", str(killed), *options, "1"]) == 0
    assert contents(killed) == contents(whole)


def _children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "a worker outlived its parent"
        time.sleep(0.02)


class Killed(BaseException):
    """Stands for a kill: nothing in the package catches it."""


def test_stopped_between_files_and_continued_gives_the_same_bytes(fight, tmp_path, monkeypatch):
    monkeypatch.setattr(assemble, "SHARD_BYTES", 20_000)
    options = config(fight, tmp_path / "whole", size="short:24", max_frames=3)
    run(options)
    assert len(list((tmp_path / "whole" / "shards").iterdir())) >= 3
    original, writes = extract.atomic_file, [0]

    def counted(path):
        writes[0] += 1
        if writes[0] == starts:  # every start comes a file further
            raise Killed
        return original(path)

    for module in (extract, assemble):
        monkeypatch.setattr(module, "atomic_file", counted)
    starts, finished = 0, False
    while not finished:
        starts, writes[0] = starts + 1, 0
        try:
            run(replace(options, out=tmp_path / "stopped"))
            finished = True
        except Killed:
            assert not (tmp_path / "stopped" / "manifest.json").exists()
    assert starts > 5
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


def test_unfinished_work_of_other_options_is_refused(fight, tmp_path, monkeypatch):
    options = config(fight, tmp_path / "pack", max_frames=2, size="short:16")

    def killed(*_):
        raise Killed

    monkeypatch.setattr("fastactrec.prepare.assemble", killed)
    with pytest.raises(Killed):
        run(options)
    before = contents(tmp_path / "pack")
    with pytest.raises(InputError, match=r"unfinished work made differently: max_frames \(2 there, 4 now\)"):
        run(replace(options, max_frames=4))
    assert contents(tmp_path / "pack") == before


def test_two_at_once_are_refused(fight, tmp_path):
    import fcntl

    (tmp_path / "pack" / "work").mkdir(parents=True)
    with open(tmp_path / "pack" / "work" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another prepare is at work on it"):
            run(config(fight, tmp_path / "pack"))


# Bad input


def test_bad_input_ends_with_2_and_leaves_nothing(fight, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.csv").write_text("path,lable\na.mp4,x\n")
    (tmp_path / "junk" / "a").mkdir(parents=True)
    (tmp_path / "junk" / "a" / "one.mp4").write_bytes(b"this is not a video")
    (tmp_path / "junk" / "a" / "two.mp4").touch()
    before = sorted(tmp_path.rglob("*"))
    for arguments, message in {
        ("none",): "none: no such file or folder",
        ("empty",): "empty: no videos",
        ("broken.csv",): "broken.csv: no column label",
        (str(fight), "--classes", "fight,dance"): "'dance' is not a class",
        ("junk",): "none of 2 clips can be used; the first: a/one.mp4: Invalid data",
        (str(fight), "--size", "12"): "--size 12",
        (str(fight), "--lists", "empty"): "no Kinetics CSV in it",
    }.items():
        src = arguments[0] if os.path.isabs(arguments[0]) else str(tmp_path / arguments[0])
        rest = [str(tmp_path / "empty") if word == "empty" else word for word in arguments[1:]]
        assert cli.run("prepare", [src, "--out", str(tmp_path / "out"), *rest]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert message in error
        assert error.startswith("fastactrec prepare: ")
        assert sorted(tmp_path.rglob("*")) == before


def test_csv_split_and_official_split_files(shared_data, fight, tmp_path):
    lines = fight.read_text().splitlines()
    marks = ["split", *["train", "test"] * 4]
    (tmp_path / "clips.csv").write_text("\n".join(f"{a},{b}" for a, b in zip(lines, marks, strict=True)) + "\n")
    run(config(tmp_path / "clips.csv", tmp_path / "pack", max_frames=2, size="short:16"))
    assert open_pack(tmp_path / "pack").split() == {"train": [0, 2, 4, 6], "val": [], "test": [1, 3, 5, 7]}

    src = tmp_path / "ucf"
    for name in ("YoYo/v_YoYo_g01_c01", "YoYo/v_YoYo_g25_c05", "Archery/v_Archery_g01_c01"):
        (src / name).parent.mkdir(parents=True, exist_ok=True)
        write_video(src / f"{name}.avi", [np.full((32, 32, 3), k, np.uint8) for k in range(3)])
    lists = shared_data / "splits" / "ucf101"
    run(replace(config(src, tmp_path / "official", size="short:16"), lists=lists, classes="YoYo,Archery"))
    pack = open_pack(tmp_path / "official")
    assert pack.split_names() == ["default", "official1", "official2"]
    assert pack.classes == ["Archery", "YoYo"]
    assert pack.split("official1") == pack.split() == {"train": [2], "val": [], "test": [0, 1]}
    assert pack.split("official2")["train"] == [0, 1, 2]
    manifest = json.loads((tmp_path / "official" / "manifest.json").read_text())
    rejected = (tmp_path / "official" / "rejected.csv").read_text().splitlines()[1:]
    assert len(rejected) == manifest["rejected"]
    assert all(row.endswith(",no such file") for row in rejected)
