"""What the tests of single options run on ranks, see rank_pool.py."""

from __future__ import annotations

import os
import signal

import numpy as np
import torch
from averaging_option_ranks import Zoo, local_step, make, record
from averaging_ranks import LargestAllocation
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastactrec as far


def message(call, *args, **kwargs) -> str:
    try:
        call(*args, **kwargs)
    except far.FastactrecError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def warm_up_and_ddp(rank, world, options):
    """Parameters after each of 5 warm-up calls, and DDP's with torch's Adam."""
    extras = ("tied", "large", "branch", "conv")
    model, opt, avg = make({"warmup": 5, **options}, extras)
    torch.manual_seed(1)
    plain = Zoo(7, extras)
    ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    reference = torch.optim.Adam(ddp.parameters(), lr=0.02, betas=(0.9, 0.99))
    steps = []
    for step in range(5):
        local_step(model, opt, rank, step)
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(5, 7, generator=generator)
        reference.zero_grad()
        (ddp(x, branch=(step + rank) % 3 == 0) - x[:, 0]).square().mean().backward()
        reference.step()
        avg.step(samples=rank)
        steps.append((values(model), values(plain), avg.averaged))
    return steps


def overflow(rank, world):
    """A loss scaler whose gradients overflow on rank 1 alone, in the warm-up's second call: parameters after each."""
    model, opt, avg = make({"warmup": 4}, ())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    plain, other, _ = make({"warmup": 4}, ())
    steps, scales = [], []
    for step in range(4):
        for m, o in ((model, opt), (plain, other)):
            o.zero_grad()
            x = torch.randn(5, 7, generator=torch.Generator().manual_seed(1000 * step + rank))
            loss = m(x, branch=False).square().mean()
            if o is opt:
                bad = float("inf") if rank == 1 and step == 1 else 1.0
                scaler.scale(loss * bad).backward()
                scaler.step(o)
                scaler.update()
            elif step != 1:
                loss.backward()
                o.step()
        avg.step()
        steps.append((values(model), values(plain)))
        scales.append(scaler.get_scale())
    return steps, scales


def warm_up_misuse(rank, world):
    _, opt, _ = make({"warmup": 2}, ())
    closure = message(opt.step, lambda: 0.0)
    model, opt, avg = make({"warmup": 2}, (), sgd=True)
    local_step(model, opt, rank, 0, optimizer_step=False)
    # rank 1 as a loss scaler does with torch's SGD, which it does not call after an overflow
    return closure, message(opt.step) if rank == 0 else message(avg.step) or message(opt.step)


def linear_moments(rank, world, delay, steps):
    """Gradients that do not depend on parameters: m and v of a delayed averaging, `steps` local steps later, and of an
    immediate one at the snapshot. More than one step each before, by rank."""
    results = []
    for options in ({"delay": delay}, {}):
        p = nn.Parameter(torch.zeros(300))
        opt = far.FusedAdam(far.FlatBuckets([p]), betas=(0.9, 0.99))
        avg = far.ParameterAverager(opt, period=4, moments="mean", **options)
        for step in range(4 + steps):
            p.grad.copy_(torch.randn(300, generator=torch.Generator().manual_seed(99 * step + rank)))
            opt.step()
            avg.step(samples=rank + 1)
        results.append({**record(nn.Module(), opt, avg), "averaged": avg.averaged})
    return results


def vanishing_variance(rank, world):
    """Rank 0 without samples or later gradients, but with v; all others have none: what is left must not be < 0."""
    p = nn.Parameter(torch.zeros(4096))
    opt = far.FusedAdam(far.FlatBuckets([p]), betas=(0.9, 0.99))
    avg = far.ParameterAverager(opt, period=4, moments="mean", delay=3)
    smallest = []
    for step in range(16):
        generator = torch.Generator().manual_seed(step)
        p.grad.copy_(torch.rand(4096, generator=generator) * (rank == 0 and step % 4 == 3))
        opt.step()
        avg.step(samples=float(rank != 0))
        smallest.append(avg.buckets.view("exp_avg_sq", 0).min().item())
    return smallest, p.detach().isfinite().all().item()


def drift(rank, world, bits, small, feedback):
    """50 rounds; ranks add known numbers: distance of the compressed average to the exact one after each."""
    p = nn.Parameter(torch.zeros(1000))
    opt = torch.optim.SGD([p], lr=0.0)
    buckets = far.FlatBuckets([p])
    avg = far.ParameterAverager(opt, period=1, moments="local", compression=bits)
    exact, distance = np.zeros(1000), []
    for step in range(50):
        # one large number sets the scale, the others are too small for it alone
        added = [np.full(1000, small * (1 + r)) + (np.arange(1000) % 256 == 0) * (-1.0) ** step for r in range(world)]
        with torch.no_grad():
            p += torch.from_numpy(added[rank]).float()
        avg.step()
        exact += np.mean(added, 0)
        distance.append(np.abs(p.detach().numpy() - exact).max())
        if not feedback:
            buckets.buckets[0].flat["residual"].zero_()
            for owned in avg._mean._owned.values():
                owned.zero_()
    return distance, p.detach().clone()


def poison(rank, world, bits, samples):
    """NaN in rank 1's parameters, with samples there or without."""
    p = nn.Parameter(torch.ones(600))
    opt = torch.optim.SGD([p], lr=0.0)
    _keep = far.FlatBuckets([p])
    avg = far.ParameterAverager(opt, period=1, moments="local", compression=bits)
    with torch.no_grad():
        p[17] = float("nan") if rank == 1 else 1.0
    avg.step(samples=samples if rank == 1 else 1)
    return p.detach().clone()


