"""Limited links for benchmarks (bench/links.py): namespaces come and go, and the limit limits."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import source_tree

SCRIPT = source_tree.script("bench/links.py")
links_module = source_tree.load("bench/links.py")

HOLDS_LINKS = f"""
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("links", {str(SCRIPT)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
links = module.Links(2)
sleeper = links.start(0, ["sleep", "60"])
print(links.namespace(0), sleeper.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def links():
    if reason := links_module.unavailable():
        pytest.skip(f"no limited links here: {reason}")
    with links_module.Links(3) as made:
        yield made
    left = [name for name in links_module.namespaces() if name.startswith(made.namespace(0).rpartition("-")[0])]
    assert not left


def test_a_rank_sees_only_its_link_and_the_other_ranks(links):
    seen = links.start(0, ["ip", "-o", "link"], stdout=subprocess.PIPE, text=True).communicate()[0]
    assert [line.split()[1].partition("@")[0].rstrip(":") for line in seen.splitlines()] == ["lo", "eth0"]
    script = (
        "import socket, sys; s = socket.socket(); s.settimeout(1)\n"
        "try: s.connect((sys.argv[1], 1))\nexcept OSError as e: print(type(e).__name__)"
    )

    def connect(host):
        command = [sys.executable, "-S", "-c", script, host]
        return links.start(0, command, stdout=subprocess.PIPE, text=True).communicate()[0].strip()

    assert connect(links_module.address(2)) == "ConnectionRefusedError"  # it is there, and nothing listens
    assert connect("192.0.2.1") == "OSError"  # network unreachable


def test_the_limit_limits_both_ways(links):
    """All ranks send to their neighbours at once; at an MTU of 1500, 1448 of 1514 bytes are payload."""
    assert min(links.throughput(0.3)) > 150e6
    links.limit("100mbit")
    slowest = []
    while len(slowest) < 4 and max(slowest, default=0) < 90e6:  # a busy machine can be slower than its links
        payload = links.throughput(1.0)
        assert max(payload) <= 97e6  # 95.6e6 at most, and the burst of a millisecond
        slowest.append(min(payload))
    assert max(slowest) >= 90e6
    links.limit("20mbit")
    assert max(links.throughput(0.5)) < 20e6
    links.limit(None)
    assert min(links.throughput(0.3)) > 150e6


def test_what_a_killed_process_left_is_removed(links):
    holder = subprocess.Popen([sys.executable, "-c", HOLDS_LINKS], stdout=subprocess.PIPE, text=True)
    name, sleeper = holder.stdout.readline().split()
    assert name in links_module.namespaces()
    assert name not in links_module.remove_stale()  # it lives
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    links_module.remove_stale()
    assert not [left for left in links_module.namespaces() if left.startswith(name.rpartition("-")[0])]
    assert links.namespace(0) in links_module.namespaces()
    assert ended(int(sleeper))  # it dies with its parent


def ended(pid: int) -> bool:
    """Whether the process is gone, or a zombie that nobody has reaped yet."""
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_ranks_send_what_the_formula_says(links, tmp_path):
    """The whole comparison, small: two ranks over 1 Gb/s; the ranks check that they hold the same parameters."""
    out = tmp_path / "links.json"
    words = ["--ranks", "2", "--rates", "1gbit", "--arms", "ddp,kavg-8", "--size", "32", "--batch", "2"]
    words += ["--arch", "shufflenet_v2_x0_5"]
    command = [sys.executable, str(SCRIPT.parent.parent / "profiling" / "links.py"), *words, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    session = json.loads(out.read_text())["sessions"][0]
    figures = session["rates"]["1gbit"]["arms"]
    assert session["settings"]["elements"] == 1_366_792  # torchvision's number
    for arm, averagings in (("ddp", 8), ("kavg-8", 1)):  # in a turn of 8 steps
        for turn in figures[arm]["turns"]:
            parameters = 4 * 1_366_792 * averagings  # two ranks send 2 * 1/2 of them
            payload = [b - 66 * p for b, p in zip(turn["tx_bytes"], turn["tx_packets"], strict=True)]
            assert payload == pytest.approx([parameters, parameters], rel=0.05)
            assert turn["formula_bytes"] == pytest.approx(parameters, rel=0.05)
            assert len(turn["blocked_s"][0]) == 8
            assert min(map(sum, turn["blocked_s"])) > 0
    assert "## shufflenet_v2_x0_5, 2 ranks, links of 1gbit" in out.with_suffix(".md").read_text()


@pytest.mark.parametrize("rate", ["100", "fast", "-1mbit", "0gbit", "100mbit extra"])
def test_a_bad_rate_is_refused(rate):
    with pytest.raises(ValueError, match="mbit"):
        links_module.bits_per_s(rate)


def test_rates_are_those_of_tc():
    assert [links_module.bits_per_s(rate) for rate in ("1gbit", "100mbit", "2.5gbit", "64kbit")] == [
        1e9,
        1e8,
        2.5e9,
        64e3,
    ]


def test_without_root_it_says_so(monkeypatch):
    monkeypatch.setattr(links_module.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(links_module.os, "geteuid", lambda: 1000)
    assert links_module.unavailable() == "network namespaces need root"
    monkeypatch.setattr(links_module.shutil, "which", lambda tool: None)
    assert "install iproute2" in links_module.unavailable()
