"""Compression on every device, against plain NumPy; what rounding loses, and what error feedback gives back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import quantise_oracle as oracle
import torch

import fastactrec as far
from fastactrec import ops

BITS = (16, 8, 4)
SIZES = [0, 1, 2, 127, 129, 255, 256, 257, 1023, 70_001]  # the last is more than one task of the CPU
LARGEST = float(np.finfo(np.float32).max)


def randoms(size: int, seed: int, spread: float = 3.0) -> np.ndarray:
    """float32 [size], the magnitudes of neighbouring blocks far apart."""
    generator = np.random.default_rng(seed)
    blocks = 10.0 ** generator.uniform(-spread, spread, size // oracle.BLOCK + 1)
    return (generator.normal(size=size) * np.repeat(blocks, oracle.BLOCK)[:size]).astype(np.float32)


def quantise(device, values, bits, factor=1.0, reference=None, residual=None) -> np.ndarray:
    """The payload; residual is changed in place."""
    there = [None if a is None else torch.from_numpy(a).to(device) for a in (values, reference, residual)]
    payload = torch.full((ops.payload_bytes(len(values), bits),), 0xA5, dtype=torch.uint8, device=device)
    ops.quantise(there[0], payload, bits=bits, factor=factor, reference=there[1], residual=there[2])
    if residual is not None:
        residual[...] = there[2].cpu().numpy()
    return payload.cpu().numpy()


def dequantise_sum(device, payloads, numel, bits, base=None) -> np.ndarray:
    out = torch.full((numel,), 7.0, device=device)
    rows = np.array(payloads, np.uint8).reshape(len(payloads), ops.payload_bytes(numel, bits))
    there = None if base is None else torch.from_numpy(base).to(device)
    ops.dequantise_sum(torch.from_numpy(rows).to(device), out, bits=bits, base=there)
    return out.cpu().numpy()


@pytest.mark.parametrize("bits", BITS)
def test_payload_bytes(bits):
    for size in SIZES:
        assert ops.payload_bytes(size, bits) == oracle.payload_size(size, bits)
        assert ops.payload_bytes(size, bits) % 16 == 0
    full = 4_000_000
    assert full * bits / 8 <= ops.payload_bytes(full, bits) <= 1.04 * full * bits / 8


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("subtract", "feed_back"), [(False, False), (True, False), (False, True), (True, True)])
def test_against_numpy(device, bits, size, subtract, feed_back):
    values = randoms(size, 1)
    reference = randoms(size, 2) if subtract else None
    residual = randoms(size, 3) if feed_back else None
    y = oracle.compensated(values, 0.3, reference, residual)
    payload = quantise(device, values, bits, 0.3, reference, residual)
    oracle.check_payload(payload, y, bits)
    decoded = oracle.decode(payload, size, bits)
    if feed_back:
        np.testing.assert_array_equal(residual, y - decoded)
    np.testing.assert_array_equal(dequantise_sum(device, [payload], size, bits), decoded)


@pytest.mark.parametrize("bits", [8, 4])
def test_ties_go_to_even(device, bits):
    limit = oracle.LIMIT[bits]
    values = np.arange(-limit, limit, 0.5, dtype=np.float32)[: oracle.BLOCK]  # the first one makes the scale 1
    codes, scales = oracle.unpack(quantise(device, values, bits), len(values), bits)
    assert scales[0] == 1
    np.testing.assert_array_equal(codes[0][: len(values)], np.rint(values))  # NumPy's rint: ties to even


def test_bfloat16_is_torch_s(device):
    values = np.concatenate([randoms(5000, 4), np.array([np.inf, -np.inf, LARGEST, 1e-45, -0.0], np.float32)])
    oracle.check_payload(quantise(device, values, 16), values, 16)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("largest", [0.0, 1e-45, 3e-42, 2.0**-126, 127 * 2.0**-126, 1e-37, 1.0, 1e38, LARGEST])
def test_blocks_of_any_magnitude(device, bits, largest):
    values = (randoms(300, 5, spread=0) / 10).clip(-1, 1) * np.float32(largest)
    values[7] = -largest
    residual = np.zeros(300, np.float32)
    payload = quantise(device, values, bits, residual=residual)
    oracle.check_payload(payload, values, bits)
    decoded = dequantise_sum(device, [payload], 300, bits)
    assert np.isfinite(decoded).all()
    _, scales = oracle.unpack(payload, 300, bits)
    bound = np.repeat(scales.astype(np.float64), oracle.BLOCK)[:300] / 2 * (1 + oracle.EPS)
    assert (np.abs(values.astype(np.float64) - decoded) <= bound).all()
    assert (np.abs(residual) <= bound).all()
    if largest == 0:
        assert not decoded.any()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_diverged_block_is_seen(device, bits, bad):
    values, residual = randoms(1000, 6), np.zeros(1000, np.float32)
    values[300] = bad
    payload = quantise(device, values, bits, residual=residual)
    others = [quantise(device, randoms(1000, seed), bits) for seed in (7, 8)]
    total = dequantise_sum(device, [others[0], payload, others[1]], 1000, bits, base=randoms(1000, 9))
    spoilt = np.arange(1000) == 300 if bits == 16 else np.arange(1000) // oracle.BLOCK == 1
    assert np.isfinite(total[~spoilt]).all()
    assert np.isfinite(residual[~spoilt]).all()
    assert np.isnan(residual[spoilt]).all()
    if bits == 16 and not np.isnan(bad):
        assert total[300] == bad
        return
    assert np.isnan(total[spoilt]).all()
    assert set(total[spoilt].view(np.uint32)) == {0x7FC00000}  # the same bits on every machine
    assert set(residual[spoilt].view(np.uint32)) == {0x7FC00000}


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 9])
def test_rows_are_added_in_order(device, bits, rows):
    size = 1025
    payloads = [quantise(device, randoms(size, 10 + row), bits) for row in range(rows)]
    for base in (None, randoms(size, 99)):
        expected = np.zeros(size, np.float32)
        for payload in payloads:
            expected += oracle.decode(payload, size, bits)
        expected = expected if base is None else base + expected
        np.testing.assert_array_equal(dequantise_sum(device, payloads, size, bits, base), expected)


@pytest.mark.parametrize("bits", BITS)
def test_parts_of_larger_arrays(device, bits):
    """Floats from any element on, payloads between others; nothing beside them changes, and `out` may be `base`."""
    size, width = 777, ops.payload_bytes(777, bits)
    flat = {name: torch.from_numpy(randoms(4 * size, seed)).to(device) for seed, name in enumerate("vrea")}
    message = torch.full((3, 2 * width + 48), 0xA5, dtype=torch.uint8, device=device)
    for row, offset in enumerate((0, 1, 7)):
        at = slice(offset, offset + size)
        whole = {name: array[at].clone() for name, array in flat.items()}
        before = {name: array.cpu().numpy().copy() for name, array in flat.items()}
        part, alone = message[row, 32 : 32 + width], torch.empty(width, dtype=torch.uint8, device=device)
        for array, payload in ((flat["v"][at], part), (whole["v"], alone)):
            chosen = {name: flat[name][at] if payload is part else whole[name] for name in "re"}
            ops.quantise(array, payload, bits=bits, factor=0.5, reference=chosen["r"], residual=chosen["e"])
        assert torch.equal(part, alone)
        assert torch.equal(flat["e"][at], whole["e"])
        outside = np.ones(4 * size, bool)
        outside[at] = False
        for name, array in flat.items():
            np.testing.assert_array_equal(array.cpu().numpy()[outside], before[name][outside])
    assert (message[:, :32] == 0xA5).all()
    assert (message[:, 32 + width :] == 0xA5).all()
    rows = message[:, 32 : 32 + width]
    expected = dequantise_sum(device, rows.cpu().numpy(), size, bits, base=flat["a"][3 : 3 + size].cpu().numpy())
    ops.dequantise_sum(rows, flat["a"][3 : 3 + size], bits=bits, base=flat["a"][3 : 3 + size])
    np.testing.assert_array_equal(flat["a"][3 : 3 + size].cpu().numpy(), expected)


@pytest.mark.parametrize("bits", [8, 4])
def test_error_feedback_loses_nothing(device, bits):
    """What was sent so far follows the sum of all inputs at a distance of half a step of the quantisation, which does
    not grow with the number of rounds; without feedback it does."""
    size, rounds = 600, 400
    generator = np.random.default_rng(11)
    drift = generator.normal(size=size).astype(np.float32) * np.float32(0.01)  # less than half a step, mostly
    residual = np.zeros(size, np.float32)
    inputs, sent, sent_without = (np.zeros(size) for _ in range(3))
    distances, steps = [], []
    for _ in range(rounds):
        values = generator.normal(size=size).astype(np.float32) * np.float32(0.02) + drift
        values[:: oracle.BLOCK] = 1.0  # keeps the steps coarse
        inputs += values
        sent_without += oracle.decode(quantise(device, values, bits), size, bits)
        payload = quantise(device, values, bits, residual=residual)
        sent += oracle.decode(payload, size, bits)
        _, scales = oracle.unpack(payload, size, bits)
        steps.append(np.repeat(scales, oracle.BLOCK)[:size])
        distances.append(np.abs(inputs - sent))
    rounding = 2.0**-23 * rounds  # y = values + residual is rounded once per round
    for distance, step in zip(distances, steps, strict=True):
        assert (distance <= step / 2 * (1 + oracle.EPS) + rounding).all()
    assert np.abs(inputs - sent_without).max() > 3 * np.max(steps)


def test_bad_input_is_refused_in_a_sentence(device):
    values, payload = torch.zeros(300, device=device), torch.zeros(528, dtype=torch.uint8, device=device)

    def refused(match, **changes):
        given = {"values": values, "payload": payload, "bits": 8, **changes}
        with pytest.raises(RuntimeError, match=match):
            ops.quantise(**given)

    assert ops.payload_bytes(300, 8) == 528
    refused("no payload of 2 bits", bits=2)
    refused("the factor is nan", factor=float("nan"))
    refused("payload has 512 bytes, not 528", payload=payload[:512])
    refused(
        "payload does not begin at a multiple of 16", payload=torch.zeros(544, dtype=torch.uint8, device=device)[8:536]
    )
    refused("payload is not a uint8 array of 1 dimension", payload=payload.view(2, 264))
    refused("payload is not a uint8", payload=payload.view(torch.int8))
    refused("reference has 299 elements, not 300", reference=torch.zeros(299, device=device))
    refused("residual is not a float32", residual=torch.zeros(300, dtype=torch.float64, device=device))
    refused("values is not a float32 array of one dimension without gaps", values=torch.zeros(600, device=device)[::2])
    refused("values has 2 dimensions", values=torch.zeros(3, 100, device=device))
    refused("residual and values overlap", residual=values)
    shared = torch.zeros(600, device=device)
    refused("residual and reference overlap", reference=shared[:300], residual=shared[200:500])
    rows = payload.view(1, 528)
    out = torch.zeros(300, device=device)
    with pytest.raises(RuntimeError, match="out and base overlap"):
        ops.dequantise_sum(rows, shared[:300], bits=8, base=shared[4:304])
    with pytest.raises(RuntimeError, match="payloads is not a uint8 array of 2 dimensions"):
        ops.dequantise_sum(payload, out, bits=8)
    with pytest.raises(RuntimeError, match="payloads has 528 bytes, not 272"):
        ops.dequantise_sum(rows, out, bits=4)
    with pytest.raises(RuntimeError, match="-1 elements"):
        ops.payload_bytes(-1, 8)
    with pytest.raises(RuntimeError, match="no payload of 7 bits"):
        ops.payload_bytes(1, 7)


@pytest.mark.cuda
def test_devices_must_agree():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    with pytest.raises(RuntimeError, match="payload lies on another device"):
        ops.quantise(torch.zeros(1, device="cuda"), torch.zeros(272, dtype=torch.uint8), bits=8)


# Without torch, whose import takes longer than the rest of these tests.
ISA_SCRIPT = """
import hashlib, sys
import numpy as np
from fastactrec import _ext
data = np.load(sys.argv[1])
numel = len(data["values"])
results = set()
for threads in (1, 2, 3):
    digest = hashlib.sha256()
    for bits in (16, 8, 4):
        residual, payloads = data["residual"].copy(), np.empty((5, _ext.payload_bytes(numel, bits)), np.uint8)
        for payload in payloads:
            _ext.quantise(data["values"], payload, bits, 0.7, data["reference"], residual, threads, 0)
        out = np.empty(numel, np.float32)
        _ext.dequantise_sum(payloads, out, bits, data["reference"], threads, 0)
        digest.update(payloads.tobytes() + residual.tobytes() + out.tobytes())
    results.add(digest.hexdigest())
print(_ext.build_info()["isa"], *results)
"""


def test_instruction_sets_and_threads_agree_bit_for_bit(tmp_path):
    size = 200_011  # several tasks
    arrays = {name: randoms(size, seed, spread=30) for seed, name in enumerate(("values", "reference", "residual"))}
    arrays["values"][[5000, 9000, 13_000]] = np.nan, np.inf, -np.inf
    arrays["reference"][9000] = np.inf  # inf - inf, of which processors make NaNs of different signs
    np.savez(tmp_path / "in.npz", **arrays)
    here = Path(far.__file__).resolve().parent.parent
    results = {}
    for isa in ops.build_info()["isas"].split(","):
        done = subprocess.run(
            [sys.executable, "-c", ISA_SCRIPT, tmp_path / "in.npz"],
            env={**os.environ, "FASTACTREC_ISA": isa, "PYTHONPATH": str(here)},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        used, digest = done.stdout.split()  # one digest: threads agree
        results[used] = digest
    assert ops.build_info()["isa"] in results
    assert len(set(results.values())) == 1
