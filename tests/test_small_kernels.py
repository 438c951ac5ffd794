# SPDX-License-Identifier: Apache-2.0
"""Two small attention kernels, one by mma.sync and one by TMA and wgmma, on both back ends.

They use tensor cores and asynchronous copies through ``kernels/hw/`` only, and show what the
families of the library are made of.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
from conftest import Backend

from cuflash import compile, device, host, reference, source
from cuflash.plan import UnitPlan
from cuflash.tensormap import TensorMap

FOLDER = Path(__file__).parent / "small_kernels"
DIM = 64
SEEDS = range(7)
TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Small(UnitPlan):
    """A kernel of this folder."""

    file: ClassVar[str]
    queries: ClassVar[int]  # of a block

    def text(self, cpu: bool) -> str:
        """Return the translation unit."""
        lines = ['#include "host/cuda.h"'] if cpu else []
        lines += ['#include "hw/convert.cuh"', f"namespace plan {{ using T = hw::{self.dtype}; }}"]
        for name in ("softmax.cuh", f"{self.file}.cu"):
            text = (FOLDER / name).read_text(encoding="utf-8")
            lines.append(text.replace('#include "softmax.cuh"', "").replace("#pragma once", ""))
        if cpu:
            lines += [f"#define CUFLASH_KERNEL {self.file}", "#define CUFLASH_PARAMS Params"]
            lines.append('#include "host/entry.h"')
        return "\n".join(lines) + "\n"

    def params(self, backend: Backend, arrays: list[Any], seqlen: int, causal: bool) -> bytes:
        """Return the bytes of Params."""
        raise NotImplementedError


@dataclass(frozen=True)
class Mma(Small):
    kernel = file = "attention_mma"
    queries = 64
    smem_alignment = 1024

    @property
    def threads(self) -> int:
        return 128

    @property
    def smem_bytes(self) -> int:
        return 5 * 64 * DIM * 2

    def params(self, backend: Backend, arrays: list[Any], seqlen: int, causal: bool) -> bytes:
        scale = math.log2(math.e) / math.sqrt(DIM)
        return struct.pack("4Q2ifi", *map(address, arrays), seqlen, causal, scale, 0)


@dataclass(frozen=True)
class Wgmma(Small):
    kernel = file = "attention_wgmma"
    target_suffix = "a"
    queries = 128
    smem_alignment = 1024

    @property
    def threads(self) -> int:
        return 384

    @property
    def smem_bytes(self) -> int:
        return 5 * 128 * DIM * 2 + 1024  # the barriers, rounded up as the struct is

    def params(self, backend: Backend, arrays: list[Any], seqlen: int, causal: bool) -> bytes:
        maps = b""
        for x, rows in zip(arrays, (self.queries, 128, 128, 64), strict=True):
            heads, _, _ = x.shape
            strides = (DIM * 2, seqlen * DIM * 2)
            box = (DIM, rows, 1)
            map_ = TensorMap(address(x), self.dtype, (DIM, seqlen, heads), strides, box, 128)
            maps += map_.encode_cpu() if backend.name == "cpu" else map_.encode_gpu()
        scale = math.log2(math.e) / math.sqrt(DIM)
        return maps + struct.pack("2if52x", seqlen, causal, scale)


KERNELS = (Mma, Wgmma)


def address(x: Any) -> int:
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr


# --- Building and launching ----------------------------------------------------------------------


@functools.cache
def runtime() -> host.Runtime:
    return compile._runtime()


@pytest.fixture(scope="session")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Kernels for the CPU, compiled once."""
    folder = tmp_path_factory.mktemp("small")
    includes = [source.KERNEL_ROOT / name for name in source.HOST_INCLUDES]

    @functools.cache
    def kernel(plan: Small) -> host.HostKernel:
        path = folder / f"{plan.file}-{plan.dtype}.so"
        text = plan.text(cpu=True)
        host.compile_library(host.find_compiler(), text, includes, path, kernel=True)
        return host.HostKernel(runtime(), path, plan.file)

    return kernel


class OnGpu:
    """Kernels on the current GPU."""

    def __init__(self) -> None:
        self._kernels: dict[Small, Any] = {}

    def __call__(self, plan: Small, folder: Path) -> Any:
        import cupy

        if plan not in self._kernels:
            image, log = compile.compile_cubin(plan.text(cpu=False), plan, device.gpu(0))
            assert compile.usage(log).spill_bytes == 0, log
            path = folder / f"{plan.file}-{plan.dtype}.cubin"
            path.write_bytes(image)
            function = cupy.RawModule(path=str(path)).get_function(plan.kernel)
            function.max_dynamic_shared_size_bytes = plan.smem_bytes
            self._kernels[plan] = function
        return self._kernels[plan].kernel.ptr


on_gpu = OnGpu()


def run(
    backend: Backend,
    on_cpu: Any,
    folder: Path,
    plan: Small,
    inputs: list[np.ndarray],
    causal: bool,
    seed: int = 0,
) -> np.ndarray:
    """Return what a kernel makes of q, k and v of shape (heads, seqlen, 64)."""
    heads, seqlen, _ = inputs[0].shape
    arrays = [backend.array(x) for x in (*inputs, np.zeros_like(inputs[0]))]
    params = plan.params(backend, arrays, seqlen, causal)
    blocks = heads * -(-seqlen // plan.queries)
    if backend.name == "cpu":
        buffers = [
            (name, address(x), address(x) + x.nbytes, name == "out")
            for name, x in zip(("q", "k", "v", "out"), arrays, strict=True)
        ]
        kernel = on_cpu(plan)
        alignment = plan.smem_alignment
        size = plan.threads, plan.smem_bytes
        kernel.launch(blocks, *size, params, buffers, seed, smem_alignment=alignment)
        return arrays[3]
    import cupy

    # A tensor map must lie at a multiple of 64 bytes, also among the parameters.
    room = ctypes.create_string_buffer(len(params) + 64)
    start = -ctypes.addressof(room) % 64
    ctypes.memmove(ctypes.addressof(room) + start, params, len(params))
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(room) + start)
    stream = cupy.cuda.get_current_stream()
    function = on_gpu(plan, folder)
    shape = (blocks, 1, 1, plan.threads, 1, 1)
    launch = cupy.cuda.driver.launchKernel
    launch(function, *shape, plan.smem_bytes, stream.ptr, ctypes.addressof(pointers), 0)
    stream.synchronize()
    return backend.host(arrays[3])


