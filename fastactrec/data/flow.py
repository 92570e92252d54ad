"""Optical flow: TV-L1 between frames, its byte codes, and its colours."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from .. import ops
from ..config import FlowConfig
from ..errors import InputError

Array = Tensor | np.ndarray

PRESETS = {"default": FlowConfig()}


def tvl1(
    prev: Array,
    next: Array,
    preset: str = "default",
    *,
    tau: float | None = None,
    lam: float | None = None,
    theta: float | None = None,
    scales: int | None = None,
    scale_step: float | None = None,
    warps: int | None = None,
    iterations: int | None = None,
    median: int | None = None,
    threads: int | None = None,
) -> Tensor:
    """TV-L1 optical flow from ``prev`` to ``next``: prev(x, y) looks like next(x + u, y + v).

    The number of iterations is fixed, so that the work does not depend on the images. The result does not
    depend, bit for bit, on the number of threads, on the rest of the batch or on the instruction set.

    Args:
        prev, next: gray images [..., H, W] of one shape and type, uint8, or floating point in 0..255
            (computed in float32); torch (on the CPU) or NumPy. Sides are 1 to 32767 pixels.
        preset: the settings that the other arguments change one by one; "default" is ``config.FlowConfig()``.
        tau: time step of the dual update.
        lam: weight of the data term.
        theta: tightness of the coupling between data and smoothness.
        scales: pyramid levels at most; below the first, none has a side under 16 pixels.
        scale_step: size ratio of neighbouring levels, 0 to 1 exclusive.
        warps: per level.
        iterations: per warp.
        median: side in pixels of the median filter on the flow before each warp: 3, 5, or 0 for none.
        threads: default ``torch.get_num_threads()``. They share out the pairs, and rows where pairs are few.
    Returns:
        float32 [..., 2, H, W], new, pixels, x then y. What moves out of ``next`` is filled in smoothly. Where
        an image is not finite, neither need the flow be.
    Raises:
        InputError: shapes, types, devices or settings do not fit.
    Source:
        Zach, Pock & Bischof, DAGM 2007; Sánchez, Meinhardt-Llopis & Facciolo, IPOL 3 (2013); the pyramid is
        OpenCV's. Cubic interpolation gives the warped image and, by differentiation, its gradient.
    """
    if preset not in PRESETS:
        raise InputError(f"tvl1: preset {preset!r} is not one of {', '.join(PRESETS)}")
    given = {"tau": tau, "lam": lam, "theta": theta, "scales": scales, "scale_step": scale_step}
    given |= {"warps": warps, "iterations": iterations, "median": median}
    settings = dataclasses.replace(PRESETS[preset], **{k: v for k, v in given.items() if v is not None})
    settings.check()
    threads = torch.get_num_threads() if threads is None else threads
    if threads < 1:
        raise InputError(f"tvl1: threads={threads} is not a positive number")
    prev, next = _gray_images(prev, "prev"), _gray_images(next, "next")
    if prev.shape != next.shape or prev.dtype != next.dtype:
        kinds = [f"{images.dtype} {list(images.shape)}" for images in (prev, next)]
        raise InputError(f"tvl1: prev is {kinds[0]}, next {kinds[1]}: they must be alike")
    batch, (height, width) = prev.shape[:-2], prev.shape[-2:]
    flow = ops.tvl1(
        prev.reshape(-1, height, width).contiguous(),
        next.reshape(-1, height, width).contiguous(),
        **dataclasses.asdict(settings),
        threads=threads,
    )
    return flow.reshape(*batch, 2, height, width)


def _gray_images(images: Array, name: str) -> Tensor:
    if isinstance(images, np.ndarray):
        images = torch.from_numpy(np.ascontiguousarray(images))
    if not isinstance(images, Tensor):
        raise InputError(f"tvl1: {name} is a {type(images).__name__}, not a tensor or array")
    if images.device.type != "cpu":
        raise InputError(f"tvl1: {name} lies on {images.device}; move it to the CPU")
    if images.ndim < 2 or not all(1 <= side <= 32767 for side in images.shape[-2:]):
        shape = list(images.shape)
        raise InputError(f"tvl1: {name} has shape {shape}; images are [..., H, W] of 1 to 32767 pixels a side")
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point():
        raise InputError(f"tvl1: {name} is {images.dtype}; give uint8, or floating point in 0..255")
    return images.float()


def encode_flow(flow: Array, bound_px: float) -> Tensor:
    """Quantise flow to bytes; values beyond the bound saturate, zero becomes 128.

    Args:
        flow: floating point, any shape, pixels; torch (any device) or NumPy.
        bound_px: displacement mapped to 0 (negative) and 255.
    Returns:
        uint8, same shape and device, new: round(255 (v + bound) / (2 bound)), half to even; NaN gives 128.
    Raises:
        InputError: bound_px is not positive and finite, or flow not floating point.
    Source: the linear map of open-mmlab/denseflow.
    """
    _check_bound(bound_px, "encode_flow")
    flow = torch.as_tensor(flow)
    if not flow.is_floating_point():
        raise InputError(f"encode_flow: flow is {flow.dtype}; give floating point, in pixels")
    unit = flow.double().clamp(-bound_px, bound_px).nan_to_num_().add_(bound_px).mul_(255).div_(2 * bound_px)
    return unit.round_().to(torch.uint8)


def decode_codes(codes: Array, bound_px: float) -> Tensor:
    """The displacements that flow codes stand for.

    Args:
        codes: uint8, any shape; torch (any device) or NumPy.
        bound_px: the bound of ``encode_flow``.
    Returns:
        float32, same shape and device, new, pixels: code * 2 bound / 255 - bound (128 gives bound / 255).
    Raises:
        InputError: bound_px is not positive and finite, or codes not uint8.
    """
    _check_bound(bound_px, "decode_codes")
    codes = torch.as_tensor(codes)
    if codes.dtype != torch.uint8:
        raise InputError(f"decode_codes: codes are {codes.dtype}; give uint8")
    return (codes.double() * (2 * bound_px) / 255 - bound_px).float()


def _check_bound(bound_px: float, op: str) -> None:
    if not 0 < bound_px < float("inf"):
        raise InputError(f"{op}: bound_px={bound_px} is not a positive number of pixels")


def to_gray(rgb: Array) -> Tensor:
    """Luma of RGB images, bit for bit OpenCV's (ITU-R BT.601 in 15-bit fixed point).

    Args:
        rgb: uint8 [..., H, W, 3]; torch or NumPy.
    Returns:
        uint8 [..., H, W], new, on the CPU.
    Raises:
        InputError: another type or shape.
    """
    rgb = torch.as_tensor(rgb).cpu().numpy()  # NumPy is five times as fast here as torch
    if rgb.dtype != np.uint8 or rgb.ndim < 3 or rgb.shape[-1] != 3:
        raise InputError(f"to_gray: {rgb.dtype} {list(rgb.shape)} is not uint8 [..., H, W, 3]")
    luma = np.full(rgb.shape[:-1], 1 << 14, np.int32)
    for channel, weight in enumerate((9798, 19235, 3735)):
        luma += np.multiply(rgb[..., channel], weight, dtype=np.int32)
    luma >>= 15
    return torch.from_numpy(luma.astype(np.uint8))


def flow_to_color(flow: Array, max_px: float | None = None) -> np.ndarray:
    """Draw flow by the Middlebury colour wheel: direction is hue, length is saturation.

    Args:
        flow: [2, H, W], pixels, x then y; torch or NumPy.
        max_px: length of full saturation, longer ones are darkened; default the longest of this field.
    Returns:
        uint8 [H, W, 3] RGB; white where nothing moves, black where the flow is not finite.
    Raises:
        InputError: another shape, or max_px not positive.
    Source: Baker et al., "A Database and Evaluation Methodology for Optical Flow", IJCV 2011 (colorcode.cpp).
    """
    flow = torch.as_tensor(flow).detach().cpu().double().numpy()
    if flow.ndim != 3 or flow.shape[0] != 2:
        raise InputError(f"flow_to_color: flow has shape {list(flow.shape)}, not [2, H, W]")
    if max_px is not None and not 0 < max_px < float("inf"):
        raise InputError(f"flow_to_color: max_px={max_px} is not a positive number of pixels")
    known = np.isfinite(flow).all(axis=0)
    x, y = np.where(known, flow, 0.0)
    length = np.hypot(x, y)
    length /= max_px or max(length.max(initial=0.0), np.finfo(np.float64).tiny)
    wheel = _color_wheel()
    at = (np.arctan2(-y, -x) / np.pi + 1) / 2 * (len(wheel) - 1)
    low = np.floor(at).astype(int)
    part = (at - low)[..., None]
    hue = wheel[low] * (1 - part) + wheel[(low + 1) % len(wheel)] * part
    length = length[..., None]
    color = np.where(length <= 1, 1 - length * (1 - hue), 0.75 * hue)
    return np.floor(255 * color * known[..., None]).astype(np.uint8)


def _color_wheel() -> np.ndarray:
    """[55, 3] in 0..1: red, yellow, green, cyan, blue, magenta; more steps where the eye tells more apart."""
    corners = np.array([(1, 0, 0), (1, 1, 0), (0, 1, 0), (0, 1, 1), (0, 0, 1), (1, 0, 1), (1, 0, 0)], float)
    steps = (15, 6, 4, 11, 13, 6)
    return np.concatenate(
        [a + (b - a) * np.arange(n)[:, None] / n for a, b, n in zip(corners[:-1], corners[1:], steps, strict=True)]
    )
