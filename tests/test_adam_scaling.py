"""FusedAdam with torch.amp.GradScaler, with clipping by the norm of all gradients, and with a second output."""

import math

import adam_cases
import pytest
import torch
from adam_cases import HYPER, all_same, assert_same_training, everything, leaves, net, same, step_with, train, ulps
from torch import nn

import fastactrec as far

pytestmark = pytest.mark.usefixtures("one_thread")

INF, NAN = float("inf"), float("nan")


def train_scaled(model, opt, scaler, steps, first=0, spoil=(), clip=None):
    for step in range(first, first + steps):
        opt.zero_grad()
        x = torch.randn(8, 3, 5, 5, generator=torch.Generator().manual_seed(step))
        scaler.scale(model(x).square().mean()).backward()
        if step in spoil:
            model[4].weight.grad[0, 0] = INF
        if clip:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(opt)
        scaler.update()


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_an_overflow_changes_nothing(bad, moments):
    model = net()
    opt = far.FusedAdam(far.FlatBuckets(model), amsgrad=True, moments_dtype=moments, **HYPER)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    train_scaled(model, opt, scaler, 2)
    before = everything(opt)
    model(torch.randn(8, 3, 5, 5)).sum().backward()
    model[0].weight.grad[1, 2, 0, 1] = bad
    scaler.step(opt)
    scaler.update()
    assert all_same(before, everything(opt))
    assert scaler.get_scale() == 128


@pytest.mark.parametrize("scale", [2.0**16, 3.0])
def test_training_with_a_scaler_equals_training_without(scale):
    """Over growths of the scale, and an overflow in between that must not count; bit for bit where it is 2^n."""
    model, reference = net(), net()
    opt, other = far.FusedAdam(far.FlatBuckets(model), **HYPER), far.FusedAdam(reference.parameters(), **HYPER)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
    train_scaled(model, opt, scaler, 7, spoil=(2,))
    assert scaler.get_scale() == scale * 4  # steps 0, 1: up; 2: down; 3, 4: up; 5, 6: up
    train(reference, other, 2)
    for step in range(2, 7):
        if step == 2:  # its batch went through the network, whose BatchNorm saw it
            reference(torch.randn(8, 3, 5, 5, generator=torch.Generator().manual_seed(step)))
        else:
            train(reference, other, 1, first=step)
    assert opt.state[model[0].weight]["step"] == 6
    if scale == 3.0:
        adam_cases.assert_close(model, reference)
    else:
        assert_same_training(model, reference)
        assert all_same(everything(opt), everything(other))


def test_the_step_after_an_overflow_corrects_its_bias_for_one():
    p = torch.zeros(3, requires_grad=True)
    opt = far.FusedAdam([p], lr=0.1)
    for value in (INF, 5.0):
        p.grad.fill_(value)
        opt.found_inf = torch.tensor([float(value == INF)])
        opt.step()
    torch.testing.assert_close(p.detach(), torch.full((3,), -0.1))  # the first step of Adam is lr
    assert opt.state[p]["step"] == 1


def test_found_inf_without_a_scale_and_a_scale_without_found_inf():
    """As GradScaler leaves them after unscale_(), and as a hand-made protocol may."""
    p, q = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    opt, other = far.FusedAdam([p], eps=1.0), far.FusedAdam([q], eps=1.0)
    opt.grad_scale, opt.found_inf = None, torch.tensor(1.0)
    step_with(opt, [p], [torch.ones(3)])
    assert p.eq(1).all()
    opt.grad_scale, opt.found_inf = torch.tensor([8.0]), None
    step_with(opt, [p], [torch.full((3,), 4.0)])
    step_with(other, [q], [torch.full((3,), 0.5)])
    assert same(p, q)


@pytest.mark.parametrize("scale", [1024.0, 10.0])
def test_unscaling_by_hand_is_not_repeated(scale):
    """scaler.unscale_, then clip_grad_norm_, then scaler.step: torch's recipe for clipping."""
    model, reference = net(), net()
    opt = far.FusedAdam(far.FlatBuckets(model), **HYPER)
    other = torch.optim.Adam(reference.parameters(), **HYPER)
    for m, o in ((model, opt), (reference, other)):
        train_scaled(m, o, torch.amp.GradScaler("cpu", init_scale=scale), 4, spoil=(1,), clip=0.1)
    adam_cases.assert_close(model, reference)
    assert opt.state[model[0].weight]["step"] == other.state[reference[0].weight]["step"] == 3


