"""Who carries bytes between ranks: one tiny interface, so that averaging does not know its transport.

An engine has ``rank``, ``world`` and two collectives. Both return at once with a handle; every rank must
start the same collectives in the same order.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError

GONE_WITHIN_S = 3.0  # how long to look for a rank that has ended, after communication failed


class Handle(Protocol):
    """A running collective; it keeps its tensor alive."""

    def wait(self) -> object:
        """Until the result can be used: on CPU tensors by the host, on CUDA tensors by the current stream."""


class Engine(Protocol):
    """Collectives among the ranks of one group; ``op`` is "sum" or "max".

    ``sent_bytes`` counts what this rank has handed to the device collectives: 2 (n - 1) / n of the array in an
    all-reduce, what is for others in the rest.
    """

    rank: int
    world: int
    sent_bytes: float

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Handle:
        """In place, on the tensor's own device."""

    def all_to_all(self, received: Tensor, sent: Tensor, sizes: list[int]) -> Handle:
        """uint8: `sent` holds sizes[r] bytes for each rank r; `received` [world, sizes[rank]] gets everybody's."""

    def all_gather(self, received: Tensor, sent: Tensor) -> Handle:
        """uint8: `sent` [n] of each rank into `received` [world, n]."""

    def all_reduce_host(self, values: np.ndarray, op: str = "sum") -> Callable[[], np.ndarray]:
        """A small float64 or int64 array in host memory; calling the result waits and returns the reduced
        copy."""

    def gone(self) -> str:
        """After a failure: which ranks have ended, in words; empty if none is known to."""


class SingleEngine:
    """One rank: nothing to carry."""

    rank, world, sent_bytes = 0, 1, 0.0


class TorchEngine:
    """A torch.distributed process group (gloo, NCCL, or both).

    Args:
        group: None for the default group. Host values travel by its CPU backend, so that they wait for no GPU
            stream; a group with NCCL alone carries them through the GPU (one host synchronisation).
    Raises:
        InputError: torch.distributed is not initialised, or this process is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        if not dist.is_initialized():
            raise InputError("a process group was given, but torch.distributed is not initialised")
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise InputError(f"process {dist.get_rank()} is not a member of the group that it shall average with")
        has_cpu = "cpu:" in dist.get_backend_config(group)
        self._host_device = torch.device("cpu") if has_cpu else torch.device("cuda", torch.cuda.current_device())
        self.sent_bytes = 0.0
        self._processes: list[tuple[str, int]] = [("", 0)] * self.world
        dist.all_gather_object(self._processes, (socket.gethostname(), os.getpid()), group=group)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Handle:
        self.sent_bytes += 2 * (self.world - 1) / self.world * tensor.numel() * tensor.element_size()
        return self._all_reduce(tensor, op)

    def all_to_all(self, received: Tensor, sent: Tensor, sizes: list[int]) -> Handle:
        self.sent_bytes += sum(sizes) - sizes[self.rank]
        mine = [sizes[self.rank]] * self.world
        return dist.all_to_all_single(received.view(-1), sent, mine, sizes, group=self.group, async_op=True)

    def all_gather(self, received: Tensor, sent: Tensor) -> Handle:
        self.sent_bytes += (self.world - 1) * sent.numel()
        return dist.all_gather_into_tensor(received.view(-1), sent, group=self.group, async_op=True)

    def _all_reduce(self, tensor: Tensor, op: str) -> Handle:
        kind = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        return dist.all_reduce(tensor, kind, group=self.group, async_op=True)

    def all_reduce_host(self, values: np.ndarray, op: str = "sum") -> Callable[[], np.ndarray]:
        tensor = torch.from_numpy(values.copy()).to(self._host_device)
        work = self._all_reduce(tensor, op)

        def result() -> np.ndarray:
            work.wait()
            return tensor.cpu().numpy()

        return result

    def gone(self) -> str:
        # Connections break before the process that held them is gone from the process table: look for a while.
        here = socket.gethostname()
        until = time.monotonic() + GONE_WITHIN_S
        while True:
            ended = [
                f"rank {rank} has ended (process {pid} on {host})"
                for rank, (host, pid) in enumerate(self._processes)
                if host == here and not _runs(pid)
            ]
            if ended or time.monotonic() > until:
                return ", ".join(ended)
            time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def node_engine(engine: Engine, hierarchy: str | tuple[int, int]) -> tuple[Engine | None, int]:
    """The engine of this rank's node, and how many averagings inside nodes go to one of all ranks.

    Args:
        hierarchy: (ranks per node, averagings), or "auto": as many ranks as torchrun started on each machine, and 4.
    Raises:
        InputError: not the default group, or nodes that do not divide the world.
    """
    if not isinstance(engine, TorchEngine) or engine.group is not None:
        raise InputError("hierarchy needs the default group of torch.distributed: leave group and engine out")
    per_node, every = (int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 4) if hierarchy == "auto" else hierarchy
    if engine.world % per_node:
        raise InputError(f"hierarchy: {engine.world} ranks are not whole nodes of {per_node}")
    if per_node == engine.world:
        return None, 1
    if per_node == 1:
        return SingleEngine(), every
    mine, _ = dist.new_subgroups(per_node)
    return TorchEngine(mine), every


def engine_for(group: dist.ProcessGroup | None) -> Engine | SingleEngine:
    """The engine of a group; of the default group if torch.distributed is initialised; else that of one
    rank."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return SingleEngine()
    engine = TorchEngine(group)
    return engine if engine.world > 1 else SingleEngine()
