"""Reading a pack: random access, damage, and that other tools can read it."""

import json
import os
import pickle
import shutil
import tarfile
import threading
from dataclasses import replace

import numpy as np
import pytest
import simplejpeg

import fastactrec.data.assemble as assemble
from fastactrec.config import PrepareConfig
from fastactrec.data.jpeg import encode_gray, encode_rgb, read_jpeg
from fastactrec.data.pack import INDEX_DTYPE, open_pack
from fastactrec.errors import DecodeError, PackError
from fastactrec.prepare import run


def frame_tree(root, clips=5, frames=4):
    """Frame folders as denseflow leaves them, every image of its own brightness; no flow is computed."""
    for clip in range(clips):
        folder = root / "src" / f"class{clip % 2}" / f"v_{clip}"
        folder.mkdir(parents=True)
        for k in range(frames + clip):
            (folder / f"img_{k:05d}.jpg").write_bytes(encode_rgb(np.full((24, 32, 3), 10 * clip + k, np.uint8), 95))
        for k in range(frames + clip - 1):
            for axis, base in (("x", 100), ("y", 180)):
                gray = np.full((24, 32), base + 10 * clip + k, np.uint8)
                (folder / f"flow_{axis}_{k:05d}.jpg").write_bytes(encode_gray(gray, 95))
    return PrepareConfig(root / "src", root / "pack", workers=1, seed=1)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    config = frame_tree(tmp_path_factory.mktemp("pack"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "SHARD_BYTES", 40_000)  # several shards
        run(config)
    return config


@pytest.fixture
def copy(tree, tmp_path):
    """A pack to damage."""
    return shutil.copytree(tree.out, tmp_path / "pack")


def level(jpeg, colorspace="GRAY"):
    return round(float(simplejpeg.decode_jpeg(jpeg, colorspace=colorspace).mean()))


def test_random_access(tree):
    pack = open_pack(tree.out)
    assert pack.classes == ["class0", "class1"]
    assert [(clip.index, clip.id, clip.label, clip.frames) for clip in pack.clips] == [
        (0, "class0/v_0", 0, 4), (1, "class0/v_2", 0, 6), (2, "class0/v_4", 0, 8),
        (3, "class1/v_1", 1, 5), (4, "class1/v_3", 1, 7),
    ]  # fmt: skip
    assert pack.bound_px == 20
    assert len(pack.manifest["shards"]) > 1
    for clip in pack.clips:
        number = int(clip.id[-1])
        assert [level(j, "RGB") for j in pack.rgb_jpegs(clip.index, range(clip.frames))] == [
            10 * number + k for k in range(clip.frames)
        ]
        flow = pack.flow_jpegs(clip.index, 1, clip.flow_frames - 1)
        expected = [base + 10 * number + k for k in range(1, clip.flow_frames) for base in (100, 180)]
        assert [level(j) for j in flow] == expected
    assert [level(j) for j in pack.rgb_jpegs(2, [7, 0, 0])] == [47, 40, 40]
    assert pack.flow_jpegs(0, 0, 0) == []


def test_indices_out_of_range_are_refused(tree):
    pack = open_pack(tree.out)
    for frames in ([4], [-1]):
        with pytest.raises(IndexError, match="class0/v_0: frame"):
            pack.rgb_jpegs(0, frames)
    for start, length in ((3, 1), (0, 4), (-1, 1)):
        with pytest.raises(IndexError, match="class0/v_0: flow"):
            pack.flow_jpegs(0, start, length)


def test_index_points_at_the_bytes_that_tarfile_finds(tree):
    """The index against an independent reader; WebDataset's naming: key, first dot, extension."""
    pack = open_pack(tree.out)
    index = np.load(tree.out / "index.npy")
    assert index.dtype == INDEX_DTYPE
    samples, places = {}, []
    for number, shard in enumerate(pack.manifest["shards"]):
        with tarfile.open(tree.out / "shards" / shard["name"]) as tar:
            for member in tar:
                assert (member.mtime, member.uid, member.gid, member.uname, member.mode) == (
                    0,
                    0,
                    0,
                    "",
                    0o644,
                )
                key, _, extension = member.name.partition(".")
                samples.setdefault(key, {})[extension] = tar.extractfile(member).read()
                if extension != "json":
                    places.append((number, member.size, member.offset_data))
        assert (tree.out / "shards" / shard["name"]).stat().st_size == shard["bytes"]
    assert index.tolist() == places
    assert list(samples) == [f"{clip.index:08d}" for clip in pack.clips]
    for clip, sample in zip(pack.clips, samples.values(), strict=True):
        about = json.loads(sample.pop("json"))
        assert (about["id"], about["label"], about["class"]) == (
            clip.id,
            clip.label,
            pack.classes[clip.label],
        )
        names = [f"rgb_{k:05d}.jpg" for k in range(clip.frames)]
        names += [f"flow_{k:05d}.{axis}.jpg" for k in range(clip.flow_frames) for axis in "xy"]
        assert list(sample) == names
        ours = pack.rgb_jpegs(clip.index, range(clip.frames)) + pack.flow_jpegs(clip.index, 0, clip.flow_frames)
        assert list(map(bytes, ours)) == list(sample.values())


def test_splits_cover_the_clips_once(tree):
    pack = open_pack(tree.out)
    parts = pack.split()
    assert pack.split_names() == ["default"]
    assert sorted(number for part in parts.values() for number in part) == list(range(5))
    assert parts["test"]
    with pytest.raises(PackError, match=r"splits/nope.csv: no such split \(there are: default\)"):
        pack.split("nope")


def test_pickles_as_a_path_and_reads_from_threads(tree):
    pack = pickle.loads(pickle.dumps(open_pack(tree.out)))
    found = [None] * 8

    def read(k):
        found[k] = [level(j) for _ in range(20) for j in pack.rgb_jpegs(k % 5, [0])]

    threads = [threading.Thread(target=read, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = [int(clip.id[-1]) for clip in pack.clips]
    assert found == [[10 * numbers[k % 5]] * 20 for k in range(8)]


def test_a_sound_pack_has_no_problems(tree):
    assert open_pack(tree.out).verify() == []


def test_verify_finds_flipped_bytes_and_leaking_groups(copy):
    shard = copy / "shards" / "000000.tar"
    data = bytearray(shard.read_bytes())
    offset = int(np.load(copy / "index.npy")[0]["offset"])
    data[offset : offset + 3] = b"\0\0\0"
    shard.write_bytes(data)
    rows = (copy / "clips.csv").read_text().splitlines()
    rows[1:] = [",".join([*row.split(",")[:2], "one group", *row.split(",")[3:]]) for row in rows[1:]]
    (copy / "clips.csv").write_text("\n".join(rows) + "\n")
    problems = open_pack(copy).verify()
    assert len(problems) == 3
    assert "000000.tar: its SHA-256 is not the manifest's" in problems[0]
    assert "class0/v_0: 1 of 10 images are not whole JPEG files" in problems[1]
    assert "1 groups are in train and in test" in problems[2]


def gone(name):
    return lambda pack: (pack / name).unlink()


def text(name, content):
    return lambda pack: (pack / name).write_text(content)


def manifest(change):
    def damage(pack):
        content = json.loads((pack / "manifest.json").read_text())
        change(content)
        (pack / "manifest.json").write_text(json.dumps(content))

    return damage


UNKNOWN = [
    lambda m: m["flow"].update(alignment="?"),
    lambda m: m["flow"].update(rounding="down"),
    lambda m: m["flow"].update(bound_px="wide"),
    lambda m: m["flow"].update(bound_px=0),
    lambda m: m.update(flow=["tvl1"]),
    lambda m: m.update(shards="000000.tar"),
    lambda m: m["shards"][0].update(name="../../000000.tar"),
    lambda m: m.pop("shards"),
    lambda m: m.pop("size"),
    lambda m: m.update(classes=[1, 2]),
]


def short_row(pack):
    lines = (pack / "clips.csv").read_text().splitlines()
    (pack / "clips.csv").write_text("\n".join([lines[0], lines[1].rsplit(",", 2)[0], *lines[2:]]))


def other_index(pack):
    np.save(pack / "index.npy", np.zeros(3, INDEX_DTYPE))


def truncated_shard(pack):
    os.truncate(pack / "shards" / "000000.tar", 5000)


def unfinished(pack):
    (pack / "work").mkdir()
    (pack / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (gone("manifest.json"), r"not a pack \(no manifest.json\); make one with 'fastactrec prepare"),
        (text("manifest.json", "{"), r"manifest.json: damaged .*; prepare the pack again"),
        (manifest(lambda m: m.update(version=2)), r"manifest.json: format .* version 2, but"),
        (manifest(lambda m: m.update(format="x")), r"manifest.json: format 'x'"),
        *[(manifest(change), r"manifest.json: an entry is missing or not what") for change in UNKNOWN],
        (gone("clips.csv"), r"clips.csv: No such file"),
        (text("clips.csv", "id,label\n"), r"clips.csv: no column fps, frames"),
        (short_row, r"clips.csv: row 2 has another number of columns than the first"),
        (text("clips.csv", "x" * 200_000), r"clips.csv: damaged \(field larger than"),
        (gone("index.npy"), r"index.npy: missing or damaged"),
        (other_index, r"index.npy: does not fit clips.csv"),
        (gone("shards/000001.tar"), r"000001.tar: No such file or directory; copy the pack whole"),
        (truncated_shard, r"000000.tar: 5000 bytes, should be \d+; copy the pack again"),
        (unfinished, r"not finished; run the same prepare command"),
    ],
)
def test_damage_is_named_with_its_cure(copy, damage, message):
    damage(copy)
    with pytest.raises(PackError, match=message) as caught:
        open_pack(copy)
    assert str(copy) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_such_pack(tmp_path):
    with pytest.raises(PackError, match="no such pack; make one with"):
        open_pack(tmp_path / "none")


def test_clips_larger_than_a_shard_and_one_shard_for_all(tree, tmp_path, monkeypatch):
    shards = {}
    for size in (1, 1 << 30):
        monkeypatch.setattr(assemble, "SHARD_BYTES", size)
        config = replace(tree, out=tmp_path / str(size))
        run(config)
        pack = open_pack(config.out)
        assert pack.verify() == []
        shards[size] = len(pack.manifest["shards"])
    assert shards == {1: 5, 1 << 30: 1}


def test_jpeg_round_trip_and_damage(tmp_path):
    ramp = np.tile(np.arange(48, dtype=np.uint8) * 5, (33, 1))
    path = tmp_path / "a.jpg"
    path.write_bytes(encode_gray(ramp, 95))
    data, image = read_jpeg(path, gray=True)
    assert image.shape == (33, 48)
    assert np.abs(image.astype(int) - ramp).max() <= 3
    path.write_bytes(encode_rgb(np.dstack([ramp, ramp[:, ::-1], ramp]), 95))
    assert read_jpeg(path)[1].shape == (33, 48, 3)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(DecodeError, match=r"a.jpg: "):
        read_jpeg(path)
    with pytest.raises(DecodeError, match="No such file"):
        read_jpeg(tmp_path / "b.jpg")
