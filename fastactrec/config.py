"""Every option of every command, its default and its checks: the only home of defaults.

A config is a frozen dataclass; ``cli.py`` turns it into flags, ``config_file.py`` into TOML. ``check()`` raises
``InputError`` naming the option and the cure, so that a wrong value costs no work.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from .options import STREAMS, parse_hierarchy, parse_scales, parse_size, parse_streams, parse_weights, require

MIB = 1 << 20

Positional = tyro.conf.Positional
_RUN_ALIAS = tyro.conf.arg(aliases=["--run-folder"])
RunPath = Annotated[Path, _RUN_ALIAS]
NewRunPath = Annotated[Path | None, _RUN_ALIAS]
"""--run; torchrun of Python 3.11 and older takes --run for an abbreviation of its own --run-path, hence the alias."""


@dataclass(frozen=True)
class FlowConfig:
    """TV-L1 (Zach, Pock, Bischof 2007), with a fixed number of iterations; see ``fastactrec.tvl1``."""

    tau: float = 0.25
    """Time step of the dual update."""
    lam: float = 0.15
    """Weight of the data term (images in 0..255)."""
    theta: float = 0.3
    """Tightness of the coupling between data and smoothness."""
    scales: int = 5
    """Pyramid levels at most."""
    scale_step: float = 0.8
    """Size ratio of neighbouring levels, below 1."""
    warps: int = 5
    """Warps per level."""
    iterations: int = 20
    """Iterations per warp."""
    median: int = 0
    """Side in pixels of the median filter before each warp: 3 or 5, or 0 for none."""

    def check(self) -> None:
        for name in ("tau", "lam", "theta"):
            value = getattr(self, name)
            require(0 < value < float("inf"), f"tvl1: {name}={value} is not a positive number")
        for name in ("scales", "warps", "iterations"):
            value = getattr(self, name)
            require(1 <= value <= 10000, f"tvl1: {name}={value} is not between 1 and 10000")
        require(0 < self.scale_step < 1, f"tvl1: scale_step={self.scale_step} is not between 0 and 1")
        require(self.median in (0, 3, 5), f"tvl1: median={self.median} is not 0, 3 or 5")


@dataclass(frozen=True)
class PrepareConfig:
    """Turn videos or extracted frames into a pack: RGB and TV-L1 flow JPEGs, manifest, splits."""

    src: Positional[Path]
    """A class-folder tree, a CSV (path or video, label; optionally group, split, start_frame, end_frame), a folder
    with one such CSV, a UCF101, HMDB51 or Kinetics tree, or extracted frame folders."""
    out: Path
    """The pack to write (a folder)."""
    layout: Literal["auto", "csv", "classes", "ucf101", "hmdb51", "kinetics", "frames"] = "auto"
    """What SRC is; auto detects it and says what it found."""
    lists: Path | None = None
    """Folder of the official split lists (UCF101, HMDB51) or the Kinetics CSV."""
    classes: str = ""
    """Keep only these labels, comma-separated; empty keeps all."""
    size: str = "short:256"
    """Frame size in pixels: short:N (short side, aspect kept) or WIDTHxHEIGHT."""
    frame_step: int = 1
    """Keep every n-th frame."""
    max_frames: int = 0
    """Keep only this many frames from the middle of longer clips (after the step); 0 keeps all."""
    bound_px: float = 20.0
    """Flow displacement in pixels that maps to codes 0 and 255."""
    quality: int = 95
    """JPEG quality of RGB and flow frames, 1 to 100."""
    test_fraction: float = 0.3
    """Share of clips held out for testing, by whole groups, where SRC brings no split."""
    val_fraction: float = 0.0
    """Share of clips held out for validation, by whole groups, where SRC brings no split."""
    seed: int = 0
    """Seed of the group-disjoint split."""
    workers: int = 0
    """Worker processes; 0 takes one per core."""

    def check(self) -> None:
        parse_size(self.size)
        require(self.src.exists(), f"{self.src}: no such file or folder")
        require(self.frame_step >= 1, f"--frame-step {self.frame_step}: must be at least 1")
        require(self.max_frames == 0 or self.max_frames >= 2, f"--max-frames {self.max_frames}: 0, or at least 2")
        require(0 < self.bound_px < 1000, f"--bound-px {self.bound_px}: must be above 0 (20 is usual)")
        require(1 <= self.quality <= 100, f"--quality {self.quality}: must be 1 to 100")
        require(self.workers >= 0, f"--workers {self.workers}: must be 0 (all cores) or more")
        require(self.seed >= 0, f"--seed {self.seed}: must be 0 or more")
        for name in ("test_fraction", "val_fraction"):
            value = getattr(self, name)
            require(0 <= value < 1, f"--{name.replace('_', '-')} {value}: must be in [0, 1)")
        require(
            self.test_fraction + self.val_fraction < 1,
            "--test-fraction and --val-fraction leave nothing to train on",
        )
        require(self.lists is None or self.lists.exists(), f"--lists {self.lists}: no such file or folder")


@dataclass(frozen=True)
class TrainConfig:
    """Train the streams, fuse them, evaluate, write a report. Without --data: an embedded synthetic set."""

    config: Path | None = None
    """TOML file of these options (see fastactrec/recipes), or the name of a recipe; flags override it."""
    data: Path | None = None
    """Pack to train on (see prepare). Without it, a synthetic set is made and prepared first."""
    run: NewRunPath = None
    """Run folder; ./runs/NAME without it."""
    name: str = ""
    """NAME of the run folder; the pack's name (or synthetic) without it, numbered when taken."""
    resume: bool = False
    """Continue the run if there is something to continue, else start it."""
    streams: str = "rgb,flow"
    """Networks to train, in order: rgb, flow."""
    split: str = "default"
    """Split of the pack (splits/NAME.csv)."""
    arch: Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"] = "resnet18"
    """torchvision ResNet of every stream."""
    base_width: int = 64
    """Channels of the first stage (64 is the standard network)."""
    init_rgb: Path | None = None
    """safetensors file of an RGB stream to start from (head replaced when the classes differ)."""
    init_flow: Path | None = None
    """safetensors file of a flow stream to start from (head replaced when the classes differ)."""
    flow_length: int = 5
    """Flow frames per stack; the network sees twice as many channels."""
    segments: int = 3
    """Segments per clip in training (TSN); their scores are averaged."""
    crop: int = 224
    """Side of the square network input, pixels; at least 40, so that the last stage is more than one pixel."""
    scales: str = "1,0.875,0.75,0.66"
    """Multi-scale corner crops: sides relative to the frame's short side."""
    flip: bool = True
    """Mirror half of the training samples (x flow negated)."""
    dropout: float = 0.5
    """Dropout before the classifier."""
    epochs: int = 30
    """Passes over the training clips, per stream."""
    batch: int = 16
    """Clips per rank and step."""
    lr: float = 1e-3
    """Peak learning rate of Adam; cosine to zero after the warm-up."""
    warmup_epochs: float = 1.0
    """Linear learning-rate warm-up, epochs."""
    weight_decay: float = 1e-4
    """Weight decay of weights (not of biases and norms)."""
    decoupled: bool = True
    """Decoupled weight decay (AdamW)."""
    label_smoothing: float = 0.1
    """Label smoothing of the cross entropy."""
    clip_norm: float = 20.0
    """Clip the gradient's global norm; 0 does not."""
    sync: Literal["auto", "none", "ddp", "kavg"] = "auto"
    """How ranks stay together: ddp (gradients every step), kavg (parameters every PERIOD steps), none (one rank
    only). auto: kavg when distributed."""
    period: int = 8
    """Steps between parameter averagings (K)."""
    moments: Literal["local", "mean", "desloc", "reset", "frozen_v"] = "desloc"
    """What happens to Adam's moments at averagings."""
    outer_lr: float = 1.0
    """Step from the last average towards the new mean; 1 takes the mean."""
    outer_momentum: float = 0.0
    """Momentum of those steps, in [0, 1)."""
    delay: int = 0
    """Steps that are taken while an averaging is on its way; less than --period."""
    compression: Literal["none", "bf16", "int8", "int4"] = "none"
    """How parameters travel: as they are, or their changes in 16, 8 or 4 bits with error feedback."""
    hierarchy: str = "none"
    """none; auto: ranks of one machine average every PERIOD steps, all of them every 4 PERIOD; or N,C for N ranks
    per machine and C."""
    warmup_sync: int = 0
    """Steps at the beginning in which gradients are averaged instead of parameters."""
    quadratic: float = 0.0
    """c of the period max(PERIOD, (c / lr)^2), which grows as the learning rate falls; 0: a constant period."""
    adaptive_batch: Literal["none", "noise", "decay"] = "none"
    """Grow the batch, by accumulating gradients, at the border of epochs: noise doubles it when the measured gradient
    noise scale is above two batches; decay grows it by the factor by which the learning rate would have decayed."""
    max_batch: int = 0
    """Most clips per optimizer step, all ranks together, for --adaptive-batch; 0: eight times the first batch."""
    batch_lr_rule: Literal["sqrt", "linear", "none"] = "sqrt"
    """How the learning rate follows a batch that --adaptive-batch noise has made k times as large: times sqrt(k)
    (Adam's rule), k, or 1."""
    noise_every: int = 64
    """Optimizer steps from one measurement of the gradient noise scale to the next."""
    bucket_mib: int = 25
    """Size of a flat bucket, MiB."""
    test_segments: int = 25
    """Segments per clip in the final evaluation."""
    test_crops: Literal[1, 5, 10] = 10
    """Crops per segment in the final evaluation."""
    fusion_weights: str = "rgb=1,flow=1.5"
    """Weights of the streams' scores."""
    fusion: Literal["logits", "softmax"] = "logits"
    """Fuse the scores before or after the softmax."""
    workers: int = 2
    """Decoding threads per rank."""
    log_every: int = 10
    """Steps between logged lines."""
    seed: int = 0
    """Seed of initialisation, order and augmentation."""
    deterministic: bool = False
    """Refuse operations that are not reproducible bit for bit."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes a GPU per local rank where there are enough."""

    def check(self) -> None:
        parse_weights(self.fusion_weights, parse_streams(self.streams))
        parse_scales(self.scales)
        require(
            self.data is None or self.data.exists(),
            f"--data {self.data}: no such pack; make one with 'prepare'",
        )
        for name in ("init_rgb", "init_flow"):
            path = getattr(self, name)
            require(path is None or path.exists(), f"--{name.replace('_', '-')} {path}: no such file")
        for name, least in {
            "base_width": 8, "flow_length": 1, "segments": 1, "crop": 40, "epochs": 1, "batch": 1, "period": 1,
            "bucket_mib": 1, "test_segments": 1, "workers": 1, "log_every": 1, "noise_every": 1,
        }.items():  # fmt: skip
            value = getattr(self, name)
            require(value >= least, f"--{name.replace('_', '-')} {value}: must be at least {least}")
        require(0 < self.lr < 10, f"--lr {self.lr}: must be above 0 and below 10")
        require(self.seed >= 0, f"--seed {self.seed}: must be 0 or more")
        require(self.weight_decay >= 0, f"--weight-decay {self.weight_decay}: must be 0 or more")
        require(0 <= self.dropout < 1, f"--dropout {self.dropout}: must be in [0, 1)")
        require(0 <= self.label_smoothing < 1, f"--label-smoothing {self.label_smoothing}: must be in [0, 1)")
        require(self.warmup_epochs >= 0, f"--warmup-epochs {self.warmup_epochs}: must be 0 or more")
        require(self.clip_norm >= 0, f"--clip-norm {self.clip_norm}: must be 0 (off) or more")
        for name in ("outer_lr", "outer_momentum", "delay", "compression", "hierarchy", "warmup_sync", "quadratic"):
            value, off = getattr(self, name), getattr(TrainConfig, name)
            require(
                value == off or self.sync in ("auto", "kavg"),
                f"--{name.replace('_', '-')} {value}: goes with --sync kavg",
            )
        parse_hierarchy(self.hierarchy)
        self.check_max_batch(1)
        for name in ("max_batch", "batch_lr_rule", "noise_every"):
            wanted = "noise or decay" if name == "max_batch" else "noise"
            require(
                getattr(self, name) == getattr(TrainConfig, name) or self.adaptive_batch in wanted.split(" or "),
                f"--{name.replace('_', '-')} {getattr(self, name)}: goes with --adaptive-batch {wanted}",
            )
        require("/" not in self.name and self.name not in (".", ".."), f"--name {self.name}: a plain folder name")

    def check_max_batch(self, ranks: int) -> None:
        """Raises InputError when the first batch of so many ranks is larger than the largest allowed."""
        first = f"--batch {self.batch}" + (f" on {ranks} ranks is {ranks * self.batch} clips" if ranks > 1 else "")
        require(
            self.max_batch == 0 or self.max_batch >= ranks * self.batch,
            f"--max-batch {self.max_batch}: {first} already; give 0 (eight times that) or more",
        )


