"""What test_averaging.py runs in real processes: scenarios, functions of (rank, world) -> a result."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import fastactrec as far

POLICIES = ("local", "mean", "desloc", "reset")


def run(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    results = {}
    for name, scenario in SCENARIOS.items():
        torch.manual_seed(0)
        results[name] = scenario(rank, world)
        dist.barrier()
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(54, 5)
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


def local_steps(model, opt, rank, steps, first=0):
    for step in range(first, first + steps):
        opt.zero_grad()
        x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
        opt.step()


def snapshot(model, opt=None) -> dict:
    result = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if isinstance(opt, far.FusedAdam):
        for i, p in enumerate(opt.buckets.params):
            result.update({f"{name} {i}": opt.state[p][name].clone() for name in ("exp_avg", "exp_avg_sq")})
        rows = torch.from_numpy(opt.read_rows())
        result["masses"], result["steps"] = rows[:, :2].T, rows[:, 2]
    return result


def policies(rank, world):
    """Seven rounds of two steps under each policy, then everything; a snapshot after each averaging."""
    result = {}
    for policy in POLICIES:
        model = net()
        opt = far.FusedAdam(far.FlatBuckets(model, bucket_bytes=512))
        avg = far.ParameterAverager(opt, period=2, moments=policy)
        layout = [(p.data_ptr(), p.stride()) for p in model.parameters()]
        taken, flags = [], []
        for step in range(14):
            local_steps(model, opt, rank, 1, first=step)
            if step < 12:
                before = snapshot(model, opt)
            avg.step(samples=4)
            flags.append(avg.averaged)
            if avg.averaged:
                taken.append(snapshot(model, opt))
        avg.average_all()
        result[policy] = {
            "before": before,  # the twelfth step: parameters and both moments are due
            "rounds": taken,
            "flags": flags,
            "all": snapshot(model, opt),
            "kept": layout == [(p.data_ptr(), p.stride()) for p in model.parameters()],
            "restarted": avg.state_dict(),
        }
    return result


def weights(rank, world):
    """Parameters rank + 1, samples 1, 2, ...; gloo sizes from nothing to many chunks."""
    sizes = [0, 1, 2, 3, 31, 257, 4097, 300_001]
    generator = torch.Generator().manual_seed(rank)
    params = [nn.Parameter(torch.randn(size, generator=generator)) for size in sizes]
    mine = [p.detach().clone() for p in params]
    buckets = far.FlatBuckets(params, bucket_bytes=128)
    avg = far.ParameterAverager(far.FusedAdam(buckets), period=2)
    avg.step(samples=rank)
    avg.step(samples=1)
    return mine, [p.detach().clone() for p in params]


class Unused(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)
        nn.init.constant_(self.unused.weight, float(rank))
        self.register_buffer("table", torch.tensor([float("-inf"), 1 / 3, float(rank)]))
        self.register_buffer("count", torch.tensor([5, rank]))
        self.register_buffer("flag", torch.tensor(rank == 1))
        self.register_buffer("scratch", torch.tensor(float(rank)).double(), persistent=False)


def unused(rank, world):
    model = Unused(rank)
    buckets = far.FlatBuckets(model)
    opt = far.FusedAdam(buckets)
    avg = far.ParameterAverager(opt, period=1)
    model.used(torch.ones(1, 2)).sum().backward()
    opt.step()
    opt.zero_grad()  # None everywhere when averaging, as in a loop that zeroes early
    avg.step()
    return model.unused.weight.detach().clone(), [b.clone() for b in model.buffers()]


def batchnorm(rank, world):
    """Statistics after batches of rank + 1 samples, and what the whole population would give."""
    norm = nn.BatchNorm1d(3, momentum=None)
    data = torch.randn(40, 3, generator=torch.Generator().manual_seed(rank)) * (rank + 1) + 5 * rank
    norm(data)
    own = norm.running_mean.double(), norm.running_var.double()
    avg = far.ParameterAverager(far.FusedAdam(far.FlatBuckets(norm)), period=1)
    avg.step(samples=rank + 1)
    return own, (norm.running_mean.clone(), norm.running_var.clone(), norm.num_batches_tracked.clone())


def sgd_like_ddp(rank, world):
    """K = 1 with momentum and weight decay, against DistributedDataParallel, 6 steps."""
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}
    results = []
    for moments in ("local", "mean"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        buckets = far.FlatBuckets(model)
        opt = torch.optim.SGD(model.parameters(), **options)
        avg = far.ParameterAverager(opt, period=1, moments=moments)
        assert avg.buckets is buckets
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        ddp = DistributedDataParallel(plain)
        reference = torch.optim.SGD(ddp.parameters(), **options)
        for step in range(6):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))
            for m, o in ((model, opt), (ddp, reference)):
                o.zero_grad()
                m(x).square().mean().backward()
                o.step()
            avg.step()
        momentum = [opt.state[p]["momentum_buffer"].clone() for p in model.parameters()]
        results.append((moments, snapshot(model), snapshot(plain), momentum))
    return results


def ddp_then_adam(rank, world):
    """FusedAdam under DistributedDataParallel: equal ranks, or a clear refusal of its gradient views."""
    model = net()
    opt = far.FusedAdam(far.FlatBuckets(model))
    local_steps(DistributedDataParallel(model), opt, rank, 2)
    other = net()
    views = far.FusedAdam(far.FlatBuckets(other))
    message = ""
    try:
        local_steps(DistributedDataParallel(other, gradient_as_bucket_view=True), views, rank, 1)
    except far.InputError as error:
        message = str(error)
    return snapshot(model)["0.weight"], message


def unequal_steps(rank, world):
    """Ranks take rank + 1 steps with their own constant gradient; then moments and masses are averaged."""
    p = nn.Parameter(torch.zeros(3))
    opt = far.FusedAdam(far.FlatBuckets([p]), betas=(0.9, 0.99))
    avg = far.ParameterAverager(opt, period=100)
    for _ in range(rank + 1):
        p.grad.fill_(rank + 1.0)
        opt.step()
    avg.average_all()
    entry = opt.state_dict()["state"][0]
    return {name: value.clone() if torch.is_tensor(value) else value for name, value in entry.items()}


def errors(rank, world):
    """Every error must reach every rank; a lone one would leave the others waiting."""
    messages = {}

    def note(name, call):
        try:
            call()
        except far.AveragingError as error:
            messages[name] = str(error)

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    if rank == 1:
        model[0].bias.data += 1e-7
    note("frozen", lambda: far.ParameterAverager(far.FusedAdam(far.FlatBuckets(model))))
    width = 3 if rank == 0 else 4
    note("layout", lambda: far.ParameterAverager(far.FusedAdam(far.FlatBuckets(nn.Linear(2, width)))))
    opt = far.FusedAdam(far.FlatBuckets(nn.Linear(2, 2)))
    note("period", lambda: far.ParameterAverager(opt, period=1 + rank))
    avg = far.ParameterAverager(opt, period=1)
    note("call", avg.step if rank else avg.average_all)

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    opt = far.FusedAdam(far.FlatBuckets(model))
    avg = far.ParameterAverager(opt, period=2)
    model[0].weight.data.fill_(rank)  # a local step between averagings, then frozen without averaging
    model[0].requires_grad_(False)
    opt.buckets.rebuild()
    note("frozen later", avg.average_all)
    return messages


class LargestAllocation(TorchDispatchMode):
    def __init__(self, known):
        super().__init__()
        self.known, self.largest = {t.untyped_storage().data_ptr() for t in known}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, t.untyped_storage().nbytes())
        return out


def allocations(rank, world):
    model = nn.Sequential(nn.Linear(500, 500), nn.BatchNorm1d(500))
    opt = far.FusedAdam(far.FlatBuckets(model))
    avg = far.ParameterAverager(opt, period=1, moments="mean")
    with LargestAllocation([t for b in opt.buckets for t in b.flat.values()]) as mode:
        avg.step()
    return mode.largest


SCENARIOS = {
    f.__name__: f
    for f in (
        policies,
        weights,
        unused,
        batchnorm,
        sgd_like_ddp,
        ddp_then_adam,
        unequal_steps,
        errors,
        allocations,
    )
}
