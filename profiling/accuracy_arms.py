"""What the accuracy study compares, and at which settings."""

from __future__ import annotations

from dataclasses import dataclass, field

RANKS = 4
GRID = (1e-3, 3e-3, 6e-3)
BASELINE, PLACEBO = "sync", "sync, other seeds"


@dataclass(frozen=True)
class Arm:
    """One way to keep ranks together; ``options`` are ParameterAverager's, times counted in epochs left to ``fit``."""

    name: str
    family: str
    """Arms of a family share the learning rate that its representative chose."""
    options: dict = field(default_factory=dict)
    synchronous_epochs: float = 0.0
    """Epochs at the beginning in which gradients are averaged."""
    seed_shift: int = 0


@dataclass(frozen=True)
class Settings:
    """Everything that a run's result depends on besides data, arm, fold and seed."""

    crop: int = 56
    width: int = 16
    flow_length: int = 5
    segments: int = 3
    test_segments: int = 5
    passes: int = 5
    """Passes over the training clips in an epoch, at whose end everything is averaged."""
    epochs: int = 6
    batch: int = 4
    """Clips per rank and step."""
    folds: int = 2
    inner_folds: int = 3
    """One of them validates, the rest train, in the search of the learning rate."""
    bucket_kib: int = 512


def kavg(period: int, moments: str = "desloc", **options) -> Arm:
    extra = "".join(f", {name.replace('_', ' ')} {value}" for name, value in options.items())
    family = "outer" if "outer_momentum" in options else "kavg"
    return Arm(f"K={period} {moments}{extra}", family, {"period": period, "moments": moments, **options})


def arms(full: bool) -> list[Arm]:
    """The arms of the study; ``full``: every period with every policy."""
    table = [
        Arm(BASELINE, "sync", synchronous_epochs=float("inf")),
        Arm(PLACEBO, "sync", synchronous_epochs=float("inf"), seed_shift=1000),
        *(kavg(period) for period in (1, 2, 4, 8, 16)),
        *(kavg(8, moments) for moments in ("local", "mean", "reset", "frozen_v")),
        *(kavg(16, moments) for moments in ("local", "mean")),
        kavg(8, compression="int8"),
        kavg(8, compression="int4"),
        kavg(16, compression="int8"),
        kavg(8, delay=4),
        kavg(8, compression="int8", delay=4),
        kavg(8, outer_momentum=0.2),
        kavg(8, outer_momentum=0.5),
        Arm("1 epoch sync, K=8 desloc", "kavg", {"period": 8}, synchronous_epochs=1),
        Arm("quadratic from K=4, desloc", "kavg", {"period": 4, "quadratic": 2.0}),
    ]
    if full:
        names = {arm.name for arm in table}
        policies = ("local", "mean", "desloc", "reset", "frozen_v")
        more = [kavg(period, moments) for period in (1, 2, 4, 8, 16) for moments in policies]
        more += [kavg(8, compression="bf16"), kavg(16, compression="int4"), kavg(16, compression="int8", delay=8)]
        table += [arm for arm in more if arm.name not in names]
    return table


REPRESENTATIVES = {
    "sync": Arm(BASELINE, "sync", synchronous_epochs=float("inf")),
    "kavg": kavg(8),
    "outer": kavg(8, outer_momentum=0.5),
}
"""The arm of each family that searches the learning rate."""
