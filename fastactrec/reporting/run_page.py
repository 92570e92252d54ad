"""The page of one run: accuracy, curves, time, confusion, environment, options."""

from __future__ import annotations

import json

import numpy as np

from .confusion import class_accuracy, most_confused
from .html import cards, color_key, figure, note, page, scroll, section, share_bar, table
from .markup import Markup, el
from .run_files import RunFiles, StreamLog
from .svg import Series, heat_map, legend, line_chart, stacked_bars
from .units import count, duration, number, percent, wilson

STREAM_COLORS = {"rgb": 0, "flow": 1, "motion": 2, "fused": 3}
TIME_KINDS = {
    "data": "t-data",
    "compute": "t-compute",
    "exposed communication": "t-comm",
    "other": "t-other",
}


def run_page(run: RunFiles) -> str:
    """The HTML of one run."""
    sections = [
        accuracy_section(run),
        curves_section(run),
        time_section(run),
        confusion_section(run),
        settings_section(run),
    ]
    head = [
        el("p", _lead(run), class_="muted"),
        [note(text) for text in run.notes],
        cards(_cards(run)),
    ]
    return page(run.name, head, [part for part in sections if part is not None])


def basis(run: RunFiles) -> str:
    """What an accuracy was measured on: clips, protocol, split."""
    summary = run.summary or {}
    parts = [count(int(summary.get("clips", 0)), "clip")]
    protocol = summary.get("protocol") or {}
    if "segments" in protocol and "crops" in protocol:
        segments, crops = protocol["segments"], protocol["crops"]
        parts.append(f"{count(segments, 'segment')} × {count(crops, 'crop')}")
    if "split" in summary:
        parts.append(f"{summary.get('subset', 'test')} part of split “{summary['split']}”")
    return ", ".join(parts)


def fusion_rule(run: RunFiles) -> str:
    """How the streams were fused, in words; empty where nothing was."""
    protocol = (run.summary or {}).get("protocol") or {}
    weights = protocol.get("weights") or {}
    if len(weights) < 2:
        return ""
    shares = " : ".join(f"{stream} {number(weight)}" for stream, weight in weights.items())
    return f"Fused by {protocol.get('fusion', 'logits')}, weighted {shares}."


def _lead(run: RunFiles) -> str:
    known = {
        "arch": "{}",
        "batch": "batch {} per rank",
        "seed": "seed {}",
        "data": "data {}",
    }
    parts = [text.format(run.config[key]) for key, text in known.items() if key in run.config]
    if isinstance(epochs := run.config.get("epochs"), int):
        parts.insert(1, count(epochs, "epoch"))
    return " · ".join([f"streams {', '.join(run.logs) or 'none'}", *parts])


def _cards(run: RunFiles) -> list[tuple[str, str, str]]:
    entries = []
    if best := run.best():
        row = run.accuracies()[best]
        name = best if best == "fused" else best.upper() if best == "rgb" else best
        entries.append((f"{name} top-1", percent(row["top1"]), basis(run)))
        entries.append((f"{name} mean class accuracy", percent(row["mean_class"]), basis(run)))
    seconds = (run.summary or {}).get("seconds") or {}
    trained = sum(log.total("seconds") for log in run.logs.values())
    if total := seconds.get("total", trained):
        entries.append(("time", duration(total), "all training epochs"))
    if trained:
        comm = sum(log.total("exposed_comm_s") for log in run.logs.values())
        data = sum(log.total("data_s") for log in run.logs.values())
        entries.append(("waiting for data", percent(data / trained), "of the training epochs' time"))
        entries.append(("exposed communication", percent(comm / trained), "of the training epochs' time"))
    return entries


def accuracy_section(run: RunFiles) -> Markup:
    if run.summary is None:
        return section("Accuracy", note("Not evaluated yet: run 'fastactrec evaluate' on this folder."))
    clips = int(run.summary["clips"])
    many = len(run.summary.get("classes") or run.classes) > 5  # below, top-5 says nothing
    rows = []
    for stream, row in run.accuracies().items():
        low, high = wilson(row["top1"], clips)
        interval = f"{100 * low:.1f} to {100 * high:.1f} %"
        bar = share_bar(row["top1"], percent(row["top1"]))
        top5 = [percent(row.get("top5"))] if many else []
        rows.append([stream, bar, interval, percent(row["mean_class"]), *top5])
    columns = ["stream", "top-1", "95 % interval", "mean class", *(["top-5"] if many else [])]
    caption = f"Measured on {basis(run)}. {fusion_rule(run)} The interval is Wilson’s, for independent clips."
    return section(
        "Accuracy",
        table(
            columns,
            rows,
            label="Accuracy per stream",
            caption=caption,
            numeric=range(2, len(columns)),
        ),
    )


