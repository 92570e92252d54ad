"""What test_batch_size.py runs in real processes."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastactrec as far
from fastactrec.optim.batch_size import NoiseScale

SAMPLES = (4, 7)  # of each rank, in each step
STEPS = 3


def data(rank: int, step: int) -> torch.Tensor:
    """float32 [N, 6]: per-sample gradients of mean(x @ weight)."""
    return torch.randn(SAMPLES[rank], 6, generator=torch.Generator().manual_seed(100 * step + rank)) + 0.5


def run(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    results = {name: measure(rank, name == "ddp") for name in ("local", "ddp")}
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def measure(rank: int, shared: bool) -> dict:
    """Every step in parts of 3 samples and the rest."""
    model = nn.Linear(6, 1, bias=False)
    nn.init.ones_(model.weight)
    buckets = far.FlatBuckets(model)
    network = DistributedDataParallel(model) if shared else model
    noise = NoiseScale(buckets, every=1, decay=0.5, shared=shared)
    grads = []
    for step in range(STEPS):
        assert noise.begin_step()
        whole = data(rank, step)
        first, last = whole[:3], whole[3:]
        buckets.zero_grad()
        with noise.part(len(first), len(first) / len(whole)):
            if shared:
                with network.no_sync():
                    (network(first).mean() * len(first) / len(whole)).backward()
            else:
                (network(first).mean() * len(first) / len(whole)).backward()
        with noise.part(len(last), len(last) / len(whole)):
            (network(last).mean() * len(last) / len(whole)).backward()
        noise.end_step()
        grads.append(model.weight.grad.clone())
    before = noise.value
    noise.merge()
    return {"trace": noise.trace, "signal": noise.signal, "count": noise.measurements, "grads": grads, "before": before}
