"""Which ways of averaging keep the accuracy of synchronous Adam: real clips, folds by group, several seeds.

    python profiling/accuracy.py --data ../shared/data            # the committed table
    python profiling/accuracy.py --data ../shared/data --full     # every period with every policy
    python profiling/accuracy.py --data ../shared/data --minutes 4   # stop after 4 minutes; run again to continue

Packs are made once (``prepare``). The learning rate of each family of arms is searched inside each fold's training
clips; then every arm trains on the very same batches, by four ranks in lockstep (lockstep.py). Each finished run is a
line of the journal, so a run that was stopped continues. README.md in this folder says how to read the table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
from accuracy_analysis import ALLOWED_POINTS, CONFIDENCE, RESAMPLES, analyse, figure, markdown
from accuracy_arms import BASELINE, GRID, RANKS, REPRESENTATIVES, Arm, Settings, arms
from accuracy_runs import folds_by_group, load_material, run_arm

import fastactrec as far
from fastactrec.machine import cpu_model

FORMAT, VERSION = "fastactrec-accuracy", 1
SIZE, BOUND_PX = "short:64", "10"
SOURCES = {
    "surveillance-fight": ("surveillance-fight", ()),
    "ceiling-actions": (
        "ceiling-actions/segments.csv",
        ("--classes", "walk,sitdown,standup,falling,sit", "--max-frames", "128"),
    ),
}
TUNING_SEED = 100


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with surveillance-fight and ceiling-actions; not needed "
                        "where their packs are")  # fmt: skip
    parser.add_argument("--packs", type=Path, default=Path("packs"), help="where packs and the journal are kept")
    parser.add_argument("--only", default="", help="packs to use, comma-separated (default: both; others must exist)")
    parser.add_argument("--stream", choices=("flow", "rgb"), default="flow", help="what the network sees")
    parser.add_argument("--full", action="store_true", help="every period with every policy")
    parser.add_argument("--arms", default="", help="only these arms, separated by semicolons")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... (default: 3)")
    parser.add_argument("--epochs", type=int, default=Settings.epochs, help="epochs of every arm")
    parser.add_argument("--passes", type=int, default=Settings.passes, help="passes over the clips in an epoch")
    parser.add_argument("--folds", type=int, default=Settings.folds, help="parts of the clips, each tested once")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one per core)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no run after this time")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results",
                        help="folder of the tables (default: profiling/results)")  # fmt: skip
    parser.add_argument("--name", default="", help="results are accuracy-NAME.json ... (default: the processor)")
    return parser.parse_args()


def make_packs(options: argparse.Namespace) -> dict[str, Path]:
    """The packs to use; those of SOURCES are made where they are missing."""
    names = [name for name in options.only.split(",") if name] or list(SOURCES)
    packs = {name: options.packs / name for name in names}
    for name, path in packs.items():
        if (path / "manifest.json").is_file():
            continue
        if name not in SOURCES or options.data is None:
            raise SystemExit(f"{path}: no pack is there; give --data, or make one with 'fastactrec prepare'")
        source, extra = SOURCES[name]
        subprocess.run(
            [
                sys.executable, "-m", "fastactrec.prepare", options.data / source, "--out", path,
                "--size", SIZE, "--bound-px", BOUND_PX, *extra,
            ],
            check=True,
        )  # fmt: skip
    return packs


@dataclass(frozen=True)
class Task:
    """The missing runs of one (pack, fold, seed), which share their decoded batches."""

    data: str
    pack: Path
    stream: str
    train: tuple[int, ...]
    test: tuple[int, ...]
    fold: int
    seed: int
    runs: tuple[tuple[Arm, float], ...]
    settings: Settings
    deadline: float
    """time.time() after which no run begins."""


def work(task: Task, journal: Path) -> int:
    """Does the runs of a task in this process; returns how many were done."""
    torch.set_num_threads(1)
    if time.time() > task.deadline:
        return 0
    pack = far.open_pack(task.pack)
    train, test = list(task.train), list(task.test)
    done, material, loaded = 0, None, None
    for arm, lr in task.runs:
        seed = task.seed + arm.seed_shift
        if time.time() > task.deadline:
            break
        if seed != loaded:
            material, loaded = load_material(pack, task.stream, train, test, seed, task.settings), seed
        record = {
            "data": task.data, "stream": task.stream, "fold": task.fold, "seed": task.seed, "arm": arm.name, "lr": lr,
            "test": test, "settings": asdict(task.settings), **run_arm(arm, lr, seed, task.settings, material),
        }  # fmt: skip
        with journal.open("a") as file:  # one write of one line: processes share the journal
            file.write(json.dumps(record) + "\n")
        done += 1
    return done


class Study:
    """Journal, folds and what is still missing."""

    def __init__(self, options: argparse.Namespace, packs: dict[str, Path]):
        self.options, self.packs = options, packs
        self.settings = Settings(epochs=options.epochs, passes=options.passes, folds=options.folds)
        self.deadline = time.time() + 60 * options.minutes
        self.journal = options.packs / "accuracy.jsonl"
        if self.journal.is_file():  # a run that was killed while it wrote its line has not been
            text = self.journal.read_text()
            self.journal.write_text(text[: text.rfind("\n") + 1])
        self.arms = arms(options.full)
        if options.arms:
            chosen = [name.strip() for name in options.arms.split(";")]
            known = {arm.name: arm for arm in arms(True)}
            if unknown := [name for name in chosen if name not in known]:
                raise SystemExit(f"--arms: {unknown[0]!r} is not one of {'; '.join(known)}")
            self.arms = [known[name] for name in chosen]
        self.clips = {
            name: [(clip.group, clip.label) for clip in far.open_pack(path).clips] for name, path in packs.items()
        }
        self.folds = {
            name: folds_by_group([group for group, _ in clips], self.settings.folds)
            for name, clips in self.clips.items()
        }

    def lines(self) -> list[dict]:
        """The journal's runs under these settings."""
        if not self.journal.is_file():
            return []
        settings = asdict(self.settings)
        runs = [json.loads(line) for line in self.journal.read_text().splitlines()]
        return [
            run
            for run in runs
            if run["settings"] == settings and run["stream"] == self.options.stream and run["data"] in self.packs
        ]

    def training_clips(self, data: str, fold: int) -> list[int]:
        return [i for f, clips in enumerate(self.folds[data]) for i in clips if f != fold]

    def inner(self, data: str, fold: int) -> tuple[list[int], list[int]]:
        """Training and validation clips inside a fold's training clips, by group."""
        outer = self.training_clips(data, fold)
        groups = [self.clips[data][i][0] for i in outer]
        validation = {outer[k] for k in folds_by_group(groups, self.settings.inner_folds, seed=1)[0]}
        return [i for i in outer if i not in validation], sorted(validation)

    def task(self, data: str, fold: int, seed: int, train, test, runs) -> Task:
        return Task(
            data, self.packs[data], self.options.stream, tuple(train), tuple(test), fold, seed, tuple(runs),
            self.settings, self.deadline,
        )  # fmt: skip

    def tuning(self) -> Iterator[Task]:
        """Missing runs of the search: fold -1 - f stands for the inner split of fold f."""
        have = {(run["data"], run["fold"], run["arm"], run["lr"]) for run in self.lines()}
        families = {arm.family for arm in self.arms}
        for data in self.packs:
            for fold in range(self.settings.folds):
                runs = [
                    (REPRESENTATIVES[family], lr)
                    for family in sorted(families)
                    for lr in GRID
                    if (data, -1 - fold, REPRESENTATIVES[family].name, lr) not in have
                ]
                if runs:
                    train, validation = self.inner(data, fold)
                    yield self.task(data, -1 - fold, TUNING_SEED, train, validation, runs)

    def chosen(self) -> dict[tuple[str, int, str], float]:
        """The learning rate of each (data, fold, family): the lowest cross entropy of the inner validation clips."""
        found = {(run["data"], run["fold"], run["arm"], run["lr"]): run["cross_entropy"] for run in self.lines()}
        result = {}
        for data in self.packs:
            for fold in range(self.settings.folds):
                for family, arm in REPRESENTATIVES.items():
                    scores = {lr: found.get((data, -1 - fold, arm.name, lr)) for lr in GRID}
                    if None not in scores.values():
                        result[data, fold, family] = min(GRID, key=lambda lr: scores[lr])
        return result

    def training(self) -> Iterator[Task]:
        """Missing runs of the arms."""
        have = {(run["data"], run["fold"], run["seed"], run["arm"]) for run in self.lines()}
        chosen = self.chosen()
        for seed in range(self.options.seeds):
            for data in self.packs:
                for fold in range(self.settings.folds):
                    runs = [
                        (arm, chosen[data, fold, arm.family])
                        for arm in self.arms
                        if (data, fold, seed, arm.name) not in have and (data, fold, arm.family) in chosen
                    ]
                    if runs:
                        yield self.task(data, fold, seed, self.training_clips(data, fold), self.folds[data][fold], runs)

    def run(self, tasks: list[Task], what: str) -> bool:
        """Does the tasks in processes; returns whether all runs are done."""
        total, done = sum(len(task.runs) for task in tasks), 0
        with ProcessPoolExecutor(self.options.workers, mp_context=get_context("spawn")) as pool:
            for future in as_completed([pool.submit(work, task, self.journal) for task in tasks]):
                done += future.result()
                print(f"{what}: {done}/{total} runs", flush=True)
        if done < total:
            print(f"{what}: stopped with {total - done} runs to do; the same command continues")
        return done == total

    def write(self) -> None:
        """The table of what the journal holds, as JSON, Markdown and PNG."""
        runs = [run for run in self.lines() if run["fold"] >= 0 and run["seed"] < self.options.seeds]
        table = analyse(runs, self.clips, [arm.name for arm in arms(True)], BASELINE) if runs else {}
        if not table:
            print("no arm is complete yet")
            return
        chosen = self.chosen()
        rates = {
            f"{data}, {family}": [chosen.get((data, fold, family)) for fold in range(self.settings.folds)]
            for data in self.packs
            for family in REPRESENTATIVES
        }
        result = {
            "format": FORMAT,
            "version": VERSION,
            "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "torch": torch.__version__,
                        "python": platform.python_version(), "fastactrec": far.__version__},
            "data": {
                name: {"clips": len(clips), "groups": len({g for g, _ in clips})} for name, clips in self.clips.items()
            },
            "stream": self.options.stream, "ranks": RANKS, "seeds": self.options.seeds,
            "settings": asdict(self.settings), "grid": GRID, "learning_rates": rates,
            "bootstrap": {"resamples": RESAMPLES, "confidence": CONFIDENCE, "allowed_points": ALLOWED_POINTS},
            "seconds": sum(run["seconds"] for run in self.lines()),
            "arms": table,
        }  # fmt: skip
        self.options.out.mkdir(parents=True, exist_ok=True)
        machine = self.options.name or re.sub("[^a-z0-9]+", "-", cpu_model().lower()).strip("-")
        stem = self.options.out / f"accuracy-{machine}"
        text = markdown(table, sorted(self.packs))
        stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        stem.with_suffix(".md").write_text(text)
        figure(table, stem.with_suffix(".png"))
        print(text + f"{stem}.json, .md and .png")


def main() -> None:
    options = arguments()
    study = Study(options, make_packs(options))
    if study.run(list(study.tuning()), "search of learning rates"):
        study.run(list(study.training()), "training")
    study.write()


if __name__ == "__main__":
    main()
