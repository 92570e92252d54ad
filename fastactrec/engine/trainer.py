"""The training loop of one stream.

What a step computes depends only on (seed, stream, epoch, step, rank) and the state at its start: order and
augmentation come from the loader that way, the learning rate is a formula of the step, dropout is seeded per step. So
a checkpoint needs no generator state, and a resumed run continues bit for bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..config import MIB, STREAMS, TrainConfig, normalisation, parse_hierarchy, parse_scales
from ..data.loader import Batch, TestLoader, TrainLoader
from ..data.pack import Pack
from ..errors import FastactrecError
from ..files import atomic_path
from ..models.streams import StreamSpec, build_stream, parameter_groups, save_stream, start_from
from ..optim.adam import FusedAdam
from ..optim.averaging import ParameterAverager
from ..optim.averaging_options import AveragingOptions
from ..optim.batch_size import BatchSize, NoiseScale
from ..optim.buckets import FlatBuckets
from ..phases import COMPUTE, PhaseRecorder
from ..progress import say, track
from .checkpoint import damaged, load_checkpoint, save_checkpoint
from .metrics import topk
from .run_folder import RunFolder
from .scoring import score_clips
from .world import World


def stream_spec(config: TrainConfig, stream: str, pack: Pack) -> StreamSpec:
    """The network that ``config`` asks for, fed as ``pack`` was made."""
    return StreamSpec(
        stream=stream,
        arch=config.arch,
        base_width=config.base_width,
        flow_length=config.flow_length,
        classes=tuple(pack.classes),
        crop=config.crop,
        frame_size=pack.frame_size,
        frame_step=pack.manifest["frame_step"],
        bound_px=pack.bound_px,
    )


def learning_rate(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """Linear warm-up to the peak, then a cosine to zero at the end of the last epoch."""
    warmup = config.warmup_epochs * steps_per_epoch
    total = config.epochs * steps_per_epoch
    if step < warmup:
        return config.lr * (step + 1) / (warmup + 1)
    return config.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(total - warmup, 1)))


class BucketClock:
    """When DDP's last gradient bucket was ready: what follows in backward is exposed communication."""

    last_ready_s = 0.0


def average_gradients(clock, bucket):  # no annotations: DDP checks them, and refuses postponed ones
    """DDP's own averaging, noting the time. Not a method of the trainer: DDP would then keep itself alive through it,
    and with it gloo's threads beyond the end of the interpreter, which aborts the process."""
    clock.last_ready_s = time.perf_counter()
    buffer = bucket.buffer().div_(dist.get_world_size())
    return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])


def averaging_options(config: TrainConfig) -> AveragingOptions:
    """Raises InputError: options of averaging that do not go together."""
    return AveragingOptions(
        period=config.period,
        moments=config.moments,
        outer_lr=config.outer_lr,
        outer_momentum=config.outer_momentum,
        delay=config.delay,
        compression=None if config.compression == "none" else config.compression,
        hierarchy=parse_hierarchy(config.hierarchy),
        warmup=config.warmup_sync,
        quadratic=config.quadratic or None,
    )


def averager_for(config: TrainConfig, optimizer: FusedAdam) -> ParameterAverager:
    return ParameterAverager(optimizer, **dataclasses.asdict(averaging_options(config)))


