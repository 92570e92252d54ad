"""The gradient noise scale against closed forms, and what follows from it: growth, learning rate."""

from __future__ import annotations

import math
import types

import batch_size_ranks as ranks
import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

import fastactrec as far
from fastactrec.errors import InputError
from fastactrec.optim.batch_size import LEAST_MEASUREMENTS, MULTIPLE, BatchSize, NoiseScale


def linear(dimensions: int) -> tuple[nn.Linear, far.FlatBuckets]:
    model = nn.Linear(dimensions, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model, far.FlatBuckets(model)


def measure(noise: NoiseScale, parts: list[torch.Tensor], loss) -> None:
    """One measured step whose batch comes in these parts."""
    assert noise.begin_step()
    noise.buckets.zero_grad()
    whole = sum(len(part) for part in parts)
    for part in parts:
        with noise.part(len(part), len(part) / whole):
            (loss(part) * (len(part) / whole)).backward()
    noise.end_step()


def explicit(grads: list[np.ndarray]) -> tuple[float, float]:
    """tr(Sigma) and |G|^2 from the per-sample gradients [n_j, D] of each part: the analysis of variance of the parts'
    means, in float64."""
    counts = np.array([len(g) for g in grads], float)
    means = np.array([np.asarray(g, np.float64).mean(0) for g in grads])
    whole = counts @ means / counts.sum()
    trace = float((counts * ((means - whole) ** 2).sum(1)).sum() / (len(grads) - 1))
    return trace, float(whole @ whole) - trace / counts.sum()


def test_the_estimates_of_gaussian_gradients_are_unbiased():
    mean = torch.tensor([0.5, -0.3, 0.2, 0.1])
    deviation = torch.tensor([0.5, 1.0, 1.5, 2.0])
    trace, signal = float(deviation.square().sum()), float(mean.square().sum())
    model, buckets = linear(4)
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(1500):
        noise = NoiseScale(buckets, every=1, decay=0.0)
        x = mean + deviation * torch.randn(8, 4, generator=generator)
        measure(noise, [x[:3], x[3:]], lambda part: model(part).mean())
        noise.merge()
        drawn.append((noise.trace, noise.signal))
    drawn = np.array(drawn)
    error = np.abs(drawn.mean(0) - (trace, signal))
    standard = drawn.std(0) / math.sqrt(len(drawn))
    assert (standard < (0.03 * trace, 0.1 * signal)).all()  # sharp enough to see a bias
    assert (error < 3 * standard).all()
    assert (drawn[:, 0] >= 0).all()
    assert (drawn[:, 1] < 0).any()  # an unbiased estimate of |G|^2 has to be, at times


def test_samples_drawn_without_replacement():
    population = np.random.default_rng(0).normal(0.3, 1.0, (12, 4))
    trace, signal = population.var(0, ddof=1).sum(), np.square(population.mean(0)).sum()
    model, buckets = linear(4)
    generator = torch.Generator().manual_seed(3)
    drawn = []
    for _ in range(1500):
        noise = NoiseScale(buckets, every=1, population=12)
        x = torch.from_numpy(population).float()[torch.randperm(12, generator=generator)[:8]]
        measure(noise, [x[:3], x[3:]], lambda part: model(part).mean())
        noise.merge()
        drawn.append((noise.trace, noise.signal))
    standard = np.std(drawn, axis=0) / math.sqrt(len(drawn))
    assert (np.abs(np.mean(drawn, axis=0) - (trace, signal)) < 3 * standard).all()
    assert trace / 12 > 10 * standard[1]  # what independent samples would have made of it


def test_linear_regression_against_its_closed_form():
    """Of squared errors at distance d from the truth, x of unit covariance in D dimensions, noise s:
    G = 2 d, tr(Sigma) = 4 ((D + 1) |d|^2 + D s^2)."""
    dimensions, s = 5, 0.7
    model, buckets = linear(dimensions)
    truth = torch.tensor([0.4, -0.2, 0.1, 0.3, -0.5])
    square = float(truth.square().sum())
    expected = (dimensions + 1) + dimensions * s * s / square
    noise = NoiseScale(buckets, every=1, decay=0.9995)
    generator = torch.Generator().manual_seed(1)

    def loss(x):
        return (model(x[:, :-1])[:, 0] - x[:, -1]).square().mean()

    for _ in range(1500):
        x = torch.randn(32, dimensions, generator=generator)
        y = x @ truth + s * torch.randn(32, generator=generator)
        measure(noise, list(torch.cat([x, y[:, None]], 1).tensor_split(2)), loss)
        noise.merge()
    assert noise.value == pytest.approx(expected, rel=0.03)
    assert noise.signal == pytest.approx(4 * square, rel=0.03)


@pytest.mark.parametrize("sizes", [(4, 4), (1, 6), (3, 3, 2, 5)])
def test_parts_of_any_size_are_the_analysis_of_variance_of_their_means(sizes):
    model, buckets = linear(7)
    parts = [torch.randn(n, 7, generator=torch.Generator().manual_seed(n + i)) for i, n in enumerate(sizes)]
    noise = NoiseScale(buckets, every=1)
    measure(noise, parts, lambda part: model(part).mean())
    noise.merge()
    trace, signal = explicit([part.numpy() for part in parts])
    assert noise.trace == pytest.approx(trace, rel=1e-5)
    assert noise.signal == pytest.approx(signal, rel=1e-5, abs=1e-5 * trace)
    if sizes == (4, 4):  # equations (A.2) and (A.3), the small batch being either half
        squares = [float(np.square(part.numpy().mean(0)).sum()) for part in parts]
        small, large = sum(squares) / 2, float(np.square(torch.cat(parts).numpy().mean(0)).sum())
        assert noise.trace == pytest.approx((small - large) / (1 / 4 - 1 / 8), rel=1e-5)
        assert noise.signal == pytest.approx((8 * large - 4 * small) / (8 - 4), rel=1e-5, abs=1e-5 * trace)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(36, 5)
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("sizes", [(4, 4), (3, 5)])
def test_halves_leave_the_gradient_of_the_whole_batch(sizes):
    x, labels = torch.randn(8, 3, 5, 5, generator=torch.Generator().manual_seed(2)), torch.arange(8) % 5
    once, again = net(), net()
    far_once, far_again = far.FlatBuckets(once), far.FlatBuckets(again)
    nn.functional.cross_entropy(once(x), labels).backward()
    noise = NoiseScale(far_again, every=1)
    noise.begin_step()
    squares = []
    for inputs, targets in zip(x.split(sizes), labels.split(sizes), strict=True):
        alone = net()
        nn.functional.cross_entropy(alone(inputs), targets).backward()
        squares.append(sum(float(p.grad.double().square().sum()) for p in alone.parameters()))
        with noise.part(len(inputs), len(inputs) / 8):
            (nn.functional.cross_entropy(again(inputs), targets) * (len(inputs) / 8)).backward()
    noise.end_step()
    for a, b in zip(once.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)  # another order of summation
    far_once.settle()
    small = sum(n / 8 * square for n, square in zip(sizes, squares, strict=True))
    noise.merge()
    assert noise.trace == pytest.approx((small - float(far_once.grad_squares())) / (2 / 8 - 1 / 8), rel=1e-4)


def test_moments_are_averaged_before_they_are_divided_and_without_the_bias_of_the_start():
    model, buckets = linear(3)
    noise = NoiseScale(buckets, every=1, decay=0.75)
    assert math.isnan(noise.value)
    seen = []
    for step in range(4):
        parts = [torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * step + k)) + 1 for k in range(2)]
        seen.append(explicit([part.numpy() for part in parts]))
        measure(noise, parts, lambda part: model(part).mean())
        noise.merge()
        noise.merge()  # nothing new: nothing changes
        weights = 0.75 ** np.arange(step, -1, -1)
        trace, signal = weights @ np.array(seen) / weights.sum()
        assert noise.value == pytest.approx(trace / signal, rel=1e-4)
    assert noise.measurements == 4


