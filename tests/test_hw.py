# SPDX-License-Identifier: Apache-2.0
"""Every function of kernels/hw/ compiles wherever its instruction exists. Needs no GPU.

What the instructions do is recorded from a GPU by ``bench/probe.py``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

import matrix
import pytest

from cuflash import compile, device, source

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import probe  # noqa: E402

HW = source.KERNEL_ROOT / "hw"
ARCHITECTURES = {
    **matrix.ARCHITECTURES,
    "sm_89": device.architecture(8, 9),
    "sm_100": device.architecture(10, 0),
}


class Unit(NamedTuple):
    """What compile_cubin wants to know of a plan."""

    kernel: str
    target_suffix: str


class Family(NamedTuple):
    """A header, the body of a kernel, and the first architecture that has all the body uses."""

    header: str
    since: int
    body: str
    suffix: str = ""  # of the only architecture that has it


#: The kernel's parameters are float* f, int* n and a TensorMap if the header is tma's.
FAMILIES = {
    "memory": Family(
        "memory",
        75,
        """
        __shared__ float x[4];
        hw::store(&x[threadIdx.x], hw::load(f));
        n[0] = hw::shared_address(&x[1]);
        """,
    ),
    "convert": Family(
        "convert",
        75,
        """
        n[0] = hw::pack2<hw::float16>(f[0], f[1]);
        n[1] = hw::pack2<hw::bfloat16>(f[0], f[1]);
        f[2] = hw::to_float(hw::from_float<hw::float16>(f[3]));
        f[4] = hw::to_float(hw::from_float<hw::bfloat16>(f[5]));
        """,
    ),
    "math": Family(
        "math",
        75,
        "f[0] = hw::exp2_approx(f[0]) + hw::log2_approx(f[1]) + hw::rcp_approx(f[2]);",
    ),
    "sync": Family(
        "sync",
        75,
        """
        float r[3] = {f[0], f[1], f[2]};
        unsigned int bits[2] = {static_cast<unsigned int>(n[0]), 1};
        hw::pin(r);
        hw::pin(bits);
        if (threadIdx.x < 32) {
            hw::named_barrier_arrive(1, 64);
        } else {
            hw::named_barrier_sync(1, 64);
        }
        n[threadIdx.x] = hw::max3(hw::forget(n[0]), n[1], n[2]) + bits[0] + static_cast<int>(r[2]);
        """,
    ),
    "sync, sm_90": Family(
        "sync",
        90,
        """
        __shared__ int x[1];
        x[0] = n[0];
        hw::fence_proxy_async();
        if (hw::elect_one()) n[1] = x[0];
        """,
    ),
    "sync, setmaxnreg": Family(
        "sync",
        90,
        """
        if (threadIdx.x < 128) {
            hw::registers_decrease<24>();
        } else {
            hw::registers_increase<240>();
        }
        n[threadIdx.x] = 1;
        """,
        suffix="a",
    ),
    "semaphore": Family(
        "semaphore",
        75,
        """
        hw::semaphore_wait(n, 3);
        f[0] = 1.0f;
        hw::semaphore_add(n, 1);
        """,
    ),
    "mbarrier": Family(
        "mbarrier",
        90,
        """
        __shared__ hw::MBarrier b;
        if (threadIdx.x == 0) {
            hw::mbarrier_init(b, 2);
            hw::fence_mbarrier_init();
        }
        __syncthreads();
        if (threadIdx.x == 0) hw::mbarrier_arrive(b);
        if (threadIdx.x == 1) hw::mbarrier_arrive_expect_tx(b, 0);
        hw::mbarrier_wait(b, 0);
        n[threadIdx.x] = 1;
        """,
    ),
    "cp_async": Family(
        "cp_async",
        80,
        """
        __shared__ __align__(16) float x[12];
        hw::cp_async<4>(&x[0], f, n[0] > 0);
        hw::cp_async<8>(&x[4], f, true);
        hw::cp_async_commit();
        hw::cp_async<16>(&x[8], f, false);
        hw::cp_async_commit();
        hw::cp_async_wait<1>();
        hw::cp_async_wait<0>();
        __syncthreads();
        f[threadIdx.x] = x[threadIdx.x];
        """,
    ),
    "ldmatrix": Family(
        "ldmatrix",
        75,
        """
        __shared__ __align__(16) unsigned int x[128];
        x[threadIdx.x] = n[threadIdx.x];
        __syncwarp();
        unsigned int r1[1], r2[2], r4[4];
        const unsigned int* row = x + 4 * (threadIdx.x % 32);
        hw::ldmatrix(r1, row, 16);
        n[0] = r1[0];
        hw::ldmatrix<true>(r1, row);
        n[1] = r1[0];
        hw::ldmatrix(r2, row);
        n[2] = r2[0] + r2[1];
        hw::ldmatrix<true>(r2, row);
        n[3] = r2[0] + r2[1];
        hw::ldmatrix(r4, row);
        n[4] = r4[0] + r4[1] + r4[2] + r4[3];
        hw::ldmatrix<true>(r4, row);
        n[5] = r4[0] + r4[1] + r4[2] + r4[3];
        """,
    ),
    "stmatrix": Family(
        "ldmatrix",
        90,
        """
        __shared__ __align__(16) unsigned int x[128];
        unsigned int* row = x + 4 * (threadIdx.x % 32);
        const unsigned int r1[] = {1}, r2[] = {1, 2}, r4[] = {1, 2, 3, 4};
        hw::stmatrix(row, r1);
        hw::stmatrix<true>(row, r1);
        hw::stmatrix(row, r2);
        hw::stmatrix<true>(row, r2);
        hw::stmatrix(row, r4);
        hw::stmatrix<true>(row, r4);
        __syncwarp();
        n[threadIdx.x] = x[threadIdx.x];
        """,
    ),
    "mma": Family(
        "mma",
        80,
        """
        float d[4] = {};
        const unsigned int a[4] = {1, 2, 3, 4}, b[2] = {5, 6};
        hw::mma_m16n8k16<hw::float16>(d, a, b);
        hw::mma_m16n8k16<hw::bfloat16>(d, a, b);
        for (int i = 0; i < 4; i++) f[i] = d[i];
        """,
    ),
    "reduce": Family("reduce", 75, "hw::reduce_add(f, 1.0f);"),
    "reduce vectors": Family(
        "reduce",
        90,
        """
        float two[2] = {1.0f, 2.0f};
        const float four[4] = {1.0f, 2.0f, 3.0f, 4.0f};
        hw::reduce_add(f, two);
        hw::reduce_add(f, four);
        """,
    ),
    "tma": Family(
        "tma",
        90,
        """
        __shared__ __align__(1024) unsigned char x[1024];
        __shared__ hw::MBarrier b;
        using Hint = hw::CacheHint;
        if (threadIdx.x == 0) {
            hw::prefetch(map);
            hw::tma_load(x, map, b, 1);
            hw::tma_load(x, map, b, 1, 2);
            hw::tma_load<Hint::kNone>(x, map, b, 1, 2, 3);
            hw::tma_load<Hint::kEvictFirst>(x, map, b, 1, 2, 3, 4);
            hw::tma_load<Hint::kEvictLast>(x, map, b, n[0], 2, 3, 4, 5);
            hw::tma_store(map, x, 1);
            hw::tma_store(map, x, 1, 2);
            hw::tma_store(map, x, 1, 2, 3);
            hw::tma_store(map, x, 1, 2, 3, 4);
            hw::tma_store(map, x, 1, 2, 3, 4, n[0]);
            hw::tma_reduce_add(map, x, 1);
            hw::tma_reduce_add(map, x, 1, 2);
            hw::tma_reduce_add(map, x, 1, 2, 3);
            hw::tma_reduce_add(map, x, 1, 2, 3, 4);
            hw::tma_reduce_add(map, x, 1, 2, 3, 4, n[0]);
            hw::bulk_load(x, f, 512, b);
            hw::bulk_store(f, x, 512);
            hw::bulk_reduce_add(f, reinterpret_cast<float*>(x), 512);
            hw::bulk_commit();
            hw::bulk_wait_read<1>();
            hw::bulk_wait<0>();
        }
        """,
    ),
}

ALL = sorted({family.header for family in FAMILIES.values()} | {"wgmma"})


def text_of(headers: list[str], body: str, more: str = "") -> str:
    text = "".join(f'#include "hw/{header}.cuh"\n' for header in headers) + more
    tma = ", const __grid_constant__ hw::TensorMap map" if headers == ["tma"] else ""
    signature = f'extern "C" __global__ void __launch_bounds__(256, 1) use(float* f, int* n{tma})'
    return f"{text}{signature} {{{body}}}\n"


def compiled(text: str, where: str, suffix: str = "") -> compile.Usage:
    """Compile, without a warning."""
    image, log = compile.compile_cubin(text, Unit("use", suffix), ARCHITECTURES[where])  # type: ignore[arg-type]
    usage = compile.usage(log)
    assert image[:4] == b"\x7fELF" and usage.registers > 0, log
    assert not usage.warnings and "warning" not in log and "C75" not in log, log
    assert usage.spill_bytes == 0, log
    return usage


CASES = [
    pytest.param(family, where, id=f"{name}-{where}")
    for name, family in FAMILIES.items()
    for where in ARCHITECTURES
    if (where == f"sm_{family.since}" if family.suffix else int(where[3:]) >= family.since)
]


@pytest.mark.parametrize(("family", "where"), CASES)
def test_instructions_compile(family: Family, where: str) -> None:
    compiled(text_of([family.header], family.body), where, family.suffix)


@pytest.mark.parametrize("where", ARCHITECTURES)
def test_headers_do_no_harm_where_they_are_not_used(where: str) -> None:
    """A kernel for any architecture may include all of them."""
    compiled(text_of(ALL, "n[0] = 1;"), where)


def test_every_header_is_here() -> None:
    assert {path.stem for path in HW.glob("*.cuh")} == set(ALL)


def functions(header: Path) -> set[str]:
    """The functions that a header gives to kernels."""
    pattern = r"^__device__ __forceinline__ [\w:\s]+?[ &*](\w+)\("
    return set(re.findall(pattern, header.read_text(encoding="utf-8"), re.MULTILINE))


def test_every_function_is_used_here() -> None:
    everything = "".join(family.body for family in FAMILIES.values()) + WGMMA
    for path in sorted(HW.glob("*.cuh")):
        found = functions(path)
        assert found, path
        for name in found:
            assert re.search(rf"\b{name}\b", everything), f"{path.name}: {name}"


WGMMA = """
template <class T, int N, bool TransA, bool TransB>
__device__ __forceinline__ void products(float* f, const int* n) {
    __shared__ __align__(1024) unsigned char x[2048];
    const auto a = hw::wgmma_descriptor(x, 16, 1024, hw::Swizzle::k128);
    const auto b = hw::wgmma_descriptor(x, n[0], 512, hw::Swizzle::k64);
    float d[N / 2];
    unsigned int r[4];
    for (int i = 0; i < 4; i++) r[i] = n[i];
    hw::pin(r);
    hw::wgmma_fence();
    hw::wgmma<T, N, TransA, TransB>(d, a, b, false);
    hw::wgmma<T, N, TransB>(d, r, b, true);
    hw::wgmma_commit();
    hw::wgmma_wait<0>();
    hw::pin(d);
    hw::pin(r);
    for (int i = 0; i < N / 2; i++) f[128 * i + threadIdx.x] = d[i];
}
#define ENTRY(T, N, TransA, TransB, name)                                                  \\
    extern "C" __global__ void __launch_bounds__(128, 1) name(float* f, const int* n) {    \\
        products<hw::T, N, TransA, TransB>(f, n);                                          \\
    }
