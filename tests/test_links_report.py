"""What profiling/links.py compares: the formula of its traffic, its turns, and figures from made-up measurements."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise

import pytest
import source_tree

PROFILING = source_tree.script("profiling/links.py").parent
links_arms = source_tree.load("profiling/links_arms.py")
links_report = source_tree.load("profiling/links_report.py")
ARMS = links_arms.arms(delay=8)
SIZES = {"ranks": 4, "elements": 1024, "batch_norm": 10}


def sent(name: str, turns: range) -> float:
    return sum(links_arms.formula_bytes(ARMS[name], **SIZES, turn=turn) for turn in turns)


def test_formula_bytes():
    """By hand: 2 * 3/4 of 1024 elements of 4 bytes, and of 10 buffers of 8 bytes."""
    parameters, buffers = 1.5 * 4096, 1.5 * 80
    assert sent("alone", range(2)) == 0
    assert sent("ddp", range(2)) == 16 * parameters  # a turn has 8 steps
    assert sent("kavg-1", range(2)) == 16 * (parameters + buffers)
    assert sent("kavg-4", range(2)) == 4 * (parameters + buffers)
    assert sent("kavg-16", range(1)) == parameters + buffers
    # desloc, six rounds: x six times, m in rounds 3 and 6, v in round 6
    assert sent("desloc-16", range(2)) == 2 * (parameters + buffers)
    assert sent("desloc-16", range(6)) == 9 * parameters + 6 * buffers
    assert sent("desloc-16-delay", range(6)) == 9 * parameters
    # a byte for each element and 4 for each 256 of them; moments in 2 bytes
    compressed = 1.5 * (1024 + 16)
    assert sent("desloc-16-int8", range(6)) == 6 * (compressed + buffers) + 3 * parameters / 2
    assert sent("desloc-16-int8-delay", range(6)) == 6 * compressed + 3 * parameters / 2


def test_every_arm_takes_whole_rounds_and_at_least_the_window():
    for arm in ARMS.values():
        assert arm.steps % arm.period == 0
        assert arm.turns * arm.steps >= links_arms.WINDOW
        assert links_arms.baseline(arm) in ARMS


def test_turns_are_complete_and_alternate():
    order = [arm.name for arm in links_arms.in_turns(list(ARMS.values()))]
    assert {name: order.count(name) for name in ARMS} == {name: arm.turns for name, arm in ARMS.items()}
    assert all(a != b for a, b in pairwise(order))
    assert order.index("ddp") < order.index("kavg-16") < len(order) - 1 - order[::-1].index("ddp")


def turn(seconds, blocked, tx_bytes=(1066, 1066), packets=(1, 1), formula=1000.0):
    return {
        "seconds": seconds,
        "step_s": [[s / len(blocked[0])] * len(blocked[0]) for s in seconds],
        "blocked_s": blocked,
        "tx_bytes": list(tx_bytes),
        "tx_packets": list(packets),
        "sent_bytes": [1000.0, 1000.0],
        "formula_bytes": formula,
    }


def test_summary_of_two_ranks():
    """Two turns of 16 steps, period 8: averagings in steps 8 and 16 of each."""
    rank0 = [[0.0] * 7 + [2.0] + [0.0] * 7 + [3.0]] * 2
    rank1 = [[0.0] * 7 + [1.0] + [0.0] * 7 + [4.0]] * 2
    turns = [turn([16.0, 17.0], [a, b]) for a, b in zip(rank0, rank1, strict=True)]
    figures = links_report.summary(turns, period=8)
    assert figures["steps"] == 32
    assert figures["seconds"] == 17
    assert figures["exposed_s"] == 5  # both ranks, 10 in 32 steps
    assert figures["wire_s"] == 4  # 1 + 3 of each turn
    assert figures["averaging_s"] == 3  # of 2, 4, 2, 4
    assert figures["payload_over_formula"] == 1
    assert figures["interface_over_formula"] == pytest.approx(1.066)
    assert figures["averager_over_formula"] == 1


def document() -> dict:
    shape = {"ranks": 2, "arch": "resnet18", "size": 56, "batch": 4, "delay": 8, "elements": 1, "batch_norm": 1}
    about = {"cpu": "a CPU", "cores": 2, "kernel": "6.1", "torch": "2.14", "date": "2026-01-01"}

    def session(ddp_s: float, **arms) -> dict:
        arms["ddp"] = [turn([ddp_s / 2] * 2, [[ddp_s / 16] * 8] * 2)] * 2
        results = {name: {"turns": turns, "average_all": []} for name, turns in arms.items()}
        return {
            "environment": about,
            "settings": shape,
            "rates": {"100mbit": {"tcp_bits_per_s": [95e6, 94e6], "arms": results}},
        }

    idle = [0.0] * 15
    first = session(32.0, **{"kavg-16": [turn([2.0, 2.0], [[*idle, 2.0]] * 2)]})
    second = session(16.0, **{"desloc-16-int8": [turn([4.0, 4.0], [[*idle, 1.0]] * 2)] * 6})
    return {"sessions": [first, second]}


def test_arms_are_compared_with_the_ddp_of_their_own_session():
    rows = {row["arm"]: row for row in links_report.compare(document())}
    assert list(rows) == ["ddp", "kavg-16", "desloc-16-int8"]
    assert rows["ddp"]["exposed_s"] == 16  # the last session's
    assert rows["kavg-16"]["times_less_exposed"] == 16
    assert rows["desloc-16-int8"]["times_less_exposed"] == 16
    assert rows["desloc-16-int8"]["times_faster"] == 4


def test_report_is_made_anew_from_the_json(tmp_path):
    out = tmp_path / "links-x.json"
    out.write_text(json.dumps(document()))
    done = subprocess.run(
        [sys.executable, str(PROFILING / "links_report.py"), str(out)], capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert "## resnet18, 2 ranks, links of 100mbit" in lines
    row = next(line for line in lines if line.startswith("| desloc-16-int8 |"))
    assert row.split(" | ")[:5] == ["| desloc-16-int8", "4.00", "4.0", "1.00", "16.0"]
    assert (tmp_path / "links-x.md").read_text() == done.stdout.removesuffix("\n")
    assert (tmp_path / "links-x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rates", "fast"], "mbit"),
        (["--arms", "ddp,nothing"], "no arm 'nothing'"),
        (["--delay", "16"], "1 to 15"),
        (["--ranks", "1"], "2 to 16"),
    ],
)
def test_bad_options_are_refused(words, message):
    done = subprocess.run(
        [sys.executable, str(PROFILING / "links.py"), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert message in done.stderr
