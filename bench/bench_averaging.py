"""Averaging ResNet-18 between two gloo processes, beside torch's averager and a bare all-reduce.

Rank 0 is the benchmark itself; rank 1 follows its commands, so every timed call includes the same small
broadcast. With two ranks the bytes on the bus are those of the parameters.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torchvision.models import resnet18

import fastactrec as far

STOP = -1


class Contest:
    """The competitors, each with its own copy of the model."""

    def __init__(self, rank: int):
        torch.manual_seed(0)
        model = resnet18().to(memory_format=torch.channels_last)
        with torch.no_grad():
            for p in model.parameters():
                p += rank
        theirs, each = copy.deepcopy(model), copy.deepcopy(model)
        self.theirs, self.ours = list(theirs.parameters()), list(model.parameters())
        opt = far.FusedAdam(far.FlatBuckets(model))
        avg = far.ParameterAverager(opt, period=1, moments="local")
        self.bytes = 4 * sum(p.numel() for p in self.ours)
        self.flat = [bucket.flat["param"].clone() for bucket in opt.buckets]

        def bare():
            for work in [dist.all_reduce(flat, async_op=True) for flat in self.flat]:
                work.wait()
            for flat in self.flat:
                flat.mul_(0.5)  # keeps values finite over many rounds

        def per_parameter():
            with torch.no_grad():
                for p in each.parameters():
                    p.mul_(0.5)
                    dist.all_reduce(p)

        self.calls = {
            "ours": avg.step,
            "torch": lambda: average_parameters(iter(self.theirs), dist.group.WORLD),
            "per_parameter": per_parameter,
            "bare": bare,
        }

    def call(self, number: int) -> None:
        dist.broadcast(torch.tensor(number), 0)
        list(self.calls.values())[number]()

    def follow(self) -> None:
        while True:
            number = torch.tensor(0)
            dist.broadcast(number, 0)
            if number == STOP:
                return
            list(self.calls.values())[int(number)]()


def join(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)


def second_rank(_, folder: str) -> None:
    join(1, folder)
    Contest(1).follow()
    dist.destroy_process_group()


@pytest.fixture
def contest(tmp_path):
    threads = torch.get_num_threads()
    other = mp.spawn(second_rank, (str(tmp_path),), nprocs=1, join=False)
    join(0, str(tmp_path))
    contest = Contest(0)
    yield contest
    dist.broadcast(torch.tensor(STOP), 0)
    other.join()
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def bench_averaging(benchmark, in_turns, contest):
    names = list(contest.calls)
    before = [p.detach().clone() for p in contest.ours]
    for number in range(len(names)):
        contest.call(number)
    for p, q, old in zip(contest.ours, contest.theirs, before, strict=True):
        torch.testing.assert_close(p.detach(), old + 0.5, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(q.detach(), p.detach(), rtol=1e-5, atol=1e-6)
    calls = {name: (lambda number=number: contest.call(number)) for number, name in enumerate(names)}
    best = in_turns(calls, 4.0)
    benchmark.extra_info.update(
        bytes=contest.bytes,
        bus_gb_per_s=round(contest.bytes / best["ours"] / 1e9, 2),
        torch_over_ours=round(best["torch"] / best["ours"], 3),
        per_parameter_over_ours=round(best["per_parameter"] / best["ours"], 3),
        bare_all_reduce_over_ours=round(best["bare"] / best["ours"], 3),
    )
    benchmark.pedantic(calls["ours"], rounds=3)
