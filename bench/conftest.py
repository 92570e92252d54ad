"""Every benchmark records machine and versions; competitors take turns, since machines are noisy."""

import os
import platform
import time
from collections.abc import Callable

import pytest
import torch

from fastactrec import ops
from fastactrec.machine import cpu_model


@pytest.fixture(autouse=True)
def machine(request):
    if "benchmark" in request.fixturenames:
        request.getfixturevalue("benchmark").extra_info.update(
            cpu=cpu_model(),
            cores=os.cpu_count(),
            threads=torch.get_num_threads(),
            load=os.getloadavg()[0],
            isa=ops.build_info()["isa"],
            torch=torch.__version__,
            python=platform.python_version(),
        )


@pytest.fixture
def in_turns() -> Callable[[dict[str, Callable], float], dict[str, float]]:
    """in_turns({name: call}, seconds) -> smallest time of each in seconds, the calls taking turns."""

    def measure(calls: dict[str, Callable], seconds: float) -> dict[str, float]:
        for call in calls.values():
            call()
        times = {name: [] for name in calls}
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times[next(iter(calls))]) < 3:
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
        return {name: min(values) for name, values in times.items()}

    return measure
