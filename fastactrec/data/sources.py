"""What a user's SRC holds: the clips of every layout in one form, before anything is decoded.

Layouts: a CSV (or a folder with one), class folders, UCF101, HMDB51, Kinetics; wherever a video file may
stand, a folder of extracted frames may too (frames.py).
"""

from __future__ import annotations

import csv
import hashlib
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..errors import DecodeError, InputError
from .frames import is_flow_branch, is_frame_folder, read_frame_folder
from .splits import lists_kind, part_name, read_lists

VIDEO_SUFFIXES = {
    *(".3gp", ".avi", ".flv", ".gif", ".m2ts", ".m4v", ".mkv", ".mov", ".mp4"),
    *(".mpeg", ".mpg", ".mts", ".ogv", ".ts", ".vob", ".webm", ".wmv"),
}
_UCF_NAME = re.compile(r"v_(.+)_g(\d+)_c(\d+)")
_KINETICS_COLUMNS = ("label", "youtube_id", "time_start", "time_end")


@dataclass(frozen=True)
class ClipSource:
    """One clip to extract: all of a file or frame folder, or frames [start, end) of it."""

    id: str
    path: Path
    label: str
    group: str
    start: int = 0
    end: int | None = None
    problem: str = ""  # what rules the clip out before it is opened; for rejected.csv


@dataclass(frozen=True)
class Source:
    """A parsed SRC."""

    layout: str  # csv, classes, ucf101, hmdb51, kinetics or frames
    root: Path
    classes: list[str]
    clips: list[ClipSource]
    splits: dict[str, dict[str, str]] = field(default_factory=dict)  # name -> clip id -> train, val or test
    given_flow: bool = False  # every clip is a frame folder with its flow beside it

    def digest(self) -> str:
        """A hash that changes when a clip, its size, label, group, range or part of a split does."""
        state = hashlib.sha256()
        for clip in self.clips:
            try:
                size = clip.path.stat().st_size if clip.path.is_file() else len(os.listdir(clip.path))
            except OSError:
                size = -1
            row = (clip.id, clip.label, clip.group, clip.start, clip.end, clip.problem, size)
            state.update((repr(row) + "\n").encode())
        state.update(repr((self.classes, self.splits, self.given_flow)).encode())
        return state.hexdigest()


def find_source(src: Path, layout: str = "auto", lists: Path | None = None, classes: str = "") -> Source:
    """Parse SRC.

    Args:
        src: a file or folder.
        layout: auto, csv, classes, ucf101, hmdb51, kinetics or frames.
        lists: folder of the official lists, or the Kinetics CSV (or a folder of them).
        classes: comma-separated labels to keep; empty keeps all.
    Raises:
        InputError: nothing usable, or a file that contradicts itself; says which and what to do.
    """
    layout, lists = _detect(src, layout, lists)
    if layout == "csv":
        source = _csv_source(src)
    elif layout == "kinetics":
        source = _kinetics_source(src, lists)
    elif layout in ("ucf101", "hmdb51"):
        source = _official_source(src, lists, layout)
    else:
        source = _tree_source(src, layout)
    source = _keep_classes(source, classes)
    _require_plain_labels(source.classes)
    usable = [clip for clip in source.clips if not clip.problem]
    if not usable:
        first = f"; the first: {source.clips[0].id}: {source.clips[0].problem}" if source.clips else ""
        raise InputError(f"{src}: no clip can be used ({len(source.clips)} listed{first})")
    return replace(source, clips=_without_repeats(source.clips), given_flow=_all_have_flow(usable, source.root))


def scan(root: Path) -> list[Path]:
    """Every video and frame folder below ``root``, sorted. Folders named u, v or x, y in pairs hold flow."""
    found = []
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and not is_flow_branch(here / name))
        if is_frame_folder(files):
            found.append(here)
        else:
            found += [here / name for name in files if os.path.splitext(name)[1].lower() in VIDEO_SUFFIXES]
    return sorted(found)


