"""The device fixture, and what must not depend on the device."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastactrec as far

CONFTEST = Path(__file__).with_name("conftest.py")
TESTS = """
import pytest

def test_device(device):
    assert device in ("cpu", "cuda")

@pytest.mark.cuda
def test_marked():
    pytest.skip("some reason")

def test_other():
    pytest.skip("not about a GPU")

@pytest.mark.cuda
@pytest.mark.xfail
def test_expected():
    assert False
"""


@pytest.mark.parametrize(
    ("require", "words"),
    [("0", "1 passed, 3 skipped, 1 xfailed"), ("1", "1 failed, 1 passed, 1 skipped, 1 xfailed, 1 error")],
)
def test_a_skip_fails_where_cuda_is_required(tmp_path, require, words):
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "test_made.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = cuda\n")
    paths = [str(CONFTEST.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "REQUIRE_CUDA": require, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(paths)}
    command = [sys.executable, "-m", "pytest", "-rsf", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert words in done.stdout, done.stdout
    assert done.returncode == (1 if require == "1" else 0)
    assert "no CUDA device" in done.stdout
    assert ("this test for a GPU was skipped: some reason" in done.stdout) is (require == "1")


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {}),
        (torch.float32, {"weight_decay": 0.1, "decoupled": True}),
        (torch.bfloat16, {"weight_decay": 0.1, "amsgrad": True}),
        (torch.float16, {"moments_dtype": torch.bfloat16}),
    ],
)
def test_adam_gives_the_same_bits_on_every_device(device, dtype, options):
    def train(where):
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(size, generator=generator).to(dtype) for size in (0, 1, 31, 257, 4097, 40_000)]
        params = [value.to(where).requires_grad_() for value in values]
        opt = far.FusedAdam(far.FlatBuckets(params, bucket_bytes=1 << 16), **options)
        for _ in range(3):
            for p in params[:-2]:
                p.grad.copy_(torch.randn(p.shape, generator=generator).to(dtype))
            opt.step()
        return [value.cpu() for p in params for value in (p.detach(), *opt.state.get(p, {}).values())]

    for here, there in zip(train("cpu"), train(device), strict=True):
        assert torch.equal(here, there)
