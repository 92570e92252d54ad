"""Slow links on one machine: a network namespace per rank, joined by a bridge, each link limited by ``tc ... tbf``.

::

    with Links(4) as links:
        links.limit("100mbit")
        process = links.start(0, [sys.executable, "rank.py"])  # sees one interface, ``eth0``, and no other network

The bridge lives in a namespace of its own, so nothing of the machine's network is touched. Both ends of each link are
limited: a rank sends and receives at most at the rate. Names of namespaces carry the process that made them and its
start time; those whose process is gone (a kill -9) are removed when the next Links is made.

Needs root, iproute2 and a kernel with veth, bridge and sch_tbf. ``unavailable()`` says what is missing.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PREFIX = "far-links-"
INTERFACE = "eth0"
HEADER_BYTES = 14 + 20 + 32  # Ethernet, IPv4, TCP with time stamps: in front of the payload of every packet
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
MAX_RANKS = 16
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


class LinksError(RuntimeError):
    """This machine cannot make limited links; the message says why."""


def bits_per_s(rate: str) -> float:
    """ "100mbit" -> 1e8; tc's units kbit, mbit, gbit.

    Raises:
        ValueError: anything else.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(kbit|mbit|gbit)", rate)
    if not match or not float(match[1]):
        raise ValueError(f"rate {rate!r}: give a number and kbit, mbit or gbit, such as 100mbit")
    return float(match[1]) * UNITS[match[2]]


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def unavailable() -> str | None:
    """Why limited links cannot be made here, from trying; None if they can."""
    try:
        with Links(2) as links:
            links.limit("100mbit")
    except LinksError as error:
        return str(error)
    return None


def namespaces() -> list[str]:
    """All namespaces of this module, of whichever process."""
    listed = _run("ip", "netns", "list").split("\n")
    return [line.split()[0] for line in listed if line.startswith(PREFIX)]


def remove_stale() -> list[str]:
    """Removes the namespaces whose process is gone; returns their names."""
    stale = []
    for name in namespaces():
        pid, _, began = name.removeprefix(PREFIX).rpartition("-")[0].partition("-")
        if not pid.isdecimal() or _start_time(int(pid)) != began:
            _run("ip", "netns", "delete", name)
            stale.append(name)
    return stale