def test_only_every_nth_step_is_measured_and_others_leave_no_hooks():
    model, buckets = linear(3)
    noise = NoiseScale(buckets, every=3)
    due = []
    for _ in range(7):
        due.append(noise.begin_step())
        with noise.part(4):  # one part is the whole batch: it tells nothing
            model(torch.ones(4, 3)).mean().backward()
        noise.end_step()
    noise.merge()
    assert due == [False, False, True, False, False, True, False]
    assert noise.measurements == 0
    assert not model.weight._backward_hooks
    noise = NoiseScale(buckets, every=1)
    noise.begin_step()
    with noise.part(4, 0.3):
        model(torch.ones(4, 3)).mean().backward()
    with pytest.raises(InputError, match="sum to one"):
        noise.end_step()


def test_two_ranks_are_merged(tmp_path):
    mp.spawn(ranks.run, (2, str(tmp_path)), nprocs=2)
    results = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]
    for kind in ("local", "ddp"):
        assert results[0][kind]["trace"] == results[1][kind]["trace"]
        assert results[0][kind]["signal"] == results[1][kind]["signal"]
        assert results[0][kind]["count"] == ranks.STEPS
        assert math.isnan(results[0][kind]["before"])
    halves = [[ranks.data(rank, step).split((3, 1 + 3 * rank)) for rank in (0, 1)] for step in range(ranks.STEPS)]
    local = np.mean([explicit([part.numpy() for part in parts]) for step in halves for parts in step], axis=0)
    assert (results[0]["local"]["trace"], results[0]["local"]["signal"]) == pytest.approx(local, rel=1e-4)
    # Under DDP ranks weigh alike, whatever they hold: the equations of Note [Noise scale], written out
    means = [np.array([part.double().numpy().mean(0) for parts in step for part in parts]) for step in halves]
    counts = np.array([3, 1, 3, 4])
    weights = np.array([3 / 4, 1 / 4, 3 / 7, 4 / 7]) / 2
    shared = []
    for step, mean in enumerate(means):
        whole = weights @ mean
        for rank in (0, 1):
            torch.testing.assert_close(results[rank]["ddp"]["grads"][step][0].double(), torch.from_numpy(whole))
        u, v = (weights / counts).sum(), (weights**2 / counts).sum()
        trace = (weights @ (mean**2).sum(1) - whole @ whole) / (u - v)
        shared.append((trace, whole @ whole - v * trace))
    expected = np.mean(shared, axis=0)
    assert (results[0]["ddp"]["trace"], results[0]["ddp"]["signal"]) == pytest.approx(expected, rel=1e-4)


