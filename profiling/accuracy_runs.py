"""One run of the accuracy study: a narrow network, trained by four ranks on a fold's training clips, and tested."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from accuracy_arms import RANKS, Arm, Settings
from lockstep import Turns
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, ResNet

import fastactrec as far
from fastactrec.config import TrainConfig, normalisation
from fastactrec.data.loader import TestLoader, TrainLoader
from fastactrec.data.pack import Pack
from fastactrec.engine.trainer import learning_rate
from fastactrec.models.streams import parameter_groups
from fastactrec.optim.engines import Engine

SCALES = (0.875,)  # of 64 px: the crop itself, at one of TSN's 13 places; nothing is left to resize
DROPOUT, WEIGHT_DECAY, LABEL_SMOOTHING, CLIP_NORM = 0.2, 1e-4, 0.1, 20.0  # the trainer's, but for less dropout


class NarrowNet(ResNet):
    """torchvision's ResNet with one block per stage and ``width`` channels in the first."""

    def __init__(self, channels: int, width: int, classes: int):
        self._width = width
        super().__init__(BasicBlock, [1, 1, 1, 1], num_classes=classes)
        self.conv1 = nn.Conv2d(channels, width, kernel_size=7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        self.bn1 = nn.BatchNorm2d(width)
        self.fc = nn.Sequential(nn.Dropout(DROPOUT), nn.Linear(8 * width, classes))

    def _make_layer(self, block, planes, *args, **kwargs):
        if planes == 64:
            self.inplanes = self._width
        return super()._make_layer(block, planes * self._width // 64, *args, **kwargs)


def folds_by_group(groups: list[str], count: int, seed: int = 0) -> list[list[int]]:
    """Clips (their places in ``groups``) of each fold: no group in two folds, sizes as equal as groups allow.

    Groups go, the largest first and equal ones in the order of a draw, to the fold with the fewest clips.
    """
    names, sizes = np.unique(groups, return_counts=True)
    order = np.random.default_rng(seed).permutation(len(names))
    order = order[np.argsort(-sizes[order], kind="stable")]
    filled, fold_of = np.zeros(count, int), {}
    for i in order:
        fold = int(filled.argmin())
        fold_of[names[i]] = fold
        filled[fold] += sizes[i]
    return [[i for i, group in enumerate(groups) if fold_of[group] == fold] for fold in range(count)]


@dataclass
class Material:
    """The decoded batches of a (fold, seed): every arm trains on the same ones."""

    steps_per_epoch: int
    batches: list[list[tuple[Tensor, Tensor]]]
    """[step][rank]: inputs [N, C, H, W], float16, and labels [N]."""
    views: Tensor
    """[test clips, segments, C, H, W], float16."""
    labels: np.ndarray
    classes: int


def load_material(
    pack: Pack, stream: str, train: list[int], test: list[int], seed: int, settings: Settings
) -> Material:
    """Decodes what all arms of a (fold, seed) see, by the package's own loaders."""
    common = {
        "modality": stream, "flow_length": settings.flow_length, "crop": settings.crop, "workers": 1,
        **normalisation(stream, pack.bound_px),
    }  # fmt: skip
    loaders = [
        TrainLoader(
            pack, train * settings.passes, segments=settings.segments, scales=SCALES, flip=True, batch=settings.batch,
            seed=seed, rank=rank, world=RANKS, **common,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    batches = []
    for epoch in range(settings.epochs):
        for parts in zip(*(loader.epoch(epoch) for loader in loaders), strict=True):
            batches.append([(part.inputs.flatten(0, 1).half(), part.labels) for part in parts])
    tests = TestLoader(pack, test, segments=settings.test_segments, crops=1, **common)
    views = torch.stack([views.half() for _, views in tests])
    labels = np.array([pack.clips[i].label for i in test])
    return Material(loaders[0].steps_per_epoch, batches, views, labels, len(pack.classes))


def train_rank(engine: Engine, arm: Arm, lr: float, seed: int, settings: Settings, material: Material) -> dict:
    """What one rank does: the trainer's step on the material, kept together as ``arm`` says."""
    first = material.batches[0][engine.rank][0]
    torch.manual_seed(seed)
    model = NarrowNet(first.shape[1], settings.width, material.classes).to(memory_format=torch.channels_last)
    buckets = far.FlatBuckets(
        model, bucket_bytes=settings.bucket_kib << 10, groups=parameter_groups(model, WEIGHT_DECAY)
    )
    optimizer = far.FusedAdam(buckets, lr=lr, decoupled=True, max_norm=CLIP_NORM)
    steps = len(material.batches)
    warmup = int(min(arm.synchronous_epochs * material.steps_per_epoch, steps))
    options = dict(arm.options)
    if "quadratic" in options:
        options["quadratic"] *= lr  # given in learning rates of the peak
    averager = far.ParameterAverager(optimizer, warmup=warmup, engine=engine, **options)
    config = TrainConfig(lr=lr, epochs=settings.epochs)
    model.train()
    losses = []
    for step in range(steps):
        inputs, labels = material.batches[step][engine.rank]
        rate = learning_rate(config, step, material.steps_per_epoch)
        for group in optimizer.param_groups:
            group["lr"] = rate
        entropy = [seed, step, engine.rank]
        torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1))
        scores = model(inputs.float().contiguous(memory_format=torch.channels_last))
        scores = scores.view(len(labels), settings.segments, -1).mean(1)
        loss = nn.functional.cross_entropy(scores, labels, label_smoothing=LABEL_SMOOTHING)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        averager.step(samples=len(labels))
        if (step + 1) % material.steps_per_epoch == 0:
            averager.average_all()
    return {
        "model": model,
        "sent_bytes": averager.sent_bytes,
        "loss": float(np.mean(losses[-material.steps_per_epoch :])),
    }


@torch.no_grad()
def scores_of(model: nn.Module, material: Material) -> np.ndarray:
    """Logits, the mean over segments, float64 [clips, classes]."""
    model.eval()
    clips, segments = material.views.shape[:2]
    views = material.views.flatten(0, 1).split(64)
    scores = torch.cat([model(part.float().contiguous(memory_format=torch.channels_last)) for part in views])
    return scores.double().view(clips, segments, -1).mean(1).numpy()


def run_arm(arm: Arm, lr: float, seed: int, settings: Settings, material: Material) -> dict:
    """Trains and tests: predictions, cross entropy of the test clips, training loss, bytes sent by a rank, seconds."""
    start = time.perf_counter()
    ranks = Turns(RANKS).run(lambda engine: train_rank(engine, arm, lr, seed, settings, material))
    scores = scores_of(ranks[0]["model"], material)
    logs = torch.from_numpy(scores).log_softmax(1).numpy()
    return {
        "predicted": scores.argmax(1).tolist(),
        "cross_entropy": float(-logs[np.arange(len(scores)), material.labels].mean()),
        "loss": float(np.mean([rank["loss"] for rank in ranks])),
        "sent_bytes": ranks[0]["sent_bytes"],
        "seconds": time.perf_counter() - start,
    }
