"""Inline SVG: lines, stacked bars, heat map. Their colours come from style.css and follow the theme."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .markup import Markup, el
from .units import duration, number

WIDTH, HEIGHT = 360.0, 220.0  # drawn for a phone's width, so that 11 px letters stay readable there
LEFT, RIGHT, TOP, BOTTOM = 46.0, 12.0, 8.0, 34.0
COLORS = 6  # --c0 ... --c5 in style.css
MAX_POINTS = 300
DASHES = (None, "5 3", "1.5 3")


@dataclass(frozen=True)
class Series:
    """One line. ``style`` chooses solid, dashed or dotted, so that colour is never the only difference."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    style: int = 0
    faint: bool = False  # raw values behind their mean: thin, not in the legend


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers 1, 2, 2.5 or 5 times a power of ten that lie in [low, high]."""
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def line_chart(
    series: list[Series],
    *,
    label: str,
    x_label: str = "epoch",
    y_range: tuple[float | None, float | None] = (None, None),
    tick: Callable[[float], str] = number,
) -> Markup:
    """Lines over a common x axis.

    Args:
        series: values that are not finite are left out of the line.
        label: what a screen reader says of the picture.
        y_range: fixed ends of the y axis; None takes the data's.
    """
    lines = [(s, *_finite(s)) for s in series]
    lines = [line for line in lines if len(line[1])]
    if not lines:
        return el("p", "Nothing logged yet.", class_="muted")
    x_low, x_high = _extent([x for _, x, _ in lines])
    y_low, y_high = _extent([y for _, _, y in lines], *y_range)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        up = (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)
        return LEFT + across, HEIGHT - BOTTOM - up

    marks = []
    for value in ticks(y_low, y_high):
        _, y = at(x_low, value)
        marks.append(el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        marks.append(el("text", tick(value), x=LEFT - 6, y=y + 4, class_="tick end"))
    for value in [t for t in ticks(x_low, x_high) if t == int(t)]:
        x, _ = at(value, y_low)
        marks.append(el("text", f"{value:.0f}", x=x, y=HEIGHT - BOTTOM + 15, class_="tick mid"))
    marks.append(el("text", x_label, x=WIDTH - RIGHT, y=HEIGHT - 4, class_="tick end"))
    for s, xs, ys in sorted(lines, key=lambda line: not line[0].faint):
        points = [at(x, y) for x, y in zip(xs, ys, strict=True)]
        marks.append(_line(s, points, f"{s.name}: last {tick(float(ys[-1]))}"))
    return _figure(marks, WIDTH, HEIGHT, label)


def _line(s: Series, points: list[tuple[float, float]], title: str) -> Markup:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    paint = f"line s{s.color % COLORS}" + (" faint" if s.faint else "")
    dash = DASHES[s.style % len(DASHES)]
    children = [el("title", title), el("polyline", points=path, class_=paint, stroke_dasharray=dash)]
    if len(points) <= 30 and not s.faint:
        children += [_marker(x, y, s.color) for x, y in points]
    return el("g", *children)


def _marker(x: float, y: float, color: int) -> Markup:
    """Circles and squares alternate, so that neighbouring lines differ by more than colour."""
    paint = f"f{color % COLORS}"
    if color % 2:
        return el("rect", x=x - 2.2, y=y - 2.2, width=4.4, height=4.4, class_=paint)
    return el("circle", cx=x, cy=y, r=2.4, class_=paint)


def _finite(s: Series) -> tuple[np.ndarray, np.ndarray]:
    """The finite points, long lines averaged over bins so that a page stays small."""
    x, y = np.asarray(s.x, float), np.asarray(s.y, float)
    good = np.isfinite(x) & np.isfinite(y)
    x, y = x[good], y[good]
    if len(x) > MAX_POINTS:
        x, y = (np.array([part.mean() for part in np.array_split(v, MAX_POINTS)]) for v in (x, y))
    return x, y


def _extent(values: list[np.ndarray], low: float | None = None, high: float | None = None) -> tuple[float, float]:
    everything = np.concatenate(values)
    low = float(everything.min()) if low is None else low
    high = float(everything.max()) if high is None else high
    if high <= low:
        pad = abs(low) * 0.5 or 0.5
        return low - pad, low + pad
    return low, high


def legend(entries: list[tuple[str, int, int]]) -> Markup:
    """Names with a sample of their line: (name, color, style)."""
    items = []
    for name, color, style in entries:
        sample = el("line", x1=1, x2=27, y1=5, y2=5, class_=f"line s{color % COLORS}",
                    stroke_dasharray=DASHES[style % len(DASHES)])  # fmt: skip
        items.append(
            el(
                "li",
                el(
                    "svg",
                    sample,
                    _marker(14.0, 5.0, color),
                    viewBox="0 0 28 10",
                    class_="sample",
                    aria_hidden="true",
                ),
                name,
            )
        )
    return el("ul", items, class_="legend")


def stacked_bars(rows: list[tuple[str, dict[str, float]]], colors: dict[str, str], *, label: str) -> Markup:
    """Horizontal bars of seconds, on one scale.

    Args:
        rows: (name, {kind: seconds}).
        colors: kind -> CSS class of its fill, in stacking order.
    """
    longest = max((sum(parts.values()) for _, parts in rows), default=0.0)
    if longest <= 0:
        return el("p", "No times logged yet.", class_="muted")
    row_height = 50.0
    marks = []
    for position, (name, parts) in enumerate(rows):
        y = position * row_height
        total = sum(parts.values())
        marks.append(el("text", shorten(name, 34), el("title", name), x=0, y=y + 14, class_="name"))
        marks.append(el("text", duration(total), x=WIDTH, y=y + 14, class_="tick end"))
        x = 0.0
        for kind, css in colors.items():
            seconds = parts.get(kind, 0.0)
            width = seconds / longest * WIDTH
            if width <= 0:
                continue
            share = f"{100 * seconds / total:.0f} %"
            tip = el("title", f"{name}: {kind} {duration(seconds)}, {share}")
            marks.append(el("rect", tip, x=x, y=y + 20, width=max(width - 1, 0.5), height=20, class_=css))
            if width > 34:
                marks.append(el("text", share, x=x + width / 2, y=y + 34, class_=f"mid on-{css}"))
            x += width
    return _figure(marks, WIDTH, len(rows) * row_height, label)


def heat_map(matrix: np.ndarray, names: list[str], *, label: str) -> Markup:
    """Rows' shares as shades, counts where they fit. Drawn at its natural size: put it in a scrolling box."""
    n = len(names)
    cell, font = (30.0, 11.0) if n <= 12 else (20.0, 10.5) if n <= 30 else (12.0, 9.5)
    short = [shorten(name, 22) for name in names]
    margin = 22.0 + max((len(name) for name in short), default=0) * font * 0.62
    side = n * cell
    clips = matrix.sum(axis=1)
    marks = [el("rect", x=margin, y=margin, width=side, height=side, class_="plot")]
    for k in range(n + 1):
        at = margin + k * cell
        marks.append(el("path", d=f"M{at:g} {margin:g}v{side:g}M{margin:g} {at:g}h{side:g}", class_="grid"))
    for true, predicted in zip(*(axis.tolist() for axis in matrix.nonzero()), strict=True):
        value, share = int(matrix[true, predicted]), matrix[true, predicted] / clips[true]
        tip = el("title", f"true {names[true]}, predicted {names[predicted]}: {value} of {int(clips[true])} clips")
        x, y = margin + predicted * cell, margin + true * cell
        box = {"x": x + 0.5, "y": y + 0.5, "width": cell - 1, "height": cell - 1}
        marks.append(el("rect", tip, **box, class_="heat", fill_opacity=float(0.18 + 0.82 * share)))
        if cell >= 20 and value < 1000:
            ink = "cell strong" if share > 0.5 else "cell"
            marks.append(el("text", value, x=x + cell / 2, y=y + cell / 2 + 3.5, class_=ink))
    for k, name in enumerate(short):
        middle = margin + (k + 0.5) * cell
        style = f"font-size:{font:g}px"
        marks.append(el("text", name, x=margin - 6, y=middle + font * 0.35, class_="axis end", style=style))
        turn = f"translate({middle + font * 0.35:.1f} {margin - 6:.1f}) rotate(-90)"
        marks.append(el("text", name, transform=turn, class_="axis", style=style))
    marks.append(el("text", "predicted →", x=margin, y=12, class_="tick"))
    marks.append(el("text", "true ↓", x=0, y=margin - 6, class_="tick"))
    size = margin + side + 2
    return _figure(marks, size, size, label, natural=True)


def shorten(name: str, limit: int) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"


def _figure(marks: list[Markup], width: float, height: float, label: str, natural: bool = False) -> Markup:
    size = {"width": math.ceil(width), "height": math.ceil(height)} if natural else {}
    box = f"0 0 {width:g} {height:g}"
    return el("svg", *marks, viewBox=box, role="img", aria_label=label, class_=None if natural else "chart", **size)
