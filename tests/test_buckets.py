import copy
import gc
import weakref
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fastactrec as far
from fastactrec.optim.layout import ALIGN_BYTES, align_of, plan_buckets

ALIGN = align_of(torch.float32)

SIZES = [0, 1, 31, 32, 33, 255, 257, 5000]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Flatten(), nn.Linear(45, 4))


def backward(model, seed=1) -> None:
    generator = torch.Generator().manual_seed(seed)
    model(torch.randn(6, 3, 5, 5, generator=generator)).square().sum().backward()


@given(st.lists(st.integers(0, 300), max_size=40), st.integers(ALIGN, 400))
def test_plan_places_every_element_once(sizes, capacity):
    plan = plan_buckets(sizes, capacity, ALIGN)
    assert [index for bucket in plan for index, _ in bucket] == list(range(len(sizes)))
    for bucket in plan:
        used = 0
        for index, offset in bucket:
            assert offset % ALIGN == 0
            assert offset >= used  # no element in two places
            used = offset + sizes[index]
        assert used <= capacity or len(bucket) == 1
    for before, after in pairwise(plan):  # greedy: the next tensor did not fit
        index, offset = before[-1]
        end = -(-(offset + sizes[index]) // ALIGN) * ALIGN
        assert end + -(-sizes[after[0][0]] // ALIGN) * ALIGN > capacity


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(SIZES), min_size=1, max_size=12), st.integers(128, 6000), st.data())
def test_every_element_is_in_exactly_one_bucket(sizes, bucket_bytes, data):
    params = [nn.Parameter(torch.full((size,), float(k + 1))) for k, size in enumerate(sizes)]
    frozen = data.draw(st.sets(st.integers(0, len(sizes) - 1)))
    for k in frozen:
        params[k].requires_grad_(False)
    buckets = far.FlatBuckets(params, bucket_bytes=bucket_bytes)
    for bucket in buckets:
        assert bucket.flat["param"].data_ptr() % ALIGN_BYTES == 0
        bucket.flat["param"].mul_(-1)
        bucket.flat["grad"].fill_(7)
    for k, p in enumerate(params):
        assert torch.equal(p.data, torch.full((sizes[k],), float(k + 1) * (1 if k in frozen else -1)))
        assert p.grad is None if k in frozen else torch.equal(p.grad, torch.full((sizes[k],), 7.0))
        assert not sizes[k] or k in frozen or p.data_ptr() % ALIGN_BYTES == 0
    total = sum(sum((bucket.flat["param"] != 0).tolist()) for bucket in buckets)
    assert total == sum(size for k, size in enumerate(sizes) if k not in frozen)


def test_grads_are_zero_views_at_once_in_the_parameters_layout():
    model = net().to(memory_format=torch.channels_last)
    model[4].weight.data = model[4].weight.data.t().contiguous().t()
    before = {name: (p.clone(), p.stride()) for name, p in model.named_parameters()}
    far_buckets = far.FlatBuckets(model)
    for name, p in model.named_parameters():
        value, stride = before[name]
        assert torch.equal(p, value)
        assert p.stride() == p.grad.stride() == stride
        assert not p.grad.any()
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert len(far_buckets) == 1


def test_overlapping_and_gapped_parameters_become_contiguous():
    expanded, gapped = torch.ones(3, 1).expand(3, 4), torch.arange(24.0).view(4, 6)[:, ::2]
    params = [nn.Parameter(expanded), nn.Parameter(gapped)]
    buckets = far.FlatBuckets(params)
    assert torch.equal(params[0], expanded)
    assert torch.equal(params[1], gapped)
    assert all(p.is_contiguous() for p in params)
    assert len(buckets) == 1


def test_a_parameter_used_twice_is_there_once():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    buckets = far.FlatBuckets(nn.Sequential(first, second))
    assert sum(len(bucket.index) for bucket in buckets) == 3
    assert second.weight.data_ptr() == first.weight.data_ptr()


