"""The networks: a torchvision ResNet per stream, applied to segments whose scores are averaged (TSN)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

from ..config import STREAMS
from ..errors import CheckpointError, InputError

_LAYERS = {
    "resnet18": (BasicBlock, [2, 2, 2, 2]),
    "resnet34": (BasicBlock, [3, 4, 6, 3]),
    "resnet50": (Bottleneck, [3, 4, 6, 3]),
    "resnet101": (Bottleneck, [3, 4, 23, 3]),
    "resnet152": (Bottleneck, [3, 8, 36, 3]),
}
_FILE_KEY = (
    "fastactrec-stream"  # one key: safetensors writes several in random order, and equal runs should give equal files
)
_FILE_VERSION = 1


@dataclass(frozen=True)
class StreamSpec:
    """Everything needed to rebuild a stream's network and to feed it a video."""

    stream: str
    arch: str
    base_width: int
    flow_length: int
    classes: tuple[str, ...]
    crop: int
    """Side of the square input, pixels."""
    frame_size: str
    """How frames are resized first: ``config.parse_size`` reads it."""
    frame_step: int
    """Every n-th frame of the video."""
    bound_px: float
    """Flow displacement of codes 0 and 255; the input is normalised by it."""

    @property
    def in_channels(self) -> int:
        """3 for RGB; 2L for a stack of L flows (x, y, x, y ...)."""
        return 3 if self.stream == "rgb" else 2 * self.flow_length


class _Backbone(ResNet):
    """torchvision's ResNet with any number of input channels and any width of the first stage."""

    def __init__(self, spec: StreamSpec):
        self._base_width = spec.base_width
        block, layers = _LAYERS[spec.arch]
        super().__init__(block, layers, num_classes=len(spec.classes))
        self.conv1 = nn.Conv2d(spec.in_channels, spec.base_width, kernel_size=7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        self.bn1 = nn.BatchNorm2d(spec.base_width)
        self.fc = nn.Linear(8 * spec.base_width * block.expansion, len(spec.classes))

    def _make_layer(self, block, planes, *args, **kwargs):
        if planes == 64:  # the first stage: what conv1 above feeds it
            self.inplanes = self._base_width
        return super()._make_layer(block, planes * self._base_width // 64, *args, **kwargs)


class StreamNet(nn.Module):
    """One stream. Input float [N, S, C, H, W] (S segments), output class scores (logits) [N, classes], the mean
    over segments; dropout sits before the classifier."""

    def __init__(self, spec: StreamSpec, dropout: float = 0.0):
        super().__init__()
        self.spec = spec
        self.backbone = _Backbone(spec)
        self.backbone.fc = nn.Sequential(nn.Dropout(dropout), self.backbone.fc)

    def forward(self, segments: Tensor) -> Tensor:
        n, s = segments.shape[:2]
        return self.backbone(segments.flatten(0, 1)).view(n, s, -1).mean(1)


def save_stream(model: StreamNet, path: Path) -> None:
    """Write the weights and what rebuilds the network to a safetensors file (contiguous copies)."""
    metadata = {_FILE_KEY: json.dumps({"version": _FILE_VERSION, "spec": asdict(model.spec)})}
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, path, metadata=metadata)


def read_stream(path: Path) -> tuple[StreamSpec, dict[str, Tensor]]:
    """The network description and tensors of a file that ``save_stream`` wrote.

    Raises:
        CheckpointError: missing, damaged, or not such a file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from error
    try:
        about = json.loads(metadata[_FILE_KEY])
        spec = StreamSpec(**{**about["spec"], "classes": tuple(about["spec"]["classes"])})
        known = about["version"] == _FILE_VERSION and spec.stream in STREAMS and spec.arch in _LAYERS
    except (KeyError, TypeError, ValueError):
        known = False
    if not known:
        raise CheckpointError(f"{path}: not a fastactrec stream of format version {_FILE_VERSION}; train one")
    return spec, tensors


def load_stream(path: Path) -> StreamNet:
    """The trained network of a file, in evaluation mode.

    Raises:
        CheckpointError: the file is missing, damaged, or of another architecture than it says.
    """
    spec, tensors = read_stream(path)
    model = StreamNet(spec)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise CheckpointError(f"{path}: its tensors do not fit {spec.arch}: {error}") from error
    return model.eval()


def require_fit(source: StreamSpec, target: StreamSpec, path: Path) -> None:
    """Raises InputError unless the weights of ``source``, read from ``path``, can start a network like ``target``."""
    for field in ("stream", "arch", "base_width", "in_channels"):
        theirs, ours = getattr(source, field), getattr(target, field)
        if theirs != ours:
            raise InputError(f"{path}: {field} is {theirs}, the network to train has {ours}; make them equal")


def start_from(model: StreamNet, path: Path) -> list[str]:
    """Initialise a stream from the file of another one; the classifier is kept only for the same classes.

    Returns:
        Names of the tensors that were left as they were.
    Raises:
        InputError: another stream, architecture, width or stack length.
    """
    spec, tensors = read_stream(path)
    require_fit(spec, model.spec, path)
    if spec.classes != model.spec.classes:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("backbone.fc.")}
    try:
        missing, unexpected = model.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise CheckpointError(f"{path}: its tensors do not fit {spec.arch}: {error}") from error
    if unexpected:
        raise CheckpointError(f"{path}: unknown tensors {', '.join(unexpected)}")
    return list(missing)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Weights decay, biases and normalisation parameters do not."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]


def build_stream(spec: StreamSpec, dropout: float, seed: int) -> StreamNet:
    """A freshly initialised stream; the same on every rank, whatever was drawn from torch's generator before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return StreamNet(spec, dropout)
