"""From JPEG bytes to normalised tensors: crop, flip, dequantise, normalise and stack in one pass.

libjpeg-turbo (through simplejpeg, strict: its warnings are errors) turns a file into bytes; the finish is one gather
per plane through a table of the 256 values a byte can take. The table holds the exact value rounded once to the
output's dtype, so every dtype takes the same path, and a flip is exact: mirrored columns, and for x flow the table read
backwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import simplejpeg
import torch
from torch import Tensor

from ..errors import DecodeError

Jpeg = bytes | bytearray | memoryview | np.ndarray  # a file's bytes
Crop = tuple[int, int, int, int]

RAW_DTYPES = {torch.float32: torch.int32, torch.float64: torch.int64, torch.float16: torch.int16}
RAW_DTYPES[torch.bfloat16] = torch.int16  # a gather moves bits; NumPy has no bfloat16

# The densest baseline or progressive data spend one bit on an 8x8 block: a header that claims more than twice
# that, and more than 16 Mpixel, is a lie that would cost gigabytes.
PIXELS_PER_BYTE = 1024
PIXELS_ALWAYS = 1 << 24


class JpegError(DecodeError):
    """The DecodeError of a request: which of its JPEGs (``index``, from 0) and why (``reason``)."""

    def __init__(self, index: int, reason: str):
        super().__init__(f"JPEG {index}: {reason}")
        self.index, self.reason = index, reason


def read_gray(jpeg: Jpeg) -> np.ndarray:
    """Decode one flow JPEG to its codes.

    Args:
        jpeg: gray, or YCbCr whose luminance is taken (some extractors save gray pictures as colour); RGB,
            CMYK and YCCK files cannot be flow and are refused.
    Returns:
        uint8 [H, W], new.
    Raises:
        DecodeError: libjpeg-turbo cannot decode the file whole, or warns about it.
    """
    return _read(jpeg, "GRAY", ("Gray", "YCbCr"))[..., 0]


def read_rgb(jpeg: Jpeg) -> np.ndarray:
    """Decode one picture: uint8 [H, W, 3], new; gray is repeated, CMYK and YCCK converted. Raises
    DecodeError."""
    return _read(jpeg, "RGB", ("Gray", "YCbCr", "RGB", "CMYK", "YCCK"))


def _read(jpeg: Jpeg, colour: str, accepted: tuple[str, ...]) -> np.ndarray:
    if isinstance(jpeg, np.ndarray | memoryview) and not memoryview(jpeg).c_contiguous:
        jpeg = jpeg.tobytes()  # simplejpeg would read past the strides
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(jpeg)
        if space not in accepted:
            raise DecodeError(f"a {space} file, expected {' or '.join(accepted)}")
        if height * width > max(PIXELS_ALWAYS, PIXELS_PER_BYTE * len(jpeg)):
            raise DecodeError(f"claims {width}x{height} pixels in {len(jpeg)} bytes")
        return simplejpeg.decode_jpeg(jpeg, colour)
    except ValueError as error:  # simplejpeg's only exception, also for libjpeg's warnings
        raise DecodeError(str(error)) from error


def read_all(read: Callable[[Jpeg], np.ndarray], jpegs: Iterable[Jpeg]) -> Iterator[np.ndarray]:
    """``read`` each JPEG of a request, one at a time; JpegError where one fails or has not the size of the
    first."""
    first = None
    for index, jpeg in enumerate(jpegs):
        try:
            image = read(jpeg)
        except DecodeError as error:
            raise JpegError(index, str(error)) from error
        first = first or image.shape
        if image.shape != first:
            raise JpegError(index, f"{image.shape[1]}x{image.shape[0]} pixels, the first has {first[1]}x{first[0]}")
        yield image


def flow_tables(bound_px: float, channels: int, mean=0.0, std=1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """What each code of each channel becomes: (pixels - mean) / std, exact and rounded once to ``dtype``.

    Args:
        bound_px: displacement of code 255; code 0 is its negative.
        channels: 2L, x and y alternating.
        mean, std: scalars, or sequences repeated over the channels (2 numbers: x and y), in pixels.
    Returns:
        [channels, 256].
    Raises:
        ValueError: bound_px or a std not above 0, or a sequence that does not divide the channels.
    """
    if not 0 < bound_px < float("inf"):
        raise ValueError(f"bound_px must be a number above 0, not {bound_px}")
    return _tables(np.arange(256) * (2 * bound_px) / 255 - bound_px, channels, mean, std, dtype)


def frame_tables(mean=0.0, std=1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """As ``flow_tables`` for the three colours: (byte / 255 - mean) / std, [3, 256]."""
    return _tables(np.arange(256) / 255, 3, mean, std, dtype)


def _tables(values: np.ndarray, channels: int, mean, std, dtype: torch.dtype) -> Tensor:
    if dtype not in RAW_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, RAW_DTYPES))}, not {dtype}")
    mean, std = (_per_channel(name, v, channels) for name, v in (("mean", mean), ("std", std)))
    if not (std > 0).all():
        raise ValueError(f"std must be above 0, not {std.ravel().tolist()}")
    return torch.from_numpy((values - mean) / std).to(dtype)


def _per_channel(name: str, value, channels: int) -> np.ndarray:
    given = np.atleast_1d(np.asarray(value, dtype=np.float64))
    if given.ndim != 1 or not len(given) or channels % len(given):
        raise ValueError(
            f"{name} has shape {list(given.shape)}: give one number, or as many as divide {channels} channels"
        )
    return np.tile(given, channels // len(given))[:, None]


def mirrored(tables: Tensor) -> Tensor:
    """The flow tables of a mirrored sample: x (even) channels take the value of 255 - code, y channels their
    own."""
    tables = tables.clone()
    tables[0::2] = tables[0::2].flip(1)
    return tables


def finish(planes: Sequence[np.ndarray], tables: Tensor, out: Tensor) -> None:
    """Gather each uint8 [h, w] plane through its table into ``out`` [C, h, w] (CPU, any strides), tables'
    dtype."""
    raw = RAW_DTYPES[tables.dtype]
    for plane, table, target in zip(planes, tables.view(raw).numpy(), out.view(raw).numpy(), strict=True):
        np.take(table, plane, out=target, mode="clip")  # no byte is out of range; "clip" saves the buffered copy


def crop_view(image: np.ndarray, crop: Crop | None, flip: bool) -> np.ndarray:
    """The part (top, left, height, width) of an image [H, W, ...], mirrored if asked; ValueError if it is not
    inside."""
    if crop is not None:
        top, left, height, width = crop
        if top < 0 or left < 0 or height < 1 or width < 1 or top + height > len(image) or left + width > image.shape[1]:
            raise ValueError(
                f"crop (top, left, height, width) {crop} is not inside {image.shape[1]}x{len(image)} pixels"
            )
        image = image[top : top + height, left : left + width]
    return image[:, ::-1] if flip else image


def decode_flow(
    jpegs: Sequence[Jpeg] | Sequence[Sequence[Jpeg]],
    bound_px: float = 20.0,
    crop: Crop | None = None,
    flip: bool = False,
    mean=0.0,
    std=1.0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    out: Tensor | None = None,
) -> Tensor:
    """Decode stacks of flow: (pixels of displacement - mean) / std, pixels = code * 2 bound / 255 - bound.

    Args:
        jpegs: 2L JPEGs x, y, x, y... (one sample) or N lists of them; bytes-like; what is taken: see
            ``read_gray``. All of a call have one size.
        bound_px: displacement that was mapped to code 255.
        crop: (top, left, height, width) in JPEG pixels; the whole picture without it.
        flip: mirror left-right and negate x, exactly as decoding 255 - code.
        mean, std: see ``flow_tables``.
        dtype: float32, float64, float16 or bfloat16.
        device: where the result goes. Decoding runs on the CPU, in the calling thread, without the GIL.
        out: written and returned if given: [N, 2L, h, w] of this dtype on this device, any strides.
    Returns:
        [N, 2L, h, w]; N = 1 for one sample.
    Raises:
        DecodeError: a ``JpegError``, its index counting through the whole request.
        ValueError: an odd or unequal number of JPEGs, a crop outside the pictures, out that does not fit.
    """
    samples = _samples(jpegs)
    if len(samples[0]) % 2:
        raise ValueError(f"a flow stack has x and y for each frame: {len(samples[0])} JPEGs is odd")
    tables = flow_tables(bound_px, len(samples[0]), mean, std, dtype)
    return _decode(samples, read_gray, mirrored(tables) if flip else tables, crop, flip, device, out)


def decode_frames(
    jpegs: Sequence[Jpeg],
    crop: Crop | None = None,
    flip: bool = False,
    mean=0.0,
    std=1.0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    out: Tensor | None = None,
) -> Tensor:
    """Decode N RGB pictures of one size: (byte / 255 - mean) / std, [N, 3, h, w].

    Arguments and errors as for ``decode_flow``, but: ``jpegs`` are N files (see ``read_rgb``), and mean and
    std are scalars or one number per colour.
    """
    jpegs = list(jpegs)
    if not all(isinstance(jpeg, Jpeg) for jpeg in jpegs):
        raise ValueError("decode_frames takes one list of JPEGs, a picture each")
    samples = _samples([[jpeg] for jpeg in jpegs])
    return _decode(samples, read_rgb, frame_tables(mean, std, dtype), crop, flip, device, out)


def _samples(jpegs) -> list[Sequence[Jpeg]]:
    samples = list(jpegs)
    if not samples or isinstance(samples[0], Jpeg):
        samples = [samples]
    if len({len(sample) for sample in samples}) != 1 or not len(samples[0]):
        raise ValueError(f"samples of {[len(sample) for sample in samples]} JPEGs: give equal numbers, not 0")
    return samples


def _decode(samples, read, tables: Tensor, crop, flip, device, out: Tensor | None) -> Tensor:
    device, host = torch.device(device), None
    images = read_all(read, (jpeg for sample in samples for jpeg in sample))
    for index, image in enumerate(images):
        view = crop_view(image, crop, flip)
        planes = [view] if view.ndim == 2 else np.moveaxis(view, 2, 0)
        if host is None:
            host = _host(out, (len(samples), len(tables), *view.shape[:2]), tables.dtype, device)
        i, j = divmod(index * len(planes), len(tables))
        finish(planes, tables[j : j + len(planes)], host[i, j : j + len(planes)])
    if out is None:
        return host.to(device)
    return out if device.type == "cpu" else out.copy_(host)


def _host(out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The CPU tensor to write into: ``out`` itself where it lies on the CPU."""
    if out is None:
        return torch.empty(shape, dtype=dtype)
    fits = tuple(out.shape) == shape and out.dtype == dtype and out.device.type == device.type
    if not fits or device.index not in (None, out.device.index):
        raise ValueError(
            f"out is {out.dtype} {list(out.shape)} on {out.device}: needs {dtype} {list(shape)} on {device}"
        )
    return out.detach() if device.type == "cpu" else torch.empty(shape, dtype=dtype)
