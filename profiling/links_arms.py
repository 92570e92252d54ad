"""The ways of training that links.py compares, what each must send by formula, and in which turns they are measured."""

from __future__ import annotations

from dataclasses import dataclass, field

WINDOW = 16
"""Steps that figures are given for: the longest period."""
BLOCK = 256  # elements that share a float32 scale in int8
BATCH_NORM_BITS = 64  # running means and variances are averaged in float64
MOMENT_ROUNDS = {"local": (0, 0), "desloc": (3, 6)}  # rounds between averagings of m and of v


@dataclass(frozen=True)
class Arm:
    """One way of training.

    replica: arms of one name share a model and its optimizer in each rank; an averager that keeps arrays of its own
    (for compression or delay) has its own.
    """

    name: str
    kind: str  # "ddp", "kavg", or "alone": no communication
    replica: str
    period: int = 1
    options: dict = field(default_factory=dict)  # of ParameterAverager

    @property
    def turns(self) -> int:
        """How often it is its turn: a whole cycle of desloc's moments, else WINDOW steps in all; those without
        communication oftener, for they cost little and the others are held against them."""
        if self.options.get("moments") == "desloc":
            return 6
        if self.kind == "alone":
            return 4
        return 2 if self.period < WINDOW else 1

    @property
    def steps(self) -> int:
        """Of one turn; whole rounds."""
        return WINDOW // 2 if self.period < WINDOW else WINDOW

    @property
    def lead(self) -> int:
        """Steps before the first turn, not timed: with them a delayed mean arrives in the turn it was started in."""
        return self.options.get("delay", 0)


def arms(delay: int) -> dict[str, Arm]:
    desloc = {"moments": "desloc"}
    late = {"delay": delay}
    listed = [
        Arm("alone-torch", "alone", "torch"),
        Arm("ddp", "ddp", "ddp"),
        Arm("alone", "alone", "plain"),
        *(Arm(f"kavg-{period}", "kavg", "plain", period, {"moments": "local"}) for period in (1, 2, 4, 8, 16)),
        Arm("desloc-16", "kavg", "plain", 16, desloc),
        Arm("desloc-16-int8", "kavg", "int8", 16, desloc | {"compression": "int8"}),
        Arm("desloc-16-delay", "kavg", "delay", 16, desloc | late),
        Arm("desloc-16-int8-delay", "kavg", "int8-delay", 16, desloc | late | {"compression": "int8"}),
    ]
    return {arm.name: arm for arm in listed}


def baseline(arm: Arm) -> str:
    """The arm that computes the same without communication."""
    return "alone-torch" if arm.kind == "ddp" else "alone"


def in_turns(chosen: list[Arm]) -> list[Arm]:
    """Each as often as it has turns, spread evenly, so that a change of the machine's speed meets all alike."""
    moments = [((turn + 0.5) / arm.turns, order, arm) for order, arm in enumerate(chosen) for turn in range(arm.turns)]
    return [arm for _, _, arm in sorted(moments, key=lambda entry: entry[:2])]


def formula_bytes(arm: Arm, ranks: int, elements: int, batch_norm: int, turn: int) -> float:
    """What one rank sends in a turn, payload only: 2 (n - 1) / n of each array that is averaged.

    Args:
        elements: of the trainable parameters.
        batch_norm: elements of the running means and variances.
        turn: 0, 1, ...: desloc sends moments in some only.
    """
    if arm.kind == "alone":
        return 0.0
    rounds = [turn * (arm.steps // arm.period) + k + 1 for k in range(arm.steps // arm.period)]
    every_m, every_v = MOMENT_ROUNDS[arm.options.get("moments", "local")]
    moments = sum(1 for r in rounds for every in (every_m, every_v) if every and r % every == 0)
    compressed = arm.options.get("compression") == "int8"
    param_bits, moment_bits = (8 + 32 / BLOCK, 16) if compressed else (32, 32)
    # DDP broadcasts rank 0's buffers instead, which no formula for all ranks describes; a delayed averaging leaves
    # them to average_all()
    buffers = batch_norm if arm.kind == "kavg" and not arm.options.get("delay") else 0
    bits = elements * (param_bits * len(rounds) + moment_bits * moments) + BATCH_NORM_BITS * buffers * len(rounds)
    return 2 * (ranks - 1) / ranks * bits / 8