def fake(value: float, measurements: float = LEAST_MEASUREMENTS):
    return types.SimpleNamespace(value=value, measurements=measurements, merge=lambda: None)


def test_the_batch_doubles_when_the_noise_asks_for_it_and_never_shrinks():
    noise = fake(math.nan)
    size = BatchSize("noise", clips=8, max_batch=40, most=100, noise=noise)
    grown = []
    for value, count in [
        (math.nan, 0), (100, LEAST_MEASUREMENTS - 1), (MULTIPLE * 8, LEAST_MEASUREMENTS), (MULTIPLE * 8 + 0.1, 9),
        (MULTIPLE * 16, 9), (math.inf, 9), (3, 9), (1e9, 9),
    ]:  # fmt: skip
        noise.value, noise.measurements = value, count
        size.end_epoch(1.0)
        grown.append(size.batch)
    assert grown == [8, 8, 8, 16, 16, 32, 32, 32]  # the last would be 64, above --max-batch
    assert size.lr_factor == 2.0
    short = BatchSize("noise", clips=8, max_batch=1000, most=3, noise=fake(1e9))
    assert [short.end_epoch(1.0) and short.accumulation for _ in range(3)] == [2, False, False]  # an epoch's 3


@pytest.mark.parametrize(("rule", "factor"), [("sqrt", math.sqrt(8)), ("linear", 8.0), ("none", 1.0)])
def test_learning_rate_rules(rule, factor):
    size = BatchSize("noise", clips=2, max_batch=16, most=100, rule=rule, noise=fake(1e9))
    assert size.lr_factor == 1.0
    assert [size.end_epoch(1.0) for _ in range(4)] == [True, True, True, False]
    assert size.lr_factor == factor


def test_decay_trades_the_learning_rate_for_the_batch():
    size = BatchSize("decay", clips=4, max_batch=40, most=100)
    decays = [1.0, 1.0, 0.7, 0.5, 0.45, 0.3, 0.2, 0.06, 0.0]
    batches, rates = [], []
    for decayed in decays:
        size.end_epoch(decayed)
        batches.append(size.batch // 4)
        rates.append(decayed * size.lr_factor)
    assert batches == [1, 1, 1, 2, 2, 3, 5, 10, 10]
    assert all(rate <= 1 + 1e-9 for rate in rates)
    # the noise of a step, lr / batch, is the schedule's throughout
    assert [rate / batch for rate, batch in zip(rates, batches, strict=True)] == pytest.approx(decays)


def test_batch_sizes_survive_another_number_of_ranks():
    size = BatchSize("decay", clips=8, max_batch=64, most=100)
    size.end_epoch(0.2)
    assert size.batch == 40
    more = BatchSize("decay", clips=16, max_batch=64, most=100)
    more.load_state_dict(size.state_dict())
    assert more.batch == 32
    fewer = BatchSize("decay", clips=4, max_batch=64, most=100)
    fewer.load_state_dict(size.state_dict())
    assert fewer.batch == 40


def test_options_are_refused_in_a_sentence():
    _, buckets = linear(2)
    for words, build in {
        "every=0": lambda: NoiseScale(buckets, every=0),
        "decay=1": lambda: NoiseScale(buckets, decay=1),
        "population=0": lambda: NoiseScale(buckets, population=0),
        "'often'": lambda: BatchSize("often", clips=1, max_batch=1, most=1),
        "'cube'": lambda: BatchSize("none", clips=1, max_batch=1, most=1, rule="cube"),
        "max_batch=7": lambda: BatchSize("decay", clips=8, max_batch=7, most=1),
        "goes with": lambda: BatchSize("noise", clips=8, max_batch=8, most=1),
    }.items():
        with pytest.raises(InputError, match=words):
            build()
