"""Training over slow links: DDP beside K-step averaging at 100 Mb/s and 1 Gb/s, on one machine.

    python profiling/links.py --ranks 4 --rates 100mbit,1gbit --out profiling/results/links-NAME.json

Each rank is a process with one thread in a network namespace of its own; bench/links.py limits the links. The arms
(links_arms.py) train a ResNet on random frames in turns of 8 or 16 steps, all in one run, so that they meet the same
machine. Results are appended to --out, and the table and the figure beside it are made anew; with --arms a long
comparison can be cut into several runs (ddp belongs in each: arms are compared with the one of their own run).

Needs root and iproute2; says so and ends with 0 where they are missing.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import links_report
from links_arms import Arm, arms, formula_bytes, in_turns

REPO = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent
FORMAT, VERSION = "fastactrec-links", 1


def _load_bench_links():
    """bench/links.py: bench is no package, and this script has the same name."""
    spec = importlib.util.spec_from_file_location("bench_links", REPO / "bench" / "links.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


network = _load_bench_links()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="2 to 16 (default: 4)")
    parser.add_argument("--rates", default="100mbit,1gbit", help="of each link, both ways (default: 100mbit,1gbit)")
    parser.add_argument("--arch", default="resnet18", help="torchvision ResNet (default: resnet18)")
    parser.add_argument("--size", type=int, default=56, help="side of the input, pixels (default: 56)")
    parser.add_argument("--batch", type=int, default=4, help="frames per rank and step (default: 4)")
    parser.add_argument("--delay", type=int, default=8, help="local steps of the delayed arms, below 16 (default: 8)")
    parser.add_argument("--arms", default="", help=f"of {', '.join(arms(8))} (default: all)")
    parser.add_argument("--out", type=Path, default=Path("links.json"), help="(default: links.json)")
    parser.add_argument("--limit-s", type=float, default=1500, help="ends a run that hangs, seconds (default: 1500)")
    options = parser.parse_args()
    known = arms(options.delay)
    options.arms = options.arms.split(",") if options.arms else list(known)
    options.rates = options.rates.split(",")
    if unknown := [name for name in options.arms if name not in known]:
        parser.error(f"--arms: no arm {unknown[0]!r}; arms are {', '.join(known)}")
    if not 1 <= options.delay < 16:
        parser.error(f"--delay {options.delay}: give 1 to 15")
    if not 2 <= options.ranks <= network.MAX_RANKS:
        parser.error(f"--ranks {options.ranks}: give 2 to {network.MAX_RANKS}")
    for rate in options.rates:
        try:
            network.bits_per_s(rate)
        except ValueError as error:
            parser.error(f"--rates: {error}")
    return options


class Ranks:
    """The processes of all ranks; each command goes to all and all answer."""

    def __init__(self, links, options: argparse.Namespace, rendezvous: Path):
        common = {
            "ranks": options.ranks,
            "rendezvous": str(rendezvous),
            **{name: getattr(options, name) for name in ("arch", "size", "batch", "delay", "arms")},
        }
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": network.INTERFACE,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")])),
        }
        self.processes = [
            links.start(
                rank, [sys.executable, str(HERE / "links_rank.py"), json.dumps({**common, "rank": rank})],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )
            for rank in range(options.ranks)
        ]  # fmt: skip
        # A rank that dies leaves the others waiting in a collective: killing all ends every readline below
        self._watchdog = threading.Timer(options.limit_s, self.kill)
        self._watchdog.daemon = True
        self._watchdog.start()
        self.shape = self._replies()[0]

    def tell(self, do: str, **arguments) -> list[dict]:
        for process in self.processes:
            process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            process.stdin.flush()
        return self._replies()

    def _replies(self) -> list[dict]:
        replies = []
        for rank, process in enumerate(self.processes):
            line = process.stdout.readline()
            if not line:
                self.kill()
                raise RuntimeError(f"rank {rank} ended without an answer, see its message above")
            replies.append(json.loads(line))
        return replies

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def finish(self) -> None:
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait()
        self._watchdog.cancel()


def require_equal(replies: list[dict], arm: Arm) -> None:
    if arm.kind != "alone" and len({reply["digest"] for reply in replies}) > 1:
        raise RuntimeError(f"{arm.name}: ranks hold different parameters after an averaging")


def measure(ranks: Ranks, rate: str, chosen: list[Arm]) -> dict[str, dict]:
    """All turns of all arms; {arm: {"turns", "average_all"}}."""
    results = {arm.name: {"turns": [], "average_all": []} for arm in chosen}
    count = len(ranks.processes)
    for arm in in_turns(chosen):
        turn = len(results[arm.name]["turns"])
        replies = ranks.tell("turn", arm=arm.name)
        if not arm.lead:
            require_equal(replies, arm)
        results[arm.name]["turns"].append(
            {
                "formula_bytes": formula_bytes(arm, count, **ranks.shape, turn=turn),
                **{key: [reply[key] for reply in replies] for key in replies[0]},
            }
        )
        slowest = max(reply["seconds"] for reply in replies)
        print(f"{rate} {arm.name}: turn {turn + 1}/{arm.turns}, {arm.steps} steps, {slowest:.2f} s", flush=True)
    for arm in chosen:  # what the end of an epoch adds
        if arm.options.get("moments") == "desloc" and not arm.lead:
            replies = ranks.tell("average_all", arm=arm.name)
            require_equal(replies, arm)
            results[arm.name]["average_all"] = [reply["seconds"] for reply in replies]
    return results


def environment() -> dict:
    import torch

    from fastactrec import ops
    from fastactrec.machine import cpu_model

    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "isa": ops.build_info()["isa"],
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def session(options: argparse.Namespace) -> dict:
    chosen = [arms(options.delay)[name] for name in options.arms]
    began = time.monotonic()
    rates = {}
    about = environment()
    with network.Links(options.ranks) as links, tempfile.TemporaryDirectory() as folder:
        for rate in options.rates:
            links.limit(rate)
            rates[rate] = {"tcp_bits_per_s": links.throughput()}
            slowest = min(rates[rate]["tcp_bits_per_s"]) / network.bits_per_s(rate)
            print(f"{rate}: plain TCP round the ring reaches {slowest:.3f} of it", flush=True)
        links.limit(None)
        ranks = Ranks(links, options, Path(folder) / "rendezvous")
        for rate in options.rates:
            links.limit(None)
            ranks.tell("warm_up")
            links.limit(rate)
            rates[rate]["arms"] = measure(ranks, rate, chosen)
        links.limit(None)
        for arm in chosen:
            if arm.lead:
                require_equal(ranks.tell("average_all", arm=arm.name), arm)
        ranks.finish()
    settings = {name: getattr(options, name) for name in ("ranks", "arch", "size", "batch", "delay")}
    return {
        "environment": about,
        "settings": settings | ranks.shape,
        "rates": rates,
        "seconds": time.monotonic() - began,
    }


def main() -> int:
    options = arguments()
    if reason := network.unavailable():
        print(f"skipped: {reason}")
        return 0
    # SIGTERM as an exit, so that the namespaces go
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    document = {"format": FORMAT, "version": VERSION, "sessions": []}
    if options.out.is_file():
        document = json.loads(options.out.read_text())
        if (document.get("format"), document.get("version")) != (FORMAT, VERSION):
            print(f"{options.out} holds no results of this version: name another file", file=sys.stderr)
            return 2
    document["sessions"].append(session(options))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document) + "\n")
    print("\n" + links_report.write(document, options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
