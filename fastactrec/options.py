"""Options that are written as text, and the one way to refuse a wrong one."""

from __future__ import annotations

import re

from .errors import InputError

STREAMS = ("rgb", "flow")


def require(condition: bool, message: str) -> None:
    """Raises InputError with the message unless the condition holds."""
    if not condition:
        raise InputError(message)


def parse_streams(text: str) -> tuple[str, ...]:
    """``"rgb,flow"`` -> ``("rgb", "flow")``; unknown, empty or repeated names are refused."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        require(name in STREAMS, f"--streams {text}: {name!r} is not one of {', '.join(STREAMS)}")
    require(len(set(names)) == len(names), f"--streams {text}: a stream is named twice")
    return names


def parse_size(text: str) -> tuple[int, int | None]:
    """``"short:256"`` -> (256, None): the short side. ``"340x256"`` -> (340, 256): width and height exactly."""
    if found := re.fullmatch(r"short:(\d+)", text):
        size = (int(found[1]), None)
    elif found := re.fullmatch(r"(\d+)x(\d+)", text):
        size = (int(found[1]), int(found[2]))
    else:
        raise InputError(f"--size {text}: give short:N (short side, pixels) or WIDTHxHEIGHT, such as 340x256")
    require(
        all(16 <= side <= 8192 for side in size if side is not None),
        f"--size {text}: sides are 16 to 8192 pixels",
    )
    return size


def parse_weights(text: str, streams: tuple[str, ...]) -> dict[str, float]:
    """Fusion weights ``"rgb=1,flow=1.5"`` for the streams at hand; a stream that is not named weighs 1."""
    weights = dict.fromkeys(streams, 1.0)
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        require(
            name in STREAMS and 0 <= number < float("inf"),
            f"--fusion-weights {text}: write STREAM=NUMBER, such as rgb=1,flow=1.5",
        )
        if name in weights:
            weights[name] = number
    require(sum(weights.values()) > 0, f"--fusion-weights {text}: all weights are zero")
    return weights


def parse_scales(text: str) -> tuple[float, ...]:
    """``"1,0.875"`` -> (1.0, 0.875): each in (0, 1]."""
    try:
        scales = tuple(float(part) for part in text.split(","))
    except ValueError:
        scales = ()
    require(
        bool(scales) and all(0 < s <= 1 for s in scales),
        f"--scales {text}: numbers in (0, 1], comma-separated",
    )
    return scales


def parse_hierarchy(text: str) -> str | tuple[int, int] | None:
    """``"none"`` -> None, ``"auto"`` -> "auto", ``"4,2"`` -> (4, 2)."""
    if text in ("none", "auto"):
        return None if text == "none" else text
    parts = text.split(",")
    require(
        len(parts) == 2 and all(part.strip().isdigit() and int(part) for part in parts),
        f"--hierarchy {text}: give none, auto, or ranks per machine and averagings per global one, such as 4,2",
    )
    return int(parts[0]), int(parts[1])
