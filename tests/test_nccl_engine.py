"""NcclEngine in two real processes, over a stand-in for NCCL that carries bytes: what it gives is what gloo gives."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import emulated
import nccl_standin
import pytest
import torch

import fastactrec as far
from fastactrec.optim.nccl_engine import NcclEngine

pytest.importorskip("nanobind", reason="nanobind, which builds the module under test, is not installed")
if reason := emulated.why_not():
    pytest.skip(reason, allow_module_level=True)

TESTS = Path(__file__).resolve().parent


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nccl")
    nccl_standin.build_all(folder)
    return folder


def run(libraries, scenario):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "FAR_PORT": str(port), "FAR_NCCL_FOLDER": str(libraries), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, str(TESTS / "nccl_ranks.py"), scenario, str(libraries)]
    ranks = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    files = [libraries / f"{scenario}.{rank}.pt" for rank in (0, 1)]
    assert files[0].exists(), errors
    return [torch.load(file) if file.exists() else None for file in files]


def test_averaging_is_byte_for_byte_that_over_gloo(libraries):
    results = run(libraries, "averaging")
    for name in ("plain", "int8", "delay"):
        (mine, my_bytes), (_, gloos_bytes) = results[0][0][name]
        assert my_bytes == gloos_bytes > 0
        for rank in results:
            for value, other, first in zip(rank[0][name][0][0], rank[0][name][1][0], mine, strict=True):
                assert torch.equal(value, other)
                assert torch.equal(value, first)
    for value, other in zip(results[1][1][0], results[0][0]["plain"][0][0], strict=True):
        assert torch.equal(value, other)


def test_collectives(libraries):
    results = run(libraries, "collectives")
    for rank, result in enumerate(results):
        for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8):
            assert torch.equal(result[dtype, "sum"], (2 * torch.arange(6) + 10).to(dtype).view(2, 3))
            assert torch.equal(result[dtype, "max"], (torch.arange(6) + 10).to(dtype).view(2, 3))
        assert result["scatter"].tolist() == [[1, 3, 5], [7, 9, 11]][rank]
        assert result["gather"].tolist() == [[1, 1, 1], [2, 2, 2]]
        assert result["exchange"].tolist() == [[[0, 1, 2], [10, 11, 12]], [[3], [13]]][rank]
        assert result["none"].tolist() == [[[], []], [[0, 1], [10, 11]]][rank]
        reduced = 2 * 6 * (4 + 8 + 8 + 1)  # 2 (n - 1) / n of each array, sum and max
        assert result["sent"] == reduced + 24 + 3 + [1, 3][rank] + [2, 0][rank]


def test_a_rank_that_does_not_come_is_an_error_within_the_timeout(libraries):
    (kind, words), (other_kind, other_words) = run(libraries, "late")
    assert kind == other_kind == "AveragingError"
    assert "rank 0 of 2: joining the communicator: not all ranks have come within 1 s" in words
    assert "rank 1 of 2: joining the communicator: broken: the stand-in was told so" in other_words


def test_all_ranks_hear_that_rank_0_cannot_use_nccl(libraries):
    (kind, words), (other_kind, other_words) = run(libraries, "no_library")
    assert kind == "FastactrecError"
    assert "is NCCL 2.18.5: 2.19.0 or newer is needed" in words
    assert other_kind == "AveragingError"
    assert other_words.startswith("rank 0 cannot use NCCL: ")
    assert "2.19.0 or newer" in other_words


def test_a_rank_that_died_is_named(libraries):
    kind, words = run(libraries, "dies")[0]
    assert kind == "AveragingError"
    assert "rank 0 of 2" in words
    assert "remote process exited: the stand-in was told so" in words
    assert "rank 1 has ended" in words


def test_without_cuda_it_says_what_is_missing(monkeypatch):
    from fastactrec import ops

    if ops.build_info()["cuda"]:
        pytest.skip("this build has CUDA")
    for call in (ops.nccl_library, ops.nccl_unique_id):
        with pytest.raises(far.FastactrecError, match="this build has no CUDA"):
            call()
    with pytest.raises(far.InputError, match="not initialised"):
        NcclEngine()
