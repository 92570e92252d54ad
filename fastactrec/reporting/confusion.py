"""The confusion matrix: counted, written as CSV and PNG. Rows are true classes, columns predictions."""

from __future__ import annotations

import csv
import io
import warnings
from pathlib import Path

import numpy as np

from ..errors import InputError
from ..files import atomic_path, write_atomically

CORNER = "true\\predicted"


def count_confusion(labels, predicted, classes: int) -> np.ndarray:
    """int64 [classes, classes] of two integer sequences [N]; (t, p) counts clips of class t called p."""
    matrix = np.zeros((classes, classes), np.int64)
    np.add.at(matrix, (np.asarray(labels, np.int64), np.asarray(predicted, np.int64)), 1)
    return matrix


def class_accuracy(matrix: np.ndarray) -> np.ndarray:
    """float64 [classes]: the share of each true class called right; NaN for a class without clips."""
    clips = matrix.sum(axis=1)
    return np.divide(matrix.diagonal(), clips, out=np.full(len(matrix), np.nan), where=clips > 0)


def most_confused(matrix: np.ndarray, limit: int) -> list[tuple[int, int, int]]:
    """(true, predicted, clips) of the largest entries off the diagonal, most first, zeros left out."""
    wrong = matrix.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:limit]
    pairs = [divmod(int(flat), len(matrix)) for flat in order]
    return [(true, predicted, int(wrong[true, predicted])) for true, predicted in pairs if wrong[true, predicted]]


def write_confusion_csv(path: Path, matrix: np.ndarray, classes: list[str]) -> None:
    """First row and first column hold class names, the rest whole numbers; replaced in one step."""
    _check(matrix, classes)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([CORNER, *classes])
    for name, row in zip(classes, matrix, strict=True):
        writer.writerow([name, *(int(value) for value in row)])
    write_atomically(Path(path), text.getvalue())


def read_confusion_csv(path: Path) -> tuple[list[str], np.ndarray]:
    """Class names and int64 [classes, classes].

    Raises:
        InputError: not a square table of whole numbers with the same names down and across.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = [row for row in csv.reader(file) if row]
        classes = rows[0][1:]
        matrix = np.array([[int(value) for value in row[1:]] for row in rows[1:]], dtype=np.int64)
        if [row[0] for row in rows[1:]] != classes or matrix.shape != (len(classes), len(classes)):
            raise ValueError("names down and across differ")
    except (OSError, ValueError, IndexError) as error:
        raise InputError(f"{path}: not a confusion matrix ({error}); run 'fastactrec evaluate' again") from error
    return classes, matrix


def write_confusion_png(path: Path, matrix: np.ndarray, classes: list[str]) -> None:
    """A heat map of each row's shares, with counts in the cells where they fit; replaced in one step."""
    from matplotlib.figure import Figure  # no pyplot: no global state, no window system

    _check(matrix, classes)
    n = len(classes)
    short = [_shorten(name) for name in classes]
    cell_in = min(0.5 if n <= 12 else 0.32 if n <= 30 else 0.2, 40 / n)
    font_pt = max(2.0, min(9.0, 72 * 0.8 * cell_in))
    labels_in = max(map(len, short)) * 0.62 * font_pt / 72
    side_in = labels_in + max(n * cell_in, 2.0) + 0.8
    figure = Figure(figsize=(side_in + 0.6, side_in), layout="constrained")
    axes = figure.add_subplot()
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    image = axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    for axis in (axes.xaxis, axes.yaxis):
        # parse_math: a class name such as "$x" is text, not a formula
        axis.set_ticks(range(n), short, fontsize=font_pt, parse_math=False)
    axes.tick_params(axis="x", labelrotation=90)
    axes.set_xlabel("predicted class")
    axes.set_ylabel("true class")
    axes.set_title(f"{int(matrix.sum()):,} clips; colour: share of the row", fontsize=10)
    if n <= 30:
        for true, predicted in zip(*matrix.nonzero(), strict=True):
            dark = shares[true, predicted] > 0.5
            text = {"ha": "center", "va": "center", "fontsize": 8, "color": "white" if dark else "black"}
            axes.text(predicted, true, f"{matrix[true, predicted]}", **text)
    figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02)
    with warnings.catch_warnings(), atomic_path(Path(path)) as draft:
        # a script the font lacks is drawn as boxes; the CSV has the names
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(draft, format="png", dpi=120)


def _check(matrix: np.ndarray, classes: list[str]) -> None:
    if matrix.shape != (len(classes), len(classes)):
        raise ValueError(f"confusion matrix {matrix.shape} for {len(classes)} classes")


def _shorten(name: str, limit: int = 28) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"
