"""Averaging a ResNet between gloo processes, beside torch's averager, one all-reduce per parameter, a bare all-reduce.

Rank 0 is the benchmark itself; the others follow its commands, so every timed call includes the same small broadcast.
A rank sends 2 (n - 1) / n of the parameters' bytes: "bus" figures are those bytes over the time.
"""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchvision
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastactrec as far

STOP = -1
CASES = [("resnet18", 2), ("resnet18", 3), ("resnet18", 4), ("resnet50", 2), ("resnet50", 4)]
# gloo holds two segments of at most 1 MB for each running all-reduce; a bucket has 25 MB, the smaller model 47 MB
SMALL_BYTES = 12 << 20
OTHERS = {
    "desloc": {"period": 1, "moments": "desloc"},
    "int8": {"period": 1, "moments": "local", "compression": "int8"},
    "delay": {"period": 2, "moments": "local", "delay": 1},
}


class Contest:
    """The competitors, each with its own copy of the parameters."""

    def __init__(self, rank: int, world: int, arch: str):
        torch.manual_seed(0)
        model = torchvision.models.get_model(arch).to(memory_format=torch.channels_last)
        with torch.no_grad():
            for p in model.parameters():
                p += rank
        theirs, each = copy.deepcopy(model), copy.deepcopy(model)
        self.theirs, self.ours = list(theirs.parameters()), list(model.parameters())
        self.opt = far.FusedAdam(far.FlatBuckets(model))
        avg = far.ParameterAverager(self.opt, period=1, moments="local")
        self.bytes = 4 * sum(p.numel() for p in self.ours)
        self.flat = [bucket.flat["param"].clone() for bucket in self.opt.buckets]

        def bare():
            for work in [dist.all_reduce(flat, async_op=True) for flat in self.flat]:
                work.wait()
            for flat in self.flat:
                flat.mul_(1 / world)  # keeps values finite over many rounds

        def per_parameter():
            with torch.no_grad():
                for p in each.parameters():
                    p.mul_(1 / world)
                    dist.all_reduce(p)

        self.calls = {
            "ours": avg.step,
            "torch": lambda: average_parameters(iter(self.theirs), dist.group.WORLD),
            "per_parameter": per_parameter,
            "bare": bare,
            "add_others": self.add_others,
        }

    def add_others(self) -> None:
        """Other ways of averaging the same model. Compression wants ranks that begin alike: after the first
        averaging."""
        for name, options in OTHERS.items():
            avg = far.ParameterAverager(self.opt, **options)
            self.calls[name] = lambda avg=avg: [avg.step() for _ in range(avg.options.period)]

    def call(self, name: str) -> None:
        dist.broadcast(torch.tensor(list(self.calls).index(name)), 0)
        self.calls[name]()

    def follow(self) -> None:
        while True:
            number = torch.tensor(0)
            dist.broadcast(number, 0)
            if number == STOP:
                return
            list(self.calls.values())[int(number)]()


class LargestNew(TorchDispatchMode):
    """Bytes of the largest storage that an operation made: one that none of its arguments has."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in known:
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out


def resident_growth(call) -> int:
    """Bytes by which this process's resident memory rises at most during a call, C++ included."""

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))

    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew (proc(5))
    before = status("VmRSS:")
    call()
    return status("VmHWM:") - before


def join(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)


def other_rank(index: int, world: int, arch: str, folder: str) -> None:
    join(index + 1, world, folder)
    Contest(index + 1, world, arch).follow()
    dist.destroy_process_group()


@pytest.fixture(params=CASES, ids=[f"{arch}-{world}ranks" for arch, world in CASES])
def contest(request, tmp_path):
    arch, world = request.param
    threads = torch.get_num_threads()
    others = mp.spawn(other_rank, (world, arch, str(tmp_path)), nprocs=world - 1, join=False)
    join(0, world, str(tmp_path))
    contest = Contest(0, world, arch)
    yield contest
    dist.broadcast(torch.tensor(STOP), 0)
    while not others.join():
        pass
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def check_answers(contest) -> None:
    """Averaged by ours and by torch's, in place by ours; ranks had parameters + rank."""
    before = [p.detach().clone() for p in contest.ours]
    layout = [(p.data_ptr(), p.stride()) for p in contest.ours]
    for name in list(contest.calls):
        contest.call(name)
    for p, q, old in zip(contest.ours, contest.theirs, before, strict=True):
        torch.testing.assert_close(p.detach(), old + (dist.get_world_size() - 1) / 2, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(q.detach(), p.detach(), rtol=1e-5, atol=1e-6)
    for name in OTHERS:  # equal ranks: they change nothing but what int8 rounds, of differences that are zero
        contest.call(name)
        contest.call(name)
    for p, q in zip(contest.ours, contest.theirs, strict=True):
        torch.testing.assert_close(q.detach(), p.detach(), rtol=1e-5, atol=1e-6)
    assert layout == [(p.data_ptr(), p.stride()) for p in contest.ours]


def memory(contest) -> dict[str, float]:
    """MB that a call allocates at most, after the first ones, by torch's account and the kernel's."""
    result = {}
    for name in ("ours", *OTHERS, "torch"):
        with LargestNew() as new:
            contest.call(name)
        result[name] = max(new.bytes, resident_growth(lambda name=name: contest.call(name)))
        if name != "torch":
            assert result[name] < SMALL_BYTES, f"{name} allocates {result[name]} bytes"
    assert result["torch"] > 0.9 * contest.bytes  # the measure sees what torch's averager allocates
    return {name: round(value / 1e6, 1) for name, value in result.items()}


def bench_averaging(benchmark, in_turns, contest):
    check_answers(contest)
    allocated = memory(contest)
    names = ("ours", "torch", "per_parameter", "bare")
    best = in_turns({name: (lambda name=name: contest.call(name)) for name in names}, 4.0)
    world = dist.get_world_size()
    benchmark.extra_info.update(
        bytes=contest.bytes,
        ranks=world,
        bus_gb_per_s=round(2 * (world - 1) / world * contest.bytes / best["ours"] / 1e9, 2),
        torch_over_ours=round(best["torch"] / best["ours"], 3),
        per_parameter_over_ours=round(best["per_parameter"] / best["ours"], 3),
        bare_all_reduce_over_ours=round(best["bare"] / best["ours"], 3),
        largest_allocation_mb=allocated,
    )
    benchmark.pedantic(lambda: contest.call("ours"), rounds=3)
