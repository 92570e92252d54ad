"""The ranks of a run: who this process is, where it computes, and the few things ranks agree on."""

from __future__ import annotations

import contextlib
import gc
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ..errors import AveragingError, FastactrecError, InputError


@dataclass(frozen=True)
class World:
    """This process among the ranks; size 1 outside torchrun."""

    rank: int
    size: int
    device: torch.device

    @property
    def distributed(self) -> bool:
        return self.size > 1

    def max(self, values: list[float]) -> list[float]:
        """Element-wise maximum over ranks."""
        if not self.distributed:
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        if self.distributed:
            moved = tensor.to(self.device)
            dist.all_reduce(moved)
            tensor.copy_(moved)
        return tensor

    def on_rank_zero(self, work: Callable[[], object]) -> None:
        """Run ``work`` on rank 0 while the others wait; an error there ends every rank."""
        error: Exception | None = None
        if self.rank == 0:
            try:
                work()
            except FastactrecError as caught:
                error = caught
            except OSError as caught:
                error = FastactrecError(f"rank 0: {caught}")
        if self.distributed:
            message = [None if error is None else (isinstance(error, InputError), str(error))]
            dist.broadcast_object_list(message, src=0)
            if message[0] is not None and error is None:
                raise (InputError if message[0][0] else FastactrecError)(message[0][1])
        if error is not None:
            raise error

    def broadcast_model(self, model: nn.Module) -> None:
        """Give every rank rank 0's parameters and buffers, in place."""
        if self.distributed:
            with torch.no_grad():
                for tensor in model.state_dict().values():
                    dist.broadcast(tensor, src=0)

    def require_equal(self, model: nn.Module) -> None:
        """Compare a checksum of every rank's parameters and buffers.

        Raises:
            AveragingError: on every rank, when replicas that should be one differ.
        """
        if self.distributed:
            checksum = 0
            for tensor in model.state_dict().values():
                data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
                checksum = zlib.crc32(data, checksum)
            low, high = self.max([-float(checksum), float(checksum)])
            if -low != high:
                raise AveragingError(
                    "the ranks' parameters or buffers differ after they were averaged; please report it"
                )


@contextlib.contextmanager
def open_world(device: str, one_rank_only: str = "") -> Iterator[World]:
    """Join the ranks that torchrun started (gloo on CPUs, NCCL on GPUs), or be the only one.

    Args:
        device: auto, cpu or cuda.
        one_rank_only: what to say where there is more than one rank, or empty when that is allowed.
    Raises:
        InputError: the device is not there, or the world size does not fit.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    local_rank, local_size = (
        int(os.environ.get("LOCAL_RANK", "0")),
        int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )
    if size > 1 and one_rank_only:
        raise InputError(f"WORLD_SIZE is {size}, but {one_rank_only}")
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and gpus < local_size:
        raise InputError(f"--device cuda: {local_size} local ranks, but torch sees {gpus} GPUs; use --device cpu")
    use_cuda = gpus >= local_size and gpus > 0
    where = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(where)
    if size == 1:
        yield World(0, 1, where)
        return
    # torchrun keeps its store when it restarts workers: without a prefix gloo finds the addresses of the dead and hangs
    store, _, _ = next(dist.rendezvous("env://", rank, size))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # gloo beside NCCL: averaging exchanges its few host numbers without waiting for the GPU
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if use_cuda else "gloo",
        store=dist.PrefixStore(f"attempt {attempt}", store),
        rank=rank,
        world_size=size,
        device_id=where if use_cuda else None,
    )
    try:
        yield World(rank, size, where)
    finally:
        gc.collect()  # whatever still holds the group, such as DDP's cycles: its threads must end before Python does
        dist.destroy_process_group()
