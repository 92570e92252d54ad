"""One rank of links.py: builds its arms and runs turns of them, as it is told on standard input.

A process of its own, in the network namespace of its rank. Commands and replies are one JSON object a line.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torchvision
from links_arms import Arm, arms
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastactrec as far
from fastactrec.engine.trainer import BucketClock, average_gradients

LR = 1e-5  # random labels: no step may leave the range of numbers
BATCHES = 4
COUNTERS = Path("/sys/class/net") / os.environ["GLOO_SOCKET_IFNAME"] / "statistics"


class Replica:
    """A model and its optimizer."""

    def __init__(self, arch: str, fused_torch: bool):
        torch.manual_seed(0)
        self.model = torchvision.models.get_model(arch).to(memory_format=torch.channels_last)
        if fused_torch:
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LR, fused=True)
        else:
            self.optimizer = far.FusedAdam(far.FlatBuckets(self.model), lr=LR)


class Runner:
    """One arm: steps, and how long each was blocked in communication."""

    def __init__(self, arm: Arm, replica: Replica, batch: int):
        self.arm, self.replica, self.batch = arm, replica, batch
        self.network: nn.Module = replica.model
        self.clock = self.averager = None
        if arm.kind == "ddp":
            self.clock = BucketClock()
            self.network = DistributedDataParallel(replica.model)
            self.network.register_comm_hook(self.clock, average_gradients)
        elif arm.kind == "kavg":
            self.averager = far.ParameterAverager(replica.optimizer, period=arm.period, **arm.options)

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> float:
        """One training step; seconds that this rank's host was blocked in communication."""
        nn.functional.cross_entropy(self.network(inputs), labels).backward()
        # as in the trainer: what follows the last bucket in backward hides behind nothing
        blocked = time.perf_counter() - self.clock.last_ready_s if self.clock else 0.0
        self.replica.optimizer.step()
        self.replica.optimizer.zero_grad()
        if self.averager:
            start = time.perf_counter()
            self.averager.step(samples=self.batch)
            blocked = time.perf_counter() - start
        return blocked

    def digest(self) -> int:
        """Of all parameters' bytes."""
        value = 0
        for p in self.replica.model.parameters():
            array = p.detach().contiguous(memory_format=torch.channels_last) if p.dim() == 4 else p.detach()
            value = zlib.crc32(array.permute(0, 2, 3, 1).numpy() if p.dim() == 4 else array.numpy(), value)
        return value


class Rank:
    def __init__(self, settings: dict):
        self.settings = settings
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{settings['rendezvous']}", rank=settings["rank"], world_size=settings["ranks"]
        )
        known = arms(settings["delay"])
        chosen = [known[name] for name in settings["arms"]]
        replicas = {
            arm.replica: Replica(settings["arch"], fused_torch=arm.replica in ("torch", "ddp")) for arm in chosen
        }
        self.runners = {arm.name: Runner(arm, replicas[arm.replica], settings["batch"]) for arm in chosen}
        generator = torch.Generator().manual_seed(settings["rank"])
        shape = (settings["batch"], 3, settings["size"], settings["size"])
        self.batches = [
            (
                torch.randn(shape, generator=generator).to(memory_format=torch.channels_last),
                torch.randint(1000, shape[:1], generator=generator),
            )
            for _ in range(BATCHES)
        ]

    def shape(self) -> dict:
        model = next(iter(self.runners.values())).replica.model
        floating = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
        return {
            "elements": sum(p.numel() for p in model.parameters()),
            "batch_norm": sum(buffer.numel() for buffer in floating),
        }

    def warm_up(self) -> dict:
        """Two steps and one averaging of everything for each arm, then those that shift a delayed arm."""
        for runner in self.runners.values():
            self._steps(runner, 2)
            if runner.averager:
                runner.averager.average_all()
        for runner in self.runners.values():
            self._steps(runner, runner.arm.lead)
        return {}

    def turn(self, arm: str) -> dict:
        runner = self.runners[arm]
        sent = runner.averager.sent_bytes if runner.averager else 0.0
        dist.barrier()
        before = counters()
        start = time.perf_counter()
        step_s, blocked_s = self._steps(runner, runner.arm.steps)
        seconds = time.perf_counter() - start
        dist.barrier()  # behind it all have received what was sent to them
        after = counters()
        return {
            "seconds": seconds,
            "step_s": step_s,
            "blocked_s": blocked_s,
            "tx_bytes": after[0] - before[0],
            "tx_packets": after[1] - before[1],
            "sent_bytes": (runner.averager.sent_bytes if runner.averager else 0.0) - sent,
            "digest": runner.digest(),
        }

    def average_all(self, arm: str) -> dict:
        averager = self.runners[arm].averager
        dist.barrier()
        start = time.perf_counter()
        averager.average_all()
        return {"seconds": time.perf_counter() - start, "digest": self.runners[arm].digest()}

    def _steps(self, runner: Runner, count: int) -> tuple[list[float], list[float]]:
        step_s, blocked_s = [], []
        for step in range(count):
            start = time.perf_counter()
            blocked_s.append(runner.step(*self.batches[step % BATCHES]))
            step_s.append(time.perf_counter() - start)
        return step_s, blocked_s


def counters() -> tuple[int, int]:
    """Bytes and packets that left this rank's interface."""
    return tuple(int((COUNTERS / name).read_text()) for name in ("tx_bytes", "tx_packets"))


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not be taken for a reply
    rank = Rank(json.loads(sys.argv[1]))
    reply = rank.shape()
    while True:
        print(json.dumps(reply), file=replies, flush=True)
        line = sys.stdin.readline()
        if not line:
            break
        command = json.loads(line)
        reply = getattr(rank, command.pop("do"))(**command)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
