"""FusedAdam against torch.optim.Adam and AdamW in float64, and its options."""

import copy
import itertools

import numpy as np
import pytest
import torch
from adam_cases import (
    BUCKET_BYTES,
    HYPER,
    assert_close,
    gradients,
    groups_of,
    net,
    same,
    step_with,
    tensors,
    torch_adam,
    train,
    ulps,
)

import fastactrec as far

pytestmark = pytest.mark.usefixtures("one_thread")

SWITCHES = list(itertools.product([False, True], repeat=3))  # decoupled, amsgrad, maximize


def two_groups(params, decoupled, amsgrad):
    """Every second parameter in a group with rates, betas, decay and amsgrad of its own."""
    other = {"lr": 5e-4, "betas": (0.5, 0.75), "eps": 1e-3, "weight_decay": 0.0 if decoupled else 0.3}
    return [{"params": params[::2]}, {"params": params[1::2], "amsgrad": not amsgrad, **other}]


@pytest.mark.parametrize(("decoupled", "amsgrad", "maximize"), SWITCHES)
@pytest.mark.parametrize("earlier_steps", [0, 4])
def test_one_step_is_within_an_ulp_of_float64(decoupled, amsgrad, maximize, earlier_steps):
    """Also from the middle of a training: both start from the same float32 state of torch's Adam."""
    params, exact = tensors(), tensors(dtype=torch.float64)
    for p in (*params, *exact):
        p.requires_grad_()
    switches = {"amsgrad": amsgrad, "maximize": maximize}
    buckets = far.FlatBuckets(two_groups(params, decoupled, amsgrad), bucket_bytes=BUCKET_BYTES)
    opt = far.FusedAdam(buckets, decoupled=decoupled, **HYPER, **switches)
    oracle = torch_adam(decoupled)(two_groups(exact, decoupled, amsgrad), foreach=False, **HYPER, **switches)
    for step in range(earlier_steps):
        step_with(oracle, exact, gradients(step + 1))
    for p, q in zip(params, exact, strict=True):
        for value in (q, *oracle.state[q].values()):
            value.data.copy_(value.float())
        p.data.copy_(q.data)
    if earlier_steps:
        opt.load_state_dict(oracle.state_dict())
    before = [p.detach().clone() for p in params]
    step_with(opt, params, gradients(0))
    step_with(oracle, exact, gradients(0))
    for k, (old, p, q) in enumerate(zip(before, params, exact, strict=True)):
        group = opt.param_groups[k % 2]
        clear = old.abs() > 32 * group["lr"]  # the update, at most 2 lr or so, does not cancel the value
        assert ulps(p.detach()[clear], q.detach()[clear]) <= 1
        torch.testing.assert_close(p.detach().double(), q.detach(), rtol=2**-23, atol=2**-20 * group["lr"])
        for name, value in oracle.state[q].items():
            if name == "step":
                assert opt.state[p]["step"] == value
            elif not group["weight_decay"] or decoupled:  # else the gradient and decay times the parameter may cancel
                worst = 2 if "sq" in name else None  # 1 - beta2 itself is rounded
                if worst and p.numel():
                    assert ulps(opt.state[p][name], value) <= worst
                torch.testing.assert_close(opt.state[p][name].double(), value, rtol=2**-20, atol=1e-9)


@pytest.mark.parametrize(
    ("decoupled", "options"),
    [
        (False, {}),
        (False, {"weight_decay": 0.01}),
        (True, {"weight_decay": 0.01}),
        (True, {"weight_decay": 0.01, "amsgrad": True, "maximize": True}),
    ],
)
def test_a_thousand_steps_err_no_more_than_torch_fused(decoupled, options):
    start = torch.randn(4096, generator=torch.Generator().manual_seed(5))
    ours, theirs, exact = (p.requires_grad_() for p in (start.clone(), start.clone(), start.double()))
    adam = torch_adam(decoupled)
    opt = far.FusedAdam([ours], decoupled=decoupled, **options)
    others = [adam([theirs], fused=True, **options), adam([exact], **options)]
    generator = torch.Generator().manual_seed(6)
    for _ in range(1000):
        g = torch.randn(4096, generator=generator) * 0.1 + 0.02
        ours.grad.copy_(g)
        theirs.grad, exact.grad = g, g.double()
        for each in (opt, *others):
            each.step()
    error = [(p.detach().double() - exact.detach()).square().mean().sqrt().item() for p in (ours, theirs)]
    assert 0 < error[0] <= 1.1 * error[1]


