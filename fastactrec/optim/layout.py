"""Where parameters go: which of them, in which bucket, at which offset, with which strides."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import InputError

ALIGN_BYTES = 128
ALIGN = ALIGN_BYTES // 4  # float32 elements
# Large allocations begin at the same place in their page, and a load that follows a store to the same place
# in another page waits for it. Shifting a bucket's buffers against each other made an Adam step 3 % faster
# (smallest of 40, one thread, Xeon Ice Lake).
STAGGER = 256


def plan_buckets(sizes: Sequence[int], capacity: int, align: int = ALIGN) -> list[list[tuple[int, int]]]:
    """Places tensors one after the other into buckets, in order, each whole.

    Args:
        sizes: elements of each tensor, >= 0.
        capacity: elements of a bucket; a larger tensor gets a bucket of its own, of its own size.
        align: every tensor begins at a multiple of this many elements.
    Returns:
        per bucket, (index into sizes, offset in elements).
    """
    plan: list[list[tuple[int, int]]] = []
    used = capacity
    for index, size in enumerate(sizes):
        padded = -(-size // align) * align
        if not plan or used + padded > capacity:
            plan.append([])
            used = 0
        plan[-1].append((index, used))
        used += padded
    return plan


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides where it is dense and does not overlap (channels_last, transposed), else
    contiguous ones."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[::-1]):
        if size != 1 and tensor.numel():
            if stride != expected:
                return torch.empty(tensor.shape, device="meta").stride()
            expected *= size
    return tensor.stride()


def aligned_zeros(numel: int, device: torch.device, stagger: int = 0) -> Tensor:
    """float32 [numel], 128-byte aligned, `stagger` elements behind where the allocator would put it."""
    raw = torch.zeros(stagger + ALIGN + numel, dtype=torch.float32, device=device)
    skip = stagger + -raw.data_ptr() % ALIGN_BYTES // 4
    return raw[skip : skip + numel]


class Bucket:
    """One flat piece of memory per kind of value, all laid out alike.

    Attributes:
        group: index of the parameter group all of its parameters belong to.
        index: int64 [S], the parameters inside, as indices into ``FlatBuckets.params``.
        begin, end: int64 [S], elements each one occupies; ``begin`` is a multiple of 32. Padding stays zero.
        flat: "param", "grad" and optimizer state by name -> float32 [numel], 128-byte aligned.
    """

    def __init__(self, group: int, index: list[int], begin: list[int], sizes: list[int], device: torch.device):
        self.group = group
        self.index = np.array(index, np.int64)
        self.begin = np.array(begin, np.int64)
        self.end = self.begin + np.array(sizes, np.int64)
        self.numel = -(-int(self.end[-1]) // ALIGN) * ALIGN
        self.device = device
        self.flat: dict[str, Tensor] = {}

    def add(self, name: str) -> None:
        self.flat[name] = aligned_zeros(self.numel, self.device, STAGGER * len(self.flat))

    def __repr__(self) -> str:
        return f"Bucket({len(self.index)} parameters, {self.numel} elements, {self.device}, group {self.group})"


def collect_params(model_or_params, groups) -> tuple[list[dict], list[Tensor], list[str]]:
    """(groups with lists of parameters, all parameters in group order, their names), checked."""
    model = model_or_params if isinstance(model_or_params, nn.Module) else None
    given = list(groups if groups is not None else model.parameters() if model else model_or_params)
    if given and not isinstance(given[0], dict):
        given = [{"params": given}]
    named = {id(p): name for name, p in model.named_parameters()} if model else {}
    result, params, names, seen = [], [], [], set()
    for group in given:
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        for k, p in enumerate(members):
            if isinstance(p, tuple):
                named[id(p[1])], members[k] = p
                p = p[1]
            name = named.get(id(p), f"parameter {len(params)}")
            if not isinstance(p, Tensor) or isinstance(p, nn.parameter.UninitializedParameter):
                raise InputError(f"{name} is a {type(p).__name__}, not a parameter with a shape")
            if not p.is_leaf:
                raise InputError(f"{name} is the result of an operation: only leaf tensors can be optimised")
            if id(p) in seen:
                raise InputError(f"{name} is in the parameter groups twice")
            seen.add(id(p))
            params.append(p)
            names.append(name)
        result.append({**group, "params": members})
    if not params:
        raise InputError("there are no parameters to put into buckets")
    left_out = [named[id(p)] for p in model.parameters() if id(p) not in seen and p.requires_grad] if model else []
    if left_out:
        raise InputError(
            f"groups leave out {', '.join(left_out[:3])}: put every trainable parameter in one or freeze it"
        )
    return result, params, names
