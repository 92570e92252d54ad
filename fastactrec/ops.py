"""The door to the compiled extension: checks, device, CUDA stream. Nothing else imports ``_ext``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .errors import FastactrecError

try:
    from . import _ext
except ImportError as error:
    raise ImportError(
        "fastactrec's compiled extension is missing: run 'pip install .' in the source folder "
        f"with the Python you use now ({error})"
    ) from error


def build_info() -> dict:
    """How the extension was built: version, source hash, compiler, instruction sets, CUDA and architectures."""
    return dict(_ext.build_info())


def _refuse_stale_extension() -> None:
    """A checkout whose C++ differs from the installed extension would run code that is not the one on disk."""
    csrc = Path(__file__).resolve().parent.parent / "csrc"
    backend = csrc / "build_backend.py"
    if not backend.exists():
        return
    namespace: dict = {"__name__": "build_backend", "__file__": str(backend)}
    exec(compile(backend.read_text(), str(backend), "exec"), namespace)  # our own file; csrc is not a package
    if namespace["source_hash"](csrc) != build_info()["source_hash"]:
        raise ImportError(f"the installed extension was not built from {csrc}: run 'pip install .' again")


_refuse_stale_extension()

ADAM_CHUNK: int = _ext.ADAM_CHUNK  # elements that one CUDA block updates

# csrc/launch.h describes the fields.
ADAM_GROUP = np.dtype(
    [(name, "<f8") for name in ("lr", "beta1", "beta2", "eps", "weight_decay")]
    + [("decoupled", "<i8"), ("maximize", "<i8")]
)
ADAM_SEGMENT = np.dtype(
    [
        ("begin", "<i8"),
        ("end", "<i8"),
        ("masses", "<f8", 2),
        ("frozen_mass", "<f8"),
        ("step", "<f4"),
        ("group", "<i4"),
        ("live", "<i4"),
        ("key", "<u4"),
        ("now", "V48"),
    ]
)
if (ADAM_SEGMENT.itemsize, ADAM_GROUP.itemsize) != (_ext.ADAM_SEGMENT_BYTES, _ext.ADAM_GROUP_BYTES):
    raise ImportError("fastactrec.ops and the extension disagree about Adam's tables: run 'pip install .' again")


def _stream_handle(tensor: Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def _require_device(tensor: Tensor, op: str) -> None:
    if tensor.is_cuda and not build_info()["cuda"]:
        raise FastactrecError(f"{op}: this build has no CUDA kernels; put nvcc on PATH and run 'pip install .' again")


def _array(tensor: Tensor | None):
    """What the extension takes: NumPy's buffers cost it 13 us per call, torch's DLPack capsules 30."""
    if tensor is None:
        return None
    plain = tensor.detach()
    return plain if plain.is_cuda or plain.dtype == torch.bfloat16 else plain.numpy()


class AdamPlan:
    """The buckets of one device and their tables, checked once; then each step costs the host little.

    Args:
        segments: uint8 [S, 104], rows of ADAM_SEGMENT, sorted by bucket and begin, which are multiples of 4;
            elements of no segment are left alone.
        groups: uint8 [G, 56], rows of ADAM_GROUP; both on the device of the buckets.
        host_segments: ADAM_SEGMENT [S], the same on the host.
    Raises:
        RuntimeError: sizes, devices or the table do not fit. TypeError: type or layout.
    """

    def __init__(self, segments: Tensor, groups: Tensor, host_segments: np.ndarray):
        _require_device(segments, "adam")
        self._device = segments
        rows = host_segments.view(np.uint8).reshape(len(host_segments), -1)
        self._plan = _ext.AdamPlan(_array(segments), _array(groups), rows)

    def add_bucket(self, weight, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, frozen_sq, param, first, row, rows) -> None:
        """Adds a bucket of N elements whose segments are rows [row, row + rows) of the table.

        Args:
            weight: float32 [N]; a master copy where the parameter is smaller.
            grad: float32, bfloat16 or float16 [N].
            exp_avg, exp_avg_sq: float32 or bfloat16 [N], the latter rounded stochastically.
            max_exp_avg_sq: float32 [N] for amsgrad, or None.
            frozen_sq: float32 [N], used in place of exp_avg_sq where a row's frozen_mass is not 0; or None.
            param: [N] of grad's type where that is not float32, else None; gets the rounded weight.
            first: on a GPU int32 [ceil(N / ADAM_CHUNK)], for each chunk the first segment that ends behind its
                begin; else None.
        """
        arrays = (weight, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, frozen_sq, param, first)
        self._plan.add_bucket(*map(_array, arrays), row, rows)

    def advance(self, grad_scale=None, found_inf=None, squares=None, max_norm: float = 0.0) -> None:
        """Masses, steps and coefficients of one step for every live segment.

        Args:
            grad_scale: float32 [1], what the gradients are multiplied with by now; or None.
            found_inf: float32 [1], not zero: no parameter takes this step; or None.
            squares: float64 [1], sum of squares of all gradients, to clip their norm to max_norm; or None.
        """
        scalars = map(_array, (grad_scale, found_inf, squares))
        self._plan.advance(*scalars, max_norm, _stream_handle(self._device))

    def update(self, begin: int, end: int, outs: list[Tensor] | None = None) -> None:
        """Elements of buckets [begin, end), in place. outs: for every bucket a flat array of any type above that
        gets a copy of the weights."""
        threads = torch.get_num_threads()
        self._plan.update(begin, end, [_array(out) for out in outs or []], threads, _stream_handle(self._device))


def sum_squares(arrays: list[Tensor]) -> Tensor:
    """Sum of the squares of all elements, in double and in a fixed order, whatever the number of threads.

    Args:
        arrays: float32, bfloat16 or float16, [N] each, contiguous; on any devices.
    Returns:
        float64 [], on the first array's device (on the CPU if there is none).
    """
    totals = []
    for values in arrays:
        _require_device(values, "sum_squares")
        chunks = -(-values.numel() // _ext.SQUARES_CHUNK)
        partials = torch.empty(chunks, dtype=torch.float64, device=values.device)
        _ext.sum_squares(_array(values), _array(partials), torch.get_num_threads(), _stream_handle(values))
        totals.append(partials.sum().to(arrays[0].device))
    return torch.stack(totals).sum() if totals else torch.zeros((), dtype=torch.float64)


def payload_bytes(numel: int, bits: int) -> int:
    """Bytes of quantise()'s payload for ``numel`` elements, a multiple of 16: whole blocks of 256 codes and, with 8 and
    4 bits, a float32 scale per block."""
    return _ext.payload_bytes(numel, bits)


def quantise(
    values: Tensor,
    payload: Tensor,
    *,
    bits: int,
    factor: float = 1.0,
    reference: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    """Writes y = factor * (values - reference) + residual into payload as small numbers, on the arrays' own device.

    bits 16: bfloat16, rounded to nearest. bits 8 and 4: blocks of 256 elements share a scale, their largest magnitude
    over 127 or 7, of which each element is the nearest multiple: off by half a scale at most. A block with an
    infinity or NaN decodes to NaN in whole. The same bits on every device, instruction set and number of threads.

    Args:
        values: float32 [N], contiguous, as reference and residual are.
        payload: uint8 [payload_bytes(N, bits)], contiguous, from a multiple of 16 bytes; written in whole.
        factor: finite, rounded to float32.
        reference: float32 [N]; None: zero.
        residual: float32 [N], in place: what the payload now lacks, y - decoded(y), so that passing the same array
            every time loses nothing (error feedback). None: lost.
    Raises:
        RuntimeError: bits, factor, a type, size, device or alignment does not fit, or what is written overlaps.
        FastactrecError: arrays on a GPU, but this build has no CUDA kernels.
    Source: csrc/kernels/quantise.h.
    """
    _require_device(values, "quantise")
    arrays = map(_array, (values, payload))
    options = map(_array, (reference, residual))
    _ext.quantise(*arrays, bits, factor, *options, torch.get_num_threads(), _stream_handle(values))


def dequantise_sum(payloads: Tensor, out: Tensor, *, bits: int, base: Tensor | None = None) -> None:
    """out = base + the sum of what the rows of payloads decode to, added in float32 in the order of rows.

    Args:
        payloads: uint8 [n, payload_bytes(N, bits)], n >= 0; rows may lie apart, at multiples of 16 bytes.
        out: float32 [N], contiguous; all NaNs in it are the same one.
        base: float32 [N], may be out itself; None: zero.
    Raises:
        As quantise().
    """
    _require_device(out, "dequantise_sum")
    arrays = map(_array, (payloads, out))
    _ext.dequantise_sum(*arrays, bits, _array(base), torch.get_num_threads(), _stream_handle(out))


def tvl1(
    prev: Tensor,
    next: Tensor,
    *,
    tau: float,
    lam: float,
    theta: float,
    scales: int,
    scale_step: float,
    warps: int,
    iterations: int,
    median: int,
    threads: int,
) -> Tensor:
    """TV-L1 optical flow of a batch of pairs on the CPU, whatever the number of threads bit for bit the same.

    Args:
        prev, next: uint8 or float32 (0..255) [N, H, W], contiguous, CPU.
    Returns:
        float32 [N, 2, H, W], pixels, x then y.
    Raises:
        RuntimeError: types or shapes do not fit. TypeError: layout or device.
    """
    flow = torch.empty((prev.shape[0], 2, *prev.shape[1:]), dtype=torch.float32)
    _ext.tvl1(
        prev.detach(),
        next.detach(),
        flow,
        tau=tau,
        lam=lam,
        theta=theta,
        scales=scales,
        scale_step=scale_step,
        warps=warps,
        iterations=iterations,
        median=median,
        threads=threads,
    )
    return flow
