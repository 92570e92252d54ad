import re

import averaging_ranks as ranks
import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fastactrec as far
from fastactrec.optim.agreement import WEIGHT_GRID, exact_weights

pytestmark = pytest.mark.filterwarnings("ignore:FlatBuckets was built from bare parameters")


@pytest.fixture(scope="module", params=[2, 3], ids=["two ranks", "three ranks"])
def results(request, tmp_path_factory):
    """Per rank, the result of every scenario in averaging_ranks, from real gloo processes."""
    folder = tmp_path_factory.mktemp(f"world{request.param}")
    mp.spawn(ranks.run, (request.param, str(folder)), nprocs=request.param)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(request.param)]


def of(results, scenario, key=None):
    return [result[scenario] if key is None else result[scenario][key] for result in results]


def assert_same_bytes(snapshots, part=""):
    for name, value in snapshots[0].items():
        for other in snapshots[1:]:
            if part in name:
                assert value.numpy().tobytes() == other[name].numpy().tobytes(), name


def is_moment(name, which):
    return name.startswith(f"{which} ")


@pytest.mark.parametrize("policy", ranks.POLICIES)
def test_ranks_hold_the_same_bytes_after_each_averaging(results, policy):
    each = of(results, "policies", policy)
    assert all(one["flags"] == [False, True] * 7 for one in each)
    assert all(one["kept"] for one in each)  # pointers and strides
    for number, snapshots in enumerate(zip(*(one["rounds"] for one in each), strict=True), start=1):
        model = [{k: v for k, v in s.items() if "." in k} for s in snapshots]
        assert_same_bytes(model)
        assert any(k.endswith("running_var") for k in model[0])
        for which, row, every in (("exp_avg", 0, (1, 3)), ("exp_avg_sq", 1, (1, 6))):
            due = policy == "reset" or (policy == "mean") or (policy == "desloc" and number % every[1] == 0)
            same = [all(torch.equal(snapshots[0][k], s[k]) for k in s if is_moment(k, which)) for s in snapshots]
            assert all(same) == due
            if policy == "reset":
                assert all(not s["masses"].any() and not s["steps"].any() for s in snapshots)
                assert all(not v.any() for s in snapshots for k, v in s.items() if is_moment(k, which))
            else:  # equal numbers of steps: averaging masses changes nothing
                exact = 1 - (0.9, 0.999)[row] ** (2 * number)
                assert all(np.allclose(s["masses"][row], exact, rtol=1e-9) for s in snapshots)
    assert_same_bytes([one["all"] for one in each])
    assert all(one["restarted"]["calls"] == one["restarted"]["samples"] == 0 for one in each)


@pytest.mark.parametrize("policy", ["local", "mean", "desloc"])
def test_the_average_is_the_mean(results, policy):
    each = of(results, "policies", policy)
    before, after = [one["before"] for one in each], [one["rounds"][5] for one in each]
    for name in before[0]:
        moment = is_moment(name, "exp_avg") or is_moment(name, "exp_avg_sq")
        if "running" in name or "num_batches" in name or name in ("masses", "steps"):
            continue
        if moment and policy == "local":
            assert all(torch.equal(b[name], a[name]) for b, a in zip(before, after, strict=True))
        else:
            mean = torch.stack([b[name].double() for b in before]).mean(0)
            torch.testing.assert_close(after[0][name].double(), mean, rtol=1e-6, atol=1e-8)


def test_weights_follow_samples_at_every_size(results):
    """Also: gloo leaves the same bytes on all ranks, whatever the size."""
    mine, after = zip(*of(results, "weights"), strict=True)
    samples = torch.arange(1.0, len(results) + 1, dtype=torch.float64)
    for k in range(len(mine[0])):
        exact = sum(w * x[k].double() for w, x in zip(samples / samples.sum(), mine, strict=True))
        torch.testing.assert_close(after[0][k].double(), exact, rtol=1e-6, atol=5e-7)
        assert len({x[k].numpy().tobytes() for x in after}) == 1


def test_parameters_without_gradient_and_all_buffers_are_averaged(results):
    world = len(results)
    for weight, (table, count, flag, scratch) in of(results, "unused"):
        torch.testing.assert_close(weight, torch.full((2, 2), (world - 1) / 2))
        assert table[0] == float("-inf")
        assert table[1] == torch.tensor(1 / 3)  # equal values stay, bit for bit
        torch.testing.assert_close(table[2], torch.tensor((world - 1) / 2))
        assert count.tolist() == [5, world - 1]
        assert flag.item() is True
        torch.testing.assert_close(scratch.item(), (world - 1) / 2)


