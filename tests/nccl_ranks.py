"""What test_nccl_engine.py runs in two real processes: NcclEngine, the stand-in for NCCL carrying the bytes.

python nccl_ranks.py SCENARIO FOLDER RANK writes what the scenario returns, or the error it raised, to FOLDER.
"""

from __future__ import annotations

import os
import sys
import time

import nccl_standin


def train(engine, **options):
    """Parameters of a small model after three averagings and everything."""
    import torch

    import fastactrec as far

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(9, 40), torch.nn.BatchNorm1d(40), torch.nn.Linear(40, 3))
    opt = far.FusedAdam(far.FlatBuckets(model, bucket_bytes=1024))
    average = far.ParameterAverager(opt, period=2, moments="mean", engine=engine, **options)
    generator = torch.Generator().manual_seed(engine.rank)
    for _ in range(6):
        opt.zero_grad()
        model(torch.randn(5, 9, generator=generator)).square().mean().backward()
        opt.step()
        average.step(samples=4 + engine.rank)
    average.average_all()
    return [value.clone() for value in model.state_dict().values()], average.sent_bytes


def averaging(misbehave, dist, folder):
    """Each kind of averaging over both engines; a second communicator, with a store of the caller's."""
    from fastactrec.optim.engines import TorchEngine
    from fastactrec.optim.nccl_engine import NcclEngine

    result = {}
    misbehave("in_progress", 3)
    for name, options in (("plain", {}), ("int8", {"compression": "int8"}), ("delay", {"delay": 1})):
        engine = NcclEngine(device="cpu")
        result[name] = train(engine, **options), train(TorchEngine(), **options)
        engine.check()
        engine.close()
        engine.close()
    engine = NcclEngine(store=dist.FileStore(f"{folder}/own", 2), device="cpu")
    with_own_store = train(engine)
    engine.close()
    return result, with_own_store


def collectives(misbehave, dist, folder):
    import torch

    from fastactrec.optim.nccl_engine import NcclEngine

    engine, rank = NcclEngine(device="cpu"), dist.get_rank()
    result = {}
    for dtype in (torch.float32, torch.float64, torch.int64, torch.uint8):
        for op in ("sum", "max"):
            array = torch.arange(6).add(10 * rank).to(dtype).view(2, 3)
            engine.all_reduce(array, op).wait()
            result[dtype, op] = array
    received = torch.empty(3, dtype=torch.float64)
    engine.reduce_scatter(received, torch.arange(6.0).double() + rank).wait()
    gathered = torch.empty(2, 3, dtype=torch.uint8)
    engine.all_gather(gathered, torch.full((3,), rank + 1, dtype=torch.uint8)).wait()
    sizes = [3, 1]
    exchanged = torch.empty(2, sizes[rank], dtype=torch.uint8)
    engine.all_to_all(exchanged, torch.arange(4, dtype=torch.uint8) + 10 * rank, sizes).wait()
    nothing = torch.empty(2, [0, 2][rank], dtype=torch.uint8)
    engine.all_to_all(nothing, torch.arange(2, dtype=torch.uint8) + 10 * rank, [0, 2]).wait()
    sent = engine.sent_bytes
    result |= {"scatter": received, "gather": gathered, "exchange": exchanged, "none": nothing, "sent": sent}
    engine.close()
    return result


def late(misbehave, dist, folder):
    """Rank 1 never joins."""
    from fastactrec.optim.nccl_engine import NcclEngine

    if dist.get_rank() == 1:
        misbehave("fail_init", 1)
    NcclEngine(device="cpu", timeout_s=1.0)


def no_library(misbehave, dist, folder):
    """Rank 0's NCCL is too old: all are told."""
    from fastactrec.optim.nccl_engine import NcclEngine

    if dist.get_rank() == 0:
        misbehave("version", 21805)
    NcclEngine(device="cpu")


def dies(misbehave, dist, folder):
    """Rank 1 ends in the middle; NCCL tells rank 0 of it."""
    import torch

    from fastactrec.optim.nccl_engine import NcclEngine

    engine = NcclEngine(device="cpu")
    engine.all_reduce(torch.ones(3)).wait()
    if dist.get_rank() == 1:
        os._exit(0)
    misbehave("async_error", 6)
    time.sleep(0.3)
    engine.check("round 7")


def main(scenario: str, folder: str, rank: int) -> None:
    misbehave = nccl_standin.load_standin(folder)
    nccl_standin.keep_the_real_one_out()
    import torch
    import torch.distributed as dist

    from fastactrec import ops

    module = nccl_standin.load_module(folder)
    for name in ("NcclCommunicator", "NcclError", "nccl_library", "nccl_unique_id"):
        setattr(ops._ext, name, getattr(module, name))  # what a build with CUDA has
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", int(os.environ["FAR_PORT"]), 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    try:
        result = globals()[scenario](misbehave, dist, folder)
    except Exception as error:
        result = type(error).__name__, str(error)
    torch.save(result, f"{folder}/{scenario}.{rank}.pt")
    os._exit(0)  # the other rank may be gone, which destroying the group would wait for


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
