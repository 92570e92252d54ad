"""What several test modules need: the real clips, a place to run commands from."""

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
