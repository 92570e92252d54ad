"""Batches for training and the views of each test clip, decoded by threads that stay a bounded number of
batches ahead.

What a sample is depends on (seed, epoch, position in the epoch's global order) alone: not on the number of
workers, the timing or, batch borders aside, the world size. So an epoch can be entered at any step and
continues exactly.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from ..errors import DecodeError, InputError
from .augment import resize, test_crops, train_crop
from .decode import (
    JpegError,
    crop_view,
    decode_flow,
    decode_frames,
    finish,
    flow_tables,
    frame_tables,
    mirrored,
    read_all,
    read_gray,
    read_rgb,
)
from .sampling import run_indices, test_offsets, train_offsets

BATCHES_AHEAD = 2
VIEWS_AHEAD_BYTES = 512 << 20  # 250 flow views of 224 x 224 are half a gigabyte: then one clip at a time


@dataclass(frozen=True)
class Batch:
    """One training step's share of a rank."""

    inputs: Tensor
    """float32 [N, S, C, H, W]."""
    labels: Tensor
    """int64 [N]."""
    clips: list[int]
    """Indices into the pack's clips, [N]."""
    wait_s: float
    """Seconds the consumer waited for this batch."""
    decode_s: float
    """Seconds that the threads spent on it, summed."""


class _Reader:
    """Reads, decodes and prepares one clip of a pack for one modality."""

    def __init__(self, pack, modality: str, segments: int, flow_length: int, crop: int, mean, std):
        if modality not in ("rgb", "flow"):
            raise ValueError(f"modality must be rgb or flow, not {modality!r}")
        self.pack, self.modality, self.segments, self.size = pack, modality, segments, crop
        self.length = flow_length if modality == "flow" else 1
        self.mean, self.std = mean, std
        self.channels = 2 * flow_length if modality == "flow" else 3

    def frames_of(self, clip) -> int:
        return clip.flow_frames if self.modality == "flow" else clip.frames

    def train_sample(self, index: int, runs: np.ndarray, box, flip: bool, out: Tensor) -> None:
        """Decode the runs [S, L] of a clip under one crop into ``out`` [S, C, size, size]."""
        whole = tuple(box[2:]) == (self.size, self.size)
        options = {
            "crop": box,
            "flip": flip,
            "mean": self.mean,
            "std": self.std,
            "out": out if whole else None,
        }
        if self.modality == "rgb":
            read = self.pack.rgb_jpegs(index, runs[:, 0].tolist())
            decoded = self.decode(index, runs, lambda: decode_frames(read, **options))
        else:
            read = [self.flow_run(index, run) for run in runs]
            decoded = self.decode(index, runs, lambda: decode_flow(read, self.pack.bound_px, **options))
        if not whole:
            out.copy_(resize(decoded, self.size))

    def flow_run(self, index: int, run: np.ndarray) -> list:
        """2L JPEGs of consecutive flow frames; where the last frame repeats, so do its JPEGs."""
        distinct = int(run[-1] - run[0]) + 1
        jpegs = list(self.pack.flow_jpegs(index, int(run[0]), distinct))
        return jpegs + jpegs[-2:] * (len(run) - distinct)

    def test_views(self, index: int, crops: int) -> Tensor:
        """All views of a clip, float32 [S * crops, C, size, size]; each frame that they share is decoded
        once."""
        clip = self.pack.clips[index]
        runs = run_indices(*_test_runs(self.frames_of(clip), self.segments, self.length))
        needed = np.unique(runs)

        def read() -> dict[int, Sequence[np.ndarray]]:
            if self.modality == "rgb":
                jpegs = self.pack.rgb_jpegs(index, needed.tolist())
                images = read_all(read_rgb, jpegs)
                return {int(frame): np.moveaxis(image, 2, 0) for frame, image in zip(needed, images, strict=True)}
            jpegs = [jpeg for frame in needed for jpeg in self.pack.flow_jpegs(index, int(frame), 1)]
            codes = list(read_all(read_gray, jpegs))
            return {int(frame): codes[2 * i : 2 * i + 2] for i, frame in enumerate(needed)}

        planes = self.decode(index, needed, read)
        return _views(planes, runs, self.modality, crops, self.size, self.mean, self.std, self.pack.bound_px)

    def decode(self, index: int, frames: np.ndarray, call: Callable):
        """``call()``, whose JpegError is told in terms of the clip and the frame."""
        try:
            return call()
        except JpegError as error:
            frame, axis = error.index, ""
            if self.modality == "flow":
                frame, axis = error.index // 2, f" {'xy'[error.index % 2]}"
            what = f"{self.modality} frame {frames.ravel()[frame]}{axis}"
            clip = self.pack.clips[index].id
            raise DecodeError(f"{self.pack.path}: clip {clip}, {what} does not decode: {error.reason}") from error


