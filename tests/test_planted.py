# SPDX-License-Identifier: Apache-2.0
"""A test of the executor: faults in small kernels must be found, and right kernels be left alone.

The kernels are tests/host_kernels/planted_*.cu. Each is right unless its parameter names one of its
faults. A fault shows as wrong numbers or as a report, in how many of the schedules is counted: by
the plain build in at least one, by the instrumented build in all.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest
import tally
from builder import KERNELS, Builder, aligned, buffers, pack, tensor_map

from cuflash.host import HostKernel, KernelFault

SEEDS = range(7)
NUMBERS = "wrong numbers"


def number_of(name: str) -> int:
    """As in planted.cuh; 0 for no fault."""
    number = 0x811C9DC5 if name else 0
    for byte in name.encode():
        number = (number ^ byte) * 0x01000193 & 0xFFFFFFFF
    return number


# --- The kernels ---------------------------------------------------------------------------------
# Each of these launches a kernel with a fault and returns what it computed and what is right.

Results = tuple[np.ndarray, np.ndarray]


def integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Small ones, of which no product and no sum is rounded."""
    return aligned(rng.integers(-1, 2, shape).astype(dtype))


def product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) @ y.astype(np.float64)


def warps(kernel: HostKernel, fault: str, seed: int) -> Results:
    blocks, rounds = 2, 3
    # Of more, so that no other array follows it.
    x = np.random.default_rng(0).integers(1, 9, (blocks + 1, rounds, 128)).astype(np.float32)
    x = x[:blocks]
    scale, sums = np.full(1, 2, np.float32), np.zeros((blocks, rounds), np.float32)
    backwards = np.zeros((blocks + 1, rounds, 128), np.float32)[:blocks]
    arrays = dict(x=x, scale=scale, sums=sums, reversed=backwards)
    params = pack(*arrays.values(), rounds, number_of(fault))
    kernel.launch(blocks, 128, 528, params, buffers(writable="sums reversed", **arrays), seed)
    rows = x.reshape(blocks, rounds, 4, 32)[..., ::-1].reshape(x.shape)
    return (
        np.concatenate([sums.ravel(), backwards.ravel()]),
        np.concatenate([2 * x.sum(2).ravel(), rows.ravel()]),
    )


def cp_async(kernel: HostKernel, fault: str, seed: int) -> Results:
    rng = np.random.default_rng(1)
    rows = 71  # the last of five tiles has seven
    x, y = (integers(rng, (2 * rows, 32), np.float16)[:rows] for _ in range(2))
    out = np.zeros((32, 32), np.float32)
    arrays = buffers(x=x, y=y, out=out)
    kernel.launch(1, 64, 5120, pack(x, y, out, rows, number_of(fault)), arrays, seed)
    return out, product(x.T, y)


def barriers(kernel: HostKernel, fault: str, seed: int) -> Results:
    x = np.arange(6 * 64, dtype=np.int32).reshape(6, 64)
    out = np.zeros_like(x)
    kernel.launch(1, 128, 256, pack(x, out, 6, number_of(fault)), buffers(x=x, out=out), seed)
    return out, x[:, ::-1]


def tma(kernel: HostKernel, fault: str, seed: int) -> Results:
    rng = np.random.default_rng(2)
    keys = 300  # the last of five tiles is not full
    q, k, v = (integers(rng, (n, 64), np.float16) for n in (128, keys, keys))
    out = aligned(np.zeros((128, 64), np.float16))
    tile = (64, 64)
    k_map = tensor_map(k, tile, 0 if fault == "wrong-swizzle-in-a-map" else 128)
    if fault == "box-too-tall":
        k_map = tensor_map(k, (64, 80), 128)
    if fault == "tensor-too-tall-in-a-map":
        k_map = tensor_map(np.lib.stride_tricks.as_strided(k, (keys + 8, 64)), tile, 128)
    maps = tensor_map(q, tile, 128), k_map, tensor_map(v, tile, 128), tensor_map(out, (32, 64), 64)
    writable = "" if fault == "tma-store-to-read-only" else "out"
    kernel.launch(
        1, 384, 59 * 1024 + 128, pack(*maps, keys, number_of(fault)),
        buffers(q=q, k=k, v=v, out=out, writable=writable), seed, smem_alignment=1024,
    )  # fmt: skip
    return out, product(product(q, k.T), v)


