"""FlatBuckets and DistributedDataParallel in any order, in two real processes, against DDP with torch's Adam."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from adam_cases import HYPER, assert_close
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastactrec as far

RANKS = 2
CASES = ["buckets first", "DDP first", "DDP first with views", "views", "static graph", "unused", "no_sync", "hook"]


class Net(nn.Module):
    """Two layers and a third that not every step uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.spare = nn.Linear(6, 40), nn.Linear(40, 3), nn.Linear(40, 3)

    def forward(self, x, spare=True):
        h = torch.tanh(self.first(x))
        return self.last(h) + self.spare(h) if spare else self.last(h)


def fit(ddp, opt, rank, case):
    for step in range(4):
        opt.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
        if case == "no_sync":
            with ddp.no_sync():
                ddp(x.neg()).square().mean().backward()
        spare = case != "unused" or (step != 1 and (step != 2 or rank == 0))  # nobody in step 1, one rank in step 2
        ddp(x, spare).square().mean().backward()
        opt.step()


def options_of(case):
    names = {"views": "gradient_as_bucket_view", "static graph": "static_graph", "unused": "find_unused_parameters"}
    return {name: True for word, name in names.items() if word in case}


def halve(state, bucket):
    """A communication hook: the mean of the ranks' gradients, halved."""
    return dist.all_reduce(bucket.buffer().div_(2 * RANKS), async_op=True).get_future().then(lambda f: f.value()[0])


def wrapped(model, case):
    ddp = DistributedDataParallel(model, **options_of(case))
    if case == "hook":
        ddp.register_comm_hook(None, halve)
    return ddp


def run(rank, folder):
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    results = {}
    for case in CASES:
        reference, model = Net(), Net()
        ddp = wrapped(reference, case)
        fit(ddp, torch.optim.Adam(ddp.parameters(), **HYPER), rank, case)
        message = ""
        try:
            if "DDP first" in case:
                ddp = wrapped(model, case)
                opt = far.FusedAdam(far.FlatBuckets(ddp), **HYPER)
            else:
                opt = far.FusedAdam(far.FlatBuckets(model), **HYPER)
                ddp = wrapped(model, case)
            fit(ddp, opt, rank, case)
        except far.InputError as error:
            message = str(error)
        del ddp
        results[case] = [[p.detach().clone() for p in m.parameters()] for m in (model, reference)], message
    dist.barrier()
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    mp.spawn(run, (str(folder),), nprocs=RANKS)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("case", [case for case in CASES if "views" not in case])
def test_training_equals_that_with_torchs_adam(results, case):
    for (ours, theirs), message in (result[case] for result in results):
        assert message == ""
        model, reference = Net(), Net()
        for net, values in ((model, ours), (reference, theirs)):
            for p, value in zip(net.parameters(), values, strict=True):
                p.data = value
        assert_close(model, reference)
    assert all(torch.equal(p, q) for p, q in zip(*(result[case][0][0] for result in results), strict=True))


@pytest.mark.parametrize("case", ["views", "DDP first with views"])
def test_gradient_views_of_ddp_are_refused(results, case):
    for _, message in (result[case] for result in results):
        assert "gradient_as_bucket_view=False" in message