@dataclass(frozen=True)
class EvaluateConfig:
    """Test a run on a pack: per-stream and fused top-1, top-5, mean class accuracy, confusion, per-clip scores."""

    run: RunPath
    """Run folder of train."""
    data: Path | None = None
    """Pack to test on; the one the run was trained on without it."""
    split: str = ""
    """Split of the pack; the run's own without it."""
    subset: Literal["test", "val", "train"] = "test"
    """Part of the split to test on."""
    out: Path | None = None
    """Folder for the results; the run folder without it."""
    test_segments: int = 0
    """Segments per clip; 0 takes the run's own."""
    test_crops: Literal[0, 1, 5, 10] = 0
    """Crops per segment; 0 takes the run's own."""
    fusion_weights: str = ""
    """Weights of the streams' scores; empty takes the run's own."""
    fusion: Literal["", "logits", "softmax"] = ""
    """Fuse before or after the softmax; empty takes the run's own."""
    workers: int = 2
    """Decoding threads per rank."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""

    def check(self) -> None:
        require(self.run.is_dir(), f"--run {self.run}: no such run folder")
        require(
            self.data is None or self.data.exists(),
            f"--data {self.data}: no such pack; make one with 'prepare'",
        )
        require(
            self.test_segments >= 0,
            f"--test-segments {self.test_segments}: must be 0 (the run's own) or more",
        )
        require(self.workers >= 1, f"--workers {self.workers}: must be at least 1")
        if self.fusion_weights:
            parse_weights(self.fusion_weights, STREAMS)


@dataclass(frozen=True)
class PredictConfig:
    """Label videos with a trained run."""

    run: RunPath
    """Run folder of train."""
    clips: Positional[tuple[Path, ...]]
    """Video files."""
    top: int = 5
    """Labels to print per clip."""
    json: bool = False
    """Print one JSON object per clip instead of text."""
    overlay: Path | None = None
    """Write the clip with its labels and flow drawn to this MP4 (a folder when there are several clips)."""
    test_segments: int = 0
    """Segments per clip; 0 takes the run's own."""
    test_crops: Literal[0, 1, 5, 10] = 0
    """Crops per segment; 0 takes the run's own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""

    def check(self) -> None:
        require(self.run.is_dir(), f"--run {self.run}: no such run folder")
        require(bool(self.clips), "name at least one video file")
        require(self.top >= 1, f"--top {self.top}: must be at least 1")
        require(
            self.test_segments >= 0,
            f"--test-segments {self.test_segments}: must be 0 (the run's own) or more",
        )


@dataclass(frozen=True)
class ReportConfig:
    """Write one self-contained HTML page for a run, or a comparison of several."""

    runs: Positional[tuple[Path, ...]]
    """Run folders."""
    out: Path | None = None
    """HTML file; report.html in the run folder (or ./comparison.html for several) without it."""

    def check(self) -> None:
        require(bool(self.runs), "name at least one run folder")
        for run in self.runs:
            require(run.is_dir(), f"{run}: no such run folder")


@dataclass(frozen=True)
class DoctorConfig:
    """Say what this machine has, which kernels were built, and what is wrong with a pack or data folder."""

    data: Path | None = None
    """Pack to check (manifest, checksums, every JPEG's ends, counts, splits), or a source for prepare."""

    def check(self) -> None:
        require(self.data is None or self.data.exists(), f"--data {self.data}: no such file or folder")


RGB_MEAN, RGB_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Normalisation of RGB in 0..1: torchvision's ImageNet statistics."""
FLOW_STD_OF_RANGE = 0.226
"""Normalisation of flow: pixels over this share of the coded range (TSN's 0.226 of 255 codes); the mean is zero."""


def normalisation(stream: str, bound_px: float) -> dict:
    """``mean`` and ``std`` of a stream's input, as ``decode_frames`` and ``decode_flow`` take them."""
    if stream == "rgb":
        return {"mean": RGB_MEAN, "std": RGB_STD}
    return {"mean": 0.0, "std": FLOW_STD_OF_RANGE * 2 * bound_px}
