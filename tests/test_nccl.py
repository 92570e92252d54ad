"""The calls that csrc/cuda/nccl.cpp makes, recorded by a stand-in for NCCL; its declarations against nccl.h."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import emulated
import nccl_standin
import pytest
import torch

pytest.importorskip("nanobind", reason="nanobind, which builds the module under test, is not installed")
if reason := emulated.why_not():
    pytest.skip(reason, allow_module_level=True)

TESTS = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nccl")
    nccl_standin.build_all(folder)
    return folder


@pytest.fixture
def run(libraries, tmp_path):
    """``run(scenario)`` -> (lines printed, calls recorded)"""

    def call(scenario):
        log = tmp_path / "calls"
        environment = {
            **os.environ,
            "FAR_NCCL_LOG": str(log),
            "FAR_NCCL_FOLDER": str(tmp_path),
            "PYTHONPATH": str(TESTS),
        }
        command = [sys.executable, str(TESTS / "nccl_calls.py"), scenario, str(libraries)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines(), log.read_text().splitlines() if log.exists() else []

    return call


def names(calls):
    return [call.split()[0] for call in calls]


def test_the_sequence_of_calls(run):
    lines, calls = run("sequence")
    assert "lies on device 0 of DLPack's type 1, the communicator's is device 3" in lines[0]
    assert all("has been closed" in line for line in lines[1:])
    first = calls.index("CommInitRankConfig rank=0 world=1 blocking=0 size=48 version=21900 tail=x")
    assert calls[first - 3] == "GetUniqueId"
    assert calls[first - 2] == "cudaStreamCreate flags=1 priority=-5 device=3"
    # The second communicator: what was queued on stream 7 comes before, what comes after waits for the result.
    start = calls.index("CommRegister bytes=20")
    event = {name: re.search(r"event=(\d+)", calls[start + i])[1] for name, i in (("done", 1), ("before", 2))}
    assert calls[start + 1 : start + 7] == [
        f"cudaEventCreate event={event['done']} flags=2",
        f"cudaEventRecord event={event['before']} stream=7",
        f"cudaStreamWaitEvent stream=own event={event['before']}",
        "AllReduce count=5 type=7 op=0 inplace=1",
        f"cudaEventRecord event={event['done']} stream=own",
        f"cudaStreamWaitEvent stream=0 event={event['done']}",
    ]
    group = calls.index("GroupStart")
    assert calls[group : group + 4] == [
        "GroupStart",
        "Send count=6 type=1 peer=0",
        "Recv count=6 type=1 peer=0",
        "GroupEnd",
    ]
    # A handle that is dropped makes its stream wait before the memory can be used again.
    dropped = len(calls) - calls[::-1].index("AllReduce count=4 type=7 op=0 inplace=1")
    done = re.search(r"event=(\d+)", calls[dropped])[1]
    assert calls[dropped : dropped + 2] == [
        f"cudaEventRecord event={done} stream=own",
        f"cudaStreamWaitEvent stream=7 event={done}",
    ]
    # close(): registrations, then goodbye, once.
    assert names(calls).count("CommDeregister") == 1
    own = [name for name in names(calls[dropped:]) if name.startswith("Comm")]
    assert own[:3] == ["CommDeregister", "CommFinalize", "CommDestroy"]
    assert "CommAbort" not in names(calls)
    assert names(calls).count("CommFinalize") == names(calls).count("CommDestroy") == 2


def test_nobody_comes(run):
    lines, calls = run("never")
    assert lines == [
        f"NcclError rank {who}: joining the communicator: not all ranks have come within 0.3 s"
        for who in ("0 of 1", "1 of 2")
    ]
    assert names(calls).count("CommAbort") == 2
    assert names(calls).count("cudaStreamDestroy") == 2


def test_an_error_of_another_rank_names_what_was_on_its_way(run):
    lines, calls = run("async_error")
    reason = "remote process exited: the stand-in was told so"
    assert lines[:4] == [f"NcclError rank 0 of 1: bucket 3 of step 120: {reason}"] * 4
    assert lines[4:] == [f"NcclError rank 0 of 1: round 2: between operations: {reason}"]
    assert names(calls).count("CommAbort") == 2
    assert "CommFinalize" not in names(calls)


def test_somebody_watches(run):
    lines, calls = run("watched")
    assert lines == [
        "NcclError rank 0 of 1: between operations: remote process exited: the stand-in was told so",
        "NcclError rank 0 of 1: bucket 3 of step 120: not finished within 0.5 s, a rank may be gone or behind",
    ]
    assert names(calls).count("CommAbort") == 2


def test_calls_that_fail(run):
    lines, calls = run("failed_calls")
    wheres = "joining the communicator", "bucket 3 of step 120", "all-to-all 1"
    assert lines == [f"NcclError rank 0 of 1: {where}: broken: the stand-in was told so" for where in wheres]
    assert names(calls).count("CommAbort") == 2  # the first has no communicator yet
    group = names(calls).index("GroupStart")
    assert names(calls)[group : group + 4] == ["GroupStart", "Send", "GroupEnd", "CommAbort"]


def test_bad_input_is_refused_before_anything_is_called(run):
    lines, calls = run("refused")
    expected = [
        "RuntimeError nccl: arrays are uint8",
        "TypeError",
        "TypeError",
        'RuntimeError nccl: op is "sum" or "max", not "mean"',
        "RuntimeError nccl: what is sent and what is received differ in type",
        "RuntimeError nccl: received has 4 elements, not 3",
        "RuntimeError nccl: sent has 3 elements, not 4",
        "RuntimeError nccl: 2 sizes for 1 ranks",
        "RuntimeError nccl: sent has 4 elements, not 3",
        "RuntimeError nccl: rank 1 of 1",
        "RuntimeError nccl: a timeout of 0 s",
        "RuntimeError cudaSetDevice(device): invalid device",
        "RuntimeError nccl: an id of 5 bytes, not 128",
    ]
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(start)
    assert not {"AllReduce", "AllGather", "ReduceScatter", "GroupStart"} & set(names(calls))


def test_leaving_never_hangs(run):
    lines, calls = run("no_farewell")
    assert lines == ["NcclError rank 0 of 1: closing the communicator: not all ranks have come within 0.3 s"]
    ends = [name for name in names(calls) if name in ("CommFinalize", "CommAbort", "CommDestroy")]
    assert ends == ["CommFinalize", "CommAbort"] * 2


def test_which_library(run, libraries):
    lines, _ = run("old")
    assert "libnccl.so.2 is NCCL 2.18.5: 2.19.0 or newer is needed" in lines[0]
    assert lines[2] == f"('{libraries}/libnccl.so.2', 21900)"
    lines, _ = run("twice")
    for line in lines:
        assert "two NCCL libraries are loaded" in line
        assert f"{libraries}/libnccl.so.2" in line
        assert f"{libraries}/second/libnccl.so.2" in line
    lines, _ = run("missing")
    assert lines[0].startswith("RuntimeError NCCL is not loaded")
    assert lines[1] == "fine"


def test_nvidias_library_without_a_gpu(run, monkeypatch):
    """Version and ids need no GPU, and the error of joining without one is NCCL's own."""
    if not torch.distributed.is_nccl_available():
        pytest.skip("torch has no NCCL here")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    lines, _ = run("real")
    path, version = lines[0].split()
    assert path.rpartition("/")[2].startswith("libnccl.so")
    assert int(version) >= 21900
    assert lines[1] == "128 True"
    assert lines[2].startswith("NcclError rank 0 of 1: joining the communicator: unhandled cuda error")


def test_the_declarations_are_nvidias(tmp_path):
    found = [root / "nvidia" / "nccl" / "include" for root in map(Path, sys.path)]
    found = [folder for folder in found if (folder / "nccl.h").is_file()]
    if not found:
        pytest.skip("nccl.h of NVIDIA's wheel is not here")
    # All that nccl.h wants of CUDA.
    (tmp_path / "cuda_runtime.h").write_text("#include <stddef.h>\ntypedef struct CUstream_st* cudaStream_t;\n")
    (tmp_path / "cuda_fp16.h").touch()
    program = tmp_path / "program"
    includes = [f"-I{path}" for path in (tmp_path, found[0], TESTS.parent / "csrc")]
    source = str(TESTS / "emulated" / "nccl_header.cpp")
    command = [*emulated.COMPILER, "-std=c++17", *includes, source, "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert subprocess.run([program], check=False).returncode == 0