def epoch_axis(log: StreamLog) -> dict[int, int]:
    """Epoch number in the file -> epochs finished when it was written (files may count from 0 or 1)."""
    numbers = sorted({int(entry["epoch"]) for entry in [*log.epochs, *log.steps]})
    first = min(numbers[0], 1) if numbers else 0
    return {number: number - first + 1 for number in numbers}


def step_axis(log: StreamLog) -> list[float]:
    """Position of every logged step in epochs: evenly within its epoch."""
    axis = epoch_axis(log)
    epochs = np.array([axis[int(step["epoch"])] for step in log.steps])
    place = np.empty(len(epochs))
    for epoch in np.unique(epochs):
        inside = epochs == epoch
        place[inside] = epoch - 1 + (np.arange(inside.sum()) + 1) / inside.sum()
    return place.tolist()


def column(log: StreamLog, key: str) -> tuple[list[float], list[float]]:
    """x in epochs and y of a field of the epoch lines, lines without it left out."""
    axis = epoch_axis(log)
    entries = [entry for entry in log.epochs if entry.get(key) is not None]
    return [axis[int(entry["epoch"])] for entry in entries], [entry[key] for entry in entries]


def stream_colors(run: RunFiles) -> dict[str, int]:
    return {stream: STREAM_COLORS.get(stream, 4 + i % 2) for i, stream in enumerate(run.logs)}


def epoch_lines(run: RunFiles, key: str, style: int = 0, suffix: str = "") -> list[Series]:
    """One line per stream of a field of the epoch lines."""
    colors = stream_colors(run)
    return [Series(s + suffix, *column(log, key), colors[s], style) for s, log in run.logs.items()]


def epoch_chart(title: str, series: list[Series], caption: str, **options) -> Markup:
    """A figure over epochs with its legend; ``options`` go to ``line_chart``."""
    named = [s for s in series if len(s.x) and not s.faint]
    label = f"{title} per epoch: {', '.join(s.name for s in named) or 'nothing logged'}"
    key = legend([(s.name, s.color, s.style) for s in named])
    return figure(title, line_chart(series, label=label, **options), caption, key)


def curves_section(run: RunFiles) -> Markup:
    colors = stream_colors(run)
    steps = [
        Series(stream, step_axis(log), [step["loss"] for step in log.steps], colors[stream], faint=True)
        for stream, log in run.logs.items()
    ]
    accuracy = epoch_lines(run, "top1", 1, " training") + epoch_lines(run, "val_top1", 0, " validation")
    seen = "Training: augmented clips as they were seen. Validation: the val part of the split."
    figures = [
        epoch_chart("Loss", steps + epoch_lines(run, "loss"), "Mean of each epoch; thin: logged steps."),
        epoch_chart("Top-1", accuracy, seen, y_range=(0.0, 1.0), tick=_whole_percent),
        epoch_chart("Learning rate", epoch_lines(run, "lr"), "At the end of each epoch.", y_range=(0.0, None)),
    ]
    batches = epoch_lines(run, "batch")
    if len({size for series in batches for size in series.y}) > 1:
        told = "Clips per optimizer step, all ranks; solid: the batch, the other: the gradient noise scale."
        noise = epoch_lines(run, "noise_scale", 1, " noise scale")
        figures.append(epoch_chart("Batch", batches + noise, told, y_range=(0.0, None)))
    return section("Training", el("div", figures, class_="figures"))


def _whole_percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def time_parts(log: StreamLog) -> dict[str, float]:
    """Seconds of the epochs by kind; what the kinds do not explain is "other"."""
    parts = {
        "data": log.total("data_s"),
        "compute": log.total("compute_s"),
        "exposed communication": log.total("exposed_comm_s"),
    }
    return parts | {"other": max(0.0, log.total("seconds") - sum(parts.values()))}


def summary_parts(run: RunFiles) -> dict[str, float] | None:
    """The same for all streams, from summary.json."""
    seconds = (run.summary or {}).get("seconds") or {}
    if not seconds.get("total"):
        return None
    names = {"data": "data", "compute": "compute", "exposed communication": "exposed_comm"}
    parts = {kind: float(seconds.get(key) or 0.0) for kind, key in names.items()}
    return parts | {"other": max(0.0, seconds["total"] - sum(parts.values()))}


