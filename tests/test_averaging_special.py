"""ParameterAverager's options one by one: what each promises beyond the formula of a single averaging."""

import re

import numpy as np
import pytest
import torch
from averaging_special_ranks import frozen_gradient
from rank_pool import RankPool, on_ranks
from torch import nn

import fastactrec as far
from fastactrec import ops

RANKS = "averaging_special_ranks"


def run(world: int, scenario: str, *args) -> list:
    return on_ranks(world, f"{RANKS}.{scenario}", *args)


def same_bytes(tensors) -> bool:
    return len({t.numpy().tobytes() for t in tensors}) == 1


@pytest.mark.parametrize(
    "options", [{}, {"compression": "int8"}, {"outer_momentum": 0.5}, {"moments": "reset"}], ids=str
)
def test_warm_up_is_synchronous_training(options):
    """DDP with torch's Adam, unequal use of parameters included; also at its end, under every kind of round."""
    each = run(3, "warm_up_and_ddp", options)
    for number, steps in enumerate(zip(*each, strict=True), start=1):
        for ours in zip(*(step[0] for step in steps), strict=True):
            assert same_bytes(ours)
        for ours, ddp in zip(*steps[0][:2], strict=True):
            # Adam divides by the root of tiny second moments: rounding of the mean of three shows
            torch.testing.assert_close(ours, ddp, rtol=1e-4, atol=2e-5)
        assert all(step[2] == (number == 5) for step in steps)


def test_an_overflow_on_one_rank_of_the_warm_up_is_skipped_by_all():
    each = run(2, "overflow")
    scales = [one[1] for one in each]
    assert scales[0][-1] == 1024  # the ranks' scales differ from here on
    assert scales[1][-1] == 512
    for steps in zip(*(one[0] for one in each), strict=True):
        for ours in zip(*(step[0] for step in steps), strict=True):
            assert same_bytes(ours)
        for ours, unscaled in zip(*steps[0], strict=True):
            torch.testing.assert_close(ours, unscaled, rtol=1e-5, atol=1e-6)


def test_what_a_warm_up_cannot_do_is_said():
    for closure, skipped in run(2, "warm_up_misuse"):
        assert closure.startswith("InputError: step(closure) computes gradients after the warm-up")
        assert skipped.startswith("AveragingError: ranks must call step() and average_all() alike")


@pytest.mark.parametrize(("delay", "steps"), [(1, 1), (2, 3), (3, 3)])
def test_delayed_moments_are_those_of_an_immediate_averaging(delay, steps):
    """The recurrences are linear: averaged at the snapshot and stepped, or stepped and corrected, is the same."""
    for late, now in run(2, "linear_moments", delay, steps):
        assert late["averaged"] == (delay == steps)
        for name in ("exp_avg", "exp_avg_sq"):
            # sums of some ten products: 8 units in the last place of the largest
            np.testing.assert_allclose(late[name], now[name], rtol=0, atol=8 * 2.0**-24 * np.abs(now[name]).max())
        np.testing.assert_allclose(late["rows"][:, :2], now["rows"][:, :2], rtol=1e-12)


def test_delay_keeps_local_steps():
    """Counter-example to taking the mean alone: ranks still differ by what they did while it travelled."""
    late, now = zip(*run(2, "linear_moments", 3, 3), strict=True)
    assert not np.array_equal(late[0]["param"], late[1]["param"])
    mean = sum(w * one["param"].astype(float) for w, one in zip((1 / 3, 2 / 3), now, strict=True))
    kept = sum(w * one["param"].astype(float) for w, one in zip((1 / 3, 2 / 3), late, strict=True))
    assert np.abs(kept).max() > 0
    assert np.abs(mean - kept).max() < 0.01  # of steps of 0.001 each


def test_a_delayed_second_moment_is_never_negative():
    for smallest, finite in run(2, "vanishing_variance"):
        assert min(smallest) >= 0
        assert finite


@pytest.mark.parametrize(("bits", "small", "limit"), [("int8", 1e-3, 127), ("int4", 1.5e-2, 7)])
def test_error_feedback_bounds_the_distance(bits, small, limit):
    """50 rounds of changes too small for one alone: with feedback off by a scale at most, without it lost."""
    scale = 1.2 / limit
    kept, lost = (run(2, "drift", bits, small, feedback) for feedback in (True, False))
    assert all(max(distance) <= 2 * scale for distance, _ in kept)
    assert max(kept[0][0][25:]) <= 1.5 * max(kept[0][0][:25])
    assert lost[0][0][-1] > 0.9 * 50 * 1.5 * small
    assert same_bytes(p for _, p in kept)


@pytest.mark.parametrize("bits", [None, "bf16", "int8", "int4"])
def test_nan_is_seen_by_all_unless_it_has_no_weight(bits):
    bad, silenced = run(3, "poison", bits, 1), run(3, "poison", bits, 0)
    assert all(p[17].isnan() for p in bad)
    assert same_bytes(bad)
    assert all(torch.equal(p, torch.ones(600)) for p in silenced)


