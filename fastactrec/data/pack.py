"""A pack: RGB and flow JPEGs of all clips in a few tar files, with an index for random access.

    manifest.json     format and version, classes, counts, how frames and flow were made, shards with their
                      checksums; written last: a folder without it is not a pack
    clips.csv         one row per clip: id, label, group, frames, width, height, fps, source
    splits/NAME.csv   id, part (train, val or test)
    rejected.csv      path, reason
    shards/000000.tar WebDataset-readable: one sample per clip, its key the clip's index with 8 digits:
                      KEY.json, KEY.rgb_00000.jpg ..., KEY.flow_00000.x.jpg, KEY.flow_00000.y.jpg ...
    index.npy         one row (shard, length, offset) per JPEG: for each clip its frames, then its flow
                      x, y, x, y ...

Flow k is the motion from frame k to frame k+1, so a clip of N frames has N - 1.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import mmap
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import simplejpeg

from ..errors import PackError
from .splits import PARTS

FORMAT, VERSION = "fastactrec-pack", 1
ALIGNMENT = "flow k is frame k -> k+1"
ROUNDINGS = ("half-even", "given")  # of flow to codes: prepare's own, or whatever another tool did
AS_GIVEN = "as given"  # manifest "size" of frames that another tool extracted
CLIP_COLUMNS = ("id", "label", "group", "frames", "width", "height", "fps", "source")
INDEX_DTYPE = np.dtype([("shard", "<u4"), ("length", "<u4"), ("offset", "<u8")])


@dataclass(frozen=True)
class Clip:
    """One clip of a pack; ``label`` is the index of its class, ``fps`` 0 where it is not known."""

    index: int
    id: str
    label: int
    group: str
    frames: int
    width: int
    height: int
    fps: float
    source: str

    @property
    def flow_frames(self) -> int:
        return max(self.frames - 1, 0)

    @property
    def jpegs(self) -> int:
        return self.frames + 2 * self.flow_frames


def open_pack(path) -> Pack:
    """Open a pack for reading. Raises PackError when it is missing, damaged, or of another format version."""
    return Pack(path)


class Pack:
    """A pack open for reading: random access from any number of threads; pickles as its path.

    ``path``, ``manifest`` (manifest.json), ``classes``, ``clips``, ``bound_px``.
    """

    def __init__(self, path) -> None:
        self.path = Path(path)
        self.manifest = _read_manifest(self.path)
        self.classes: list[str] = self.manifest["classes"]
        self.bound_px = float(self.manifest["flow"]["bound_px"])
        self.clips = self._read_clips()
        counts = np.array([clip.jpegs for clip in self.clips], dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self._index = self._open_index()
        self._shards = [self.path / "shards" / shard["name"] for shard in self.manifest["shards"]]
        for shard, entry in zip(self._shards, self.manifest["shards"], strict=True):
            self._require(shard, entry["bytes"])
        self._maps: list[mmap.mmap | None] = [None] * len(self._shards)
        self._lock = threading.Lock()

    def __reduce__(self):
        return Pack, (self.path,)

    @property
    def frame_size(self) -> str:
        """How the frames of a new video must be resized to be like the pack's, as ``config.parse_size`` reads it."""
        if self.manifest["size"] != AS_GIVEN:
            return self.manifest["size"]
        sizes = Counter((clip.width, clip.height) for clip in self.clips)
        return "{}x{}".format(*max(sizes, key=sizes.get))

    def rgb_jpegs(self, clip: int, frames: Iterable[int]) -> list[memoryview]:
        """JPEG files of some frames of clip number ``clip``, in the order asked for. Raises IndexError."""
        count = self.clips[clip].frames
        rows = [_within(frame, count, "frame", self.clips[clip]) for frame in frames]
        return self._read(self._starts[clip] + np.array(rows, dtype=np.int64))

    def rgb_frames(self, clip: int, frames: Iterable[int]) -> np.ndarray:
        """Decoded frames, uint8 [T, H, W, 3], to look at; training reads JPEGs."""
        return np.stack([simplejpeg.decode_jpeg(data) for data in self.rgb_jpegs(clip, frames)])

    def flow_jpegs(self, clip: int, start: int, length: int) -> list[memoryview]:
        """Flow JPEGs x, y, x, y ... (2 * ``length``) from flow ``start`` of a clip on. Raises IndexError."""
        entry = self.clips[clip]
        if length:
            _within(start, entry.flow_frames, "flow", entry)
            _within(start + length - 1, entry.flow_frames, "flow", entry)
        first = self._starts[clip] + entry.frames + 2 * start
        return self._read(np.arange(first, first + 2 * length))

    def split_names(self) -> list[str]:
        """The names ``split`` takes."""
        return sorted(path.stem for path in (self.path / "splits").glob("*.csv"))

    def split(self, name: str = "default") -> dict[str, list[int]]:
        """Clip numbers of train, val and test, each maybe none. Raises PackError for an unknown name."""
        path = self.path / "splits" / f"{name}.csv"
        if name not in self.split_names():
            raise PackError(f"{path}: no such split (there are: {', '.join(self.split_names()) or 'none'})")
        numbers = {clip.id: clip.index for clip in self.clips}
        parts: dict[str, list[int]] = {part: [] for part in PARTS}
        for row in _read_csv(path, ("id", "part")):
            if row["id"] not in numbers or row["part"] not in parts:
                raise PackError(f"{path}: {row['id']!r} in {row['part']!r}: no such clip or part; correct this line")
            parts[row["part"]].append(numbers[row["id"]])
        return parts

    def verify(self) -> list[str]:
        """All that is wrong with the pack, in words: checksums, ends of JPEG files, splits. Reads it all."""
        problems = []
        for shard, entry in zip(self._shards, self.manifest["shards"], strict=True):
            if file_sha256(shard) != entry["sha256"]:
                problems.append(f"{shard}: its SHA-256 is not the manifest's; prepare the pack again")
        for clip in self.clips:
            rows = np.arange(self._starts[clip.index], self._starts[clip.index + 1])
            if bad := sum(not _is_jpeg(data) for data in self._read(rows)):
                problems.append(f"{self.path}: {clip.id}: {bad} of {len(rows)} images are not whole JPEG files")
        for name in self.split_names():
            try:
                parts = self.split(name)
            except PackError as error:
                problems.append(str(error))
                continue
            listed = [number for part in PARTS for number in parts[part]]
            if len(set(listed)) != len(listed):
                problems.append(f"{self.path}: split {name} lists a clip twice")
            for first, second, shared in self.shared_groups(parts):
                problems.append(f"{self.path}: split {name}: {len(shared)} groups are in {first} and in {second}")
        return problems

    def shared_groups(self, parts: dict[str, list[int]]) -> list[tuple[str, str, set[str]]]:
        """(part, part, groups in both) for the pairs of a split's parts that share any, which they should not."""
        groups = {part: {self.clips[number].group for number in parts[part]} for part in PARTS}
        pairs = itertools.combinations(PARTS, 2)
        return [(first, second, both) for first, second in pairs if (both := groups[first] & groups[second])]

    def _read(self, rows: np.ndarray) -> list[memoryview]:
        entries = self._index[rows]
        views = []
        for shard, length, offset in entries.tolist():
            view = memoryview(self._map(shard))[offset : offset + length]
            if len(view) != length:
                raise PackError(f"{self._shards[shard]}: ends inside an image; prepare the pack again")
            views.append(view)
        return views

    def _map(self, shard: int) -> mmap.mmap:
        if shard >= len(self._shards):
            raise PackError(
                f"{self.path / 'index.npy'}: names shard {shard} of {len(self._shards)}; prepare the pack again"
            )
        with self._lock:
            if self._maps[shard] is None:
                with open(self._shards[shard], "rb") as file:
                    self._maps[shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return self._maps[shard]

    def _read_clips(self) -> list[Clip]:
        numbers = {name: number for number, name in enumerate(self.classes)}
        path = self.path / "clips.csv"
        clips = []
        for row in _read_csv(path, CLIP_COLUMNS):
            try:
                sizes = [int(row[column]) for column in ("frames", "width", "height")]
                label, fps = numbers[row["label"]], float(row["fps"])
            except (KeyError, ValueError) as error:
                raise PackError(
                    f"{path}: the row of {row['id']!r} is damaged ({error}); prepare the pack again"
                ) from error
            clips.append(Clip(len(clips), row["id"], label, row["group"], *sizes, fps, row["source"]))
        if len(clips) != self.manifest["clips"]:
            raise PackError(
                f"{path}: {len(clips)} clips, manifest.json says {self.manifest['clips']}; prepare it again"
            )
        return clips

    def _open_index(self) -> np.ndarray:
        path = self.path / "index.npy"
        try:
            index = np.load(path, mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise PackError(f"{path}: missing or damaged ({error}); prepare the pack again") from error
        if index.dtype != INDEX_DTYPE or index.shape != (self._starts[-1],):
            raise PackError(f"{path}: does not fit clips.csv ({index.shape} rows, {self._starts[-1]} images)")
        return index

    def _require(self, path: Path, size: int) -> None:
        try:
            found = path.stat().st_size
        except OSError as error:
            raise PackError(f"{path}: {error.strerror}; copy the pack whole, or prepare it again") from error
        if found != size:
            raise PackError(f"{path}: {found} bytes, should be {size}; copy the pack again, or prepare it again")


def manifest_path(pack: Path) -> Path:
    return pack / "manifest.json"


def work_path(pack: Path) -> Path:
    """Where the pieces of a pack that is being made lie."""
    return pack / "work"


def file_sha256(path: Path) -> str:
    state = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            state.update(block)
    return state.hexdigest()


def _read_manifest(folder: Path) -> dict:
    path = manifest_path(folder)
    if not path.is_file():
        if work_path(folder).is_dir():
            raise PackError(f"{folder}: not finished; run the same prepare command again to continue it")
        what = "not a pack (no manifest.json)" if folder.exists() else "no such pack"
        raise PackError(f"{folder}: {what}; make one with 'fastactrec prepare SRC --out PACK'")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        name, version = manifest["format"], manifest["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PackError(f"{path}: damaged ({error}); prepare the pack again") from error
    if (name, version) != (FORMAT, VERSION):
        raise PackError(
            f"{path}: format {name!r} version {version!r}, but {FORMAT!r} version {VERSION} is read here; "
            "prepare the pack again, or install the fastactrec that wrote it"
        )
    if not _is_known(manifest):
        raise PackError(f"{path}: an entry is missing or not what this version reads; prepare the pack again")
    return manifest


def _is_known(manifest: dict) -> bool:
    """Whether everything that readers rely on is there, of the right kind, and of a meaning they know."""
    try:
        flow, shards = manifest["flow"], manifest["shards"]
        return (
            all(isinstance(name, str) for name in manifest["classes"])
            and all(isinstance(manifest[key], int) for key in ("clips", "frame_step"))
            and isinstance(manifest["size"], str)
            and 0 < float(flow["bound_px"]) < float("inf")
            and flow["alignment"] == ALIGNMENT
            and flow["rounding"] in ROUNDINGS
            and all(Path(shard["name"]).name == shard["name"] for shard in shards)
            and all(isinstance(shard["bytes"], int) and isinstance(shard["sha256"], str) for shard in shards)
        )
    except (KeyError, TypeError, ValueError):
        return False


def _read_csv(path: Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    try:
        with open(path, newline="", encoding="utf-8", errors="surrogateescape") as file:
            reader = csv.DictReader(file)
            if missing := set(columns) - set(reader.fieldnames or ()):
                raise PackError(f"{path}: no column {', '.join(sorted(missing))}; prepare the pack again")
            rows = list(reader)
    except OSError as error:
        raise PackError(f"{path}: {error.strerror}; prepare the pack again") from error
    except csv.Error as error:
        raise PackError(f"{path}: damaged ({error}); prepare the pack again") from error
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise PackError(f"{path}: row {number} has another number of columns than the first; prepare it again")
    return rows


def _is_jpeg(data: memoryview) -> bool:
    """Begins and ends as a JPEG file does (other tools' files may carry a few bytes more)."""
    return data[:3] == b"\xff\xd8\xff" and b"\xff\xd9" in bytes(data[-64:])


def _within(number: int, count: int, what: str, clip: Clip) -> int:
    if not 0 <= number < count:
        raise IndexError(f"{clip.id}: {what} {number} of {count}")
    return number
