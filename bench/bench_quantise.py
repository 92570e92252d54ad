"""Compression beside the same thing in torch's operations, and beside a copy of the same bytes.

quantise: values, reference and residual are read, residual and payload written: 16 bytes per element and the payload.
dequantise_sum, four ranks: base and four payloads are read, out written: 8 bytes per element and the payloads.
"""

import pytest
import torch

from fastactrec import ops

NUMEL = 25_557_032 // 256 * 256  # ResNet-50's parameters; whole blocks, as torch's version needs them
RANKS = 4
LIMIT = {8: 127, 4: 7}


def torch_quantise(values, reference, residual, factor, bits):
    """(codes, scales); residual in place."""
    y = (values - reference).mul_(factor).add_(residual)
    if bits == 16:
        codes = y.bfloat16()
        torch.sub(y, codes, out=residual)
        return codes, None
    blocks = y.view(-1, 256)
    scales = blocks.abs().amax(1, keepdim=True).div_(LIMIT[bits]).clamp_(min=2.0**-126)
    rounded = (blocks / scales).round_().clamp_(-LIMIT[bits], LIMIT[bits])
    torch.sub(blocks, rounded * scales, out=residual.view(-1, 256))
    codes = rounded.to(torch.int8)
    if bits == 4:
        codes = (codes[:, :128] & 15) | (codes[:, 128:] << 4)
    return codes, scales


def torch_sum(rows, base, bits):
    out = base.clone()
    for codes, scales in rows:
        if bits == 16:
            out += codes
        elif bits == 8:
            out.view(-1, 256).addcmul_(codes.float(), scales)
        else:
            out.view(-1, 256)[:, :128].addcmul_((codes << 4 >> 4).float(), scales)
            out.view(-1, 256)[:, 128:].addcmul_((codes >> 4).float(), scales)
    return out


def report(benchmark, best, moved, call, **more):
    benchmark.extra_info.update(
        elements=NUMEL,
        bytes=moved,
        gb_per_s=round(moved / best["ours"] / 1e9, 1),
        torch_over_ours=round(best["torch"] / best["ours"], 2),
        copy_over_ours=round(best["copy"] / best["ours"], 2),
        **more,
    )
    benchmark.pedantic(call, rounds=3)


def copying(moved):
    """A copy that reads half of the bytes and writes the other half."""
    source, target = torch.ones(moved // 2, dtype=torch.uint8), torch.zeros(moved // 2, dtype=torch.uint8)
    return lambda: target.copy_(source)


@pytest.mark.parametrize("bits", [16, 8, 4])
def bench_quantise(benchmark, in_turns, bits):
    generator = torch.Generator().manual_seed(0)
    values, reference = (torch.randn(NUMEL, generator=generator) for _ in range(2))
    ours, theirs = torch.zeros(NUMEL), torch.zeros(NUMEL)
    payload = torch.empty(ops.payload_bytes(NUMEL, bits), dtype=torch.uint8)

    def quantise():
        ops.quantise(values, payload, bits=bits, factor=0.25, reference=reference, residual=ours)

    quantise()
    torch_quantise(values, reference, theirs, 0.25, bits)
    step = 2.0**-7 if bits == 16 else 2.0 / LIMIT[bits]  # a tie may go to the other side
    assert (ours - theirs).abs().gt(1e-4 * step).float().mean() < 1e-4
    best = in_turns(
        {
            "ours": quantise,
            "torch": lambda: torch_quantise(values, reference, theirs, 0.25, bits),
            "copy": copying(16 * NUMEL + len(payload)),
        },
        2.0,
    )
    report(benchmark, best, 16 * NUMEL + len(payload), quantise, compressed_to=round(len(payload) / (4 * NUMEL), 4))


@pytest.mark.parametrize("bits", [16, 8, 4])
def bench_dequantise_sum(benchmark, in_turns, bits):
    generator = torch.Generator().manual_seed(0)
    base, out = torch.randn(NUMEL, generator=generator), torch.empty(NUMEL)
    payloads = torch.empty(RANKS, ops.payload_bytes(NUMEL, bits), dtype=torch.uint8)
    rows = []
    for payload in payloads:
        values = torch.randn(NUMEL, generator=generator)
        ops.quantise(values, payload, bits=bits)
        rows.append(torch_quantise(values, torch.zeros(()), torch.zeros(NUMEL), 1.0, bits))

    def add():
        ops.dequantise_sum(payloads, out, bits=bits, base=base)

    add()
    assert (out - torch_sum(rows, base, bits)).abs().gt(1e-5).float().mean() < 1e-4
    moved = 8 * NUMEL + payloads.numel()
    best = in_turns({"ours": add, "torch": lambda: torch_sum(rows, base, bits), "copy": copying(moved)}, 2.0)
    report(benchmark, best, moved, add, ranks=RANKS)
