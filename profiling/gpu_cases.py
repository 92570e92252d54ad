"""What gpu_check.py runs in processes of its own, so that one that fails or hangs leaves the others alone.

python profiling/gpu_cases.py hashes | times | average prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

import fastactrec as far
from fastactrec import ops

SIZES = (0, 1, 31, 255, 257, 1023, 4097, 300_001)
ADAM_BYTES = 28  # per parameter: param, grad and two moments are read, all but grad written
CLIPPED_BYTES = 32  # the gradient is read once more, for its norm
AVERAGING_LIMIT_S = 60


def digest(tensors: Iterable[Tensor]) -> str:
    """Of the bytes of all tensors, in order."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()[:16]


def adam_bits(device: str, dtype: torch.dtype = torch.float32, **options) -> str:
    """Parameters and state after five steps, the third without gradients for some parameters."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(size, generator=generator).to(device, dtype).requires_grad_() for size in SIZES]
    opt = far.FusedAdam(far.FlatBuckets(params, bucket_bytes=1 << 18), lr=2e-3, **options)
    for step in range(5):
        opt.zero_grad()
        for p in params[step == 2 :: 1 + (step == 2)]:
            # Through autograd, which marks the parameter as one that has a gradient.
            (p * torch.randn(p.shape, generator=generator).to(device, dtype)).sum().backward()
        opt.step()
    return digest(value for p in params for value in (p, *opt.state.get(p, {}).values()))


def compression_bits(device: str, bits: int) -> str:
    """Payloads, residual and sum of three rounds; a block of zeros and blocks with NaN and infinity are in it."""
    generator = torch.Generator().manual_seed(0)
    digests = []
    for size in SIZES:
        reference, residual = torch.randn(size, generator=generator).to(device), torch.zeros(size, device=device)
        payloads = torch.empty(3, ops.payload_bytes(size, bits), dtype=torch.uint8, device=device)
        for payload in payloads:
            values = torch.randn(size, generator=generator)
            values[257:512] = 0
            values[600::3000], values[900::4000] = float("nan"), float("-inf")
            ops.quantise(values.to(device), payload, bits=bits, factor=0.3, reference=reference, residual=residual)
        out = torch.empty(size, device=device)
        ops.dequantise_sum(payloads, out, bits=bits, base=reference)
        digests += [payloads, residual, out]
    return digest(digests)


# Every operation whose result must not depend on the device: name -> function of the device, giving a digest.
# Sums of squares are not here: their order, and with it the last bits, is the device's own.
SAME_BITS: dict[str, Callable[[str], str]] = {
    "adam": adam_bits,
    "adam, weight decay": lambda device: adam_bits(device, weight_decay=0.1),
    "adamw, amsgrad": lambda device: adam_bits(device, weight_decay=0.1, decoupled=True, amsgrad=True),
    "adam, bfloat16": lambda device: adam_bits(device, torch.bfloat16),
    "adam, float16": lambda device: adam_bits(device, torch.float16),
    "adam, bfloat16 moments": lambda device: adam_bits(device, moments_dtype=torch.bfloat16),
    **{f"compression, {bits} bits": functools.partial(compression_bits, bits=bits) for bits in (16, 8, 4)},
}


def hashes(device: str) -> dict:
    """{operation: {"cpu": digest, "gpu": digest, "equal": bool}}"""
    result = {}
    for name, run in SAME_BITS.items():
        cpu, gpu = run("cpu"), run(device)
        result[name] = {"cpu": cpu, "gpu": gpu, "equal": cpu == gpu}
    return result


class Events:
    """Milliseconds between two points of the current CUDA stream; wall-clock time on the CPU."""

    def __init__(self, device: str):
        self.on_gpu = device != "cpu"

    def time(self, call: Callable[[], object]) -> float:
        if not self.on_gpu:
            start = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - start)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def medians_ms(calls: dict[str, Callable[[], object]], device: str, repeats: int) -> dict[str, float]:
    """Median time of each call; they take turns, so that a change of clocks meets all of them."""
    events = Events(device)
    for call in calls.values():
        for _ in range(3):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(events.time(call))
    return {name: statistics.median(values) for name, values in times.items()}


def with_gradients(shapes: list[tuple[int, ...]], device: str, build: Callable) -> torch.optim.Optimizer:
    generator = torch.Generator(device).manual_seed(0)
    params = [torch.randn(s, generator=generator, device=device).mul_(0.1).requires_grad_() for s in shapes]
    opt = build(params)
    for p in params:
        grad = torch.randn(p.shape, generator=generator, device=device) * 0.01
        if p.grad is None:
            p.grad = grad
        else:
            p.grad.copy_(grad)
    opt.step()
    return opt


def graphed(opt: torch.optim.Optimizer) -> Callable[[], object]:
    """The step as a CUDA graph: what the GPU needs when the host is out of the way."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            opt.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        opt.step()
    return graph.replay


