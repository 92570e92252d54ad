"""The PEP 517 build backend: scikit-build-core, plus NVIDIA's compiler wheels where they are all that is missing.

Where an NVIDIA driver is present but no nvcc, pip is told to fetch the CUDA 13 compiler into the build
environment, so that ``pip install .`` alone gives the CUDA build. Everything else is scikit-build-core's.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from pathlib import Path

CUDA_WHEELS = ["nvidia-cuda-nvcc>=13,<14", "nvidia-cuda-crt>=13,<14", "nvidia-cuda-runtime>=13,<14",
               "nvidia-cuda-cccl>=13,<14", "nvidia-nvvm>=13,<14"]  # fmt: skip
MIN_DRIVER = 580  # the first driver series that runs CUDA 13 programs


def driver_version(path: str = "/proc/driver/nvidia/version") -> int | None:
    """Major version of the loaded NVIDIA kernel driver, or None where there is none."""
    try:
        text = Path(path).read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d{3,})\.\d+", text)
    return int(found.group(1)) if found else None


def wants_compiler_wheels() -> bool:
    if os.environ.get("FASTACTREC_CUDA", "auto").lower() == "off":
        return False
    if shutil.which("nvcc") or os.environ.get("CUDACXX"):
        return False
    driver = driver_version()
    if driver is None:
        return False
    if driver < MIN_DRIVER:
        print(
            f"fastactrec: no nvcc, and the NVIDIA driver {driver} is older than {MIN_DRIVER}: building for the CPU. "
            "For the CUDA build install a CUDA toolkit (12.8 or newer) or a newer driver.",
            file=sys.stderr,
        )
        return False
    return True


def use_compiler_wheels() -> None:
    """Point CMake at the nvcc that pip put into the build environment (its libraries lie in lib, not lib64)."""
    for root in map(Path, sys.path):
        home = root / "nvidia" / "cu13"
        if (home / "bin" / "nvcc").exists():
            os.environ["CUDACXX"] = str(home / "bin" / "nvcc")
            os.environ["CUDAToolkit_ROOT"] = str(home)  # noqa: SIM112, CMake spells it so
            os.environ["LIBRARY_PATH"] = os.pathsep.join(
                filter(None, [str(home / "lib"), os.environ.get("LIBRARY_PATH")])
            )
            os.environ["NVCC_APPEND_FLAGS"] = f"-L{home / 'lib'}"
            return


def source_hash(csrc: Path = Path(__file__).parent) -> str:
    """Short hash of everything the extension is built from; the extension carries it."""
    digest = hashlib.sha256()
    for path in sorted([csrc.parent / "CMakeLists.txt", *csrc.rglob("*")]):
        if path.suffix in {".h", ".cpp", ".cu", ".cuh", ".txt"}:
            digest.update(path.relative_to(csrc.parent).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def get_requires_for_build_wheel(config_settings=None):
    from scikit_build_core import build

    return build.get_requires_for_build_wheel(config_settings) + (CUDA_WHEELS if wants_compiler_wheels() else [])


def get_requires_for_build_editable(config_settings=None):
    from scikit_build_core import build

    return build.get_requires_for_build_editable(config_settings) + (CUDA_WHEELS if wants_compiler_wheels() else [])


def get_requires_for_build_sdist(config_settings=None):
    from scikit_build_core import build

    return build.get_requires_for_build_sdist(config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    from scikit_build_core import build

    if wants_compiler_wheels():
        use_compiler_wheels()
    return build.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    from scikit_build_core import build

    if wants_compiler_wheels():
        use_compiler_wheels()
    return build.build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory, config_settings=None):
    from scikit_build_core import build

    return build.build_sdist(sdist_directory, config_settings)


if __name__ == "__main__" and sys.argv[1:] == ["--source-hash"]:
    print(source_hash())