def operands(kernel: HostKernel, fault: str, seed: int) -> Results:
    rng = np.random.default_rng(3)
    a, b = (integers(rng, (64, n), ml_dtypes.bfloat16) for n in (64, 128))
    out = np.zeros((64, 128), np.float32)
    box = (64, 72) if fault == "box-larger-than-its-tile" else (64, 64)
    kernel.launch(
        1, 128, 25 * 1024, pack(tensor_map(b, box, 128), a, out, number_of(fault)),
        buffers(b=b, a=a, out=out), seed, smem_alignment=1024,
    )  # fmt: skip
    return out, product(a, b)


def blocks(kernel: HostKernel, fault: str, seed: int) -> Results:
    x = np.random.default_rng(4).normal(size=(6, 2, 64)).astype(np.float32)  # sums are rounded
    total, turn = aligned(np.zeros((4, 64), np.float32))[:2], np.zeros(1, np.int32)
    arrays = buffers(x=x, sum=total, turn=turn, writable="sum turn")
    kernel.launch(6, 64, 256, pack(x, total, turn, number_of(fault)), arrays, seed, in_order=True)
    expected = np.zeros_like(total)
    for term in x:
        expected += term
    return total, expected


KERNELS_OF: dict[str, Callable[[HostKernel, str, int], Results]] = {
    f"planted_{run.__name__}": run for run in (warps, cp_async, barriers, tma, operands, blocks)
}


# --- The faults ----------------------------------------------------------------------------------


class Fault(NamedTuple):
    """A fault, by the name that its kernel knows it by."""

    name: str
    what: str
    #: Regular expressions: each sight of it is one of these reports, or NUMBERS.
    shows: tuple[str, ...]
    #: Whether it lies not in the kernel, but in what this file gives to it.
    in_arguments: bool = False


STUCK = "the block cannot go on: "
RETURNED = "the thread returned before this copy had read shared memory"
ONE_TOO_MANY = "one arrival too many"
NO_FENCE = r"reads shared\+\d+ through the asynchronous proxy, .* without fence_proxy_async"
OTHER_COUNT = r"barrier 1: this thread expects \d+ threads, one before it \d+"

