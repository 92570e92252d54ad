"""Where FlatBuckets puts parameters: by group and type, aligned; what it refuses; changes of type and memory format."""

import pytest
import torch
from adam_cases import (
    HYPER,
    assert_close,
    fit,
    fused,
    mlp,
    net,
    same,
    train,
)
from torch import nn

import fastactrec as far

pytestmark = pytest.mark.usefixtures("one_thread")


def test_grouping_by_group_and_type_with_aligned_parameters():
    sizes = (0, 1, 33, 70, 5000)
    kinds = torch.float32, torch.bfloat16, torch.float16
    params = [nn.Parameter(torch.full((n,), k + 1.0, dtype=kind)) for k, kind in enumerate(kinds) for n in sizes]
    groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 1.0}]
    buckets = far.FlatBuckets(groups, bucket_bytes=1024)
    assert {(bucket.group, bucket.dtype) for bucket in buckets} == {(g, kind) for g in (0, 1) for kind in kinds}
    where = {}
    for bucket in buckets:
        assert bucket.flat["param"].data_ptr() % 128 == bucket.flat["grad"].data_ptr() % 128 == 0
        for i, begin, end in zip(bucket.index, bucket.begin, bucket.end, strict=True):
            p = buckets.params[i]
            assert buckets.group_of[i] == bucket.group
            assert p.dtype == p.grad.dtype == bucket.dtype
            if p.numel():  # else it has no address
                assert p.data_ptr() == bucket.flat["param"].data_ptr() + begin * p.element_size()
                assert p.data_ptr() % 128 == p.grad.data_ptr() % 128 == 0
            assert end - begin == p.numel()
            assert i not in where
            where[i] = bucket
    assert len(where) == len(params)


def test_parameters_in_the_same_memory_are_refused_by_name():
    model = nn.ModuleDict({"encoder": nn.Linear(4, 4), "decoder": nn.Linear(4, 4)})
    model["decoder"].weight.data = model["encoder"].weight.data.t()
    with pytest.raises(far.InputError, match=r"decoder\.weight and encoder\.weight .*share the nn\.Parameter"):
        far.FlatBuckets(model)
    model["decoder"].weight = model["encoder"].weight
    assert sum(len(bucket.index) for bucket in far.FlatBuckets(model)) == 3
    base = torch.zeros(10)
    assert len(far.FlatBuckets([nn.Parameter(base[:5]), nn.Parameter(base[5:])])) == 1  # side by side is fine
    with pytest.raises(far.InputError, match="parameter 0 and parameter 1"):
        far.FlatBuckets([nn.Parameter(base[:6]), nn.Parameter(base[5:])])


def test_parameters_inside_a_large_one_are_refused():
    """Two small pieces, of which only the first is next to the large one when sorted by address."""
    base = torch.zeros(100)
    with pytest.raises(far.InputError, match="same memory"):
        far.FlatBuckets([nn.Parameter(base), nn.Parameter(base[10:12])])
    buckets = far.FlatBuckets([nn.Parameter(base[:40]), nn.Parameter(torch.zeros(3))])
    assert len(buckets) == 1


def test_meta_lazy_and_sparse_are_refused():
    with torch.device("meta"):
        model = mlp()
    with pytest.raises(far.InputError, match=r"0\.weight is on the meta device.*to_empty"):
        far.FlatBuckets(model)
    with pytest.raises(far.InputError, match="UninitializedParameter"):
        far.FlatBuckets(nn.LazyLinear(3))
    table = nn.Embedding(10, 3, sparse=True)
    buckets = far.FlatBuckets(table)
    table(torch.tensor([1, 2, 2])).sum().backward()  # adds into the dense view: right
    assert table.weight.grad is buckets._grads[0]
    assert table.weight.grad.sum(1).tolist() == [0, 3, 6, 0, 0, 0, 0, 0, 0, 0]
    buckets.zero_grad()
    with pytest.raises(far.InputError, match=r"weight got a sparse gradient.*sparse=False"):
        table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(far.InputError, match="sparse gradient"):
        buckets.settle()
    with pytest.raises(far.InputError, match=r"float64.*model\.float\(\)"):
        far.FlatBuckets(mlp().double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_changed_to_another_type_is_rebuilt(dtype):
    model = mlp()
    opt = fused(model)
    fit(model, opt, 2)
    moments = [opt.state[p]["exp_avg"].clone() for p in model.parameters()]
    model.to(dtype)
    with pytest.raises(far.InputError, match=r"0\.weight no longer lies in its bucket.*rebuild"):
        opt.step()
    opt.buckets.rebuild()
    for p, moment in zip(model.parameters(), moments, strict=True):
        assert p.dtype == p.grad.dtype == dtype
        assert same(opt.state[p]["exp_avg"], moment)
    before = model[0].weight.detach().clone()
    fit(model, opt, 3, first=2, forward=lambda x: model(x.to(dtype)).float())
    assert opt.state[model[0].weight]["step"] == 5
    assert same(opt.state[model[0].weight]["master"].to(dtype), model[0].weight)
    assert not same(before, model[0].weight)
    model.float()
    opt.buckets.rebuild()
    assert "master" not in opt.state[model[0].weight]
    fit(model, opt, 1, first=5)
    assert opt.state[model[0].weight]["step"] == 6


def test_a_model_moved_to_channels_last_goes_on_alike():
    model, reference = net(torch.contiguous_format), net(torch.contiguous_format)
    opt, other = fused(model), torch.optim.Adam(reference.parameters(), **HYPER)
    train(model, opt, 2)
    model.to(memory_format=torch.channels_last)
    opt.buckets.rebuild()
    train(model, opt, 2, first=2)
    train(reference, other, 4)
    assert_close(model, reference)
    assert opt.state[model[0].weight]["exp_avg"].is_contiguous(memory_format=torch.channels_last)
