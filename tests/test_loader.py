"""The loaders over a small pack held in memory: order, resume, ranks, exact samples, threads, errors."""

import threading
from dataclasses import dataclass

import cv2
import numpy as np
import pytest
import simplejpeg
import torch

from fastactrec import prepare
from fastactrec.config import PrepareConfig
from fastactrec.data import augment, loader, sampling
from fastactrec.data.flow import encode_flow, to_gray, tvl1
from fastactrec.data.loader import TestLoader, TrainLoader, clip_inputs
from fastactrec.data.pack import open_pack
from fastactrec.data.synthetic import make_synthetic
from fastactrec.data.video import read_frames
from fastactrec.errors import DecodeError, InputError


@dataclass(frozen=True)
class FakeClip:
    index: int
    id: str
    label: int
    frames: int
    width: int = 40
    height: int = 32

    @property
    def flow_frames(self) -> int:
        return self.frames - 1


class FakePack:
    """The reading half of a Pack. Flow and RGB pictures are smooth noise; every read is recorded."""

    path = "fake.pack"
    bound_px = 8.0

    def __init__(self, lengths):
        rng = np.random.default_rng(0)
        self.clips = [FakeClip(i, f"clip{i}", i % 3, n) for i, n in enumerate(lengths)]
        self.rgb = [[encode(rng, 3) for _ in range(n)] for n in lengths]
        self.flow = [[[encode(rng, 1), encode(rng, 1)] for _ in range(n - 1)] for n in lengths]
        self.reads = []

    def rgb_jpegs(self, index, frames):
        self.reads.append((index, tuple(frames)))
        return [memoryview(self.rgb[index][k]) for k in frames]

    def flow_jpegs(self, index, start, length):
        self.reads.append((index, start, length))
        assert start >= 0
        assert start + length <= len(self.flow[index])
        return [memoryview(j) for pair in self.flow[index][start : start + length] for j in pair]


def encode(rng, channels):
    noise = cv2.GaussianBlur(rng.normal(size=(32, 40, channels)), (0, 0), 2).reshape(32, 40, channels)
    picture = np.clip(128 + 300 * noise, 0, 255).astype(np.uint8)
    return simplejpeg.encode_jpeg(picture, quality=95, colorspace="RGB" if channels == 3 else "GRAY")


@pytest.fixture(scope="module")
def pack():
    return FakePack([9, 12, 5, 7, 10, 8, 3, 11, 9, 6, 7])


def train_loader(pack, clips=None, **changes):
    options = {
        "modality": "flow", "segments": 3, "flow_length": 2, "crop": 24, "scales": (1, 0.875, 0.75),
        "flip": True, "batch": 2, "seed": 5, "mean": 0.0, "std": 2.0,
    }  # fmt: skip
    return TrainLoader(pack, range(len(pack.clips)) if clips is None else clips, **(options | changes))


def check_loader(pack, clips=None, **changes):
    options = {
        "modality": "flow", "segments": 4, "crops": 10, "flow_length": 2, "crop": 24, "mean": 0.0, "std": 2.0,
    }  # fmt: skip
    return TestLoader(pack, range(len(pack.clips)) if clips is None else clips, **(options | changes))


def decoding_threads():
    return [t for t in threading.enumerate() if t.name.startswith("fastactrec-decode")]


@pytest.mark.parametrize("modality", ["rgb", "flow"])
def test_shapes_labels_and_every_clip_once(pack, modality):
    train = train_loader(pack, modality=modality)
    batches = list(train.epoch(0))
    assert len(batches) == train.steps_per_epoch == 6
    assert sorted(i for b in batches for i in b.clips) == list(range(11))
    for batch in batches:
        assert batch.inputs.shape == (len(batch.clips), 3, 3 if modality == "rgb" else 4, 24, 24)
        assert batch.inputs.dtype == torch.float32
        assert batch.labels.dtype == torch.int64
        assert batch.labels.tolist() == [i % 3 for i in batch.clips]
        assert batch.decode_s > 0
    assert [b.clips for b in train.epoch(1)] != [b.clips for b in batches]


def equal(batches, others):
    batches, others = list(batches), list(others)
    assert [b.clips for b in batches] == [b.clips for b in others]
    return all(torch.equal(a.inputs, b.inputs) for a, b in zip(batches, others, strict=True))


@pytest.mark.parametrize("workers", [1, 3, 8])
def test_the_number_of_workers_changes_nothing(pack, workers):
    assert equal(train_loader(pack, workers=2).epoch(3), train_loader(pack, workers=workers).epoch(3))


def test_seed_and_epoch_change_the_samples(pack):
    one = next(iter(train_loader(pack).epoch(0)))
    for other in (train_loader(pack).epoch(1), train_loader(pack, seed=6).epoch(0)):
        assert not torch.equal(one.inputs, next(other).inputs)


@pytest.mark.parametrize("start", range(7))
def test_an_epoch_entered_at_a_step_continues_exactly(pack, start):
    whole = list(train_loader(pack).epoch(2))
    assert equal(whole[start:], train_loader(pack).epoch(2, start_step=start))