def test_batchnorm_statistics_are_those_of_the_mixture(results):
    own, after = zip(*of(results, "batchnorm"), strict=True)
    share = torch.arange(1.0, len(results) + 1, dtype=torch.float64)
    share /= share.sum()
    mean = sum(w * m for w, (m, _) in zip(share, own, strict=True))
    second = sum(w * (v + m * m) for w, (m, v) in zip(share, own, strict=True))
    for one in after:
        torch.testing.assert_close(one[0].double(), mean, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(one[1].double(), second - mean * mean, rtol=1e-6, atol=0)
        assert one[2] == 1
        assert all(torch.equal(a, b) for a, b in zip(one, after[0], strict=True))


def test_period_one_sgd_with_momentum_equals_ddp(results):
    for rank in of(results, "sgd_like_ddp"):
        for _, ours, ddp, _ in rank:
            for name in ours:
                torch.testing.assert_close(ours[name], ddp[name], rtol=1e-5, atol=1e-6)
    for k, moments in enumerate(("local", "mean")):
        momenta = [rank[k][3] for rank in of(results, "sgd_like_ddp")]
        same = all(torch.equal(a, b) for m in momenta[1:] for a, b in zip(momenta[0], m, strict=True))
        assert same == (moments == "mean")


def test_adam_under_ddp(results):
    weights, messages = zip(*of(results, "ddp_then_adam"), strict=True)
    assert all(torch.equal(w, weights[0]) for w in weights)
    assert all("gradient_as_bucket_view=False" in message for message in messages)


def test_unequal_step_counts_average_exactly(results):
    """m / a and v / b are then the weighted gradients and their squares, as if by one worker."""
    world = len(results)
    a = [1 - 0.9 ** (r + 1) for r in range(world)]
    b = [1 - 0.99 ** (r + 1) for r in range(world)]
    m = sum(a[r] * (r + 1) for r in range(world)) / world
    v = sum(b[r] * (r + 1) ** 2 for r in range(world)) / world
    for entry in of(results, "unequal_steps"):
        torch.testing.assert_close(entry["exp_avg"], torch.full((3,), m), rtol=1e-6, atol=0)
        torch.testing.assert_close(entry["exp_avg_sq"], torch.full((3,), v), rtol=1e-6, atol=0)
        np.testing.assert_allclose(entry["exp_avg_mass"], sum(a) / world, rtol=1e-6)
        np.testing.assert_allclose(entry["exp_avg_sq_mass"], sum(b) / world, rtol=1e-6)
        assert entry["step"] == world


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("frozen", r"1 frozen parameters differ.*0\.bias"),
        ("layout", "ranks differ in model"),
        ("period", "ranks differ in .*period"),
        ("call", "rank 0: call 0, rank 1: call 1"),
        ("frozen later", r"frozen parameters differ.*average_all\(\) before freezing"),
    ],
)
def test_errors_reach_every_rank(results, case, message):
    for messages in of(results, "errors"):
        assert re.search(message, messages[case])


def test_nothing_of_a_parameters_size_is_allocated(results):
    assert all(largest < 500 * 500 * 4 / 10 for largest in of(results, "allocations"))


@pytest.mark.parametrize("policy", ranks.POLICIES)
def test_one_rank_changes_nothing(policy):
    model, plain = ranks.net(), ranks.net()
    opt, other = far.FusedAdam(far.FlatBuckets(model)), far.FusedAdam(far.FlatBuckets(plain))
    avg = far.ParameterAverager(opt, period=2, moments=policy)
    for step in range(5):
        ranks.local_steps(model, opt, 0, 1, first=step)
        avg.step(samples=3)
        assert avg.averaged == (step % 2 == 1)
        ranks.local_steps(plain, other, 0, 1, first=step)
    avg.average_all()
    assert_same_bytes([ranks.snapshot(model, opt), ranks.snapshot(plain, other)])


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=70).filter(any))
def test_weights_are_exact(samples):
    weights = exact_weights(np.array(samples, float))
    assert weights.sum() == 1
    assert (weights.astype(np.float32) == weights).all()
    assert np.abs(weights - np.array(samples) / sum(samples)).max() <= len(samples) / WEIGHT_GRID
    assert (weights >= 0).all()


def make(**options):
    return far.ParameterAverager(far.FusedAdam(far.FlatBuckets(nn.Linear(2, 2))), **options)


@pytest.mark.parametrize(
    "options",
    [
        {"period": 0},
        {"period": 2.5},
        {"moments": "sometimes"},
        {"moments": "frozen_v"},
        {"outer_lr": 0.7},
        {"outer_momentum": 0.9},
        {"delay": 1},
        {"compression": "int8"},
        {"hierarchy": 2},
    ],
    ids=str,
)
def test_unsupported_options_are_refused(options):
    (name,) = options
    with pytest.raises(far.InputError, match=name):
        make(**options)


def test_optimizers_and_samples_are_checked():
    model = nn.Linear(2, 2)
    with pytest.raises(far.InputError, match="FlatBuckets"):
        far.ParameterAverager(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(far.InputError, match="RMSprop"):
        far.ParameterAverager(torch.optim.RMSprop(model.parameters()))
    with pytest.raises(far.InputError, match="samples=-1"):
        make().step(samples=-1)


def test_the_position_in_the_round_is_saved():
    first, second, other = make(period=3), make(period=3), make(period=4)
    first.step()
    first.step()
    second.load_state_dict(first.state_dict())
    second.step()
    assert second.averaged
    other.load_state_dict(first.state_dict())  # another period: the round starts anew
    flags = []
    for _ in range(4):
        other.step()
        flags.append(other.averaged)
    assert flags == [False, False, False, True]
    with pytest.raises(far.InputError, match="version 9"):
        first.load_state_dict({"version": 9})
