"""FlatBuckets and FusedAdam together with what else torch offers: either it works or a sentence says what to do."""

import copy
import io
import pickle

import pytest
import torch
from adam_cases import (
    HYPER,
    assert_close,
    assert_same_training,
    batch,
    fit,
    fused,
    leaves,
    mlp,
    step_with,
)
from torch import nn
from torch.nn.utils import prune
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

import fastactrec as far

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(make=mlp, steps=4, **options):
    """The same training with torch's Adam, and with FusedAdam in the plainest way: (torch's, ours)."""
    reference, plain = make(), make()
    fit(reference, torch.optim.Adam(reference.parameters(), **HYPER, **options), steps)
    fit(plain, far.FusedAdam(far.FlatBuckets(plain), **HYPER, **options), steps)
    assert_close(plain, reference)
    return reference, plain


# Copies


def test_copies_of_model_buckets_and_optimizer():
    model = mlp()
    opt = fused(model)
    fit(model, opt, 2)
    twin = copy.deepcopy(model)
    thawed = pickle.loads(pickle.dumps(model))
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    for other in (twin, thawed, loaded):
        assert_same_training(other, model)
        optimizer = torch.optim.Adam(other.parameters())
        optimizer.load_state_dict(opt.state_dict())
        fit(other, optimizer, 1, first=2)
    assert opt.state[model[0].weight]["step"] == 2
    for thing, word in ((opt, "state_dict"), (opt.buckets, "FlatBuckets")):
        for attempt in (copy.deepcopy, copy.copy, pickle.dumps):
            with pytest.raises(far.InputError, match=word):
                attempt(thing)
    fit(model, opt, 1, first=2)
    assert_close(twin, model)


def test_a_deepcopy_trains_with_buckets_of_its_own():
    model = mlp()
    opt = fused(model)
    fit(model, opt, 2)
    twin = copy.deepcopy(model)
    second = fused(twin)
    second.load_state_dict(opt.state_dict())
    fit(model, opt, 2, first=2)
    fit(twin, second, 2, first=2)
    assert_same_training(twin, model)
    assert twin[0].weight.data_ptr() != model[0].weight.data_ptr()


def test_load_state_dict_copies_and_assign_says_what_to_do():
    model, other = mlp(), mlp(seed=1)
    opt = fused(model)
    model.load_state_dict(other.state_dict())
    fit(model, opt, 1)
    model.load_state_dict(other.state_dict(), assign=True)
    model(batch(0)).sum().backward()
    with pytest.raises(far.InputError, match=r"0\.weight.*build FlatBuckets"):
        opt.step()
    with pytest.raises(far.InputError, match=r"0\.weight.*build FlatBuckets"):
        opt.buckets.rebuild()
    fit(model, fused(model), 1)


def test_modules_exchanged_behind_the_buckets_back():
    model = mlp()
    opt = fused(model)
    model[2] = nn.Identity()  # less is fine: its parameters get no gradients
    fit(model, opt, 1)
    model[4].weight = nn.Parameter(torch.ones(3, 8))
    with pytest.raises(far.InputError, match=r"4\.weight.*build FlatBuckets"):
        opt.step()
    model = mlp()
    opt = fused(model)
    prune.l1_unstructured(model[0], "weight", amount=2)  # the same parameter by another name
    fit(model, opt, 2)
    assert opt.state[model[0].weight_orig]["step"] == 2
    model[4] = nn.Linear(8, 3)
    with pytest.raises(far.InputError, match=r"4\.weight.*build FlatBuckets"):
        fit(model, opt, 1)


# Autograd


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_compiled_models(backend):
    reference, plain = trained()
    model = mlp()
    torch._dynamo.reset()
    opt = fused(model)
    fit(model, opt, forward=torch.compile(model, backend=backend))
    if backend == "aot_eager":
        assert_same_training(model, plain)
    assert_close(model, reference)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_training_step():
    _, plain = trained()
    model = mlp()
    torch._dynamo.reset()
    opt = fused(model)

    @torch.compile(backend="aot_eager")
    def step(x):
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        return loss

    for k in range(4):
        step(batch(k))
    assert_same_training(model, plain)
    assert opt.state[model[0].weight]["step"] == 4


