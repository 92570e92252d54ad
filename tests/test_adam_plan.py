"""The compiled plan: what it refuses, and the same bits from every instruction set and number of threads."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fastactrec as far
from fastactrec import _ext, ops


def plan_of(table, numel=8, grad=np.float32):
    """A plan of one bucket of zeros; `table`: (begin, end) per parameter."""
    rows = np.zeros(len(table), ops.ADAM_SEGMENT)
    rows["begin"], rows["end"] = np.array(table).T
    rows["live"] = 1
    segments = rows.view(np.uint8).reshape(len(rows), -1)
    plan = _ext.AdamPlan(segments, np.zeros((1, ops.ADAM_GROUP.itemsize), np.uint8), segments.copy())
    arrays = [np.zeros(numel, kind) for kind in (np.float32, grad, np.float32, np.float32)]
    plan.add_bucket(*arrays, None, None, None, None, 0, len(rows))
    return plan


WRONG_TABLES = [[(0, 9)], [(4, 2)], [(0, 5), (4, 8)], [(2, 4)], [(-4, 2)], [(4, 8), (0, 4)]]


@pytest.mark.parametrize("table", WRONG_TABLES, ids=str)
def test_tables_that_would_write_elsewhere_are_refused(table):
    plan_of([(0, 3), (4, 8)]).advance(None, None, None, 0.0, 0)
    with pytest.raises(RuntimeError, match="out of order, bounds or alignment"):
        plan_of(table)


def test_arrays_that_do_not_fit_are_refused():
    with pytest.raises(RuntimeError, match="grad is neither float32"):
        plan_of([(0, 8)], grad=np.float64)
    with pytest.raises(RuntimeError, match="a parameter beside its weight"):
        plan_of([(0, 8)], grad=np.float16)
    plan = plan_of([(0, 8)])
    with pytest.raises(RuntimeError, match="found_inf has 2 elements"):
        plan.advance(None, np.zeros(2, np.float32), None, 0.0, 0)
    with pytest.raises(RuntimeError, match="buckets 0 to 2 of 1"):
        plan.update(0, 2, [], 1, 0)
    with pytest.raises(RuntimeError, match="out has 7 elements"):
        plan.update(0, 1, [np.zeros(7, np.float32)], 1, 0)
    zeros = np.zeros(8, np.float32)
    with pytest.raises(TypeError):
        plan.add_bucket(zeros, zeros[::-1], zeros, zeros, None, None, None, None, 0, 1)
    with pytest.raises(RuntimeError, match="partial sums"):
        _ext.sum_squares(zeros, np.zeros(2), 1, 0)


ISA_SCRIPT = """
import hashlib, itertools
import torch
import fastactrec as far
from fastactrec import ops

random = torch.Generator().manual_seed(0)
values = [[torch.randn(n, generator=random) for n in (0, 1, 31, 257, 70_011, 100_003)] for _ in range(3)]

def digest(dtype, moments, options, threads):
    torch.set_num_threads(threads)
    params = [value.to(dtype, copy=True).requires_grad_() for value in values[0]]
    buckets = far.FlatBuckets(params, bucket_bytes=400_000)
    buckets.add_state("snapshot", dtype)
    opt = far.FusedAdam(buckets, lr=0.01, weight_decay=0.02, moments_dtype=moments, **options)
    for scale, grads in zip((100.0, 0.01), values[1:]):
        for p, g in zip(params, grads):
            p.grad.copy_(g * scale)
        opt.step(out="snapshot")
    flats = [flat for bucket in buckets for name, flat in sorted(bucket.flat.items())]
    return hashlib.sha256(b"".join(flat.view(torch.uint8).numpy().tobytes() for flat in flats)).hexdigest()

print(ops.build_info()["isa"])
plain, other = {}, {"amsgrad": True, "decoupled": True, "maximize": True, "max_norm": 2.0}
types = torch.float32, torch.bfloat16, torch.float16
for dtype, moments, options in itertools.product(types, types[:2], (plain, other)):
    print(dtype, moments, options == other, *{digest(dtype, moments, options, threads) for threads in (1, 3)})
"""


@pytest.mark.slow
def test_instruction_sets_and_threads_agree_bit_for_bit():
    here = Path(far.__file__).resolve().parent.parent
    results = {}
    for isa in ops.build_info()["isas"].split(","):
        done = subprocess.run(
            [sys.executable, "-c", ISA_SCRIPT],
            env={**os.environ, "FASTACTREC_ISA": isa, "PYTHONPATH": str(here)},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        used, *lines = done.stdout.splitlines()
        results[used] = lines
    assert ops.build_info()["isa"] in results
    digests = next(iter(results.values()))
    assert all(len(line.split()) == 4 for line in digests), "numbers of threads differ"
    assert len({line.split()[-1] for line in digests}) == 12  # every case is another computation
    assert all(lines == digests for lines in results.values())
