"""The Python part of gpu_check.sh: runs each check in a process of its own and writes what came out.

Exit code 0: everything that could run here passed. 1: something failed. Without a GPU, checks that need one are
reported as skipped, and nothing is written unless --out says where.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

REPO = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent
BUDGET_S = 8 * 60
NO_GPU = "skipped: no CUDA device"


class Check(NamedTuple):
    """One check: a command that ends with 0. Those with ``json`` print a JSON object as their last line."""

    name: str
    words: list[str]  # after the Python interpreter
    needs_gpu: bool
    limit_s: int
    json: bool = False
    environment: Mapping[str, str] = MappingProxyType({})


PYTEST = ["-m", "pytest", "-q", "-p", "no:cacheprovider"]
PROOFS = [f"tests/test_cuda_{name}.py" for name in ("emulator", "adam", "static")]
CASES = str(HERE / "gpu_cases.py")
CHECKS = [
    Check("kernels on the CPU", [*PYTEST, *PROOFS], False, 240),
    Check("kernel resources", [str(HERE / "kernel_resources.py")], False, 60),
    Check("GPU tests", [*PYTEST, "-m", "cuda", "tests"], True, 180, environment={"REQUIRE_CUDA": "1"}),
    Check("same bits", [CASES, "hashes"], True, 60, json=True),
    Check("times", [CASES, "times"], True, 90, json=True),
    Check("two ranks", [CASES, "average"], True, 90, json=True),
]


def output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=REPO, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def machine() -> dict:
    """What the figures belong to."""
    import torch

    from fastactrec import machine, ops

    gpu = torch.cuda.is_available()
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    commit = output_of("git", "rev-parse", "--short", "HEAD")
    changed = bool(output_of("git", "status", "--porcelain", "--untracked-files=no"))
    return {
        "gpu": torch.cuda.get_device_name() if gpu else None,
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0],
        "cuda_of_torch": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu and nccl else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": machine.cpu_model(),
        "cores": os.cpu_count(),
        "extension": ops.build_info(),
        "commit": commit + (" with changes" if changed else ""),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def run(check: Check, seconds_left: float) -> dict:
    """{"status": "passed", "failed: why" or "skipped: why", "seconds", "output", "result" of a JSON check}"""
    limit = min(check.limit_s, seconds_left)
    if limit <= 0:
        return {"status": f"failed: the {BUDGET_S} s of all checks were used up", "seconds": 0.0, "output": ""}
    environment = {**os.environ, **check.environment, "PYTHONPATH": str(REPO)}
    start = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *check.words],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPO, env=environment,
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit)
            status = "passed" if process.returncode == 0 else f"failed: exit code {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            status = f"failed: not done within {limit:.0f} s"
    done = {"status": status, "seconds": round(time.monotonic() - start, 1), "output": output}
    if check.json and status == "passed":
        done["result"] = json.loads(output.splitlines()[-1])
        done["status"] = verdict(check.name, done["result"])
    elif status == "passed" and output.startswith("skipped: "):
        done["status"] = output.splitlines()[0]
    return done


def verdict(name: str, result: dict) -> str:
    if "skipped" in result:
        return f"skipped: {result['skipped']}"
    if name == "same bits" and (unequal := [op for op, each in result.items() if not each["equal"]]):
        return f"failed: CPU and GPU differ in {', '.join(unequal)}"
    if name == "two ranks" and not result["equal"]:
        return f"failed: {result.get('error', 'the ranks hold different bytes')}"
    return "passed"


def rows(head: list[str], lines: list[list]) -> str:
    marks = ["---"] * len(head)
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in (head, marks, *lines))


def markdown(about: dict, done: dict[str, dict]) -> str:
    """What a reader wants first: machine, verdicts, times; then the kernels' resources."""
    extension = about["extension"]
    facts = {key: value for key, value in about.items() if key != "extension" and value}
    facts["extension"] = f"{extension['compiler']}, CUDA {extension['cuda_version'] or 'none'}"
    parts = [
        f"# GPU check: {about['gpu'] or 'no GPU'}, {about['date']}",
        rows(["", ""], list(map(list, facts.items()))),
    ]
    verdicts = [[name, each["status"], each["seconds"]] for name, each in done.items()]
    parts.append(rows(["check", "result", "s"], verdicts))
    if result := done.get("times", {}).get("result"):
        lines = [
            [r["op"], r["case"], f"{r['median_ms']:.3f}", f"{r['gb_per_s']:.0f}", f"{r['of_copy']:.2f}"]
            for r in result["rows"]
        ]
        parts.append(f"Medians of {result['repeats']}, taken in turns, by CUDA events.")
        parts.append(rows(["op", "case", "ms", "GB/s", "of a device copy's GB/s"], lines))
    if result := done.get("same bits", {}).get("result"):
        parts.append(rows(["op", "CPU", "GPU"], [[op, each["cpu"], each["gpu"]] for op, each in result.items()]))
    resources = done.get("kernel resources", {})
    if resources.get("status") == "passed":
        parts.append(resources["output"].strip())
    return "\n\n".join(parts) + "\n"


def write(folder: Path, about: dict, done: dict[str, dict]) -> Path:
    """NAME.json and NAME.md; returns the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9]+", "-", (about["gpu"] or "no gpu").lower()).strip("-") + "-" + about["date"]
    (folder / f"{name}.json").write_text(json.dumps({"machine": about, "checks": done}, indent=1) + "\n")
    (folder / f"{name}.md").write_text(markdown(about, done))
    return folder / f"{name}.md"


def main() -> int:
    names = [check.name for check in CHECKS]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="folder for JSON and Markdown (profiling/results where a GPU is)")
    parser.add_argument("--only", action="append", choices=names, help="run this check; may be given several times")
    args = parser.parse_args()
    start = time.monotonic()
    about = machine()
    done = {}
    for check in CHECKS:
        if args.only and check.name not in args.only:
            continue
        if check.needs_gpu and about["gpu"] is None:
            done[check.name] = {"status": NO_GPU, "seconds": 0.0, "output": ""}
        else:
            done[check.name] = run(check, BUDGET_S - (time.monotonic() - start))
        print(f"{check.name}: {done[check.name]['status']}", flush=True)
        if done[check.name]["status"].startswith("failed"):
            print(done[check.name]["output"], flush=True)
    print("\n" + markdown(about, done))
    if args.out or about["gpu"]:
        print(f"written: {write(args.out or HERE / 'results', about, done)} and .json")
    return int(any(each["status"].startswith("failed") for each in done.values()))


if __name__ == "__main__":
    sys.exit(main())
