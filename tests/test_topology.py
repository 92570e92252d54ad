"""Which GPUs NVLink joins, by a stand-in for NVML: a list of GPUs and the bus ids that their links lead to."""

import sys
import types

import pytest
import torch

from fastactrec.optim import topology


class NVMLError(Exception):
    pass


def stand_in(links: list[list[str]], driver: bool = True) -> types.ModuleType:
    module = types.ModuleType("pynvml")

    def init():
        if not driver:
            raise NVMLError

    def state(handle, link):
        if link >= len(links[handle]):
            raise NVMLError
        return links[handle][link] != "off"

    module.NVMLError, module.NVML_NVLINK_MAX_LINKS, module.NVML_FEATURE_ENABLED = NVMLError, 18, 1
    module.nvmlInit, module.nvmlShutdown = init, lambda: None
    module.nvmlDeviceGetHandleByUUID = lambda uuid: int(uuid.removeprefix("GPU-"))
    module.nvmlDeviceGetPciInfo = lambda handle: types.SimpleNamespace(busId=f"0000:0{handle}:00.0")
    module.nvmlDeviceGetNvLinkState = state
    module.nvmlDeviceGetNvLinkRemotePciInfo = lambda handle, link: types.SimpleNamespace(busId=links[handle][link])
    return module


def gpu(index: int) -> bytes:
    return f"0000:0{index}:00.0".encode()


CASES = {
    "pairs": ([[gpu(1)], [gpu(0)], [gpu(3)], [gpu(2)]], [[0, 1], [2, 3]], 2),
    "one switch": ([["switch"], ["SWITCH"], ["switch"], ["switch"]], [[0, 1, 2, 3]], 4),
    "a chain": ([[gpu(1)], [], [gpu(3)], [gpu(1)]], [[0, 1, 2, 3]], 4),
    "crossed pairs": ([[gpu(2)], [gpu(3)], [gpu(0)], [gpu(1)]], [[0, 2], [1, 3]], 4),
    "three and one": ([[gpu(1)], [gpu(2)], [], []], [[0, 1, 2], [3]], 4),
    "links off": ([["off", gpu(1)], [], ["off"], []], [[0, 1], [2], [3]], 4),
    "no links": ([[], [], [], []], [[0], [1], [2], [3]], 4),
}


@pytest.mark.parametrize("name", CASES)
def test_islands(name, monkeypatch):
    links, islands, ranks = CASES[name]
    monkeypatch.setitem(sys.modules, "pynvml", stand_in(links))
    assert topology.nvlink_islands([f"GPU-{index}" for index in range(4)]) == islands
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(uuid=index))
    assert topology.ranks_per_island() == ranks


def test_without_gpu_or_driver_the_machine_counts(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", stand_in([[]], driver=False))
    assert topology.nvlink_islands(["GPU-0", "GPU-1"]) == [[0], [1]]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert topology.ranks_per_island() == 3
