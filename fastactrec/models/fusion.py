"""Late fusion: a weighted mean of the streams' scores."""

from __future__ import annotations

import numpy as np


def softmax(scores: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, float64."""
    shifted = np.exp(scores - scores.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def fuse(scores: dict[str, np.ndarray], weights: dict[str, float], mode: str) -> np.ndarray:
    """Weighted mean of the streams' scores.

    Args:
        scores: per stream, float64 [clips, classes], logits averaged over segments and crops.
        weights: per stream, at least 0, not all 0.
        mode: ``"logits"`` (TSN's way) or ``"softmax"`` (each stream's probabilities).
    Returns:
        float64 [clips, classes].
    """
    used = {name: softmax(value) if mode == "softmax" else value for name, value in scores.items()}
    total = sum(weights[name] for name in used)
    return sum(weights[name] / total * value for name, value in used.items())
