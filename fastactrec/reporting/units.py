"""Numbers as people read them, always with their unit."""

from __future__ import annotations

import math


def percent(fraction: float | None) -> str:
    """0.8421 -> ``84.2 %``."""
    return "–" if fraction is None else f"{100 * fraction:.1f} %"


def points(difference: float | None) -> str:
    """A difference of two fractions in percentage points, signed."""
    return "–" if difference is None else f"{100 * difference:+.1f} points".replace("-", "−")


def duration(seconds: float | None) -> str:
    """0.0123 -> ``12.3 ms``, 75 -> ``1 min 15 s``."""
    if seconds is None:
        return "–"
    if seconds < 0.9995:
        return f"{1e3 * seconds:.1f} ms" if seconds else "0 s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def count(number: int, noun: str, plural: str = "") -> str:
    """``1 clip``, ``1,204 clips``."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def number(value: float) -> str:
    """Three or four significant digits, no exponent in the usual range: an axis tick or a table cell."""
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:,.4g}".replace("-", "−")
    return f"{value:.3g}".replace("-", "−")


def wilson(fraction: float, n: int) -> tuple[float, float]:
    """95 % interval of a share seen in ``n`` independent clips (Wilson 1927)."""
    if n == 0:
        return 0.0, 1.0
    z = 1.959964
    centre = fraction + z * z / (2 * n)
    spread = z * math.sqrt(fraction * (1 - fraction) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def sign_test(wins: int, losses: int) -> float:
    """Two-sided exact probability of so uneven a count if both were equally likely (McNemar's exact test)."""
    n = wins + losses
    tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1))
    return min(1.0, 2 * tail / 2**n)