def read_table(path: Path) -> tuple[list[str], list[tuple[str, dict[str, str]]]]:
    """A CSV's column names and its rows as (where, column -> text), blanks stripped. Raises InputError."""
    try:
        with open(path, newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            columns = [(name or "").strip() for name in reader.fieldnames or []]
            reader.fieldnames = columns
            rows = [(f"{path}:{reader.line_num}", {key: (row[key] or "").strip() for key in columns}) for row in reader]
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    except csv.Error as error:
        raise InputError(f"{path}: not a CSV file: {error}") from error
    return columns, rows


def _detect(src: Path, layout: str, lists: Path | None) -> tuple[str, Path | None]:
    if layout in ("ucf101", "hmdb51"):
        places = [lists] if lists else [src, *_subfolders(src)]
        lists = next((place for place in places if lists_kind(place) == layout), None)
        if lists is None:
            raise InputError(f"{places[0]}: no {layout} lists there; name their folder with --lists")
    if lists is not None and layout in ("csv", "classes", "frames"):
        raise InputError(f"--lists {lists}: not used by --layout {layout}; leave one of them out")
    if layout != "auto":
        if layout in ("classes", "frames", "ucf101", "hmdb51") and not src.is_dir():
            raise InputError(f"{src}: not a folder, which --layout {layout} needs")
        return layout, lists
    if lists is not None:
        return lists_kind(lists) or "kinetics", lists
    if src.is_file():
        if src.suffix.lower() != ".csv":
            raise InputError(f"{src}: neither a folder nor a .csv file; list videos in a CSV with path and label")
        return ("kinetics" if "youtube_id" in read_table(src)[0] else "csv"), lists
    for place in (src, *_subfolders(src)):
        if kind := lists_kind(place):
            return kind, place
    if _clip_tables(src):
        return "csv", lists
    return "auto", lists


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _clip_tables(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.csv")) if not _missing_columns(read_table(path)[0])]


def _missing_columns(columns: list[str]) -> list[str]:
    missing = [] if "path" in columns or "video" in columns else ["path (or video)"]
    return missing + ([] if "label" in columns else ["label"])


def _shown(columns: list[str]) -> str:
    """The column names for a message; a file that is no CSV may have a few kilobytes of them."""
    text = ", ".join(columns)
    return (text if text.isprintable() else "not text")[:80] or "none"


def _csv_source(src: Path) -> Source:
    if src.is_dir():
        tables = _clip_tables(src) or sorted(src.glob("*.csv"))
        if len(tables) != 1:
            names = ", ".join(path.name for path in tables) or "none"
            raise InputError(
                f"{src}: needs one CSV with the columns path (or video) and label, has {names}; name the file"
            )
        src = tables[0]
    columns, rows = read_table(src)
    if missing := _missing_columns(columns):
        raise InputError(f"{src}: no column {' and no column '.join(missing)} (columns: {_shown(columns)})")
    name_column = "path" if "path" in columns else "video"
    clips, parts = [], {}
    for where, row in rows:
        name = row[name_column]
        if not name:
            raise InputError(f"{where}: the column {name_column} is empty")
        start, end = (_frame_number(where, row, column) for column in ("start_frame", "end_frame"))
        if end is not None and end <= (start or 0):
            raise InputError(f"{where}: end_frame {end} is not above start_frame {start or 0}")
        key = name if start is None and end is None else f"{name}:{start or 0}-{'' if end is None else end}"
        path = next((p for p in (src.parent / name, src.parent / "video" / name) if p.exists()), src.parent / name)
        problem = "no label" if not row["label"] else "" if path.exists() else "no such file"
        clips.append(ClipSource(key, path, row["label"], row.get("group") or name, start or 0, end, problem))
        if word := row.get("split"):
            if part_name(word) is None:
                raise InputError(f"{where}: split {word!r} is not train, val or test")
            parts.setdefault(key, part_name(word))
    classes = sorted({clip.label for clip in clips if clip.label})
    return Source("csv", src.parent, classes, clips, {"default": parts} if parts else {})


def _frame_number(where: str, row: dict[str, str], column: str) -> int | None:
    text = row.get(column, "")
    if text and not (text.isdecimal() and len(text) <= 9):
        raise InputError(f"{where}: {column} {text[:20]!r} is not a whole number of 0 to 999,999,999")
    return int(text) if text else None


def _tree_source(src: Path, layout: str) -> Source:
    """Class folders of videos or frame folders; train, val, test folders above them are a split."""
    paths = scan(src)
    if not paths:
        raise InputError(f"{src}: no videos, no frame folders (img_00001.jpg ...) and no CSV with path and label in it")
    if src in paths:
        raise InputError(
            f"{src}: holds the frames of one clip; give the folder above, as in SRC/CLASS/CLIP/img_00001.jpg"
        )
    if layout == "auto":
        layout = "frames" if all(path.is_dir() for path in paths) else "classes"
    tops = {path.relative_to(src).parts[0] for path in paths}
    split = all(part_name(top) for top in tops) and all(len(path.relative_to(src).parts) > 2 for path in paths)
    clips, parts = [], {}
    for path in paths:
        relative = path.relative_to(src)
        folders = relative.parts[1 if split else 0 : -1]
        label = _tree_label(path, folders)
        key = relative.as_posix()
        problem = "" if label else "not in a class folder"
        clips.append(ClipSource(key, path, label, _group(path) or key, problem=problem))
        if split:
            parts[key] = part_name(relative.parts[0])
    classes = sorted({clip.label for clip in clips if clip.label})
    return Source(layout, src, classes, clips, {"default": parts} if parts else {})


def _tree_label(path: Path, folders: tuple[str, ...]) -> str:
    """The class folder; for frame folders UCF101's names come first: some archives have no class folders."""
    ucf = _UCF_NAME.fullmatch(path.name if path.is_dir() else path.stem)
    if path.is_dir():
        return ucf[1] if ucf else folders[-1] if folders else ""
    return folders[0] if folders else ucf[1] if ucf else ""


def _group(path: Path) -> str:
    """UCF101's group of a name such as v_Archery_g05_c02; empty for other names."""
    found = _UCF_NAME.fullmatch(path.name if path.is_dir() else path.stem)
    return f"v_{found[1]}_g{found[2]}" if found else ""


def _official_source(src: Path, folder: Path, kind: str) -> Source:
    """The clips of the official lists, wherever below SRC they lie; the case of names does not matter."""
    lists = read_lists(folder)
    exact, by_name = {}, {}
    for path in scan(src):
        stem = (path.name if path.is_dir() else path.stem).lower()
        exact[path.parent.name.lower(), stem] = path
        by_name[stem] = path
    clips = []
    for key in sorted(lists.labels):
        label, _, name = key.rpartition("/")
        stem = os.path.splitext(name)[0].lower()
        path = exact.get((label.lower(), stem)) or by_name.get(stem)
        group = _group(Path(name)) or key
        clips.append(
            ClipSource(key, path or src / key, lists.labels[key], group, problem="" if path else "no such file")
        )
    return Source(kind, src, lists.classes, clips, lists.splits)


def _kinetics_source(src: Path, lists: Path | None) -> Source:
    """LABEL/ID_START_END.mp4 by a CSV with label, youtube_id, time_start, time_end and mostly split."""
    if lists is None:
        lists = src
    tables = sorted(lists.glob("*.csv")) if lists.is_dir() else [lists]
    if not tables:
        raise InputError(f"{lists}: no Kinetics CSV in it; name it with --lists")
    root = src if src.is_dir() else src.parent
    files = {path.name if path.is_dir() else path.stem: path for path in scan(root)}
    clips, parts = [], {}
    for table in tables:
        columns, rows = read_table(table)
        if missing := [name for name in _KINETICS_COLUMNS if name not in columns]:
            raise InputError(f"{table}: no column {' and no column '.join(missing)} (columns: {_shown(columns)})")
        for where, row in rows:
            try:
                name = f"{row['youtube_id']}_{float(row['time_start']):06.0f}_{float(row['time_end']):06.0f}"
            except ValueError:
                raise InputError(f"{where}: time_start and time_end must be seconds") from None
            key = f"{row['label']}/{name}"
            path = files.get(name)
            problem = "no label" if not row["label"] else "" if path else "no such file"
            clips.append(ClipSource(key, path or root / key, row["label"], row["youtube_id"], problem=problem))
            if part := part_name(row.get("split", "") or table.stem):
                parts[key] = part
    classes = sorted({clip.label for clip in clips if clip.label})
    return Source("kinetics", root, classes, clips, {"default": parts} if parts else {})


def _keep_classes(source: Source, classes: str) -> Source:
    wanted = [name.strip() for name in classes.split(",") if name.strip()]
    for name in wanted:
        if name not in source.classes:
            known = ", ".join(source.classes[:12]) + (", ..." if len(source.classes) > 12 else "")
            raise InputError(f"--classes {classes}: {name!r} is not a class of {source.root} (classes: {known})")
    if not wanted:
        return source
    return replace(
        source,
        classes=[name for name in source.classes if name in wanted],
        clips=[clip for clip in source.clips if clip.label in wanted],
    )


def _without_repeats(clips: list[ClipSource]) -> list[ClipSource]:
    labels, result = {}, []
    for clip in clips:
        repeated = clip.id in labels and not clip.problem
        if repeated and clip.label != labels[clip.id]:
            raise InputError(f"{clip.id}: listed as {labels[clip.id]!r} and as {clip.label!r}; keep the right line")
        result.append(replace(clip, problem="listed twice") if repeated else clip)
        labels.setdefault(clip.id, clip.label)
    return result


def _require_plain_labels(classes: list[str]) -> None:
    """Labels end up in tables, pages and tensors' metadata: text of one line that UTF-8 can hold."""
    for name in classes:
        if not name.isprintable():
            raise InputError(
                f"label {name!r}: has characters that cannot be shown; save the list as UTF-8 and correct it"
            )


def _all_have_flow(clips: list[ClipSource], root: Path) -> bool:
    for clip in clips:
        if not clip.path.is_dir():
            return False
        try:
            if not read_frame_folder(clip.path, root).flow_x:
                return False
        except DecodeError:
            continue  # its own fault, found again when it is extracted
    return True
