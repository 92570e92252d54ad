"""JPEG encoding of frames and flow codes, by libjpeg-turbo; decode.py reads them."""

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
    """A JPEG file's bytes and its picture, uint8 [H, W, 3] RGB or [H, W].

    Raises:
        DecodeError: the file is missing, or does not decode to its end.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
        image = simplejpeg.decode_jpeg(data, colorspace="GRAY" if gray else "RGB", strict=True)
    except OSError as error:
        raise DecodeError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise DecodeError(f"{path}: {error}") from error
    return data, image[:, :, 0] if gray else image