EXTREMES = [
    {"betas": (0.0, 0.0)},
    {"betas": (0.0, 0.0), "eps": 0.0},
    {"betas": (0.9999, 0.999999)},
    {"betas": (0.0, 0.999999), "eps": 1e-30},
    {"betas": (0.9999, 0.0), "eps": 1.0},
    {"eps": 0.0},
    {"eps": 1.0, "lr": 1e3},
    {"lr": 0.0, "weight_decay": 0.1},
    {"lr": 1e-30},
    {"weight_decay": 3.0, "lr": 0.03},
]


@pytest.mark.parametrize("options", EXTREMES, ids=str)
@pytest.mark.parametrize("decoupled", [False, True])
def test_extreme_options(decoupled, options):
    """Twenty steps against float64; every error is measured against the largest update seen."""
    start = torch.randn(257, generator=torch.Generator().manual_seed(3))
    ours, exact = start.clone().requires_grad_(), start.double().requires_grad_()
    opt = far.FusedAdam([ours], decoupled=decoupled, **options)
    oracle = torch_adam(decoupled)([exact], **{"weight_decay": 0.0, **options})
    for step in range(20):
        g = gradients(step)[4] + 0.01
        step_with(opt, [ours], [g])
        step_with(oracle, [exact], [g])
    assert torch.isfinite(ours).all()
    reach = 20 * options.get("lr", 1e-3)
    torch.testing.assert_close(ours.detach().double(), exact.detach(), rtol=1e-5, atol=1e-5 * reach)
    moments = opt.state[ours], oracle.state[exact]
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(moments[0][name].double(), moments[1][name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("eps", [0.0, 1e-30, 1e-8])
def test_denormal_gradients_are_neither_flushed_nor_fatal(eps):
    """As torch in float32: squares underflow, so that eps alone decides; nothing is flushed to zero before."""
    values = torch.tensor([1e-45, -1e-42, 1e-38, 1e-30, -1e-20])
    ours, theirs = (torch.zeros(5, requires_grad=True) for _ in range(2))
    opt = far.FusedAdam([ours], lr=1.0, eps=eps)
    other = torch.optim.Adam([theirs], lr=1.0, eps=eps, foreach=False)
    for _ in range(3):
        step_with(opt, [ours], [values])
        step_with(other, [theirs], [values])
    averages = opt.state[ours]["exp_avg"], other.state[theirs]["exp_avg"]
    assert averages[0][1:].ne(0).all()
    torch.testing.assert_close(*averages, rtol=1e-6, atol=3e-45)  # two of the smallest denormal numbers
    torch.testing.assert_close(ours[2:], theirs[2:], rtol=2e-6, atol=0, equal_nan=True)
    torch.testing.assert_close(ours[:2], theirs[:2], rtol=1e-2, atol=0, equal_nan=True)  # a few of 300 such numbers


@pytest.mark.parametrize(("decoupled", "amsgrad", "maximize"), SWITCHES)
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_infinite_and_nan_gradients_behave_as_in_torch(decoupled, amsgrad, maximize, eps):
    """They come, go and come again, so that a NaN must stay in every moment it entered."""
    inf, nan = float("inf"), float("nan")
    values = torch.tensor([1.0, inf, -inf, nan, 1e-42, 0.0, 3e38, -3e38])
    ours, theirs = (torch.ones(8, requires_grad=True) for _ in range(2))
    options = {"amsgrad": amsgrad, "maximize": maximize, "weight_decay": 0.1, "eps": eps}
    opt = far.FusedAdam([ours], decoupled=decoupled, **options)
    other = torch_adam(decoupled)([theirs], foreach=False, **options)
    for g in (torch.ones(8), values, torch.ones(8), values.flip(0)):
        step_with(opt, [ours], [g])
        step_with(other, [theirs], [g])
        torch.testing.assert_close(ours, theirs, equal_nan=True)
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 2 + amsgrad]:
            a, b = opt.state[ours][name], other.state[theirs][name]
            if name == "exp_avg":  # once it is infinite, torch's m + (1 - beta1) (g - m) is NaN, ours stays
                assert torch.equal(a.isfinite(), b.isfinite())
                a, b = a[a.isfinite()], b[b.isfinite()]
            torch.testing.assert_close(a, b, equal_nan=True, msg=name)


def test_amsgrad_keeps_the_largest_second_moment():
    """A single large gradient: Adam forgets it, amsgrad does not (Reddi et al. 2018); by the formulas in NumPy."""
    results = {}
    for amsgrad in (False, True):
        p = torch.zeros(1, requires_grad=True)
        opt = far.FusedAdam([p], lr=0.1, betas=(0.5, 0.5), eps=0.0, amsgrad=amsgrad)
        x = m = v = top = 0.0
        for step, g in enumerate([100.0] + [1.0] * 30, 1):
            step_with(opt, [p], [torch.tensor([g])])
            m, v = 0.5 * m + 0.5 * g, 0.5 * v + 0.5 * g * g
            top = max(top, v)
            x -= 0.1 * (m / (1 - 0.5**step)) / np.sqrt((top if amsgrad else v) / (1 - 0.5**step))
        results[amsgrad] = p.item()
        assert p.item() == pytest.approx(x, rel=1e-5)
    assert results[False] < results[True] - 1


def test_a_rate_in_a_tensor_is_read_at_every_step():
    lr = torch.tensor(0.1, dtype=torch.float64)
    ours, theirs = torch.ones(3, requires_grad=True), torch.ones(3, dtype=torch.float64, requires_grad=True)
    opt = far.FusedAdam([ours], lr=lr)
    other = torch.optim.Adam([theirs], lr=0.1)
    seen = []
    for rate in (0.1, 0.0, 0.025):
        lr.fill_(rate)
        other.param_groups[0]["lr"] = rate
        step_with(opt, [ours], [torch.ones(3)])
        step_with(other, [theirs], [torch.ones(3)])
        seen.append(ours[0].item())
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=0)
    assert seen[0] == seen[1] != seen[2]
    assert opt.param_groups[0]["lr"] is lr


