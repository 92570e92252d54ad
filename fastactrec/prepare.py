"""``fastactrec prepare SRC --out PACK``: videos or extracted frames to a pack.

Clips are extracted by worker processes into PACK/work and assembled at the end; a run that was killed
continues where it was, and the pack does not show it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path

from . import __version__, progress
from .config import FlowConfig, PrepareConfig, parse_size
from .data.assemble import assemble
from .data.extract import Extraction, extract_clip, read_record, write_rejection
from .data.jpeg import SUBSAMPLING
from .data.pack import ALIGNMENT, AS_GIVEN, FORMAT, VERSION, manifest_path, work_path
from .data.sources import Source, find_source
from .data.splits import PARTS, group_split
from .data.video import RESIZE_NAME
from .errors import FastactrecError, InputError
from .files import write_atomically


def run(config: PrepareConfig) -> None:
    """Make the pack ``config.out``, or continue making it; leaves a finished one with the same options alone.

    Raises:
        InputError: nothing usable in SRC, or OUT holds something else. OUT is then as it was.
        FastactrecError: a worker process died; what is done stays for the next start.
    """
    source = find_source(config.src, config.layout, config.lists, config.classes)
    job = _describe(config, source)
    progress.say(f"{config.src}: {source.layout}, {len(source.clips)} clips, {len(source.classes)} classes")
    if _is_complete(config.out, job):
        shutil.rmtree(work_path(config.out), ignore_errors=True)  # left by a kill in the last moment
        progress.say(f"{config.out}: already complete")
        return
    try:
        with _work_folder(config.out, job) as work:
            start = time.monotonic()
            frames = _extract_all(config, source, work)
            seconds = time.monotonic() - start
            used = _require_survivors(config.src, source, work)
            splits = _splits(config, source, used)
            manifest = assemble(config.out, source, splits, _manifest_head(source, job))
            shutil.rmtree(work)
    except OSError as error:
        cure = "put this right and start the same command again to continue"
        raise FastactrecError(f"{error.filename or config.out}: {error.strerror}; {cure}") from error
    counts = Counter(splits["default"].get(source.clips[number].id, "in no part") for number in used)
    _report(config.out, manifest, counts, frames, seconds)


def _describe(config: PrepareConfig, source: Source) -> dict:
    """All that decides what the pack will be: equal descriptions, equal packs."""
    given = source.given_flow and config.frame_step == 1
    if source.given_flow:
        progress.say(
            f"{config.src}: flow images are there: " + ("taken as they are" if given else "not used, --frame-step")
        )
    return {
        "source": {"path": str(config.src), "layout": source.layout, "digest": source.digest()},
        "size": AS_GIVEN if given else config.size,
        "resize": f"{RESIZE_NAME}, frames only, to their flow" if given else f"{RESIZE_NAME}, before flow",
        "frame_step": config.frame_step,
        "max_frames": config.max_frames,
        "rgb": {"quality": config.quality, "subsampling": SUBSAMPLING},
        "flow": {
            "bound_px": config.bound_px,
            "rounding": "given" if given else "half-even",
            "algorithm": "given" if given else "tvl1",
            "parameters": {} if given else asdict(FlowConfig()),
            "alignment": ALIGNMENT,
            "quality": None if given else config.quality,
        },
        "split": {name: getattr(config, name) for name in ("test_fraction", "val_fraction", "seed")},
    }


def _differences(old: dict, new: dict) -> str:
    """In what two descriptions differ; the path of the source does not count (folders move)."""
    old, new = dict(_entries(old)), dict(_entries(new))
    names = [f"{key} ({old.get(key)} there, {value} now)" for key, value in new.items() if old.get(key) != value]
    return ", ".join("the source's clips" if name.startswith("source.digest") else name for name in names)


def _entries(table: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _entries(value, f"{prefix}{key}.")
        elif prefix + key != "source.path":
            yield prefix + key, value


def _read_json(path: Path, out: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InputError(f"{path}: damaged; delete {out}, or choose another --out")
    return value


def _is_complete(out: Path, job: dict) -> bool:
    path = manifest_path(out)
    if not path.is_file():
        return False
    manifest = _read_json(path, out)
    if found := _differences(manifest, job):
        raise InputError(f"{out}: holds a pack made differently: {found}; delete it, or choose another --out")
    return True


@contextlib.contextmanager
def _work_folder(out: Path, job: dict) -> Iterator[Path]:
    """OUT/work, held by this process alone; on bad input, everything made here is taken back."""
    work, versions = work_path(out), _versions()
    existed = out.exists()
    note = work / "job.json"
    if existed and not out.is_dir():
        raise InputError(f"{out}: is a file; --out needs a folder")
    if existed and not work.is_dir() and any(out.iterdir()):
        raise InputError(f"{out}: not empty and not a pack; choose another --out")
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = open(work / "lock", "w")  # noqa: SIM115 (held open as long as the work goes on)
    except OSError as error:
        raise InputError(f"{out}: cannot be written: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"{out}: another prepare is at work on it; wait for it") from None
        if note.is_file():
            old = _read_json(note, out)
            if found := _differences(old, job | {"versions": versions}):
                raise InputError(f"{out}: holds unfinished work made differently: {found}; delete it or change --out")
            progress.say(f"{out}: continuing")
        else:
            write_atomically(note, json.dumps(job | {"versions": versions}))
        try:
            yield work
        except InputError:
            shutil.rmtree(work)
            if not existed:
                out.rmdir()
            raise


def _versions() -> dict[str, str]:
    """Of everything that has a say in the bytes."""
    names = ("av", "simplejpeg")
    return {"fastactrec": __version__} | {name: importlib.metadata.version(name) for name in names}


def _extract_all(config: PrepareConfig, source: Source, work: Path) -> int:
    """Extract what is not done yet; returns the frames extracted."""
    todo = []
    for number, clip in enumerate(source.clips):
        if read_record(work, number) is None:
            if clip.problem:
                write_rejection(work, number, clip.problem)
            else:
                todo.append(number)
    workers = min(config.workers or len(os.sched_getaffinity(0)), len(todo))
    job = Extraction(
        root=source.root,
        work=work,
        size=parse_size(config.size),
        frame_step=config.frame_step,
        max_frames=config.max_frames,
        bound_px=config.bound_px,
        quality=config.quality,
        given_flow=source.given_flow and config.frame_step == 1,
        flow=FlowConfig(),
        threads=1 if workers > 1 else None,
    )
    if workers <= 1:
        records = (extract_clip(job, number, source.clips[number]) for number in todo)
        return sum(record.get("frames", 0) for record in progress.track(records, "extract", len(todo)))
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_start_worker)
    frames = 0
    try:
        futures = [pool.submit(extract_clip, job, number, source.clips[number]) for number in todo]
        for future in progress.track(as_completed(futures), "extract", len(todo)):
            frames += future.result().get("frames", 0)
    except BrokenProcessPool as error:
        raise FastactrecError(
            "a worker process was killed (out of memory?); start the same command again to continue, "
            "perhaps with fewer --workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return frames


def _start_worker() -> None:
    """A worker leaves Ctrl-C to its parent, and ends when the parent is gone, however that happened."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _require_survivors(src: Path, source: Source, work: Path) -> list[int]:
    """Numbers of the clips that were not rejected."""
    reasons = [read_record(work, number).get("reason") for number in range(len(source.clips))]
    used = [number for number, reason in enumerate(reasons) if reason is None]
    if not used:
        raise InputError(
            f"{src}: none of {len(reasons)} clips can be used; the first: {source.clips[0].id}: {reasons[0]}"
        )
    return used


