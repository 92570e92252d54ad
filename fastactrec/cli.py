"""From the command line to a checked config and back to an exit code.

``python -m fastactrec.NAME ...`` and ``fastactrec NAME ...`` are the same. Exit codes: 0 done; 2 usage or bad input,
one line on stderr; 1 failure at run time; 130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
from pathlib import Path

from . import __version__
from .config import (
    DoctorConfig,
    EvaluateConfig,
    PredictConfig,
    PrepareConfig,
    ReportConfig,
    TrainConfig,
)
from .config_file import from_table, load_toml
from .errors import FastactrecError, InputError

COMMANDS = {
    "prepare": PrepareConfig,
    "train": TrainConfig,
    "evaluate": EvaluateConfig,
    "predict": PredictConfig,
    "report": ReportConfig,
    "doctor": DoctorConfig,
}


def _config_file(argv: list[str]) -> Path | None:
    """The value of --config, which must be known before the flags that override it are read."""
    for index, word in enumerate(argv):
        if word == "--config" and index + 1 < len(argv):
            return Path(argv[index + 1])
        if word.startswith("--config="):
            return Path(word.partition("=")[2])
    return None


def _recipe(name: str) -> Path:
    return Path(__file__).parent / "recipes" / f"{name}.toml"


def parse(command: str, argv: list[str]):
    """The checked config of a command line. Raises InputError; ``--help`` raises SystemExit(0)."""
    import tyro

    cls = COMMANDS[command]
    default = None
    path = _config_file(argv) if cls is TrainConfig else None
    if cls is TrainConfig and path is None and not any(re.match("--data(=|$)", word) for word in argv):
        path = _recipe("synthetic")  # the embedded default has settings of its own
    if path is not None:
        if not path.is_file() and _recipe(str(path)).is_file():
            path = _recipe(str(path))
        default = from_table(cls, load_toml(path), str(path))
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            config = tyro.cli(cls, args=argv, default=default, prog=f"fastactrec {command}", description=cls.__doc__)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise InputError(f"{_one_line(errors.getvalue())} (see 'fastactrec {command} --help')") from None
    config.check()
    return config


def _one_line(box: str) -> str:
    """tyro draws a box over several lines; keep what it says."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [re.sub(r"[│╭╮╰╯─┌┐└┘|]+", " ", line).strip() for line in text.splitlines()]
    words = " ".join(line for line in lines if line and not line.startswith(("For full helptext", "Parsing error")))
    return re.sub(r"\s+", " ", words).strip() or "wrong usage"


def run(command: str, argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        config = parse(command, argv)
        module = importlib.import_module(f"fastactrec.{command}")
        module.run(config)
    except InputError as error:
        return _fail(command, error, 2)
    except FastactrecError as error:
        return _fail(command, error, 1)
    except BrokenPipeError:  # before OSError: whoever read our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(command, FastactrecError(f"{error.filename or 'a file'}: {error.strerror or error}"), 1)
    except KeyboardInterrupt:
        print(f"fastactrec {command}: interrupted", file=sys.stderr)
        return 130
    return 0


def _fail(command: str, error: Exception, code: int) -> int:
    text = " ".join(str(error).split())
    print(f"fastactrec {command}: {text}", file=sys.stderr)
    return code


def main() -> int:
    """``fastactrec NAME ...``"""
    argv = sys.argv[1:]
    if argv[:1] == ["--version"]:
        print(f"fastactrec {__version__}")
        return 0
    if argv[:1] in (["--help"], ["-h"], []):
        print("usage: fastactrec COMMAND ...  (COMMAND --help for its options)\n")
        for name, cls in COMMANDS.items():
            print(f"  {name:10}{(cls.__doc__ or '').splitlines()[0]}")
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"fastactrec: {argv[0]!r} is not one of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return run(argv[0], argv[1:])
