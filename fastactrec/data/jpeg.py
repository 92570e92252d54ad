"""JPEG files of frames and flow codes, by libjpeg-turbo."""

from __future__ import annotations

import numpy as np
import simplejpeg

from ..errors import DecodeError

SUBSAMPLING = "4:2:0"


def encode_gray(image: np.ndarray, quality: int) -> bytes:
    """uint8 [H, W] -> a one-component JPEG of ``quality`` 1 to 100."""
    return simplejpeg.encode_jpeg(
        np.ascontiguousarray(image)[:, :, None], quality=quality, colorspace="GRAY", colorsubsampling="Gray"
    )


def encode_rgb(image: np.ndarray, quality: int) -> bytes:
    """uint8 [H, W, 3] RGB -> a JPEG of ``quality`` 1 to 100 with 4:2:0 chroma."""
    return simplejpeg.encode_jpeg(
        np.ascontiguousarray(image), quality=quality, colorspace="RGB", colorsubsampling="420"
    )


def read_jpeg(path, *, gray: bool = False) -> tuple[bytes, np.ndarray]:
    """A JPEG file's bytes and its picture, uint8 [H, W, 3] RGB or [H, W], by the rules of ``decode.py``.

    Raises:
        DecodeError: the file is missing, or training could not read it.
    """
    from .decode import read_gray, read_rgb  # needs torch, which the front door can do without

    try:
        with open(path, "rb") as file:
            data = file.read()
        return data, (read_gray if gray else read_rgb)(data)
    except OSError as error:
        raise DecodeError(f"{path}: {error.strerror}") from error
    except DecodeError as error:
        raise DecodeError(f"{path}: {error}") from error