def test_a_step_inside_the_backward_pass():
    """An optimizer per parameter that steps as soon as its gradient is there, and then drops it."""
    results = []
    for make in (far.FusedAdam, torch.optim.Adam):
        model = mlp()
        optimizers = {p: make([p], **HYPER) for p in model.parameters()}

        def hook(p, optimizers=optimizers):
            optimizers[p].step()
            optimizers[p].zero_grad()

        handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
        for k in range(4):
            model(batch(k)).square().mean().backward()
        for handle in handles:  # or parameters and optimizers would hold each other for ever
            handle.remove()
        results.append(model)
    assert_close(*results)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant):
    _, plain = trained()
    model = mlp()

    def forward(x):
        return model[4](checkpoint(model[:4], x.requires_grad_(), use_reentrant=use_reentrant))

    fit(model, fused(model), forward=forward)
    assert_same_training(model, plain)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_create_graph_and_gradient_penalty():
    _, plain = trained()
    model = mlp()
    fit(model, fused(model), create_graph=True)
    assert_same_training(model, plain)
    results = []
    for make in (fused, lambda m: torch.optim.Adam(m.parameters(), **HYPER)):
        model = mlp()
        opt = make(model)
        for step in range(3):
            opt.zero_grad()
            x = batch(step).requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            (model(x).square().mean() + slope.square().mean()).backward()
            opt.step()
        results.append(model)
    assert_close(*results)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulated_gradients(set_to_none):
    results = []
    for make in (fused, lambda m: torch.optim.Adam(m.parameters(), **HYPER)):
        model = mlp()
        opt = make(model)
        for step in range(3):
            for part in range(3):
                (model(batch(10 * step + part)).square().mean() / 3).backward()
            opt.step()
            opt.zero_grad(set_to_none=set_to_none)
        results.append(model)
    assert_close(*results)


def test_tied_weights_and_parametrizations():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.encode = nn.Linear(6, 6)
            self.decode = nn.Linear(6, 6)
            self.decode.weight = self.encode.weight

        def forward(self, x):
            return self.decode(torch.tanh(self.encode(x)))

    def normed():
        model = mlp()
        nn.utils.parametrizations.weight_norm(model[0])
        nn.utils.parametrizations.orthogonal(model[2])
        return model

    trained(Tied)
    trained(normed, steps=2)
    model = mlp()
    buckets = far.FlatBuckets(model)
    opt = far.FusedAdam(buckets, **HYPER)
    nn.utils.parametrizations.weight_norm(model[0])  # afterwards: the old weight is gone, the new are in no bucket
    model(batch(0)).sum().backward()
    with pytest.raises(far.InputError, match=r"0\.parametrizations\.weight.*build FlatBuckets"):
        opt.step()


def test_parameters_that_never_get_gradients():
    def make():
        return nn.Sequential(mlp(), nn.Identity()).append(nn.Linear(9, 9))

    model, reference = make(), make()
    opt, other = fused(model), torch.optim.Adam(reference.parameters(), **HYPER)
    for m, o in ((model, opt), (reference, other)):
        fit(m, o, forward=m[0])
    assert_close(model, reference)
    assert set(opt.state_dict()["state"]) == set(other.state_dict()["state"]) == set(range(6))


# Schedulers, averages, hooks


