"""The emulator: small kernels are right for every order of threads, and planted faults are found."""

from __future__ import annotations

import emulated
import numpy as np
import pytest

if reason := emulated.why_not():
    pytest.skip(reason, allow_module_level=True)

SELFTEST = "tests/emulated/selftest.cu"
SEEDS = range(8)
SIZES = [1, 31, 255, 257, 1023]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "sanitized"])
def kernels(request):
    library = emulated.build([SELFTEST], sanitized=request.param)
    yield library
    library.close()


@pytest.fixture(scope="module")
def plain():
    return emulated.build([SELFTEST])


@pytest.fixture(scope="module")
def sanitized():
    library = emulated.build([SELFTEST], sanitized=True)
    yield library
    library.close()


def random(size: int) -> np.random.Generator:
    return np.random.default_rng(size)


def per_block(values: np.ndarray, threads: int = 256) -> np.ndarray:
    padded = np.zeros(-(-len(values) // threads) * threads, values.dtype)
    padded[: len(values)] = values
    return padded.reshape(-1, threads)


# Each check runs one kernel on random input and compares with NumPy; a planted fault must make it fail.


def check_block_sum(library, size, seed):
    values = random(size).integers(-50, 50, size).astype(np.float32)  # sums are exact
    sums = np.full(-(-size // 256), np.nan, np.float32)
    library.block_sum(values, size, sums, seed=seed)
    np.testing.assert_array_equal(sums, per_block(values).sum(1))


def check_warp_sum(library, size, seed):
    values = random(size).integers(-50, 50, size).astype(np.float64)
    sums = np.full(-(-size // 256), np.nan)
    library.warp_sum(values, size, sums, seed=seed)
    np.testing.assert_array_equal(sums, per_block(values).sum(1))


def check_count(library, size, seed):
    values = random(size).integers(-2, 20, size).astype(np.int32)
    if size > 256:
        values[:256] = 1  # a block in which all are
    blocks = -(-size // 256)
    ballots, total = np.zeros(blocks * 8, np.int32), np.zeros(1, np.int32)
    some, everyone = np.zeros(blocks, np.int32), np.zeros(blocks, np.int32)
    library.count_positive(values, size, ballots, total, some, everyone, seed=seed)
    positive = per_block(values) > 0
    assert total[0] == positive.sum()
    bits = np.packbits(positive.reshape(-1, 32), axis=1, bitorder="little").view(np.int32)[:, 0]
    np.testing.assert_array_equal(ballots, bits)
    np.testing.assert_array_equal(some, positive.any(1))
    np.testing.assert_array_equal(everyone, positive.all(1))


def check_histogram(library, size, seed, bins=300):
    values = random(size).integers(0, bins, size).astype(np.int32)
    out, largest = np.full(bins, -1, np.int32), np.zeros(1, np.int32)
    library.histogram(values, size, bins, out, largest, seed=seed)
    np.testing.assert_array_equal(out, np.bincount(values, minlength=bins))
    assert largest[0] == values.max()


def check_reverse(library, size, seed):
    values = np.arange(size, dtype=np.int32)
    out = np.full(size, -1, np.int32)
    library.reverse(values, size, out, seed=seed)
    expected = np.concatenate([values[i : i + 256][::-1] for i in range(0, size, 256)])
    np.testing.assert_array_equal(out, expected)


def check_rotate(library, size, seed, steps=3):
    blocks = -(-size // 256)
    values = np.arange(blocks * 256, dtype=np.int32)
    expected = np.roll(values.reshape(blocks, 256), -steps, axis=1).ravel()
    library.rotate(values, blocks, steps, seed=seed)
    np.testing.assert_array_equal(values, expected)


def check_transpose(library, size, seed):
    rows, columns = 33, -(-size // 33)
    values = random(size).standard_normal((rows, columns)).astype(np.float32)
    out = np.full((columns, rows), np.nan, np.float32)
    library.transpose(values, rows, columns, out, seed=seed)
    np.testing.assert_array_equal(out, values.T)


CHECKS = [
    check_block_sum,
    check_warp_sum,
    check_count,
    check_histogram,
    check_reverse,
    check_rotate,
    check_transpose,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("size", SIZES)
def test_kernels_are_right_for_every_order(kernels, check, size):
    for seed in SEEDS:
        check(kernels, size, seed)


def order_of(library, seed, blocks=3):
    ticket, order = np.zeros(1, np.int32), np.full(blocks * 64, -1, np.int32)
    library.order(blocks, ticket, order, seed=seed)
    return order


def test_orders_follow_the_seed(plain):
    orders = [tuple(order_of(plain, seed)) for seed in SEEDS]
    assert len(set(orders)) == len(orders)
    assert orders[3] == tuple(order_of(plain, 3))
    for order in orders:
        assert sorted(order) == list(range(3 * 64))
    first_blocks = {np.argmin(order) // 64 for order in orders}
    assert len(first_blocks) > 1  # blocks are permuted too


# Faults, each in a kernel of its own, so that one build holds them all: the text, what becomes of it, the check.
RACES = {
    "no barrier in a tree": (
        "    __syncthreads();\n    if (t < width) partial[t] += partial[t + width];",
        "    if (t < width) partial[t] += partial[t + width];",
        check_block_sum,
    ),
    "no barrier between the warps": (
        "  if (lane == 0) partial[warp] = sum;\n  __syncthreads();",
        "  if (lane == 0) partial[warp] = sum;",
        check_warp_sum,
    ),
    "no barrier after clearing": ("own[b] = 0;\n  __syncthreads();", "own[b] = 0;", check_histogram),
    "no barrier before the next round": (
        "own = ring[(t + 1) % threads];\n    __syncthreads();",
        "own = ring[(t + 1) % threads];",
        check_rotate,
    ),
    "no barrier in a tile": (
        "tile[y][x] = in[row * columns + column];\n  __syncthreads();",
        "tile[y][x] = in[row * columns + column];",
        check_transpose,
    ),
    "too few blocks": (
        "launch(reverse_kernel, blocks_for(count),",
        "launch(reverse_kernel, dim3(unsigned(count / threads)),",
        check_reverse,
    ),
}
OVERRUNS = {
    "reads past the input": (
        "partial[t] = i < count ? values[i]",
        "partial[t] = i <= count ? values[i]",
        check_block_sum,
        "heap-buffer-overflow",
    ),
    "writes past the output": (
        "if (row < columns && column < rows) out",
        "if (row <= columns && column < rows) out",
        check_transpose,
        "heap-buffer-overflow",
    ),
    "past dynamic shared memory": (
        "b < bins; b += int(blockDim.x)) own[b] = 0",
        "b <= bins; b += int(blockDim.x)) own[b] = 0",
        check_histogram,
        "heap-buffer-overflow",
    ),
    "past an array in shared memory": (
        "out[begin + t] = tile[here - 1 - t];",
        "out[begin + t] = tile[here + t];",
        check_reverse,
        "out of bounds",
    ),
}


def with_faults(faults, **options):
    return emulated.build([SELFTEST], patches={SELFTEST: [fault[:2] for fault in faults.values()]}, **options)


@pytest.mark.parametrize("fault", RACES)
def test_faults_give_wrong_results(fault):
    library = with_faults(RACES)
    for seed in SEEDS:
        with pytest.raises(AssertionError):
            RACES[fault][2](library, 1023, seed)


@pytest.mark.parametrize("fault", OVERRUNS)
def test_faults_are_reported_by_the_sanitizers(fault):
    _, _, check, words = OVERRUNS[fault]
    library = with_faults(OVERRUNS, sanitized=True)
    with pytest.raises(emulated.EmulatorError, match=words):
        check(library, 1023, 0)


def test_pointers_past_shared_memory_are_reported(sanitized):
    with pytest.raises(emulated.EmulatorError, match=r"global-buffer-overflow|insufficient space"):
        sanitized.pointer_overrun(np.zeros(256, np.float32))


def test_misaligned_vectors_are_reported(sanitized):
    with pytest.raises(emulated.EmulatorError, match="misaligned address"):
        sanitized.misaligned(np.zeros(8, np.float32))


def test_a_report_does_not_end_the_library(sanitized):
    with pytest.raises(emulated.EmulatorError):
        sanitized.misaligned(np.zeros(8, np.float32))
    check_block_sum(sanitized, 257, 0)


def test_shared_memory_starts_as_garbage(plain):
    for seed in SEEDS:
        out = np.zeros(512, np.float32)
        plain.uninitialised(out, seed=seed)
        assert (out[:256] == 1).all()
        assert np.isnan(out[256:]).all()


@pytest.mark.parametrize(
    ("which", "words"),
    [
        (0, r"a kernel, block \(0, 0, 0\): its threads wait for each other; 32 at __syncthreads"),
        (1, "16 at __shfl_sync in line [0-9]+, mask 0xffffffff; 48 at __syncthreads"),
        (2, "lane [0-9]+ is not in its own mask"),
        (3, "reads lane 20, which takes no part"),
        (4, r"a grid of \(1, 65536, 1\) blocks"),
        (5, r"a block of \(1025, 1, 1\) threads"),
        (6, r"a grid of \(0, 1, 1\) blocks"),
        (7, "49153 bytes of shared memory"),
        (8, r"a block of \(1, 1, 65\) threads"),
    ],
)
def test_what_a_gpu_would_refuse_or_hang_on_is_an_error(kernels, which, words):
    for seed in SEEDS:
        with pytest.raises(emulated.EmulatorError, match=words):
            kernels.refused(which, np.zeros(1024, np.int32), seed=seed)


def test_a_patch_that_does_not_fit_fails():
    with pytest.raises(AssertionError, match="holds 0 times"):
        emulated.build([SELFTEST], patches={SELFTEST: [("no such text", "")]})