def time_section(run: RunFiles) -> Markup:
    rows = [(f"{stream}, training", time_parts(log)) for stream, log in run.logs.items()]
    if whole := summary_parts(run):
        rows.append(("all streams, training", whole))
    speed = epoch_lines(run, "clips_per_s")
    caption = "Clips per second and epoch, loading included."
    drawing, numbers = time_split(rows)
    chart = epoch_chart("Throughput", speed, caption, y_range=(0.0, None))
    return section("Time", el("div", drawing, chart, numbers, class_="flow"))


def time_split(rows: list[tuple[str, dict[str, float]]]) -> tuple[Markup, Markup]:
    """Stacked bars, and the same numbers as a table."""
    chart = stacked_bars(rows, TIME_KINDS, label="Time split; the table has the numbers")
    drawing = figure("Where the time went", chart, key=color_key(list(TIME_KINDS.items())))
    cells = [
        [name, *(duration(parts[kind]) for kind in TIME_KINDS), duration(sum(parts.values()))] for name, parts in rows
    ]
    columns = ["", *TIME_KINDS, "total"]
    caption = (
        "Data: the step waited for its batch. Exposed communication: hidden by no computation. "
        "Other: what these do not explain, such as validation and logging."
    )
    flush = range(1, len(columns))
    return drawing, el("div", table(columns, cells, label="Time in numbers", caption=caption, numeric=flush))


def confusion_section(run: RunFiles) -> Markup | None:
    best = run.best() or next(iter(run.scores), None)
    matrix = run.scores[best].confusion if best in run.scores else run.confusion
    if matrix is None or not matrix.sum():
        return None
    result = f"{best or 'result'}, {basis(run)}" if run.summary else f"{best or 'result'}"
    label = f"Confusion matrix of {len(run.classes)} classes; the most confused pairs are in the table beside it"
    drawing = figure(
        "Confusion matrix",
        scroll(heat_map(matrix, run.classes, label=label), "Confusion matrix"),
        f"{result}. Shade: share of the row; point at a cell for its names and count.",
    )
    return section("Classes", el("div", drawing, _class_table(run, matrix), _pairs(run, matrix), class_="flow"))


def _class_table(run: RunFiles, matrix: np.ndarray) -> Markup:
    clips = matrix.sum(axis=1)
    results = {stream: class_accuracy(scores.confusion) for stream, scores in run.scores.items()}
    results = results or {"accuracy": class_accuracy(matrix)}
    quoted = results.get("fused", next(iter(results.values())))
    rows = []
    for k in sorted(range(len(clips)), key=lambda k: (np.isnan(quoted[k]), quoted[k])):
        shares = [None if np.isnan(values[k]) else float(values[k]) for values in results.values()]
        bar = None if np.isnan(quoted[k]) else share_bar(float(quoted[k]), "")
        rows.append([run.classes[k], f"{int(clips[k]):,}", *map(percent, shares), bar])
    caption = "Accuracy per class, lowest first" + (f"; {basis(run)}." if run.summary else ".")
    columns = ["class", "clips", *results, ""]
    flush = range(1, len(columns) - 1)
    return el("div", table(columns, rows, label="Accuracy per class", caption=caption, numeric=flush, tall=True))


def _pairs(run: RunFiles, matrix: np.ndarray) -> Markup | None:
    clips = matrix.sum(axis=1)
    rows = [
        [
            run.classes[true],
            run.classes[predicted],
            f"{wrong:,} of {int(clips[true]):,}",
            percent(wrong / clips[true]),
        ]
        for true, predicted, wrong in most_confused(matrix, 10)
    ]
    columns = ["true class", "taken for", "clips", "share"]
    content = table(columns, rows, label="Most confused classes", caption="Most confused.", numeric=(2, 3))
    return el("div", content) if rows else None


def settings_section(run: RunFiles) -> Markup:
    environment = flatten((run.summary or {}).get("environment") or {})
    parts = [
        table(["environment", ""], environment, label="Environment")
        if environment
        else el("p", "The environment is written with the evaluation.", class_="muted"),
        table(["option", "value"], flatten(run.config), label="Options of the run", tall=True),
    ]
    return section("Environment and options", el("div", parts, class_="figures"))


def flatten(values: dict, prefix: str = "") -> list[list[str]]:
    """Rows of name and text; nested tables get dotted names."""
    rows = []
    for key, value in values.items():
        if isinstance(value, dict):
            rows += flatten(value, f"{prefix}{key}.")
        else:
            rows.append([f"{prefix}{key}", _plain(value)])
    return rows


def _plain(value) -> str:
    if isinstance(value, str):
        return value
    words = {None: "none", True: "yes", False: "no"}
    return words[value] if value is None or isinstance(value, bool) else json.dumps(value, default=str)
