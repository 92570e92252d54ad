"""bfloat16 and half of csrc/kernels/number.h, through the optimizer: rounding to nearest, and at random for moments."""

import numpy as np
import pytest
import torch
from adam_cases import all_same, bits, everything, leaves, same, step_with

import fastactrec as far

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = [torch.bfloat16, torch.float16]
BF16_STEP = 2.0**-7  # between neighbours in [1, 2)


def every_half(dtype):
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)


def hard_floats(dtype):
    """All 65,536 small numbers, the middles between them, the floats just beside both, and floats of all sizes."""
    exact = every_half(dtype).float()
    exact = exact[exact.isfinite()].sort().values
    middles = ((exact[1:].double() + exact[:-1].double()) / 2).float()
    centre = torch.cat([exact, middles])
    beside = [torch.nextafter(centre, torch.tensor(side)) for side in (float("inf"), float("-inf"))]
    largest = torch.finfo(dtype).max
    edge = torch.tensor([largest, largest * (1 + 2**-12), 65519.996, 65520.0, 3.4028235e38, float("inf"), 1e-45, 0.0])
    random = torch.randint(-(1 << 31), 1 << 31, (100_000,), generator=torch.Generator().manual_seed(0))
    anything = random.to(torch.int32).view(torch.float32)
    return torch.cat([centre, *beside, edge, -edge, anything, torch.tensor([float("nan"), -float("nan")])])


def assert_same_or_nan(result, expected):
    """NaN may carry any payload and sign, everything else has to agree by bits."""
    nan = expected.isnan()
    assert torch.equal(result.isnan(), nan)
    assert torch.equal(bits(result)[~nan], bits(expected)[~nan])


@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("active", [False, True])
def test_floats_round_to_nearest_even(dtype, active):
    """The second output of a step that changes no weight: without a gradient, or with a rate of zero."""
    values = hard_floats(dtype)
    buckets = far.FlatBuckets([torch.ones(5, requires_grad=True), values.clone().requires_grad_()])
    buckets.add_state("copy", dtype)
    opt = far.FusedAdam(buckets, lr=0.0)
    buckets.params[0].grad.fill_(1)
    if active:
        buckets.params[1].grad.fill_(1)
    opt.step(out="copy")
    assert_same_or_nan(buckets.params[1], values)
    assert_same_or_nan(buckets.view("copy", 1), values.to(dtype))


@pytest.mark.parametrize("dtype", SMALL)
def test_every_small_number_becomes_its_float(dtype):
    """As a gradient: with beta1 = 0 the first moment is the gradient; and as a parameter under a rate of zero."""
    values = every_half(dtype)
    (p,) = leaves(values)
    opt = far.FusedAdam([p], lr=0.0, betas=(0.0, 0.0))
    p.grad.copy_(values)
    opt.step()
    average = opt.state[p]["exp_avg"]
    expected = values.float() + 0.0  # a moment of zero is added: -0 becomes 0
    assert_same_or_nan(average + 0.0, expected)
    # Times a rate of zero an infinite gradient is NaN, in torch too; a parameter of -0 may become 0.
    kept = values.isfinite() & values.ne(0)
    assert same(opt.state[p]["master"][kept], values.float()[kept])
    assert same(p[kept], values[kept])


def test_every_bfloat16_moment_becomes_its_float_and_back():
    """Halving twice what can be halved exactly: stochastic rounding must not touch it."""
    values = every_half(torch.bfloat16)
    values = values[values.isfinite() & (values.float().abs() > 1e-30)]
    (p,) = leaves(torch.zeros(len(values)))
    opt = far.FusedAdam([p], lr=0.0, betas=(0.5, 0.5), moments_dtype=torch.bfloat16)
    step_with(opt, [p], [torch.zeros(len(values))])
    opt.state[p]["exp_avg"].copy_(values)
    opt.state[p]["exp_avg_sq"].copy_(values.abs())
    step_with(opt, [p], [torch.zeros(len(values))])
    assert torch.equal(opt.state[p]["exp_avg"], values * 0.5)
    assert torch.equal(opt.state[p]["exp_avg_sq"], values.abs() * 0.5)


# Moments in bfloat16


def stored_once(value, count, key=0, step=1, bucket_bytes=25 << 20):
    """Both moments as stored by one step number `step` with a gradient of `value` everywhere, without averaging."""
    params = leaves(*[torch.zeros(3)] * key, torch.zeros(count))
    buckets = far.FlatBuckets(params, bucket_bytes=bucket_bytes)
    opt = far.FusedAdam(buckets, lr=0.0, betas=(0.0, 0.0), moments_dtype=torch.bfloat16)
    for _ in range(step):
        params[-1].grad.fill_(value)
        opt.step()
    return opt.state[params[-1]]["exp_avg"].clone(), opt.state[params[-1]]["exp_avg_sq"].clone()


def slow_neighbours(value):
    """The bfloat16 numbers around a positive float, and how far between them it lies, by NumPy in double."""
    exponent = np.floor(np.log2(np.float64(value)))
    spacing = 2.0 ** (max(exponent, -126) - 7)
    low = np.floor(np.float64(value) / spacing) * spacing
    return low, low + spacing, (np.float64(value) - low) / spacing


