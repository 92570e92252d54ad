"""Networks against torchvision's own, fusion by hand, stream files."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torchvision
from safetensors.torch import save_file

from fastactrec.errors import CheckpointError, InputError
from fastactrec.models.fusion import fuse
from fastactrec.models.streams import (
    StreamSpec,
    build_stream,
    load_stream,
    parameter_groups,
    save_stream,
    start_from,
)


def spec(stream="rgb", arch="resnet18", base_width=64, flow_length=5, classes=("a", "b", "c")):
    return StreamSpec(stream, arch, base_width, flow_length, classes, 64, "short:64", 1, 20.0)


@pytest.mark.parametrize("arch", ["resnet18", "resnet50"])
def test_full_width_rgb_stream_is_torchvisions_resnet(arch):
    ours = build_stream(spec(arch=arch), 0.0, seed=1).eval()
    theirs = getattr(torchvision.models, arch)(num_classes=3).eval()
    theirs.load_state_dict(
        {name.removeprefix("backbone.").replace("fc.1.", "fc."): t for name, t in ours.state_dict().items()}
    )
    image = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(image[:, None]), theirs(image), rtol=0, atol=0)


def test_scores_are_the_mean_over_segments():
    model = build_stream(spec("flow"), 0.0, seed=2).eval()
    stacks = torch.randn(2, 3, 10, 64, 64)
    with torch.no_grad():
        by_hand = torch.stack([model(stacks[:, s : s + 1]) for s in range(3)]).mean(0)
        torch.testing.assert_close(model(stacks), by_hand)


@pytest.mark.parametrize(("arch", "width"), [("resnet18", 16), ("resnet50", 24)])
def test_narrow_networks_scale_every_stage(arch, width):
    narrow = build_stream(spec(arch=arch, base_width=width), 0.0, seed=0).state_dict()
    full = build_stream(spec(arch=arch), 0.0, seed=0).state_dict()
    for name, tensor in full.items():
        expected = [side * width // 64 if side % 64 == 0 else side for side in tensor.shape]
        assert list(narrow[name].shape) == expected, name


def test_initialisation_depends_on_the_seed_alone():
    torch.rand(5)
    first = build_stream(spec(), 0.5, seed=3).state_dict()
    torch.rand(7)
    second = build_stream(spec(), 0.5, seed=3).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = build_stream(spec(), 0.5, seed=4).state_dict()
    assert not torch.equal(first["backbone.conv1.weight"], other["backbone.conv1.weight"])


def test_only_weights_decay():
    decayed, plain = parameter_groups(build_stream(spec(), 0.0, seed=0), 0.1)
    assert all(p.ndim in (2, 4) for p in decayed["params"])
    assert decayed["weight_decay"] == 0.1
    assert all(p.ndim == 1 for p in plain["params"])
    assert plain["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(plain["params"]) == 62  # resnet18: 20 conv, 20 x 2 norm, 2 linear


def test_stream_files_round_trip(tmp_path):
    model = build_stream(spec("flow", base_width=16), 0.3, seed=5).to(memory_format=torch.channels_last)
    save_stream(model, tmp_path / "flow.safetensors")
    loaded = load_stream(tmp_path / "flow.safetensors")
    assert loaded.spec == model.spec
    assert not loaded.training
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_start_from_another_data_set_replaces_the_head(tmp_path):
    source = build_stream(spec(classes=("x", "y")), 0.0, seed=6)
    save_stream(source, tmp_path / "rgb.safetensors")
    target = build_stream(spec(), 0.0, seed=7)
    assert start_from(target, tmp_path / "rgb.safetensors") == ["backbone.fc.1.weight", "backbone.fc.1.bias"]
    assert torch.equal(target.backbone.conv1.weight, source.backbone.conv1.weight)
    assert target.backbone.fc[1].weight.shape[0] == 3


def test_start_from_refuses_another_network(tmp_path):
    save_stream(build_stream(spec(base_width=16), 0.0, seed=0), tmp_path / "rgb.safetensors")
    with pytest.raises(InputError, match=r"rgb\.safetensors: base_width is 16, the network to train has 64"):
        start_from(build_stream(spec(), 0.0, seed=0), tmp_path / "rgb.safetensors")


def test_damaged_and_foreign_files_are_named(tmp_path):
    path = tmp_path / "rgb.safetensors"
    with pytest.raises(CheckpointError, match=r"rgb\.safetensors"):
        load_stream(path)
    path.write_bytes(b"\x00" * 100)
    with pytest.raises(CheckpointError, match=r"rgb\.safetensors: not a readable safetensors file"):
        load_stream(path)
    for about in ({}, {"fastactrec-stream": "{]"}, {"fastactrec-stream": '{"version": 1, "spec": {"stream": "rgb"}}'}):
        save_file({"weight": torch.zeros(2)}, path, metadata=about)
        with pytest.raises(CheckpointError, match="not a fastactrec stream"):
            load_stream(path)


def test_fusion_weighs_logits_or_probabilities():
    scores = {"rgb": np.array([[2.0, 0.0]]), "flow": np.array([[0.0, 1.0]])}
    weights = {"rgb": 1.0, "flow": 1.5}
    np.testing.assert_allclose(fuse(scores, weights, "logits"), [[0.8, 0.6]])
    rgb, flow = 1 / (1 + np.exp(-2.0)), 1 / (1 + np.exp(1.0))
    expected = [[(rgb + 1.5 * flow) / 2.5, (1 - rgb + 1.5 * (1 - flow)) / 2.5]]
    np.testing.assert_allclose(fuse(scores, weights, "softmax"), expected)
    np.testing.assert_allclose(fuse({"rgb": scores["rgb"]}, weights, "logits"), scores["rgb"])
