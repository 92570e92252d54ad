"""Flat buckets: parameters, gradients and optimizer state as views of a few aligned buffers.

One kernel call or all-reduce then serves a whole bucket, and nothing is packed or unpacked: a parameter's
``data`` and ``grad`` *are* pieces of the bucket, in the parameter's own memory format.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from .. import ops
from ..errors import InputError
from .layout import ALIGN_BYTES, Bucket, align_of, allocate, collect_params, dense_stride, plan_buckets

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NORM_CHUNK = 1024  # elements summed in float32 before double takes over, see FlatBuckets.grad_norm


class FlatBuckets:
    """Makes trainable parameters and their gradients views of flat buffers.

    Buckets are grouped by type, device and parameter group. Every trainable element is in exactly one of them; a
    parameter used by several modules is there once; frozen parameters keep their own storage. ``.grad`` of
    each parameter is a zeroed view at once. Where somebody sets it to None, the next backward's gradient is
    copied into the view and the view put back, so ``zero_grad`` in torch's default way (None) is the fastest:
    a copy instead of zeroing and adding.

    Building a second FlatBuckets over the same parameters takes them over from the first. Keep a reference:
    an optimizer of this package does, torch's do not.

    Args:
        model_or_params: a module (then buffers are known too, which averaging needs), or what torch
            optimizers take: parameters, (name, parameter) pairs, or parameter groups.
        bucket_bytes: size of a bucket; a larger parameter gets its own.
        groups: torch-style parameter groups of the module's parameters (``{"params": ..., "lr": ...}``);
            default: one group of all parameters, frozen ones included, so that state-dict indices follow
            ``model.parameters()``.
    Raises:
        InputError: a trainable parameter is not float32, bfloat16 or float16, in two groups or in none, without
            memory (meta) or in the memory of another one; bucket_bytes < 128.
    """

    _alive: ClassVar[weakref.WeakSet[FlatBuckets]] = weakref.WeakSet()

    def __init__(
        self,
        model_or_params: nn.Module | Iterable,
        bucket_bytes: int = 25 << 20,
        groups: Iterable[dict] | None = None,
    ):
        if bucket_bytes < ALIGN_BYTES:
            raise InputError(f"bucket_bytes={bucket_bytes}: a bucket holds at least {ALIGN_BYTES} bytes")
        self.model = model_or_params if isinstance(model_or_params, nn.Module) else None
        self.bucket_bytes = bucket_bytes
        self.groups, self.params, self.names = collect_params(model_or_params, groups)
        self.group_of = [g for g, group in enumerate(self.groups) for _ in group["params"]]
        self.buckets: list[Bucket] = []
        self.touched = np.zeros(len(self.params), bool)  # has a gradient since the last zero_grad
        self._stale = np.zeros(len(self.params), bool)  # grad view holds values of an earlier backward
        self.adopt_grads = False  # take assigned gradients instead of raising, as torch's optimizers do
        self.version = 0  # counts layouts
        self.listeners: weakref.WeakSet = weakref.WeakSet()  # their rebind() is called after each new layout
        self._states: dict[str, tuple[torch.dtype, Callable[[Bucket], bool]]] = {}
        self._parked: dict[str, dict[int, Tensor]] = {}  # state of frozen parameters, by name and index
        self._home: dict[int, tuple[Bucket, int]] = {}
        self._grads: dict[int, Tensor] = {}
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        mine = {id(p) for p in self.params}
        for other in list(FlatBuckets._alive):
            if any(id(p) in mine for p in other.params):
                other.release()
        FlatBuckets._alive.add(self)
        self.rebuild()

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.buckets)

    def __len__(self) -> int:
        return len(self.buckets)

    @classmethod
    def holding(cls, params: Iterable[Tensor]) -> FlatBuckets | None:
        """The FlatBuckets that these parameters live in, if there is one for all that are trainable."""
        wanted = {id(p) for p in params if p.requires_grad}
        for buckets in cls._alive:
            if wanted and wanted <= {id(buckets.params[i]) for i in buckets._home}:
                return buckets
        return None

    # Layout

    @torch.no_grad()
    def rebuild(self) -> None:
        """Lays the buckets out anew, after freezing or unfreezing parameters or moving the model.

        Values, gradients and optimizer state stay; a frozen parameter's state waits for it outside the
        buckets.
        """
        self._look_for_strangers()
        for name, p in zip(self.names, self.params, strict=True):
            if p.requires_grad and p.dtype not in DTYPES:
                raise InputError(
                    f"{name} is {p.dtype}: buckets hold float32, bfloat16 and float16; use model.float() or freeze it"
                )
        old_grads, old_home = self._grads, self._home
        old_states = {
            name: {i: self.view(name, i) for i, (bucket, _) in old_home.items() if name in bucket.flat}
            for name in self._states
        }
        self._lay_out()
        for i, p in enumerate(self.params):
            if i in self._home:
                view = self.view("param", i)
                p.data = view.copy_(p.detach())
                # .data: a version counter of its own, which tells a gradient written by hand (see settle)
                self._grads[i] = self.view("grad", i).data
                if p.grad is not None:
                    self._grads[i].copy_(p.grad)
                    self.touched[i] |= p.grad is not old_grads.get(i)
                p.grad = self._grads[i]
            elif i in old_home:
                p.data = p.detach().clone(memory_format=torch.preserve_format)
                p.grad = None
                self.touched[i] = False
            for name in self._states:
                old = old_states[name].get(i, self._parked[name].pop(i, None))
                if old is not None and i in self._home:
                    if name in self._home[i][0].flat:
                        self.view(name, i).copy_(old)
                elif old is not None:
                    self._parked[name][i] = old.clone()
        self._stale[:] = False
        self._outside = [i for i in range(len(self.params)) if i not in self._home]
        self._written = {i: grad._version for i, grad in self._grads.items()}
        self._watch = [(i, self.params[i], self.params[i].data_ptr(), g) for i, g in self._grads.items()]
        self._grad_pointers = [grad.data_ptr() for grad in self._grads.values()]
        self.version += 1
        for listener in self.listeners:
            listener.rebind()

    def _lay_out(self) -> None:
        trainable: dict[tuple, list[int]] = {}
        for i, p in enumerate(self.params):
            if p.requires_grad:
                trainable.setdefault((self.group_of[i], p.device, p.dtype), []).append(i)
        self.buckets, self._home, self._grads = [], {}, {}
        self._stride = {i: dense_stride(self.params[i]) for members in trainable.values() for i in members}
        for (group, device, dtype), members in trainable.items():
            sizes = [self.params[i].numel() for i in members]
            for slots in plan_buckets(sizes, self.bucket_bytes // dtype.itemsize, align_of(dtype)):
                index = [members[k] for k, _ in slots]
                begin = [offset for _, offset in slots]
                bucket = Bucket(group, index, begin, [self.params[i].numel() for i in index], device, dtype)
                self.buckets.append(bucket)
                self._home.update((i, (bucket, offset)) for i, offset in zip(index, begin, strict=True))
        for name in ("param", "grad"):
            allocate(self.buckets, name, lambda bucket: bucket.dtype)
        for name, state in self._states.items():
            self.add_state(name, *state)
        for i in self._home.keys() - self._hooks.keys():
            self._hooks[i] = self.params[i].register_post_accumulate_grad_hook(self._catch(i))
        for i in self._hooks.keys() - self._home.keys():
            self._hooks.pop(i).remove()

    def _look_for_strangers(self) -> None:
        """Refuses a model that has trainable parameters outside the groups; else notes its modules and parameters."""
        known = {id(p) for p in self.params}
        for name, p in self.model.named_parameters() if self.model else ():
            if p.requires_grad and id(p) not in known:
                raise InputError(
                    f"{name} is trainable and in no bucket's group (it came later, by load_state_dict(assign=True), a "
                    "new layer, a parametrization or unfreezing): build FlatBuckets and the optimizer anew"
                )
        parts = list(self.model.modules()) if self.model else ()
        self._tree = [(m._parameters, key, p) for m in parts for key, p in m._parameters.items()]
        self._tree += [(m._modules, key, child) for m in parts for key, child in m._modules.items()]

    def __reduce_ex__(self, protocol: int):
        raise InputError("FlatBuckets cannot be copied or pickled: copy the model and build FlatBuckets of the copy")

    def release(self) -> None:
        """Stops following gradients; parameters keep their values and storage."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()
        FlatBuckets._alive.discard(self)

    def add_state(
        self, name: str, dtype: torch.dtype = torch.float32, only: Callable[[Bucket], bool] = lambda bucket: True
    ) -> None:
        """Adds a zeroed buffer of this name to every bucket, or to those that `only` chooses; it follows every
        rebuild(). What a bucket has already, it keeps."""
        self._states[name] = (dtype, only)
        self._parked.setdefault(name, {})
        lacking = [bucket for bucket in self.buckets if only(bucket) and name not in bucket.flat]
        allocate(lacking, name, lambda bucket: dtype)

    def has(self, name: str, i: int) -> bool:
        """Whether parameter i has a piece of a state, in its bucket, or parked if it is frozen."""
        return name in self._home[i][0].flat if i in self._home else i in self._parked.get(name, {})

    def view(self, name: str, i: int) -> Tensor:
        """Parameter i's piece of a flat buffer, in its shape and memory format; parked if it is frozen."""
        if i not in self._home:
            if i not in self._parked[name]:
                self._parked[name][i] = torch.zeros_like(self.params[i], dtype=self._states[name][0])
            return self._parked[name][i]
        bucket, offset = self._home[i]
        flat = bucket.flat[name]
        return flat.as_strided(self.params[i].shape, self._stride[i], flat.storage_offset() + offset)

    def frozen(self) -> list[tuple[str, Tensor]]:
        """Parameters outside the buckets, of the groups and of the module, by name."""
        inside = {id(self.params[i]) for i in self._home}
        named = [
            *zip(self.names, self.params, strict=True),
            *(self.model.named_parameters() if self.model else ()),
        ]
        return list({id(p): (name, p) for name, p in named if id(p) not in inside}.values())

    # Gradients

    def _catch(self, i: int):
        # Weak: Python's collector does not see through a tensor's hooks; a cycle would never be freed.
        reference = weakref.ref(self)

        def hook(p: Tensor) -> None:
            buckets = reference()
            if buckets is None:
                return
            if p.grad is not buckets._grads[i]:
                buckets._take(i, p)
            buckets.touched[i] = True

        return hook

    @torch.no_grad()
    def _take(self, i: int, p: Tensor) -> None:
        """Copies a gradient that somebody else allocated into its view and puts the view back."""
        if p.grad.layout != torch.strided:
            raise InputError(f"{self.names[i]} got a sparse gradient: build its layer with sparse=False")
        self._grads[i].copy_(p.grad)
        p.grad = self._grads[i]
        self.touched[i] = True
        self._stale[i] = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients: ``.grad`` is None until the next backward; zero with set_to_none=False."""
        if set_to_none:
            for _, p, _, _ in self._watch:
                p.grad = None
            self._stale |= self.touched
            self.touched[:] = False
            return
        self.settle()
        for bucket in self.buckets:
            bucket.flat["grad"].zero_()
        for _, p, _, grad in self._watch:
            if p.grad is not None:
                p.grad = grad

    def touch(self, index: Iterable[int]) -> None:
        """Counts these parameters as having a gradient: zero where they had none. Call settle() before."""
        for i in index:
            if not self.touched[i] and i in self._home:
                self.params[i].grad = self._grads[i]
                self.touched[i] = True

    def settle(self) -> None:
        """Checks that parameters and gradients are still the buckets' views; zeroes views without a gradient.

        Raises:
            InputError: a view was replaced, or a frozen parameter became trainable; with the cure.
        """
        touched = self.touched.tolist()
        for (i, p, pointer, grad), grad_pointer in zip(self._watch, self._grad_pointers, strict=True):
            own = p.grad
            if p.data_ptr() != pointer:
                raise InputError(
                    f"{self.names[i]} no longer lies in its bucket (model.to(), .half() or an assignment to "
                    ".data replaced its storage): call buckets.rebuild() afterwards"
                )
            if grad.data_ptr() != grad_pointer:  # by p.grad.data = ...
                view = self.view("grad", i)
                grad.data = view.copy_(grad)
                self.touched[i] |= own is grad
            if own is grad:
                if not touched[i] and grad._version != self._written[i]:  # by hand, without a backward
                    self.touched[i] = bool(grad.any())
                    self._written[i] = grad._version
            elif own is None:
                if touched[i] or self._stale[i]:
                    grad.zero_()
                    self.touched[i] = self._stale[i] = False
            elif self.adopt_grads or not touched[i]:
                # assigned by hand, or by DistributedDataParallel where this rank did not use the parameter
                self._take(i, p)
            else:
                raise InputError(
                    f"the gradient of {self.names[i]} is no longer a view of its bucket: build "
                    "DistributedDataParallel with gradient_as_bucket_view=False, and write gradients with "
                    ".grad.copy_() instead of assigning them"
                )
        # 20 us for the modules and parameters of a ResNet-50; torch's optimizers would train what the model forgot.
        if any(where.get(key) is not what for where, key, what in self._tree):
            self._look_for_strangers()
        for i in self._outside:
            if self.params[i].requires_grad:
                raise InputError(f"{self.names[i]} was unfrozen behind the buckets' back: call buckets.rebuild()")

    def grad_squares(self) -> Tensor:
        """float64 [], the sum of squares of all gradients; call settle() before."""
        return ops.sum_squares([bucket.flat["grad"] for bucket in self.buckets])

    @torch.no_grad()
    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients together, without a loop over parameters.

        The Euclidean norm is summed in double in a fixed order. A float32 sum over a whole bucket is off by 1e-4
        and more on the CPU, so for other norms sums over NORM_CHUNK elements are combined in double.

        Returns:
            float64 [], on the first bucket's device.
        """
        self.settle()
        if norm_type == 2:
            return self.grad_squares().sqrt()
        norms = []
        for bucket in self.buckets:
            flat = bucket.flat["grad"]
            whole = flat.numel() // NORM_CHUNK * NORM_CHUNK
            for part in (flat[:whole].view(-1, NORM_CHUNK), flat[whole:].view(1, -1)):
                if part.numel():
                    norms.append(torch.linalg.vector_norm(part, norm_type, dim=1, dtype=torch.float32))
        if not norms:
            return torch.zeros((), dtype=torch.float64)
        parts = torch.cat([norm.double().to(norms[0].device) for norm in norms])
        return torch.linalg.vector_norm(parts, norm_type)

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """torch.nn.utils.clip_grad_norm_ over flat buckets, without waiting for the device.

        FusedAdam(max_norm=...) does it inside its step and saves reading and writing the gradients once more.

        Returns:
            float32 [], the norm before clipping.
        """
        norm = self.grad_norm(norm_type)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for bucket in self.buckets:
            bucket.flat["grad"].mul_(scale.to(bucket.device))
        return norm.float()
