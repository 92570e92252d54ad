"""FusedAdam beside torch.optim.Adam(fused=True) and a copy of the same bytes. Threads are as torch has them; pin the
process (taskset) where other work may move it.

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


def bench_clipped_step(benchmark, in_turns):
    """Clipping inside the step reads gradients once more: 32 bytes per parameter; torch's way moves 40."""
    ours, opt = make(RESNET50, lambda params: far.FusedAdam(params, max_norm=1.0))
    theirs, fused = make(RESNET50, lambda params: torch.optim.Adam(params, fused=True))

    def clip_and_step():
        norm = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        fused.step()
        return norm

    norm = clip_and_step()
    opt.step()
    torch.testing.assert_close(opt.grad_norm.float(), norm, rtol=1e-3, atol=0)  # torch's float32 sum is the rough one
    best = in_turns({"ours": opt.step, "torch": clip_and_step}, 2.0)
    numel = sum(p.numel() for p in ours)
    benchmark.extra_info.update(
        bytes=32 * numel,
        gb_per_s=round(32 * numel / best["ours"] / 1e9, 1),
        torch_over_ours=round(best["torch"] / best["ours"], 3),
    )
    benchmark.pedantic(opt.step, rounds=3)


def bench_bfloat16_parameters(benchmark, in_turns):
    """Parameters and gradients in bfloat16, masters in float32, against torch's fused Adam over float32 copies."""
    small = [torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for shape in RESNET50]
    masters, fused = make(RESNET50, lambda params: torch.optim.Adam(params, fused=True))
    for p, master in zip(small, masters, strict=True):
        p.data.copy_(master)
        master.data.copy_(p)
    opt = far.FusedAdam(small)
    grads = [master.grad.bfloat16() for master in masters]
    for p, grad in zip(small, grads, strict=True):
        p.grad.copy_(grad)
    copies = [torch.empty_like(grad) for grad in grads]

    def step_and_copy():
        torch._foreach_copy_([master.grad for master in masters], grads)
        fused.step()
        torch._foreach_copy_(copies, [master.detach() for master in masters])

    for _ in range(2):
        opt.step()
        step_and_copy()
    for p, copy in zip(small, copies, strict=True):
        torch.testing.assert_close(p.detach(), copy, rtol=2**-7, atol=1e-8)
    best = in_turns({"ours": opt.step, "torch": step_and_copy}, 2.0)
    numel = sum(p.numel() for p in small)
    benchmark.extra_info.update(
        bytes=28 * numel,  # gradient and parameter 2 each; master and moments 4 each way
        gb_per_s=round(28 * numel / best["ours"] / 1e9, 1),
        torch_over_ours=round(best["torch"] / best["ours"], 3),
    )
    benchmark.pedantic(opt.step, rounds=3)
