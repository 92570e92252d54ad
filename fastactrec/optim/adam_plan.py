"""The buckets of one device as the Adam kernels see them: the table of parameters, the table of groups, the plan."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .. import ops
from ..errors import InputError
from .layout import Bucket

WORDS = {name: offset // 4 for name, (_, offset) in ops.ADAM_SEGMENT.fields.items()}


class DevicePlan:
    """What FusedAdam keeps per parameter rather than per element, in device memory, and the calls that use it.

    Nothing here waits for the device, and a CUDA graph that captured a step replays it: masses, steps and learning
    rates are read where they lie. What the host knows (who has a gradient, learning rates that are numbers) is copied
    only when it changed.

    Args:
        buckets: those of one device, with exp_avg and exp_avg_sq, and where they apply master and max_exp_avg_sq.
        groups: number of parameter groups.
        amsgrad: those of them that use max_exp_avg_sq.
    Attributes:
        index: int64 [S], the parameters, as indices into ``FlatBuckets.params``; a row of the table each.
        groups: int64 [S], their parameter groups.
        masses: float64 [S, 2], of exp_avg and exp_avg_sq; a view of the table.
        frozen_masses: float64 [S], of frozen_sq.
        steps: float32 [S], likewise.
    """

    def __init__(self, buckets: list[Bucket], groups: int, amsgrad: set[int]):
        self.buckets = buckets
        self.device = buckets[0].device
        self.index = np.concatenate([bucket.index for bucket in buckets])
        table = np.zeros(len(self.index), ops.ADAM_SEGMENT)
        table["begin"] = np.concatenate([bucket.begin for bucket in buckets])
        table["end"] = np.concatenate([bucket.end for bucket in buckets])
        self.groups = np.repeat([bucket.group for bucket in buckets], [len(bucket.index) for bucket in buckets])
        table["group"] = self.groups
        table["key"] = self.index
        # NumPy's memory on the CPU: the table and its views share it, and are written without torch's overhead.
        self._rows = torch.from_numpy(table.view(np.uint8).reshape(len(table), -1)).to(self.device)
        self.masses = self._rows.view(torch.float64)[:, WORDS["masses"] // 2 :][:, :2]
        self.frozen_masses = self._rows.view(torch.float64)[:, WORDS["frozen_mass"] // 2]
        self.steps = self._rows.view(torch.float32)[:, WORDS["step"]]
        self._live = self._rows.view(torch.int32)[:, WORDS["live"]]
        self._host_live = np.zeros(len(table), np.int32)
        self._host_groups = np.zeros(groups, ops.ADAM_GROUP)
        self._groups = torch.zeros(groups, ops.ADAM_GROUP.itemsize, dtype=torch.uint8, device=self.device)
        self._plan = ops.AdamPlan(self._rows, self._groups, table)
        row = 0
        for bucket in buckets:
            flat, small = bucket.flat, bucket.dtype != torch.float32
            first = None
            if self.device.type != "cpu":
                chunks = np.arange(0, bucket.numel, ops.ADAM_CHUNK)
                first = torch.from_numpy(np.searchsorted(bucket.end, chunks, side="right").astype(np.int32))
                first = first.to(self.device)
            self._plan.add_bucket(
                flat["master" if small else "param"],
                flat["grad"],
                flat["exp_avg"],
                flat["exp_avg_sq"],
                flat["max_exp_avg_sq"] if bucket.group in amsgrad else None,
                flat.get("frozen_sq"),
                flat["param"] if small else None,
                first,
                row,
                len(bucket.index),
            )
            row += len(bucket.index)

    def set_live(self, touched: np.ndarray) -> bool:
        """Says which parameters have a gradient (bool [P], by FlatBuckets.params); returns whether any has."""
        live = touched[self.index]
        if not np.array_equal(live, self._host_live):
            self._host_live = live.astype(np.int32)
            self._upload(self._live, self._host_live, "parameters with a gradient")
        return bool(live.any())

    def set_groups(self, groups: np.ndarray, rates: list[Tensor | None]) -> None:
        """Hands over ADAM_GROUP rows; `rates`: learning rates that are device tensors, which stay there."""
        if not np.array_equal(groups.view(np.uint8), self._host_groups.view(np.uint8)):
            self._host_groups = groups.copy()
            rows = self._host_groups.view(np.uint8).reshape(self._groups.shape)
            self._upload(self._groups, rows, "learning rates or other options")
        lr = self._groups.view(torch.float64)[:, 0]  # the first field
        for k, rate in enumerate(rates):
            if rate is not None:
                lr[k].copy_(rate.reshape(()))

    def _upload(self, target: Tensor, values: np.ndarray, what: str) -> None:
        source = torch.from_numpy(values)
        if target.is_cuda:
            if torch.cuda.is_current_stream_capturing():
                raise InputError(
                    f"{what} changed while a CUDA graph is captured: take one step of the same kind before capturing, "
                    "and give learning rates as tensors on the device"
                )
            source = source.pin_memory()  # torch keeps it until the copy has run
        target.copy_(source, non_blocking=True)

    def advance(self, grad_scale, found_inf, squares, max_norm: float) -> None:
        here = [None if t is None else t.to(self.device, non_blocking=True) for t in (grad_scale, found_inf, squares)]
        self._plan.advance(*here, max_norm)

    def update(self, out: str | None) -> None:
        """Updates every bucket; `out` names a flat buffer that gets a copy of the new weights."""
        outs = [bucket.flat[out] for bucket in self.buckets] if out else None
        self._plan.update(0, len(self.buckets), outs)