def test_steps_beyond_the_epoch_are_refused(pack):
    with pytest.raises(ValueError, match="start_step 7: the epoch has 6 steps"):
        next(train_loader(pack).epoch(0, start_step=7))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_samples_do_not_depend_on_the_world_size(pack, world):
    """Global batch 12 over 1 to 4 ranks (11 clips) and over 2 and 3 ranks in smaller batches."""
    alone = next(train_loader(pack, batch=12).epoch(1))
    ranks = [next(train_loader(pack, batch=12 // world, world=world, rank=r).epoch(1)) for r in range(world)]
    for r, batch in enumerate(ranks):
        assert batch.clips == alone.clips[r::world]
        assert torch.equal(batch.inputs, alone.inputs[r::world])


@pytest.mark.parametrize(("clips", "batch", "world"), [(11, 2, 2), (11, 3, 3), (11, 5, 2), (9, 2, 4), (2, 2, 5)])
def test_ranks_have_equal_steps_and_repeat_only_to_have_one_sample(pack, clips, batch, world):
    loaders = [train_loader(pack, range(clips), batch=batch, world=world, rank=r) for r in range(world)]
    steps = [[b.clips for b in one.epoch(0)] for one in loaders]
    assert {len(s) for s in steps} == {-(-clips // (batch * world))}
    assert all(1 <= len(share) <= batch for s in steps for share in s)
    seen = sorted(i for s in steps for share in s for i in share)
    assert set(seen) == set(range(clips))
    last = clips - (len(steps[0]) - 1) * batch * world
    assert len(seen) - clips == max(0, world - last)


def test_a_training_sample_is_what_the_parts_say(pack):
    """Offsets, crop and flip drawn as documented; decoded by OpenCV; resized by torch."""
    batch = next(train_loader(pack, segments=2, flow_length=3).epoch(4))
    for position, (index, got) in enumerate(zip(batch.clips, batch.inputs, strict=True)):
        rng = np.random.default_rng((5, 4, 1 + position))
        clip = pack.clips[index]
        offsets = sampling.train_offsets(clip.flow_frames, 2, 3, rng)
        top, left, h, w = augment.train_crop(40, 32, (1, 0.875, 0.75), rng)
        flip = bool(rng.integers(2))
        for s, offset in enumerate(offsets):
            frames = [min(offset + i, clip.flow_frames - 1) for i in range(3)]
            codes = np.stack([pixels(j) for k in frames for j in pack.flow[index][k]]).astype(np.float64)
            codes = codes[:, top : top + h, left : left + w]
            if flip:
                codes = codes[..., ::-1].copy()
                codes[0::2] = 255 - codes[0::2]
            want = torch.from_numpy((codes * 16 / 255 - 8) / 2)[None]
            want = torch.nn.functional.interpolate(want, (24, 24), mode="bilinear", antialias=True)[0]
            torch.testing.assert_close(got[s].double(), want, rtol=0, atol=1e-5)


def pixels(jpeg):
    return cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_GRAYSCALE)


def test_without_augmentation_samples_are_the_test_views(pack):
    for batch in train_loader(pack, augment=False, segments=4).epoch(0):
        views = dict(check_loader(pack, batch.clips, crops=1))
        for index, inputs in zip(batch.clips, batch.inputs, strict=True):
            torch.testing.assert_close(inputs, views[index], rtol=0, atol=1e-6)


def test_only_the_frames_needed_are_read(pack):
    pack.reads.clear()
    list(train_loader(pack, segments=2, flow_length=2, batch=4).epoch(0))
    assert sum(length for _, _, length in pack.reads) == 11 * 2 * 2
    pack.reads.clear()
    list(check_loader(pack, [1], segments=25))  # 11 flows, whatever the 25 segments and 10 crops
    assert sum(length for _, _, length in pack.reads) == 11


@pytest.mark.parametrize("modality", ["rgb", "flow"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_test_clips_are_divided_without_padding(pack, modality, world):
    loaders = [check_loader(pack, modality=modality, rank=r, world=world) for r in range(world)]
    seen = []
    for r, one in enumerate(loaders):
        mine = []
        for index, views in one:
            assert views.shape == (40, 3 if modality == "rgb" else 4, 24, 24)
            mine.append(index)
        assert mine == list(range(11))[r::world]
        assert len(one) == len(mine)
        seen += mine
    assert sorted(seen) == list(range(11))


def test_no_clips(pack):
    assert list(check_loader(pack, [])) == []
    with pytest.raises(InputError, match=r"fake\.pack: no clips"):
        train_loader(pack, [])


def test_ten_crops_flip_in_pairs_and_negate_x(pack):
    # x codes c and 255 - c are opposite displacements, so a mirrored crop is the mirrored, x-negated crop
    (_, views) = next(iter(check_loader(pack, [1])))
    plain, mirrored = views[0::2], views[1::2].flip(-1)
    torch.testing.assert_close(mirrored[:, 0::2], -plain[:, 0::2], rtol=0, atol=1e-5)
    torch.testing.assert_close(mirrored[:, 1::2], plain[:, 1::2], rtol=0, atol=1e-5)


@pytest.mark.parametrize("crops", [1, 5, 10])
@pytest.mark.parametrize("clip", [1, 6])  # clip 6 has 2 flows, fewer than the stack and the segments
def test_clip_inputs_equal_the_loader(pack, crops, clip):
    common = {"segments": 4, "crops": crops, "flow_length": 3, "crop": 24}
    flows = np.stack([[pixels(x), pixels(y)] for x, y in pack.flow[clip]])
    for modality, images in {
        "flow": flows,
        "rgb": np.stack([simplejpeg.decode_jpeg(j) for j in pack.rgb[clip]]),
    }.items():
        options = {**common, "modality": modality, "mean": 0.25, "std": 0.5}
        views = dict(check_loader(pack, [clip], **options))[clip]
        assert torch.equal(clip_inputs(images, bound_px=8.0, **options), views)


def test_clip_inputs_refuses_other_arrays():
    options = {
        "modality": "flow", "segments": 1, "crops": 1, "flow_length": 2, "crop": 24, "mean": 0.0, "std": 1.0,
    }  # fmt: skip
    for wrong in (
        np.zeros((4, 2, 32, 40), np.float32),
        np.zeros((4, 3, 32, 40), np.uint8),
        np.zeros((2, 32, 40), np.uint8),
    ):
        with pytest.raises(ValueError, match="flow images are"):
            clip_inputs(wrong, **options)


def test_a_damaged_frame_is_named_by_clip_and_frame():
    broken = FakePack([6, 6])
    broken.flow[1][2][1] = broken.flow[1][2][1][:-30]
    broken.rgb[1][4] = b""
    with pytest.raises(DecodeError, match=r"fake\.pack: clip clip1, flow frame 2 y does not decode: "):
        list(train_loader(broken, segments=1, flow_length=5).epoch(0))
    with pytest.raises(DecodeError, match=r"clip clip1, flow frame 2 y does not decode: "):
        list(check_loader(broken, flow_length=5))
    with pytest.raises(DecodeError, match=r"clip clip1, rgb frame 4 does not decode: "):
        list(check_loader(broken, modality="rgb", segments=6))
    assert not decoding_threads()


@pytest.mark.parametrize("make", [lambda p: train_loader(p).epoch(0), lambda p: iter(check_loader(p))])
def test_leaving_early_leaves_no_threads(pack, make):
    batches = make(pack)
    next(batches)
    assert decoding_threads()
    batches.close()
    assert not decoding_threads()

    def consume():
        for _ in make(pack):
            raise RuntimeError("the consumer failed")

    with pytest.raises(RuntimeError, match="the consumer failed"):
        consume()
    assert not decoding_threads()


def test_what_is_in_flight_is_bounded(pack):
    started = []
    lock = threading.Lock()

    def call(i):
        with lock:
            started.append(i)

    jobs = ((i, [lambda i=i: call(i)]) for i in range(50))
    for done, _ in enumerate(loader._in_order(jobs, workers=2, ahead=3)):
        assert len(started) <= done + 1 + 3
    assert sorted(started) == list(range(50))


def test_torch_keeps_its_threads(pack):
    """The consumer's number of threads stays, also in a thread new to torch, and after the epoch."""

    def consume():
        seen.extend(torch.get_num_threads() for _ in train_loader(pack).epoch(0))

    seen, before = [], torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        consume()
        for target in (consume, lambda: seen.append(torch.get_num_threads())):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    finally:
        torch.set_num_threads(before)
    assert seen == [3] * (6 + 6 + 1)


def test_a_pack_of_videos_gives_what_the_videos_give(tmp_path):
    """Prepared, packed and loaded, or decoded and computed in memory: equal up to JPEG loss."""
    make_synthetic(tmp_path / "videos", clips_per_class_train=1, clips_per_class_test=1, seed=0)
    prepare.run(PrepareConfig(src=tmp_path / "videos", out=tmp_path / "pack", size="64x64", workers=1))
    pack = open_pack(tmp_path / "pack")
    clips = pack.split()["test"][::3]
    options = {"segments": 3, "flow_length": 5, "crop": 56, "mean": 0.0, "std": 1.0}
    test = {m: dict(check_loader(pack, clips, modality=m, **options)) for m in ("rgb", "flow")}
    for index in clips:
        path = tmp_path / "videos" / pack.classes[pack.clips[index].label] / f"{pack.clips[index].group}.mp4"
        frames = np.stack(list(read_frames(path, size=(64, 64))))
        gray = to_gray(frames)
        codes = encode_flow(tvl1(gray[:-1], gray[1:]), pack.bound_px).numpy()
        for modality, images, loss in (("rgb", frames, 0.02), ("flow", codes, 0.1)):  # of 0..1; pixels
            views = clip_inputs(images, modality=modality, crops=10, bound_px=pack.bound_px, **options)
            assert abs(views - test[modality][index]).mean() < loss, (modality, path)
    for modality in ("rgb", "flow"):
        train = train_loader(pack, pack.split()["train"], modality=modality, crop=56, batch=3)
        assert sum(len(batch.clips) for batch in train.epoch(0)) == 8
