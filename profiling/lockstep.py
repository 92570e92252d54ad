"""Several ranks in one process: threads that take turns, and an engine with gloo's own order of additions.

An accuracy study trains hundreds of small replicas. As processes they would spend their time starting, waiting for each
other and fighting for two cores; here one rank computes until it has to wait for the others, then the next one does.
Results are those of real gloo processes bit for bit (tests/test_accuracy.py compares them): elementwise arithmetic does
not depend on who runs it, and sums are added in the order in which gloo's ring adds them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

MAX_SEGMENT_BYTES = 1 << 20  # beyond it gloo cuts chunks in a way that was not looked into


class Turns:
    """Which of the ranks runs (whoever holds the condition's lock), and the collectives that they have begun."""

    def __init__(self, world: int):
        self.world = world
        self.condition = threading.Condition()
        self.open: dict[int, _Collective] = {}
        self.failed: list[int] = []
        self.ended = 0

    def run(self, work: Callable[[LockstepEngine], object]) -> list:
        """``work(engine)`` of each rank in a thread of its own; their results in the order of ranks.

        Raises:
            The first error of a rank; the others are told that it is gone.
        """
        results: list = [None] * self.world
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            with self.condition:
                torch.set_num_threads(1)
                try:
                    results[rank] = work(LockstepEngine(self, rank))
                except BaseException as error:
                    errors.append(error)
                    self.failed.append(rank)
                finally:
                    self.ended += 1
                    self.condition.notify_all()

        threads = [threading.Thread(target=body, args=(rank,), name=f"rank {rank}") for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


class _Collective:
    """One collective: what each rank brings; carried out by the last one to arrive."""

    def __init__(self, turns: Turns, what: str):
        self.turns, self.what = turns, what
        self.brought: dict[int, object] = {}
        self.done = False

    def join(self, rank: int, what: str, brought: object, carry_out: Callable[[list], None]) -> None:
        if what != self.what:
            raise RuntimeError(f"rank {rank} begins {what} where others began {self.what}")
        self.brought[rank] = brought
        if len(self.brought) == self.turns.world:
            carry_out([self.brought[r] for r in range(self.turns.world)])
            self.done = True
            self.turns.condition.notify_all()

    def wait(self) -> None:
        while not self.done:
            if self.turns.ended:
                raise RuntimeError(f"{self.what}: another rank has ended before taking part")
            self.turns.condition.wait()  # lets the other ranks run


class LockstepEngine:
    """fastactrec.optim.engines.Engine among the ranks of a ``Turns``."""

    def __init__(self, turns: Turns, rank: int):
        self.turns, self.rank, self.world = turns, rank, turns.world
        self.sent_bytes = 0.0
        self._begun = 0

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> _Collective:
        self.sent_bytes += 2 * (self.world - 1) / self.world * tensor.numel() * tensor.element_size()
        return self._reduce(tensor, op)

    def all_to_all(self, received: Tensor, sent: Tensor, sizes: list[int]) -> _Collective:
        self.sent_bytes += sum(sizes) - sizes[self.rank]

        def carry_out(all_ranks: list[tuple[Tensor, Tensor]]) -> None:
            for source, (_, theirs) in enumerate(all_ranks):
                for target, part in enumerate(theirs.split(sizes)):
                    all_ranks[target][0][source].copy_(part)

        return self._begin(f"all_to_all of {sizes}", (received, sent), carry_out)

    def all_gather(self, received: Tensor, sent: Tensor) -> _Collective:
        self.sent_bytes += (self.world - 1) * sent.numel()

        def carry_out(all_ranks: list[tuple[Tensor, Tensor]]) -> None:
            for target, _ in all_ranks:
                for source, (_, theirs) in enumerate(all_ranks):
                    target[source].copy_(theirs)

        return self._begin(f"all_gather of {sent.numel()}", (received, sent), carry_out)

    def all_reduce_host(self, values: np.ndarray, op: str = "sum") -> Callable[[], np.ndarray]:
        tensor = torch.from_numpy(values.copy())
        work = self._reduce(tensor, op)

        def result() -> np.ndarray:
            work.wait()
            return tensor.numpy()

        return result

    def gone(self) -> str:
        return ", ".join(f"rank {rank} has ended" for rank in self.turns.failed)

    def _reduce(self, tensor: Tensor, op: str) -> _Collective:
        carry_out = reduce_max if op == "max" else reduce_sum
        return self._begin(f"all_reduce {op} of {tensor.dtype} {list(tensor.shape)}", tensor, carry_out)

    def _begin(self, what: str, brought: object, carry_out: Callable[[list], None]) -> _Collective:
        """The n-th collective of this rank is the n-th of every other."""
        number, self._begun = self._begun, self._begun + 1
        collective = self.turns.open.setdefault(number, _Collective(self.turns, what))
        collective.join(self.rank, what, brought, carry_out)
        if collective.done:
            del self.turns.open[number]
        return collective


def reduce_max(tensors: list[Tensor]) -> None:
    """Every tensor becomes the elementwise maximum."""
    largest = torch.stack(tensors).amax(0)
    for tensor in tensors:
        tensor.copy_(largest)


def reduce_sum(tensors: list[Tensor]) -> None:
    """Every tensor becomes the sum, added as gloo's ring does (gloo/allreduce.cc): an array is cut into one chunk of
    two segments for each rank; chunk c begins at rank c - 1 and goes down the ring, each rank adding its own, to end at
    rank c.

    Raises:
        ValueError: an array so large that gloo would use more segments.
    """
    flats = [tensor.view(-1) for tensor in tensors]
    world, numel, size = len(flats), flats[0].numel(), flats[0].element_size()
    segment_bytes = -(-numel * size // (2 * world))
    if segment_bytes > MAX_SEGMENT_BYTES:
        raise ValueError(f"{numel} elements are too many to add as gloo does: lower bucket_bytes")
    chunk = 2 * -(-segment_bytes // size)
    for c in range(world):
        piece = slice(min(c * chunk, numel), min((c + 1) * chunk, numel))
        total = flats[c - 1][piece].clone()
        for hop in range(2, world + 1):
            total += flats[(c - hop) % world][piece]
        for flat in flats:
            flat[piece] = total
