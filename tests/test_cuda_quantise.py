"""Compression's CUDA kernels, run thread by thread on the CPU: against plain NumPy, and against the CPU loops bit for
bit; then with faults planted into copies of their source."""

from __future__ import annotations

import emulated
import numpy as np
import pytest
import quantise_oracle as oracle
import torch

from fastactrec import ops

if reason := emulated.why_not():
    pytest.skip(reason, allow_module_level=True)

KERNELS = "csrc/cuda/quantise.cu"
SOURCES = [KERNELS, "tests/emulated/quantise.cpp"]
SEEDS = range(3)
BITS = (16, 8, 4)
SIZES = [0, 1, 31, 129, 255, 256, 257, 1023, 2048, 4097]  # 2048: one CUDA block


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "sanitized"])
def kernels(request):
    library = emulated.build(SOURCES, sanitized=request.param)
    yield library
    library.close()


def random_inputs(size: int, offset: int = 0) -> dict[str, np.ndarray]:
    """float32 [offset + size] each, whose first `offset` elements nobody may touch."""
    generator = np.random.default_rng(size)
    arrays = {}
    for name in ("values", "reference", "residual", "base"):
        numbers = generator.normal(size=size) * 10.0 ** generator.uniform(-3, 3, size)
        arrays[name] = np.concatenate([np.full(offset, 3.0), numbers]).astype(np.float32)
    if size > 1000:  # NaN, infinity, infinity minus infinity; and a block of zeros
        values, reference, residual, _ = (array[offset:] for array in arrays.values())
        values[[300, 600, 700]] = np.nan, np.inf, np.inf
        reference[700] = np.inf
        values[768:1024] = reference[768:1024] = residual[768:1024] = 0
    return arrays


def assert_same_bits(got: np.ndarray, expected: np.ndarray, what: str) -> None:
    differing = np.flatnonzero(got.view(np.uint8) != expected.view(np.uint8))
    assert not len(differing), f"{what} differs from the CPU's in {len(differing)} bytes, the first at {differing[0]}"


def check(library, size: int, bits: int, seed: int, *, subtract=True, feed_back=True, offset=0, rows=3) -> None:
    """One call of each kernel; floats begin `offset` elements behind a multiple of 16 bytes."""
    inputs = random_inputs(size, offset)
    values, reference, residual, base = inputs.values()
    reference, residual = reference if subtract else None, residual if feed_back else None
    width = ops.payload_bytes(size, bits)
    payload, twin = np.full(width, 0xA5, np.uint8), np.full(width, 0x5A, np.uint8)
    there = {name: torch.from_numpy(array.copy())[offset:] for name, array in inputs.items()}
    options = {"reference": there["reference"] if subtract else None}
    options["residual"] = there["residual"] if feed_back else None
    ops.quantise(there["values"], torch.from_numpy(twin), bits=bits, factor=0.3, **options)
    inside = [None if array is None else array[offset:].copy() for array in (values, reference, residual)]
    y = oracle.compensated(inside[0], 0.3, *inside[1:])

    library.quantise(offset, values, reference, residual, payload, 0.3, bits, size, seed=seed)
    assert_same_bits(payload, twin, "the payload")
    if feed_back:
        assert_same_bits(residual[offset:], there["residual"].numpy(), "the residual")
        assert (residual[:offset] == 3).all()
    if np.isfinite(y).all() or bits != 16:
        oracle.check_payload(payload, y, bits)

    payloads = np.zeros((rows, width), np.uint8)
    for row in range(rows):
        ops.quantise(there["values"] * (row + 1), torch.from_numpy(payloads[row]), bits=bits)
    total = sum((oracle.decode(row, size, bits) for row in payloads), np.zeros(size, np.float32))
    for added in (None, base):
        out, twin = np.full(offset + size, 3, np.float32), torch.empty(size)
        ops.dequantise_sum(torch.from_numpy(payloads), twin, bits=bits, base=None if added is None else there["base"])
        library.dequantise_sum(offset, payloads, rows, width, added, out, bits, size, seed=seed)
        assert_same_bits(out[offset:], twin.numpy(), "the sum")
        assert (out[:offset] == 3).all()
        np.testing.assert_array_equal(out[offset:], total if added is None else added[offset:] + total)


def check_blocks(library) -> None:
    """Enough blocks for the largest magnitude to lie in any part of one."""
    for size in (257, 1023, 4097):
        check(library, size, 4, 0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_compression(kernels, bits, size):
    for seed in SEEDS:
        check(kernels, size, bits, seed)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("subtract", "feed_back"), [(False, False), (True, False), (False, True)])
def test_what_may_be_missing(kernels, bits, subtract, feed_back):
    check(kernels, 1023, bits, 0, subtract=subtract, feed_back=feed_back, rows=int(feed_back))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_floats_from_any_element_on(kernels, bits, offset):
    check(kernels, 1023, bits, 0, offset=offset)


# Faults in copies of the source; the text must be there, so that a change of the kernels is noticed here.
SHUFFLES = "for (int flip = lanes / 2; flip > 0; flip /= 2)"
GRID = "(quantise_blocks(a.numel) + warps - 1) / warps"
LEAVE = "if (block >= blocks) return;  // a whole warp"
READ = "if (wide && numel - at > 3) return"
PADDING = "lane < padded_scales(a.numel, bits) - blocks"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (SHUFFLES, SHUFFLES.replace("lanes / 2", "lanes / 4")),  # half a warp's maximum
        ("__shfl_xor_sync(~0u, largest, flip)", "__shfl_xor_sync(~0u, largest, flip, lanes / 2)"),
        (PADDING, "lane + 1 < padded_scales(a.numel, bits) - blocks"),
        ("first | second << 4;", "first | second << 5;"),
    ],
)
def test_faults_of_a_block_are_found(old, new):
    library = emulated.build(SOURCES, patches={KERNELS: [(old, new)]})
    with pytest.raises(AssertionError):
        check_blocks(library)


def test_a_missing_lane_is_found():
    library = emulated.build(SOURCES, patches={KERNELS: [(LEAVE, "if (block >= blocks || threadIdx.x == 5) return;")]})
    with pytest.raises(emulated.EmulatorError, match="reads lane 5, which takes no part"):
        check(library, 257, 8, 0)


def test_too_few_blocks_are_found():
    library = emulated.build(SOURCES, patches={KERNELS: [(GRID, "quantise_blocks(a.numel) / warps")]})
    with pytest.raises(AssertionError, match="differs from the CPU's"):
        check(library, 4097, 8, 0)
    with pytest.raises(emulated.EmulatorError, match=r"a grid of \(0, 1, 1\) blocks"):
        check(library, 31, 8, 0)


@pytest.mark.parametrize(
    ("old", "new"),
    [(READ, READ.replace("> 3", "> 2")), (LEAVE, LEAVE.replace(">=", ">"))],
)
def test_bounds_off_by_one_are_reported(old, new):
    library = emulated.build(SOURCES, sanitized=True, patches={KERNELS: [(old, new)]})
    with pytest.raises(emulated.EmulatorError, match="heap-buffer-overflow"):
        check(library, 255, 8, 0)


def test_wide_accesses_of_narrow_arrays_are_reported():
    library = emulated.build(SOURCES, sanitized=True, patches={KERNELS: [("& 15) == 0;", "& 0) == 0;")]})
    with pytest.raises(emulated.EmulatorError, match="misaligned address"):
        check(library, 257, 8, 0, offset=1)
