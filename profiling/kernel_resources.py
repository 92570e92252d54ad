"""Registers, spills and shared memory of every CUDA kernel, as ptxas reports them; needs nvcc, but no GPU.

python profiling/kernel_resources.py prints a Markdown table. tests/test_cuda_static.py asserts bounds.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parent.parent
ARCHS = (80, 90, 100)
FLAGS = ["-std=c++17", "-O3", "-fmad=false", "-Xptxas", "-v"]  # as CMakeLists.txt compiles them


class Kernel(NamedTuple):
    """What one kernel takes on one architecture; registers per thread, spills in bytes per thread."""

    source: str
    name: str  # without namespaces and arguments
    arch: int
    registers: int
    spill_stores: int
    spill_loads: int
    shared_bytes: int  # static, per block
    ptx: str


def nvcc() -> str | None:
    return os.environ.get("CUDACXX") or shutil.which("nvcc")


def sources() -> list[Path]:
    return sorted((REPO / "csrc" / "cuda").glob("*.cu"))


def measure(source: Path, archs: tuple[int, ...] = ARCHS) -> list[Kernel]:
    """Compiles one .cu for all architectures at once and reads ptxas' report and the PTX."""
    with tempfile.TemporaryDirectory() as folder:
        codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
        command = [nvcc(), *FLAGS, *codes, "-I", str(REPO / "csrc"), "--keep", "--keep-dir", folder, "-c", str(source)]
        command += ["-o", f"{folder}/{source.stem}.o"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")
        ptx = {}
        for arch in archs:  # nvcc leaves the architecture out of the name where there is only one
            names = [f"{source.stem}.compute_{arch}.ptx", f"{source.stem}.ptx"]
            ptx[arch] = next(path for name in names if (path := Path(folder) / name).exists()).read_text()
    return parse(source.name, done.stdout + done.stderr, ptx)


def parse(source: str, report: str, ptx: dict[int, str]) -> list[Kernel]:
    """The kernels of a report of ``ptxas -v`` and of the PTX per architecture."""
    found = []
    for part in report.split("Compiling entry function ")[1:]:
        symbol, arch = re.match(r"'(\w+)' for 'sm_(\d+)a?'", part).groups()
        stores, loads = map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part).groups())
        registers = int(re.search(r"Used (\d+) registers", part).group(1))
        shared = re.search(r"(\d+) bytes smem", part)
        shared_bytes = int(shared.group(1)) if shared else 0
        body = entry_of(ptx.get(int(arch), ""), symbol)
        found.append(Kernel(source, short_name(symbol), int(arch), registers, stores, loads, shared_bytes, body))
    return sorted(found)


def entry_of(ptx: str, symbol: str) -> str:
    """The text of one kernel in a PTX file: from its name to the brace that ends it."""
    start = ptx.find(f".entry {symbol}(")
    return "" if start < 0 else ptx[start : ptx.find("\n}", start)]


def short_name(symbol: str) -> str:
    filters = (shutil.which("cu++filt"), shutil.which("c++filt"))
    if not (demangle := next(filter(None, filters), None)):
        return symbol
    full = subprocess.run([demangle, symbol], capture_output=True, text=True, check=True).stdout.strip()
    full = full.replace("(anonymous namespace)", "").replace("(bool)0", "false").replace("(bool)1", "true")
    full = re.sub(r"\([\w:]+\)(?=\d)", "", full)  # casts of other template arguments
    return re.search(r"\w+(<.*>)?$", full.partition("(")[0]).group()


def measure_all(at_once: int = 2) -> list[Kernel]:
    with ThreadPoolExecutor(at_once) as pool:
        return [kernel for kernels in pool.map(measure, sources()) for kernel in kernels]


def table(kernels: list[Kernel]) -> str:
    """One row per kernel; registers per architecture, then the worst spills and shared memory."""
    archs = sorted({kernel.arch for kernel in kernels})
    head = ["kernel", "source", *(f"registers sm_{arch}" for arch in archs), "spilled bytes", "shared bytes"]
    lines = [head, ["---"] * 2 + ["---:"] * (len(archs) + 2)]
    for source, name in sorted({(kernel.source, kernel.name) for kernel in kernels}):
        rows = {kernel.arch: kernel for kernel in kernels if (kernel.source, kernel.name) == (source, name)}
        spilled = max(kernel.spill_stores + kernel.spill_loads for kernel in rows.values())
        shared = max(kernel.shared_bytes for kernel in rows.values())
        lines.append([f"`{name}`", source, *(str(rows[arch].registers) for arch in archs), str(spilled), str(shared)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> int:
    if nvcc() is None:
        print("skipped: nvcc is not on PATH, and CUDACXX is not set")
        return 0
    print(table(measure_all()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
