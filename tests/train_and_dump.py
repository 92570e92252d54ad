"""Run by torchrun in test_pipeline.py: ``train`` with the arguments behind the first, then each rank's own replica."""

import sys
from pathlib import Path

import torch

from fastactrec import cli
from fastactrec.engine.trainer import StreamTrainer

fit = StreamTrainer.fit


def fit_and_dump(self, events):
    fit(self, events)
    torch.save(self.model.state_dict(), Path(sys.argv[1]) / f"{self.stream}-{self.world.rank}.pt")


if __name__ == "__main__":
    StreamTrainer.fit = fit_and_dump
    sys.exit(cli.run("train", sys.argv[2:]))
