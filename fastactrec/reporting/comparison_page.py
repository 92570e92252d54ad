"""The page that sets several runs side by side: accuracy and time of each, differences, curves overlaid."""

from __future__ import annotations

import os
import statistics

from .html import figure, note, page, section, share_bar, table
from .markup import Markup, el, join
from .run_files import RunFiles, StreamLog
from .run_page import basis, column, flatten, summary_parts, time_parts, time_split
from .svg import COLORS, Series, legend, line_chart
from .units import count, duration, percent, points, sign_test


def comparison_page(runs: list[RunFiles]) -> str:
    """The HTML of several runs; differences are to the first."""
    names = unique_names(runs)
    head = [
        el("p", f"{count(len(runs), 'run')}; differences are to the first, {names[0]}.", class_="muted"),
        [note(text) for text in comparability(runs, names)],
        [note(f"{name}: {text}") for name, run in zip(names, runs, strict=True) for text in run.notes],
    ]
    times = [(name, summary_parts(run) or _training_parts(run)) for name, run in zip(names, runs, strict=True)]
    sections = [
        section("Runs", _arms(runs, names), _seeds(runs), _paired(runs, names)),
        section("Training", _curves(runs, names)),
        section("Time", el("div", *time_split(times), class_="flow")),
        section("Options that differ", _differences([run.config for run in runs], names, "option")),
        section("Environments that differ", _differences(
            [(run.summary or {}).get("environment") or {} for run in runs], names, "environment"
        )),
    ]  # fmt: skip
    return page(f"Comparison of {count(len(runs), 'run')}", head, sections)


def unique_names(runs: list[RunFiles]) -> list[str]:
    """The folder names, with as many parent folders as it takes to tell them apart."""
    paths = [run.path.resolve().parts for run in runs]
    for depth in range(1, max(map(len, paths)) + 1):
        names = [os.sep.join(parts[-depth:]) for parts in paths]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({position})" for position, name in enumerate(names, 1)]


def comparability(runs: list[RunFiles], names: list[str]) -> list[str]:
    """Reasons why the accuracies should not be set side by side."""
    tested = [(name, basis(run)) for name, run in zip(names, runs, strict=True) if run.summary is not None]
    notes = []
    if len({what for _, what in tested}) > 1:
        each = "; ".join(f"{name}: {what}" for name, what in tested)
        notes.append(f"The accuracies were not measured on the same thing. {each}.")
    missing = [name for name, run in zip(names, runs, strict=True) if run.summary is None]
    if missing:
        notes.append(f"Not evaluated yet: {', '.join(missing)}. Run 'fastactrec evaluate' on it.")
    return notes


def _arms(runs: list[RunFiles], names: list[str]) -> Markup:
    streams = _streams(runs)
    first = runs[0].accuracies()
    same = len({basis(run) for run in runs if run.summary is not None}) == 1
    columns = ["run", *(f"{stream} top-1" for stream in streams), "mean class", "time", "exposed comm."]
    rows = []
    for name, run in zip(names, runs, strict=True):
        accuracies = run.accuracies()
        cells = [_accuracy(accuracies.get(stream), None if run is runs[0] else first.get(stream)) for stream in streams]
        parts = summary_parts(run) or _training_parts(run)
        total = sum(parts.values())
        comm = percent(parts["exposed communication"] / total) if total else "–"
        mean_class = percent(accuracies.get(run.best(), {}).get("mean_class"))
        row = [name, *cells, mean_class, duration(total or None), comm]
        rows.append(row if same else [*row, basis(run) if run.summary else "–"])
    measured = f"Measured on {basis(next(run for run in runs if run.summary))}. " if same else ""
    caption = measured + "Mean class accuracy: of the fusion, or of the only stream. Small: points above the first run."
    flush = range(len(streams) + 1, len(streams) + 4)
    columns = columns if same else [*columns, "measured on"]
    return table(columns, rows, label="Runs side by side", caption=caption, numeric=flush)


def _streams(runs: list[RunFiles]) -> list[str]:
    return list(dict.fromkeys(stream for run in runs for stream in run.accuracies()))


def _accuracy(row: dict | None, first: dict | None) -> Markup | str:
    if row is None:
        return "–"
    difference = el("small", points(row["top1"] - first["top1"])) if first else None
    return join(share_bar(row["top1"], percent(row["top1"])), difference)


