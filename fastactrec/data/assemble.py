"""The pieces of all clips (extract.py) to a finished pack (pack.py)."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..files import atomic_file
from .extract import piece, read_record
from .pack import CLIP_COLUMNS, INDEX_DTYPE, file_sha256, manifest_path, work_path
from .sources import ClipSource, Source

SHARD_BYTES = 1 << 30
_BLOCK = tarfile.BLOCKSIZE
_END = 2 * _BLOCK  # of a tar file


class _Member(NamedTuple):
    """A file of a shard."""

    name: str
    place: int  # of its bytes in the clip's piece; -1 for the JSON member
    length: int

    @property
    def room(self) -> int:
        """Bytes it takes in the tar file."""
        return _BLOCK + -(-self.length // _BLOCK) * _BLOCK


class _Sample(NamedTuple):
    """A clip of a shard: its JSON member first, then its images in the order of the index."""

    number: int  # of its piece
    about: bytes
    members: list[_Member]


def assemble(out: Path, source: Source, splits: dict[str, dict[str, str]], manifest: dict) -> dict:
    """Turn the pieces of ``source``'s clips, all of which are there, into the files of a pack.

    Pieces are deleted shard by shard, so the disk holds the images once and one shard more. After a kill,
    complete shards stay as they are. The manifest comes last.

    Args:
        splits: name -> clip id -> part.
        manifest: all but the counts and the shards.
    Returns:
        the manifest as written.
    """
    work = work_path(out)
    kept, rows, rejected = [], [], []
    for number, clip in enumerate(source.clips):
        record = read_record(work, number)
        if "reason" in record:
            rejected.append((clip.id, record["reason"]))
            continue
        kept.append((number, clip))
        sizes = [record[name] for name in ("frames", "width", "height", "fps")]
        rows.append((clip.id, clip.label, clip.group, *sizes, _relative(clip.path, source.root)))
    for folder in ("shards", "splits"):
        (out / folder).mkdir(exist_ok=True)
    shards, index = [], []
    for samples in _shards(kept, work, {name: label for label, name in enumerate(source.classes)}):
        path = out / "shards" / f"{len(shards):06d}.tar"
        index.append(_index_rows(len(shards), samples))
        shards.append(_write_shard(path, samples, work))
        for sample in samples:
            piece(work, sample.number, "jpegs").unlink(missing_ok=True)
    with atomic_file(out / "index.npy") as file:
        np.save(file, np.concatenate(index))
    _write_csv(out / "clips.csv", CLIP_COLUMNS, rows)
    _write_csv(out / "rejected.csv", ("path", "reason"), rejected)
    for name, parts in splits.items():
        listed = [(clip.id, parts[clip.id]) for _, clip in kept if clip.id in parts]
        _write_csv(out / "splits" / f"{name}.csv", ("id", "part"), listed)
    frames = sum(row[CLIP_COLUMNS.index("frames")] for row in rows)
    manifest = manifest | {"clips": len(kept), "frames": frames, "rejected": len(rejected), "shards": shards}
    with atomic_file(manifest_path(out)) as file:
        file.write((json.dumps(manifest, indent=1) + "\n").encode())
    return manifest


def _shards(kept: list[tuple[int, ClipSource]], work: Path, labels: dict[str, int]) -> Iterator[list[_Sample]]:
    """Deal the clips out, in order, to shards of SHARD_BYTES at most; a larger clip gets its own shard."""
    samples, size = [], _END
    for index, (number, clip) in enumerate(kept):
        sample = _sample(index, number, clip, labels[clip.label], read_record(work, number))
        room = sum(member.room for member in sample.members)
        if samples and size + room > SHARD_BYTES:
            yield samples
            samples, size = [], _END
        samples.append(sample)
        size += room
    yield samples


def _sample(index: int, number: int, clip: ClipSource, label: int, record: dict) -> _Sample:
    key = f"{index:08d}"
    about = {"id": clip.id, "label": label, "class": clip.label, "group": clip.group}
    about |= {name: record[name] for name in ("frames", "width", "height", "fps")}
    head = json.dumps(about).encode()
    members = [_Member(f"{key}.json", -1, len(head))]
    members += [_Member(f"{key}.rgb_{k:05d}.jpg", *place) for k, place in enumerate(record["rgb"])]
    members += [_Member(f"{key}.flow_{k // 2:05d}.{'xy'[k % 2]}.jpg", *place) for k, place in enumerate(record["flow"])]
    return _Sample(number, head, members)


def _index_rows(shard: int, samples: list[_Sample]) -> np.ndarray:
    rows, offset = [], 0
    for sample in samples:
        for member in sample.members:
            if member.place >= 0:
                rows.append((shard, member.length, offset + _BLOCK))
            offset += member.room
    return np.array(rows, dtype=INDEX_DTYPE)


def _write_shard(path: Path, samples: list[_Sample], work: Path) -> dict:
    size = _END + sum(member.room for sample in samples for member in sample.members)
    if not path.exists():  # else a start before this one finished it: it came by a rename, whole
        with atomic_file(path) as tar:
            for sample in samples:
                with open(piece(work, sample.number, "jpegs"), "rb") as images:
                    for member in sample.members:
                        images.seek(max(member.place, 0))
                        data = sample.about if member.place < 0 else images.read(member.length)
                        tar.write(_header(member))
                        tar.write(data.ljust(member.room - _BLOCK, b"\0"))
            tar.write(bytes(_END))
    return {"name": path.name, "bytes": size, "sha256": file_sha256(path)}


def _header(member: _Member) -> bytes:
    """Without owner, time or anything else that differs between runs."""
    entry = tarfile.TarInfo(member.name)
    entry.size = member.length
    return entry.tobuf(tarfile.USTAR_FORMAT)


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def _write_csv(path: Path, columns: tuple[str, ...], rows: list[tuple]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    with atomic_file(path) as file:
        file.write(text.getvalue().encode("utf-8", "surrogateescape"))
