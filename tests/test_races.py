# SPDX-License-Identifier: Apache-2.0
"""The instrumented build: races are found in every schedule, and right kernels are silent."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from builder import KERNELS, Builder, aligned, buffers, kernel_text, pack

import cuflash
from cuflash import host

needs_zig = pytest.mark.skipif(not find_spec("ziglang"), reason="the package ziglang is missing")

SEEDS = range(7)
WAYS = (
    "reduction", "transposition", "warps", "named", "bulk loads", "double buffer", "product",
    "in turn", "last block", "blocks", "bulk stores", "atomics", "bytes", "library",
    "flag", "mistakes",
)  # fmt: skip
#: What a bug is reported as, with the names of lines in braces; two: a race between them.
BUGS = {
    ("reduction", 1): ("{write}", "{read}"),
    ("transposition", 1): ("{write}", "{read}"),
    ("transposition", 2): ("{write}", "{read}"),
    ("warps", 1): ("{write}", "{read}"),
    ("named", 1): ("{write}", "{read}"),
    ("named", 2): ("{write}", "{read}"),
    ("bulk loads", 1): ("{write}", "{read}"),
    ("bulk loads", 2): ("{write}", "{read}"),
    ("bulk loads", 3): ("{write}", "{read}"),
    ("bulk loads", 4): ("mbarrier_wait, ", "{wait}"),
    ("double buffer", 1): ("{copy}", "{read}"),
    ("double buffer", 2): ("{copy}", "{read}"),
    ("double buffer", 3): ("{copy}", "{read}"),
    ("product", 1): ("{write}", "{read}"),
    ("product", 2): ("without fence_proxy_async", "{write}", "{read}"),
    ("product", 3): ("{early}", "{read}"),
    ("product", 4): ("{write}", "{read}"),
    ("in turn", 1): ("{write}", "{read}"),
    ("in turn", 2): ("{write}", "{read}"),
    ("in turn", 3): ("{write}", "{read}"),
    ("last block", 1): ("{write}", "{read}"),
    ("last block", 2): ("{write}", "{read}"),
    ("blocks", 1): ("{blocks}", "{blocks}"),
    ("bulk stores", 1): ("{fill}", "{copy}"),
    ("bulk stores", 2): ("{copy}", "{copy}"),
    ("bulk stores", 3): ("{global}", "{copy}"),
    ("atomics", 1): ("{add}", "{write}"),
    ("atomics", 2): ("{add}", "{read}"),
    ("bytes", 1): ("{one}", "{two}"),
    ("library", 1): ("{set}", "{copy}"),
    ("library", 2): ("{copy}", "{move}"),
    ("flag", 1): ("{write}", "{write}"),
    ("flag", 2): ("{write}", "{read}"),
    ("flag", 3): ("{write}", "{read}"),
    ("mistakes", 1): ("which nobody wrote since the block began", "{unwritten}"),
    ("mistakes", 2): ("access to the stack of thread 0", "{stack}"),
    ("mistakes", 3): ("access 0 bytes past the end of dynamic shared memory", "{shared}"),
    ("mistakes", 4): ("out (16384 bytes from", "reaches 4 bytes past its end", "{global}"),
    ("mistakes", 5): ("write to x, which is read-only", "{read-only}"),
    ("mistakes", 6): ("in the kernel's library or parameters, which are read-only", "{table}"),
}  # fmt: skip
SMEM_BYTES = 3 * 4096


def line_of(way: str, name: str) -> str:
    comment = f"// {way}" if name == way else f"// {way}: {name}"
    lines = (KERNELS / "races.cu").read_text(encoding="utf-8").splitlines()
    (line,) = (i for i, text in enumerate(lines, 1) if text.endswith(comment))
    return f"races.cu:{line}"


def run(kernel: host.HostKernel, way: str, bug: int, seed: int, grid: int = 3) -> np.ndarray:
    memory = np.zeros((3, 8192), np.float32)
    memory = memory[:, (-memory.ctypes.data // 4) % 32 :][:, :4096]
    x, out = memory[0], memory[1]
    x[:] = np.arange(4096)
    counter = np.zeros(64, np.int32)
    arrays = buffers(writable="out counter", x=x, out=out, counter=counter)
    params = struct.pack("PPPii", *(low for _, low, _, _ in arrays), WAYS.index(way), bug)
    kernel.launch(grid, 128, SMEM_BYTES, params, arrays, seed, smem_alignment=1024, in_order=True)
    return out


@pytest.fixture(scope="module")
def kernel(build: Builder) -> host.HostKernel:
    return build.kernel("races", instrumented=True)


@pytest.mark.parametrize("way", WAYS)
def test_right_kernels_are_silent(kernel: host.HostKernel, way: str) -> None:
    for seed in SEEDS:
        run(kernel, way, 0, seed)


def check(kernel: host.HostKernel, way: str, bug: int, seed: int) -> None:
    with pytest.raises(host.KernelFault) as caught:
        run(kernel, way, bug, seed)
    text = str(caught.value)
    expected = BUGS[way, bug]
    if len(expected) == 2 and expected[0].startswith("{"):
        assert re.search(r"race in (shared|global) memory: .*, not ordered after ", text), text
    lines = [line_of(way, part[1:-1]) for part in expected if part.startswith("{")]
    assert all(part in text for part in expected if not part.startswith("{")), text
    for line in set(lines):
        assert len(re.findall(rf"{re.escape(line)}\b", text)) == lines.count(line), text


@pytest.mark.parametrize(("way", "bug"), BUGS)
def test_bugs_are_reported(kernel: host.HostKernel, way: str, bug: int) -> None:
    for seed in SEEDS:
        check(kernel, way, bug, seed)


@needs_zig
def test_zig(build: Builder) -> None:
    zig = host.probe((sys.executable, "-m", "ziglang", "c++"))
    kernel = build.kernel("races", compiler=zig, instrumented=True)
    for way in WAYS:
        run(kernel, way, 0, 3)
    bugs = [("transposition", 2), ("double buffer", 1), ("product", 2), ("library", 2)]
    for bug in [*bugs, ("mistakes", 5), ("mistakes", 6)]:
        check(kernel, *bug, 3)


def test_too_many_blocks(kernel: host.HostKernel) -> None:
    with pytest.raises(host.KernelFault, match="a grid of 8388609 blocks is too large to look for"):
        run(kernel, "flag", 0, 0, grid=2**23 + 1)


def test_too_many_addresses(build: Builder) -> None:
    runtime = build.runtime(text="#define CUFLASH_MAX_SIGNALS 4\n")
    kernel = build.kernel("steps", runtime=runtime, instrumented=True)
    for count in (3, 4):
        program = Program(np.random.default_rng(0))
        for semaphore in range(count):
            program.add(0, semaphore, ADD, semaphore)
        if count == 3:
            program.run(kernel, 0)
        else:
            with pytest.raises(host.KernelFault, match=r"semaphore_add, .* more than 3 addresses"):
                program.run(kernel, 0)
    runtime = build.runtime(text="#define CUFLASH_MAX_SIGNALS 2\n")
    kernel = build.kernel("races", runtime=runtime, instrumented=True)
    run(kernel, "flag", 0, 0)
    with pytest.raises(host.KernelFault, match=r"atomic\w+, .* more than 1 addresses"):
        run(kernel, "flag", 0, 1)


def test_libraries_stay_apart(build: Builder) -> None:
    """Neither library leaves a symbol of the other, or of the sanitizer, to the loader."""
    for text, kernel in [(kernel_text("races"), True), ('#include "host/executor.cpp"\n', False)]:
        library = build.library(host.find_compiler(), text, kernel, instrumented=kernel)
        names = subprocess.run(
            ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
        ).stdout
        assert "memcpy" in names and "tsan" not in names and "cuflash" not in names


# --- The kernels that are shipped ----------------------------------------------------------------

CALLS = {
    "float32": dict(dtype=np.float32),
    "two tiles, one head of keys": dict(heads_kv=1, seqlen_q=70, seqlen_k=130),
    "odd sizes": dict(head_dim=19, seqlen_k=41, window=(8, 3)),
    "float16, causal, bias": dict(dtype=np.float16, causal=True, bias=True, sinks=True),
}


def attend(seed: str, monkeypatch: pytest.MonkeyPatch, **call: Any) -> None:
    """Run forward and backward on the CPU, and merge parts of the keys."""
    monkeypatch.setenv("CUFLASH_HOST_SEED", seed)
    random = np.random.default_rng(0)
    heads, heads_kv, dim = 2, call.pop("heads_kv", 2), call.pop("head_dim", 32)
    seqlen_q, seqlen_k = call.pop("seqlen_q", 33), call.pop("seqlen_k", 65)
    dtype = call.pop("dtype", np.float32)

    def array(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype(dtype)

    q, grad = array(1, seqlen_q, heads, dim), array(1, seqlen_q, heads, dim)
    k, v = array(1, seqlen_k, heads_kv, dim), array(1, seqlen_k, heads_kv, dim)
    if call.pop("bias", False):
        call["bias"] = array(1, heads, seqlen_q, seqlen_k)
    if call.pop("sinks", False):
        call["sinks"] = array(heads).astype(np.float32)
    out, lse = cuflash.attention(q, k, v, return_lse=True, **call)
    wrt = ["q", "k", "v", *(name for name in ("bias", "sinks") if name in call)]
    cuflash.attention_backward(grad, q, k, v, out, lse, wrt=wrt, **call)
    cuflash.merge_states([out, out], [lse, lse])


@pytest.mark.parametrize("name", CALLS)
def test_shipped_kernels_are_silent(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUFLASH_HOST_RACES", "1")
    for seed in "014":
        attend(seed, monkeypatch, **CALLS[name])


def test_switched_on_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = []
    launch = host.HostKernel.launch

    def look(self: host.HostKernel, *args: Any, **more: Any) -> None:
        kinds.append(self.instrumented)
        launch(self, *args, **more)

    monkeypatch.setattr(host.HostKernel, "launch", look)
    for value, expected in [("", False), ("0", False), ("1", True), (None, False)]:
        kinds.clear()
        if value is None:
            monkeypatch.delenv("CUFLASH_HOST_RACES")
        else:
            monkeypatch.setenv("CUFLASH_HOST_RACES", value)
        x = np.ones((1, 4, 1, 32), np.float32)
        cuflash.attention(x, x, x)
        assert kinds == [expected]


# --- Made-up programs ----------------------------------------------------------------------------

(READ, WRITE, ATOMIC, SYNC_THREADS, SYNC_WARP, NAMED_SYNC, NAMED_ARRIVE, ARRIVE, WAIT, ADD,
 AWAIT) = range(1, 12)  # fmt: skip
BLOCKS, THREADS, ARRIVALS = 2, 64, 3


class Program:
    """Steps of all threads in an order that is possible, and whether two of them race."""

    def __init__(self, random: np.random.Generator, rounds: int = 0) -> None:
        self.random = random
        self.steps: list[list[list[int]]] = [[[] for _ in range(THREADS)] for _ in range(BLOCKS)]
        # Which accesses each thread knows of, as bits.
        self.known = [[0] * THREADS for _ in range(BLOCKS)]
        self.accesses: list[tuple[int, range, int]] = []
        self.races = False
        self.barriers = [0] * BLOCKS
        self.semaphores: list[int] = []  # each one's values so far
        self.heard: list[list[int]] = []
        ways = (self.threads, self.warp, self.named, self.mbarrier, self.semaphore)
        for _ in range(rounds):
            for _ in range(random.integers(1, 4)):
                self.access()
            ways[int(random.integers(len(ways)))]()

    @classmethod
    def far_apart(cls, random: np.random.Generator) -> Program:
        """Return one whose blocks are at different times, and hand on in turn what they know."""
        program = cls(random)
        threads = program.some(2)
        for semaphore in range(8):
            block = semaphore % 2
            for _ in range(random.choice([0, 0, 8]) if semaphore < 4 else 0):
                program.advance(block)
            program.semaphores.append(block)
            program.heard.append([0])
            program.touch(READ, 4, 4 * semaphore, True, block, threads[0])
            program.give(semaphore, threads[int(random.integers(8) == 0)])
            threads = program.some(2)
            for thread in threads:
                program.take(semaphore, thread, 1)
            program.touch(WRITE, 4, 4 * semaphore, True, 1 - block, threads[0])
        return program

    def add(self, block: int, thread: int, step: int, place: int = 0, size: int = 0) -> None:
        self.steps[block][thread].append(step | place << 8 | size << 16)

    def some(self, count: int) -> list[int]:
        return [int(x) for x in self.random.choice(THREADS, count, replace=False)]

    def access(self) -> None:
        kind = int(self.random.choice([READ, READ, WRITE, ATOMIC]))
        size = 4 if kind == ATOMIC else 1 << int(self.random.integers(5))
        place = int(self.random.integers(32 // size)) * size
        is_global = bool(self.random.integers(2))
        block = int(self.random.integers(BLOCKS))
        # Lanes of one warp, of two, or a thread alone.
        for thread in self.some(int(self.random.integers(1, 4))) if kind != WRITE else self.some(1):
            self.touch(kind, size, place, is_global, block, thread)

    def touch(
        self, kind: int, size: int, place: int, is_global: bool, block: int, thread: int
    ) -> None:
        self.add(block, thread, kind, place + 64 * is_global, size)
        start = place + 1000 * (BLOCKS if is_global else block)
        bytes_ = range(start, start + size)
        for i, (other, others, _) in enumerate(self.accesses):
            apart = bytes_.stop <= others.start or others.stop <= bytes_.start
            peaceful = kind == other and kind != WRITE
            if not apart and not peaceful and not self.known[block][thread] >> i & 1:
                self.races = True
        self.known[block][thread] |= 1 << len(self.accesses)
        self.accesses.append((kind, bytes_, thread))

    def meet(self, block: int, givers: list[int], takers: list[int]) -> None:
        known = 0
        for thread in givers:
            known |= self.known[block][thread]
        for thread in takers:
            self.known[block][thread] |= known

    def threads(self) -> None:
        block = int(self.random.integers(BLOCKS))
        everybody = list(range(THREADS))
        for thread in everybody:
            self.add(block, thread, SYNC_THREADS)
        self.meet(block, everybody, everybody)

    def warp(self) -> None:
        block, warp = (int(x) for x in self.random.integers(2, size=2))
        self.warp_of(block, warp)

    def warp_of(self, block: int, warp: int) -> None:
        lanes = list(range(32 * warp, 32 * warp + 32))
        for thread in lanes:
            self.add(block, thread, SYNC_WARP)
        self.meet(block, lanes, lanes)

    def named(self) -> None:
        block, giver = (int(x) for x in self.random.integers(2, size=2))
        barrier = len(self.steps[block][0]) % 15 + 1
        for thread in range(THREADS):
            step = NAMED_ARRIVE if thread // 32 == giver else NAMED_SYNC
            self.add(block, thread, step, barrier)
        takers = [t for t in range(THREADS) if t // 32 != giver]
        self.meet(block, list(range(THREADS)), takers)
        # The arriving warp must not be a round ahead at the same barrier.
        self.threads_of(block)

    def threads_of(self, block: int) -> None:
        everybody = list(range(THREADS))
        for thread in everybody:
            self.add(block, thread, SYNC_THREADS)
        self.meet(block, everybody, everybody)

    def advance(self, block: int) -> None:
        """A block meets in its warps and then as a whole, which uses several clocks."""
        self.warp_of(block, 0)
        self.warp_of(block, 1)
        self.threads_of(block)

    def mbarrier(self) -> None:
        block = int(self.random.integers(BLOCKS))
        barrier = self.barriers[block]
        if barrier == 16:
            return
        self.barriers[block] += 1
        givers, takers = self.some(ARRIVALS), self.some(5)
        for thread in givers:
            self.add(block, thread, ARRIVE, barrier)
        for thread in takers:
            self.add(block, thread, WAIT, barrier)
        self.meet(block, givers, takers)

    def semaphore(self) -> None:
        """A thread of one block adds; threads of the other wait for this or an earlier value."""
        block = int(self.random.integers(BLOCKS))
        (giver,) = self.some(1)
        if not self.heard or self.random.integers(2):
            self.heard.append([0])
            self.semaphores.append(block)
        semaphore = int(self.random.integers(len(self.heard)))
        self.give(semaphore, giver)
        value = int(self.random.integers(1, len(self.heard[semaphore])))
        for thread in self.some(3):
            self.take(semaphore, thread, value)

    def give(self, semaphore: int, thread: int) -> None:
        block, heard = self.semaphores[semaphore], self.heard[semaphore]
        # Adders come one after the other, so that each value has one past.
        if len(heard) > 1:
            self.add(block, thread, AWAIT, semaphore, len(heard) - 1)
            self.known[block][thread] |= heard[-1]
        self.add(block, thread, ADD, semaphore)
        heard.append(heard[-1] | self.known[block][thread])

    def take(self, semaphore: int, thread: int, value: int) -> None:
        block = 1 - self.semaphores[semaphore]
        self.add(block, thread, AWAIT, semaphore, value)
        self.known[block][thread] |= self.heard[semaphore][value]

    def run(self, kernel: host.HostKernel, seed: int) -> None:
        count = max(len(steps) for block in self.steps for steps in block)
        steps = np.zeros((BLOCKS, THREADS, count), np.int32)
        for i, block in enumerate(self.steps):
            for j, mine in enumerate(block):
                steps[i, j, : len(mine)] = mine
        out, semaphores = aligned(np.zeros(64, np.uint8)), np.zeros(64, np.int32)
        arrays = buffers(writable="out semaphores", steps=steps, out=out, semaphores=semaphores)
        params = pack(steps, out, semaphores, count, ARRIVALS)
        kernel.launch(BLOCKS, THREADS, 64 + 16 * 8, params, arrays, seed, resident=BLOCKS)


def test_races_of_made_up_programs(build: Builder) -> None:
    """A race is reported if and only if there is one, whatever the order of threads."""
    kernel = build.kernel("steps", instrumented=True)
    found = [0, 0]
    for number in range(300):
        random = np.random.default_rng(number)
        few = number < 200
        program = Program(random, 1 + number % 12) if few else Program.far_apart(random)
        found[program.races] += 1
        for seed in (number % 7, (number + 3) % 7):
            try:
                program.run(kernel, seed)
                raced = False
            except host.KernelFault as error:
                assert "race in " in str(error), error
                raced = True
            assert raced == program.races, f"program {number}, seed {seed}"
    assert min(found) > 60


@pytest.mark.parametrize("barriers", [0, 10])
def test_what_another_block_knows(build: Builder, barriers: int) -> None:
    """What a thread knew when it added to a semaphore, and not what others did by then."""
    kernel = build.kernel("steps", instrumented=True)
    for reader, races in [(0, False), (1, True)]:
        program = Program(np.random.default_rng(0))
        for _ in range(barriers):
            program.advance(1)
        program.add(1, 0, ADD, 1)
        for thread in {0, reader}:
            program.add(0, thread, AWAIT, 1, 1)
        program.add(0, reader, READ, 64, 4)
        program.add(0, 0, ADD, 0)
        program.add(1, 0, AWAIT, 0, 1)
        program.add(1, 0, WRITE, 64, 4)
        for seed in SEEDS:
            if races:
                with pytest.raises(host.KernelFault, match="race in global memory"):
                    program.run(kernel, seed)
            else:
                program.run(kernel, seed)
