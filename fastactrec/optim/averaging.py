"""K-step parameter averaging: ranks train alone for K steps, then average in place on the flat buckets.

After Cong et al., JPDC 134 (2019), and Zhou & Cong, IJCAI 2018 (K-AVG); separate periods of the moments after
DES-LOC (arXiv 2505.22549).
"""

from __future__ import annotations

import hashlib
import math
import time
import warnings

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import AveragingError, InputError
from .adam import MOMENTS, FusedAdam
from .buckets import FlatBuckets
from .buffers import ModelBuffers, scale
from .engines import engine_for

# Rounds between averagings of the first and the second moments; 0: only in average_all().
MOMENT_ROUNDS = {"local": (0, 0), "mean": (1, 1), "desloc": (3, 6), "reset": (0, 0)}
WEIGHT_GRID = 1 << 24  # weights are multiples of 1 / WEIGHT_GRID, see exact_weights


class ParameterAverager:
    """Averages parameters, buffers and optimizer moments over ranks in calls K, 2K, ... of ``step()``.

    Parameters are averaged where they lie: each bucket is scaled by this rank's weight and summed by one
    all-reduce, bucket i + 1 being scaled while bucket i is on its way. Nothing of a parameter's size is
    allocated; pointers and memory formats stay. After each averaging all ranks hold the same bytes of
    parameters and buffers. With one rank nothing changes, bit for bit.

    Weights are samples since the last averaging, over their sum (the previous ones where no rank had any).
    Calls are counted, not successful optimizer steps, so that a step skipped by a loss scaler cannot put
    ranks out of step.

    Moments (Adam's m and v with their masses; SGD's momentum counts as m):
        local   never in a round
        mean    m and v in every round
        desloc  m in every third round, v in every sixth
        reset   zeroed after each averaging, as if training began there
    ``average_all()`` averages everything, under every policy (reset: resets).

    Buffers are those of the module that FlatBuckets was built from, see buffers.py. Frozen parameters are
    never averaged; they are compared by hash at construction and at the first averaging after a rebuild(),
    so call average_all() before freezing.

    Args:
        opt: FusedAdam, or a torch.optim.SGD over parameters that lie in a FlatBuckets.
        period: K, calls between averagings.
        moments: see above.
        group: torch.distributed group; default: the default group, or one rank if there is none.
        outer_lr, outer_momentum, delay, compression, hierarchy: other values than the defaults are refused
            in this version.
    Attributes:
        averaged: whether the last step() was the K-th of its round.
        seconds: host time of the last averaging, waiting included.
    Raises:
        InputError: an option out of range or not supported.
        AveragingError: on every rank, when ranks differ in layout, options, frozen parameters or call; or
            when communication failed (the parameters are then half averaged: go back to a checkpoint).
    """

    def __init__(
        self,
        opt: torch.optim.Optimizer,
        period: int = 8,
        moments: str = "desloc",
        group: dist.ProcessGroup | None = None,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        delay: int = 0,
        compression: str | None = None,
        hierarchy: object | None = None,
    ):
        if not isinstance(period, int) or isinstance(period, bool) or period < 1:
            raise InputError(f"period={period}: give the number of steps between averagings, 1 or more")
        if moments not in MOMENT_ROUNDS:
            raise InputError(f"moments={moments!r}: this version supports {', '.join(MOMENT_ROUNDS)}")
        unsupported = {
            "outer_lr": (outer_lr, 1.0),
            "outer_momentum": (outer_momentum, 0.0),
            "delay": (delay, 0),
            "compression": (compression, None),
            "hierarchy": (hierarchy, None),
        }
        for name, (value, default) in unsupported.items():
            if value != default:
                raise InputError(f"{name}={value!r} is not supported in this version: leave it at {default!r}")
        self.opt = opt
        self.period = period
        self.moments = moments
        self._adapter = _adapter_for(opt)
        self.buckets: FlatBuckets = self._adapter.buckets
        self.engine = engine_for(group)
        self.buffers = ModelBuffers(self.buckets.model)
        self.averaged = False
        self.seconds = 0.0
        self._calls = 0  # since the last average_all
        self._samples = 0.0  # since the last averaging
        self._weights = exact_weights(np.ones(self.engine.world))  # of the last averaging
        self._checked = 0  # version of the buckets whose frozen parameters were compared
        if self.engine.world > 1:
            if self.buckets.model is None:
                warnings.warn("FlatBuckets was built from bare parameters: buffers stay local", stacklevel=2)
            self._compare_ranks()

    @torch.no_grad()
    def step(self, samples: float = 1) -> None:
        """Call it once per iteration, behind the optimizer's step.

        Args:
            samples: what this rank processed since its last call; the weights of the average.
        """
        if not (samples >= 0 and math.isfinite(samples)):
            raise InputError(f"samples={samples}: give a finite number >= 0")
        self._calls += 1
        self._samples += samples
        self.averaged = self._calls % self.period == 0
        if self.averaged:
            rounds = self._calls // self.period
            due = zip(self._adapter.names, MOMENT_ROUNDS[self.moments], strict=False)
            self._average([name for name, every in due if every and rounds % every == 0])

    @torch.no_grad()
    def average_all(self) -> None:
        """Averages everything, moments too, and starts a new round: at an epoch's end, before evaluation,
        checkpoint."""
        self._average(list(self._adapter.names) if self.moments != "reset" else [])
        self.averaged = True
        self._calls = 0

    def state_dict(self) -> dict:
        """Position in the round."""
        return {"version": 1, "period": self.period, "calls": self._calls, "samples": self._samples}

    def load_state_dict(self, state: dict) -> None:
        """Continues at a saved position; with another period the round starts anew."""
        if state.get("version") != 1:
            raise InputError(f"averager state of version {state.get('version')}: this version reads 1")
        same = state["period"] == self.period
        self._calls, self._samples = (state["calls"], state["samples"]) if same else (0, 0.0)

    # One averaging

    def _average(self, names: list[str]) -> None:
        """Averages parameters, buffers and the named moments."""
        if self.engine.world == 1:
            self._samples = 0.0
            return
        start = time.perf_counter()
        self.buckets.settle()
        try:
            if self._checked != self.buckets.version:
                self._compare_ranks()
            self._reduce(names)
        except RuntimeError as error:
            raise AveragingError(
                f"rank {self.engine.rank}: the averaging of call {self._calls} failed: {error}"
            ) from error
        self._samples = 0.0
        self.seconds = time.perf_counter() - start

    def _reduce(self, names: list[str]) -> None:
        weight = self._agree(names)
        self._adapter.collect()
        finish_buffers = self.buffers.start(self.engine, weight)
        finish_moments = self._adapter.start(self.engine, weight, names)
        pending = []
        for name in ("param", *names):
            for bucket in self.buckets:
                flat = bucket.flat[name]
                scale(flat, weight)
                pending.append((self.engine.all_reduce(flat), flat))
        finish_buffers()
        finish_moments()
        for work, _ in pending:
            work.wait()
        torch.autograd.graph.increment_version([p for p in self.buckets.params if p.requires_grad])
        if self.moments == "reset":
            self._adapter.reset()

    def _agree(self, names: list[str]) -> float:
        """Exchanges samples and positions; returns this rank's weight."""
        table = np.zeros((self.engine.world, 3))
        wanted = sum(1 << k for k, name in enumerate(self._adapter.names) if name in names)
        table[self.engine.rank] = self._samples, self._calls, wanted
        table = self.engine.all_reduce_host(table)()
        if (table[:, 1:] != table[0, 1:]).any():
            at = ", ".join(f"rank {r}: call {row[1]:.0f}" for r, row in enumerate(table))
            raise AveragingError(f"ranks must call step() and average_all() alike, but are at {at}")
        if table[:, 0].any():
            self._weights = exact_weights(table[:, 0])
        return float(self._weights[self.engine.rank])

    def _compare_ranks(self) -> None:
        """Raises AveragingError on every rank unless layout, options and frozen parameters are equal."""
        frozen = self.buckets.frozen()
        layout = [(b.begin.tolist(), b.end.tolist(), b.index.tolist()) for b in self.buckets]
        shapes = [(tuple(p.shape), p.dtype) for p in self.buckets.params]
        described = (layout, shapes, len(frozen), self.buffers.describe(), self.period, self.moments)
        if not self._same([_digest(repr(described).encode())])[0]:
            raise AveragingError(
                "ranks differ in model, trainable parameters, parameter groups, bucket_bytes, period or "
                "moments: start all with the same configuration"
            )
        same = self._same([_digest(_bytes(p)) for _, p in frozen])
        if different := [name for (name, _), equal in zip(frozen, same, strict=True) if not equal]:
            raise AveragingError(
                f"{len(different)} frozen parameters differ between ranks, the first is {different[0]}: load "
                "the same weights everywhere before averaging, and call average_all() before freezing"
            )
        self._checked = self.buckets.version

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


