"""Averaging a model's buffers: BatchNorm statistics, counters, everything else that is not a parameter."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..errors import InputError
from .engines import Engine
from .reduction import scale


class ModelBuffers:
    """The buffers of a module, found anew at every use (``model.to`` replaces them).

    Running means and variances (of any module that has both) are merged as those of one population: the
    weighted mean of means and of second moments, var = E[var + mean^2] - mean^2. Other floating-point
    buffers: the weighted mean.
    Integers and booleans: the maximum. All sums in float64.
    """

    def __init__(self, model: nn.Module | None):
        self.model = model

    def describe(self) -> list[str]:
        """Shape and type of each, for comparing ranks."""
        return [f"{b.dtype}{list(b.shape)}" for kind in self._sorted() for b in kind]

    def _sorted(self) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        """(means, their variances, other floats, integers)"""
        means, variances, floats, integers = [], [], [], []
        if self.model is None:
            return means, variances, floats, integers
        paired = set()
        for module in self.model.modules():
            mean, var = module._buffers.get("running_mean"), module._buffers.get("running_var")
            if mean is not None and var is not None and id(mean) not in paired:
                means.append(mean)
                variances.append(var)
                paired |= {id(mean), id(var)}
        for name, buffer in self.model.named_buffers():
            if buffer.is_complex():
                raise InputError(f"buffer {name} is {buffer.dtype}: averaging knows real and integer buffers")
            if id(buffer) not in paired and buffer.numel():
                (floats if buffer.is_floating_point() else integers).append(buffer)
        return means, variances, floats, integers

    def start(self, engine: Engine, weight: float) -> Callable[[], None]:
        """Starts the reductions; calling the result waits for them and writes the buffers in place."""
        means, variances, floats, integers = self._sorted()
        pending = []
        if reals := [*means, *variances, *floats]:
            flat = torch.cat([b.detach().reshape(-1).double() for b in reals])  # small: statistics, not weights
            size = sum(b.numel() for b in means)
            mean, second = flat[:size], flat[size : 2 * size]
            second += mean.square()
            scale(flat, weight)
            pending.append((engine.all_reduce(flat), flat, reals))
        if integers:
            largest = torch.cat([b.detach().reshape(-1).long() for b in integers])
            pending.append((engine.all_reduce(largest, "max"), largest, integers))

        def finish() -> None:
            for work, flat, buffers in pending:
                work.wait()
                if buffers is not integers:
                    mean, second = flat[:size], flat[size : 2 * size]
                    second.sub_(mean.square()).clamp_(min=0)
                for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
                    buffer.copy_(part.view(buffer.shape))

        return finish
