"""How large a batch pays: the gradient noise scale, measured while training, and batches that grow by accumulation.

Note [Noise scale]: over samples, gradients have mean G and covariance Sigma. B = tr(Sigma) / |G|^2, in samples, is the
batch at which noise and signal of a gradient are equal: far below, doubling the batch halves the number of steps; far
above, it only doubles their cost (McCandlish et al. 2018, arXiv 1812.06162, section 2). A step whose gradient is the
sum of parts, g = sum w_j g_j with sum w_j = 1 and g_j the mean over n_j samples, gives

    E sum w_j |g_j|^2 = |G|^2 + u tr(Sigma),  u = sum w_j / n_j     (a small batch)
    E |g|^2           = |G|^2 + v tr(Sigma),  v = sum w_j^2 / n_j   (a large one)

two equations, solved for unbiased estimates of tr(Sigma) and |G|^2; with one part as the small batch these are the
paper's (A.2) and (A.3). As the small batch is the mean over all parts, the difference of the left sides is
sum w_j |g_j - g|^2: the estimate of tr(Sigma) is never negative, and it does not contain the noise of G. (g_1 alone
against g would: the error 2 G.(g_1 - g) is the larger, the better the gradient.) A ratio of two noisy
numbers is biased, so the moments are averaged over steps first and divided then.

An epoch draws its N samples without replacement, which makes them differ more than independent ones: u and v are then
u - 1/N and v - 1/N, with Sigma's divisor N - 1 (Cochran, Sampling Techniques, theorem 2.2). The estimate of tr(Sigma)
stays; that of |G|^2 gains tr(Sigma) / N. On 24 synthetic clips it was negative throughout without that, -72 where
tr(Sigma) was 2167. As augmentation differs each time, the gain is a little too large: the noise scale of a
network that has learned its N samples is then of the order of N instead of infinite.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from .. import ops
from ..errors import InputError
from .buckets import FlatBuckets
from .engines import engine_for

MULTIPLE = 2.0  # grow when the noise scale is above this many batches: the doubled batch is still below it
LEAST_MEASUREMENTS = 4  # measured steps before a batch grows
LR_RULES = {"sqrt": math.sqrt, "linear": float, "none": lambda growth: 1.0}
MODES = ("none", "noise", "decay")


class NoiseScale:
    """Estimates the gradient noise scale from every `every`-th optimizer step, see Note [Noise scale].

    ::

        measured = noise.begin_step()
        for inputs, labels in halves if measured else [batch]:  # or the micro-batches of an accumulation
            with noise.part(len(labels), len(labels) / len(batch)):
                (loss(inputs, labels) * len(labels) / len(batch)).backward()
        noise.end_step()
        opt.step()

    Parts accumulate in the same flat buckets. What each adds is measured as autograd delivers it, parameter by
    parameter, the sum by one pass over the buckets: nothing of a parameter's size is allocated, and steps that
    are not measured cost nothing. BatchNorm sees parts, not batches, so their noise is that of such parts.

    Every rank measures its own gradients, and ``merge()`` gives all ranks the mean of the moments. Under
    DistributedDataParallel (``shared``) the parts are those of all ranks, the sum is what DDP made of them, and
    ``end_step()`` of a measured step exchanges three numbers.

    Args:
        buckets: where the gradients lie.
        every: optimizer steps from one measured step to the next.
        decay: of the moments' exponential averages, per measured step.
        group: torch.distributed group; default: the default group, or one rank if there is none.
        shared: whether ranks average gradients.
        population: N where samples are drawn from N without replacement; None: independently.
    Attributes:
        measurements: measured steps that the value rests on, mean over ranks.
        trace, signal: averaged estimates of tr(Sigma) and |G|^2, NaN before there are any.
    Raises:
        InputError: an option out of range; in end_step(): shares that do not sum to one.
    """

    def __init__(
        self,
        buckets: FlatBuckets,
        every: int = 64,
        decay: float = 0.9,
        group: dist.ProcessGroup | None = None,
        shared: bool = False,
        population: int | None = None,
    ):
        if every < 1:
            raise InputError(f"every={every}: give the number of steps from one measurement to the next, 1 or more")
        if not 0 <= decay < 1:
            raise InputError(f"decay={decay}: give a number in [0, 1)")
        self.buckets, self.every, self.decay, self.shared = buckets, every, decay, shared
        if population is not None and population < 1:
            raise InputError(f"population={population}: give the number of samples to draw from, or None")
        self._repeated = 0.0 if population is None else 1 / population
        self.measurements = 0.0
        self._engine = engine_for(group)
        self._steps = 0
        self._parts: list[tuple[Tensor, float, float]] | None = None  # (|w_j g_j|^2, n_j, w_j) of a measured step
        self._sums = np.zeros(3)  # of tr(Sigma), |G|^2, and their number, since the last merge
        self._averages = np.zeros(3)  # of tr(Sigma), |G|^2 and 1: the last corrects the bias of the start

    def begin_step(self) -> bool:
        """Counts an optimizer step; whether it is to be measured, so that the batch must come in parts."""
        self._steps += 1
        measured = self._steps % self.every == 0
        self._parts = [] if measured else None
        return measured

    @contextlib.contextmanager
    def part(self, samples: int, share: float = 1.0) -> Iterator[None]:
        """Around the backward of one part.

        Args:
            samples: in it.
            share: what its mean gradient was multiplied with: its part of the batch.
        """
        if self._parts is None:
            yield
            return
        squares: list[Tensor] = []

        def add(grad: Tensor) -> None:
            squares.append(ops.sum_squares([_flat(grad)]))

        members = (self.buckets.params[i] for bucket in self.buckets for i in bucket.index)
        handles = [p.register_hook(add) for p in members]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        total = sum((s.to(squares[0].device) for s in squares), torch.zeros((), dtype=torch.float64))
        self._parts.append((total, float(samples), float(share)))

    @torch.no_grad()
    def end_step(self) -> None:
        """Behind the last part's backward, before gradients are clipped or cleared. A step whose only part holds
        the whole batch tells nothing and is left out."""
        if self._parts is None:
            return
        parts, self._parts = self._parts, None
        if not math.isclose(sum(share for *_, share in parts), 1.0, rel_tol=1e-6):
            raise InputError(f"shares {[share for *_, share in parts]}: the parts of a batch sum to one")
        self.buckets.settle()
        large = float(self.buckets.grad_squares())
        small = np.array([[float(squares) / w, w / n, w * w / n] for squares, n, w in parts]).sum(0)
        world = self._engine.world
        if self.shared and world > 1:
            small = self._engine.all_reduce_host(small)() / (world, world, world * world)
        square, u, v = small
        trace = (square - large) / (u - v) if u - v > 1e-9 * u else math.nan
        if math.isfinite(trace):
            self._sums += trace, large - (v - self._repeated) * trace, 1

    def merge(self) -> None:
        """Brings what was measured since the last merge into the averages, the same on all ranks. Every rank calls
        it at the same place."""
        world = self._engine.world
        sums = self._engine.all_reduce_host(self._sums)() if world > 1 else self._sums.copy()
        self._sums[:] = 0
        if count := sums[2]:
            keep = self.decay ** (count / world)
            self._averages = keep * self._averages + (1 - keep) * sums / count
            self.measurements += float(count / world)

    @property
    def trace(self) -> float:
        return float(self._averages[0] / self._averages[2]) if self._averages[2] else math.nan

    @property
    def signal(self) -> float:
        return float(self._averages[1] / self._averages[2]) if self._averages[2] else math.nan

    @property
    def value(self) -> float:
        """tr(Sigma) / |G|^2 in samples, as of the last merge; NaN before there is one, infinite where the gradients
        had nothing in common (an estimate of |G|^2 may be negative)."""
        return self.trace / self.signal if not self.signal <= 0 else math.inf

    def state_dict(self) -> dict:
        """With several ranks: save after merge(); one rank's state is then that of all."""
        state = {"steps": self._steps, "measurements": self.measurements}
        return state | {"sums": self._sums.tolist(), "averages": self._averages.tolist()}

    def load_state_dict(self, state: dict) -> None:
        self._steps, self.measurements = int(state["steps"]), float(state["measurements"])
        sums, averages = (np.array(state[name], np.float64) for name in ("sums", "averages"))
        self._sums, self._averages = sums.reshape(3), averages.reshape(3)