class StreamTrainer:
    """Trains one stream of a run and leaves its weights in the run folder."""

    def __init__(self, config: TrainConfig, stream: str, pack: Pack, world: World, run: RunFolder):
        self.config, self.stream, self.pack, self.world, self.run = config, stream, pack, world, run
        parts = pack.split(config.split)
        common = {
            "modality": stream,
            "flow_length": config.flow_length,
            "crop": config.crop,
            "rank": world.rank,
            "world": world.size,
            "workers": config.workers,
            **normalisation(stream, pack.bound_px),
        }
        self.loader = TrainLoader(
            pack,
            parts["train"],
            segments=config.segments,
            scales=parse_scales(config.scales),
            flip=config.flip,
            batch=config.batch,
            seed=config.seed,
            **common,
        )
        self.val_clips = parts["val"]
        self.val_loader = TestLoader(pack, self.val_clips, segments=config.segments, crops=1, **common)
        self.spec = stream_spec(config, stream, pack)
        self.model = build_stream(self.spec, config.dropout, config.seed)
        init: Path | None = getattr(config, f"init_{stream}")
        if init is not None:
            fresh = start_from(self.model, init)
            say(f"{stream}: started from {init}; freshly initialised: {', '.join(fresh) or 'nothing'}")
        self.model.to(world.device, memory_format=torch.channels_last)
        world.broadcast_model(self.model)
        self.buckets = FlatBuckets(
            self.model,
            bucket_bytes=config.bucket_mib * MIB,
            groups=parameter_groups(self.model, config.weight_decay),
        )
        self.optimizer = FusedAdam(
            self.buckets, lr=config.lr, decoupled=config.decoupled, max_norm=config.clip_norm or None
        )
        sync = ("kavg" if world.distributed else "none") if config.sync == "auto" else config.sync
        self.averager = averager_for(config, self.optimizer) if sync == "kavg" else None
        self.recorder = PhaseRecorder()
        self.network: nn.Module = self.model
        self.bucket_clock = BucketClock()
        if sync == "ddp" and world.distributed:
            self.network = DistributedDataParallel(self.model)
            self.network.register_comm_hook(self.bucket_clock, average_gradients)
        noise = None
        if config.adaptive_batch == "noise":
            shared, population = self.network is not self.model, len(parts["train"])
            noise = NoiseScale(self.buckets, config.noise_every, shared=shared, population=population)
        self.batch_size = BatchSize(
            config.adaptive_batch,
            clips=config.batch * world.size,
            max_batch=config.max_batch or 8 * config.batch * world.size,
            most=self.loader.steps_per_epoch,
            rule=config.batch_lr_rule,
            noise=noise,
        )

    def fit(self, events) -> None:
        """Train from the last checkpoint (or the start) to the last epoch and write the weights.

        Args:
            events: a TensorBoard SummaryWriter, or None on ranks above 0.
        """
        start_epoch = self._resume()
        for epoch in range(start_epoch, self.config.epochs):
            record = self._epoch(epoch)
            if self.world.rank == 0:
                self.run.log(record)
                for name in ("loss", "top1", "val_top1", "lr"):
                    if name in record:
                        events.add_scalar(f"{self.stream}/{name}", record[name], epoch)
                events.flush()
                save_checkpoint(self.run.checkpoint_path(self.stream), self._state(epoch + 1))
                val = f", val {record['val_top1']:.3f}" if "val_top1" in record else ""
                say(
                    f"{self.stream} epoch {epoch + 1}/{self.config.epochs}: loss {record['loss']:.4f}, "
                    f"train top-1 {record['top1']:.3f}{val}, {record['clips_per_s']:.1f} clips/s"
                )
        if self.world.rank == 0:
            with atomic_path(self.run.weights_path(self.stream)) as temporary:
                save_stream(self.model, temporary)

    def _resume(self) -> int:
        path = self.run.checkpoint_path(self.stream)
        if not path.is_file():
            if self.world.rank == 0:
                self.run.forget_after(self.stream, 0)
            return 0
        state = load_checkpoint(path, dataclasses.asdict(self.spec))
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self.averager is not None:  # a run under ddp has none, but its parameters are where averages begin
                self.averager.load_state_dict(state["averager"] or self.averager.state_dict())
            if self.config.adaptive_batch != "none":
                self.batch_size.load_state_dict(state["batch_size"])
            epoch, ranks = int(state["epoch"]), int(state["ranks"])
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise damaged(path) from error
        if self.world.rank == 0:
            self.run.forget_after(self.stream, epoch)
        changed = "" if ranks == self.world.size else f", {ranks} ranks before, {self.world.size} now"
        say(f"{self.stream}: continuing at epoch {epoch + 1}{changed}")
        return epoch

    def _state(self, next_epoch: int) -> dict:
        return {
            "spec": dataclasses.asdict(self.spec),
            "epoch": next_epoch,
            "ranks": self.world.size,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "averager": None if self.averager is None else self.averager.state_dict(),
            "batch_size": self.batch_size.state_dict(),
        }

    def _epoch(self, epoch: int) -> dict:
        start = time.perf_counter()
        self.network.train()
        sums = {"loss": 0.0, "hits": 0.0, "samples": 0.0}
        seconds = {"data": 0.0, "compute": 0.0, "comm": 0.0}
        steps, accumulation = self.loader.steps_per_epoch, self.batch_size.accumulation
        batches = iter(track(self.loader.epoch(epoch), f"{self.stream} epoch {epoch + 1}", total=steps))
        for number, first in enumerate(range(0, steps, accumulation)):
            micro_steps = range(first, min(first + accumulation, steps))
            record = self._step(epoch, micro_steps, batches)
            for name in sums:
                sums[name] += record[name]
            for name in seconds:
                seconds[name] += record[f"{name}_s"]
            if self.world.rank == 0 and (number % self.config.log_every == 0 or micro_steps[-1] == steps - 1):
                self._log_step(record)
        next(batches, None)  # its end is the end of the loader's threads
        self._synchronise(seconds)
        totals = self.world.sum(
            torch.tensor([sums["loss"], sums["hits"], sums["samples"]], dtype=torch.float64)
        ).tolist()
        elapsed, data_s, compute_s, comm_s = self.world.max(
            [time.perf_counter() - start, seconds["data"], seconds["compute"], seconds["comm"]]
        )
        result = {
            "kind": "epoch",
            "stream": self.stream,
            "epoch": epoch,
            "loss": totals[0] / totals[2],
            "top1": totals[1] / totals[2],
            "lr": self.optimizer.param_groups[0]["lr"],
            "batch": self.batch_size.batch,
            "accumulation": accumulation,
            "seconds": elapsed,
            "data_s": data_s,
            "compute_s": compute_s,
            "exposed_comm_s": comm_s,
            "clips_per_s": totals[2] / elapsed,
        }
        if self.val_clips:
            scores, labels = score_clips(self.model, self.val_loader, self.val_clips, self.world)
            result["val_top1"] = topk(scores, labels, 1)
        return result | self._grow(epoch + 1)

    def _grow(self, next_epoch: int) -> dict:
        """Decides the batch of the next epoch; what was measured for it."""
        config, steps = self.config, self.loader.steps_per_epoch
        begins = next_epoch * steps
        warm = begins >= config.warmup_epochs * steps
        grown = self.batch_size.end_epoch(learning_rate(config, begins, steps) / config.lr if warm else 1.0)
        noise = self.batch_size.noise
        if grown and next_epoch < config.epochs:
            why = "" if noise is None else f", the gradient noise scale being {noise.value:.0f}"
            say(f"{self.stream}: {self.batch_size.batch} clips per step from epoch {next_epoch + 1} on{why}")
        if noise is None or not noise.measurements:
            return {}
        scale = noise.value if math.isfinite(noise.value) else None  # JSON knows no infinity
        return {"noise_scale": scale, "grad_variance": noise.trace, "grad_square": noise.signal}

    def _micro_batches(
        self, epoch: int, micro_steps: range, batches: Iterator[Batch], halve: bool
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and labels on the device, dropout's generator set for them; halves of a batch of two or more."""
        config, recorder, device = self.config, self.recorder, self.world.device
        for step in micro_steps:
            with recorder.phase("data"):
                batch = next(batches)
            # torch's generator drives dropout: a function of the step, not of history
            entropy = [config.seed, STREAMS.index(self.stream), epoch, step, self.world.rank]
            torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1))
            with recorder.phase("h2d"):
                inputs = batch.inputs.to(device, non_blocking=True)
                labels = batch.labels.to(device, non_blocking=True)
            parts = 2 if halve and len(labels) > 1 else 1
            yield from zip(inputs.tensor_split(parts), labels.tensor_split(parts), strict=True)

    def _step(self, epoch: int, micro_steps: range, batches: Iterator[Batch]) -> dict:
        """One optimizer step on the gradients of these steps of the loader, accumulated."""
        config, recorder, noise = self.config, self.recorder, self.batch_size.noise
        recorder.reset()
        steps = self.loader.steps_per_epoch
        lr = learning_rate(config, epoch * steps + micro_steps[0], steps) * self.batch_size.lr_factor
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        clips = sum(len(self.loader.positions(step)) for step in micro_steps)
        measured = noise is not None and noise.begin_step()
        seen, total, hits = 0, 0.0, 0.0
        # an accumulation comes in parts anyway
        for inputs, labels in self._micro_batches(epoch, micro_steps, batches, measured and len(micro_steps) == 1):
            count = len(labels)
            seen += count
            with contextlib.ExitStack() as around:
                if self.network is not self.model and seen < clips:
                    around.enter_context(self.network.no_sync())  # DDP averages what is accumulated, once
                if measured:
                    around.enter_context(noise.part(count, count / clips))
                with recorder.phase("forward"):
                    scores = self.network(inputs)
                    loss = nn.functional.cross_entropy(scores, labels, label_smoothing=config.label_smoothing)
                with recorder.phase("backward"):
                    (loss * (count / clips)).backward()
                    total += loss.item() * count  # here, so that on a GPU the time it takes is computation's
                    hits += float((scores.argmax(1) == labels).sum())
        in_backward_s = 0.0
        if self.network is not self.model:
            in_backward_s = recorder.intervals("backward")[-1, 1] - self.bucket_clock.last_ready_s
        with recorder.phase("optimizer"):
            if measured:
                noise.end_step()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.averager is not None:
            with recorder.phase("averaging"):
                self.averager.step(samples=clips)
        if not math.isfinite(total):
            raise FastactrecError(
                f"{self.stream}: the loss became {total} in epoch {epoch + 1}, step {micro_steps[0] + 1}; lower --lr "
                f"(the last checkpoint in {self.run.path} is intact)"
            )
        seconds = recorder.totals()
        return {
            "kind": "step",
            "stream": self.stream,
            "epoch": epoch,
            "step": micro_steps[0],
            "loss": total,
            "hits": hits,
            "lr": lr,
            "samples": clips,
            "accumulation": len(micro_steps),
            "data_s": seconds["data"] + seconds["h2d"],
            "compute_s": sum(seconds[name] for name in COMPUTE) - in_backward_s,
            "comm_s": in_backward_s + seconds.get("averaging", 0.0),
            "time": time.time(),
        }

    def _log_step(self, record: dict) -> None:
        hits, loss, samples = record.pop("hits"), record.pop("loss"), record["samples"]
        self.run.log({**record, "loss": loss / samples, "top1": hits / samples})

    def _synchronise(self, seconds: dict[str, float]) -> None:
        """Make all ranks one again: before evaluation and checkpoints the replicas must not differ."""
        start = time.perf_counter()
        if self.averager is not None:
            self.averager.average_all()
        elif self.world.distributed:  # DDP keeps parameters equal, but each rank has its own batch statistics
            for buffer in self.model.buffers():
                dist.broadcast(buffer, src=0)
        seconds["comm"] += time.perf_counter() - start
        self.world.require_equal(self.model)
