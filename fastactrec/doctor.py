"""``doctor``: what this machine has, which kernels were built, what is wrong with a pack or data folder."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from .cli import run as run_command
from .config import DoctorConfig
from .data.splits import PARTS
from .errors import DecodeError, InputError, PackError
from .machine import cpu_model
from .progress import track
from .reporting.units import count

GIB = 1 << 30
PACKAGES = (
    *("torch", "torchvision", "numpy", "av", "simplejpeg", "numba", "nvtx", "nvidia-ml-py", "tensorboard"),
    *("safetensors", "matplotlib"),
)
OPTIONAL = ("cupy-cuda12x", "cupy-cuda13x", "webdataset")
SHOWN = 20  # problems, cases or missing files listed before "and n more"

Rows = list[tuple[str, str]]


def run(config: DoctorConfig) -> None:
    """Print what was found.

    Raises:
        InputError: the data has problems; they are printed before.
    """
    _print("Machine", machine_rows())
    _print("Kernels", kernel_rows())
    _print("Packages", package_rows())
    if config.data is not None:
        problems = check_data(config.data)
        if problems:
            _print("Problems", [("", line) for line in _some(problems)])
            raise InputError(f"{config.data}: {count(len(problems), 'problem')}, listed above")
        print("\nNo problems found.")


def _print(title: str, rows: Rows) -> None:
    print(f"\n{title}")
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        print(f"  {name:{width}}  {value}" if width else f"  {value}")


def _some(lines: list[str]) -> list[str]:
    return lines if len(lines) <= SHOWN else [*lines[:SHOWN], f"and {len(lines) - SHOWN} more"]


# The machine


def machine_rows() -> Rows:
    """Python, processor, memory, disk, compilers, driver, GPUs, NCCL."""
    import torch

    free = shutil.disk_usage(Path.cwd()).free
    rows = [
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("system", f"{platform.system()} {platform.release()}, {platform.machine()}"),
        ("processor", f"{cpu_model()}, {_cores()}"),
        ("memory", _memory()),
        ("disk free here", f"{free / GIB:.1f} GiB"),
        ("C++ compiler", _tool("c++", "g++", "clang++")),
        ("nvcc", _tool("nvcc")),
    ]
    rows += gpu_rows()
    rows.append(
        (
            "torch",
            f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}, {torch.get_num_threads()} threads",
        )
    )
    rows.append(("NCCL of torch", _nccl(torch)))
    return rows


def _cores() -> str:
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    return f"{usable} core{'s' if usable > 1 else ''}" + (f" of {total}" if usable != total else "")


def _memory() -> str:
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (int(fields[name].split()[0]) / (1 << 20) for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return "unknown"
    return f"{total:.1f} GiB, {free:.1f} GiB available"


def _tool(*names: str) -> str:
    """The first of the programs on PATH, with its version line."""
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        return f"none on PATH (looked for {', '.join(names)})"
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{path}, but it does not run: {error}"
    lines = done.stdout.strip().splitlines() or ["no version told"]
    told = next((line for line in lines if "release" in line), lines[0])
    return f"{path}: {told}"


def gpu_rows() -> Rows:
    """The NVIDIA driver and its GPUs, or why there are none."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        known = "no NVIDIA driver" if _is_missing_driver(pynvml, error) else f"driver does not answer: {error}"
        return [("NVIDIA driver", known)]
    try:
        rows = [("NVIDIA driver", f"{pynvml.nvmlSystemGetDriverVersion()}, CUDA up to {_driver_cuda(pynvml)}")]
        for index in range(pynvml.nvmlDeviceGetCount()):
            rows.append((f"GPU {index}", _gpu(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index))))
        return rows
    finally:
        pynvml.nvmlShutdown()


def _is_missing_driver(pynvml, error) -> bool:
    return error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)


def _driver_cuda(pynvml) -> str:
    version = pynvml.nvmlSystemGetCudaDriverVersion()
    return f"{version // 1000}.{version % 1000 // 10}"


def _gpu(pynvml, handle) -> str:
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    name = pynvml.nvmlDeviceGetName(handle)
    return f"{name}, sm_{major}{minor}, {memory.total / GIB:.1f} GiB, {memory.free / GIB:.1f} GiB free"


def _nccl(torch) -> str:
    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return "not in this torch"
    return ".".join(map(str, torch.cuda.nccl.version()))


def kernel_rows() -> Rows:
    """What the compiled extension holds."""
    from . import ops

    info = ops.build_info()
    cuda = (
        f"CUDA {info['cuda_version']} for {info['cuda_archs']}"
        if info["cuda"]
        else "not built: 'pip install .' with nvcc on PATH builds them"
    )
    return [
        ("extension", f"{info['version']}, source {info['source_hash'][:12]}"),
        ("built with", info["compiler"]),
        ("CPU", f"{info['isa']} in use, of {info['isas']}"),
        ("GPU", cuda),
    ]