def test_buckets_follow_parameter_groups():
    model = net()
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    buckets = far.FlatBuckets(model, groups=[{"params": weights, "lr": 1.0}, {"params": others}])
    assert [bucket.group for bucket in buckets] == [0, 1]
    with pytest.raises(far.InputError, match=r"leave out 0\.bias"):
        far.FlatBuckets(model, groups=[{"params": weights}])
    with pytest.raises(far.InputError, match="twice"):
        far.FlatBuckets(model, groups=[{"params": [*weights, *others]}, {"params": others}])


def test_gradients_equal_those_without_buckets():
    model, plain = net(), net()
    buckets = far.FlatBuckets(model)
    for set_to_none in (True, False):
        for seed in (1, 2):  # two backwards accumulate
            backward(model, seed)
            backward(plain, seed)
        for i, (p, q) in enumerate(zip(model.parameters(), plain.parameters(), strict=True)):
            assert torch.equal(p.grad, q.grad)
            assert p.grad is buckets._grads[i]
        buckets.zero_grad(set_to_none)
        plain.zero_grad(set_to_none)
        assert all((p.grad is None) == set_to_none for p in model.parameters())
    assert not any(bucket.flat["grad"].any() for bucket in buckets)


def test_gradients_set_to_none_by_anyone_come_back_as_views():
    model = net()
    buckets = far.FlatBuckets(model)
    backward(model)
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    assert model[0].weight.grad is None
    backward(model)
    for i, (p, grad) in enumerate(zip(model.parameters(), expected, strict=True)):
        assert torch.equal(p.grad, grad)
        assert p.grad.data_ptr() == buckets.view("grad", i).data_ptr()


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph():
    model = net()
    buckets = far.FlatBuckets(model)
    x = torch.randn(2, 3, 5, 5)
    model(x).square().sum().backward(create_graph=True)
    assert all(p.grad.data_ptr() == buckets.view("grad", i).data_ptr() for i, p in enumerate(buckets.params))


def test_replaced_storage_is_named_with_its_cure():
    model = net()
    buckets = far.FlatBuckets(model)
    backward(model)
    buckets.settle()
    model.to(memory_format=torch.channels_last)
    with pytest.raises(far.InputError, match=r"0\.weight no longer lies in its bucket.*rebuild"):
        buckets.settle()
    buckets.rebuild()
    buckets.settle()
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[0].weight.grad.is_contiguous(memory_format=torch.channels_last)


def test_a_replaced_gradient_is_refused():
    model = net()
    buckets = far.FlatBuckets(model)
    backward(model)
    model[4].bias.grad = model[4].bias.grad.clone()
    with pytest.raises(far.InputError, match=r"4\.bias is no longer a view.*gradient_as_bucket_view=False"):
        buckets.settle()


@pytest.mark.parametrize("after_backward", [True, False])
def test_a_gradient_whose_data_was_replaced_is_taken(after_backward):
    model = net()
    buckets = far.FlatBuckets(model)
    if after_backward:
        backward(model)
    bias = model[4].bias
    bias.grad.data = torch.tensor([1.0, 2.0, 3.0, 4.0])
    buckets.settle()
    assert buckets.touched.tolist() == [after_backward] * 5 + [True]
    assert buckets.view("grad", 5).tolist() == bias.grad.tolist() == [1, 2, 3, 4]
    assert bias.grad.data_ptr() == buckets.view("grad", 5).data_ptr()
    bias.grad.data = torch.ones(4)
    buckets.zero_grad()
    model.zero_grad()
    backward(model)
    expected = bias.grad.clone()
    buckets.settle()
    assert torch.equal(buckets.view("grad", 5), expected)
    assert bias.grad.data_ptr() == buckets.view("grad", 5).data_ptr()


