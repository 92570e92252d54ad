"""Synchronous warm-up of K-step averaging: for the first calls gradients are averaged, and all ranks step alike."""

from __future__ import annotations

import time

import numpy as np
import torch

from ..errors import InputError
from .agreement import Agreement
from .buckets import FlatBuckets
from .reduction import PlainMean, finish


class GradientAverager:
    """A hook before the optimizer's steps, at work while ``left`` > 0.

    After a loss scaler found an overflow on one rank, no rank takes the step. Only that rank's scaler lowers its scale
    then, so gradients are unscaled before they are added.

    Attributes:
        left: calls still to come.
        seconds: host time spent since it was last set to 0.
    """

    def __init__(self, opt: torch.optim.Optimizer, buckets: FlatBuckets, agreement: Agreement, left: int):
        self.buckets, self.agreement, self.left = buckets, agreement, left
        self.seconds = 0.0
        opt.register_step_pre_hook(self.average)

    @torch.no_grad()
    def average(self, opt: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """The plain mean of gradients, as DistributedDataParallel's, of parameters that any rank used.

        Raises:
            InputError: step() got a closure.
            AveragingError: ranks are at different calls, or one is gone.
        """
        if not self.left:
            return
        if any(map(callable, args[1:])) or callable(kwargs.get("closure")):
            raise InputError("step(closure) computes gradients after the warm-up averaged them: call step() without it")
        start = time.perf_counter()
        self.buckets.settle()
        engine = self.agreement.engine
        with self.agreement.of("the averaging of gradients"):
            self.agreement.require_same_call(-self.left)
            grads = [(bucket, bucket.flat["grad"]) for bucket in self.buckets]
            if (found_inf := getattr(opt, "found_inf", None)) is not None:
                engine.all_reduce(found_inf, "max").wait()
            if (grad_scale := getattr(opt, "grad_scale", None)) is not None:
                for bucket, grad in grads:
                    grad.div_(grad_scale.to(bucket.device))
                opt.grad_scale = torch.ones_like(grad_scale)
            touched = engine.all_reduce_host(self.buckets.touched.astype(np.int64), "max")() > 0
            self.buckets.touch(np.flatnonzero(touched))
            mean = PlainMean(engine)
            finish([mean.start(bucket, "grad", grad, grad, 1 / engine.world) for bucket, grad in grads])
        self.seconds += time.perf_counter() - start
