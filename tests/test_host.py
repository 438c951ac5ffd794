# SPDX-License-Identifier: Apache-2.0
"""The executor of the CPU back end: right kernels are run right, wrong ones are reported."""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from builder import KERNELS, ROOT, Builder, buffers, kernel_text, needs_zig

from cuflash import host

SEEDS = range(7)


# --- right kernels -------------------------------------------------------------------------------


def reduce(kernel: host.HostKernel, n: int, seed: int = 0, threads: int = 256) -> None:
    x = np.arange(n, dtype=np.float32)
    blocks = -(-n // threads)
    out = np.full(blocks, -1, np.float32)
    params = struct.pack("PPi4x", x.ctypes.data, out.ctypes.data, n)
    kernel.launch(blocks, threads, threads // 8, params, buffers(x=x, out=out), seed)
    expected = [x[i * threads : (i + 1) * threads].sum() for i in range(blocks)]
    np.testing.assert_array_equal(out, expected)


def plan_of_reduce(threads: int = 256, forget: bool = False) -> str:
    flag = str(forget).lower()
    return f"constexpr int kThreads = {threads}; constexpr bool kForgetBarrier = {flag};"


@pytest.mark.parametrize("threads", [32, 256, 1024])
def test_reduction(build: Builder, threads: int) -> None:
    kernel = build.kernel("reduce", plan_of_reduce(threads))
    for seed in SEEDS:
        reduce(kernel, 3 * threads + 5, seed, threads)


def transpose(build: Builder, barriers: int, seed: int) -> bool:
    """Whether the result is right."""
    tile, n = 16, 64
    x = np.random.default_rng(seed).normal(size=(n, n))
    out = np.zeros_like(x)
    kernel = build.kernel("transpose", f"constexpr int kTile = {tile}, kBarriers = {barriers};")
    params = struct.pack("PPi4x", x.ctypes.data, out.ctypes.data, n)
    smem_bytes = tile * (tile + 1) * 8
    kernel.launch(n // tile, tile * tile // 2, smem_bytes, params, buffers(x=x, out=out), seed)
    return np.array_equal(out, x.T)


def test_transposition(build: Builder) -> None:
    assert all(transpose(build, 2, seed) for seed in SEEDS)


def draw_tickets(build: Builder, seed: int, grid: int = 3, block: int = 64) -> np.ndarray:
    threads = grid * block
    order = np.full(2 * threads, -1, np.int32)
    count = np.zeros(1, np.uint32)
    sums = np.zeros(2, np.float32)
    total = np.zeros(1, np.float64)
    wide = np.zeros(1, np.uint64)
    extremes = np.array([-5, 5, 0], np.int32)
    arrays = dict(order=order, count=count, sums=sums, sum=total, wide=wide, extremes=extremes)
    params = struct.pack("6P", *(array.ctypes.data for array in arrays.values()))
    kernel = build.kernel("tickets")
    kernel.launch(grid, block, 4, params, buffers(writable=" ".join(arrays), **arrays), seed)
    assert sorted(order) == sorted([*range(threads)] * 2)
    assert count[0] == 2 * threads and sums.tolist() == [threads, threads]
    assert total[0] == threads / 2 and wide[0] == threads << 32
    assert extremes.tolist() == [threads - 1, 0, grid]
    return order


def test_seed_is_the_schedule(build: Builder) -> None:
    orders = {}
    for seed in [*SEEDS, 2**64 - 1]:
        orders[seed] = draw_tickets(build, seed)
        np.testing.assert_array_equal(orders[seed], draw_tickets(build, seed))
    assert len({order.tobytes() for order in orders.values()}) == len(orders)
    in_turn = [thread for block in range(3) for _ in range(2) for thread in range(64)]
    np.testing.assert_array_equal(orders[0], [t + 64 * (i // 128) for i, t in enumerate(in_turn)])


@pytest.mark.parametrize("threads", [64, 72])
def test_lanes(build: Builder, threads: int) -> None:
    kernel = build.kernel("lanes")
    x = np.random.default_rng(1).integers(0, 100, threads)
    thread = np.arange(threads)
    lane, odd, warps = thread % 32, x % 2, thread // 32

    def read(source: np.ndarray, first: object = 0, last: object = 31) -> np.ndarray:
        source = np.where((source < first) | (source > last), lane, source) + 32 * warps
        return np.where(source < threads, x[np.minimum(source, threads - 1)], -1)

    ballot = [sum(int(odd[t]) << t % 32 for t in thread[warps == w]) for w in warps]
    even = [odd[(warps == w) & (lane % 2 == 0)] for w in warps]
    own_or_next = read(lane + (lane == 2))
    own_or_next[lane == 2] = -1
    down = read(lane + 2).astype(np.float32).view(np.int32)
    down[(lane + 2 < 32) & (thread + 2 >= threads)] = -1
    ffs = np.array([(int(v) & -int(v)).bit_length() for v in x])
    expected = [
        read(lane // 8 * 8 + x % 8),
        read(lane ^ 5),
        read(lane ^ 12, 0, lane // 8 * 8 + 7),
        read(lane - 3, lane // 16 * 16),
        read(lane + 3, 0, lane // 16 * 16 + 15),
        ballot,
        np.where(lane % 2, 0, [e.any() + 2 * e.all() for e in even]),
        np.where(lane % 2, 0, own_or_next),
        np.where(lane % 2, 0, down),
        odd.sum() + 0 * x,
        odd[40] + 2 * (x > 0).all() + 0 * x,
        np.bitwise_count(x) + 100 * ffs + 10000 * np.array([32 - int(v).bit_length() for v in x]),
        np.minimum(x, 50) + np.maximum(thread, 10),
        thread
        + sum(
            (x * 0x01030201 >> 8 * i & 255) * weight for i, weight in enumerate((1, 32, 64, 128))
        ),
    ]
    for seed in SEEDS:
        out = np.zeros((len(expected), threads), np.int64)
        params = struct.pack("PP", x.ctypes.data, out.ctypes.data)
        kernel.launch(1, threads, 0, params, buffers(x=x, out=out), seed)
        for i, row in enumerate(expected):
            np.testing.assert_array_equal(out[i], row, err_msg=f"result {i}")


@pytest.mark.parametrize(("name", "dtype"), [
    ("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16),
])  # fmt: skip
def test_conversions(build: Builder, name: str, dtype: type) -> None:
    # Every 16-bit number; the midpoints to their neighbours and the floats beside those; every
    # exponent with many fractions.
    values = np.arange(2**16, dtype=np.uint16).view(dtype)
    wide = values.astype(np.float32)
    with np.errstate(all="ignore"):
        middle = ((wide[:-1].astype(np.float64) + wide[1:]) / 2).astype(np.float32)
    beside = [np.nextafter(middle, np.float32(side)) for side in (-np.inf, np.inf)]
    rng = np.random.default_rng(0)
    fractions = np.concatenate([rng.integers(0, 2**23, 500), [0, 1, 2**22, 2**23 - 1]])
    bits = np.arange(512, dtype=np.uint32)[:, None] << 23 | fractions.astype(np.uint32)
    x = np.concatenate([wide, middle, *beside, bits.ravel().view(np.float32)])
    x = np.resize(x, -(-x.size // 4) * 4)
    x = np.concatenate([x, x[:4]])  # aligned below
    x = x[(-x.ctypes.data // 4) % 4 :][: x.size - 4]

    narrow, back = np.zeros(x.size + 8, dtype), np.zeros(x.size + 4, np.float32)
    narrow = narrow[(-narrow.ctypes.data // 2) % 4 :][: x.size]
    back = back[(-back.ctypes.data // 4) % 4 :][: x.size]
    kernel = build.kernel("convert", f"using Element = hw::{name};")
    arrays = buffers(x=x, narrow=narrow, wide=back, writable="narrow wide")
    params = struct.pack("PPPi4x", *(low for _, low, _, _ in arrays), x.size)
    kernel.launch(4, 64, 0, params, arrays)

    with np.errstate(all="ignore"):
        expected = x.astype(dtype)
    number = ~np.isnan(x)
    np.testing.assert_array_equal(narrow.view(np.uint16)[~number], 0x7FFF)
    np.testing.assert_array_equal(narrow.view(np.uint16)[number], expected.view(np.uint16)[number])
    np.testing.assert_array_equal(
        back.view(np.uint32)[number], expected.astype(np.float32).view(np.uint32)[number]
    )
    assert np.isnan(back[~number]).all()


def test_switch_through_ucontext(build: Builder) -> None:
    runtime = build.runtime(text="#define CUFLASH_UCONTEXT\n")
    kernel = build.kernel("reduce", plan_of_reduce(), runtime=runtime)
    for seed in range(3):
        reduce(kernel, 1000, seed)
    with pytest.raises(host.KernelFault, match="stack overflow"):
        fault(build, 14, runtime=runtime)
    reduce(kernel, 1000)


@needs_zig
def test_zig(build: Builder) -> None:
    zig = host.probe((sys.executable, "-m", "ziglang", "c++"))
    runtime = build.runtime(zig)
    for seed in range(3):
        reduce(build.kernel("reduce", plan_of_reduce(), zig, runtime), 1000, seed)
    for number in (10, 11, 14, 15, 20):
        check_report(build, number, 0, zig, runtime)


# --- wrong kernels -------------------------------------------------------------------------------


def test_missing_barrier_shows(build: Builder) -> None:
    kernel = build.kernel("reduce", plan_of_reduce(forget=True))
    wrong = 0
    for seed in SEEDS:
        try:
            reduce(kernel, 1000, seed)
        except AssertionError:
            wrong += 1
    assert wrong >= 3


@pytest.mark.parametrize("barriers", [0, 1])
def test_missing_barrier_of_a_tile_shows(build: Builder, barriers: int) -> None:
    assert not all(transpose(build, barriers, seed) for seed in SEEDS)


def line_of(comment: str) -> int:
    lines = (KERNELS / "faults.cu").read_text(encoding="utf-8").splitlines()
    (line,) = (i for i, text in enumerate(lines, 1) if text.endswith(f"// {comment}"))
    return line


def fault(
    build: Builder,
    number: int,
    seed: int = 0,
    smem_bytes: int = 512,
    compiler: host.Compiler | None = None,
    runtime: host.Runtime | None = None,
) -> np.ndarray:
    """Launch tests/host_kernels/faults.cu with a fault, 0 being none."""
    threads = 128
    # Apart from each other, so that one element outside of an array is outside of all.
    memory = np.zeros((2, 1024), np.float32)
    x, out = memory[0, :threads], memory[1, :threads]
    kernel = build.kernel("faults", compiler=compiler, runtime=runtime)
    params = struct.pack("PPii", x.ctypes.data, out.ctypes.data, threads, number)
    kernel.launch(2, threads, smem_bytes, params, buffers(x=x, out=out), seed)
    return out


FAULTS = {
    1: ("divergent barriers: threads 0-31 wait at __syncthreads, faults.cu:{divergent: one side}; "
        "threads 32-127 wait at __syncthreads, faults.cu:{divergent: other side}"),
    2: ("cannot go on: threads 0-63 wait at __syncthreads, faults.cu:{early return}; "
        "threads 64-127 have returned"),
    3: "__shfl_xor_sync, faults.cu:{wrong mask}: mask 0xffffff0f lacks the calling lane *",
    4: ("cannot go on: threads 0-15 wait at __shfl_xor_sync (mask 0xffffffff, lanes 16-31 missing),"
        " faults.cu:{missing lanes}; threads 16-127 wait at __syncthreads, "
        "faults.cu:{missing lanes: the rest}"),
    5: ("thread 70 (*hw::load of 4 bytes at *, faults.cu:{read past}, is out of bounds; "
        "nearest array: x (512 bytes from *): reaches 4 bytes past its end"),
    6: ("thread 70 (*hw::load of 4 bytes at *, faults.cu:{read before}, is out of bounds; "
        "nearest array: x (512 bytes from *): begins 4 bytes before it"),
    7: ("thread 70 (*hw::store of 4 bytes at *, faults.cu:{write past}, is out of bounds; "
        "nearest array: out (512 bytes from *): reaches 4 bytes past its end"),
    8: "hw::store of 4 bytes at *, faults.cu:{read-only}, writes to x, which is read-only",
    9: "hw::load of 8 bytes at *, faults.cu:{misaligned}, is misaligned: not a multiple of 8",
    10: "thread 70 (*index out of the bounds of an array*, faults.cu:{inner index}",
    11: "thread 70 (*index out of the bounds of an array*, faults.cu:{last index}",
    12: "access 12 bytes past the end of dynamic shared memory (512 bytes), faults.cu:{shared end}",
    13: "access 51200 bytes before dynamic shared memory, faults.cu:{shared begin}",
    14: "stack overflow: each thread has * bytes of stack, faults.cu:*",
    15: "stack overflow: each thread has * bytes of stack, *",  # clang gives the probe no line
    16: "access to address 0x200, which is not accessible; *, faults.cu:{plain pointer}",
    17: "integer division by zero or overflow, faults.cu:{division}",
    18: ("atomicAdd of 4 bytes at *, faults.cu:{atomic past}, is out of bounds; "
         "nearest array: out (512 bytes from *): reaches 4 bytes past its end"),
    19: "is out of bounds; nearest array: *",
    20: "misaligned access to shared memory, faults.cu:{vector}",
}  # fmt: skip


def check_report(
    build: Builder,
    number: int,
    seed: int,
    compiler: host.Compiler | None = None,
    runtime: host.Runtime | None = None,
) -> None:
    with pytest.raises(host.KernelFault) as caught:
        fault(build, number, seed, compiler=compiler, runtime=runtime)
    text = str(caught.value)
    assert re.match(rf"kernel faults, block [01] of 2[^:]* \(seed {seed}\): ", text)
    expected = re.sub(r"\{(.*?)\}", lambda m: str(line_of(m[1])), FAULTS[number])
    pattern = ".*".join(re.escape(part) for part in expected.split("*"))
    assert re.search(pattern, text), text
    out = fault(build, 0, seed, compiler=compiler, runtime=runtime)
    assert out.tolist() == list(range(128))


@pytest.mark.parametrize("number", FAULTS)
def test_fault_is_reported(build: Builder, number: int) -> None:
    for seed in range(3):
        check_report(build, number, seed)


def test_a_report_without_lines_says_what_finds_them(
    build: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(build, 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(host.KernelFault) as caught:
        fault(build, 17)
    assert re.search(r"overflow, \w+\.so\+0x[0-9a-f]+ \(addr2line, of the .*\)$", str(caught.value))


def test_shared_memory_too_small(build: Builder) -> None:
    with pytest.raises(host.KernelFault, match=r"needs 512 bytes .* the launch has 508"):
        fault(build, 0, smem_bytes=508)


def test_endless_loop(build: Builder) -> None:
    runtime = build.runtime(text="#define CUFLASH_SPIN_LIMIT 100000\n")
    expected = (
        f"threads only wait for each other's writes: threads 0-95 spin at atomicAdd, "
        f"faults.cu:{line_of('spin')}; threads 96-127 wait at __syncthreads, "
        f"faults.cu:{line_of('spin: the rest')}"
    )
    for seed in range(3):
        with pytest.raises(host.KernelFault, match=expected):
            fault(build, 21, seed, runtime=runtime)


def test_write_beside_shared_memory(build: Builder) -> None:
    """Below the alignment, where no page ends, it shows when the block has ended."""
    with pytest.raises(
        host.KernelFault, match=r"wrote outside dynamic shared memory \(600 bytes\)"
    ):
        fault(build, 22, smem_bytes=600)


def test_report_is_cut_to_its_buffer(build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_REPORT_BYTES", 60)
    with pytest.raises(host.KernelFault) as caught:
        fault(build, 1)
    assert len(str(caught.value)) == 59


def test_arguments_are_checked(build: Builder) -> None:
    kernel = build.kernel("reduce", plan_of_reduce())
    good = dict(grid=1, block=32, smem_bytes=32, params=bytes(24), buffers=[])
    for name, value in [
        ("grid", 0), ("grid", -1), ("block", 0), ("block", 1025), ("smem_bytes", -1),
        ("params", bytes(23)), ("seed", -1), ("seed", 2**64),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name}"):
            kernel.launch(**{**good, name: value})


# --- the process around ---------------------------------------------------------------------------


def test_threads_launch_at_once(build: Builder) -> None:
    """Two that compute and one that faults, in turns that the system chooses."""
    kernel = build.kernel("reduce", plan_of_reduce())
    build.kernel("faults")
    errors = []
    start = threading.Barrier(3)

    def run(action: object) -> None:
        try:
            start.wait()
            for seed in range(40):
                action(seed)
        except BaseException as error:
            errors.append(error)

    def compute(seed: int) -> None:
        reduce(kernel, 5000, seed)

    def fail(seed: int) -> None:
        with pytest.raises(host.KernelFault):
            fault(build, (12, 10, 4)[seed % 3], seed)

    workers = [threading.Thread(target=run, args=(a,)) for a in (compute, compute, fail)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not errors


def test_other_faults_stay_fatal(build: Builder) -> None:
    """After a launch, a fault elsewhere goes to the handler that was there before."""
    runtime = build.library(host.find_compiler(), '#include "host/executor.cpp"\n', False)
    kernel = build.library(host.find_compiler(), kernel_text("faults"), True)
    script = f"""
import ctypes, faulthandler, sys
sys.path.insert(0, {str(ROOT)!r})
from cuflash import host
faulthandler.enable()
kernel = host.HostKernel(host.Runtime({str(runtime)!r}), {str(kernel)!r}, "faults")
try:
    kernel.launch(1, 1, 512, b"\\0" * 20 + b"\\x10\\0\\0\\0", [])
except host.KernelFault as error:
    print(error, flush=True)
ctypes.string_at(1)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "access to address 0x0" in result.stdout
    assert "Fatal Python error: Segmentation fault" in result.stderr
    assert result.returncode < 0


def test_signal_handlers_are_put_back(build: Builder) -> None:
    sigaction = ctypes.CDLL(None).sigaction

    def handler() -> bytes:
        state = ctypes.create_string_buffer(256)
        assert sigaction(11, None, state) == 0
        return state.raw[:8]

    before = handler()
    fault(build, 0)
    with pytest.raises(host.KernelFault):
        fault(build, 12)
    assert handler() == before


# --- compilers -----------------------------------------------------------------------------------


@pytest.fixture
def fresh_search() -> object:
    host.find_compiler.cache_clear()
    yield
    host.find_compiler.cache_clear()


def program(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.usefixtures("fresh_search")
def test_compiler_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = " ".join(host.find_compiler().command)
    host.find_compiler.cache_clear()
    wrapper = program(tmp_path, "my cxx", f'shift\nexec {real} "$@"')
    monkeypatch.setenv("CXX", f"'{wrapper}' --wrapped")
    assert host.find_compiler().command == (str(wrapper), "--wrapped")


@pytest.mark.usefixtures("fresh_search")
@pytest.mark.parametrize("value", ["/does/not/exist", "false", "'unbalanced"])
def test_broken_choice_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CXX", value)
    with pytest.raises(RuntimeError, match=r"^the C\+\+ compiler that \$CXX names does not work: "):
        host.find_compiler()


@pytest.mark.usefixtures("fresh_search")
def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "g++", "exit 1")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(host, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="pip install ziglang"):
        host.find_compiler()


def test_compiler_messages_are_passed_on(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no_such_name"):
        host.compile_library(
            host.find_compiler(),
            "int f() { return no_such_name; }",
            (),
            tmp_path / "x.so",
            kernel=True,
        )
    assert not list(tmp_path.iterdir())