def test_a_rate_of_zero_moves_moments_alone():
    p = torch.randn(100, requires_grad=True)
    opt = far.FusedAdam([p], lr=0.0, weight_decay=0.1, decoupled=True)
    before = p.detach().clone()
    step_with(opt, [p], [torch.ones(100)])
    assert same(p, before)
    assert opt.state[p]["exp_avg"].ne(0).all()
    assert opt.state[p]["step"] == 1


def test_empty_parameters_have_state_as_in_torch():
    ours, theirs = (torch.zeros(0, 3, requires_grad=True) for _ in range(2))
    opt, other = far.FusedAdam([ours]), torch.optim.Adam([theirs])
    for p, o in ((ours, opt), (theirs, other)):
        step_with(o, [p], [torch.zeros(0, 3)])
    assert opt.state[ours]["step"] == other.state[theirs]["step"] == 1
    assert opt.state[ours]["exp_avg"].shape == (0, 3)


@pytest.mark.parametrize("decoupled", [False, True])
def test_a_model_trains_as_with_torch(decoupled):
    model, reference = net(), net()
    opt = far.FusedAdam(far.FlatBuckets(model), decoupled=decoupled, **HYPER)
    train(model, opt, 5)
    train(reference, torch_adam(decoupled)(reference.parameters(), **HYPER), 5)
    assert_close(model, reference)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert opt.state[model[0].weight]["exp_avg"].is_contiguous(memory_format=torch.channels_last)