@pytest.mark.parametrize("fraction", [0.0, 1 / 64, 0.25, 0.5, 0.9, 1 - 2**-14])
@pytest.mark.parametrize("scale", [1.0, -3.0, 1e-12, 1e15])
def test_rounding_at_random_keeps_the_mean(fraction, scale):
    """Only the two neighbours occur, the upper one as often as the value lies near it, within 5 sigma."""
    count = 100_000
    value = torch.tensor(scale * (1 + BF16_STEP * fraction))
    for stored, exact in zip(stored_once(value.item(), count), (value, value * value), strict=True):
        low, high, share = slow_neighbours(exact.abs().item())
        magnitudes = stored.double().abs()
        assert torch.equal(stored.sign(), exact.sign().expand(count).bfloat16())
        upper = magnitudes == high
        assert (upper | (magnitudes == low)).all()
        sigma = np.sqrt(share * (1 - share) / count)
        assert abs(upper.double().mean().item() - share) <= 5 * sigma + 2**-16  # the noise has 16 bits


def test_noise_differs_between_elements_moments_parameters_and_steps():
    """Correlation of round-ups at a fraction of one half: none within 5 sigma, nor with a neighbouring element."""
    count = 100_000
    value = 1 + BF16_STEP / 2

    def ups(which, **options):
        stored = stored_once(value, count, **options)[which].double()
        return (stored - stored.mean()) / stored.std()

    base = ups(0)
    others = {
        "second moment": ups(1),
        "parameter": ups(0, key=1),
        "parameter 2": ups(0, key=2),
        "step": ups(0, step=2),
        "element + 1": base.roll(1),
        "element + 32": base.roll(32),
        "element + 4096": base.roll(4096),
    }
    for name, other in others.items():
        assert abs((base * other).mean().item()) < 5 / count**0.5, name
    assert all_same(list(stored_once(value, count)), list(stored_once(value, count)))  # and yet it repeats


def test_noise_depends_on_parameter_step_and_element_alone():
    """Not on the layout of the buckets nor on the number of threads."""
    sizes = (100, 70_000, 31, 9_000)
    results = []
    for bucket_bytes, threads in ((25 << 20, 1), (1 << 12, 1), (1 << 17, 3)):
        torch.set_num_threads(threads)
        params = leaves(*(torch.ones(n) for n in sizes))
        opt = far.FusedAdam(far.FlatBuckets(params, bucket_bytes=bucket_bytes), moments_dtype=torch.bfloat16)
        random = torch.Generator().manual_seed(0)
        for _ in range(3):
            for p in params:
                p.grad.copy_(torch.randn(p.shape, generator=random))
            opt.step()
        results.append(everything(opt))
    assert all_same(results[0], results[1])
    assert all_same(results[0], results[2])


def test_moments_keep_growing_where_rounding_to_nearest_stalls():
    """v at 1 with squares of 1.5 gains 0.0005 a step, an eighth of what rounding to nearest would notice."""
    steps, count = 100, 20_000
    (p,) = leaves(torch.zeros(count))
    opt = far.FusedAdam([p], lr=0.0, moments_dtype=torch.bfloat16)
    p.grad.fill_(1.5**0.5)
    opt.step()
    opt.state[p]["exp_avg_sq"].fill_(1)
    nearest = torch.ones((), dtype=torch.bfloat16)
    for _ in range(steps):
        p.grad.fill_(1.5**0.5)
        opt.step()
        nearest = (0.999 * nearest.float() + 0.001 * 1.5).bfloat16()
    expected = 1.5 - 0.5 * 0.999**steps
    mean, spread = opt.state[p]["exp_avg_sq"].double().mean().item(), opt.state[p]["exp_avg_sq"].double().std().item()
    assert nearest == 1
    assert abs(mean - expected) < 5 * spread / count**0.5
    assert expected > 1.04


def test_infinite_and_nan_moments_are_not_rounded():
    inf, nan = float("inf"), float("nan")
    p = torch.zeros(5000, 4, requires_grad=True)
    opt = far.FusedAdam([p], lr=0.0, betas=(0.0, 0.0), moments_dtype=torch.bfloat16)
    step_with(opt, [p], [torch.tensor([inf, -inf, nan, 0.0]).repeat(5000, 1)])
    first, second = opt.state[p]["exp_avg"], opt.state[p]["exp_avg_sq"]
    assert first[:, 0].eq(inf).all()
    assert first[:, 1].eq(-inf).all()
    assert second[:, :2].eq(inf).all()
    assert first[:, 2].isnan().all()
    assert second[:, 2].isnan().all()
    assert not first[:, 3].any()


def test_training_with_small_moments_resumes_bit_for_bit_and_goes_to_torch():
    start = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    straight, broken, theirs = leaves(start, start, start)

    def run(opt, p, steps):
        for step in steps:
            step_with(opt, [p], [torch.sin(start * (step + 1)) + 0.1])

    opt = far.FusedAdam([straight], moments_dtype=torch.bfloat16)
    run(opt, straight, range(5))
    first = far.FusedAdam([broken], moments_dtype=torch.bfloat16)
    run(first, broken, range(3))
    saved = first.state_dict()
    assert saved["state"][0]["exp_avg"].dtype == torch.bfloat16
    again = broken.detach().clone().requires_grad_()
    second = far.FusedAdam([again], moments_dtype=torch.bfloat16)
    second.load_state_dict(saved)
    other = torch.optim.Adam([theirs])
    other.load_state_dict(saved)  # rounds nothing: torch takes them to float32
    theirs.data.copy_(again.data)
    run(second, again, range(3, 5))
    run(other, theirs, range(3, 5))
    assert same(again, straight)
    assert all_same(everything(second), everything(opt))
    torch.testing.assert_close(theirs, straight, rtol=1e-3, atol=1e-4)  # two steps of 1e-3, moments of 8 bits
    back = far.FusedAdam([theirs], moments_dtype=torch.bfloat16)
    back.load_state_dict(other.state_dict())
    assert same(back.state[theirs]["exp_avg"], other.state[theirs]["exp_avg"].bfloat16())
