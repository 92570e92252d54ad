"""Accuracy figures against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, top_k_accuracy_score

from fastactrec.engine import metrics
from fastactrec.reporting.confusion import count_confusion


@given(st.integers(3, 12), st.integers(1, 60), st.integers(0, 2**31))
def test_figures_equal_scikit_learns(classes, clips, seed):
    rng = np.random.default_rng(seed)
    scores = rng.permutation(classes * clips).reshape(clips, classes).astype(float)  # no ties
    labels = rng.integers(0, classes, clips)
    predicted = metrics.predictions(scores)
    everything = list(range(classes))
    np.testing.assert_array_equal(
        count_confusion(labels, predicted, classes),
        confusion_matrix(labels, predicted, labels=everything),
    )
    for k in (1, 2):
        expected = top_k_accuracy_score(labels, scores, k=k, labels=everything)
        assert metrics.topk(scores, labels, k) == pytest.approx(expected)


def test_mean_class_accuracy_leaves_out_absent_classes():
    labels = np.array([0, 0, 0, 2])
    predicted = np.array([0, 0, 1, 2])
    assert metrics.mean_class_accuracy(predicted, labels, 4) == pytest.approx((2 / 3 + 1) / 2)
    assert metrics.mean_class_accuracy(predicted, labels, 4) == pytest.approx(
        balanced_accuracy_score(labels, predicted)
    )


def test_ties_go_to_the_lower_class():
    scores = np.array([[1.0, 1.0, 0.0]])
    assert metrics.topk(scores, np.array([1]), 1) == 0.0
    assert metrics.topk(scores, np.array([0]), 1) == 1.0


def test_top5_only_with_more_than_five_classes():
    assert "top5" not in metrics.accuracy_table(np.eye(5), np.arange(5))
    assert metrics.accuracy_table(np.eye(6), np.arange(6))["top5"] == 1.0