def adam_times(device: str, repeats: int, shapes: list[tuple[int, ...]] | None = None) -> list[dict]:
    """Adam on the sizes of ResNet-50's parameters: torch's fused one, ours, and a copy of the same bytes."""
    if shapes is None:
        from torchvision.models import resnet50

        with torch.device("meta"):
            shapes = [tuple(p.shape) for p in resnet50().parameters()]
    numel = sum(torch.Size(shape).numel() for shape in shapes)

    def fused(params):
        return torch.optim.Adam(params, fused=True)

    cases: dict[str, tuple[int, Callable[[], object]]] = {}  # bytes, call
    for layout, chosen in ((f"{len(shapes)} tensors", shapes), ("one flat tensor", [(numel,)])):
        cases[f"torch fused, {layout}"] = ADAM_BYTES * numel, with_gradients(chosen, device, fused).step
        cases[f"fastactrec, {layout}"] = ADAM_BYTES * numel, with_gradients(chosen, device, far.FusedAdam).step
        if device != "cpu":
            replay = graphed(with_gradients(chosen, device, far.FusedAdam))
            cases[f"fastactrec, {layout}, CUDA graph"] = ADAM_BYTES * numel, replay
    other = with_gradients(shapes, device, fused)

    def clip_and_step():
        torch.nn.utils.clip_grad_norm_(other.param_groups[0]["params"], 1.0)
        other.step()

    clipped = with_gradients(shapes, device, lambda params: far.FusedAdam(params, max_norm=1.0))
    cases["torch fused, norm clipped before"] = CLIPPED_BYTES * numel, clip_and_step
    cases["fastactrec, norm clipped inside"] = CLIPPED_BYTES * numel, clipped.step
    words = ADAM_BYTES // 8 * numel  # read and written, so that the copy moves about as much
    source, target = torch.ones(words, device=device), torch.zeros(words, device=device)
    cases["device copy"] = 8 * words, lambda: target.copy_(source)
    return timed("adam", cases, device, repeats)


def compression_times(device: str, repeats: int, numel: int = 25_557_032) -> list[dict]:
    """Quantising with reference and residual, and the sum of four ranks, on as many elements as ResNet-50 has."""
    ranks = 4
    generator = torch.Generator(device).manual_seed(0)
    values, reference = (torch.randn(numel, generator=generator, device=device) for _ in range(2))
    residual = torch.zeros(numel, device=device)
    cases: dict[str, tuple[int, Callable[[], object]]] = {}
    for bits in (16, 8, 4):
        payloads = torch.empty(ranks, ops.payload_bytes(numel, bits), dtype=torch.uint8, device=device)
        options = {"bits": bits, "factor": 0.25, "reference": reference, "residual": residual}
        quantise = functools.partial(ops.quantise, values, payloads[0], **options)
        for payload in payloads:
            ops.quantise(values, payload, bits=bits)
        add = functools.partial(ops.dequantise_sum, payloads, torch.empty_like(values), bits=bits, base=reference)
        cases[f"quantise, {bits} bits"] = 16 * numel + payloads[0].numel(), quantise
        cases[f"sum of {ranks}, {bits} bits"] = 8 * numel + payloads.numel(), add
    source, target = values, torch.zeros_like(values)
    cases["device copy"] = 8 * numel, lambda: target.copy_(source)
    return timed("compression", cases, device, repeats)


