"""A run on disk: config, metrics, checkpoints, weights, scores, summary (README, "A run folder")."""

from __future__ import annotations

import csv
import dataclasses
import json
from pathlib import Path

import tomli_w

from ..config import TrainConfig, parse_streams
from ..config_file import from_table, load_toml, to_table
from ..errors import CheckpointError, InputError
from ..files import write_atomically
from ..models.streams import StreamNet, load_stream, read_stream

# Options that may differ between the parts of a resumed run: none of them changes the experiment.
FREE_OPTIONS = {"run", "name", "resume", "workers", "log_every", "device"}


class RunFolder:
    """Names and reads the files of one run; ``open_run`` gives it to notebooks.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: Path):
        self.path = path

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    @property
    def config_path(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    def weights_path(self, stream: str) -> Path:
        return self.path / f"{stream}.safetensors"

    def checkpoint_path(self, stream: str) -> Path:
        return self.path / "checkpoints" / f"{stream}.pt"

    @property
    def config(self) -> TrainConfig:
        """The options the run was started with. Raises InputError when the folder holds no run."""
        if not self.config_path.is_file():
            raise InputError(f"{self.path}: no run here (config.toml is missing); give the folder that train wrote")
        return from_table(TrainConfig, load_toml(self.config_path), str(self.config_path))

    @property
    def streams(self) -> tuple[str, ...]:
        """Streams with final weights, in training order."""
        return tuple(name for name in parse_streams(self.config.streams) if self.weights_path(name).is_file())

    @property
    def classes(self) -> list[str]:
        """Class names, by class index."""
        streams = self.streams
        if not streams:
            raise CheckpointError(f"{self.path}: no finished stream (*.safetensors); continue with train --resume")
        return list(read_stream(self.weights_path(streams[0]))[0].classes)

    @property
    def summary(self) -> dict:
        """The last evaluation (summary.json)."""
        path = self.path / "summary.json"
        if not path.is_file():
            raise InputError(f"{path}: no such file; run evaluate first")
        return json.loads(path.read_text())

    @property
    def scores(self) -> dict[str, dict[str, dict[str, float]]]:
        """The last evaluation (scores.csv): stream (and "fused") -> clip id -> class -> score."""
        path = self.path / "scores.csv"
        if not path.is_file():
            raise InputError(f"{path}: no such file; run evaluate first")
        found: dict[str, dict[str, dict[str, float]]] = {}
        with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
            for row in csv.DictReader(file):
                values = {name[2:]: float(value) for name, value in row.items() if name.startswith("s:")}
                found.setdefault(row["stream"], {})[row["clip"]] = values
        return found

    def model(self, stream: str) -> StreamNet:
        """The trained network of a stream, in evaluation mode, on the CPU."""
        model = load_stream(self.weights_path(stream))
        config = self.config
        spec = model.spec
        for field in ("arch", "base_width", "flow_length"):
            if getattr(spec, field) != getattr(config, field):
                raise CheckpointError(
                    f"{self.weights_path(stream)}: its {field} is {getattr(spec, field)}, "
                    f"{self.config_path} says {getattr(config, field)}: the files are not of one run"
                )
        if spec.stream != stream:
            raise CheckpointError(f"{self.weights_path(stream)}: holds a {spec.stream} stream")
        return model

    def start(self, config: TrainConfig) -> None:
        """Make the folder, or check that it continues the same run.

        Raises:
            InputError: it holds a run and --resume was not given, or was started with other options.
        """
        if self.config_path.is_file():
            if not config.resume:
                raise InputError(
                    f"{self.path}: holds a run already; add --resume to continue it or choose another --run"
                )
            old, new = to_table(self.config), to_table(config)
            changed = [k for k in sorted(old.keys() | new.keys()) if old.get(k) != new.get(k) and k not in FREE_OPTIONS]
            if changed:
                what = ", ".join(f"{key} was {old.get(key)!r}, now {new.get(key)!r}" for key in changed)
                raise InputError(f"{self.path}: cannot resume with other options ({what}); choose another --run")
            for leftover in (self.path / "checkpoints").glob(".*.partial"):  # of a kill in the midst of writing
                leftover.unlink()
            return
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path}: is a file, not a run folder; choose another --run")
        try:
            (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"{self.path}: cannot make the run folder ({error.strerror}); choose another --run"
            ) from error
        table = to_table(dataclasses.replace(config, resume=False))
        write_atomically(self.config_path, tomli_w.dumps(table))

    def log(self, record: dict) -> None:
        """Append one object to metrics.jsonl, flushed."""
        with open(self.metrics_path, "a") as file:
            file.write(json.dumps(record) + "\n")

    def records(self) -> list[dict]:
        """The objects of metrics.jsonl; a line torn by a kill is left out."""
        if not self.metrics_path.is_file():
            return []
        records = []
        lines = self.metrics_path.read_text().split("\n")
        for number, line in enumerate(lines, 1):
            try:
                if line:
                    records.append(json.loads(line))
            except json.JSONDecodeError:
                if number < len(lines) - 1:
                    raise InputError(
                        f"{self.metrics_path}: line {number} is not JSON; restore or delete the file"
                    ) from None
        return records

    def forget_after(self, stream: str, epoch: int) -> None:
        """Drop the stream's records from ``epoch`` on: a resumed run writes them again."""
        kept = [r for r in self.records() if r["stream"] != stream or r["epoch"] < epoch]
        write_atomically(self.metrics_path, "".join(json.dumps(r) + "\n" for r in kept))


def open_run(path: str | Path) -> RunFolder:
    """A run folder that ``train`` wrote, for notebooks: ``.config``, ``.classes``, ``.model(stream)``, ``.summary``.

    Raises:
        InputError: there is no run.
    """
    run = RunFolder(Path(path))
    _ = run.config
    return run
