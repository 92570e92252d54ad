"""FusedAdam's state: state dicts to torch's optimizers and back, masters, moments in bfloat16, rebuild()."""

import copy

import adam_cases
import numpy as np
import pytest
import torch
from adam_cases import (
    HYPER,
    all_same,
    assert_close,
    assert_same_training,
    everything,
    leaves,
    net,
    same,
    step_with,
    torch_adam,
    train,
)
from torch import nn

import fastactrec as far

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_state_dict_goes_to_torch_and_back(decoupled, fused):
    model, reference = net(), net()
    model[1].weight.requires_grad_(False)  # indices count frozen parameters
    reference[1].weight.requires_grad_(False)
    opt = far.FusedAdam(far.FlatBuckets(model), decoupled=decoupled, **HYPER)
    train(model, opt, 3, layers=5)  # the last layer has no state yet
    saved = opt.state_dict()
    assert set(saved["state"]) == {0, 2, 3, 4}
    assert saved["state"][0]["step"].item() == 3
    assert saved["state"][0]["exp_avg"].is_contiguous(memory_format=torch.channels_last)

    other = torch_adam(decoupled)(reference.parameters(), fused=fused)
    reference.load_state_dict(model.state_dict())
    other.load_state_dict(copy.deepcopy(saved))
    assert other.param_groups[0]["lr"] == HYPER["lr"]
    train(reference, other, 3, first=3)
    train(model, opt, 3, first=3)
    assert_close(model, reference)

    fresh = net()
    fresh[1].weight.requires_grad_(False)
    fresh.load_state_dict(reference.state_dict())
    again = far.FusedAdam(fresh.parameters())
    again.load_state_dict(other.state_dict())
    assert again.param_groups[0]["decoupled_weight_decay"] == decoupled
    np.testing.assert_allclose(again.read_rows(), opt.read_rows(), rtol=1e-12)
    train(fresh, again, 2, first=6)
    train(model, opt, 2, first=6)
    assert_close(fresh, model, rtol=1e-4)


def test_resuming_is_bit_for_bit(tmp_path):
    straight, resumed = net(), net()
    opt = far.FusedAdam(far.FlatBuckets(straight), **HYPER)
    train(straight, opt, 4)
    first = far.FusedAdam(far.FlatBuckets(resumed), **HYPER)
    train(resumed, first, 2)
    torch.save([resumed.state_dict(), first.state_dict()], tmp_path / "checkpoint.pt")
    weights, state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    again = net()
    again.load_state_dict(weights)
    second = far.FusedAdam(far.FlatBuckets(again, bucket_bytes=1024))  # buckets may differ
    second.load_state_dict(state)
    train(again, second, 2, first=2)
    for p, q in zip(straight.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)
    assert np.array_equal(opt.read_rows(), second.read_rows())


def test_rebuild_keeps_the_moments():
    model, reference = net(), net()
    buckets = far.FlatBuckets(model)
    opt = far.FusedAdam(buckets, **HYPER)
    other = torch.optim.Adam(reference.parameters(), **HYPER)
    for m, o in ((model, opt), (reference, other)):
        for step, frozen in enumerate((False, True, False)):
            m[0].weight.requires_grad_(not frozen)
            if m is model:
                buckets.rebuild()
            train(m, o, 1, first=step)
    assert_close(model, reference)
    assert opt.state_dict()["state"][0]["step"] == 2
    assert opt.state[model[0].weight]["exp_avg"].data_ptr() == buckets.view("exp_avg", 0).data_ptr()


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(
    "options", [{"amsgrad": True}, {"maximize": True, "amsgrad": True}, {"decoupled": True}], ids=str
)
def test_options_travel_with_the_state_dict(steps, options):
    """Ours to torch's and torch's to ours, before the first step and later; then both train on alike."""
    value = torch.randn(50, generator=torch.Generator().manual_seed(0))
    ours, theirs, third = leaves(value, value, value)
    opt = far.FusedAdam([ours], **HYPER, **options)
    options = {**options, "decoupled_weight_decay": options.get("decoupled", False)}
    options.pop("decoupled", None)
    other, back = torch.optim.Adam([theirs]), far.FusedAdam([third])
    for step in range(steps):
        step_with(opt, [ours], [torch.sin(value * step + 1)])
    theirs.data.copy_(ours.data)
    other.load_state_dict(opt.state_dict())
    assert {k: other.param_groups[0][k] for k in (*HYPER, *options)} == {**HYPER, **options}
    back.load_state_dict(other.state_dict())
    with torch.no_grad():
        third.copy_(theirs)
    assert len(back.state) == len(other.state) == (steps > 0)
    for step in range(3, 6):
        for p, o in ((ours, opt), (theirs, other), (third, back)):
            step_with(o, [p], [torch.cos(value * step)])
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(third, theirs, rtol=1e-6, atol=1e-8)
    assert opt.state[ours]["step"] == back.state[third]["step"] == other.state[theirs]["step"] == steps + 3


