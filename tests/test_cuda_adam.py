"""Adam's CUDA kernels, run thread by thread on the CPU: against torch.optim.Adam in float64, and against the CPU loops
bit for bit; then with faults planted into copies of their source."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import emulated
import numpy as np
import pytest
import torch

from fastactrec import ops

if reason := emulated.why_not():
    pytest.skip(reason, allow_module_level=True)

KERNELS = "csrc/cuda/adam.cu"
SOURCES = [KERNELS, "tests/emulated/adam.cpp"]
SEEDS = range(4)
SIZES = [0, 1, 31, 255, 257, 1023, 4097]
LAYOUTS = [[size] for size in SIZES] + [[*SIZES, 40_000]]  # the last one lies over many blocks
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # far::Dtype
SQUARES_CHUNK = 1 << 14


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "sanitized"])
def kernels(request):
    library = emulated.build(SOURCES, sanitized=request.param)
    yield library
    library.close()


@dataclass
class Variant:
    """What a step is made of; the defaults are the common case, which has a kernel of its own."""

    grad: torch.dtype = torch.float32
    moments: torch.dtype = torch.float32
    out: torch.dtype | None = None
    amsgrad: bool = False
    frozen: bool = False
    group: dict = field(default_factory=dict)  # of torch.optim.Adam
    grad_scale: float | None = None
    found_inf: float | None = None
    max_norm: float | None = None


VARIANTS = {
    "plain": Variant(),
    "decay": Variant(group={"weight_decay": 0.1}),
    "decoupled": Variant(group={"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "amsgrad": Variant(amsgrad=True, group={"maximize": True}),
    "frozen": Variant(frozen=True),
    "bfloat16": Variant(grad=torch.bfloat16, out=torch.float32),
    "float16, scaled": Variant(grad=torch.float16, grad_scale=64.0, found_inf=0.0),
    "bfloat16 moments": Variant(moments=torch.bfloat16, amsgrad=True, out=torch.float16),
    "clipped": Variant(max_norm=0.5, out=torch.bfloat16),
    "overflow": Variant(grad=torch.float16, grad_scale=64.0, found_inf=1.0, out=torch.float32),
}
HYPER = {"lr": 2e-3, "betas": (0.9, 0.98), "eps": 1e-7}


def numbers(tensor: torch.Tensor | None) -> np.ndarray | None:
    """The memory of a tensor, small types as bit patterns."""
    if tensor is None:
        return None
    return tensor.view(torch.int16).numpy() if tensor.element_size() == 2 else tensor.numpy()


class Bucket:
    """Segments of the given sizes, every third one without gradient; between them lies what nobody may touch."""

    def __init__(self, sizes: list[int], variant: Variant):
        self.variant = variant
        generator = torch.Generator().manual_seed(sum(sizes))
        begin = 0
        self.segments = np.zeros(len(sizes), ops.ADAM_SEGMENT)
        for key, size in enumerate(sizes):
            steps = key + 1
            masses = [1 - beta**steps for beta in HYPER["betas"]]
            frozen = 0.3 if variant.frozen and key % 2 == 0 else 0.0  # the others use exp_avg_sq
            self.segments[key] = (begin, begin + size, masses, frozen, steps, 0, key % 3 != 2, key, b"")
            begin += -(-size // 32) * 32
        self.numel = begin

        def random(scale, dtype=torch.float32):
            return (torch.randn(self.numel, generator=generator) * scale).to(dtype)

        self.arrays = {
            "weight": random(1.0),
            "grad": random(0.3, variant.grad),
            "exp_avg": random(0.1, variant.moments),
            "exp_avg_sq": random(0.1, variant.moments).square(),
            "max_exp_avg_sq": random(0.1).square() if variant.amsgrad else None,
            "frozen_sq": random(0.1).square() if variant.frozen else None,
            "param": None,
            "out": random(1.0, variant.out) if variant.out else None,
        }
        for name in ("weight", "exp_avg", "exp_avg_sq"):
            self.arrays[name][~self.inside()] = 3.0
        if variant.grad != torch.float32:  # somebody wrote to about half of the parameters
            written = (torch.rand(self.numel, generator=generator) < 0.5) & self.inside()
            rounded = self.arrays["weight"].to(variant.grad)
            self.arrays["param"] = torch.where(written, random(1.0, variant.grad), rounded)
        self.arrays["grad"][~self.inside()] = float("nan")  # whoever uses it spoils what it updates
        group = {"weight_decay": 0.0, "decoupled_weight_decay": False, "maximize": False, **variant.group}
        hyper = HYPER["lr"], *HYPER["betas"], HYPER["eps"], *map(float, group.values())
        self.groups = np.array([tuple(hyper)], ops.ADAM_GROUP)

    def inside(self, of=lambda segment: True) -> torch.Tensor:
        mask = torch.zeros(self.numel, dtype=torch.bool)
        for segment in self.segments:
            mask[segment["begin"] : segment["end"]] = bool(of(segment))
        return mask

    def scalars(self) -> list[torch.Tensor | None]:
        v = self.variant
        squares = None if v.max_norm is None else torch.tensor([self.squares()], dtype=torch.float64)
        given = v.grad_scale, v.found_inf
        return [*(None if value is None else torch.tensor([value], dtype=torch.float32) for value in given), squares]

    def squares(self) -> float:
        live = self.inside(lambda segment: segment["live"])
        return float(self.arrays["grad"].double()[live].square().sum())

    def step_on_gpu(self, library, seed: int) -> None:
        v, a = self.variant, {name: numbers(array) for name, array in self.arrays.items()}
        rows, count = self.segments.view(np.uint8), len(self.segments)
        scale = [*map(numbers, self.scalars()), float(v.max_norm or 0)]
        library.adam_advance(rows, count, self.groups.view(np.uint8), *scale, seed=seed)
        chunks = np.arange(0, self.numel, ops.ADAM_CHUNK)
        first = np.searchsorted(self.segments["end"], chunks, side="right").astype(np.int32)
        types = TYPES[v.grad], TYPES[v.moments], TYPES[v.out or torch.float32]
        library.adam_update(*a.values(), *types, self.numel, rows, count, first, seed=seed)

    def step_on_cpu(self) -> None:
        table = torch.from_numpy(self.segments.view(np.uint8).reshape(-1, ops.ADAM_SEGMENT.itemsize))
        groups = torch.from_numpy(self.groups.view(np.uint8).reshape(-1, ops.ADAM_GROUP.itemsize))
        plan = ops.AdamPlan(table, groups, self.segments.copy())
        arrays = dict(self.arrays)
        out = arrays.pop("out")
        plan.add_bucket(*arrays.values(), None, 0, len(self.segments))
        plan.advance(*self.scalars(), float(self.variant.max_norm or 0))
        plan.update(0, 1, None if out is None else [out])

    def step_in_float64(self) -> dict[str, torch.Tensor]:
        """Weights and moments as torch.optim.Adam has them in float64, from the same start."""
        v = self.variant
        names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * v.amsgrad
        result = {name: self.arrays[name].double() for name in ["weight", *names]}
        if (param := self.arrays["param"]) is not None:
            kept = self.arrays["weight"].to(param.dtype) == param
            followed = self.inside(lambda segment: v.out is not None or (segment["live"] and not v.found_inf))
            result["weight"] = torch.where(kept | ~followed, result["weight"], param.double())
        factor = 1 / (v.grad_scale or 1)
        if v.max_norm is not None:
            factor *= min(1.0, v.max_norm / (math.sqrt(self.squares()) * factor + 1e-6))
        for segment in self.segments:
            if not segment["live"] or v.found_inf:
                continue
            where = slice(segment["begin"], segment["end"])
            p = result["weight"][where].clone().requires_grad_()
            opt = torch.optim.Adam([p], **HYPER, amsgrad=v.amsgrad, **v.group)
            state = {name: result[name][where].clone() for name in names}
            opt.state[p] = {"step": torch.tensor(float(segment["step"])), **state}
            p.grad = self.arrays["grad"][where].double() * factor
            opt.step()
            if segment["frozen_mass"]:
                m, a = opt.state[p]["exp_avg"], 1 - HYPER["betas"][0] ** (float(segment["step"]) + 1)
                root = (self.arrays["frozen_sq"].double()[where] / float(segment["frozen_mass"])).sqrt()
                p.data = result["weight"][where] - HYPER["lr"] * m / a / (root + HYPER["eps"])
            for name, value in {"weight": p.detach(), **opt.state[p]}.items():
                if name != "step":
                    result[name][where] = value
        return result


def check_step(library, sizes: list[int], variant: Variant, seed: int) -> None:
    bucket, twin, start = (Bucket(sizes, variant) for _ in range(3))
    exact = bucket.step_in_float64()
    bucket.step_on_gpu(library, seed)
    twin.step_on_cpu()
    assert bucket.segments.tobytes() == twin.segments.tobytes()
    inside = bucket.inside()
    for name, array in bucket.arrays.items():
        if array is None:
            continue
        same = torch.from_numpy(numbers(array) == numbers(twin.arrays[name]))
        assert same[inside].all(), f"{name} differs from the CPU's in {int((~same[inside]).sum())} elements"
        if name not in ("param", "out"):  # they are written as whole vectors
            torch.testing.assert_close(array[~inside], start.arrays[name][~inside], rtol=0, atol=0, equal_nan=True)
    advanced = int(not variant.found_inf)
    np.testing.assert_array_equal(bucket.segments["step"], start.segments["step"] + start.segments["live"] * advanced)
    for name, value in exact.items():
        # bfloat16 moments: either neighbour. float32: two or three roundings; where terms cancel, of the larger one.
        small = "exp_avg" in name and "max" not in name and variant.moments == torch.bfloat16
        rtol, atol = (2**-7, 1e-9) if small else (2**-21, 2**-22)
        got = bucket.arrays[name][inside].double()
        torch.testing.assert_close(got, value[inside], rtol=rtol, atol=atol if name != "exp_avg_sq" else 2**-28)
    written = inside & bucket.inside(lambda segment: segment["live"] and not variant.found_inf)
    for name, where in (("param", written), ("out", inside)):
        if (array := bucket.arrays[name]) is not None:
            assert torch.equal(array[where], bucket.arrays["weight"].to(array.dtype)[where])


@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_adam(kernels, sizes, variant):
    for seed in SEEDS:
        check_step(kernels, sizes, VARIANTS[variant], seed)


def check_squares(library, size: int, dtype: torch.dtype, seed: int) -> None:
    values = torch.randn(-(-size // 4) * 4, generator=torch.Generator().manual_seed(size)).to(dtype)
    partials = np.full(-(-size // SQUARES_CHUNK), np.nan)
    library.sum_squares(numbers(values), TYPES[dtype], size, partials, seed=seed)
    exact = [math.fsum(chunk.double().square().tolist()) for chunk in values[:size].split(SQUARES_CHUNK) if size]
    np.testing.assert_allclose(partials, exact, rtol=1e-14)
    total = ops.sum_squares([values[:size]])
    np.testing.assert_allclose(partials.sum(), float(total), rtol=1e-14)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [*SIZES, SQUARES_CHUNK, 40_001])
def test_sum_squares(kernels, dtype, size):
    for seed in SEEDS:
        check_squares(kernels, size, dtype, seed)


def test_sum_squares_is_the_same_in_every_order(kernels):
    values = torch.randn(40_000, generator=torch.Generator().manual_seed(0)).numpy()
    results = []
    for seed in SEEDS:
        partials = np.full(3, np.nan)
        kernels.sum_squares(values, 0, len(values), partials, seed=seed)
        results.append(partials.tobytes())
    assert len(set(results)) == 1


# Faults in copies of the source; the text must be there, so that a change of the kernels is noticed here.
BARRIER = "    __syncthreads();\n    if (int(threadIdx.x) < width)"
GRID = "return dim3(unsigned((items + each - 1) / each))"
MASK = "if (rest > 3) adam_update"
BOUND = "at < end; at += 4 * threads) {\n      const int64_t i"
SQUARES_BOUND = "at < end; at += 4 * threads) {\n    const float4 x"


def test_a_missing_barrier_is_found():
    library = emulated.build(SOURCES, patches={KERNELS: [(BARRIER, "    if (int(threadIdx.x) < width)")]})
    for seed in SEEDS:
        with pytest.raises(AssertionError):
            check_squares(library, 40_001, torch.float32, seed)


def test_too_few_blocks_are_found():
    library = emulated.build(SOURCES, patches={KERNELS: [(GRID, "return dim3(unsigned(items / each))")]})
    with pytest.raises(AssertionError, match="differs from the CPU's"):
        check_step(library, [4097] * 64, Variant(), 0)  # 64.5 chunks
    with pytest.raises(AssertionError):
        check_squares(library, 40_001, torch.float32, 0)
    with pytest.raises(emulated.EmulatorError, match=r"a grid of \(0, 1, 1\) blocks"):
        check_squares(library, 31, torch.float32, 0)


def test_a_missing_mask_is_found():
    library = emulated.build(SOURCES, patches={KERNELS: [(MASK, "if (rest > 2) adam_update")]})
    with pytest.raises(AssertionError):
        check_step(library, [31], Variant(moments=torch.bfloat16), 0)


def test_bounds_off_by_one_are_reported():
    patches = {KERNELS: [(text, text.replace("at < end", "at <= end")) for text in (BOUND, SQUARES_BOUND)]}
    library = emulated.build(SOURCES, sanitized=True, patches=patches)
    with pytest.raises(emulated.EmulatorError, match="heap-buffer-overflow"):
        check_step(library, [256], Variant(), 0)
    with pytest.raises(emulated.EmulatorError, match="heap-buffer-overflow"):
        check_squares(library, 256, torch.float32, 0)
