"""Scores of clips, the same for any number of ranks: each clip is scored once, by one rank, on its own."""

from __future__ import annotations

import numpy as np
import torch

from ..data.loader import TestLoader
from ..models.streams import StreamNet
from ..progress import track
from .world import World


@torch.no_grad()
def score_clips(
    model: StreamNet, loader: TestLoader, clips: list[int], world: World, description: str = ""
) -> tuple[np.ndarray, np.ndarray]:
    """Logits of every clip, averaged over segments and crops.

    Args:
        loader: this rank's share of ``clips``.
        clips: indices into the pack, the same on every rank.
    Returns:
        scores float64 [clips, classes] and labels int64 [clips], in the order of ``clips``, on every rank.
    """
    model.eval()
    places = {clip: place for place, clip in enumerate(clips)}
    scores = torch.zeros(len(places), len(model.spec.classes), dtype=torch.float64)
    items = track(loader, description, total=len(loader)) if description else loader
    for clip, inputs in items:
        views = model(inputs.to(world.device)[:, None])  # [S * crops, classes]
        scores[places[clip]] = views.double().mean(0).cpu()
    world.sum(scores)  # every row is zero on all ranks but one
    labels = np.array([loader.reader.pack.clips[clip].label for clip in clips], dtype=np.int64)
    return scores.numpy(), labels
