"""Accuracy figures from scores and labels. NumPy only."""

from __future__ import annotations

import numpy as np

from ..reporting.confusion import class_accuracy, count_confusion


def predictions(scores: np.ndarray) -> np.ndarray:
    """Class of the highest score, int64 [clips]; ties go to the lower class index."""
    return scores.argmax(1)


def topk(scores: np.ndarray, labels: np.ndarray, k: int) -> float:
    """Fraction of clips whose label is among the k highest scores; ties go to the lower class index."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return float((order == labels[:, None]).any(1).mean())


def mean_class_accuracy(predicted: np.ndarray, labels: np.ndarray, classes: int) -> float:
    """Mean over the classes that occur in ``labels`` of the fraction recognised."""
    return float(np.nanmean(class_accuracy(count_confusion(labels, predicted, classes))))


def accuracy_table(scores: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """top1, top5 (with more than five classes) and mean_class, as fractions."""
    classes = scores.shape[1]
    table = {
        "top1": topk(scores, labels, 1),
        "mean_class": mean_class_accuracy(predictions(scores), labels, classes),
    }
    if classes > 5:
        table["top5"] = topk(scores, labels, 5)
    return table
