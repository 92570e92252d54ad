"""Adam and AdamW over flat buckets: one kernel call per bucket, exact bias correction by carried masses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch

from .. import ops
from ..errors import InputError
from .buckets import Bucket, FlatBuckets

MOMENTS = ("exp_avg", "exp_avg_sq")
MASSES = ("exp_avg_mass", "exp_avg_sq_mass")  # their keys in a state dict, with "mass_step", see _mass
# torch.optim.Adam's group keys that FusedAdam does not offer; what would change the result is refused.
FIXED = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}


class FusedAdam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015), or AdamW (Loshchilov & Hutter 2019) with ``decoupled=True``, as torch computes
    them.

    Bias correction uses masses carried in double, a <- beta1 a + (1 - beta1) and b <- beta2 b + (1 - beta2),
    the update being (m / a) / (sqrt(v / b) + eps): Adam's own correction while every step is taken, and still
    right after moments of workers with unequal step counts were averaged. A parameter that got no gradient is
    left alone with its moments.

    The state dict is torch.optim.Adam's, with the masses under extra keys; it loads into torch.optim.Adam and
    AdamW and theirs load here. ``state_dict()`` copies.

    Args:
        params: a FlatBuckets, or parameters, (name, parameter) pairs or groups as torch.optim.Adam takes.
        lr, betas, eps, weight_decay: as torch.optim.Adam; a group may have its own.
        decoupled: weight decay of AdamW instead of L2 (``decoupled_weight_decay`` in a group).
    Raises:
        InputError: a value out of range, a parameter that is not float32; in step(): a replaced view.
    """

    def __init__(
        self,
        params: FlatBuckets | Iterable,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = False,
    ):
        if isinstance(params, FlatBuckets):
            self.buckets = params
        else:
            self.buckets = FlatBuckets(params)
            self.buckets.adopt_grads = True
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **FIXED}
        defaults["decoupled_weight_decay"] = decoupled
        groups = [dict(group) for group in self.buckets.groups]
        for group in groups:
            if "decoupled" in group:
                group["decoupled_weight_decay"] = group.pop("decoupled")
        self._complete = False
        super().__init__(groups, defaults)
        self._complete = True
        count = len(self.buckets.params)
        self.masses = np.zeros((2, count))  # of exp_avg and exp_avg_sq, per parameter of buckets.params
        self.steps = torch.zeros(count)  # float32 as torch's; state[p]["step"] are views
        self._seen = np.zeros(count, bool)  # parameters that have state
        for name in MOMENTS:
            self.buckets.add_state(name)
        self.buckets.listeners.add(self)
        self._check_groups()

    def add_param_group(self, param_group: dict) -> None:
        """Only during construction: buckets are laid out once, by group."""
        if self._complete:
            raise InputError("parameter groups are fixed once the buckets are laid out: give them to FlatBuckets")
        super().add_param_group(param_group)

    def _check_groups(self) -> None:
        for group in self.param_groups:
            for name in ("lr", "eps", "weight_decay"):
                if not float(group[name]) >= 0:
                    raise InputError(f"{name}={group[name]}: give a number >= 0")
            if len(group["betas"]) != 2 or not all(0 <= float(beta) < 1 for beta in group["betas"]):
                raise InputError(f"betas={group['betas']}: give two numbers in [0, 1)")
            for name in ("amsgrad", "maximize", "differentiable"):
                if group[name]:
                    raise InputError(f"{name}={group[name]} is not supported by FusedAdam: use torch.optim.Adam")

    def __getstate__(self) -> dict:
        raise InputError("FusedAdam cannot be copied or pickled, its state lies in buckets: use state_dict()")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients: None until the next backward (fastest), or zeros with set_to_none=False."""
        self.buckets.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None):
        """One step of every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.buckets.settle()
        for bucket in self.buckets:
            self._update(bucket)
        return loss

    def _update(self, bucket: Bucket) -> None:
        live = self.buckets.touched[bucket.index]
        if not live.any():
            return
        index = bucket.index[live]
        group = self.param_groups[bucket.group]
        lr, eps, decay = float(group["lr"]), float(group["eps"]), float(group["weight_decay"])
        betas = [float(beta) for beta in group["betas"]]
        for mass, beta in zip(self.masses, betas, strict=True):
            mass[index] = beta * mass[index] + (1 - beta)
        self.steps.numpy()[index] += 1
        table = np.zeros(len(index), ops.ADAM_SEGMENT)
        table["begin"], table["end"] = bucket.begin[live], bucket.end[live]
        table["alpha"] = lr / self.masses[0, index]
        table["inv_sqrt_mass"] = 1 / np.sqrt(self.masses[1, index])
        table["beta1"], table["beta2"] = betas
        table["one_minus_beta1"], table["one_minus_beta2"] = 1 - betas[0], 1 - betas[1]
        table["eps"] = eps
        decoupled = group["decoupled_weight_decay"]
        table["l2"] = 0.0 if decoupled else decay
        table["decay"] = lr * decay if decoupled else 0.0
        flat = bucket.flat
        ops.adam_step(flat["param"], flat["grad"], flat["exp_avg"], flat["exp_avg_sq"], table)
        # The kernel writes behind autograd's back: a graph that saved these weights must notice.
        torch.autograd.graph.increment_version([self.buckets.params[i] for i in index])
        if not self._seen[index].all():
            self.publish(index)

    # State

    def publish(self, index: Iterable[int]) -> None:
        """Gives these parameters (indices into buckets.params) their entries in ``self.state``: views, never
        copies."""
        for i in index:
            self._seen[i] = True
            entry = {name: self.buckets.view(name, i) for name in MOMENTS}
            self.state[self.buckets.params[i]] = {"step": self.steps[i], **entry}

    def rebind(self) -> None:
        """Called by FlatBuckets.rebuild()."""
        self.publish(np.flatnonzero(self._seen))

    def reset_moments(self, index: np.ndarray) -> None:
        """Starts these parameters' moments anew, as if no step had been taken."""
        for i in index:
            for name in MOMENTS:
                self.buckets.view(name, i).zero_()
        self.masses[:, index] = 0
        self.steps.numpy()[index] = 0

    def state_dict(self) -> dict:
        """torch.optim.Adam's layout, own copies; plus the masses (float) per parameter."""
        saved = super().state_dict()
        for i, entry in saved["state"].items():
            masses = dict(zip(MASSES, self.masses[:, i].tolist(), strict=True))
            copies = {name: value.clone() for name, value in entry.items()}
            saved["state"][i] = {**copies, **masses, "mass_step": float(self.steps[i])}
        return saved

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads a state dict of FusedAdam, torch.optim.Adam or AdamW (masses then follow from the step
        counts)."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._check_groups()
        loaded, self.state = self.state, type(self.state)(dict)
        self._seen[:] = False
        self.reset_moments(np.arange(len(self.buckets.params)))
        for i, p in enumerate(self.buckets.params):
            if not (entry := loaded.get(p)):
                continue
            self.steps[i] = float(entry["step"])
            betas = self.param_groups[self.buckets.group_of[i]]["betas"]
            for row, (name, beta) in enumerate(zip(MOMENTS, betas, strict=True)):
                self.buckets.view(name, i).copy_(entry[name])
                self.masses[row, i] = _mass(entry, MASSES[row], float(beta))
            self.publish([i])


def _mass(entry: dict, name: str, beta: float) -> float:
    """The mass at a saved entry's step: 1 - (1 - mass) beta^steps since it was written.

    torch's optimizers carry keys they do not know along unchanged while their step advances.
    """
    mass = entry.get(name, 0.0)
    steps = float(entry["step"]) - entry.get("mass_step", 0.0)
    if steps <= 0:
        return mass
    return 1.0 if beta == 0 else -math.expm1(steps * math.log(beta) + math.log1p(-mass))