def test_parameters_without_gradient_are_left_alone():
    model, reference = net(), net()
    opt = far.FusedAdam(far.FlatBuckets(model), **HYPER)
    other = torch.optim.Adam(reference.parameters(), **HYPER)
    train(model, opt, 2, layers=5)
    assert set(opt.state) == set(list(model.parameters())[:-2])
    assert torch.equal(model[5].weight, reference[5].weight)
    train(model, opt, 2, first=2)  # late
    frozen = model[5].weight.detach().clone(), opt.state[model[5].weight]["exp_avg"].clone()
    train(model, opt, 2, first=4, layers=5)  # and gone again, with momentum that must rest
    assert torch.equal(model[5].weight, frozen[0])
    assert torch.equal(opt.state[model[5].weight]["exp_avg"], frozen[1])
    for steps, first, layers in ((2, 0, 5), (2, 2, 6), (2, 4, 5)):
        train(reference, other, steps, first, layers)
    assert_close(model, reference)
    assert [opt.state[p]["step"].item() for p in model.parameters()] == [6, 6, 6, 6, 6, 2, 2]


@pytest.mark.parametrize("plain", [False, True])
def test_groups_and_schedulers(plain):
    model, reference = net(), net()
    opt = far.FusedAdam(groups_of(model) if plain else far.FlatBuckets(model, groups=groups_of(model)), lr=0.01)
    other = torch.optim.Adam(groups_of(reference), lr=0.01)
    for m, o in ((model, opt), (reference, other)):
        schedule = torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5)
        for step in range(3):
            train(m, o, 1, first=step)
            schedule.step()
    assert [group["lr"] for group in opt.param_groups] == [0.01 / 8, 0.02 / 8]
    assert_close(model, reference)


def test_it_is_used_as_torch_adam_is():
    p = torch.ones(3, requires_grad=True)
    opt = far.FusedAdam([("weight", p)], lr=torch.tensor(0.1))
    for _ in range(2):
        p.grad = torch.ones(3)  # assigned, twice without zero_grad
        opt.step()
    torch.testing.assert_close(p.detach(), torch.full((3,), 0.8))

    def closure():
        opt.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert opt.step(closure).item() == pytest.approx(3 * 0.64)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    opt.zero_grad()
    scaler.scale((p * p).sum()).backward()
    scaler.step(opt)
    assert opt.state[p]["step"] == 4


def test_gradients_that_are_zero_still_step():
    ours, theirs = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    opt, other = far.FusedAdam([ours]), torch.optim.Adam([theirs])
    for step in range(3):
        for p, o in ((ours, opt), (theirs, other)):
            o.zero_grad(set_to_none=False)
            (p * float(step == 0)).sum().backward()
            o.step()
    torch.testing.assert_close(ours, theirs)
    assert opt.state[ours]["step"] == 3


def test_masses_are_exact():
    p = torch.ones(1, requires_grad=True)
    opt = far.FusedAdam([p], betas=(0.9, 0.999))
    for step in range(1, 2001):
        p.grad.fill_(1)
        opt.step()
        if step in (1, 10, 2000):
            np.testing.assert_allclose(opt.read_rows()[0, :2], [1 - 0.9**step, 1 - 0.999**step], rtol=1e-12)


def test_autograd_notices_the_step():
    w = torch.ones(3, requires_grad=True)
    opt = far.FusedAdam([w])
    loss = (w * w).sum()
    loss.backward(retain_graph=True)
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": -0.1}, "weight_decay"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(far.InputError, match=message):
        far.FusedAdam([torch.ones(2, requires_grad=True)], **options)


def test_what_cannot_be_done_is_said():
    p = torch.ones(2, requires_grad=True)
    opt = far.FusedAdam([p])
    with pytest.raises(far.InputError, match="FlatBuckets"):
        opt.add_param_group({"params": [torch.ones(2, requires_grad=True)]})
    with pytest.raises(far.InputError, match="state_dict"):
        copy.deepcopy(opt)
    with pytest.raises(far.InputError, match="moments_dtype"):
        far.FusedAdam([p], moments_dtype=torch.float16)
    with pytest.raises(far.InputError, match="max_norm=0"):
        far.FusedAdam([p], max_norm=0)
    with pytest.raises(far.InputError, match="lr is a tensor of 2"):
        far.FusedAdam([p], lr=torch.ones(2))
