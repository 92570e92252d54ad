"""The step trace: its arithmetic on made-up intervals, and a real run on two ranks."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastactrec.phases import COLORS

SCRIPT = Path(__file__).resolve().parent.parent / "profiling" / "trace_step.py"


@pytest.fixture(scope="module")
def trace_step():
    spec = importlib.util.spec_from_file_location("trace_step", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def spans(**given) -> dict[str, np.ndarray]:
    return {name: np.array(given.get(name, []), dtype=float).reshape(-1, 2) for name in COLORS}


def test_report_of_a_rank(trace_step):
    """Two steps: the first averaging half hidden by the backward pass, the second not at all."""
    made = spans(forward=[(0, 1), (5, 6)], backward=[(1, 3), (6, 8)], averaging=[(2, 4), (9, 10)])
    report = trace_step.rank_report(1, made, steps=2)
    assert report["phases_ms"] == {"forward": 1000.0, "backward": 2000.0, "averaging": 1500.0}
    assert report["exposed_comm_ms"] == 1000.0


def test_wire_time_is_that_of_the_rank_that_waited_least(trace_step):
    ranks = [spans(averaging=[(0, 4), (10, 11)]), spans(averaging=[(3, 4), (8, 11)])]
    assert trace_step.wire_ms(ranks, steps=4) == pytest.approx(1e3 * (1 + 1) / 4)


def test_chrome_trace(trace_step):
    trace = trace_step.chrome_trace([spans(forward=[(5.0, 5.5)], decode=[(4.5, 5.0)]), spans(forward=[(5, 6)])])
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(e["name"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in events] == [
        ("decode", 0, 1, 0.0, 5e5),
        ("forward", 0, 0, 5e5, 5e5),
        ("forward", 1, 0, 5e5, 1e6),
    ]


def test_two_ranks(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = [
        "--device",
        "cpu",
        "--batch",
        "2",
        "--size",
        "32",
        "--steps",
        "4",
        "--period",
        "2",
        "--warmup",
        "1",
    ]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), "--out", str(tmp_path), "--modality", "flow", *options],
        capture_output=True, text=True, timeout=300, cwd=SCRIPT.parent.parent,
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parent.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "exposed communication, largest of the ranks" in done.stdout
    result = json.loads((tmp_path / "phases.json").read_text())
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    for rank, intervals in zip(result["ranks"], result["intervals_s"], strict=True):
        assert all(len(intervals[name]) == 4 for name in COLORS if name != "decode")
        assert all(milliseconds > 0 for milliseconds in rank["phases_ms"].values())
        # nothing runs beside the averaging of this version
        assert rank["exposed_comm_ms"] == pytest.approx(rank["phases_ms"]["averaging"])
    assert 0 < result["wire_ms"] <= max(rank["exposed_comm_ms"] for rank in result["ranks"])
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
