"""FusedAdam beside torch.optim.Adam(fused=True) and a copy of the same bytes.

28 bytes move per parameter: param, grad, exp_avg and exp_avg_sq are read, all but grad written.
"""

import pytest
import torch
from torchvision.models import resnet50

import fastactrec as far

BYTES = 28
with torch.device("meta"):
    RESNET50 = [p.shape for p in resnet50().parameters()]
SHAPES = {
    "resnet50, 161 tensors": RESNET50,
    "one flat tensor": [(25_557_032,)],
}


def make(shapes, build):
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).mul_(0.1).requires_grad_() for shape in shapes]
    opt = build(params)
    for p in params:
        grad = torch.randn(p.shape, generator=generator) * 0.01
        if p.grad is None:
            p.grad = grad
        else:
            p.grad.copy_(grad)
    return params, opt


@pytest.mark.parametrize("name", SHAPES)
def bench_adam_step(benchmark, in_turns, name):
    ours, opt = make(SHAPES[name], far.FusedAdam)
    theirs, fused = make(SHAPES[name], lambda params: torch.optim.Adam(params, fused=True))
    for _ in range(2):
        opt.step()
        fused.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-6, atol=1e-8)
    numel = sum(p.numel() for p in ours)
    words = BYTES // 8 * numel  # a copy reads and writes: 14 bytes per parameter each, rounded down to floats
    source, target = torch.ones(words), torch.zeros(words)

    best = in_turns({"ours": opt.step, "torch": fused.step, "copy": lambda: target.copy_(source)}, 3.0)
    benchmark.extra_info.update(
        parameters=numel,
        tensors=len(ours),
        bytes=BYTES * numel,
        gb_per_s=round(BYTES * numel / best["ours"] / 1e9, 1),
        torch_fused_over_ours=round(best["torch"] / best["ours"], 3),
        copy_over_ours=round(best["copy"] * BYTES * numel / (8 * words) / best["ours"], 3),
    )
    benchmark.pedantic(opt.step, rounds=3)


def bench_clip_grad_norm(benchmark, in_turns):
    """Twelve bytes per parameter: gradients are read for the norm, then read and written."""
    ours, opt = make(RESNET50, far.FusedAdam)
    theirs, _ = make(RESNET50, lambda params: None)
    norm = opt.buckets.clip_grad_norm(1.0)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(theirs, 1.0), rtol=1e-3, atol=0)
    best = in_turns(
        {
            "ours": lambda: opt.buckets.clip_grad_norm(1.0),
            "torch": lambda: torch.nn.utils.clip_grad_norm_(theirs, 1.0),
        },
        1.0,
    )
    numel = sum(p.numel() for p in ours)
    benchmark.extra_info.update(
        bytes=12 * numel,
        gb_per_s=round(12 * numel / best["ours"] / 1e9, 1),
        torch_over_ours=round(best["torch"] / best["ours"], 3),
    )
    benchmark.pedantic(opt.buckets.clip_grad_norm, (1.0,), rounds=3)
