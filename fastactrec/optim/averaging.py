"""K-step parameter averaging: ranks train alone for K steps, then average in place on the flat buckets.

After Cong et al., JPDC 134 (2019), and Zhou & Cong, IJCAI 2018 (K-AVG); separate periods of the moments after
DES-LOC (arXiv 2505.22549), the outer step after SlowMo and DiLoCo (arXiv 1910.00643, 2311.08105), delayed averages
that keep the local steps after hivemind, two levels after Hier-AVG (arXiv 1903.05133).
"""

from __future__ import annotations

import math
import time
import warnings

import numpy as np
import torch
import torch.distributed as dist

from ..errors import InputError
from .agreement import Agreement
from .averaging_options import COMPRESSION_BITS, MOMENT_ROUNDS, AveragingOptions, PeriodSchedule
from .buckets import FlatBuckets
from .buffers import ModelBuffers
from .engines import Engine, engine_for, node_engine
from .moments import moments_of
from .reduction import CompressedMean, Phase, PlainMean


class ParameterAverager:
    """Averages parameters, buffers and optimizer moments over ranks in calls K, 2K, ... of ``step()``.

    Parameters are averaged where they lie: each bucket is scaled by this rank's weight and summed by one
    all-reduce, bucket i + 1 being scaled while bucket i is on its way. Nothing of a parameter's size is
    allocated; pointers and memory formats stay. After each averaging all ranks hold the same bytes of
    parameters and buffers (with delay: after average_all()). With one rank nothing changes, bit for bit.

    Weights are samples since the last averaging, over their sum (the previous ones where no rank had any).
    Calls are counted, not successful optimizer steps, so that a step skipped by a loss scaler cannot put
    ranks out of step.

    Moments (Adam's m and v with their masses; SGD's momentum counts as m):
        local     never in a round
        mean      m and v in every round
        desloc    m in every third round, v in every sixth
        reset     zeroed after each averaging, as if training began there
        frozen_v  m and v in every round, and updates divide by the v of the last averaging
    ``average_all()`` averages everything, under every policy (reset: resets).

    Buffers are those of the module that FlatBuckets was built from, see buffers.py. Frozen parameters are
    never averaged; they are compared by hash at construction and at the first averaging after a rebuild(),
    so call average_all() before freezing.

    docs/averaging.md says which options go together, and which to choose.

    Args:
        opt: FusedAdam, or a torch.optim.SGD over parameters that lie in a FlatBuckets.
        period: K, calls between averagings.
        moments: see above.
        group: torch.distributed group; default: the default group, or one rank if there is none.
        outer_lr, outer_momentum: alpha and mu of the outer step: d = x_prev - mean, u <- mu u + d,
            x <- x_prev - alpha (d + mu u). 1 and 0: x is the mean.
        delay: local steps taken while a mean is on its way. Then x <- x + (mean - what x was), and moments by
            the same rule, decayed: the local steps are kept. Buffers are averaged by average_all() alone.
        compression: None, "bf16", "int8" or "int4": parameters travel as differences to the last average, with
            error feedback; moments as bfloat16. Ranks must begin with equal parameters.
        hierarchy: None; (n, c): ranks n by n (a node's) average after each period, all of them after every c-th;
            "auto": nodes as torchrun started them, c = 4.
        warmup: calls at the beginning in which gradients are averaged instead (by a hook before the optimizer's
            step), so that all ranks take the same step. Ranks must begin with equal parameters.
        quadratic: c of the period max(period, floor((c / lr)^2)), lr of the first group, see PeriodSchedule.
        buffers: "mean" in every averaging, or "local": by average_all() alone.
        engine: who carries the bytes, instead of the group; see engines.py.
    Attributes:
        averaged: whether the last step() changed parameters by an averaging.
        seconds: host time that the last step() or average_all() spent averaging, waiting included.
        sent_bytes: what this rank has handed to the collectives, by formula.
    Raises:
        InputError: an option out of range, or options that exclude each other.
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
        hierarchy: str | tuple[int, int] | None = None,
        *,
        warmup: int = 0,
        quadratic: float | None = None,
        buffers: str = "mean",
        engine: Engine | None = None,
    ):
        self.options = AveragingOptions(
            period, moments, outer_lr, outer_momentum, delay, compression, hierarchy, warmup, quadratic, buffers
        )
        self.opt = opt
        self._moments = moments_of(opt)
        if moments == "frozen_v" and len(self._moments.names) < 2:
            self._moments.freeze()
        self.buckets: FlatBuckets = self._moments.buckets
        self.engine = engine_for(group) if engine is None else engine
        self.buffers = ModelBuffers(self.buckets.model)
        self.averaged = False
        self.seconds = 0.0
        self._calls = 0  # since the last average_all
        self._rounds = 0  # averagings over all ranks since then
        self._local_rounds = 0  # averagings inside nodes since the last one over all ranks
        self._warm_left = warmup if self.engine.world > 1 else 0
        self._schedule = PeriodSchedule(period, quadratic)
        self._next = 0  # the call that averages; 0: not decided yet
        self._samples: dict[Engine, float] = {}  # since the last averaging, for each engine
        self._pending: _Delayed | None = None
        self._agreements: dict[Engine, Agreement] = {}
        self.node, self._every = None, 1
        if self.engine.world > 1:
            self._prepare()

    def _prepare(self) -> None:
        options = self.options
        if self.buckets.model is None:
            warnings.warn("FlatBuckets was built from bare parameters: buffers stay local", stacklevel=3)
        if options.hierarchy is not None:
            self.node, self._every = node_engine(self.engine, options.hierarchy)
        self._agreements = {engine: Agreement(engine) for engine in (self.engine, self.node) if engine is not None}
        self._mean = (
            PlainMean(self.engine)
            if options.compression is None
            else CompressedMean(self.engine, COMPRESSION_BITS[options.compression])
        )
        self._compare()
        for name in self._state_names():
            self.buckets.add_state(name)
        if options.anchored or options.warmup:
            self._agreements[self.engine].require_equal_parameters(self.buckets)
        if options.anchored:
            for bucket in self.buckets:
                bucket.flat["anchor"].copy_(bucket.flat["param"])
        if options.warmup:
            self.opt.register_step_pre_hook(self._average_gradients)

    def _compare(self) -> None:
        """Once for each layout of the buckets."""
        agreement = self._agreements[self.engine]
        if agreement.compared != self.buckets.version:
            agreement.require_same_training(self.buckets, self.buffers, self.options)
            if isinstance(self._mean, CompressedMean):
                self._mean.forget()

    def _state_names(self) -> list[str]:
        options = self.options
        names = ["anchor"] * options.anchored + ["residual"] * (options.compression is not None)
        names += ["outer_momentum"] * options.outer
        if options.delay:
            names += [f"{kind}_{name}" for name in ("param", *self._due_ever()) for kind in ("snapshot", "mean")]
        return names

    def _due_ever(self) -> list[str]:
        rounds = zip(self._moments.names, MOMENT_ROUNDS[self.options.moments], strict=False)
        return [name for name, every in rounds if every]

    @property
    def sent_bytes(self) -> float:
        return self.engine.sent_bytes + (self.node.sent_bytes if self.node else 0.0)

    # Steps

    @torch.no_grad()
    def step(self, samples: float = 1) -> None:
        """Call it once per iteration, behind the optimizer's step.

        Args:
            samples: what this rank processed since its last call; the weights of the average.
        """
        if not (samples >= 0 and math.isfinite(samples)):
            raise InputError(f"samples={samples}: give a finite number >= 0")
        start = time.perf_counter()
        self.averaged = False
        for engine in (self.engine, self.node):
            if engine is not None:
                self._samples[engine] = self._samples.get(engine, 0.0) + samples
        if self._warm_left:
            self._warm_left -= 1
            if self._warm_left == 0:
                self.average_all()
        else:
            self._calls += 1
            self._next = self._next or self._calls - 1 + self._period()
            if self._pending is not None:
                self._advance(self._pending)
            if self._calls == self._next:
                self._next = 0
                self._end_round()
        self.seconds = time.perf_counter() - start

    def _period(self) -> int:
        group = self.opt.param_groups[0]
        return self._schedule.next_round(float(group["lr"]), float(group.get("initial_lr", 0.0)))

    def _end_round(self) -> None:
        within_node = self.node is not None and self._local_rounds + 1 < self._every
        if within_node:
            self._local_rounds += 1
            names = list(self._moments.names) if self.options.moments == "mean" else []
            self._average(names, self.node)
            return
        self._local_rounds = 0
        self._rounds += 1
        rounds = zip(self._moments.names, MOMENT_ROUNDS[self.options.moments], strict=False)
        names = [name for name, every in rounds if every and self._rounds % every == 0]
        self._average(names, self.engine, self.options.delay)

    @torch.no_grad()
    def average_all(self) -> None:
        """Averages everything, moments too, and starts a new round: at an epoch's end, before evaluation,
        checkpoint."""
        start = time.perf_counter()
        while self._pending is not None:
            self._advance(self._pending, self.options.delay)
        self._average(list(self._moments.names) if self.options.moments != "reset" else [], self.engine, whole=True)
        self._calls = self._next = self._rounds = self._local_rounds = 0
        self.seconds = time.perf_counter() - start

    def state_dict(self) -> dict:
        """Position in the round, and the outer momentum."""
        state = {
            "version": 2,
            "period": self.options.period,
            "calls": self._calls,
            "rounds": self._rounds,
            "local_rounds": self._local_rounds,
            "next": self._next,
            "warm_left": self._warm_left,
            "samples": self._samples.get(self.engine, 0.0),
            "schedule": self._schedule.state_dict(),
        }
        if self.options.outer and self.engine.world > 1:
            state["outer_momentum"] = {
                self.buckets.names[i]: self.buckets.view("outer_momentum", i).clone()
                for bucket in self.buckets
                for i in bucket.index.tolist()
            }
        return state

    def load_state_dict(self, state: dict) -> None:
        """Continues at a saved position, after model and optimizer were loaded; with another period the round
        starts anew. What other ranks hold apart (a delayed mean, rounding errors of compression) is not saved: save
        after average_all()."""
        if state.get("version") != 2:
            raise InputError(f"averager state of version {state.get('version')}: this version reads 2")
        self._schedule.load_state_dict(state["schedule"])
        self._warm_left = state["warm_left"] if self.engine.world > 1 else 0
        same = state["period"] == self.options.period
        names = ("calls", "rounds", "local_rounds", "next")
        self._calls, self._rounds, self._local_rounds, self._next = (state[name] if same else 0 for name in names)
        self._samples = {self.engine: state["samples"] if same else 0.0}
        if self.engine.world == 1:
            return
        for bucket in self.buckets:
            if self.options.anchored:
                bucket.flat["anchor"].copy_(bucket.flat["param"])
            for i in bucket.index.tolist() if "outer_momentum" in state and self.options.outer else ():
                self.buckets.view("outer_momentum", i).copy_(state["outer_momentum"][self.buckets.names[i]])
        if self.options.moments == "frozen_v":
            self._moments.freeze()

    # One averaging

    def _average(self, names: list[str], engine: Engine, delay: int = 0, whole: bool = False) -> None:
        """Averages parameters, the named moments and buffers (`whole`: those under every policy)."""
        self.averaged = delay == 0
        if engine.world == 1:
            self._samples[engine] = 0.0
            return
        self.buckets.settle()
        agreement = self._agreements[engine]
        with agreement.of(f"the averaging of call {self._calls}"):
            self._compare()
            wanted = sum(1 << k for k, name in enumerate(self._moments.names) if name in names)
            weight = agreement.weight(self._samples.get(engine, 0.0), self._calls, wanted)
            self._moments.collect()
            if delay:
                self._pending = self._start_delayed(names, weight, delay)
            else:
                self._reduce(names, weight, engine, whole or self.options.buffers == "mean")
        self._samples[engine] = 0.0

    def _reduce(self, names: list[str], weight: float, engine: Engine, buffers: bool) -> None:
        mean = self._mean if engine is self.engine else PlainMean(engine)
        finish_buffers = self.buffers.start(engine, weight) if buffers else None
        finish_moments = self._moments.start(engine, weight, names)
        started = [
            mean.start(bucket, name, bucket.flat[name], bucket.flat[name], weight)
            for name in ("param", *names)
            for bucket in self.buckets
        ]
        if finish_buffers is not None:
            finish_buffers()
        finish_moments()
        _finish(started)
        self._step_from_anchor()
        self._changed()
        if self.options.moments == "reset":
            self._moments.reset()
        elif self.options.moments == "frozen_v":
            self._moments.freeze()

    def _step_from_anchor(self) -> None:
        """The outer step, from the last average to the new one; and the new one is remembered."""
        options = self.options
        for bucket in self.buckets if options.anchored else ():
            x, anchor = bucket.flat["param"], bucket.flat["anchor"]
            if options.outer:
                u = bucket.flat["outer_momentum"]
                x.neg_().add_(anchor)  # d
                u.mul_(options.outer_momentum).add_(x)
                x.add_(u, alpha=options.outer_momentum).mul_(-options.outer_lr).add_(anchor)
            anchor.copy_(x)

    def _changed(self) -> None:
        torch.autograd.graph.increment_version([p for p in self.buckets.params if p.requires_grad])

    # A delayed averaging

    def _start_delayed(self, names: list[str], weight: float, delay: int) -> _Delayed:
        started = []
        for name in ("param", *names):
            for bucket in self.buckets:
                snapshot, mean = bucket.flat[f"snapshot_{name}"], bucket.flat[f"mean_{name}"]
                snapshot.copy_(bucket.flat[name])
                started.append(self._mean.start(bucket, name, snapshot, mean, weight))
        return _Delayed(names, delay, started, self._moments.start(self.engine, weight, names, delay))

    def _advance(self, delayed: _Delayed, steps: int = 1) -> None:
        """Counts local steps; half way the second exchange of compression starts, at the end the means arrive. All
        ranks do so in the same calls, so that their collectives match."""
        delayed.steps += steps
        with self._agreements[self.engine].of(f"the delayed averaging before call {self._calls}"):
            if delayed.steps >= -(-delayed.delay // 2):
                for phases in delayed.started:
                    if len(phases) > 1:
                        phases.pop(0)()
            if delayed.steps < delayed.delay:
                return
            _finish(delayed.started)
            delayed.finish_moments()
        for bucket in self.buckets:
            for name in ("param", *delayed.names):
                mean = bucket.flat[f"mean_{name}"]
                left = 1.0 if name == "param" else self._moments.decay(bucket.group, name, delayed.delay)
                if name == "param" and self.options.anchored:
                    bucket.flat["anchor"].copy_(mean)
                bucket.flat[name].add_(mean.sub_(bucket.flat[f"snapshot_{name}"]), alpha=left)
        self._changed()
        self._pending = None
        self.averaged = True

    # Synchronous warm-up

    @torch.no_grad()
    def _average_gradients(self, *_) -> None:
        """Before an optimizer step of the warm-up: the plain mean of gradients, of parameters that any rank used."""
        if not self._warm_left:
            return
        self.buckets.settle()
        with self._agreements[self.engine].of("the averaging of gradients"):
            if (found_inf := getattr(self.opt, "found_inf", None)) is not None:
                self.engine.all_reduce(found_inf, "max").wait()
            touched = self.engine.all_reduce_host(self.buckets.touched.astype(np.int64), "max")() > 0
            self.buckets.touch(np.flatnonzero(touched))
            mean = PlainMean(self.engine)
            grads = [(bucket, bucket.flat["grad"]) for bucket in self.buckets]
            _finish([mean.start(bucket, "grad", grad, grad, 1 / self.engine.world) for bucket, grad in grads])


class _Delayed:
    """A mean on its way, and how many local steps were taken since."""

    def __init__(self, names: list[str], delay: int, started: list[list[Phase]], finish_moments: Phase):
        self.names, self.delay, self.started, self.finish_moments = names, delay, started, finish_moments
        self.steps = 0


def _finish(started: list[list[Phase]]) -> None:
    """Runs the phases of all buckets, first the first of each, so that their exchanges overlap."""
    while any(started):
        for phases in started:
            if phases:
                phases.pop(0)()
