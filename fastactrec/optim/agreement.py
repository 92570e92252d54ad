"""What ranks tell each other before they average: that they train the same thing, are at the same call, and who weighs
how much; and what is said when one of them is gone."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..errors import AveragingError
from .averaging_options import AveragingOptions
from .buckets import FlatBuckets
from .buffers import ModelBuffers
from .engines import Engine

WEIGHT_GRID = 1 << 24  # weights are multiples of 1 / WEIGHT_GRID, see exact_weights


class Agreement:
    """Among the ranks of one engine."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.compared = 0  # version of the buckets that were compared last
        self._weights = exact_weights(np.ones(engine.world))  # of the last averaging

    @contextlib.contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Turns what torch.distributed raises inside into one AveragingError that names the ranks that are gone."""
        try:
            yield
        except RuntimeError as error:
            gone = self.engine.gone()
            raise AveragingError(
                f"rank {self.engine.rank}: {what} failed{f', {gone}' if gone else ''}: {error}"
            ) from error

    def weight(self, samples: float, call: int, wanted: int) -> float:
        """Exchanges samples and positions (the call, and a bit for each moment to average); returns this rank's weight:
        that of the last time if nobody had samples.

        Raises:
            AveragingError: on every rank, when positions differ.
        """
        table = np.zeros((self.engine.world, 3))
        table[self.engine.rank] = samples, call, wanted
        table = self.engine.all_reduce_host(table)()
        if (table[:, 1:] != table[0, 1:]).any():
            at = ", ".join(f"rank {r}: call {row[1]:.0f}" for r, row in enumerate(table))
            raise AveragingError(f"ranks must call step() and average_all() alike, but are at {at}")
        if table[:, 0].any():
            self._weights = exact_weights(table[:, 0])
        return float(self._weights[self.engine.rank])

    def require_same_training(self, buckets: FlatBuckets, buffers: ModelBuffers, options: AveragingOptions) -> None:
        """Raises AveragingError on every rank unless layout, options and frozen parameters are equal."""
        frozen = buckets.frozen()
        layout = [(b.begin.tolist(), b.end.tolist(), b.index.tolist()) for b in buckets]
        shapes = [(tuple(p.shape), p.dtype) for p in buckets.params]
        described = (layout, shapes, len(frozen), buffers.describe(), options)
        if not self._same([_digest(repr(described).encode())])[0]:
            raise AveragingError(
                "ranks differ in model, trainable parameters, parameter groups, bucket_bytes, period, moments or "
                "other options: start all with the same configuration"
            )
        same = self._same([_digest(_bytes(p)) for _, p in frozen])
        if different := [name for (name, _), equal in zip(frozen, same, strict=True) if not equal]:
            raise AveragingError(
                f"{len(different)} frozen parameters differ between ranks, the first is {different[0]}: load "
                "the same weights everywhere before averaging, and call average_all() before freezing"
            )
        self.compared = buckets.version

    def require_equal_parameters(self, buckets: FlatBuckets) -> None:
        """Raises AveragingError on every rank unless all hold the same parameters."""
        if not self._same([_digest(_bytes(bucket.flat["param"])) for bucket in buckets]).all():
            raise AveragingError(
                "parameters differ between ranks: with compression, an outer step or a warm-up all must begin with the "
                "same ones, so load or broadcast them before building the averager"
            )

    def _same(self, digests: list[int]) -> np.ndarray:
        mine = np.array(digests, np.int64)
        if not len(mine):
            return np.ones(0, bool)
        largest = self.engine.all_reduce_host(np.stack([mine, -mine]), "max")()
        return largest[0] == -largest[1]


def exact_weights(samples: np.ndarray) -> np.ndarray:
    """samples / sum, as multiples of 2^-24 that sum to one exactly.

    float32(1/3) thrice is 1.00000003: every averaging would inflate the parameters. These weights are exact
    in float32, so equal parameters stay where they are, and m, v and their masses get the very same ones.
    """
    units = np.rint(samples / samples.sum() * WEIGHT_GRID)
    units[np.argmax(units)] += WEIGHT_GRID - units.sum()
    return units / WEIGHT_GRID


def _bytes(p: Tensor) -> bytes:
    return p.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:7], "little")  # 56 bits: its negative fits int64 too
