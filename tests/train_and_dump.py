"""Run by torchrun in test_pipeline.py: ``train`` with the arguments behind the first, then each rank's own replica.

Fails when a network outlives the process group: DDP's threads would then abort the interpreter at its end, sometimes.
"""

import sys
import weakref
from pathlib import Path

import torch

from fastactrec import cli
from fastactrec.engine.trainer import StreamTrainer

fit = StreamTrainer.fit
networks = []


def fit_and_dump(self, events):
    fit(self, events)
    torch.save(self.model.state_dict(), Path(sys.argv[1]) / f"{self.stream}-{self.world.rank}.pt")
    networks.append(weakref.ref(self.network))


if __name__ == "__main__":
    StreamTrainer.fit = fit_and_dump
    code = cli.run("train", sys.argv[2:])
    assert not any(network() for network in networks), "a network is still alive"
    sys.exit(code)
