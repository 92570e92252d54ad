"""Reads the files of a run folder; knows nothing of networks. The formats are those of README.md, "Files"."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ..config_file import load_toml
from ..errors import InputError
from .confusion import count_confusion, read_confusion_csv

SCORE_PREFIX = "s:"
STEP_FIELDS = ("stream", "epoch", "step", "loss")
EPOCH_FIELDS = ("stream", "epoch", "loss", "seconds")


@dataclass(frozen=True)
class StreamLog:
    """What one stream logged: dicts as in metrics.jsonl, in order of epoch (and step), repeats after a resume
    replaced by the later line."""

    steps: list[dict] = field(default_factory=list)
    epochs: list[dict] = field(default_factory=list)

    def total(self, key: str) -> float:
        """Sum of a field over the epochs, absent counts nothing."""
        return sum(epoch.get(key) or 0.0 for epoch in self.epochs)


@dataclass(frozen=True)
class Scores:
    """Per-clip results of one stream (or of the fusion)."""

    clips: list[str]
    labels: np.ndarray  # int64 [N]
    predicted: np.ndarray  # int64 [N]
    classes: list[str]

    @property
    def confusion(self) -> np.ndarray:
        return count_confusion(self.labels, self.predicted, len(self.classes))

    @property
    def hits(self) -> list[bool]:
        """Whether each clip was called right."""
        return (self.labels == self.predicted).tolist()

    @property
    def top1(self) -> float:
        return sum(self.hits) / len(self.hits)


@dataclass(frozen=True)
class RunFiles:
    """A run folder as far as it is written; a run that was not evaluated yet has no summary and no scores."""

    path: Path
    config: dict
    logs: dict[str, StreamLog]
    summary: dict | None
    scores: dict[str, Scores]
    confusion: np.ndarray | None
    classes: list[str]
    notes: list[str]

    @property
    def name(self) -> str:
        return self.path.resolve().name

    def accuracies(self) -> dict[str, dict]:
        """Stream (and "fused") -> its entry of the summary."""
        if self.summary is None:
            return {}
        rows = dict(self.summary["streams"])
        return rows | ({"fused": self.summary["fused"]} if self.summary.get("fused") else {})

    def best(self) -> str | None:
        """The result to quote: the fusion, or the only stream."""
        rows = self.accuracies()
        return "fused" if "fused" in rows else next(iter(rows), None)


def read_run(path: Path) -> RunFiles:
    """Read a run folder.

    Raises:
        InputError: config.toml or metrics.jsonl is missing, or a file cannot be read.
    """
    path = Path(path)
    config = _read_config(path / "config.toml")
    logs, notes = _read_metrics(path / "metrics.jsonl")
    summary = _read_summary(path / "summary.json")
    scores = _read_scores(path / "scores.csv")
    classes, confusion = [], None
    if (path / "confusion.csv").exists():
        classes, confusion = read_confusion_csv(path / "confusion.csv")
    for stream, result in scores.items():
        classes = result.classes
        told = (summary or {}).get("streams", {}).get(stream) or (summary or {}).get(stream)
        if told and abs(told["top1"] - result.top1) > 1e-6:
            notes.append(
                f"scores.csv gives {stream} a top-1 of {100 * result.top1:.1f} %, summary.json "
                f"{100 * told['top1']:.1f} %: they come from different evaluations"
            )
    return RunFiles(path, config, logs, summary, scores, confusion, classes, notes)


def _missing(path: Path) -> InputError:
    return InputError(f"{path}: missing; {path.parent} is not a run folder of 'fastactrec train'")


def _read_config(path: Path) -> dict:
    if not path.is_file():
        raise _missing(path)
    return load_toml(path)


def _read_metrics(path: Path) -> tuple[dict[str, StreamLog], list[str]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        raise _missing(path) from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    kinds: dict[str, dict[str, dict]] = {"step": {}, "epoch": {}}
    torn = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            torn += number < len(lines)  # a last line without its newline is being written
            continue
        if not isinstance(entry, dict):
            raise InputError(f"{path}: line {number} is not an object; remove the line")
        kind = entry.get("kind")
        if kind not in kinds:
            continue
        wanted = STEP_FIELDS if kind == "step" else EPOCH_FIELDS
        _check_fields(entry, wanted, f"{path}: line {number}")
        kinds[kind].setdefault(entry["stream"], {})[entry["epoch"], entry.get("step", 0)] = entry
    if torn and not any(kinds.values()):
        raise InputError(f"{path}: no line is JSON; restore it or train again")
    notes = [f"{torn} broken line(s) of metrics.jsonl left out (the run was killed while writing)"] if torn else []
    streams = dict.fromkeys([*kinds["step"], *kinds["epoch"]])
    logs = {
        stream: StreamLog(*([lines[key] for key in sorted(lines)] for lines in (
            kinds["step"].get(stream, {}), kinds["epoch"].get(stream, {})
        )))
        for stream in streams
    }  # fmt: skip
    return logs, notes


def _check_fields(entry: dict, wanted: tuple[str, ...], where: str) -> None:
    for name in wanted:
        right = str if name == "stream" else (int, float)
        if not isinstance(entry.get(name), right):
            raise InputError(f"{where}: {name!r} is missing or of the wrong type; remove the line")


def _read_summary(path: Path) -> dict | None:
    if not path.exists():
        return None
    cure = "run 'fastactrec evaluate' again"
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        rows = [*summary["streams"].values(), *([summary["fused"]] if summary.get("fused") else [])]
        for row in rows:
            for name in ("top1", "mean_class"):
                if not 0 <= row[name] <= 1:
                    raise ValueError(f"{name} = {row[name]} is no fraction")
        if not all(isinstance(value, (int, float)) for value in (summary.get("seconds") or {}).values()):
            raise ValueError("its seconds are no numbers")
        int(summary["clips"])
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error}); {cure}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path}: lacks a field or has another form ({error}); {cure}") from error
    return summary


def _read_scores(path: Path) -> dict[str, Scores]:
    """Stream -> Scores. Only labels and predictions are kept: the report needs no logits."""
    if not path.exists():
        return {}
    cure = "run 'fastactrec evaluate' again"
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or []
            classes = [name.removeprefix(SCORE_PREFIX) for name in columns if name.startswith(SCORE_PREFIX)]
            index = {name: position for position, name in enumerate(classes)}
            rows: dict[str, list[tuple[str, int, int]]] = {}
            for row in reader:
                pair = index[row["label"]], index[row["predicted"]]
                rows.setdefault(row["stream"], []).append((row["clip"], *pair))
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read ({error}); {cure}") from error
    except KeyError as error:
        raise InputError(f"{path}: no column or class {error}; {cure}") from error
    return {
        stream: Scores([r[0] for r in list_], np.array([r[1] for r in list_]), np.array([r[2] for r in list_]), classes)
        for stream, list_ in rows.items()
    }