def traffic(rank, world, bits, moments):
    """Bytes sent by one averaging of 100,000 parameters."""
    p = nn.Parameter(torch.zeros(100_000))
    opt = far.FusedAdam(far.FlatBuckets([p]))
    avg = far.ParameterAverager(opt, period=1, moments=moments, compression=bits)
    avg.step()
    first = avg.sent_bytes
    avg.step()
    return avg.sent_bytes - first


def automatic(rank, world, per_node):
    os.environ["LOCAL_WORLD_SIZE"] = str(per_node if isinstance(per_node, int) else per_node[rank])
    built = {}
    try:
        problem = message(lambda: built.update(avg=make({"hierarchy": "auto"}, ())[2]))
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
    if problem:
        return problem
    avg = built["avg"]
    return (avg.node.world if avg.node else None), avg._every


def frozen_variance(rank, world, steps):
    """Parameters after each call under frozen_v, with gradients that frozen_gradient() gives."""
    p = nn.Parameter(torch.zeros(50))
    opt = far.FusedAdam(far.FlatBuckets([p]), lr=0.1, betas=(0.9, 0.99))
    avg = far.ParameterAverager(opt, period=3, moments="frozen_v")
    result = []
    for step in range(steps):
        p.grad.copy_(torch.from_numpy(frozen_gradient(rank, step)))
        opt.step()
        avg.step(samples=rank + 1)
        result.append(p.detach().clone())
    return result


def frozen_gradient(rank: int, step: int) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_normal(50).astype(np.float32) * (1 + step)


def resumed(rank, world, options, sgd, first, second):
    """Parameters and moments after `first` + `second` calls straight, and loaded in between."""
    ends = []
    for split in (False, True):
        model, opt, avg = make(options, ("norm", "table"), sgd=sgd)
        for step in range(first):
            local_step(model, opt, rank, step)
            avg.step(samples=rank + 1)
        if split:
            saved = model.state_dict(), opt.state_dict(), avg.state_dict()
            saved = [{k: v.clone() if torch.is_tensor(v) else v for k, v in part.items()} for part in saved]
            with torch.no_grad():
                model.first.weight.zero_()
            model, opt, avg = make(options, ("norm", "table"), sgd=sgd)
            for part, state in zip((model, opt, avg), saved, strict=True):
                part.load_state_dict(state)
        for step in range(first, first + second):
            local_step(model, opt, rank, step)
            avg.step(samples=rank + 1)
        ends.append(record(model, opt, avg))
    return ends


def disagreements(rank, world):
    """What every rank must be told."""
    found = {}
    for name, options in {
        "delay": {"period": 4, "delay": rank},
        "hierarchy": {"hierarchy": (1, 2) if rank else (world, 2)},
        "compression": {"compression": "int8" if rank else None},
    }.items():
        found[name] = message(make, options, ())
    for name, options in {"int8": {"compression": "int8"}, "outer": {"outer_lr": 0.5}, "warmup": {"warmup": 1}}.items():
        p = nn.Parameter(torch.full((3,), float(rank)))
        opt = far.FusedAdam(far.FlatBuckets([p]))
        found[f"start {name}"] = message(far.ParameterAverager, opt, **options)
    p = nn.Parameter(torch.zeros(3))
    avg = far.ParameterAverager(far.FusedAdam(far.FlatBuckets([p])), outer_lr=0.5)
    with torch.no_grad():
        p += rank
    avg.load_state_dict(avg.state_dict())  # ranks loaded different weights
    found["loaded"] = message(avg.average_all)
    _, _, avg = make({"period": 2}, ())
    if rank:
        avg.step()
    found["calls"] = message(avg.average_all)
    return found


def thawed(rank, world):
    """A parameter unfrozen under an outer step; and a rebuild while a mean is on its way."""
    p, q = nn.Parameter(torch.full((2,), 8.0)), nn.Parameter(torch.zeros(2))
    p.requires_grad_(False)
    opt = far.FusedAdam(far.FlatBuckets([p, q]))
    avg = far.ParameterAverager(opt, period=1, moments="local", outer_lr=0.5)
    avg.step()
    p.requires_grad_(True)
    opt.buckets.rebuild()
    with torch.no_grad():
        p += rank
    avg.step()
    _, opt, avg = make({"period": 2, "delay": 1}, ())
    avg.step()
    avg.step()
    opt.buckets.rebuild()
    return p.detach().clone(), message(avg.average_all)


def allocations(rank, world, options):
    """The largest new tensor in two rounds, after one round."""
    model = nn.Linear(500, 500)
    opt = far.FusedAdam(far.FlatBuckets(model))
    avg = far.ParameterAverager(opt, **options)

    def rounds(count):
        for _ in range(count * options["period"]):
            model.weight.grad.fill_(1.0)
            opt.step()
            avg.step()

    rounds(2)
    known = [t for b in opt.buckets for t in b.flat.values()]
    known += [t for each in getattr(avg._mean, "_payloads", {}).values() for t in each]
    known += list(getattr(avg._mean, "_owned", {}).values())
    with LargestAllocation(known) as mode:
        rounds(2)
    return mode.largest


def killed(rank, world):
    model, opt, avg = make({"period": 2}, ())
    local_step(model, opt, rank, 0)
    avg.step()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return message(avg.step)