class Links:
    """Network namespaces of ``ranks`` ranks; a context manager, closed at exit of the interpreter too.

    Args:
        ranks: 2 to 16.
    Raises:
        LinksError: no root, no iproute2, or the kernel refused.
    """

    def __init__(self, ranks: int):
        if not 2 <= ranks <= MAX_RANKS:
            raise ValueError(f"ranks={ranks}: give 2 to {MAX_RANKS}")
        if missing := [tool for tool in ("ip", "tc") if not shutil.which(tool)]:
            raise LinksError(f"{' and '.join(missing)} not found: install iproute2")
        if os.geteuid() != 0:
            raise LinksError("network namespaces need root")
        remove_stale()
        self.ranks = ranks
        self._owner = f"{PREFIX}{os.getpid()}-{_start_time(os.getpid())}"
        self._processes: list[subprocess.Popen] = []
        atexit.register(self.close)
        try:
            self._build()
        except LinksError:
            self.close()
            raise

    def __enter__(self) -> Links:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def namespace(self, rank: int) -> str:
        return f"{self._owner}-{rank}"

    @property
    def _hub(self) -> str:
        return f"{self._owner}-hub"

    def _build(self) -> None:
        if self._hub in namespaces():
            raise LinksError("this process has links already: close them first")
        _run("ip", "netns", "add", self._hub)
        _run("ip", "-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._hub, "link", "set", "bridge", "addrgenmode", "none", "up")
        for rank in range(self.ranks):
            name, port = self.namespace(rank), f"port{rank}"
            _run("ip", "netns", "add", name)
            peer = ("peer", "name", INTERFACE, "netns", name)
            _run("ip", "-n", self._hub, "link", "add", port, "type", "veth", *peer)
            # without IPv6 addresses nothing but the ranks' own packets is counted
            _run("ip", "-n", self._hub, "link", "set", port, "master", "bridge", "addrgenmode", "none", "up")
            _run("ip", "-n", name, "address", "add", f"{address(rank)}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "addrgenmode", "none", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")

    def limit(self, rate: str | None) -> None:
        """Limits every link, both ways, to a rate of tc such as "100mbit"; None: no limit.

        The rate counts whole packets as on Ethernet, headers included.
        """
        # A bucket of one millisecond, but room for a few packets, and a queue of 20 ms: with 100 ms plain TCP reached
        # 43 of the 47.8 Mb/s that 50 Mb/s leave for payload, with 20 ms 47.
        shape = []
        if rate is not None:
            burst_bytes = max(16_000, round(bits_per_s(rate) / 8 * 1e-3))
            shape = ["tbf", "rate", rate, "burst", str(burst_bytes), "latency", "20ms"]
        for rank in range(self.ranks):
            for namespace, device in ((self.namespace(rank), INTERFACE), (self._hub, f"port{rank}")):
                if shape:
                    _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shape)
                elif " tbf " in _run("tc", "-n", namespace, "qdisc", "show", "dev", device):
                    _run("tc", "-n", namespace, "qdisc", "delete", "dev", device, "root")

    def start(self, rank: int, words: list[str], **options) -> subprocess.Popen:
        """A process in the namespace of a rank; it dies with this one, or at close(). Options are Popen's."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace(rank), *words], preexec_fn=_die_with_parent, **options
        )
        self._processes.append(process)
        return process

    def close(self) -> None:
        """Kills what start() started and removes the namespaces; a second call does nothing."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._processes.clear()
        for name in namespaces():
            if name.startswith(f"{self._owner}-"):
                _run("ip", "netns", "delete", name)
        atexit.unregister(self.close)

    def throughput(self, seconds: float = 1.0) -> list[float]:
        """Payload bits per second that each rank receives while all send round the ring over plain TCP.

        That is the pattern of an all-reduce: every link busy both ways. A limit of R lets through at most
        R * 1448 / 1514 of payload at an MTU of 1500.
        """
        command = [sys.executable, "-S", str(Path(__file__).resolve())]
        receivers = [self.start(rank, [*command, "receive"], **_PIPES) for rank in range(self.ranks)]
        for receiver in receivers:
            receiver.stdout.readline()  # it listens
        senders = [
            self.start(rank, [*command, "send", address((rank + 1) % self.ranks), str(seconds)], **_PIPES)
            for rank in range(self.ranks)
        ]
        results = [receiver.communicate(timeout=seconds + 30)[0] for receiver in receivers]
        for sender in senders:
            sender.communicate(timeout=30)
        if failed := [p.returncode for p in (*receivers, *senders) if p.returncode]:
            raise LinksError(f"a plain TCP transfer failed with exit code {failed[0]}")
        return [json.loads(text)["bits_per_s"] for text in results]


_PIPES = {"stdout": subprocess.PIPE, "text": True}
PORT = 5201
SETTLE_S = 0.2  # the first packets fill buckets and queues: not counted


def receive() -> None:
    """Accepts one transfer and prints its rate, the first moments left out."""
    with socket.create_server(("", PORT)) as server:
        print("listening", flush=True)
        connection, _ = server.accept()
    buffer = bytearray(1 << 18)
    began = time.perf_counter()
    first, last, count = None, None, 0
    while size := connection.recv_into(buffer):
        now = time.perf_counter()
        if first is not None:
            count, last = count + size, now
        elif now - began > SETTLE_S:
            first = now
    print(json.dumps({"bits_per_s": 8 * count / (last - first)}))


def send(host: str, seconds: float) -> None:
    data = bytes(1 << 16)
    with socket.create_connection((host, PORT)) as connection:
        end = time.perf_counter() + SETTLE_S + seconds
        while time.perf_counter() < end:
            connection.sendall(data)


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _start_time(pid: int) -> str | None:
    """Clock ticks from boot to the start of a process (proc(5)); with it a number reused is not taken for the old
    process. None: no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise LinksError(f"{' '.join(words)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive()
    else:
        send(sys.argv[2], float(sys.argv[3]))
