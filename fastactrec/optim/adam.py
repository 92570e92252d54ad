"""Adam and AdamW over flat buckets: one kernel call per bucket, exact bias correction by carried masses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from .. import ops
from ..errors import InputError
from .adam_plan import DevicePlan
from .buckets import Bucket, FlatBuckets

MOMENTS = ("exp_avg", "exp_avg_sq")
MASSES = ("exp_avg_mass", "exp_avg_sq_mass")  # their keys in a state dict, with "mass_step", see _mass
STATE = (*MOMENTS, "max_exp_avg_sq", "master")  # flat buffers, the last two where they apply
# torch.optim.Adam's group keys that say how it computes; FusedAdam has one way.
FIXED = {"foreach": None, "capturable": False, "differentiable": False, "fused": None}


class FusedAdam(torch.optim.Optimizer):
    """Adam (Kingma & Ba 2015), or AdamW (Loshchilov & Hutter 2019) with ``decoupled=True``, as torch computes
    them.

    Bias correction uses masses carried in double, a <- beta1 a + (1 - beta1) and b <- beta2 b + (1 - beta2),
    the update being (m / a) / (sqrt(v / b) + eps): Adam's own correction while every step is taken, and still
    right after moments of workers with unequal step counts were averaged. A parameter that got no gradient is
    left alone with its moments.

    bfloat16 and float16 parameters have float32 masters, which are what is optimised; writing to such a parameter
    in any way (``model.load_state_dict``, ``p.data.copy_()``) moves its master along at the next step: the kernel
    keeps a master only where it still rounds to the parameter.

    ``torch.amp.GradScaler`` is understood: gradients are unscaled inside the step, and after an overflow nothing
    changes, not even step counts. Nothing waits for the device. ``p.grad`` itself stays scaled and unclipped.
    A captured CUDA graph can replay ``step()``; give ``lr`` as a tensor on the device if it is to change.

    The state dict is torch.optim.Adam's, with the masses (and masters) under extra keys; it loads into
    torch.optim.Adam and AdamW and theirs load here. ``state_dict()`` copies.

    Args:
        params: a FlatBuckets, or parameters, (name, parameter) pairs or groups as torch.optim.Adam takes.
        lr, betas, eps, weight_decay, amsgrad, maximize: as torch.optim.Adam; a group may have its own. lr may be a
            tensor of one element.
        decoupled: weight decay of AdamW instead of L2 (``decoupled_weight_decay`` in a group).
        max_norm: clip the norm of all gradients together, as torch.nn.utils.clip_grad_norm_; None: do not.
        moments_dtype: torch.float32, or torch.bfloat16, rounded stochastically by a counter, so that a resumed
            run rounds alike.
    Raises:
        InputError: a value out of range, a parameter that FlatBuckets does not take; in step(): a replaced view.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then sets grad_scale and found_inf and calls step()

    def __init__(
        self,
        params: FlatBuckets | Iterable,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled: bool = False,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        max_norm: float | None = None,
        moments_dtype: torch.dtype = torch.float32,
    ):
        if moments_dtype not in (torch.float32, torch.bfloat16):
            raise InputError(f"moments_dtype={moments_dtype}: give torch.float32 or torch.bfloat16")
        if max_norm is not None and not max_norm > 0:
            raise InputError(f"max_norm={max_norm}: give a number > 0, or None not to clip")
        if isinstance(params, FlatBuckets):
            self.buckets = params
        else:
            self.buckets = FlatBuckets(params)
            self.buckets.adopt_grads = True
        self.max_norm = max_norm
        self.grad_norm: Tensor | None = None  # float64 [], of the last step, unscaled, before clipping
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **FIXED}
        defaults |= {"amsgrad": amsgrad, "maximize": maximize, "decoupled_weight_decay": decoupled}
        groups = [dict(group) for group in self.buckets.groups]
        for group in groups:
            if "decoupled" in group:
                group["decoupled_weight_decay"] = group.pop("decoupled")
        self._complete = False
        super().__init__(groups, defaults)
        self._complete = True
        count = len(self.buckets.params)
        self._parked = np.zeros((count, 4))  # rows as in read_rows() of parameters that are frozen
        self._seen = np.zeros(count, bool)  # parameters that have state
        for name in MOMENTS:
            self.buckets.add_state(name, moments_dtype)
        self.plans: list[DevicePlan] = []
        self.buckets.listeners.add(self)
        self._check_groups()
        self.rebind()

    def add_param_group(self, param_group: dict) -> None:
        """Only during construction: buckets are laid out once, by group."""
        if self._complete:
            raise InputError("parameter groups are fixed once the buckets are laid out: give them to FlatBuckets")
        super().add_param_group(param_group)

    def _check_groups(self) -> None:
        for group in self.param_groups:
            for name in ("lr", "eps", "weight_decay"):
                value = group[name]
                if isinstance(value, Tensor) and value.numel() != 1:
                    raise InputError(f"{name} is a tensor of {value.numel()} elements: give one")
                if not float(value) >= 0:
                    raise InputError(f"{name}={value}: give a number >= 0")
            if len(group["betas"]) != 2 or not all(0 <= float(beta) < 1 for beta in group["betas"]):
                raise InputError(f"betas={group['betas']}: give two numbers in [0, 1)")
            if group["differentiable"]:
                raise InputError("differentiable=True is not supported by FusedAdam: use torch.optim.Adam")

    def __getstate__(self) -> dict:
        raise InputError("FusedAdam cannot be copied or pickled, its state lies in buckets: use state_dict()")

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients: None until the next backward (fastest), or zeros with set_to_none=False."""
        self.buckets.zero_grad(set_to_none)

    @torch._disable_dynamo  # a compiled training step breaks its graph here, as there is nothing to trace
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, *, out: str | None = None):
        """One step of every parameter that has a gradient; returns the closure's loss.

        Args:
            out: name of a state added to the buckets (``buckets.add_state("snapshot")``, of any type) that gets a
                copy of all new weights, written by the same kernel.
        """
        if out is not None and any(out not in bucket.flat for bucket in self.buckets):
            raise InputError(f"out={out!r}: the buckets have no such state; call buckets.add_state({out!r}) first")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.buckets.settle()
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        squares = None
        if self.max_norm is not None:
            squares = self.buckets.grad_squares()
            self.grad_norm = squares.sqrt() if grad_scale is None else squares.sqrt() / grad_scale.to(squares.device)
        if self._amsgrad_groups() != self._amsgrad:
            self.rebind()
        groups, rates = self._group_table()
        touched = self.buckets.touched
        for plan in self.plans:
            if plan.set_live(touched) or out:
                plan.set_groups(groups, rates)
                plan.advance(grad_scale, found_inf, squares, self.max_norm or 0.0)
                plan.update(out)
        self._after_step(np.flatnonzero(touched))
        return loss

    def _group_table(self) -> tuple[np.ndarray, list[Tensor | None]]:
        """(ADAM_GROUP rows, learning rates that are tensors on a device: reading them would wait for it)."""
        rows = np.zeros(len(self.param_groups), ops.ADAM_GROUP)
        rates: list[Tensor | None] = []
        for g, group in enumerate(self.param_groups):
            lr = group["lr"]
            rates.append(lr if isinstance(lr, Tensor) and lr.device.type != "cpu" else None)
            betas = (float(beta) for beta in group["betas"])
            numbers = 0.0 if rates[-1] is not None else float(lr), *betas, float(group["eps"])
            switches = bool(group["decoupled_weight_decay"]), bool(group["maximize"])
            rows[g] = (*numbers, float(group["weight_decay"]), *switches)
        return rows, rates

    def _after_step(self, index: np.ndarray) -> None:
        params = self.buckets.params
        # The kernel writes behind autograd's back: a graph that saved these weights must notice.
        torch.autograd.graph.increment_version([params[i] for i in index])
        if not self._seen[index].all():
            self.publish(index)

    # State

    def publish(self, index: Iterable[int]) -> None:
        """Gives these parameters (indices into buckets.params) their entries in ``self.state``: views, never
        copies."""
        for i in index:
            self._seen[i] = True
            plan, row = self._row.get(i, (None, 0))
            step = torch.tensor(self._parked[i, 2], dtype=torch.float32) if plan is None else plan.steps[row]
            self.state[self.buckets.params[i]] = {"step": step, **self._views(i)}

    def _amsgrad_groups(self) -> set[int]:
        return {g for g, group in enumerate(self.param_groups) if group["amsgrad"]}

    def publish_stepped(self) -> None:
        """Publishes what averaging may have given steps to. Where reading the steps would wait for a device, all of its
        parameters: one without a step is as if it had no state."""
        for plan in self.plans:
            stepped = plan.steps.numpy() > 0 if plan.device.type == "cpu" else slice(None)
            self.publish(plan.index[stepped])

    def _views(self, i: int) -> dict[str, Tensor]:
        names = [name for name in STATE if name in MOMENTS or self.buckets.has(name, i)]
        return {name: self.buckets.view(name, i) for name in names}

    def rebind(self) -> None:
        """Called by FlatBuckets.rebuild(): makes the plans anew, with the masses and steps there were."""
        kept = self.read_rows()
        self._amsgrad = amsgrad = self._amsgrad_groups()
        self.buckets.add_state("max_exp_avg_sq", only=lambda bucket: bucket.group in amsgrad)
        self.buckets.add_state("master", only=lambda bucket: bucket.dtype != torch.float32)
        by_device: dict[torch.device, list[Bucket]] = {}
        for bucket in self.buckets:
            by_device.setdefault(bucket.device, []).append(bucket)
        self.plans = [DevicePlan(buckets, len(self.param_groups), amsgrad) for buckets in by_device.values()]
        self._row = {int(i): (plan, row) for plan in self.plans for row, i in enumerate(plan.index)}
        self.write_rows(kept)
        self.publish(np.flatnonzero(self._seen))

    def read_rows(self) -> np.ndarray:
        """float64 [P, 4], a copy: the masses of exp_avg and exp_avg_sq, the step and the mass of frozen_sq of every
        parameter of buckets.params; waits for the device."""
        rows = self._parked.copy()
        for plan in self.plans:
            rows[plan.index, :2] = plan.masses.cpu().numpy()
            rows[plan.index, 2] = plan.steps.cpu().numpy()
            rows[plan.index, 3] = plan.frozen_masses.cpu().numpy()
        return rows

    def write_rows(self, rows: np.ndarray) -> None:
        """Takes what read_rows() gives."""
        self._parked = np.array(rows, np.float64)
        for plan in self.plans:
            plan.masses.copy_(torch.from_numpy(self._parked[plan.index, :2]))
            plan.steps.copy_(torch.from_numpy(self._parked[plan.index, 2]))
            plan.frozen_masses.copy_(torch.from_numpy(self._parked[plan.index, 3]))

    def reset_moments(self) -> None:
        """Starts the moments of the trainable parameters anew, as if no step had been taken."""
        for plan in self.plans:
            plan.masses.zero_()
            plan.frozen_masses.zero_()
            plan.steps.zero_()
        for bucket in self.buckets:
            for name in (*MOMENTS, "max_exp_avg_sq"):
                if name in bucket.flat:
                    bucket.flat[name].zero_()

    @torch.no_grad()
    def freeze_second_moment(self) -> None:
        """Divides by exp_avg_sq as it is now until the next call; exp_avg_sq itself goes on changing.

        Raises:
            InputError: a group uses amsgrad.
        """
        if self._amsgrad:
            raise InputError("amsgrad=True and a frozen second moment exclude each other")
        if not all("frozen_sq" in bucket.flat for bucket in self.buckets):
            self.buckets.add_state("frozen_sq")
            self.rebind()
        for bucket in self.buckets:
            bucket.flat["frozen_sq"].copy_(bucket.flat["exp_avg_sq"])
        for plan in self.plans:
            plan.frozen_masses.copy_(plan.masses[:, 1])

    def state_dict(self) -> dict:
        """torch.optim.Adam's layout, own copies; plus the masses (float) per parameter."""

        def complete(_, saved: dict) -> None:
            rows = self.read_rows()
            for i, entry in saved["state"].items():
                masses = dict(zip(MASSES, rows[i, :2].tolist(), strict=True))
                copies = {name: value.clone() for name, value in entry.items()}
                step = torch.tensor(rows[i, 2], dtype=torch.float32)
                saved["state"][i] = {**copies, "step": step, **masses, "mass_step": float(rows[i, 2])}

        hook = self.register_state_dict_post_hook(complete, prepend=True)  # others see, and may change, all of it
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def load_state_dict(self, state_dict: dict) -> None:
        """Loads a state dict of FusedAdam, torch.optim.Adam or AdamW (masses then follow from the step
        counts)."""
        entries: list[dict] = []

        def take_entries(_, given: dict) -> dict:
            keys = (key for group in given["param_groups"] for key in group["params"])
            entries.extend(given["state"].get(key, {}) for key in keys)
            self._check_entries(entries)
            return {**given, "state": {}}

        # The last of the hooks before, as torch would round state to the parameters' type, and the first after.
        before = self.register_load_state_dict_pre_hook(take_entries)
        after = self.register_load_state_dict_post_hook(lambda _: self._load_entries(entries), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _check_entries(self, entries: list[dict]) -> None:
        for name, p, entry in zip(self.buckets.names, self.buckets.params, entries, strict=False):
            missing = [key for key in ("step", *MOMENTS) if entry and key not in entry]
            if missing:
                raise InputError(f"the state dict has no {missing[0]} for {name}: it is of another kind of optimizer")
            for key in STATE:
                if key in entry and entry[key].shape != p.shape:
                    raise InputError(
                        f"{key} of {name} has the shape {tuple(entry[key].shape)} in the state dict, the parameter "
                        f"{tuple(p.shape)}: the state dict is of another model"
                    )

    def _load_entries(self, entries: list[dict]) -> None:
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._check_groups()
        self._seen[:] = False
        self._parked[:] = 0
        self.reset_moments()
        self.rebind()
        rows = np.zeros_like(self._parked)
        for i, entry in enumerate(entries):
            if not entry:
                continue
            self._seen[i] = True
            betas = self.param_groups[self.buckets.group_of[i]]["betas"]
            masses = [_mass(entry, name, float(beta)) for name, beta in zip(MASSES, betas, strict=True)]
            rows[i] = *masses, float(entry["step"]), 0.0
            if i not in self._row:  # frozen: what it will need again waits with its moments
                for name in STATE:
                    if name in entry:
                        self.buckets.view(name, i).copy_(entry[name])
                continue
            for name, view in self._views(i).items():
                if name in entry:
                    view.copy_(entry[name])
                elif name == "max_exp_avg_sq":
                    view.copy_(entry["exp_avg_sq"])
        self.write_rows(rows)
        self.publish(np.flatnonzero(self._seen))


def _mass(entry: dict, name: str, beta: float) -> float:
    """The mass at a saved entry's step: 1 - (1 - mass) beta^steps since it was written.

    torch's optimizers carry keys they do not know along unchanged while their step advances.
    """
    mass = entry.get(name, 0.0)
    steps = float(entry["step"]) - entry.get("mass_step", 0.0)
    if steps <= 0:
        return mass
    return 1.0 if beta == 0 else -math.expm1(steps * math.log(beta) + math.log1p(-mass))
