"""Checkpoints for exact resume: model, optimizer, averager and position, written atomically, read without pickle."""

from __future__ import annotations

import pickle
import shutil
import warnings
from pathlib import Path

import torch

from ..errors import CheckpointError, FastactrecError
from ..files import atomic_path

_FORMAT = {"format": "fastactrec-checkpoint", "version": 1}


def save_checkpoint(path: Path, state: dict) -> None:
    """Write tensors, numbers, text, lists and dicts of them.

    Raises:
        FastactrecError: the file could not be written; the checkpoint before it is intact.
    """
    try:
        with atomic_path(path) as temporary:
            torch.save({**_FORMAT, **state}, temporary)
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
        free_mib = shutil.disk_usage(path.parent).free >> 20
        raise FastactrecError(
            f"{path}: not written, {free_mib} MiB free; make room and add --resume (the checkpoint before is intact)"
        ) from error


def load_checkpoint(path: Path, spec: dict) -> dict:
    """Read a checkpoint of the network that ``spec`` describes.

    Raises:
        CheckpointError: damaged, of another format version, or of another network.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice is to trust the file: never
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise damaged(path) from error
    if not isinstance(state, dict) or {key: state.get(key) for key in _FORMAT} != _FORMAT:
        raise CheckpointError(
            f"{path}: not a fastactrec checkpoint of version {_FORMAT['version']}; choose another --run"
        )
    theirs = state.get("spec")
    if not isinstance(theirs, dict) or not theirs.keys() >= spec.keys():
        raise damaged(path)
    for key, value in spec.items():
        if theirs[key] != value:
            raise CheckpointError(
                f"{path}: of another network ({key} {theirs[key]!r}, not {value!r}); choose another --run"
            )
    return state


def damaged(path: Path) -> CheckpointError:
    """What to say of a checkpoint whose content does not fit together."""
    return CheckpointError(f"{path}: damaged, or not a checkpoint; delete it to start the stream again")