def timed(op: str, cases: dict[str, tuple[int, Callable[[], object]]], device: str, repeats: int) -> list[dict]:
    """Cases: name -> (bytes moved, call); one of them is the device copy."""
    times = medians_ms({name: call for name, (_, call) in cases.items()}, device, repeats)
    rates = {name: moved / times[name] / 1e6 for name, (moved, _) in cases.items()}
    return [
        {
            "op": op,
            "case": name,
            "bytes": moved,
            "median_ms": times[name],
            "gb_per_s": rates[name],
            "of_copy": rates[name] / rates["device copy"],
        }
        for name, (moved, _) in cases.items()
    ]


def times(device: str) -> dict:
    repeats = 50 if device != "cpu" else 3
    return {"rows": adam_times(device, repeats) + compression_times(device, repeats), "repeats": repeats}


# Two ranks on one device: correctness only, since they share it.


def average_rank(device: str, rank: int, world: int, folder: str) -> None:
    import torch.distributed as dist

    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    generator = torch.Generator().manual_seed(rank)
    model = torch.nn.ParameterList([torch.randn(size, generator=generator).to(device) for size in SIZES])
    params = list(model)
    own = [p.detach().cpu() for p in params]
    opt = far.FusedAdam(far.FlatBuckets(model, bucket_bytes=1 << 18))
    avg = far.ParameterAverager(opt, period=2)
    for _ in range(5):  # two rounds and a step that the last averaging takes in
        for p in params:
            p.grad.copy_(torch.randn(p.shape, generator=generator))
        opt.step()
        avg.step()
    avg.average_all()
    state = [value for p in params for value in (p, *opt.state.get(p, {}).values())]
    result = {"digest": digest(state), "start": digest(own), "finite": all(p.isfinite().all().item() for p in params)}
    Path(folder, f"rank{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def average(device: str, world: int = 2) -> dict:
    """Starts the ranks, ends them after AVERAGING_LIMIT_S, and compares what they hold."""
    if device != "cpu" and (version := torch.cuda.nccl.version()) < (2, 30):
        return {"skipped": f"NCCL {'.'.join(map(str, version))} cannot run two ranks on one GPU: 2.30 or newer can"}
    # NCCL refuses two ranks on one GPU unless told otherwise, and few blocks per rank let both be resident.
    environment = {**os.environ, "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4", "OMP_NUM_THREADS": "1"}
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "rank", "--device", device, "--folder", folder, "--world", str(world)]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(world)]
        deadline = time.monotonic() + AVERAGING_LIMIT_S
        try:
            codes = [rank.wait(max(0.0, deadline - time.monotonic())) for rank in ranks]
        except subprocess.TimeoutExpired:
            return {"equal": False, "error": f"the ranks did not end within {AVERAGING_LIMIT_S} s"}
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(codes):
            return {"equal": False, "error": f"the ranks ended with {codes}"}
        results = [json.loads(Path(folder, f"rank{rank}.json").read_text()) for rank in range(world)]
    equal = len({result["digest"] for result in results}) == 1
    started_apart = len({result["start"] for result in results}) == world
    return {"equal": equal and started_apart and all(result["finite"] for result in results), "ranks": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["hashes", "times", "average", "rank"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", help="where the ranks meet")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=2)
    args = parser.parse_args()
    if args.what == "rank":
        average_rank(args.device, args.rank, args.world, args.folder)
        return
    print(json.dumps({"hashes": hashes, "times": times, "average": average}[args.what](args.device)))


if __name__ == "__main__":
    main()
