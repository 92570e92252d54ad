"""The project's own NCCL communicator as an engine of averaging. Unverified on GPUs: see ops.NcclCommunicator."""

from __future__ import annotations

import datetime
import functools
import itertools
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..errors import AveragingError, FastactrecError, InputError
from .engines import TorchEngine

Result = TypeVar("Result")

_numbers = itertools.count()  # of the communicators of this process


class NcclEngine(TorchEngine):
    """Carries arrays of one GPU by an NCCL communicator of its own, host values by a torch group.

    Collectives run on a CUDA stream of high priority, behind what torch's current stream holds when they are started;
    ``wait()`` makes torch's then current stream wait, never the host. Sums are plain: whoever averages folds 1/N into
    what comes before or after (NCCL's own average cannot use NVLink's in-switch sums). Do not let another NCCL group
    communicate at the same time, unless NCCL_LAUNCH_ORDER_IMPLICIT=1: the two can block each other.

    Args:
        group: its ranks take part, and its CPU backend carries host values; default: the default group.
        store: where rank 0 leaves the communicator's id; default: the store that torch.distributed started with.
        device: default: torch's current GPU.
        timeout_s: for ranks to come, and for any one collective; then it is aborted, also while the host waits for
            the GPU.
    Raises:
        InputError: the group has no CPU backend. AveragingError: a rank has not come in time, or cannot use NCCL.
        FastactrecError: this build has no CUDA; no NCCL, two of them, or one older than 2.19 (see ops.nccl_library).
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        store: dist.Store | None = None,
        device: torch.device | str | None = None,
        timeout_s: float = 60.0,
    ):
        if dist.is_initialized() and "cpu:" not in dist.get_backend_config(group):
            raise InputError("NcclEngine needs a CPU backend for host values: init_process_group('cpu:gloo,cuda:nccl')")
        super().__init__(group)
        self.device = torch.device(device or f"cuda:{torch.cuda.current_device()}")
        self._options = {"store": store, "device": device, "timeout_s": timeout_s}
        unique_id = self._exchange_id(store or dist.distributed_c10d._get_default_store(), timeout_s)
        self._communicator = self._explained(
            lambda: ops.NcclCommunicator(unique_id, self.rank, self.world, self.device, timeout_s)
        )
        self._finalizer = weakref.finalize(self, _leave, self._communicator)  # also when the interpreter ends

    def _exchange_id(self, store: dist.Store, timeout_s: float) -> bytes:
        """Rank 0's id, or the reason why it has none, under a key of its own: rank 0's process and its count of
        communicators, so that a store that outlives a process (torchrun restarts) never gives an old one."""
        keys = [""] * self.world
        host, process = self._processes[self.rank]
        dist.all_gather_object(keys, f"{host}-{process}-{next(_numbers)}", group=self.group)
        key = f"fastactrec/nccl/{keys[0]}"
        if self.rank == 0:
            try:
                unique_id = ops.nccl_unique_id()
            except FastactrecError as error:
                store.set(key, b"-" + str(error).encode())
                raise
            store.set(key, b"+" + unique_id)
            return unique_id
        try:
            store.wait([key], datetime.timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise AveragingError(
                f"rank {self.rank}: rank 0 has not given NCCL's id within {timeout_s:g} s ({error})"
            ) from None
        answer = store.get(key)
        if answer[:1] == b"-":
            raise AveragingError(f"rank 0 cannot use NCCL: {answer[1:].decode()}")
        return answer[1:]

    def _explained(self, call: Callable[[], Result]) -> Result:
        """A failure of communication also says which ranks are gone."""
        try:
            return call()
        except AveragingError as error:
            if gone := self.gone():
                raise AveragingError(f"{error}, {gone}") from None
            raise

    def all_reduce(self, tensor: Tensor, op: str = "sum", label: str = "") -> NcclWork:
        """label: what an error calls it, such as "bucket 3 of step 120"."""
        self.sent_bytes += 2 * (self.world - 1) / self.world * tensor.numel() * tensor.element_size()
        return NcclWork(self, self._explained(lambda: self._communicator.all_reduce(self._mine(tensor), op, label)))

    def all_to_all(self, received: Tensor, sent: Tensor, sizes: list[int], label: str = "") -> NcclWork:
        arrays = self._mine(received), self._mine(sent)
        self.sent_bytes += sum(sizes) - sizes[self.rank]
        return NcclWork(self, self._explained(lambda: self._communicator.all_to_all(*arrays, sizes, label)))

    def all_gather(self, received: Tensor, sent: Tensor, label: str = "") -> NcclWork:
        arrays = self._mine(received), self._mine(sent)
        self.sent_bytes += (self.world - 1) * sent.numel()
        return NcclWork(self, self._explained(lambda: self._communicator.all_gather(*arrays, label)))

    def reduce_scatter(self, received: Tensor, sent: Tensor, op: str = "sum", label: str = "") -> NcclWork:
        """Row `rank` of the reduced `sent` [world, n] into `received` [n]."""
        arrays = self._mine(received), self._mine(sent)
        self.sent_bytes += (self.world - 1) * received.numel() * received.element_size()
        return NcclWork(self, self._explained(lambda: self._communicator.reduce_scatter(*arrays, op, label)))

    def _mine(self, tensor: Tensor) -> Tensor:
        if tensor.device != self.device:
            raise InputError(f"NcclEngine is for arrays on {self.device}, this one lies on {tensor.device}")
        return tensor

    def register(self, tensors: list[Tensor]) -> None:
        """Tells NCCL of arrays that collectives will use again and again, such as the buckets', until close()."""
        for tensor in map(self._mine, tensors):
            self._explained(functools.partial(self._communicator.enroll, tensor))

    def check(self, what: str = "check") -> None:
        """Call it once per round: raises AveragingError if anything failed meanwhile. what: where the caller is."""
        self._explained(lambda: self._communicator.check(what))

    def within(self, group: dist.ProcessGroup) -> NcclEngine:
        return NcclEngine(group, **self._options)

    def close(self) -> None:
        """Leaves when all ranks are through; every rank should call it. Twice is once."""
        self._finalizer.detach()
        self._explained(self._communicator.close)


class NcclWork:
    """A collective that has been queued."""

    def __init__(self, engine: NcclEngine, handle: ops.NcclHandle):
        self._engine, self._handle = engine, handle

    def wait(self) -> None:
        """torch's current stream waits, the host does not. Raises AveragingError: communication failed."""
        device = self._engine.device
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        self._engine._explained(lambda: self._handle.wait(stream))


def _leave(communicator: ops.NcclCommunicator) -> None:
    communicator.drop()