def test_rebuild_keeps_values_gradients_and_state():
    model = net()
    buckets = far.FlatBuckets(model)
    buckets.add_state("memory")
    backward(model)
    for i in range(len(buckets.params)):
        buckets.view("memory", i).fill_(i + 1)
    values = [p.detach().clone() for p in model.parameters()]
    grads = [p.grad.clone() for p in model.parameters()]
    frozen = {0, 1}
    for i in frozen:
        buckets.params[i].requires_grad_(False)
    buckets.rebuild()
    assert {i for bucket in buckets for i in bucket.index} == {2, 3, 4, 5}
    for i in frozen:
        buckets.params[i].requires_grad_(True)
    with pytest.raises(far.InputError, match=r"0\.weight was unfrozen.*rebuild"):
        buckets.settle()
    buckets.rebuild()
    for i, p in enumerate(model.parameters()):
        assert torch.equal(p, values[i])
        assert buckets.view("memory", i).eq(i + 1).all()
        assert torch.equal(p.grad, torch.zeros_like(p) if i in frozen else grads[i])
        assert buckets.touched[i] == (i not in frozen)


def test_other_types_are_refused_unless_frozen():
    model = nn.Linear(3, 3).double()
    with pytest.raises(far.InputError, match=r"weight is torch\.float64.*model\.float\(\)"):
        far.FlatBuckets(model)
    model.weight.requires_grad_(False)
    model.bias.data = model.bias.data.float()
    assert len(far.FlatBuckets(model)) == 1
    with pytest.raises(far.InputError, match="bucket_bytes=4"):
        far.FlatBuckets(model, bucket_bytes=4)
    with pytest.raises(far.InputError, match="no parameters"):
        far.FlatBuckets(nn.ReLU())
    with pytest.raises(far.InputError, match="leaf"):
        far.FlatBuckets([torch.ones(3, requires_grad=True) * 2])


def test_copies_and_loads_stay_independent():
    model = net()
    buckets = far.FlatBuckets(model)
    twin = copy.deepcopy(model)
    backward(twin)
    assert not buckets.touched.any()
    assert twin[0].weight.data_ptr() != model[0].weight.data_ptr()
    model.load_state_dict({name: value + 1 for name, value in twin.state_dict().items()})
    buckets.settle()
    assert torch.equal(buckets.view("param", 0), twin[0].weight + 1)


def test_a_second_build_takes_over():
    model = net()
    first = far.FlatBuckets(model)
    second = far.FlatBuckets(model)
    backward(model)
    second.settle()
    assert second.touched.all()
    assert not first.touched.any()
    with pytest.raises(far.InputError, match="no longer lies"):
        first.settle()
    assert far.FlatBuckets.holding(model.parameters()) is second


def test_nothing_outlives_the_model():
    model = net()
    buckets = far.FlatBuckets(model)
    backward(model)
    gone = weakref.ref(model), weakref.ref(buckets)
    del model, buckets
    gc.collect()
    assert gone[0]() is None
    assert gone[1]() is None


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_clip_grad_norm(norm_type):
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 1), nn.Linear(7, 7))  # the last gets no gradient
    buckets = far.FlatBuckets(model, bucket_bytes=1000)
    for _ in range(2):
        buckets.zero_grad()
        model[:2](torch.randn(4, 300, generator=torch.Generator().manual_seed(3))).sum().backward()
    grads = [p.grad.double() for p in model[:2].parameters()]
    expected = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]), norm_type)
    norm = buckets.clip_grad_norm(0.5, norm_type)
    torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
    for p, grad in zip(model[:2].parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad.double(), grad * 0.5 / expected, rtol=1e-5, atol=1e-9)
    buckets.clip_grad_norm(1e9)  # never scales up
    torch.testing.assert_close(buckets.grad_norm(norm_type).float(), torch.tensor(0.5), rtol=1e-5, atol=0)


def test_the_norm_of_stale_gradients_is_zero():
    model = net()
    buckets = far.FlatBuckets(model)
    backward(model)
    buckets.zero_grad()
    assert buckets.grad_norm() == 0


def test_the_norm_is_exact_over_many_elements():
    p = nn.Parameter(torch.empty(3_000_000))
    buckets = far.FlatBuckets([p])
    p.grad.fill_(0.1)
    expected = 0.1 * 3_000_000**0.5
    assert abs(buckets.grad_norm().item() / expected - 1) < 1e-6  # one float32 sum: 2e-3 and more