FAULTS = {
    "planted_warps": (
        Fault("early-return", "a warp returns before a barrier", (STUCK + ".* have returned",)),
        Fault("no-syncwarp", "lanes read what others have yet to write", (NUMBERS,)),
        Fault("store-to-read-only", "a store to an input", ("writes to x, which is read-only",)),
        Fault("store-past-the-end", "a store one element too far",
              ("array: reversed .* reaches 4 bytes past its end",)),
        Fault("shuffle-mask-lacks-lanes", "lanes shuffle that the mask excludes",
              ("mask 0x0000ffff lacks the calling lane",)),
        Fault("divergent-shuffle", "half of a warp shuffles for all",
              (STUCK + r".*mask 0xffffffff, lanes 16-31 missing",)),
        Fault("shuffle-step-forgotten", "a sum over half of the lanes", (NUMBERS,)),
        Fault("divergent-syncthreads", "warps wait at barriers of two branches",
              ("divergent barriers: ",)),
        Fault("no-syncthreads-in-a-reduction", "sums of warps are read too early", (NUMBERS,)),
        Fault("divergent-elect-one", "elect_one in a divergent branch",
              (STUCK + r".*elect_one \(mask 0xffffffff, lanes 8-31 missing",)),
        Fault("elected-lane-taken-for-0", "lane 0 does what the elected one should", (NUMBERS,)),
        Fault("no-barrier-at-the-end-of-a-round", "sums of the next round come too early",
              (NUMBERS,)),
    ),
    "planted_cp_async": (
        Fault("tail-read", "rows past the end are copied as if they were there",
              ("cp_async of 16 bytes .* is out of bounds",)),
        Fault("tail-not-zeroed", "rows past the end keep what an earlier tile left", (NUMBERS,)),
        Fault("misaligned-cp-async", "16 bytes to a multiple of 8",
              (r"is misaligned: shared\+\d+ is not a multiple of 16",)),
        Fault("no-cp-async-commit", "groups end nowhere", (NUMBERS,)),
        Fault("cp-async-wait-too-lax", "one group too many may be under way", (NUMBERS,)),
        Fault("no-cp-async-wait", "nobody waits for the copies", (NUMBERS,)),
        Fault("no-barrier-after-cp-async-wait", "copies of other threads may be under way",
              (NUMBERS,)),
        Fault("wrong-stage", "the stage that is being filled is used", (NUMBERS,)),
        Fault("no-barrier-before-a-stage-is-reused", "a stage is filled while others read it",
              (NUMBERS,)),
        Fault("ldmatrix-a-row-too-far", "addresses of lanes are off by one row",
              ("index out of the bounds of an array", NUMBERS)),
        Fault("ldmatrix-not-transposed", "a without .trans", (NUMBERS,)),
        Fault("wrong-order-of-accumulators", "rows of accumulators are mistaken", (NUMBERS,)),
    ),
    "planted_barriers": (
        Fault("no-named-barrier-for-empty", "writers do not wait for readers", (STUCK, NUMBERS)),
        Fault("wrong-barrier", "writers arrive at another barrier than readers wait at",
              (STUCK + r".*barrier 1, 64 of 128 threads missing",)),
        Fault("barrier-16", "there are 16, the first of them 0",
              ("named barriers are 1 to 15, got 16",)),
        Fault("other-count", "writers expect fewer than readers", (OTHER_COUNT,)),
        Fault("too-few-at-both", "readers expect fewer than writers", (OTHER_COUNT,)),
        Fault("barriers-in-a-circle", "each half waits for the other to begin",
              (STUCK + ".*barrier 2, 64 of .*barrier 1, 64 of ",)),
        Fault("arrive-where-sync", "readers do not wait for writers", (STUCK, NUMBERS)),
        Fault("half-of-a-warp-at-a-barrier", "a barrier in a divergent branch", (STUCK, NUMBERS)),
    ),
    "planted_tma": (
        Fault("arrivals-counted-wrong", "an mbarrier expects one thread more than there are",
              (STUCK + ".*with 1 of 257 arrivals and 0 bytes missing",)),
        Fault("mbarrier-not-initialised", "one is forgotten",
              ("there is no initialised mbarrier",)),
        Fault("mbarrier-initialised-twice", "one is initialised again",
              ("is initialised already",)),
        Fault("mbarrier-overwritten", "a store hits an mbarrier", ("was overwritten",)),
        Fault("no-fence-mbarrier-init", "copies do not see that mbarriers are initialised",
              (r"was initialised without fence_mbarrier_init\(\)",)),
        Fault("no-barrier-after-mbarrier-init", "threads do not see it",
              ("there is no initialised mbarrier",)),
        Fault("too-few-registers-given", "setmaxnreg asks for more than was given back",
              (STUCK + r".*registers_increase \(232 registers a thread; \d+ are free",)),
        Fault("no-registers-given", "setmaxnreg asks for what nobody gives back",
              (STUCK + r".*registers_increase \(232 registers a thread; 0 are free",)),
        Fault("parity-never-flipped", "the producer waits for the same phase always",
              (ONE_TOO_MANY, NUMBERS)),
        Fault("wrong-parity", "k is waited for in the phase before",
              (ONE_TOO_MANY, STUCK, NUMBERS)),
        Fault("too-many-bytes", "16 bytes are announced that do not come",
              (STUCK + ".*with 0 of 1 arrivals and 16 bytes missing; no copy will bring them",)),
        Fault("too-few-bytes", "16 bytes less are announced than come",
              ("16 bytes more than were announced", "16 bytes more than are announced")),
        Fault("bytes-not-announced", "an arrival without bytes",
              ("bytes more than are announced", "bytes more than were announced")),
        Fault("no-wait-for-empty", "a stage of k is filled while it is used",
              (ONE_TOO_MANY, NUMBERS)),
        Fault("no-wait-for-k", "k is used before it is there", (ONE_TOO_MANY, NUMBERS)),
        Fault("no-wait-for-v", "v is used before it is there",
              (ONE_TOO_MANY, "the block ended before this copy had landed", NUMBERS)),
        Fault("no-arrival", "nobody says that a stage of k is free",
              (STUCK + ".*with 256 of 256 arrivals",)),
        Fault("arrives-twice", "a stage of k is free after half of its readers",
              (ONE_TOO_MANY, NUMBERS)),
        Fault("k-released-early", "a stage is free while products read it", (NUMBERS,)),
        Fault("wrong-stage-of-v", "the other stage is multiplied", (NUMBERS,)),
        Fault("misaligned-tile", "a tile at a multiple of 64",
              ("the shared address is not a multiple of 128",)),
        Fault("tile-off-the-swizzle", "a tile 128 bytes behind where its swizzle is counted from",
              (NUMBERS,)),
        Fault("wrong-step-along-k", "descriptors advance by half of what they should", (NUMBERS,)),
        Fault("no-wgmma-fence", "products may begin before registers are written",
              (r"needs wgmma_fence\(\) before it",)),
        Fault("no-wgmma-commit", "the wait has no group to wait for", (NUMBERS,)),
        Fault("no-wgmma-wait", "scores are read while the product is under way", (NUMBERS,)),
        Fault("wgmma-wait-too-lax", "one group may be under way where none may", (NUMBERS,)),
        Fault("registers-of-a-changed", "a register of a is written before the wait", (NUMBERS,)),
        Fault("accumulators-changed", "an accumulator is added to before the wait",
              ("accumulator 3 was written while the product was under way",)),
        Fault("no-fence-before-tma-store", "TMA may miss what stmatrix wrote", (NO_FENCE,)),
        Fault("no-barrier-before-tma-store", "TMA reads what other warps have yet to write",
              (NO_FENCE, "was still to read", NUMBERS)),
        Fault("no-bulk-commit", "the wait has no group to wait for",
              (RETURNED, "was still to read", NUMBERS)),
        Fault("store-not-waited-for", "shared memory is reused before TMA has read it",
              ("was still to read", NUMBERS)),
        Fault("return-before-store-has-read", "a thread returns before TMA has read",
              (RETURNED,)),
        Fault("wrong-swizzle-in-a-map", "k is not swizzled", (NUMBERS,), True),
        Fault("box-too-tall", "boxes of k have 80 rows",
              ("2048 bytes more than were announced", "2048 bytes more than are announced"), True),
        Fault("tensor-too-tall-in-a-map", "the map of k has rows that are not there",
              ("tma_load .* array: k .* past its end",), True),
        Fault("tma-store-to-read-only", "the result is not writable",
              ("tma_store .* writes to out, which is read-only",), True),
    ),
    "planted_operands": (
        Fault("no-fence-before-wgmma", "wgmma may miss what stmatrix wrote", (NO_FENCE,)),
        Fault("no-barrier-after-stmatrix", "wgmma reads what another warp has yet to write",
              (NO_FENCE, "was still to read", NUMBERS)),
        Fault("wrong-stride-bytes", "groups of 8 rows are taken for closer", (NUMBERS,)),
        Fault("wrong-leading-bytes", "chunks of 64 columns are taken for closer", (NUMBERS,)),
        Fault("wrong-swizzle-in-a-descriptor", "of 64 bytes instead of 128", (NUMBERS,)),
        Fault("wrong-step-of-a-transposed-operand", "as if b were K-major", (NUMBERS,)),
        Fault("wrong-transpose-bit", "b is taken for K-major",
              ("is not in dynamic shared memory", NUMBERS)),
        Fault("sum-forgotten", "each product replaces the one before", (NUMBERS,)),
        Fault("wrong-columns-of-accumulators", "their order is mistaken", (NUMBERS,)),
        Fault("box-larger-than-its-tile", "a box reaches past shared memory",
              ("tma_load of 9216 bytes, .* is not in dynamic shared memory",), True),
    ),
    "planted_blocks": (
        Fault("no-semaphore-wait", "blocks do not wait for their turn", (NUMBERS,)),
        Fault("no-semaphore-add", "no block says that its turn is over",
              (STUCK + ".*semaphore_wait .it is 0, and shall be at least",)),
        Fault("wrong-turn", "each waits for itself",
              (STUCK + ".*semaphore_wait .it is 0, and shall be at least",)),
        Fault("no-barrier-after-semaphore-wait", "other threads do not wait for the turn",
              (NUMBERS,)),
        Fault("no-barrier-before-semaphore-add", "the turn ends before other threads are done",
              (NUMBERS,)),
        Fault("only-reads-waited-for", "the turn ends before the bulk copy has written",
              (NUMBERS,)),
        Fault("no-barrier-before-bulk-store", "a copy reads what other threads have yet to write",
              (NUMBERS,)),
        Fault("bulk-past-the-end", "a bulk copy reaches past its array",
              ("bulk_store of 256 bytes .* sum .* reaches 16 bytes past its end",)),
        Fault("misaligned-bulk", "a bulk copy begins at a multiple of 4",
              ("bulk_store .* is misaligned: not a multiple of 16",)),
    ),
}  # fmt: skip
#: What the instrumented build says of accesses that nothing orders.
RACES = ("race", "which nobody wrote since the block began")
CASES = [(source, fault) for source, faults in FAULTS.items() for fault in faults]
BUILDS = (False, True)  # plain, instrumented


