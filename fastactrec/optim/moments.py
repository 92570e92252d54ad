"""What averaging must know of an optimizer: its moments lie in the buckets, their masses and step counts follow."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import InputError
from .adam import MOMENTS, FusedAdam
from .buckets import FlatBuckets
from .engines import Engine


class AdamMoments:
    """FusedAdam: exp_avg and exp_avg_sq. Masses and steps stay on their device; nothing here waits for it."""

    names = MOMENTS

    def __init__(self, opt: FusedAdam):
        if any(group["amsgrad"] for group in opt.param_groups):
            raise InputError("amsgrad=True cannot be averaged: the maximum of a mean is not the mean of maxima")
        self.opt, self.buckets = opt, opt.buckets

    def collect(self) -> None:
        for bucket in self.buckets:
            if bucket.dtype != torch.float32 or bucket.flat["exp_avg"].dtype != torch.float32:
                raise InputError("averaging needs float32 parameters and moments: use model.float()")

    def decay(self, bucket_group: int, name: str, steps: int) -> float:
        """What is left of a moment after some steps."""
        return float(self.opt.param_groups[bucket_group]["betas"][MOMENTS.index(name)]) ** steps

    def start(self, engine: Engine, weight: float, names: list[str], delay: int = 0) -> Callable[[], None]:
        """Starts averaging masses and steps; the result waits and adds what they differ by, decayed by `delay` steps
        that were taken meanwhile."""
        if not names:
            return lambda: None
        columns = [MOMENTS.index(name) for name in names]
        pending = []
        for plan in self.opt.plans:
            mine = plan.masses[:, columns]  # advanced indexing copies
            mean, steps = mine * weight, plan.steps.clone()
            pending.append((plan, mine, mean, engine.all_reduce(mean), steps, engine.all_reduce(steps, "max")))

        def finish() -> None:
            for plan, mine, mean, first, steps, second in pending:
                first.wait()
                second.wait()
                if delay:
                    betas = torch.tensor([self.opt.param_groups[g]["betas"] for g in plan.groups], dtype=torch.float64)
                    left = betas.to(plan.device)[:, columns] ** delay
                    plan.masses[:, columns] += left * (mean - mine)
                else:
                    plan.masses[:, columns] = mean
                    plan.steps.copy_(steps)
            self.opt.publish_stepped()

        return finish

    def freeze(self) -> None:
        self.opt.freeze_second_moment()

    def reset(self) -> None:
        self.opt.reset_moments()


class SgdMoments:
    """Momentum of torch.optim.SGD, moved into the buckets at the first averaging; SGD updates it there in place."""

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

    def decay(self, bucket_group: int, name: str, steps: int) -> float:
        return float(self.opt.param_groups[bucket_group]["momentum"]) ** steps

    def start(self, engine: Engine, weight: float, names: list[str], delay: int = 0) -> Callable[[], None]:
        return lambda: None

    def freeze(self) -> None:
        raise InputError("moments='frozen_v' needs FusedAdam: SGD has no second moment")

    def reset(self) -> None:
        for name in self.names:
            for bucket in self.buckets:
                bucket.flat[name].zero_()


def moments_of(opt: torch.optim.Optimizer) -> AdamMoments | SgdMoments:
    """Raises InputError: an optimizer that cannot be averaged."""
    if isinstance(opt, FusedAdam):
        return AdamMoments(opt)
    if isinstance(opt, torch.optim.SGD):
        return SgdMoments(opt)
    raise InputError(f"{type(opt).__name__} cannot be averaged: use FusedAdam, or torch.optim.SGD over FlatBuckets")
