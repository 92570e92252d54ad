"""What ParameterAverager can be asked for, and which options go together (docs/averaging.md has the table)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import InputError

# Rounds between averagings of the first and the second moments; 0: only in average_all().
MOMENT_ROUNDS = {"local": (0, 0), "mean": (1, 1), "desloc": (3, 6), "reset": (0, 0), "frozen_v": (1, 1)}
COMPRESSION_BITS = {"bf16": 16, "int8": 8, "int4": 4}
BUFFERS = ("mean", "local")


@dataclass(frozen=True)
class AveragingOptions:
    """The options of ParameterAverager, which explains them.

    Raises:
        InputError: a value out of range, or two options that exclude each other; in one sentence.
    """

    period: int = 8
    moments: str = "desloc"
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    delay: int = 0
    compression: str | None = None
    hierarchy: str | tuple[int, int] | None = None
    warmup: int = 0
    quadratic: float | None = None
    buffers: str = "mean"

    def __post_init__(self):
        _require_count("period", self.period, 1, "the number of steps between averagings")
        _require_count("delay", self.delay, 0, "the number of steps that an averaging may take")
        _require_count("warmup", self.warmup, 0, "the number of steps with averaged gradients at the start")
        _require_choice("moments", self.moments, MOMENT_ROUNDS)
        _require_choice("compression", self.compression, [None, *COMPRESSION_BITS])
        _require_choice("buffers", self.buffers, BUFFERS)
        if not (0 < self.outer_lr < math.inf):
            raise InputError(f"outer_lr={self.outer_lr}: give a number > 0")
        if not 0 <= self.outer_momentum < 1:
            raise InputError(f"outer_momentum={self.outer_momentum}: give a number in [0, 1)")
        if self.quadratic is not None and not 0 < self.quadratic < math.inf:
            raise InputError(f"quadratic={self.quadratic}: give the c of max(period, (c / lr)^2), a number > 0")
        if self.hierarchy is not None and self.hierarchy != "auto":
            pair = self.hierarchy
            if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(n, int) and n >= 1 for n in pair)):
                raise InputError(
                    f"hierarchy={pair!r}: give 'auto' or (ranks per node, local averagings per global one)"
                )
        if self.delay >= self.period and self.delay:
            raise InputError(
                f"delay={self.delay}: an averaging must end before the next begins, so give less than "
                f"period={self.period}"
            )
        for name, wanted, other, present in (
            ("delay", self.delay, "an outer step", self.outer),
            ("delay", self.delay, f"moments={self.moments!r}", self.moments in ("reset", "frozen_v")),
            ("hierarchy", self.hierarchy, "delay", self.delay),
            ("hierarchy", self.hierarchy, "compression", self.compression),
            ("hierarchy", self.hierarchy, "an outer step", self.outer),
            ("hierarchy", self.hierarchy, f"moments={self.moments!r}", self.moments in ("reset", "frozen_v")),
        ):  # fmt: skip
            if wanted and present:
                raise InputError(f"{name} and {other} do not go together: choose one")

    @property
    def outer(self) -> bool:
        """Whether an outer step follows the mean; otherwise the mean is copied."""
        return self.outer_lr != 1 or self.outer_momentum != 0

    @property
    def anchored(self) -> bool:
        """Whether ranks must know the last average: to step from it, or to send differences to it."""
        return self.outer or self.compression is not None


def _require_count(name: str, value: int, least: int, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name}={value}: give {what}, {least} or more")


def _require_choice(name: str, value, choices) -> None:
    if value not in choices:
        raise InputError(f"{name}={value!r}: choose from {', '.join(map(str, choices))}")


class PeriodSchedule:
    """How many steps the next round takes: the period, or more as the learning rate falls.

    K = max(period, floor((c / lr)^2)) is the quadratic synchronisation rule (Gu et al., arXiv 2310.14423). While the
    learning rate has not begun to fall, its largest value so far counts, so that a warm-up from small rates does not
    begin with long rounds.
    """

    def __init__(self, period: int, quadratic: float | None):
        self.period = period
        self.quadratic = quadratic
        self.peak = 0.0
        self.last = 0.0
        self.falling = False

    def next_round(self, lr: float, initial_lr: float) -> int:
        """Args: the first group's learning rate now, and the one its schedule began with."""
        self.falling |= lr < self.last
        self.peak, self.last = max(self.peak, lr, initial_lr), lr
        if self.quadratic is None:
            return self.period
        rate = lr if self.falling else self.peak
        return max(self.period, int((self.quadratic / rate) ** 2)) if rate else self.period

    def state_dict(self) -> dict:
        return {"peak": self.peak, "last": self.last, "falling": self.falling}

    def load_state_dict(self, state: dict) -> None:
        self.peak, self.last, self.falling = state["peak"], state["last"], state["falling"]