def _splits(config: PrepareConfig, source: Source, used: list[int]) -> dict[str, dict[str, str]]:
    """The source's own splits, or a group-disjoint one of the clips used; one is always named default."""
    if source.splits:
        first = min(source.splits)
        return {"default": source.splits.get("default", source.splits[first])} | source.splits
    clips = [source.clips[number] for number in used]
    parts = group_split(
        [clip.label for clip in clips],
        [clip.group for clip in clips],
        config.test_fraction,
        config.val_fraction,
        config.seed,
    )
    return {"default": {clip.id: part for clip, part in zip(clips, parts, strict=True)}}


def _manifest_head(source: Source, job: dict) -> dict:
    return {"format": FORMAT, "version": VERSION, "classes": source.classes, **job, "versions": _versions()}


def _report(out: Path, manifest: dict, counts: Counter, frames: int, seconds: float) -> None:
    rate = f", {frames / seconds:.1f} frames/s" if frames else ""
    rejected = f", {manifest['rejected']} rejected (see {out / 'rejected.csv'})" if manifest["rejected"] else ""
    progress.say(f"{out}: {manifest['clips']} clips, {manifest['frames']} frames{rejected}{rate}")
    parts = ", ".join(f"{counts[part]} {part}" for part in (*PARTS, "in no part") if counts[part])
    progress.say(f"split default: {parts}" + ("" if counts["test"] else "; no test part: too few groups, or asked so"))


if __name__ == "__main__":
    from .cli import run as run_command

    sys.exit(run_command("prepare"))
