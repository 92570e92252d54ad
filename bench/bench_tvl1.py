"""TV-L1 beside OpenCV's TV-L1 and DIS, one thread each, on a real pair: time, and error against the truth.

    FASTACTREC_DATA=... pytest bench/bench_tvl1.py --benchmark-json=tvl1.json

Each benchmark carries `times_opencv_tvl1`: the median processor time of OpenCV's TV-L1 over its own, measured
in turns in this run.
"""

import os
import statistics
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import fastactrec as far
from fastactrec import ops

cv2 = pytest.importorskip("cv2")

SIZES = {"584x388": (584, 388), "340x256": (340, 256)}  # width, height; the first is the pair's own
METHODS = ["fastactrec", "fastactrec median 5", "opencv tvl1", "opencv dis"]
EPE_LIMIT_PX = {"fastactrec": 0.156, "fastactrec median 5": 0.156, "opencv tvl1": 0.16, "opencv dis": 0.24}
TURNS = 3


@pytest.fixture(scope="module")
def whale():
    """Two gray frames and the true flow [2, H, W], NaN where it is not known."""
    root = Path(os.environ.get("FASTACTREC_DATA", Path(__file__).resolve().parents[2] / "shared/data"))
    folder = root / "flow/middlebury/RubberWhale"
    if not folder.is_dir():
        pytest.skip("the Middlebury pair is not here: set FASTACTREC_DATA")
    frames = [cv2.imread(str(folder / name), cv2.IMREAD_GRAYSCALE) for name in ("frame10.png", "frame11.png")]
    truth = np.fromfile(folder / "flow10.flo", "<f4", offset=12).reshape(*frames[0].shape, 2).transpose(2, 0, 1)
    return *frames, np.where(np.abs(truth) < 1e9, truth, np.nan)


def flow_function(method):
    if method == "opencv tvl1":
        algorithm = cv2.optflow.DualTVL1OpticalFlow_create()
    elif method == "opencv dis":
        algorithm = cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)
    if method.startswith("opencv"):
        return lambda *pair: algorithm.calc(*pair, None).transpose(2, 0, 1)
    return lambda *pair: far.tvl1(*pair, threads=1, median=5 if "median" in method else None).numpy()


def seconds(function, *pair):
    begin = time.process_time()
    function(*pair)
    return time.process_time() - begin


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", SIZES)
def bench_tvl1(benchmark, whale, method, size):
    cv2.setNumThreads(1)
    *frames, truth = whale
    compute, opencv = flow_function(method), flow_function("opencv tvl1")

    error = float(np.nanmean(np.linalg.norm(compute(*frames) - truth, axis=0)))
    assert error <= EPE_LIMIT_PX[method]

    pair = [cv2.resize(frame, SIZES[size], interpolation=cv2.INTER_AREA) for frame in frames]
    turns = [(seconds(opencv, *pair), seconds(compute, *pair)) for _ in range(TURNS)]
    theirs, own = (statistics.median(column) for column in zip(*turns, strict=True))
    benchmark.extra_info.update(
        epe_px=round(error, 4),
        times_opencv_tvl1=round(theirs / own, 2),
        isa=ops.build_info()["isa"],
        opencv=cv2.__version__,
        torch=torch.__version__,
    )
    benchmark.group = f"TV-L1 {size}, one thread"
    benchmark.pedantic(compute, pair, rounds=2 if method == "opencv tvl1" else 10, warmup_rounds=1)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("pairs", [1, 4])
def bench_threads(benchmark, whale, pairs, threads):
    *frames, _ = whale
    prev, next = (np.stack([cv2.resize(f, (340, 256), interpolation=cv2.INTER_AREA)] * pairs) for f in frames)
    assert torch.equal(far.tvl1(prev, next, threads=threads), far.tvl1(prev, next, threads=1))
    benchmark.group = f"TV-L1 340x256, {pairs} pairs"
    benchmark.extra_info["pairs"] = pairs
    benchmark.pedantic(far.tvl1, (prev, next), {"threads": threads}, rounds=5, warmup_rounds=1)
