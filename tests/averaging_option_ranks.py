"""What the tests of ParameterAverager's options run on ranks: training that records all state around every call.

Scenarios are functions of (rank, world, ...), see rank_pool.py.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import nn

import fastactrec as far

warnings.filterwarnings("ignore", "FlatBuckets was built from bare parameters")
FLAT = ("param", "exp_avg", "exp_avg_sq", "momentum_buffer", "frozen_sq", "outer_momentum", "anchor", "residual")
EXTRAS = ("tied", "norm", "frozen", "empty", "large", "branch", "conv", "table")


class Zoo(nn.Module):
    """One of everything that averaging must not forget; `extras` choose."""

    def __init__(self, width: int, extras: tuple[str, ...]):
        super().__init__()
        self.extras = extras
        self.first = nn.Linear(width, width)
        if "tied" in extras:
            self.second = nn.Linear(width, width)
            self.second.weight = self.first.weight
        if "norm" in extras:
            self.norm = nn.BatchNorm1d(width)
        if "frozen" in extras:
            self.still = nn.Linear(width, width).requires_grad_(False)
        if "empty" in extras:
            self.empty = nn.Parameter(torch.zeros(0, 3))
        if "large" in extras:
            self.large = nn.Linear(width, 300)
        if "branch" in extras:
            self.branch = nn.Linear(width, width)
        if "conv" in extras:
            self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        if "table" in extras:
            self.register_buffer("table", torch.zeros(3))
            self.register_buffer("count", torch.zeros(2, dtype=torch.int64))

    def forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        y = torch.tanh(self.first(x))
        for name in ("second", "norm", "still"):
            y = y + getattr(self, name)(y) if hasattr(self, name) else y
        if branch and "branch" in self.extras:
            y = y * self.branch(x)
        y = y.sum(1)
        if "large" in self.extras:
            y = y + self.large(x).mean(1)
        if "conv" in self.extras:
            y = y * self.conv(x.mean() + torch.ones(1, 2, 4, 4)).mean()
        return y + self.empty.sum() if "empty" in self.extras else y


def make(options: dict, extras=EXTRAS, width=7, bucket_bytes=1024, sgd=False):
    """(model, optimizer, averager), the same on all ranks."""
    torch.manual_seed(1)
    model = Zoo(width, extras)
    buckets = far.FlatBuckets(model, bucket_bytes=bucket_bytes)
    if sgd:
        opt = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=0.01)
    else:
        opt = far.FusedAdam(buckets, lr=0.02, betas=(0.9, 0.99))
    return model, opt, far.ParameterAverager(opt, **options)


def local_step(model: Zoo, opt, rank: int, step: int, optimizer_step=True) -> None:
    """Ranks see data of their own; which of them use the branch changes."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(5, model.first.in_features, generator=generator)
    opt.zero_grad()
    (model(x, branch=(step + rank) % 3 == 0) - x[:, 0]).square().mean().backward()
    if "table" in model.extras:
        model.table += torch.randn(3, generator=generator)
        model.count += torch.tensor([1, rank])
    if optimizer_step:
        opt.step()


def record(model: nn.Module, opt, avg) -> dict:
    """Copies of all that averaging may change, in the order of the buckets."""
    buckets, result = list(avg.buckets), {}
    for name in FLAT:
        if all(name in bucket.flat for bucket in buckets):
            result[name] = torch.cat([bucket.flat[name] for bucket in buckets]).numpy()
    if isinstance(opt, torch.optim.SGD):
        result["momentum_buffer"] = torch.cat([_momentum(opt, avg.buckets, bucket) for bucket in buckets]).numpy()
    order = np.concatenate([bucket.index for bucket in buckets])
    if isinstance(opt, far.FusedAdam):
        result["rows"] = opt.read_rows()[order]
        result["sizes"] = np.concatenate([np.diff(np.append(bucket.begin, bucket.numel)) for bucket in buckets])
    result["buffers"] = {name: buffer.numpy().copy() for name, buffer in model.named_buffers()}
    owned = getattr(getattr(avg, "_mean", None), "_owned", {})
    pieces = [owned.get((id(bucket), "param"), torch.zeros(0)) for bucket in buckets]
    result["owned"] = [piece.numpy().copy() for piece in pieces]
    return result


def _momentum(opt, buckets, bucket) -> torch.Tensor:
    """SGD's momentum wherever it lies: before the first averaging not yet in the buckets."""
    flat = torch.zeros(bucket.numel)
    for i, begin in zip(bucket.index.tolist(), bucket.begin.tolist(), strict=True):
        p = buckets.params[i]
        if (own := opt.state[p].get("momentum_buffer")) is not None:
            flat.as_strided(p.shape, p.stride(), begin).copy_(own)
    return flat


def trace(rank: int, world: int, case: dict) -> dict:
    """Trains as `case` says: options; steps; samples [steps, world]; flush: whether to end with average_all(); and what
    make() takes. Returns records around every call."""
    model, opt, avg = make(case["options"], **case.get("make", {}))
    layout = [(p.data_ptr(), p.stride()) for p in model.parameters()]
    first, calls = record(model, opt, avg), []
    for step in range(case["steps"]):
        local_step(model, opt, rank, step)
        before = record(model, opt, avg)
        avg.step(samples=case["samples"][step][rank])
        calls.append((before, record(model, opt, avg), avg.averaged))
    before = record(model, opt, avg)
    if case.get("flush", True):
        avg.average_all()
    again = record(model, opt, avg)
    if case.get("flush", True):
        avg.average_all()
    return {
        "first": first,
        "calls": calls,
        "all": (before, again),
        "again": record(model, opt, avg),
        "kept": layout == [(p.data_ptr(), p.stride()) for p in model.parameters()],
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "sent_bytes": getattr(avg, "sent_bytes", 0),
        "bucket_sizes": [bucket.numel for bucket in avg.buckets],
    }


def traces(rank: int, world: int, cases: list[dict]) -> list[dict]:
    return [trace(rank, world, case) for case in cases]
