"""What test_accuracy.py runs in real gloo processes and in lockstep: the study's training on made-up material."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from fastactrec.optim.engines import TorchEngine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))

import accuracy_arms
import accuracy_runs

SETTINGS = accuracy_arms.Settings(crop=32, width=8, segments=1, epochs=2)
ARMS = [
    accuracy_arms.REPRESENTATIVES["sync"],
    accuracy_arms.kavg(2, "mean"),
    accuracy_arms.kavg(2, compression="int8"),
    accuracy_arms.kavg(3, compression="int4", delay=2),
    accuracy_arms.kavg(2, outer_momentum=0.5),
]


def material(world: int) -> accuracy_runs.Material:
    """Five steps an epoch; ranks with three, four ... clips."""
    generator = torch.Generator().manual_seed(0)

    def batch(rank: int):
        return torch.randn(3 + rank, 4, 32, 32, generator=generator).half(), torch.arange(3 + rank) % 2

    batches = [[batch(rank) for rank in range(world)] for _ in range(10)]
    views = torch.randn(5, 2, 4, 32, 32, generator=generator).half()
    return accuracy_runs.Material(5, batches, views, torch.zeros(5).numpy(), 2)


def train(engine, arm) -> dict:
    """Every byte of the model after training, the bytes sent and the last loss."""
    result = accuracy_runs.train_rank(engine, arm, 1e-2, 7, SETTINGS, material(engine.world))
    return {**result, "model": result["model"].state_dict()}


def run(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    results = {}
    for arm in ARMS:
        results[arm.name] = train(TorchEngine(), arm)
        dist.barrier()
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()
