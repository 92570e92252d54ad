"""Real processes over gloo that stay: one spawn per number of ranks serves every test that asks for it."""

from __future__ import annotations

import atexit
import functools
import importlib
import multiprocessing
import os
import pickle
import tempfile
import traceback
from datetime import timedelta

TIMEOUT_S = 20  # of the process group: what a lone rank waits for the others


class RankPool:
    """Ranks of one process group; each runs ``scenario(rank, world, *args)`` when told to.

    Forked from a server that has imported torch once. A call in which a rank fails ends the pool: its process group is
    then out of step.
    """

    def __init__(self, world: int):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "fastactrec"])
        self._folder = tempfile.TemporaryDirectory()
        self.ranks = []
        for rank in range(world):
            here, there = context.Pipe()
            arguments = (rank, world, self._folder.name, there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self.ranks.append((process, here))

    def start(self, scenario: str, *args) -> None:
        for _, connection in self.ranks:
            connection.send_bytes(pickle.dumps((scenario, args)))

    def result(self, rank: int):
        """What a rank returned; RuntimeError with its traceback if it failed; EOFError if it was killed."""
        failure, result = pickle.loads(self.ranks[rank][1].recv_bytes())
        if failure:
            raise RuntimeError(f"rank {rank}:\n{failure}")
        return result

    def close(self) -> None:
        for process, connection in self.ranks:
            connection.close()  # the rank ends itself, see _serve
            process.join(1)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


@functools.cache
def _pool(world: int) -> RankPool:
    pool = RankPool(world)
    atexit.register(pool.close)
    return pool


def on_ranks(world: int, scenario: str, *args) -> list:
    """Runs "module.function" on every rank; the list of what they return."""
    pool = _pool(world)
    pool.start(scenario, *args)
    try:
        return [pool.result(rank) for rank in range(world)]
    except Exception:
        _pool.cache_clear()
        pool.close()
        raise


def _serve(rank: int, world: int, folder: str, connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    while True:
        try:
            scenario, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)  # the tests have ended: no farewell to ranks that may be gone
        module, _, name = scenario.rpartition(".")
        torch.manual_seed(0)
        try:
            answer = "", getattr(importlib.import_module(module), name)(rank, world, *args)
        except Exception:
            answer = traceback.format_exc(), None
        connection.send_bytes(pickle.dumps(answer))  # not send(): it would hand tensors over as shared memory
