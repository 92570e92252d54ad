"""Where parameters go: which of them, in which bucket, at which offset, with which strides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import InputError

ALIGN_BYTES = 128
# Large allocations begin at the same place in their page, and a load that follows a store to the same place
# in another page waits for it; so the kinds of a bucket's arrays are shifted against each other.
STAGGER_BYTES = 1024


def align_of(dtype: torch.dtype) -> int:
    """Elements of this type in 128 bytes."""
    return ALIGN_BYTES // dtype.itemsize


def plan_buckets(sizes: Sequence[int], capacity: int, align: int) -> list[list[tuple[int, int]]]:
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


def aligned_zeros(numel: int, dtype: torch.dtype, device: torch.device, stagger_bytes: int = 0) -> Tensor:
    """[numel], 128-byte aligned, `stagger_bytes` behind where the allocator would put it."""
    raw = torch.zeros(stagger_bytes + ALIGN_BYTES + numel * dtype.itemsize, dtype=torch.uint8, device=device)
    skip = stagger_bytes + -raw.data_ptr() % ALIGN_BYTES
    return raw[skip : skip + numel * dtype.itemsize].view(dtype)


def allocate(buckets: list[Bucket], name: str, dtype_of: Callable[[Bucket], torch.dtype]) -> None:
    """Gives every bucket a zeroed flat array of this name; those of one type and device lie one behind the other, so
    that there is one allocation, and for a network library one registration, per kind and not per bucket."""
    together: dict[tuple, list[Bucket]] = {}
    for bucket in buckets:
        together.setdefault((bucket.device, dtype_of(bucket)), []).append(bucket)
    for (device, dtype), members in together.items():
        align = align_of(dtype)
        sizes = [-(-bucket.numel // align) * align for bucket in members]
        stagger_bytes = STAGGER_BYTES * len(members[0].flat)
        whole = aligned_zeros(sum(sizes), dtype, device, stagger_bytes)
        for bucket, piece in zip(members, whole.split(sizes), strict=True):
            bucket.flat[name] = piece[: bucket.numel]


class Bucket:
    """One flat piece of memory per kind of value, all laid out alike.

    Attributes:
        group: index of the parameter group all of its parameters belong to.
        index: int64 [S], the parameters inside, as indices into ``FlatBuckets.params``.
        begin, end: int64 [S], elements each one occupies; ``begin`` is a multiple of 128 bytes. Padding stays zero.
        dtype: of its parameters and gradients.
        flat: "param", "grad" and optimizer state by name -> [numel], 128-byte aligned.
    """

    def __init__(
        self,
        group: int,
        index: list[int],
        begin: list[int],
        sizes: list[int],
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.group = group
        self.index = np.array(index, np.int64)
        self.begin = np.array(begin, np.int64)
        self.end = self.begin + np.array(sizes, np.int64)
        align = align_of(dtype)
        self.numel = -(-int(self.end[-1]) // align) * align
        self.device = device
        self.dtype = dtype
        self.flat: dict[str, Tensor] = {}

    def __repr__(self) -> str:
        return (
            f"Bucket({len(self.index)} parameters, {self.numel} elements, {self.dtype}, {self.device}, "
            f"group {self.group})"
        )


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
            if p.is_meta:
                raise InputError(f"{name} is on the meta device: give the model memory with model.to_empty() first")
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
    refuse_overlap([(p, name) for p, name in zip(params, names, strict=True) if p.requires_grad])
    left_out = [named[id(p)] for p in model.parameters() if id(p) not in seen and p.requires_grad] if model else []
    if left_out:
        raise InputError(
            f"groups leave out {', '.join(left_out[:3])}: put every trainable parameter in one or freeze it"
        )
    return result, params, names


def refuse_overlap(named: Iterable[tuple[Tensor, str]]) -> None:
    """Raises InputError where two parameters share memory: in buckets they would silently part."""
    spans = []
    for p, name in named:
        if p.numel() and p.layout == torch.strided:
            last = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
            spans.append((str(p.device), p.data_ptr(), p.data_ptr() + (last + 1) * p.element_size(), name))
    spans.sort()
    for (device, _, end, name), (other_device, begin, _, other) in pairwise(spans):
        if device == other_device and begin < end:
            raise InputError(
                f"{name} and {other} are different parameters in the same memory: share the nn.Parameter itself"
            )
