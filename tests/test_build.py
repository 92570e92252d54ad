"""The build: what the extension says of itself, and the backend's decisions."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastactrec.ops import build_info

REPO = Path(__file__).resolve().parent.parent
BACKEND = REPO / "csrc" / "build_backend.py"

pytestmark = pytest.mark.skipif(not BACKEND.exists(), reason="the source tree is not here")


@pytest.fixture
def backend(monkeypatch):
    loader = importlib.util.spec_from_file_location("build_backend", BACKEND)
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    for name in ("FASTACTREC_CUDA", "CUDACXX"):
        monkeypatch.delenv(name, raising=False)
    return module


def test_the_extension_is_of_these_sources(backend):
    info = build_info()
    assert info["source_hash"] == backend.source_hash()
    assert info["isa"] in info["isas"].split(",")


def test_any_change_of_a_source_changes_the_hash(backend, tmp_path):
    shutil.copytree(REPO / "csrc", tmp_path / "csrc")
    shutil.copy(REPO / "CMakeLists.txt", tmp_path)
    assert backend.source_hash(tmp_path / "csrc") == backend.source_hash()
    with open(tmp_path / "csrc" / "kernels" / "adam.h", "a") as file:
        file.write("\n")
    assert backend.source_hash(tmp_path / "csrc") != backend.source_hash()


@pytest.mark.parametrize(
    ("driver", "nvcc", "setting", "wanted"),
    [
        (None, None, "auto", False),
        (580, None, "auto", True),
        (595, None, "auto", True),
        (570, None, "auto", False),
        (580, "/usr/local/bin/nvcc", "auto", False),
        (580, None, "off", False),
    ],
)
def test_compiler_wheels_only_where_the_compiler_alone_is_missing(
    backend, monkeypatch, capsys, driver, nvcc, setting, wanted
):
    monkeypatch.setenv("FASTACTREC_CUDA", setting)
    monkeypatch.setattr(backend, "driver_version", lambda: driver)
    monkeypatch.setattr(backend.shutil, "which", lambda _: nvcc)
    assert backend.wants_compiler_wheels() is wanted
    assert ("older than 580" in capsys.readouterr().err) is (driver == 570)


def test_driver_version_is_read_from_the_kernel(backend, tmp_path):
    version = tmp_path / "version"
    assert backend.driver_version(str(version)) is None
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
    assert backend.driver_version(str(version)) == 580


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not on PATH")
@pytest.mark.parametrize(
    ("setting", "words"),
    [("on", "FASTACTREC_CUDA=on, but no nvcc was found"), ("maybe", "is not one of on, off, auto")],
)
def test_cuda_that_cannot_be_had_fails_clearly(tmp_path, setting, words):
    tools = tmp_path / "bin"  # a PATH on which there is a C++ compiler and cmake, but no nvcc
    tools.mkdir()
    for tool in (
        "cmake",
        "c++",
        "g++",
        "cc",
        "gcc",
        "make",
        "ninja",
        "ld",
        "as",
        "ar",
        "ranlib",
        "nm",
        "strip",
    ):
        if path := shutil.which(tool):
            (tools / tool).symlink_to(path)
    environment = {**os.environ, "PATH": str(tools), "FASTACTREC_CUDA": setting}
    environment.pop("CUDACXX", None)
    command = [
        "cmake",
        "-S",
        str(REPO),
        "-B",
        str(tmp_path / "build"),
        f"-DPython_EXECUTABLE={sys.executable}",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert words in " ".join(done.stderr.split())