def test_half_precision_parameters_take_scaled_gradients():
    """fp16 gradients that would be zero unscaled; torch's scaler checks them, the step unscales in float32."""
    p = torch.ones(4, dtype=torch.float16, requires_grad=True)
    q = torch.ones(4, requires_grad=True)
    opt, reference = far.FusedAdam([p], eps=1e-12), far.FusedAdam([q], eps=1e-12)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    for _ in range(2):
        opt.zero_grad()
        scaler.scale(((p * 2.0**-10).float() * 2.0**-16).sum()).backward()
        scaler.step(opt)
        scaler.update()
        step_with(reference, [q], [torch.full((4,), 2.0**-26)])
    assert same(p, q.half())
    assert same(opt.state[p]["master"], q)
    with torch.no_grad():
        p.grad.fill_(INF)
    before = everything(opt)
    scaler.scale(torch.ones(()))
    scaler.step(opt)
    assert all_same(before, everything(opt))


# Clipping


def clipped_pair(grads, max_norm, eps=1e-3, **options):
    """One step of FusedAdam(max_norm), and of clip_grad_norm_ with torch's Adam, from the same weights."""
    start = [torch.randn(30 + k, generator=torch.Generator().manual_seed(k)) for k in range(len(grads))]
    ours, theirs = leaves(*start), leaves(*start)
    opt = far.FusedAdam(ours, max_norm=max_norm, eps=eps, **options)
    other = torch.optim.Adam(theirs, eps=eps, **options)
    for params in (ours, theirs):
        for p, g in zip(params, grads, strict=True):
            p.grad = None if g is None else torch.full_like(p, g)
    norm = nn.utils.clip_grad_norm_(theirs, max_norm)
    opt.step()
    other.step()
    return opt, other, ours, theirs, norm


@pytest.mark.parametrize("max_norm", [1e-7, 1e-4, 0.3, 1.0, 1e6])
@pytest.mark.parametrize("grads", [(0.1, -0.7, 3.0), (0.5, None, 2.0), (None, None, 1e-6), (1e8, 1e-8, None)], ids=str)
def test_clipping_inside_the_step_is_torchs(grads, max_norm):
    """Within 2 ulp, eps being large enough to let the size of the gradient show."""
    opt, other, ours, theirs, norm = clipped_pair(grads, max_norm)
    torch.testing.assert_close(opt.grad_norm.float(), norm, rtol=1e-6, atol=0)
    assert opt.grad_norm.dtype == torch.float64
    for p, q, g in zip(ours, theirs, grads, strict=True):
        clear = q.detach().abs() > 0.05  # else the update may cancel the value
        assert ulps(p.detach()[clear], q.detach().double()[clear]) <= 2
        assert (p in opt.state) == (g is not None)
        if g is not None:  # 1e-6 beside the norm shows here
            torch.testing.assert_close(opt.state[p]["exp_avg"], other.state[q]["exp_avg"], rtol=1e-6, atol=0)


def test_clipping_leaves_the_gradients_as_they_are():
    opt, _, ours, _, _ = clipped_pair((3.0, 4.0), 0.1)
    assert ours[0].grad.eq(3).all()
    assert opt.grad_norm.item() == pytest.approx((9 * 30 + 16 * 31) ** 0.5, rel=1e-15)


@pytest.mark.parametrize("grads", [(0.0, 0.0), (INF, 1.0), (NAN, 1.0), (3e38, 3e38)], ids=str)
def test_norms_of_zero_infinity_and_nan(grads):
    opt, _, ours, theirs, norm = clipped_pair(grads, 1.0)
    if grads[0] == 3e38:  # torch's float32 norm overflows and clips all to zero; a double holds it
        assert norm == INF
        assert opt.grad_norm.item() == pytest.approx(3e38 * 61**0.5, rel=1e-6)
        assert opt.state[ours[0]]["exp_avg"].gt(0).all()
        return
    torch.testing.assert_close(opt.grad_norm.float(), norm, equal_nan=True)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, equal_nan=True)


