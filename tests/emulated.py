"""Builds the project's CUDA sources for the CPU (csrc/testing/cuda_emulator.h) and calls them with NumPy arrays.

``build([...])`` gives a Library whose attributes are the sources' extern "C" functions; arrays are changed in place,
as on a GPU. A sanitized library lives in a process of its own, since AddressSanitizer must be loaded before everything
else: a report ends that process and becomes an EmulatorError here.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parent.parent
CACHE = REPO / "build" / "emulated"
KEPT = 40  # libraries in it; a session makes about twenty
COMPILER = shlex.split(os.environ.get("CXX", "g++"))
# As the project compiles its CPU loops, so that results can be equal bit for bit; -O1 builds fast and keeps lines.
FLAGS = ["-std=c++17", "-DFAR_EMULATE_CUDA", "-DFAR_WITH_CUDA", "-fPIC", "-shared", "-O1", "-g", "-Wall", "-Wextra"]
FLAGS += ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
FLAGS += ["-fno-gnu-unique", "-Wl,-Bsymbolic"]  # several builds of the same source in one process stay apart
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"]
Patches = Mapping[str, Iterable[tuple[str, str]]]


class EmulatorError(Exception):
    """What device code or a sanitizer complained about."""


@cache
def why_not() -> str:
    """Why nothing can be built here; empty where it can."""
    if not (REPO / "csrc").is_dir():
        return "the source tree is not here"
    if shutil.which(COMPILER[0]) is None:
        return f"the C++ compiler {COMPILER[0]} is not on PATH"
    version = subprocess.run([*COMPILER, "--version"], capture_output=True, text=True, check=False).stdout
    if "Free Software Foundation" not in version:
        return f"{COMPILER[0]} is not GCC, which the emulator is made for"
    return "" if runtime("libasan.so").is_absolute() else f"{COMPILER[0]} has no AddressSanitizer (libasan)"


def runtime(name: str) -> Path:
    """A library of the compiler's; only its name where there is none."""
    done = subprocess.run([*COMPILER, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def build(sources: Iterable[str], *, sanitized: bool = False, patches: Patches | None = None) -> Library:
    """Compiles sources (paths in the repository; the shim among them) into one library, or finds it in the cache.

    Args:
        patches: {path in the repository: [(old, new)]} plants faults in a copy; each ``old`` must be there exactly
            once, so that a test of a fault fails when the source it was made for changes.
    """
    patched = {path: _patched(path, changes) for path, changes in (patches or {}).items()}
    flags = [*FLAGS, *(SANITIZE if sanitized else [])]
    texts = {
        path.relative_to(REPO).as_posix(): path.read_text()
        for folder in ("csrc", "tests/emulated")
        for path in sorted((REPO / folder).rglob("*"))
        if path.suffix in {".h", ".cpp", ".cu", ".cuh"}
    } | patched
    digest = hashlib.sha256(repr((COMPILER, flags, sorted(sources), sorted(texts.items()))).encode()).hexdigest()[:20]
    target = CACHE / f"{digest}.so"
    if not target.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as work:
            root = REPO
            if patched:
                root = Path(work)
                for path, text in texts.items():
                    (root / path).parent.mkdir(parents=True, exist_ok=True)
                    (root / path).write_text(text)
            made = Path(work) / "made.so"
            includes = [f"-I{root / 'csrc'}", f"-I{root / 'tests'}"]
            files = [str(root / source) for source in sources]
            command = [*COMPILER, *flags, *includes, "-x", "c++", *files, "-o", str(made), "-ldl"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise EmulatorError(f"{shlex.join(command)}\n{done.stderr}")
            made.replace(target)  # at once: another process may be building the same
        for old in sorted(CACHE.glob("*.so"), key=lambda path: path.stat().st_mtime)[:-KEPT]:
            old.unlink(missing_ok=True)
    return SanitizedLibrary(target) if sanitized else Library(target)


def _patched(path: str, changes: Iterable[tuple[str, str]]) -> str:
    text = (REPO / path).read_text()
    for old, new in changes:
        found = text.count(old)
        assert found == 1, f"{path} holds {found} times, not once, the text to be changed: {old!r}"
        text = text.replace(old, new)
    return text


def convert(value):
    """A ctypes argument: arrays as pointers (None: null), bool and int as int64, float as double."""
    if value is None:
        return ctypes.c_void_p()
    if isinstance(value, np.ndarray):
        assert value.flags.c_contiguous
        return ctypes.c_void_p(value.ctypes.data)
    return ctypes.c_double(value) if isinstance(value, float) else ctypes.c_int64(value)


class Library:
    """``library.name(*args, seed=0)`` calls ``const char* name(int64_t seed, args...)``; a text is raised."""

    def __init__(self, path: Path):
        self.path = path
        self._loaded = None

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, seed=0: self._call(name, args, seed)

    def _call(self, name: str, args: tuple, seed: int) -> None:
        if self._loaded is None:
            self._loaded = ctypes.CDLL(str(self.path))
        function = getattr(self._loaded, name)
        function.restype = ctypes.c_char_p
        if error := function(*map(convert, (seed, *args))):
            raise EmulatorError(error.decode())

    def close(self) -> None:
        """Ends the process that a sanitized library lives in."""


class SanitizedLibrary(Library):
    """The same, in a process that starts at the first call and ends at a sanitizer's report or close()."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._worker = None
        self._report = -1

    def _start(self) -> None:
        self._report = os.memfd_create("report")  # a file: a long report would block in a pipe that nobody reads
        environment = {
            **os.environ,
            # libstdc++ too, or exceptions are not intercepted
            "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libstdc++.so')}",
            "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self._worker = subprocess.Popen(
            [sys.executable, __file__, str(self.path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._report, env=environment,
        )  # fmt: skip

    def _call(self, name: str, args: tuple, seed: int) -> None:
        if self._worker is None:
            self._start()
        try:
            pickle.dump((name, args, seed), self._worker.stdin)
            self._worker.stdin.flush()
            error, results = pickle.load(self._worker.stdout)
        except (EOFError, BrokenPipeError):
            self._worker.wait()
            report = os.pread(self._report, 1 << 20, 0).decode(errors="replace")
            self.close()
            raise EmulatorError(report or "the process ended without a word") from None
        for given, result in zip(args, results, strict=True):
            if isinstance(given, np.ndarray):
                given[...] = result
        if error:
            raise EmulatorError(error)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.stdin.close()
            self._worker.stdout.close()
            self._worker.wait()
            self._worker = None
            os.close(self._report)


def _serve(path: str) -> None:
    """The process of a SanitizedLibrary: calls in from stdin, results out to stdout, until the end of stdin."""
    library = Library(Path(path))
    while True:
        try:
            name, args, seed = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        # An array of its own per argument, so that each lies between red zones; pickle may share one buffer.
        args = [arg.copy() if isinstance(arg, np.ndarray) else arg for arg in args]
        error = None
        try:
            getattr(library, name)(*args, seed=seed)
        except EmulatorError as raised:
            error = str(raised)
        pickle.dump((error, [arg if isinstance(arg, np.ndarray) else None for arg in args]), sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve(sys.argv[1])
