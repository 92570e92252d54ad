"""profiling/gpu_check.py on a machine without a GPU, and its cases on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import source_tree

PROFILING = source_tree.script("profiling/gpu_check.py").parent


@pytest.fixture(scope="module")
def cases():
    return source_tree.load("profiling/gpu_cases.py")


@pytest.fixture(scope="module")
def check():
    return source_tree.load("profiling/gpu_check.py")


def test_without_a_gpu_it_ends_well_and_says_what_it_skipped(tmp_path):
    names = ["kernel resources", "GPU tests", "same bits", "times", "two ranks"]
    options = [word for name in names for word in ("--only", name)]
    command = [sys.executable, str(PROFILING / "gpu_check.py"), "--out", str(tmp_path), *options]
    paths = [str(PROFILING.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ":".join(paths)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = tmp_path.glob("no-gpu-*.json")
    checks = json.loads(written.read_text())["checks"]
    assert [checks[name]["status"] for name in names[1:]] == ["skipped: no CUDA device"] * 4
    assert checks["kernel resources"]["status"] in ("passed", "skipped: nvcc is not on PATH, and CUDACXX is not set")
    assert written.with_suffix(".md").read_text().startswith("# GPU check: no GPU")


def test_same_bits(cases):
    result = cases.hashes("cpu")
    assert all(each["equal"] for each in result.values())
    assert len({each["cpu"] for each in result.values()}) == len(result)  # every case is another computation


def test_times_on_small_tensors(cases):
    rows = cases.adam_times("cpu", repeats=2, shapes=[(64, 3), (1000,), ()])
    assert [row["case"] for row in rows][-1] == "device copy"
    assert rows[-1]["of_copy"] == 1
    assert all(row["median_ms"] > 0 for row in rows)
    assert rows[0]["bytes"] == 28 * 1193
    rows = cases.compression_times("cpu", repeats=2, numel=1000)
    assert [row["op"] for row in rows] == ["compression"] * 7
    assert rows[2]["bytes"] == 16 * 1000 + 1024 + 16


@pytest.mark.slow
def test_two_ranks(cases):
    result = cases.average("cpu")
    assert result["equal"], result


@pytest.mark.parametrize(
    ("name", "result", "words"),
    [
        ("same bits", {"adam": {"equal": True}}, "passed"),
        ("same bits", {"adam": {"equal": False}}, "failed: CPU and GPU differ in adam"),
        ("two ranks", {"equal": False}, "failed: the ranks hold different bytes"),
        ("two ranks", {"equal": False, "error": "late"}, "failed: late"),
        ("two ranks", {"skipped": "NCCL 2.27 is too old"}, "skipped: NCCL 2.27 is too old"),
    ],
)
def test_verdicts(check, name, result, words):
    assert check.verdict(name, result) == words


def test_a_check_that_hangs_or_fails_is_a_failure(check):
    hanging = check.Check("hangs", ["-c", "import time; time.sleep(60)"], False, 1)
    assert check.run(hanging, 100)["status"] == "failed: not done within 1 s"
    assert check.run(hanging, 0)["status"].startswith("failed: the 480 s")
    failing = check.Check("fails", ["-c", "print('why'); raise SystemExit(3)"], False, 10)
    done = check.run(failing, 100)
    assert (done["status"], done["output"]) == ("failed: exit code 3", "why\n")