@pytest.mark.parametrize("world", [2, 3])
def test_traffic_follows_the_formula(world):
    share = 2 * (world - 1) / world
    plain = {r: run(world, "traffic", None, r)[0] for r in ("local", "mean")}
    numel = -(-100_000 // 32) * 32
    assert abs(plain["local"] / (share * 4 * numel) - 1) < 1e-3
    assert abs(plain["mean"] / (3 * share * 4 * numel) - 1) < 1e-3
    for name, bits in (("bf16", 16), ("int8", 8), ("int4", 4)):
        sent = run(world, "traffic", name, "local")[0]
        assert abs(sent / (share * ops.payload_bytes(numel, bits)) - 1) < 0.01
        assert abs(sent / plain["local"] - bits / 32) < 0.01
    both = run(world, "traffic", "int8", "mean")[0]
    assert abs(both / (share * (ops.payload_bytes(numel, 8) + 2 * ops.payload_bytes(numel, 16))) - 1) < 0.01


def test_hierarchy_from_the_launcher():
    assert run(4, "automatic", 2) == [(2, 4)] * 4
    assert run(4, "automatic", 4) == [(None, 1)] * 4
    assert run(4, "automatic", 1) == [(1, 4)] * 4
    assert all("hierarchy: 4 ranks are not whole nodes of 3" in each for each in run(4, "automatic", 3))
    uneven = run(4, "automatic", (1, 1, 2, 2))
    assert all("AveragingError: hierarchy: nodes have 1 to 2 ranks" in each for each in uneven)


def test_frozen_v_is_adam_that_divides_by_the_last_average():
    """In float64; the first round divides by v as it is."""
    steps, world = 9, 2
    shape = (world, 50)
    x, m, v = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    a = b = frozen_mass = 0.0
    frozen, weights = None, np.array([1 / 3, 2 / 3])
    each = run(world, "frozen_variance", steps)
    for step in range(steps):
        g = np.stack([frozen_gradient(rank, step) for rank in range(world)]).astype(np.float64)
        m, v, a, b = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g, 0.9 * a + 0.1, 0.99 * b + 0.01
        square = v / b if frozen is None else frozen / frozen_mass
        x = x - 0.1 * (m / a) / (np.sqrt(square) + 1e-8)
        if step % 3 == 2:
            x, m, v = (np.tile(weights @ value, (world, 1)) for value in (x, m, v))
            frozen, frozen_mass = v, b
        for rank in range(world):
            np.testing.assert_allclose(each[rank][step].numpy(), x[rank], rtol=2e-5, atol=2e-6)


def test_frozen_v_needs_a_second_moment():
    model = nn.Linear(2, 2)
    _buckets = far.FlatBuckets(model)
    with pytest.raises(far.InputError, match="needs FusedAdam: SGD has no second moment"):
        far.ParameterAverager(torch.optim.SGD(model.parameters(), lr=0.1), moments="frozen_v")


@pytest.mark.parametrize(
    ("options", "sgd"),
    [
        ({"moments": "mean"}, False),
        ({"moments": "desloc"}, True),
        ({"outer_lr": 0.7, "outer_momentum": 0.5}, False),
        ({"moments": "frozen_v"}, False),
        ({"quadratic": 0.05}, False),
        ({"warmup": 4}, False),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_straight_one(options, sgd):
    """From the border of a round, bit for bit."""
    first = 6 if "quadratic" in options else 4
    for straight, resumed in run(2, "resumed", {"period": 2, **options}, sgd, first, 5):
        assert straight.keys() == resumed.keys()
        for name, value in straight.items():
            if isinstance(value, np.ndarray):
                assert value.tobytes() == resumed[name].tobytes(), name
        for name, value in straight["buffers"].items():
            assert value.tobytes() == resumed["buffers"][name].tobytes(), name


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("delay", "ranks differ in model"),
        ("hierarchy", "ranks differ in model"),
        ("compression", "ranks differ in model"),
        ("start int8", "parameters differ between ranks"),
        ("start outer", "parameters differ between ranks"),
        ("start warmup", "parameters differ between ranks"),
        ("loaded", "parameters differ between ranks"),
        ("calls", "ranks must call step() and average_all() alike"),
    ],
)
def test_every_rank_is_told(disagreements, case, text):
    assert all(found[case].startswith(f"AveragingError: {text}") for found in disagreements)


@pytest.fixture(scope="module")
def disagreements():
    return run(2, "disagreements")


def test_layouts_that_change_on_the_way():
    """A thawed parameter steps from where it stood (8 to half way to 8.5), not from zero."""
    for thawed, refusal in run(2, "thawed"):
        assert thawed.tolist() == [8.25, 8.25]
        assert refusal.startswith("InputError: rebuild() came while a delayed averaging was on its way")


@pytest.mark.parametrize(
    "options",
    [
        {"period": 1, "moments": "mean"},
        {"period": 1, "moments": "frozen_v"},
        {"period": 1, "moments": "reset"},
        {"period": 1, "outer_lr": 0.7, "outer_momentum": 0.3},
        {"period": 2, "moments": "mean", "delay": 1},
        {"period": 1, "moments": "mean", "compression": "int8"},
        {"period": 2, "moments": "mean", "compression": "int4", "delay": 1},
        {"period": 1, "warmup": 2},
    ],
    ids=str,
)
def test_nothing_of_a_parameters_size_is_allocated_after_the_first_round(options):
    assert all(largest < 500 * 500 / 2 / 10 for largest in run(2, "allocations", options))


def test_a_killed_rank_is_named():
    pool = RankPool(3)
    try:
        pool.start(f"{RANKS}.killed")
        for rank in (0, 2):
            assert pool.ranks[rank][1].poll(20), "no answer within the group's timeout"
            assert re.match(r"AveragingError: .*rank 1 has ended \(process \d+", pool.result(rank), re.DOTALL)
    finally:
        pool.close()