def _flat(grad: Tensor) -> Tensor:
    """[N]: a view of a contiguous or channels_last gradient, of others a copy."""
    if grad.dim() == 4 and grad.is_contiguous(memory_format=torch.channels_last):
        grad = grad.permute(0, 2, 3, 1)
    return grad.detach().reshape(-1)


class BatchSize:
    """How many micro-batches make one optimizer step; it grows at the border of epochs and never shrinks.

    Modes:
        none   one.
        noise  doubles when the noise scale is above MULTIPLE batches (all ranks together), after
               LEAST_MEASUREMENTS measured steps.
        decay  where the learning rate would have decayed by a factor f, the batch is 1 / f times the first one
               and the learning rate stays (Smith et al. 2018, arXiv 1711.00489: the same noise, fewer steps).

    Learning rate: in mode noise it is multiplied by a function of the batch's growth k: "sqrt", sqrt(k), is the rule
    for Adam of Malladi et al. 2022 (arXiv 2205.10287), which keeps the noise of its path; their rule also multiplies
    1 - beta1 and 1 - beta2 by k, which leaves the range of betas at k = 10, so betas and eps stay here.
    "linear" is k, SGD's rule; "none" is 1. In mode decay it is k: decayed by f and multiplied by 1 / f.

    Args:
        mode: see above.
        clips: of all ranks' micro-batches together.
        max_batch: most clips per optimizer step, all ranks together.
        most: most micro-batches per optimizer step, such as those of an epoch.
        rule: of the learning rate, in mode noise.
        noise: measures; mode noise only.
    Attributes:
        accumulation: micro-batches per optimizer step now.
    Raises:
        InputError: an unknown mode or rule, or max_batch below clips.
    """

    def __init__(
        self, mode: str, *, clips: int, max_batch: int, most: int, rule: str = "sqrt", noise: NoiseScale | None = None
    ):
        if mode not in MODES:
            raise InputError(f"adaptive batch {mode!r}: choose from {', '.join(MODES)}")
        if rule not in LR_RULES:
            raise InputError(f"learning-rate rule {rule!r}: choose from {', '.join(LR_RULES)}")
        if max_batch < clips:
            raise InputError(f"max_batch={max_batch}: the first batch of all ranks has {clips} clips already")
        if (mode == "noise") != (noise is not None):
            raise InputError("a noise scale goes with adaptive batch 'noise', and only with it")
        self.mode, self.rule, self.noise, self.clips = mode, rule, noise, clips
        self.accumulation = 1
        self._limit = max(1, min(max_batch // clips, most))

    @property
    def batch(self) -> int:
        """Clips per optimizer step, all ranks together."""
        return self.accumulation * self.clips

    @property
    def lr_factor(self) -> float:
        """What the schedule's learning rate is multiplied with."""
        return float(self.accumulation) if self.mode == "decay" else LR_RULES[self.rule](self.accumulation)

    def end_epoch(self, decayed: float) -> bool:
        """Decides the next epoch's batch, alike on all ranks, which call it together; whether it has grown.

        Args:
            decayed: the schedule's learning rate at the start of the next epoch over its peak; 1 during warm-up.
        """
        before = self.accumulation
        if self.mode == "noise":
            self.noise.merge()
            large = self.noise.value > MULTIPLE * self.batch and self.noise.measurements >= LEAST_MEASUREMENTS
            if large and 2 * before <= self._limit:
                self.accumulation = 2 * before
        elif self.mode == "decay":
            # 1 / f rounded down, so that the learning rate never exceeds its peak; a hair up first: 1 / 0.2 is 5
            wanted = int(1 / decayed + 1e-9) if decayed * self._limit > 1 else self._limit
            self.accumulation = max(before, wanted)
        return self.accumulation > before

    def state_dict(self) -> dict:
        return {"batch": self.batch, "noise": None if self.noise is None else self.noise.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """With another number of ranks the batch of all stays, as far as whole micro-batches allow."""
        self.accumulation = min(max(1, int(state["batch"]) // self.clips), self._limit)
        if self.noise is not None:
            self.noise.load_state_dict(state["noise"])
