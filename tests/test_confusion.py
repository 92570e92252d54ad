"""The confusion matrix: counting, its CSV and its picture."""

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix, recall_score

from fastactrec.errors import InputError
from fastactrec.reporting.confusion import (
    class_accuracy,
    count_confusion,
    most_confused,
    read_confusion_csv,
    write_confusion_csv,
    write_confusion_png,
)


@pytest.mark.parametrize(("clips", "classes"), [(0, 1), (1, 2), (300, 7)])
def test_counts_and_recalls_agree_with_sklearn(clips, classes):
    rng = np.random.default_rng(clips)
    labels, predicted = rng.integers(0, classes, (2, clips))
    matrix = count_confusion(labels, predicted, classes)
    if clips == 0:
        assert matrix.sum() == 0
        assert np.isnan(class_accuracy(matrix)).all()
        return
    np.testing.assert_array_equal(matrix, confusion_matrix(labels, predicted, labels=range(classes)))
    recalls = recall_score(labels, predicted, labels=range(classes), average=None, zero_division=np.nan)
    np.testing.assert_allclose(class_accuracy(matrix), recalls)


def test_most_confused():
    matrix = np.array([[9, 1, 0], [3, 5, 2], [0, 0, 7]])
    assert most_confused(matrix, 2) == [(1, 0, 3), (1, 2, 2)]
    assert most_confused(matrix, 10) == [(1, 0, 3), (1, 2, 2), (0, 1, 1)]
    assert most_confused(np.diag([3, 4]), 10) == []


def test_csv_round_trip_with_awkward_names(tmp_path):
    names = ["a,b", 'say "hi"', "two\nlines", "ünï"]
    matrix = np.arange(16).reshape(4, 4)
    write_confusion_csv(tmp_path / "confusion.csv", matrix, names)
    classes, back = read_confusion_csv(tmp_path / "confusion.csv")
    assert classes == names
    np.testing.assert_array_equal(back, matrix)
    assert [path.name for path in tmp_path.iterdir()] == ["confusion.csv"]


def test_csv_that_is_not_square_is_refused(tmp_path):
    (tmp_path / "confusion.csv").write_text("x,a,b\na,1,2\n")
    with pytest.raises(InputError, match=r"confusion\.csv: not a confusion matrix"):
        read_confusion_csv(tmp_path / "confusion.csv")


def test_sizes_must_fit(tmp_path):
    with pytest.raises(ValueError, match=r"\(2, 2\) for 3 classes"):
        write_confusion_csv(tmp_path / "c.csv", np.eye(2, dtype=int), ["a", "b", "c"])


@pytest.mark.parametrize("classes", [1, 3, 51])
def test_png_shows_the_diagonal(tmp_path, classes):
    """The picture of a perfect matrix has one dark square per class, whatever the names."""
    from matplotlib.image import imread
    from scipy.ndimage import find_objects, label

    names = ["$\\frac{", "<b>", "走る", *map(str, range(classes))][:classes]
    write_confusion_png(tmp_path / "c.png", 5 * np.eye(classes, dtype=int), names)
    picture = imread(tmp_path / "c.png")
    dark = np.abs(picture[..., :3] - np.array([8, 48, 107]) / 255).max(axis=-1) < 0.02  # the end of "Blues"
    boxes = [[part.stop - part.start for part in box] for box in find_objects(label(dark)[0])]
    squares = [box for box in boxes if min(box) > 10 and max(box) < 1.2 * min(box)]  # not the colour bar's end
    assert len(squares) == classes
    assert [path.name for path in tmp_path.iterdir()] == ["c.png"]