def sight(build: Builder, source: str, fault: str, seed: int, instrumented: bool) -> str:
    """Return how a fault shows in a schedule: NUMBERS, a report, or nothing."""
    kernel = build.kernel(source, instrumented=instrumented)
    try:
        result, expected = KERNELS_OF[source](kernel, fault, seed)
    except KernelFault as report:
        return str(report)
    return "" if np.array_equal(result, expected) else NUMBERS


@pytest.mark.parametrize("instrumented", BUILDS)
@pytest.mark.parametrize("source", FAULTS)
def test_right_kernels_are_left_alone(build: Builder, source: str, instrumented: bool) -> None:
    for seed in range(20):
        assert sight(build, source, "", seed, instrumented) == ""


@pytest.mark.parametrize(
    ("source", "fault"), [pytest.param(*case, id=case[1].name) for case in CASES]
)
def test_faults_are_found(build: Builder, source: str, fault: Fault) -> None:
    counts = []
    for instrumented in BUILDS:
        sights = [sight(build, source, fault.name, seed, instrumented) for seed in SEEDS]
        known = (*fault.shows, *RACES) if instrumented else fault.shows
        for text in filter(None, sights):
            assert any(re.search(pattern, text) for pattern in known), text
        counts.append(sum(map(bool, sights)))
    shows = " or ".join(sorted({NUMBERS if s == NUMBERS else "report" for s in fault.shows}))
    tally.planted(source, fault.name, fault.what, shows, *counts)
    assert counts[0] >= 1
    assert counts[1] == len(SEEDS)


def test_every_fault_is_in_the_table() -> None:
    for source, faults in FAULTS.items():
        text = (KERNELS / f"{source}.cu").read_text(encoding="utf-8")
        planted = set(re.findall(r'PLANTED\("([^"]+)"\)', text))
        assert planted == {fault.name for fault in faults if not fault.in_arguments}
    names = [fault.name for _, fault in CASES]
    assert len(set(names)) == len(names) == len({number_of(name) for name in names})
