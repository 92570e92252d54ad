"""What several test modules need: the real clips, a place to run commands from, the devices to test on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real clips, flow, JPEGs; tests that need it skip where it is not."""
    root = Path(os.environ.get("FASTACTREC_DATA", REPO.parent / "shared" / "data"))
    if not root.is_dir():
        pytest.skip("real clips are not here: set FASTACTREC_DATA to their folder")
    return root.resolve()


@pytest.fixture
def launch():
    """Runs Python as a user would, under torchrun when there are several ranks: ``launch("-m", "fastactrec.train",
    "--epochs", 1)`` -> CompletedProcess (text)."""

    def call(*words, ranks: int = 1, timeout: float = 300, cwd: Path = REPO) -> subprocess.CompletedProcess:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        command = [sys.executable, *torchrun, *map(str, words)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=environment, check=False
        )

    return call


def why_no_cuda() -> str:
    """Why nothing can run on a GPU here; empty where it can."""
    import torch

    from fastactrec import ops

    if not torch.cuda.is_available():
        return "no CUDA device"
    return "" if ops.build_info()["cuda"] else "the extension was built without CUDA kernels"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request) -> str:
    """ "cpu", then "cuda", which skips where there is none. ``-m cuda`` selects the latter."""
    if request.param == "cuda" and (reason := why_no_cuda()):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def one_thread():
    """Small operations gain nothing from more, and lose much on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Under REQUIRE_CUDA=1, for machines that have a GPU, a test for it that skips has failed."""
    report = yield
    expected = hasattr(report, "wasxfail")
    if report.skipped and not expected and item.get_closest_marker("cuda") and os.environ.get("REQUIRE_CUDA") == "1":
        report.outcome = "failed"
        report.longrepr = f"REQUIRE_CUDA=1, but this test for a GPU was skipped: {call.excinfo.value}"
    return report