def _seeds(runs: list[RunFiles]) -> Markup | None:
    """Mean and spread of runs that differ in nothing but their seed."""
    groups: dict[tuple, list[RunFiles]] = {}
    for run in runs:
        if run.summary is not None:
            options = [tuple(row) for row in flatten(run.config) if row[0] not in ("seed", "name", "run")]
            groups.setdefault((*options, basis(run)), []).append(run)
    repeated = {key: members for key, members in groups.items() if len(members) > 1}
    if not repeated:
        return None
    shared = set.intersection(*(set(key) for key in groups))
    rows = []
    for key, members in repeated.items():
        own = ", ".join(f"{part[0]} {part[1]}" for part in key if part not in shared and isinstance(part, tuple))
        spread = [_mean_spread([run.accuracies().get(s, {}).get("top1") for run in members]) for s in _streams(runs)]
        classes = _mean_spread([run.accuracies()[run.best()]["mean_class"] for run in members])
        rows.append([own or "all alike", len(members), *spread, classes, basis(members[0])])
    columns = [
        "options",
        "runs",
        *(f"{stream} top-1" for stream in _streams(runs)),
        "mean class",
        "measured on",
    ]
    caption = "Mean and standard deviation of runs that differ only in their seed."
    flush = range(1, len(columns) - 1)
    return table(columns, rows, label="Mean over seeds", caption=caption, numeric=flush)


def _mean_spread(values: list[float | None]) -> str:
    if None in values:
        return "–"
    return f"{100 * statistics.mean(values):.1f} ± {100 * statistics.stdev(values):.1f} %"


def _paired(runs: list[RunFiles], names: list[str]) -> Markup | None:
    """Clip by clip against the first run: sharper than two percentages of the same clips."""
    stream = runs[0].best()
    theirs = runs[0].scores.get(stream)
    rows = []
    for name, run in zip(names[1:], runs[1:], strict=True):
        ours = run.scores.get(stream)
        if theirs is None or ours is None:
            continue
        right = dict(zip(theirs.clips, theirs.hits, strict=True))
        pairs = [(hit, right[clip]) for clip, hit in zip(ours.clips, ours.hits, strict=True) if clip in right]
        gained, lost = pairs.count((True, False)), pairs.count((False, True))
        rows.append([name, f"{len(pairs):,}", f"{gained:,}", f"{lost:,}", f"{sign_test(gained, lost):.3f}"])
    if not rows:
        return None
    columns = ["run", "clips in common", "right only here", "right only in the first", "p"]
    caption = (
        f"The same clips, {stream}, against the first run. p: chance of so uneven a count "
        "if both were equally good (exact sign test, two-sided)."
    )
    return table(columns, rows, label="Clip by clip", caption=caption, numeric=range(1, 5))


def _training_parts(run: RunFiles) -> dict[str, float]:
    parts = [time_parts(log) for log in run.logs.values()]
    return {kind: sum(part[kind] for part in parts) for kind in time_parts(StreamLog())}


def _curves(runs: list[RunFiles], names: list[str]) -> Markup:
    looks = [(index % COLORS, index // COLORS) for index in range(len(runs))]
    key = legend([(name, *look) for name, look in zip(names, looks, strict=True)])
    figures = []
    for stream in dict.fromkeys(stream for run in runs for stream in run.logs):
        for title, field, options in (
            ("loss", "loss", {}),
            ("validation top-1", "val_top1", {"y_range": (0.0, 1.0), "tick": lambda v: f"{100 * v:.0f} %"}),
            ("training top-1", "top1", {"y_range": (0.0, 1.0), "tick": lambda v: f"{100 * v:.0f} %"}),
        ):
            lines = [
                Series(name, *column(run.logs[stream], field), *look)
                for name, run, look in zip(names, runs, looks, strict=True)
                if stream in run.logs
            ]
            if any(len(line.x) for line in lines):
                chart = line_chart(lines, label=f"{stream} {title} per epoch of {len(lines)} runs", **options)
                figures.append(figure(f"{stream}: {title}", chart))
    return el("div", key, el("div", figures, class_="figures"))


def _differences(tables: list[dict], names: list[str], what: str) -> Markup:
    columns = [dict(flatten(table_)) for table_ in tables]
    keys = list(dict.fromkeys(key for column_ in columns for key in column_))
    rows = [
        [key, *(column_.get(key, "–") for column_ in columns)]
        for key in keys
        if len({column_.get(key) for column_ in columns}) > 1
    ]
    if not rows:
        return el("p", "None.", class_="muted")
    return table([what, *names], rows, label=f"{what} that differ")