class _AdamMoments:
    """What averaging must know of FusedAdam: moments lie in the buckets; masses and step counts follow
    them."""

    names = MOMENTS

    def __init__(self, opt: FusedAdam):
        self.opt, self.buckets = opt, opt.buckets

    def collect(self) -> None:
        for bucket in self.buckets:
            if bucket.dtype != torch.float32 or bucket.flat["exp_avg"].dtype != torch.float32:
                raise InputError("averaging needs float32 parameters and moments: use model.float()")

    def start(self, engine, weight: float, names: list[str]):
        if not names:
            return lambda: None
        rows, columns = self.opt.read_rows(), [k for k, name in enumerate(MOMENTS) if name in names]
        index = np.concatenate([bucket.index for bucket in self.buckets]) if len(self.buckets) else np.zeros(0, int)
        masses = engine.all_reduce_host(rows[np.ix_(index, columns)] * weight)
        steps = engine.all_reduce_host(rows[index, 2], "max")

        def finish() -> None:
            rows[np.ix_(index, columns)] = masses()
            rows[index, 2] = steps()
            self.opt.write_rows(rows)
            self.opt.publish(index[rows[index, 2] > 0])

        return finish

    def reset(self) -> None:
        self.opt.reset_moments()


class _SgdMoments:
    """Momentum of torch.optim.SGD, moved into the buckets at the first averaging; SGD updates it there in
    place."""

    def __init__(self, opt: torch.optim.SGD):
        self.opt = opt
        params = [p for group in opt.param_groups for p in group["params"]]
        buckets = FlatBuckets.holding(params)
        if buckets is None:
            raise InputError("SGD's parameters lie in no FlatBuckets: build far.FlatBuckets(model) first and keep it")
        self.buckets = buckets
        self._owned = {id(p) for p in params}
        self.names = ("momentum_buffer",) if any(group["momentum"] for group in opt.param_groups) else ()
        if self.names and any(group["dampening"] for group in opt.param_groups):
            raise InputError("dampening other than 0 cannot be averaged: torch starts momentum without it")
        for name in self.names:
            buckets.add_state(name)

    def collect(self) -> None:
        for i, p in enumerate(self.buckets.params):
            if self.names and p.requires_grad and id(p) in self._owned:
                view = self.buckets.view("momentum_buffer", i)
                own = self.opt.state[p].get("momentum_buffer")
                if own is None or own.data_ptr() != view.data_ptr():
                    view.zero_() if own is None else view.copy_(own)
                    self.opt.state[p]["momentum_buffer"] = view

    def start(self, engine, weight: float, names: list[str]):
        return lambda: None

    def reset(self) -> None:
        for name in self.names:
            for bucket in self.buckets:
                bucket.flat[name].zero_()


def _adapter_for(opt: torch.optim.Optimizer) -> _AdamMoments | _SgdMoments:
    if isinstance(opt, FusedAdam):
        return _AdamMoments(opt)
    if isinstance(opt, torch.optim.SGD):
        return _SgdMoments(opt)
    raise InputError(f"{type(opt).__name__} cannot be averaged: use FusedAdam, or torch.optim.SGD over FlatBuckets")
