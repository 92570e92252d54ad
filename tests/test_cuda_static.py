"""What nvcc says of the CUDA kernels, without a GPU: they compile, do not spill, and access memory in vectors."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import source_tree

resources = source_tree.load("profiling/kernel_resources.py")

# Registers per thread: 64 let four blocks of 256 threads live on a multiprocessor, enough to hide memory latency.
REGISTERS = {
    "adam_kernel<true>": 64,
    "adam_kernel<false>": 64,
    "advance_kernel": 64,
    "squares_kernel": 64,
    **{f"{kernel}<{bits}>": 64 for kernel in ("quantise_kernel", "dequantise_kernel") for bits in (16, 8, 4)},
}


@pytest.fixture(scope="session")
def kernels():
    if resources.nvcc() is None:
        pytest.skip("nvcc is not on PATH, and CUDACXX is not set")
    return resources.measure_all()


def test_every_kernel_has_a_bound(kernels):
    assert {kernel.name for kernel in kernels} == set(REGISTERS)
    assert {kernel.arch for kernel in kernels} == set(resources.ARCHS)
    assert len(kernels) == len(REGISTERS) * len(resources.ARCHS)


def test_registers_and_spills(kernels):
    for kernel in kernels:
        what = f"{kernel.name} for sm_{kernel.arch}"
        assert kernel.spill_stores == kernel.spill_loads == 0, f"{what} spills"
        assert kernel.registers <= REGISTERS[kernel.name], f"{what} takes {kernel.registers} registers"
        assert kernel.shared_bytes <= 48 << 10


def accesses(ptx: str, kind: str) -> tuple[int, int]:
    """(128-bit, other) loads or stores of global memory."""
    every = re.findall(rf"\b{kind}\.global\S*", ptx)
    wide = [access for access in every if re.search(r"\.v4\.[fbu]32$", access)]
    return len(wide), len(every) - len(wide)


def test_adam_moves_16_bytes_at_a_time(kernels):
    for kernel in (kernel for kernel in kernels if kernel.name == "adam_kernel<true>"):
        loads, (stores, scalar_stores) = accesses(kernel.ptx, "ld")[0], accesses(kernel.ptx, "st")
        copies = stores // 3  # of the loop: nvcc may unroll it, or split it by weight decay
        assert copies >= 1
        assert loads == 4 * copies, "weight, gradient and two moments are read"
        assert (stores, scalar_stores) == (3 * copies, 0), "weight and two moments are written"


def test_compression_reads_16_bytes_at_a_time(kernels):
    for kernel in kernels:
        if kernel.name.startswith("quantise_kernel"):
            assert accesses(kernel.ptx, "ld")[0] == 6, "values, reference and residual, each for two groups of four"
            assert accesses(kernel.ptx, "st")[0] == 2, "the residual"
        elif kernel.name.startswith("dequantise_kernel"):
            assert accesses(kernel.ptx, "ld")[0] == 2, "base"
            assert accesses(kernel.ptx, "st")[0] >= 1, "out; the compiler may share one store"


def test_the_emulator_is_tested_on_real_cuda(tmp_path):
    """nvcc accepts the kernels on which the emulator is tested, dynamic shared memory included."""
    if resources.nvcc() is None:
        pytest.skip("nvcc is not on PATH, and CUDACXX is not set")
    tests = Path(__file__).resolve().parent
    flags = ["-std=c++17", "-arch=sm_80", "-I", str(tests.parent / "csrc"), "-I", str(tests), "-cubin"]
    command = [resources.nvcc(), *flags, str(tests / "emulated" / "selftest.cu"), "-o", str(tmp_path / "x.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


REPORT = """\
ptxas info    : Compiling entry function '_ZN3far12_GLOBAL__N_11adam_kernelILb1EEEvPf' for 'sm_90'
ptxas info    : Function properties for _ZN3far12_GLOBAL__N_11adam_kernelILb1EEEvPf
    0 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 70 registers, used 1 barriers, 2048 bytes smem
ptxas info    : Compiling entry function '_Z5plainPf' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers, 456 bytes cmem[0]
"""


def test_the_report_is_read_right():
    ptx = {80: ".visible .entry _Z5plainPf(\n)\n{\n\tld.global.nc.v4.f32 \t{%f1};\n}\n.entry _Z5otherPf(\n)\n{\n}\n"}
    plain, adam = sorted(resources.parse("x.cu", REPORT, ptx), key=lambda kernel: kernel.arch)
    assert adam[2:7] == (90, 70, 8, 16, 2048)
    assert plain[2:7] == (80, 12, 0, 0, 0)
    assert accesses(plain.ptx, "ld") == (1, 0)
    assert "other" not in plain.ptx
    if adam.name.startswith("adam"):  # where the tool that reads C++ names is installed
        assert (plain.name, adam.name) == ("plain", "adam_kernel<true>")
    assert "24" in resources.table([adam])
