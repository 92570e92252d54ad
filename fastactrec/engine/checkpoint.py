"""Checkpoints for exact resume: model, optimizer, averager and position, written atomically, read without pickle."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

from ..errors import CheckpointError
from ..files import atomic_path

_FORMAT = {"format": "fastactrec-checkpoint", "version": 1}


def save_checkpoint(path: Path, state: dict) -> None:
    """Write tensors, numbers, text, lists and dicts of them."""
    with atomic_path(path) as temporary:
        torch.save({**_FORMAT, **state}, temporary)


def load_checkpoint(path: Path, spec: dict) -> dict:
    """Read a checkpoint of the network that ``spec`` describes.

    Raises:
        CheckpointError: damaged, of another format version, or of another network.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path}: not a readable checkpoint ({error}); delete it to start the stream again"
        ) from error
    if not isinstance(state, dict) or {key: state.get(key) for key in _FORMAT} != _FORMAT:
        raise CheckpointError(
            f"{path}: not a fastactrec checkpoint of version {_FORMAT['version']}; choose another --run"
        )
    theirs = state.get("spec", {})
    for key, value in spec.items():
        if theirs.get(key) != value:
            raise CheckpointError(
                f"{path}: of another network ({key} {theirs.get(key)!r}, not {value!r}); choose another --run"
            )
    return state