def test_a_wrong_state_dict_changes_nothing():
    p, q = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    opt = far.FusedAdam([p])
    step_with(opt, [p], [torch.ones(3)])
    before = everything(opt)
    with pytest.raises(ValueError, match="size of optimizer's group"):
        opt.load_state_dict(torch.optim.Adam([p, q]).state_dict())
    assert all_same(before, everything(opt))


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD([p], momentum=0.9), lambda p: torch.optim.Adagrad([p])])
def test_state_of_another_optimizer_or_model_is_refused(make):
    p, q = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    opt, other = far.FusedAdam([p]), make(q)
    step_with(opt, [p], [torch.ones(3)])
    step_with(other, [q], [torch.ones(3)])
    before = everything(opt)
    with pytest.raises(far.InputError, match=r"no .* for parameter 0.*another kind of optimizer"):
        opt.load_state_dict(other.state_dict())
    narrow = torch.ones(1, requires_grad=True)  # would broadcast
    other = torch.optim.Adam([narrow])
    step_with(other, [narrow], [torch.ones(1)])
    with pytest.raises(far.InputError, match=r"exp_avg of parameter 0 .*\(1,\).*\(3,\)"):
        opt.load_state_dict(other.state_dict())
    assert all_same(before, everything(opt))


def test_hooks_see_the_whole_state():
    """torch's hooks around state_dict and load_state_dict: what they see and what they change."""
    p, q = leaves(torch.ones(3), torch.ones(3))
    opt, again = far.FusedAdam([p]), far.FusedAdam([q])
    step_with(opt, [p], [torch.ones(3)])
    seen = []
    opt.register_state_dict_pre_hook(lambda o: seen.append("before saving"))
    opt.register_state_dict_post_hook(lambda o, saved: {**saved, "note": sorted(saved["state"][0])})
    saved = opt.state_dict()
    assert saved["note"] == ["exp_avg", "exp_avg_mass", "exp_avg_sq", "exp_avg_sq_mass", "mass_step", "step"]
    again.register_load_state_dict_pre_hook(lambda o, given: {**given, "state": {0: {**given["state"][0], "step": 7}}})
    again.register_load_state_dict_post_hook(lambda o: seen.append(o.state[q]["step"].item()))
    again.load_state_dict(saved)
    assert seen == ["before saving", 7]
    assert again.state[q]["exp_avg"].eq(0.1).all()


def test_hooks_may_drop_or_rename_entries():
    p = torch.ones(3, requires_grad=True)
    opt = far.FusedAdam([p])
    step_with(opt, [p], [torch.ones(3)])
    opt.register_state_dict_post_hook(lambda o, saved: {"named": {"weight": saved["state"][0]}})
    assert opt.state_dict()["named"]["weight"]["exp_avg_mass"] == pytest.approx(0.1)


def test_amsgrad_switched_on_and_off_by_hand():
    """Like an Adam whose largest second moment begins at zero (torch's own fails with a KeyError)."""
    start = torch.randn(50, generator=torch.Generator().manual_seed(0))
    ours, theirs = leaves(start, start)
    opt, other = far.FusedAdam([ours], lr=0.1), torch.optim.Adam([theirs], lr=0.1, amsgrad=True)
    for step, amsgrad in enumerate([False, False, True, True, True, False]):
        opt.param_groups[0]["amsgrad"] = other.param_groups[0]["amsgrad"] = amsgrad
        g = start * 10.0 ** (-step)
        if step == 2:
            other.state[theirs]["max_exp_avg_sq"] = torch.zeros(50)
        step_with(opt, [ours], [g])
        step_with(other, [theirs], [g])
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert not torch.equal(opt.state[ours]["max_exp_avg_sq"], opt.state[ours]["exp_avg_sq"])