"""


@pytest.mark.parametrize("first", range(8, 257, 32))
def test_every_wgmma_compiles(first: int) -> None:
    text = '#include "hw/wgmma.cuh"\n#include "hw/sync.cuh"\n' + WGMMA
    for i, columns in enumerate(range(first, first + 32, 8)):
        # Types and orders take turns, so that each N has some, and each of them some N.
        dtype = ("float16", "bfloat16")[(i + first // 32) % 2]
        orders = ("false, false", "false, true", "true, false", "true, true")[i]
        text += f"ENTRY({dtype}, {columns}, {orders}, use{columns})\n"
    usage = compiled(text, "sm_90", "a")
    assert usage.registers >= (first + 24) // 2


@pytest.mark.parametrize(
    ("header", "body", "message"),
    [
        ("sync", "hw::registers_increase<250>();", "a multiple of 8"),
        ("cp_async", "hw::cp_async<2>(f, n, true);", "4, 8 or 16 bytes"),
        ("ldmatrix", "unsigned int r[3]; hw::ldmatrix(r, n);", "1, 2 or 4 matrices"),
        ("ldmatrix", "unsigned int r[3]; hw::stmatrix(n, r);", "1, 2 or 4 matrices"),
        ("mma", "float d[4]; unsigned a[4], b[2]; hw::mma_m16n8k16<float>(d, a, b);", "float"),
        ("wgmma", "float d[10]; hw::wgmma<hw::float16, 20>(d, 0, 0, true);", "8, 16, ..., 256"),
        ("wgmma", "hw::wgmma_wait<8>();", "0 to 7"),
    ],
)
def test_what_no_instruction_does_is_an_error(header: str, body: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(message)):
        compiled(text_of([header], body), "sm_90", "a")


def test_the_probe_compiles(tmp_path: Path) -> None:
    assert probe.compile_probe(tmp_path).stat().st_size > 0
