"""Who is trained and who is tested on: official lists of UCF101 and HMDB51, and group-disjoint splits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import InputError

PARTS = ("train", "val", "test")
_PART_NAMES = {
    "train": "train", "training": "train",
    "val": "val", "valid": "val", "validate": "val", "validation": "val",
    "test": "test", "testing": "test",
}  # fmt: skip
_TRIALS = 200
_TRIAL_GROUPS = 50_000  # trials times groups at most: a split takes a second or two, also of 10,000 groups


class OfficialLists(NamedTuple):
    """What a dataset's list files say; clips are named CLASS/FILE as in the dataset's own folder tree."""

    classes: list[str]  # in the order of the dataset's label numbers
    labels: dict[str, str]  # clip -> class; every listed clip, used by a split or not
    splits: dict[str, dict[str, str]]  # official1 ... -> clip -> train or test


def part_name(text: str) -> str | None:
    """train, val or test for the spellings in use (validate, testing ...), None for any other word."""
    return _PART_NAMES.get(text.strip().lower())


def read_lists(folder: Path) -> OfficialLists:
    """The UCF101 or HMDB51 lists in a folder.

    Raises:
        InputError: the folder has neither, or a file of them is missing or contradicts another.
    """
    kind = lists_kind(folder)
    if kind is None:
        raise InputError(f"{folder}: neither UCF101's classInd.txt nor HMDB51's CLASS_test_splitN.txt is in it")
    return read_ucf101(folder) if kind == "ucf101" else read_hmdb51(folder)


def lists_kind(folder: Path) -> str | None:
    """ "ucf101", "hmdb51" or None."""
    if not folder.is_dir():
        return None
    if (folder / "classInd.txt").is_file():
        return "ucf101"
    return "hmdb51" if any(folder.glob("*_test_split[0-9].txt")) else None


def read_ucf101(folder: Path) -> OfficialLists:
    """classInd.txt, trainlistNN.txt, testlistNN.txt. The class is the folder of a name: the files of
    HandstandPushups spell it HandStandPushups."""
    numbers = {}
    for where, line in _lines(folder / "classInd.txt"):
        number, _, name = line.partition(" ")
        if not number.isdigit() or not name.strip():
            raise InputError(f"{where}: {line!r} is not 'NUMBER CLASS'")
        numbers[int(number)] = name.strip()
    classes = [numbers[number] for number in sorted(numbers)]
    labels, splits = {}, {}
    trains = sorted(folder.glob("trainlist[0-9]*.txt"))
    if not trains:
        raise InputError(f"{folder}: classInd.txt is there, but no trainlist01.txt")
    for train in trains:
        number = int(re.sub(r"\D", "", train.stem))
        parts = splits[f"official{number}"] = {}
        for path, part in ((train, "train"), (train.with_name(train.name.replace("train", "test")), "test")):
            for where, line in _lines(path):
                name, _, index = line.partition(" ")
                label = name.rpartition("/")[0]
                if label not in classes:
                    raise InputError(f"{where}: the class of {name!r} is not in classInd.txt")
                if index.strip() and not (index.strip().isdecimal() and numbers.get(int(index)) == label):
                    raise InputError(f"{where}: {name} has number {index}, which is not its class's in classInd.txt")
                if parts.setdefault(name, part) != part:
                    raise InputError(f"{where}: {name} is in the train list too")
                labels[name] = label
    return OfficialLists(classes, labels, splits)


def read_hmdb51(folder: Path) -> OfficialLists:
    """CLASS_test_splitN.txt with lines 'NAME FLAG': 1 train, 2 test, 0 not used by this split."""
    labels, splits = {}, {}
    for path in sorted(folder.glob("*_test_split[0-9].txt")):
        label, number = re.fullmatch(r"(.+)_test_split(\d)", path.stem).groups()
        parts = splits.setdefault(f"official{number}", {})
        for where, line in _lines(path):
            name, _, flag = line.rpartition(" ")
            if flag not in ("0", "1", "2") or not name:
                raise InputError(f"{where}: {line!r} is not 'NAME FLAG' with flag 0, 1 or 2")
            clip = f"{label}/{name.strip()}"
            labels[clip] = label
            if flag != "0":
                parts[clip] = "train" if flag == "1" else "test"
    return OfficialLists(sorted(set(labels.values())), labels, dict(sorted(splits.items())))


def _lines(path: Path):
    """(where, line) of the lines that are not empty; CR and trailing blanks are stripped."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path}: this list is missing") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text") from error
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield f"{path}:{number}", line.strip()


def group_split(
    labels: Sequence[str],
    groups: Sequence[str],
    test_fraction: float,
    val_fraction: float = 0.0,
    seed: int = 0,
) -> list[str]:
    """Divide clips by whole groups, so that no scene or person is both trained and tested on.

    Every class comes as near to the fractions as its groups allow, and keeps at least one group in train: a
    class with one group is only trained on. The result does not depend on the order of the clips.

    Args:
        labels, groups: class and group of each clip.
        test_fraction, val_fraction: share of each class's clips, in [0, 1); their sum below 1.
        seed: of the orders tried.
    Returns:
        train, val or test for each clip.
    """
    class_names, group_names = sorted(set(labels)), sorted(set(groups))
    rows = {name: row for row, name in enumerate(group_names)}
    columns = {name: column for column, name in enumerate(class_names)}
    counts = np.zeros((len(group_names), len(class_names)))
    np.add.at(counts, ([rows[g] for g in groups], [columns[c] for c in labels]), 1)
    rng = np.random.default_rng(seed)
    part_of = np.zeros(len(group_names), dtype=int)
    for part, fraction in ((PARTS.index("test"), test_fraction), (PARTS.index("val"), val_fraction)):
        free = np.flatnonzero(part_of == 0)
        part_of[free[_choose(counts[free], fraction * counts.sum(0), rng)]] = part
    return [PARTS[part_of[rows[group]]] for group in groups]


def _choose(counts: np.ndarray, wanted: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Rows of ``counts`` [groups, classes] whose sum is near ``wanted`` [classes]: greedy, many orders.

    The cost of a choice is sum over classes of (sum - wanted)^2 / clips of the class.
    """
    weight = 1 / np.maximum(counts.sum(0), 1)
    present = counts > 0
    best, best_cost = np.zeros(len(counts), dtype=bool), float((weight * wanted**2).sum())
    for _ in range(max(1, min(_TRIALS, _TRIAL_GROUPS // max(1, len(counts))))):
        chosen = np.zeros(len(counts), dtype=bool)
        gap = -wanted  # of the choice: sum minus wanted
        left = present.sum(0)  # groups of each class that stay
        for row in rng.permutation(len(counts)):
            gain = counts[row]
            if (left[present[row]] > 1).all() and (weight * gain * (2 * gap + gain)).sum() < 0:
                chosen[row] = True
                gap = gap + gain
                left = left - present[row]
        cost = float((weight * gap**2).sum())
        if cost < best_cost - 1e-12:
            best, best_cost = chosen, cost
    return best
