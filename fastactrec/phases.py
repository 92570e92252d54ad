"""Where a step's time goes: named phases, recorded and shown to NVIDIA's profilers at the same time.

::

    recorder = PhaseRecorder()
    with recorder.phase("forward"):
        loss = model(inputs)
    recorder.totals()  # {"forward": 0.0123}

Times are ``time.perf_counter`` seconds of the host. Work queued on a GPU ends later than the call that queued
it: give ``synchronize=torch.cuda.synchronize`` to measure the work itself (for a trace; it costs overlap), or
leave the host times and read the NVTX ranges in Nsight Systems. A phase costs about 2 µs without a profiler.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import nvtx

DOMAIN = "fastactrec"
COLORS = {
    "data": "orange",
    "decode": "gold",
    "h2d": "brown",
    "forward": "blue",
    "backward": "darkblue",
    "optimizer": "green",
    "averaging": "purple",
}
"""The phases of a training step and their colours in a profiler; a range's category has its name."""

COMPUTE = ("forward", "backward", "optimizer")
COMMUNICATION = ("averaging",)
DATA = ("data", "h2d")
"""Phases by kind; decoding runs in threads beside the step, so it is no part of the step's data time."""


class PhaseRecorder:
    """Start and end of every phase since the last reset. Phases may nest and run in threads."""

    def __init__(self, *, synchronize: Callable[[], object] | None = None, clock=time.perf_counter):
        """
        Args:
            synchronize: called before each start and end is read, so that queued GPU work
                counts where it belongs.
            clock: seconds, increasing.
        """
        self._synchronize = synchronize
        self._clock = clock
        self._domain = nvtx.get_domain(DOMAIN)
        self._attributes = {
            name: self._domain.get_event_attributes(message=name, category=name, color=color)
            for name, color in COLORS.items()
        }
        self._spans: dict[str, list[tuple[float, float]]] = {name: [] for name in COLORS}

    def phase(self, name: str) -> _Phase:
        """A context manager over one of ``COLORS``; the time counts also when the body raises.

        Raises:
            ValueError: no such phase (constant names keep traces of different runs comparable).
        """
        if name not in self._spans:
            raise ValueError(f"{name!r} is not a phase; phases are {', '.join(COLORS)}")
        return _Phase(self, name)

    def add(self, name: str, start_s: float, end_s: float) -> None:
        """Record an interval measured elsewhere with the same clock, such as an asynchronous collective."""
        if name not in self._spans:
            raise ValueError(f"{name!r} is not a phase; phases are {', '.join(COLORS)}")
        self._spans[name].append((start_s, end_s))

    def totals(self) -> dict[str, float]:
        """Seconds per phase, phases that did not occur left out; overlapping intervals count each."""
        return {name: sum(end - start for start, end in spans) for name, spans in self._spans.items() if spans}

    def intervals(self, name: str) -> np.ndarray:
        """float64 [N, 2], start and end in seconds, in the order they ended."""
        return np.array(self._spans[name], dtype=np.float64).reshape(-1, 2)

    def reset(self) -> None:
        """Forget all intervals. A phase that is open now is recorded when it ends."""
        for spans in self._spans.values():
            spans.clear()


class _Phase:
    """One use of a phase; a small object per use keeps nesting and threads independent."""

    __slots__ = ("_name", "_recorder", "_start")

    def __init__(self, recorder: PhaseRecorder, name: str):
        self._recorder = recorder
        self._name = name

    def __enter__(self) -> None:
        recorder = self._recorder
        if recorder._synchronize is not None:
            recorder._synchronize()
        recorder._domain.push_range(recorder._attributes[self._name])
        self._start = recorder._clock()

    def __exit__(self, *exc_info) -> None:
        recorder = self._recorder
        try:
            if recorder._synchronize is not None:
                recorder._synchronize()
        finally:
            # appending to a list is atomic, so threads need no lock
            recorder._spans[self._name].append((self._start, recorder._clock()))
            recorder._domain.pop_range()
