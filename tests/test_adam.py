import copy
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fastactrec as far
from fastactrec import ops

SIZES = [0, 1, 31, 255, 257, 40_000]  # the last is larger than the bucket of 64 KiB
HYPER = {"lr": 2e-3, "betas": (0.9, 0.98), "eps": 1e-7, "weight_decay": 0.05}


def torch_adam(decoupled):
    return torch.optim.AdamW if decoupled else torch.optim.Adam


def tensors(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


def gradients(step):
    scale = torch.Generator().manual_seed(1000 + step)
    return [g * 10 ** (4 * torch.rand(g.shape, generator=scale) - 3) for g in tensors(100 + step)]


def ulps(result, exact):
    """Largest distance from the exact value rounded to float32, in units of its last place."""
    rounded = exact.float()
    spacing = torch.from_numpy(np.spacing(rounded.abs().numpy())).double()
    return ((result.double() - rounded.double()).abs() / spacing).max().item() if len(result) else 0


@pytest.fixture(autouse=True)
def one_thread():
    """torch's own small operations gain nothing from more, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("decoupled", [False, True])
def test_one_step_is_within_an_ulp_of_float64(decoupled):
    params = [p.requires_grad_() for p in tensors()]
    exact = [p.requires_grad_() for p in tensors(dtype=torch.float64)]
    opt = far.FusedAdam(far.FlatBuckets(params, bucket_bytes=1 << 16), decoupled=decoupled, **HYPER)
    oracle = torch_adam(decoupled)(exact, **HYPER)
    for p, q, g in zip(params, exact, gradients(0), strict=True):
        p.grad.copy_(g)
        q.grad = g.double()
    before = [p.detach().clone() for p in params]
    opt.step()
    oracle.step()
    for old, p, q in zip(before, params, exact, strict=True):
        clear = old.abs() > 16 * HYPER["lr"]  # the update, at most lr (1 + decay), does not cancel the value
        assert ulps(p.detach()[clear], q.detach()[clear]) <= 1
        torch.testing.assert_close(p.detach().double(), q.detach(), rtol=2**-23, atol=2**-21 * HYPER["lr"])
        if decoupled and p.numel():  # else the gradient and decay times the parameter may cancel
            exact_sq = oracle.state[q]["exp_avg_sq"]
            assert ulps(opt.state[p]["exp_avg_sq"], exact_sq) <= 2  # 1 - beta2 itself is rounded


@pytest.mark.parametrize(("decoupled", "decay"), [(False, 0.0), (False, 0.01), (True, 0.01)])
def test_a_thousand_steps_err_no_more_than_torch_fused(decoupled, decay):
    start = torch.randn(4096, generator=torch.Generator().manual_seed(5))
    ours, theirs, exact = (p.requires_grad_() for p in (start.clone(), start.clone(), start.double()))
    adam = torch_adam(decoupled)
    opt = far.FusedAdam([ours], weight_decay=decay, decoupled=decoupled)
    others = [adam([theirs], weight_decay=decay, fused=True), adam([exact], weight_decay=decay)]
    generator = torch.Generator().manual_seed(6)
    for _ in range(1000):
        g = torch.randn(4096, generator=generator) * 0.1 + 0.02
        ours.grad.copy_(g)
        theirs.grad, exact.grad = g, g.double()
        for each in (opt, *others):
            each.step()
    error = [(p.detach().double() - exact.detach()).square().mean().sqrt().item() for p in (ours, theirs)]
    assert error[0] <= 1.1 * error[1]


def net(memory_format=torch.channels_last):
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 6, 3, bias=False)  # before BatchNorm its gradient would be rounding noise
    layers = convolution, nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(54, 5), nn.Linear(5, 5)
    return nn.Sequential(*layers).to(memory_format=memory_format)


def train(model, opt, steps, first=0, layers=6):
    for step in range(first, first + steps):
        opt.zero_grad()
        x = torch.randn(8, 3, 5, 5, generator=torch.Generator().manual_seed(step))
        model[:layers](x).square().mean().backward()
        opt.step()


def assert_close(model, reference, rtol=2e-5):
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        # Adam divides by sqrt(v): where the gradient is rounding noise, so is the direction; lr bounds it.
        torch.testing.assert_close(p, q, rtol=rtol, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")


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


def groups_of(model):
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": decayed, "weight_decay": 0.1, "betas": (0.8, 0.9)}, {"params": rest, "lr": 0.02}]


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


def test_infinite_and_nan_gradients_behave_as_in_torch():
    values = torch.tensor([1.0, float("inf"), float("-inf"), float("nan"), 1e-42, 0.0])
    ours, theirs = (torch.ones(6, requires_grad=True) for _ in range(2))
    opt, other = far.FusedAdam([ours]), torch.optim.Adam([theirs])
    for _ in range(2):
        ours.grad, theirs.grad = values.clone(), values.clone()
        opt.step()
        other.step()
    torch.testing.assert_close(ours, theirs, equal_nan=True)


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
    with pytest.raises(far.InputError, match="amsgrad"):
        opt.load_state_dict(torch.optim.Adam([p], amsgrad=True).state_dict())
    table = np.zeros(1, ops.ADAM_SEGMENT)
    table["end"] = 5
    with pytest.raises(RuntimeError, match="out of order or bounds"):
        ops.adam_step(*(torch.zeros(4) for _ in range(4)), table)


# Without torch, whose import takes longer than the rest of these tests.
ISA_SCRIPT = """
import hashlib, sys
import numpy as np
from fastactrec import _ext
data = np.load(sys.argv[1])
param, grad, exp_avg, exp_avg_sq = (data[name].copy() for name in ("param", "grad", "exp_avg", "exp_avg_sq"))
for threads in (1, 2, 3):
    _ext.adam_step(param, grad, exp_avg, exp_avg_sq, data["table"], threads=threads, cuda_stream=0)
digest = hashlib.sha256(param.tobytes() + exp_avg.tobytes() + exp_avg_sq.tobytes())
print(_ext.build_info()["isa"], digest.hexdigest())
"""


def test_instruction_sets_agree_bit_for_bit(tmp_path):
    random = np.random.default_rng(0)
    arrays = {name: random.normal(size=150_011).astype(np.float32) for name in ("param", "grad", "exp_avg")}
    table = np.zeros(3, ops.ADAM_SEGMENT)
    table["begin"], table["end"] = [0, 32, 1024], [31, 257, 150_011]
    for name, value in {"alpha": 1e-2, "inv_sqrt_mass": 1.5, "eps": 1e-8, "l2": 0.01, "decay": 0.001}.items():
        table[name] = value
    for k, beta in (("1", 0.9), ("2", 0.999)):
        table[f"beta{k}"], table[f"one_minus_beta{k}"] = beta, 1 - beta
    np.savez(tmp_path / "in.npz", **arrays, exp_avg_sq=arrays["grad"] ** 2, table=table.view(np.uint8))
    here = Path(far.__file__).resolve().parent.parent
    results = {}
    for isa in ops.build_info()["isas"].split(","):
        done = subprocess.run(
            [sys.executable, "-c", ISA_SCRIPT, tmp_path / "in.npz"],
            env={**os.environ, "FASTACTREC_ISA": isa, "PYTHONPATH": str(here)},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        used, digest = done.stdout.split()
        results[used] = digest
    assert ops.build_info()["isa"] in results
    assert len(set(results.values())) == 1