class TrainLoader:
    """Training batches of one rank.

    An epoch's global order is one permutation of the clips, drawn from (seed, epoch), cut into global batches
    of batch * world; of each, rank r takes the positions r, r + world, ... Every rank has the same number of
    steps. The last global batch is used though it may be smaller: ranks may then differ by one sample, and
    only if it has fewer samples than ranks, it is filled up from the start of the order until each has one.

    Args:
        pack: a Pack (or what reads like one).
        clips: indices into its clips.
        modality: "rgb" (C = 3, one frame per segment) or "flow" (C = 2 * flow_length, a stack per segment;
            in a clip shorter than the stack the last flow repeats).
        segments: per clip. Offsets: ``sampling.train_offsets``. All segments share the crop and the flip, as
            in TSN.
        flow_length: flow frames per stack.
        crop: side of the square input, pixels.
        scales, flip: see ``augment.train_crop``; mirror half of the samples (x flow negated).
        batch: clips per rank and step.
        seed, rank, world: see above.
        workers: decoding threads.
        mean, std: of (bytes / 255) for rgb, of pixels for flow: scalars or per channel, see
            ``decode.flow_tables``.
        augment: without it segments' centres, the test protocol's centre crop, no flip; the order stays
            random.
    Raises:
        InputError: no clips.
        DecodeError: from the epoch, naming pack, clip and frame.
    """

    def __init__(
        self, pack, clips: Sequence[int], *, modality: str, segments: int, flow_length: int, crop: int,
        scales: Sequence[float], flip: bool, batch: int, seed: int, rank: int = 0, world: int = 1,
        workers: int = 2, mean, std, augment: bool = True,
    ):  # fmt: skip
        self.clips = np.asarray(clips, dtype=np.int64)
        if not len(self.clips):
            raise InputError(f"{pack.path}: no clips to train on")
        if batch < 1 or workers < 1 or not 0 <= rank < world:
            raise ValueError(f"batch {batch}, workers {workers}, rank {rank} of {world} do not fit")
        self.reader = _Reader(pack, modality, segments, flow_length, crop, mean, std)
        self.scales, self.flip, self.batch, self.seed = tuple(scales), flip, batch, seed
        self.rank, self.world, self.workers, self.augment = rank, world, workers, augment

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.clips) // (self.batch * self.world))

    def positions(self, step: int) -> range:
        """This rank's positions in the global order at a step; those past the end wrap around."""
        first = step * self.batch * self.world
        end = min(first + self.batch * self.world, max(len(self.clips), first + self.world))
        return range(first + self.rank, end, self.world)

    def epoch(self, epoch: int, start_step: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from a step on; leaving the iterator early ends its threads."""
        if not 0 <= start_step <= self.steps_per_epoch:
            raise ValueError(f"start_step {start_step}: the epoch has {self.steps_per_epoch} steps")
        order = np.random.default_rng((self.seed, epoch, 0)).permutation(self.clips)
        r = self.reader

        def jobs():
            for step in range(start_step, self.steps_per_epoch):
                where = self.positions(step)
                clips = [int(order[p % len(order)]) for p in where]
                inputs = torch.empty(len(where), r.segments, r.channels, r.size, r.size)
                calls = [_timed(self._sample, epoch, *item) for item in zip(where, clips, inputs, strict=True)]
                yield (inputs, clips), calls

        for (inputs, clips), results, wait_s in _in_order(jobs(), self.workers, BATCHES_AHEAD):
            labels = torch.tensor([r.pack.clips[i].label for i in clips])
            yield Batch(inputs, labels, clips, wait_s, sum(seconds for _, seconds in results))

    def _sample(self, epoch: int, position: int, index: int, out: Tensor) -> None:
        clip, r = self.reader.pack.clips[index], self.reader
        frames = r.frames_of(clip)
        if self.augment:
            rng = np.random.default_rng((self.seed, epoch, 1 + position))
            offsets = train_offsets(frames, r.segments, r.length, rng)
            box = train_crop(clip.width, clip.height, self.scales, rng)
            flip = self.flip and bool(rng.integers(2))
        else:
            offsets = test_offsets(frames, r.segments, r.length)
            *box, flip = test_crops(clip.width, clip.height, r.size, 1)[0]
        r.train_sample(index, run_indices(offsets, frames, r.length), tuple(box), flip, out)


class TestLoader:
    """The views of each test clip: yields (clip index, float32 [S * crops, C, H, W]), segment by segment.

    Rank r takes clips r, r + world, ... of the list: nothing is padded or seen twice. Frames: segments'
    centres (``sampling.test_offsets``); crops: ``augment.test_crops``. Arguments as for ``TrainLoader``. A
    list may be empty.
    """

    __test__ = False  # a public name that pytest must not collect

    def __init__(
        self, pack, clips: Sequence[int], *, modality: str, segments: int, crops: int, flow_length: int,
        crop: int, rank: int = 0, world: int = 1, workers: int = 2, mean, std,
    ):  # fmt: skip
        if workers < 1 or not 0 <= rank < world:
            raise ValueError(f"workers {workers}, rank {rank} of {world} do not fit")
        self.clips = [int(i) for i in clips[rank::world]]
        self.reader = _Reader(pack, modality, segments, flow_length, crop, mean, std)
        self.crops, self.workers = crops, workers
        self.wait_s = self.decode_s = 0.0  # of the clips yielded so far; as in Batch

    def __len__(self) -> int:
        return len(self.clips)

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        view_bytes = 4 * self.reader.segments * self.crops * self.reader.channels * self.reader.size**2
        ahead = min(self.workers + 1, max(1, VIEWS_AHEAD_BYTES // view_bytes))
        jobs = ((i, [_timed(self.reader.test_views, i, self.crops)]) for i in self.clips)
        for index, [(views, seconds)], wait_s in _in_order(jobs, self.workers, ahead):
            self.wait_s += wait_s
            self.decode_s += seconds
            yield index, views


def clip_inputs(
    images: np.ndarray, *, modality: str, segments: int, crops: int, flow_length: int, crop: int, mean, std,
    bound_px: float = 20.0,
) -> Tensor:  # fmt: skip
    """The views of a clip in memory, exactly as ``TestLoader`` makes them of decoded frames.

    Args:
        images: uint8; rgb: frames [T, H, W, 3]; flow: codes [T - 1, 2, H, W], x then y.
        bound_px: displacement of code 255 (flow).
        The rest: as for ``TestLoader``.
    Returns:
        float32 [S * crops, C, crop, crop], new.
    Raises:
        ValueError: images of another dtype or shape, or none.
    """
    planes = np.moveaxis(images, 3, 1) if modality == "rgb" and images.ndim == 4 else images
    if images.dtype != np.uint8 or planes.ndim != 4 or planes.shape[1] != {"rgb": 3, "flow": 2}[modality]:
        raise ValueError(f"{modality} images are {images.dtype} {list(images.shape)}: see clip_inputs")
    length = flow_length if modality == "flow" else 1
    runs = run_indices(*_test_runs(len(planes), segments, length))
    return _views(planes, runs, modality, crops, crop, mean, std, bound_px)


def _test_runs(frames: int, segments: int, length: int) -> tuple[np.ndarray, int, int]:
    return test_offsets(frames, segments, length), frames, length


def _views(planes, runs: np.ndarray, modality: str, crops: int, size: int, mean, std, bound_px: float) -> Tensor:
    """``planes[frame]`` are the frame's uint8 [H, W] planes; ``runs`` [S, L] -> [S * crops, C, size,
    size]."""
    some = planes[int(runs[0, 0])]
    channels = len(some) * runs.shape[1]
    plain = frame_tables(mean, std) if modality == "rgb" else flow_tables(bound_px, channels, mean, std)
    turned = plain if modality == "rgb" else mirrored(plain)
    boxes = test_crops(some[0].shape[1], some[0].shape[0], size, crops)
    views = torch.empty(len(runs), crops, channels, size, size)
    for c, (*box, flip) in enumerate(boxes):
        cut = torch.empty(len(runs), channels, *box[2:])
        for s, run in enumerate(runs.tolist()):
            finish(
                [crop_view(p, box, flip) for frame in run for p in planes[frame]],
                turned if flip else plain,
                cut[s],
            )
        views[:, c] = resize(cut, size)
    return views.flatten(0, 1)


def _timed(function: Callable, *arguments) -> Callable:
    """A call of ``function`` that returns (result, seconds)."""

    def call():
        start = time.perf_counter()
        return function(*arguments), time.perf_counter() - start

    return call


def _own_one_core() -> None:
    """Keep torch's resizing inside this thread: a team of cores per decoding thread is 1.3 x the CPU time."""
    torch.get_num_threads()  # takes the process's number first, or the first operation would take it later
    torch.set_num_threads(1)  # this thread's (and that of threads still to come, see _in_order)


def _in_order(jobs: Iterable, workers: int, ahead: int) -> Iterator[tuple]:
    """Run (tag, calls) jobs in threads, at most ``ahead`` jobs in advance of the consumer.

    Yields:
        (tag, results of the calls, seconds the consumer waited), in the order of the jobs.
        The first error is raised here. However the iteration ends, its threads have ended too.
    """
    jobs, pending = iter(jobs), deque()
    torch_threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(workers, "fastactrec-decode", initializer=_own_one_core)

    def top_up() -> None:
        for tag, calls in islice(jobs, ahead - len(pending)):
            pending.append((tag, [pool.submit(call) for call in calls]))

    try:
        top_up()
        while pending:
            start = time.perf_counter()
            tag, futures = pending.popleft()
            results = [future.result() for future in futures]
            wait_s = time.perf_counter() - start
            top_up()
            yield tag, results, wait_s
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(torch_threads)  # which threads started from now on take, too