@pytest.mark.parametrize("name", ["weight_decay", "betas", "eps", "maximize", "decoupled_weight_decay"])
def test_options_changed_by_hand_count_from_the_next_step(name):
    changed = {"weight_decay": 0.5, "betas": (0.1, 0.2), "eps": 1.0, "maximize": True, "decoupled_weight_decay": True}
    ours, theirs, plain = leaves(*[torch.linspace(1, 2, 20)] * 3)
    optimizers = [
        (far.FusedAdam([ours], weight_decay=0.1), ours),
        (torch.optim.Adam([theirs], weight_decay=0.1), theirs),
        (torch.optim.Adam([plain], weight_decay=0.1), plain),
    ]
    for step in range(3):
        for opt, p in optimizers:
            step_with(opt, [p], [torch.linspace(-1, 1, 20) * 10**step + 0.01])
            if p is not plain and step == 0:
                opt.param_groups[0][name] = changed[name]
    if name != "betas":  # torch's bias correction takes the betas of today for all steps, the masses those of each
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(ours, plain, rtol=1e-5)


# Masters


def half_net(dtype, last=None):
    model = net()
    return model[:5].to(dtype), model[5].to(last or dtype)


class Mixed(nn.Module):
    """A convolution, a norm and a layer in a small type, the last one in another."""

    def __init__(self, dtype, last):
        super().__init__()
        self.body, self.head = half_net(dtype, last)

    def forward(self, x):
        y = self.body(x.to(self.body[0].weight.dtype))
        return self.head(y.to(self.head.weight.dtype)).float()


def train_mixed(model, opt, steps, first=0):
    for step in range(first, first + steps):
        opt.zero_grad()
        x = torch.randn(8, 3, 5, 5, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        opt.step()


@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("options", [{}, {"amsgrad": True, "decoupled": True}, {"max_norm": 0.5}], ids=str)
def test_small_parameters_are_rounded_masters(dtype, options):
    """Bit for bit a float32 FusedAdam that is given the gradients of the small ones."""
    start = [v.to(dtype) for v in adam_cases.tensors()]
    small = leaves(*start)
    large = leaves(*(v.float() for v in start))
    opt, reference = far.FusedAdam(small, **HYPER, **options), far.FusedAdam(large, **HYPER, **options)
    for step in range(5):
        grads = [g.to(dtype) for g in adam_cases.gradients(step)]
        step_with(opt, small, grads)
        step_with(reference, large, grads)
        for p, q in zip(small, large, strict=True):
            assert same(p, q.to(dtype))
            assert same(opt.state[p]["master"], q)
            assert same(opt.state[p]["exp_avg_sq"], reference.state[q]["exp_avg_sq"])
    assert any(not same(opt.state[p]["master"], p.float()) for p in small)


def test_masters_are_more_accurate_than_bfloat16_alone():
    start = torch.randn(2000, generator=torch.Generator().manual_seed(0)).bfloat16()
    ours, theirs, exact = leaves(start, start, start.double())
    optimizers = [
        (far.FusedAdam([ours]), ours),
        (torch.optim.Adam([theirs]), theirs),
        (torch.optim.Adam([exact]), exact),
    ]
    random = torch.Generator().manual_seed(1)
    for _ in range(200):
        g = (torch.randn(2000, generator=random) + 0.5).bfloat16()
        for opt, p in optimizers:
            step_with(opt, [p], [g])
    error = [(p.detach().double() - exact.detach()).square().mean().sqrt().item() for p in (ours, theirs)]
    assert error[0] < 0.2 * error[1]
    assert same(ours, exact.to(torch.bfloat16)) or (ours - exact).abs().max() < 2**-8 * exact.abs().max()


def test_a_model_of_several_types():
    model, twin = Mixed(torch.bfloat16, torch.float32), Mixed(torch.bfloat16, torch.float32)
    buckets = far.FlatBuckets(model)
    assert {bucket.dtype for bucket in buckets} == {torch.bfloat16, torch.float32}
    opt = far.FusedAdam(buckets)
    masters = [p.detach().float().requires_grad_() for p in twin.parameters()]
    reference = far.FusedAdam(masters)
    for step in range(4):
        x = torch.randn(8, 3, 5, 5, generator=torch.Generator().manual_seed(step))
        for m in (model, twin):
            m.zero_grad()
            m(x).square().mean().backward()
        opt.step()
        step_with(reference, masters, [p.grad.float() for p in twin.parameters()])
        with torch.no_grad():
            for p, q in zip(twin.parameters(), masters, strict=True):
                p.copy_(q)
        assert_same_training(model, twin)
    assert ["master" in opt.state[p] for p in model.parameters()] == [True] * 5 + [False] * 2


@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer_first", [False, True])
def test_small_types_resume_bit_for_bit(dtype, moments, optimizer_first):
    straight, broken = Mixed(dtype, torch.float32), Mixed(dtype, torch.float32)
    opt = far.FusedAdam(far.FlatBuckets(straight), moments_dtype=moments, **HYPER)
    train_mixed(straight, opt, 5)
    first = far.FusedAdam(far.FlatBuckets(broken), moments_dtype=moments, **HYPER)
    train_mixed(broken, first, 3)
    weights, state = copy.deepcopy(broken.state_dict()), first.state_dict()
    masters = [first.state[p]["master"].clone() for p in broken.body.parameters()]
    again = Mixed(dtype, torch.float32)
    second = far.FusedAdam(far.FlatBuckets(again, bucket_bytes=512), moments_dtype=moments)
    if optimizer_first:
        second.load_state_dict(state)
    again.load_state_dict(weights)
    if not optimizer_first:
        second.load_state_dict(state)
    for p, master in zip(again.body.parameters(), masters, strict=True):
        assert same(second.state[p]["master"], master)
    train_mixed(again, second, 2, first=3)
    assert_same_training(again, straight)
    assert all_same(everything(second), everything(opt))


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}], ids=str)
@pytest.mark.parametrize("resume", [False, True])
def test_a_frozen_small_parameter_keeps_its_state(resume, options):
    """Through rebuild(), and through a state dict that is loaded while the parameter is frozen."""
    model = Mixed(torch.bfloat16, torch.float32)
    opt = far.FusedAdam(far.FlatBuckets(model), **options)
    train_mixed(model, opt, 2)
    weight = model.body[0].weight
    before = {name: value.clone() for name, value in opt.state[weight].items()}
    weight.requires_grad_(False)
    opt.buckets.rebuild()
    train_mixed(model, opt, 1, first=2)
    if resume:
        saved, weights = opt.state_dict(), copy.deepcopy(model.state_dict())
        model = Mixed(torch.bfloat16, torch.float32)
        model.load_state_dict(weights)
        weight = model.body[0].weight.requires_grad_(False)
        opt = far.FusedAdam(far.FlatBuckets(model), **options)
        opt.load_state_dict(saved)
    weight.requires_grad_(True)
    opt.buckets.rebuild()
    assert set(opt.state[weight]) == set(before) >= {"master", *before}
    assert all(same(opt.state[weight][name], value) for name, value in before.items())
    assert not same(before["master"].bfloat16().float(), before["master"])
    train_mixed(model, opt, 1, first=3)
    assert opt.state[weight]["step"] == 3


