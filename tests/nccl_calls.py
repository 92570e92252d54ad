"""What test_nccl.py runs, each scenario in a process of its own, without torch: one rank over the stand-in for NCCL.

python nccl_calls.py SCENARIO FOLDER prints what the scenario's steps raised, one a line.
"""

from __future__ import annotations

import shutil
import sys
import time

import nccl_standin
import numpy as np

FOLDER = sys.argv[2]


def attempt(call, *args):
    """Prints kind and message of the error, or "fine"."""
    start = time.monotonic()
    try:
        result = call(*args)
    except Exception as error:
        print(type(error).__name__, str(error).replace("\n", " "))
        result = None
    else:
        print("fine")
    assert time.monotonic() - start < 5
    return result


def one(module, rank=0, world=1, device=0, timeout_s=30.0):
    return module.NcclCommunicator(module.nccl_unique_id(), rank, world, device, timeout_s)


def reduce(communicator, label="", stream=7, array=None):
    return communicator.all_reduce(np.ones(4, np.float32) if array is None else array, "sum", label, stream)


def sequence(module, misbehave):
    misbehave("in_progress", 2)
    communicator = one(module, device=3)
    buffer = np.ones(5, np.float32)
    attempt(communicator.enroll, buffer)  # refused: on device 0
    communicator = one(module)
    communicator.enroll(buffer)
    handle = reduce(communicator, array=buffer)
    handle.wait(0)
    received, sent = np.zeros(6, np.uint8), np.arange(6, dtype=np.uint8)
    communicator.all_to_all(received, sent, [6], "", 7).wait(7)
    assert (received == sent).all()
    reduce(communicator)  # dropped before anyone waited
    communicator.check("round 1")
    communicator.close()
    communicator.close()
    handle.wait(0)  # its result is there
    attempt(reduce, communicator)
    attempt(communicator.check, "round 2")


def never(module, misbehave):
    misbehave("never", 1)
    attempt(lambda: one(module, timeout_s=0.3))
    attempt(lambda: one(module, rank=1, world=2, timeout_s=0.3))


def async_error(module, misbehave):
    communicator = one(module)
    handle = reduce(communicator, "bucket 3 of step 120")
    misbehave("async_error", 6)
    attempt(handle.wait, 7)
    misbehave("async_error", 0)
    attempt(handle.wait, 7)
    attempt(reduce, communicator)
    attempt(communicator.check, "round 2")
    communicator.close()
    communicator.close()
    communicator = one(module)
    misbehave("async_error", 6)
    attempt(communicator.check, "round 2")


def watched(module, misbehave):
    """Nobody asks: the thread that watches gives up."""
    communicator = one(module, timeout_s=1.0)
    misbehave("async_error", 6)
    time.sleep(0.6)
    misbehave("async_error", 0)
    attempt(communicator.check, "round 2")
    communicator = one(module, timeout_s=0.5)
    module.set_stuck(True)
    reduce(communicator, "bucket 3 of step 120")
    time.sleep(1.0)
    attempt(communicator.check, "round 2")


def failed_calls(module, misbehave):
    misbehave("fail_init", 1)
    attempt(lambda: one(module))
    communicator = one(module)
    misbehave("fail_all_reduce", 1)
    attempt(reduce, communicator, "bucket 3 of step 120")
    communicator = one(module)
    misbehave("fail_send", 1)
    attempt(communicator.all_to_all, np.zeros(6, np.uint8), np.zeros(6, np.uint8), [6], "", 7)


def refused(module, misbehave):
    communicator = one(module)
    f32, f64 = np.zeros(4, np.float32), np.zeros(4)
    attempt(reduce, communicator, "", 7, np.zeros(4, np.int32))
    attempt(reduce, communicator, "", 7, np.zeros((2, 2), np.float32))
    attempt(reduce, communicator, "", 7, np.zeros(8, np.float32)[::2])
    attempt(communicator.all_reduce, f32, "mean", "", 7)
    attempt(communicator.all_gather, f32, f64, "", 7)
    attempt(communicator.all_gather, f32, np.zeros(3, np.float32), "", 7)
    attempt(communicator.reduce_scatter, f32, np.zeros(3, np.float32), "sum", "", 7)
    attempt(communicator.all_to_all, f32, f32, [2, 2], "", 7)
    attempt(communicator.all_to_all, f32, f32, [3], "", 7)
    attempt(lambda: one(module, rank=1))
    attempt(lambda: one(module, timeout_s=0.0))
    attempt(lambda: one(module, device=8))
    attempt(lambda: module.NcclCommunicator(b"short", 0, 1, 0, 1.0))


def no_farewell(module, misbehave):
    """Other ranks never finish: closing fails within the timeout, dropping is silent."""
    misbehave("never_finalize", 1)
    attempt(one(module, timeout_s=0.3).close)
    communicator = one(module, timeout_s=0.3)
    del communicator


def old(module, misbehave):
    misbehave("version", 21805)
    attempt(module.nccl_library)
    misbehave("version", 21900)
    print(attempt(module.nccl_library))


def twice(module, misbehave):
    second = f"{FOLDER}/second"
    shutil.copytree(FOLDER, second, dirs_exist_ok=True, ignore=lambda *_: ["second"])
    nccl_standin.load_standin(second)
    attempt(module.nccl_library)
    attempt(module.nccl_unique_id)


def missing(module, misbehave):
    attempt(module.nccl_library)
    misbehave = nccl_standin.load_standin(FOLDER)  # what was not there is looked for again
    attempt(module.nccl_library)
    misbehave("version", 0)


def real(module, misbehave):
    """NVIDIA's library, which must refuse to join: no GPU is visible."""
    import torch

    del torch  # it has brought the library
    print(*module.nccl_library())
    print(len(module.nccl_unique_id()), module.nccl_unique_id() != module.nccl_unique_id())
    attempt(lambda: one(module, timeout_s=5.0))


if __name__ == "__main__":
    scenario = sys.argv[1]
    misbehave = None if scenario in ("missing", "real") else nccl_standin.load_standin(FOLDER)
    globals()[scenario](nccl_standin.load_module(FOLDER), misbehave)
