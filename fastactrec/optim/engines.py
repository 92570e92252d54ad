"""Who carries bytes between ranks: one tiny interface, so that averaging does not know its transport.

An engine has ``rank``, ``world`` and two collectives. Both return at once with a handle; every rank must
start the same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import InputError


class Handle(Protocol):
    """A running collective; it keeps its tensor alive."""

    def wait(self) -> object:
        """Until the result can be used: on CPU tensors by the host, on CUDA tensors by the current stream."""


class Engine(Protocol):
    """All-reduces among the ranks of one group; ``op`` is "sum" or "max"."""

    rank: int
    world: int

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Handle:
        """In place, on the tensor's own device."""

    def all_reduce_host(self, values: np.ndarray, op: str = "sum") -> Callable[[], np.ndarray]:
        """A small float64 or int64 array in host memory; calling the result waits and returns the reduced
        copy."""


class SingleEngine:
    """One rank: nothing to carry."""

    rank, world = 0, 1


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

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Handle:
        kind = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
        return dist.all_reduce(tensor, kind, group=self.group, async_op=True)

    def all_reduce_host(self, values: np.ndarray, op: str = "sum") -> Callable[[], np.ndarray]:
        tensor = torch.from_numpy(values.copy()).to(self._host_device)
        work = self.all_reduce(tensor, op)

        def result() -> np.ndarray:
            work.wait()
            return tensor.cpu().numpy()

        return result


def engine_for(group: dist.ProcessGroup | None) -> Engine | SingleEngine:
    """The engine of a group; of the default group if torch.distributed is initialised; else that of one
    rank."""
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return SingleEngine()
    engine = TorchEngine(group)
    return engine if engine.world > 1 else SingleEngine()