def schedule(kind, opt):
    if kind == "one cycle":
        return lr_scheduler.OneCycleLR(opt, max_lr=0.01, total_steps=10, base_momentum=0.5, max_momentum=0.95)
    if kind == "sequence":
        parts = [lr_scheduler.LinearLR(opt, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(opt, 5)]
        return lr_scheduler.SequentialLR(opt, parts, milestones=[3])
    return lr_scheduler.ExponentialLR(opt, 0.5)


@pytest.mark.parametrize("kind", ["one cycle", "sequence", "exponential"])
@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_schedulers(kind, tensor_lr):
    """With cycling beta1 torch corrects the bias as if today's beta1 had held always; the masses do not, so that the
    reference is Adam's formulas with weights counted, in float64."""
    model, reference = mlp(), mlp()
    lr = torch.tensor(0.01) if tensor_lr else 0.01
    opt = far.FusedAdam(far.FlatBuckets(model), lr=lr)
    other = torch.optim.Adam(reference.parameters(), lr=0.01)
    for m, o in ((model, opt), (reference, other)):
        steps = schedule(kind, o)
        seen = set()
        for step in range(8):
            fit(m, o, 1, first=step)
            seen.add((float(o.param_groups[0]["lr"]), o.param_groups[0]["betas"]))
            steps.step()
        assert len(seen) > 5
    assert float(opt.param_groups[0]["lr"]) == pytest.approx(other.param_groups[0]["lr"], rel=1e-6)
    assert (opt.param_groups[0]["lr"] is lr) == tensor_lr
    if kind != "one cycle":
        assert_close(model, reference)


def test_cycling_betas_count_the_weights_they_gave():
    p = torch.zeros(1, requires_grad=True)
    opt = far.FusedAdam([p], lr=0.1, eps=0.0)
    x = m = v = a = b = 0.0
    for beta1, beta2, g in ((0.9, 0.99, 1.0), (0.5, 0.9, -3.0), (0.0, 0.999, 2.0), (0.8, 0.5, 1.0)):
        opt.param_groups[0]["betas"] = beta1, beta2
        step_with(opt, [p], [torch.tensor([g])])
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        a, b = beta1 * a + (1 - beta1), beta2 * b + (1 - beta2)
        x -= 0.1 * (m / a) / (v / b) ** 0.5
        assert p.item() == pytest.approx(x, rel=1e-5)


def test_averaged_models_follow_and_load_back():
    _, plain = trained()
    model = mlp()
    opt = fused(model)
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    expected = None
    for step in range(4):
        fit(model, opt, 1, first=step)
        average.update_parameters(model)
        value = model[0].weight.detach().clone()
        expected = value if expected is None else expected * 0.5 + value * 0.5
    assert_same_training(model, plain)
    torch.testing.assert_close(average.module[0].weight, expected)
    model.load_state_dict(average.module.state_dict())
    fit(model, opt, 1)


def test_step_hooks_run_as_with_torch():
    (p,) = leaves(torch.ones(3))
    opt = far.FusedAdam([p], lr=0.1)
    seen = []
    opt.register_step_pre_hook(lambda o, args, kwargs: seen.append(("before", p[0].item())))
    opt.register_step_post_hook(lambda o, args, kwargs: seen.append(("after", round(p[0].item(), 5))))
    everywhere = register_optimizer_step_post_hook(lambda o, args, kwargs: seen.append("all"))
    step_with(opt, [p], [torch.ones(3)])
    everywhere.remove()
    assert seen == [("before", 1.0), ("after", 0.9), "all"]
    with torch.profiler.profile() as profile:
        step_with(opt, [p], [torch.ones(3)])
        opt.zero_grad()
    names = {event.name for event in profile.events()}
    assert "Optimizer.step#FusedAdam.step" in names


def test_the_optimizer_shows_itself_as_torchs():
    (p,) = leaves(torch.ones(3))
    opt = far.FusedAdam([{"params": [p], "lr": 0.5, "name": "all"}])
    assert "lr: 0.5" in repr(opt)
    assert opt.param_groups[0]["name"] == "all"
    assert isinstance(opt, torch.optim.Optimizer)
    assert opt.step() is None