@pytest.mark.parametrize("through_data", [False, True])
def test_writing_to_a_small_parameter_moves_its_master(through_data):
    p = torch.full((4,), 1.0, dtype=torch.bfloat16, requires_grad=True)
    opt = far.FusedAdam([p], lr=1e-3)
    step_with(opt, [p], [torch.ones(4)])  # the master is 0.999, which rounds to 1
    with torch.no_grad():
        values = p.data if through_data else p
        values[0] = 5.0
        values[1] = 1.0  # as it was: the master keeps its remainder
    step_with(opt, [p], [torch.zeros(4)])
    step_of_momentum = 1.0 - 0.999 + 0.00067  # the second step, of momentum alone
    master = opt.state[p]["master"]
    assert master[1] == master[2] == master[3]
    assert master[0].item() == pytest.approx(5 - 0.00067, abs=2e-5)
    assert master[1].item() == pytest.approx(1 - step_of_momentum, abs=2e-5)
    model = nn.Linear(3, 2).bfloat16()
    opt = far.FusedAdam(far.FlatBuckets(model), lr=0.0)
    model(torch.ones(1, 3).bfloat16()).sum().backward()
    opt.step()
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    weights = copy.deepcopy(model.state_dict())
    opt.step()  # of rate 0
    assert all(same(value, weights[name]) for name, value in model.state_dict().items())
    assert same(opt.state[model.weight]["master"], weights["weight"].float())


def test_a_bfloat16_state_of_torch_loads():
    start = torch.randn(100, generator=torch.Generator().manual_seed(0)).bfloat16()
    ours, theirs = leaves(start, start)
    opt, other = far.FusedAdam([ours]), torch.optim.Adam([theirs])
    for _ in range(3):
        step_with(other, [theirs], [start])
    with torch.no_grad():
        ours.copy_(theirs)
    opt.load_state_dict(other.state_dict())
    assert same(opt.state[ours]["exp_avg"], other.state[theirs]["exp_avg"].float())
    assert opt.read_rows()[0].tolist() == pytest.approx([1 - 0.9**3, 1 - 0.999**3, 3, 0])
    step_with(opt, [ours], [torch.zeros(100)])
    assert (opt.state[ours]["master"] - theirs.detach().float()).abs().max() < 2e-3  # a step from torch's weights
