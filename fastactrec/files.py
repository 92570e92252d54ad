"""Writing files so that a kill or a power cut leaves the old one or the new one, never half of one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A temporary name beside ``path`` to write to; on success it is synced and takes ``path``'s place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """``atomic_path``, opened for writing bytes."""
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        yield file


def write_atomically(path: Path, data: bytes | str) -> None:
    """Replace ``path`` by ``data`` (text as UTF-8, undecodable file names kept)."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data.encode("utf-8", "surrogateescape") if isinstance(data, str) else data)


def sync_folder(folder: Path) -> None:
    """Make renames inside ``folder`` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
