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

ADAM_SEGMENT = np.dtype(
    [
        ("begin", "<i8"),
        ("end", "<i8"),
        ("alpha", "<f4"),
        ("inv_sqrt_mass", "<f4"),
        ("beta1", "<f4"),
        ("beta2", "<f4"),
        ("one_minus_beta1", "<f4"),
        ("one_minus_beta2", "<f4"),
        ("eps", "<f4"),
        ("l2", "<f4"),
        ("decay", "<f4"),
    ],
    align=True,
)
if ADAM_SEGMENT.itemsize != _ext.ADAM_SEGMENT_BYTES:
    raise ImportError("fastactrec.ops and the extension disagree about AdamSegment: run 'pip install .' again")


def _stream_handle(tensor: Tensor) -> int:
    return torch.cuda.current_stream(tensor.device).cuda_stream if tensor.is_cuda else 0


def _require_device(tensor: Tensor, op: str) -> None:
    if tensor.is_cuda and not build_info()["cuda"]:
        raise FastactrecError(f"{op}: this build has no CUDA kernels; put nvcc on PATH and run 'pip install .' again")


def adam_step(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, segments: np.ndarray) -> None:
    """One Adam step in place over a flat bucket.

    Args:
        param, grad, exp_avg, exp_avg_sq: float32 [N], contiguous, one device.
        segments: ADAM_SEGMENT [S], sorted, disjoint; elements of no segment are left alone. On a GPU arrays and
            segments must begin at multiples of 16 bytes, as those of FlatBuckets do.
    Raises:
        RuntimeError: sizes, devices or the table do not fit. TypeError: dtype or layout.
    """
    _require_device(param, "adam_step")
    table = torch.from_numpy(np.ascontiguousarray(segments).view(np.uint8))
    if param.is_cuda:
        table = table.pin_memory().to(param.device, non_blocking=True)
    arrays = [tensor.detach() for tensor in (param, grad, exp_avg, exp_avg_sq)] + [table]
    if not param.is_cuda:  # numpy's buffers cost 13 us per call, torch's DLPack capsules 30
        arrays = [array.numpy() for array in arrays]
    _ext.adam_step(
        *arrays,
        threads=torch.get_num_threads(),
        cuda_stream=_stream_handle(param),
    )


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
