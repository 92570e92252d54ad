"""Compression in plain NumPy: the layout of a payload spelled out, errors in float64; bfloat16 is torch's."""

from __future__ import annotations

import numpy as np
import torch

BLOCK = 256
LIMIT = {8: 127, 4: 7}
# Of half a scale: the inverse scale and the product are rounded before the code is, the decoded value after; the
# largest quotient is 127, so that this makes 3 * 127 * 2**-24 scales at most.
EPS = 2 * 3 * 127 * 2.0**-24


def compensated(values, factor=1.0, reference=None, residual=None) -> np.ndarray:
    """What is to be quantised: factor * (values - reference) + residual, each operation rounded to float32."""
    with np.errstate(all="ignore"):
        y = values if reference is None else values - reference
        y = np.float32(factor) * y
        return y if residual is None else y + residual


def payload_size(numel: int, bits: int) -> int:
    blocks = -(-numel // BLOCK)
    scales = 0 if bits == 16 else -(-4 * blocks // 16) * 16
    return blocks * BLOCK * bits // 8 + scales


def unpack(payload: np.ndarray, numel: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """(codes int [blocks, 256], scales float32 [blocks]) of 8 or 4 bits; padding must be zero."""
    blocks = -(-numel // BLOCK)
    split = blocks * BLOCK * bits // 8
    codes, scales = payload[:split].view(np.int8).reshape(blocks, BLOCK * bits // 8), payload[split:].view(np.float32)
    assert not scales[blocks:].any()
    if bits == 4:
        signed = [((codes & 15) ^ 8) - 8, codes >> 4]
        codes = np.concatenate(signed, axis=1)
    assert not codes.reshape(-1)[numel:].any()
    return codes.astype(np.int64), scales[:blocks]


def decode(payload: np.ndarray, numel: int, bits: int) -> np.ndarray:
    """float32 [numel]"""
    if bits == 16:
        words = payload.view(np.uint16)
        assert not words[numel:].any()
        return (words[:numel].astype(np.uint32) << 16).view(np.float32)
    codes, scales = unpack(payload, numel, bits)
    return (codes.astype(np.float32) * scales[:, None]).reshape(-1)[:numel]


def check_payload(payload: np.ndarray, y: np.ndarray, bits: int) -> None:
    """Of finite blocks scales are as they should be, and every code is a nearest multiple; scales of others are NaN."""
    numel = len(y)
    assert len(payload) == payload_size(numel, bits)
    if bits == 16:
        words = torch.from_numpy(y).bfloat16().view(torch.int16).numpy()
        np.testing.assert_array_equal(payload.view(np.int16)[:numel], words)
        return
    codes, scales = unpack(payload, numel, bits)
    padded = np.zeros(codes.size, np.float32)
    padded[:numel] = y
    for block, code, scale in zip(padded.reshape(-1, BLOCK), codes, scales, strict=True):
        if not np.isfinite(block).all():
            assert np.isnan(scale)
            continue
        largest = np.abs(block).max()
        assert scale == np.clip(largest / np.float32(LIMIT[bits]), 2.0**-126, None) or largest == np.finfo("f4").max
        assert np.abs(code).max() <= LIMIT[bits]
        error = np.abs(block.astype(np.float64) - code * np.float64(scale))
        assert error.max() <= np.float64(scale) / 2 * (1 + EPS)
