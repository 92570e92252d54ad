"""Builds csrc/cuda/nccl.cpp as a Python module without CUDA, and a library that stands in for NCCL; loads them.

Loading happens in processes of the tests' own, before torch: torch then takes this libnccl.so.2 for its own.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path


def build_all(folder: Path) -> tuple[Path, Path]:
    """(the stand-in, as libnccl.so.2; the module nccl_emulated), in `folder`."""
    import emulated
    import nanobind

    root = Path(nanobind.include_dir()).parent
    includes = root / "include", root / "ext" / "robin_map" / "include", sysconfig.get_paths()["include"]
    unused = folder / "unused.cpp"
    unused.write_text("".join(f'extern "C" void {name}() {{ __builtin_abort(); }}\n' for name in others_of_torch()))
    sources = ["tests/emulated/nccl_standin.cpp", str(unused)]
    standin = emulated.build(sources, flags=["-Wl,-soname,libnccl.so.2"]).path
    sources = ["csrc/cuda/nccl.cpp", "csrc/bindings/nccl.cpp", "tests/emulated/nccl_module.cpp"]
    # a domain of its own: the extension, where it was built with CUDA, has types of the same names
    flags = [*(f"-I{path}" for path in includes), "-fvisibility=hidden", "-DNB_DOMAIN=nccl_emulated"]
    module = emulated.build([*sources, str(root / "src" / "nb_combined.cpp")], flags=flags).path
    made = folder / "libnccl.so.2", folder / "nccl_emulated.so"
    for source, target in zip((standin, module), made, strict=True):
        target.write_bytes(source.read_bytes())
    return made


def others_of_torch() -> list[str]:
    """Functions of NCCL that torch must find when it is loaded, and nobody calls here."""
    torch = Path(importlib.util.find_spec("torch").origin).parent / "lib" / "libtorch_cuda.so"
    command = ["nm", "-D", "--undefined-only", str(torch)]
    wanted = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    own = (Path(__file__).parent / "emulated" / "nccl_standin.cpp").read_text()
    return sorted(name for name in set(wanted) if name.startswith("nccl") and f" {name}(" not in own)


def load_standin(folder: str):
    """Returns set(name, value), which makes the stand-in misbehave."""
    library = ctypes.CDLL(f"{folder}/libnccl.so.2", ctypes.RTLD_GLOBAL)
    return lambda name, value: library.standin_set(name.encode(), value)


def keep_the_real_one_out() -> None:
    """torch, when imported, loads the wheels' libraries by their paths, whatever is there by that name."""
    plain = ctypes.CDLL

    def load(name, *args, **options):
        return None if "/nvidia/nccl/" in str(name) else plain(name, *args, **options)

    ctypes.CDLL = load


def load_module(folder: str):
    spec = importlib.util.spec_from_file_location("nccl_emulated", f"{folder}/nccl_emulated.so")
    module = importlib.util.module_from_spec(spec)
    sys.modules["nccl_emulated"] = module
    spec.loader.exec_module(module)
    return module