def test_no_gradients_at_all():
    opt, _, ours, theirs, _ = clipped_pair((None, None), 1.0)
    assert opt.grad_norm == 0
    assert all(same(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("scale", [4096.0, 10.0])
def test_clipping_with_a_scaler(scale):
    """The norm is that of the unscaled gradients; an overflow is reported as such and skipped."""
    model, reference = net(), net()
    opt = far.FusedAdam(far.FlatBuckets(model), max_norm=0.1, **HYPER)
    other = far.FusedAdam(far.FlatBuckets(reference), max_norm=0.1, **HYPER)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for step in range(3):
        train_scaled(model, opt, scaler, 1, first=step)
        train(reference, other, 1, first=step)
        torch.testing.assert_close(opt.grad_norm, other.grad_norm, rtol=1e-5, atol=0)
        assert opt.grad_norm > 0.1
    adam_cases.assert_close(model, reference)
    before = everything(opt)
    train_scaled(model, opt, scaler, 1, first=3, spoil=(3,))
    assert opt.grad_norm == INF
    assert all_same(before, everything(opt))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_clipping_small_gradients(dtype):
    values = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(dtype)
    small, large = leaves(values, values.float())
    opt, reference = far.FusedAdam([small], max_norm=2.0), far.FusedAdam([large], max_norm=2.0)
    step_with(opt, [small], [values])
    step_with(reference, [large], [values.float()])
    assert opt.grad_norm == reference.grad_norm
    assert opt.grad_norm.item() == pytest.approx(values.double().norm().item(), rel=1e-14)
    assert same(opt.state[small]["master"], large)


def test_the_norm_is_the_same_for_any_number_of_threads():
    values = torch.randn(300_000, generator=torch.Generator().manual_seed(0))
    norms = set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        (p,) = leaves(values)
        opt = far.FusedAdam([p], max_norm=1.0)
        step_with(opt, [p], [values])
        norms.add(opt.grad_norm.item())
    assert len(norms) == 1
    exact = math.fsum(x * x for x in values.double().tolist()) ** 0.5
    assert norms.pop() == pytest.approx(exact, rel=1e-15)


# The second output


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bucket_bytes", [256, 25 << 20])
def test_the_second_output_is_the_new_weights(dtype, kind, bucket_bytes):
    """Of moved and resting parameters, of skipped steps and of steps without any gradient; masters unrounded."""
    params = leaves(*(v.to(dtype) for v in adam_cases.tensors()))
    buckets = far.FlatBuckets(params, bucket_bytes=bucket_bytes)
    buckets.add_state("snapshot", kind)
    opt = far.FusedAdam(buckets, lr=0.1)

    def check():
        for i, p in enumerate(params):
            weight = buckets.view("master", i) if dtype != torch.float32 else p
            assert same(buckets.view("snapshot", i), weight.detach().to(kind))

    opt.step(out="snapshot")  # nobody has a gradient
    check()
    for p in params[::2]:
        p.grad.copy_(p.detach())
    before = [p.detach().clone() for p in params]
    opt.step(out="snapshot")
    check()
    moved = [not same(p, old) for p, old in zip(params, before, strict=True)]
    assert moved == [bool(p.numel()) and k % 2 == 0 for k, p in enumerate(params)]
    for bucket in buckets:
        bucket.flat["snapshot"].fill_(7)
    opt.found_inf = torch.tensor(1.0)
    opt.step(out="snapshot")
    check()


def test_an_unknown_second_output_is_refused_before_anything_changes():
    (p,) = leaves(torch.ones(5))
    opt = far.FusedAdam([p])
    p.grad.fill_(1)
    with pytest.raises(far.InputError, match="add_state"):
        opt.step(out="snapshot")
    assert opt.read_rows().tolist() == [[0, 0, 0, 0]]


def test_the_second_output_takes_weights_written_by_hand():
    (p,) = leaves(torch.ones(5, dtype=torch.bfloat16))
    buckets = far.FlatBuckets([p])
    buckets.add_state("snapshot")
    opt = far.FusedAdam(buckets)
    with torch.no_grad():
        p.fill_(3)
    opt.step(out="snapshot")
    assert buckets.view("snapshot", 0).eq(3).all()
