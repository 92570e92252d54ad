"""One flat array of every rank to their weighted mean: as it is, or compressed with error feedback."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from .. import ops
from .engines import Engine
from .layout import Bucket

BLOCK = 256  # elements that share a scale (csrc/launch.h); ranks own whole blocks
Phase = Callable[[], None]


def scale(tensor: Tensor, weight: float, out: Tensor | None = None) -> None:
    """In place, or into `out`; a weight of 0 also silences inf and NaN."""
    target = tensor if out is None else out
    if weight == 0:
        target.zero_()
    elif out is not None:
        torch.mul(tensor, weight, out=out)
    elif weight != 1:
        tensor.mul_(weight)


def finish(started: list[list[Phase]]) -> None:
    """Runs the phases of all buckets, first the first of each, so that their exchanges overlap."""
    while any(started):
        for phases in started:
            if phases:
                phases.pop(0)()


class Delayed:
    """Means on their way.

    Args:
        names: the moments among them.
        delay: local steps after which they are wanted.
        started: phases left, for each bucket of the parameters and of each moment.
        finish_moments: waits for masses; wants the number of steps taken.
        version: of the buckets' layout.
    Attributes:
        steps: how many local steps were taken since.
    """

    def __init__(
        self,
        names: list[str],
        delay: int,
        started: list[list[Phase]],
        finish_moments: Callable[[int], None],
        version: int,
    ):
        self.names, self.delay, self.started, self.finish_moments = names, delay, started, finish_moments
        self.version = version
        self.steps = 0


class PlainMean:
    """Weighted sum by one all-reduce per bucket, where the numbers lie."""

    def __init__(self, engine: Engine):
        self.engine = engine

    def start(self, bucket: Bucket, name: str, source: Tensor, target: Tensor, weight: float) -> list[Phase]:
        """Starts averaging `source` into `target` (the same array, or one of its size).

        Returns:
            what is left to do, in order; each waits for what the one before started.
        """
        scale(source, weight, None if target is source else target)
        return [self.engine.all_reduce(target).wait]


class CompressedMean:
    """Weighted sum in two compressed exchanges; every rank owns a piece of each bucket.

    Ranks send each owner their codes of its piece; the owner adds them in float32 and sends the codes of the sum to
    everybody. So a rank sends 2 (n - 1) / n of the compressed size, as in a plain all-reduce, and all ranks decode the
    same bytes. Parameters travel as differences to the last average (``anchor``) with error feedback: what rounding
    lost is added to the next difference, at the senders and at the owners. Moments travel as bfloat16: a second moment
    in 8 bits would lose its small values.

    After QSGD-style block scaling with error feedback (Karimireddy et al., arXiv 1901.09847) and the two-exchange shape
    of torchft's quantised all-reduce.
    """

    def __init__(self, engine: Engine, bits: int):
        self.engine = engine
        self.bits = bits
        self._owned: dict[tuple[int, str], Tensor] = {}  # what the owner's rounding lost, by bucket and kind
        self._payloads: dict[tuple[int, str], tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = {}

    def forget(self) -> None:
        """Buffers of a layout that is gone."""
        self._owned.clear()
        self._payloads.clear()

    def pieces(self, numel: int) -> list[slice]:
        """Which elements each rank owns: whole blocks, the last ones fewer or none."""
        share = -(-numel // (self.engine.world * BLOCK)) * BLOCK
        edges = [min(rank * share, numel) for rank in range(self.engine.world + 1)]
        return [slice(*pair) for pair in pairwise(edges)]

    def start(self, bucket: Bucket, name: str, source: Tensor, target: Tensor, weight: float) -> list[Phase]:
        """As PlainMean.start; `name` is "param" for parameters, else a moment's."""
        is_param = name == "param"
        bits = self.bits if is_param else 16
        anchor = bucket.flat["anchor"] if is_param else None
        residual = bucket.flat["residual"] if is_param else None
        pieces, mine = self.pieces(bucket.numel), self.engine.rank
        sizes = [ops.payload_bytes(piece.stop - piece.start, bits) for piece in pieces]
        key = (id(bucket), name)
        if key not in self._payloads:
            owned = pieces[mine].stop - pieces[mine].start
            self._payloads[key] = (
                torch.empty(sum(sizes), dtype=torch.uint8, device=bucket.device),
                torch.empty(self.engine.world, sizes[mine], dtype=torch.uint8, device=bucket.device),
                torch.empty(owned, device=bucket.device),
                torch.empty(max(sizes), dtype=torch.uint8, device=bucket.device),
                torch.empty(self.engine.world, max(sizes), dtype=torch.uint8, device=bucket.device),
            )
            self._owned[key] = torch.zeros(owned if is_param else 0, device=bucket.device)
        sent, received, total, reply, replies = self._payloads[key]
        for piece, part in zip(pieces, sent.split(sizes), strict=True):
            if weight == 0:  # zeros decode to nothing, whatever lies in the parameters
                part.zero_()
                continue
            ops.quantise(
                source[piece],
                part,
                bits=bits,
                factor=weight,
                reference=None if anchor is None else anchor[piece],
                residual=None if residual is None else residual[piece],
            )
        exchanged = self.engine.all_to_all(received, sent, sizes)
        gathered = []

        def answer() -> None:
            exchanged.wait()
            ops.dequantise_sum(received, total, bits=bits)
            ops.quantise(total, reply[: sizes[mine]], bits=bits, residual=self._owned[key] if is_param else None)
            gathered.append(self.engine.all_gather(replies, reply))

        def decode() -> None:
            gathered.pop().wait()
            for rank, piece in enumerate(pieces):
                base = None if anchor is None else anchor[piece]
                ops.dequantise_sum(replies[rank : rank + 1, : sizes[rank]], target[piece], bits=bits, base=base)

        return [answer, decode]