def package_rows() -> Rows:
    def version(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    rows = [(name, version(name) or "MISSING: run 'pip install .' again") for name in PACKAGES]
    return rows + [(name, version(name) or "not installed (optional)") for name in OPTIONAL]


# Data


def check_data(path: Path) -> list[str]:
    """Describe a pack, or videos and frame folders that are not prepared yet; the problems found."""
    if (path / "manifest.json").exists():
        return check_pack(path)
    try:
        return check_source(path)
    except InputError as error:
        if path.is_dir() and (path / "shards").exists():
            raise PackError(f"{path}: a pack without manifest.json; run 'prepare' again to finish it") from error
        raise


def check_pack(path: Path) -> list[str]:
    """Print what a pack holds; the problems that its reader and the splits show."""
    from .data.pack import open_pack

    pack = open_pack(path)
    flow, frames = pack.manifest["flow"], [clip.frames for clip in pack.clips]
    rows = [
        ("clips", f"{len(pack.clips):,} of {len(pack.classes)} classes, {sum(frames):,} frames"),
        ("frames per clip", f"{min(frames)} to {max(frames)}" if frames else "none"),
        ("flow bound", f"±{pack.bound_px:g} px"),
        ("flow rounding", str(flow.get("rounding", "not told"))),
        ("flow algorithm", str(flow.get("algorithm", "not told"))),
        ("flow alignment", str(flow.get("alignment", "not told"))),
        ("rejected clips", str(_count_lines(path / "rejected.csv"))),
    ]
    _print(f"Pack {path}", rows)
    problems = pack.verify()
    for name in pack.split_names():
        try:
            parts = pack.split(name)
        except PackError:
            continue  # verify() has told it
        _print(f"Split {name}", split_rows(pack, parts))
        problems += split_problems(pack, name, parts)
    return problems


def _count_lines(csv_path: Path) -> int | str:
    """Rows of a CSV below its header."""
    import csv

    if not csv_path.exists():
        return "not told"
    with open(csv_path, newline="", encoding="utf-8", errors="replace") as file:
        return max(sum(1 for _ in csv.reader(file)) - 1, 0)


def split_rows(pack, parts: dict[str, list[int]]) -> Rows:
    """Clips per part and class, and the groups that two parts share."""
    counts = {part: Counter(pack.clips[index].label for index in parts[part]) for part in PARTS}
    rows = [("all", ", ".join(f"{part} {len(parts[part]):,}" for part in PARTS))]
    rows += [
        (name, ", ".join(f"{part} {counts[part][label]:,}" for part in PARTS))
        for label, name in enumerate(pack.classes)
    ]
    leaks = [
        f"{first} and {second}: {', '.join(_some(sorted(shared)))}"
        for first, second, shared in pack.shared_groups(parts)
    ]
    return [*rows, ("shared groups", "; ".join(leaks) or "none")]


def split_problems(pack, name: str, parts: dict[str, list[int]]) -> list[str]:
    """What ``Pack.verify`` leaves out: classes that are tested but not trained."""
    problems = []
    trained = {pack.clips[index].label for index in parts["train"]}
    for part in ("val", "test"):
        seen = {pack.clips[index].label for index in parts[part]}
        if unknown := [pack.classes[label] for label in sorted(seen - trained)]:
            problems.append(f"split {name}: {part} has classes that train lacks: {', '.join(_some(unknown))}")
    return problems


def check_source(path: Path) -> list[str]:
    """Print what ``prepare`` would find: layout, classes, splits; the problems."""
    from .data.sources import find_source

    source = find_source(path)
    counts = Counter(clip.label for clip in source.clips)
    groups: dict[str, set[str]] = {}
    for clip in source.clips:
        groups.setdefault(clip.label, set()).add(clip.group)
    broken, starts = open_clips(source)
    rows = [
        ("layout", source.layout),
        ("clips", f"{len(source.clips):,} of {count(len(source.classes), 'class', 'classes')}"),
        ("splits", ", ".join(source.splits) or "none: prepare will make one by whole groups"),
    ]
    if starts:
        numbers = (f"{number} ({count(clips, 'clip')})" for number, clips in sorted(starts.items()))
        rows.append(("first frame number", ", ".join(numbers)))
    _print(f"Data {path}", rows)
    classes = [
        (label, f"{count(counts[label], 'clip')} in {count(len(groups[label]), 'group')}") for label in source.classes
    ]
    _print("Classes", classes)
    problems = [f"{clip.path}: {clip.problem}" for clip in source.clips if clip.problem]
    return problems + broken + case_mismatches(source.classes) + _case_of_missing(source.clips)


def open_clips(source) -> tuple[list[str], Counter[int]]:
    """Open every clip: what is wrong with those that do not open, and the first numbers of frame folders.

    Only the first frame of a video is decoded; ``prepare`` decodes them all.
    """
    from .data.frames import read_frame_folder
    from .data.video import read_frames

    broken, starts = [], Counter()
    for clip in track([clip for clip in source.clips if not clip.problem], "opening clips"):
        try:
            if clip.path.is_dir():
                first = read_frame_folder(clip.path, source.root).frames[0]
                starts[int(re.findall(r"\d+", first.stem)[-1])] += 1
            elif next(read_frames(clip.path, start=clip.start, end=clip.end), None) is None:
                broken.append(f"{clip.path}: no frame {clip.start}")
        except DecodeError as error:
            broken.append(str(error))
    return broken, starts


def case_mismatches(classes: list[str]) -> list[str]:
    """Class names that differ in case or outer blanks only: one class spelled twice."""
    spellings: dict[str, list[str]] = {}
    for name in classes:
        spellings.setdefault(name.strip().casefold(), []).append(name)
    return [
        f"classes {' and '.join(map(repr, names))} differ in case only" for names in spellings.values() if names[1:]
    ]


def _case_of_missing(clips) -> list[str]:
    """A missing file whose name is there in another case."""
    found = []
    for clip in clips:
        folder = clip.path.parent
        if clip.problem and not clip.path.exists() and folder.is_dir():
            wanted = clip.path.name.casefold()
            found += [
                f"{clip.path}: the folder has it as {name!r}; correct the case"
                for name in os.listdir(folder)
                if name.casefold() == wanted
            ]
    return found


if __name__ == "__main__":
    sys.exit(run_command("doctor"))
