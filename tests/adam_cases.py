"""What the tests of FusedAdam share: values, a small network, its training, comparison by bits."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import fastactrec as far

SIZES = [0, 1, 31, 255, 257, 40_000]  # the last is larger than the bucket of 64 KiB
BUCKET_BYTES = 1 << 16
HYPER = {"lr": 2e-3, "betas": (0.9, 0.98), "eps": 1e-7, "weight_decay": 0.05}


def torch_adam(decoupled):
    return torch.optim.AdamW if decoupled else torch.optim.Adam


def tensors(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


def gradients(step):
    scale = torch.Generator().manual_seed(1000 + step)
    return [g * 10 ** (4 * torch.rand(g.shape, generator=scale) - 3) for g in tensors(100 + step)]


def ulps(result, exact):
    """Largest distance from the exact value rounded to float32, in units of its last place."""
    rounded = exact.float()
    spacing = torch.from_numpy(np.spacing(rounded.abs().numpy())).double()
    return ((result.double() - rounded.double()).abs() / spacing).max().item() if len(result) else 0


def bits(tensor):
    """The tensor's bit patterns: torch.equal then tells -0 from 0 and finds NaN equal to itself."""
    tensor = tensor.detach()
    return tensor.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def same(a, b):
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


def net(memory_format=torch.channels_last):
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 6, 3, bias=False)  # before BatchNorm its gradient would be rounding noise
    layers = convolution, nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(54, 5), nn.Linear(5, 5)
    return nn.Sequential(*layers).to(memory_format=memory_format)


def train(model, opt, steps, first=0, layers=6):
    for step in range(first, first + steps):
        opt.zero_grad()
        x = torch.randn(8, 3, 5, 5, generator=torch.Generator().manual_seed(step))
        model[:layers](x).square().mean().backward()
        opt.step()


def assert_close(model, reference, rtol=2e-5):
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        # Adam divides by sqrt(v): where the gradient is rounding noise, so is the direction; lr bounds it.
        torch.testing.assert_close(p, q, rtol=rtol, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")


def assert_same_training(model, reference):
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert same(p, q), name


def groups_of(model):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": decayed, "weight_decay": 0.1, "betas": (0.8, 0.9)}, {"params": rest, "lr": 0.02}]


def leaves(*values):
    return [value.clone().requires_grad_() for value in values]


def step_with(opt, params, grads):
    """One step with these gradients, None for no gradient, as torch's optimizers are given them."""
    for p, g in zip(params, grads, strict=True):
        p.grad = None if g is None else g.clone().to(p.dtype)
    opt.step()


def everything(opt):
    """Copies of all that a step may change: parameters, state, masses and step counts."""
    params = [p.detach().clone() for group in opt.param_groups for p in group["params"]]
    state = [value.clone() for entry in opt.state.values() for value in entry.values()]
    return [*params, *state, torch.from_numpy(opt.read_rows())]


def all_same(before, after):
    return len(before) == len(after) and all(same(a, b) for a, b in zip(before, after, strict=True))


def mlp(seed=0, width=8):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))


def batch(step, rows=5):
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(step))


def fit(model, opt, steps=4, first=0, forward=None, **backward):
    for step in range(first, first + steps):
        opt.zero_grad()
        (forward or model)(batch(step)).square().mean().backward(**backward)
        opt.step()


def fused(model, **options):
    return far.FusedAdam(far.FlatBuckets(model), **HYPER, **options)