def example(heads: int, seqlen: int, dtype: str, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal((heads, seqlen, DIM)).astype(TYPES[dtype]) for _ in range(3)]


def expected(inputs: list[np.ndarray], causal: bool) -> np.ndarray:
    q, k, v = (x.astype(np.float64)[None] for x in inputs)
    return reference.attention(q, k, v, causal=causal, layout="bhsd")[0]


def check(result: np.ndarray, inputs: list[np.ndarray], causal: bool, dtype: str) -> None:
    want = expected(inputs, causal)
    unit = 2.0**-11 if dtype == "float16" else 2.0**-8
    # Probabilities and the result are rounded once each; values are up to about 4.
    np.testing.assert_allclose(result.astype(np.float64), want, rtol=0, atol=6 * unit)


# --- Tests ---------------------------------------------------------------------------------------


def plans() -> Iterator[Small]:
    for kind in KERNELS:
        for dtype in TYPES:
            yield kind(dtype)


@pytest.fixture(params=list(plans()), ids=lambda plan: f"{plan.file}-{plan.dtype}")
def plan(request: pytest.FixtureRequest, backend: Backend) -> Small:
    plan = request.param
    if backend.name == "gpu":
        have = device.gpu(0).capability
        if (plan.target_suffix and have != (9, 0)) or have < (8, 0):
            pytest.skip(f"needs sm_90: this is sm_{have[0]}{have[1]}")
    return plan


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [1, 63, 64, 129, 300])
def test_agrees_with_the_reference(
    backend: Backend, on_cpu: Any, tmp_path: Path, plan: Small, seqlen: int, causal: bool
) -> None:
    inputs = example(2, seqlen, plan.dtype)
    for seed in SEEDS if backend.name == "cpu" else (0,):
        result = run(backend, on_cpu, tmp_path, plan, inputs, causal, seed)
        check(result, inputs, causal, plan.dtype)


def test_long(backend: Backend, on_cpu: Any, tmp_path: Path, plan: Small) -> None:
    """Many tiles: every stage is used again and again, and each parity comes several times."""
    inputs = example(1 if backend.name == "cpu" else 8, 1100, plan.dtype)
    check(run(backend, on_cpu, tmp_path, plan, inputs, True, 3), inputs, True, plan.dtype)


def test_speed_on_the_cpu(backend: Backend, on_cpu: Any, tmp_path: Path) -> None:
    """Quick enough to be fuzzed: printed, and held to loose limits, for machines differ."""
    if backend.name != "cpu":
        pytest.skip("about the CPU back end")
    plan = Wgmma("bfloat16")
    includes = [source.KERNEL_ROOT / name for name in source.HOST_INCLUDES]
    begin = time.perf_counter()
    compiler = host.find_compiler()
    host.compile_library(compiler, plan.text(cpu=True), includes, tmp_path / "x.so", kernel=True)
    compiled = time.perf_counter() - begin
    inputs = example(1, 300, plan.dtype)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        run(backend, on_cpu, tmp_path, plan, inputs, False)
        times.append(time.perf_counter() - begin)
    print(f"\nwgmma, S 300: {1e3 * min(times):.1f} ms; compiled in {compiled:.2f} s")
    assert min(times) < 0.3
    assert compiled < 10


def test_report_of_the_documentation(tmp_path: Path) -> None:
    """The page about the CPU back end shows what is really said."""
    plan = Wgmma("bfloat16")
    load = "hw::tma_load(smem.k[stage], p.k,"
    text = plan.text(cpu=True)
    assert load in text
    includes = [source.KERNEL_ROOT / name for name in source.HOST_INCLUDES]
    path = tmp_path / "forgetful.so"
    forgetful = text.replace(load, f"if (tile != 1) {load}")
    host.compile_library(host.find_compiler(), forgetful, includes, path, kernel=True)
    kernel = host.HostKernel(runtime(), path, plan.file)
    with pytest.raises(host.KernelFault) as caught:
        run(
            Backend("cpu", np),
            lambda _: kernel,
            tmp_path,
            plan,
            example(1, 128 + 1, plan.dtype),
            True,
        )
    report = re.sub(r"\w+\.c\w+:\d+", "FILE:LINE", str(caught.value))
    page = (FOLDER.parent.parent / "docs" / "cpu-backend.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```\n(kernel attention_wgmma.*?)```", page, re.DOTALL)
    shown = re.sub(r"\w+\.c\w+:\d+", "FILE:LINE", " ".join(shown.split()))
    assert report == shown


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0)], ids=str)
def test_compiles_without_spills(capability: tuple[int, int]) -> None:
    for plan in plans():
        if plan.target_suffix and capability != (9, 0):
            continue
        _, log = compile.compile_cubin(plan.text(False), plan, device.architecture(*capability))
        usage = compile.usage(log)
        assert usage.spill_bytes == usage.stack_bytes == 0 and not usage.warnings, log
