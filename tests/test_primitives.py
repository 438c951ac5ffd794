# SPDX-License-Identifier: Apache-2.0
"""Every function of kernels/host/hw/, called by small kernels, against NumPy and an H200.

``test_layouts.py`` compares the arithmetic alone; here an instruction goes through the executor, in
several schedules, with all that it waits for.
"""

from __future__ import annotations

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from builder import Builder, aligned, buffers, pack, tensor_map
from hypothesis import given, settings
from test_layouts import (
    DTYPES,
    RECORDED_BOXES,
    a_fragment,
    accumulators,
    b_fragment,
    boxes,
    fragment,
    overlap,
    places,
    view,
    words,
)

from cuflash.host import KernelFault
from cuflash.tensormap import TensorMap

DATA = Path(__file__).parent / "data"
SEEDS = (0, 1, 2, 5, 6)  # the plain schedule, two random ones, two with priorities
NOTHING = np.zeros(4, np.uint32)


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(DATA / "h200_instructions.npz") as archive:
        return dict(archive)


# --- Meetings ------------------------------------------------------------------------------------


def meet(build: Builder, way: int, steps: int, size: int, seed: int, block: int) -> np.ndarray:
    out = np.full(size, -1, np.int32)
    params = pack(out, way, steps)
    kernel = build.kernel("meetings")
    kernel.launch(1, block, 16 + 4 * 64, params, buffers(out=out), seed)
    return out


@pytest.mark.parametrize("way", [0, 1])
def test_producers_and_consumers(build: Builder, way: int) -> None:
    """By named barriers, and by mbarriers whose phases go through both parities."""
    expected = np.arange(9 * 64).reshape(9, 64)[:, ::-1]
    for seed in range(7):
        out = meet(build, way, 9, 9 * 64, seed, 128)
        np.testing.assert_array_equal(out.reshape(9, 64), expected)


def test_one_lane_is_elected_and_always_the_same(build: Builder) -> None:
    lanes = set()
    for seed in range(20):
        out = meet(build, 2, 5, 5 * 64, seed, 64).reshape(5, 2, 32)
        assert (out.sum(2) == 1).all()
        lane = out[0, 0].argmax()
        assert (out.argmax(2) == lane).all()
        lanes.add(lane)
    assert len(lanes) > 5  # kernels must not count on any one


def test_registers_are_waited_for(build: Builder) -> None:
    for seed in SEEDS:
        out = meet(build, 3, 20, 384, seed, 384)
        # A warp gives 144 registers a lane and takes 72: of the four that gave, two suffice for
        # the first of the others, all for the last.
        assert (out[128:] >= 32).all() and out.max() == 128


# --- cp.async ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 8, 16])
def test_groups_of_cp_async(build: Builder, size: int) -> None:
    rng = np.random.default_rng(size)
    x = aligned(rng.integers(0, 255, (3, 64, size), np.uint8))
    valid = rng.integers(0, 2, (3, 64)).astype(np.int32)
    kernel = build.kernel("pieces", f"constexpr int kBytes = {size};")
    for seed in SEEDS:
        out = np.zeros((3, 3, 64, size), np.uint8)
        arrays = buffers(x=x, valid=valid, out=out)
        kernel.launch(1, 64, x.nbytes, pack(x, valid, out), arrays, seed)
        expected = np.where(valid[..., None], x, 0)
        for wait in range(3):
            np.testing.assert_array_equal(out[wait, : wait + 1], expected[: wait + 1])
            assert (out[wait, wait + 1 :] == 0xFF).all()  # as late as may be, and poison before


def test_what_is_not_valid_is_not_read(build: Builder) -> None:
    kernel = build.kernel("pieces", "constexpr int kBytes = 16;")
    x = aligned(np.ones((5, 64, 16), np.uint8))[:2]  # of more, so that no other array follows it
    valid = np.ones((3, 64), np.int32)
    valid[2] = 0
    out = np.zeros((3, 3, 64, 16), np.uint8)
    arrays, params = buffers(x=x, valid=valid, out=out), pack(x, valid, out)
    kernel.launch(1, 64, 3 * 64 * 16, params, arrays)
    assert (out[2, 0] == 1).all() and not out[2, 2].any()
    valid[2, 7] = 1
    with pytest.raises(KernelFault, match=r"thread 7 .*cp_async of 16 bytes .* is out of bounds"):
        kernel.launch(1, 64, 3 * 64 * 16, params, arrays)


# --- Matrices of a warp --------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_and_stmatrix(build: Builder, count: int, transposed: int) -> None:
    rng = np.random.default_rng(count)
    image = rng.integers(0, 2**16, (128, 8), np.uint16)
    kernel = build.kernel("matrices")
    for seed in SEEDS:
        offsets = np.full(32, 2**20 + 3, np.int32)  # of lanes whose address is not used
        rows = rng.permutation(128)[: 8 * count]
        offsets[: 8 * count] = rows * 16
        matrices = image[rows].reshape(count, 8, 8)
        if transposed:
            matrices = matrices.transpose(0, 2, 1)
        expected = np.stack([fragment(matrix) for matrix in matrices], 1)
        registers, result = np.zeros((32, count), np.uint32), np.zeros((128, 8), np.uint16)

        def run(
            image: np.ndarray,
            store: int,
            offsets: np.ndarray = offsets,
            registers: np.ndarray = registers,
            result: np.ndarray = result,
            seed: int = seed,
        ) -> None:
            arrays = dict(image=image, offsets=offsets, registers=registers, result=result)
            kernel.launch(
                1, 32, 2048, pack(*arrays.values(), store, count, transposed),
                buffers(writable="registers result", **arrays), seed,
            )  # fmt: skip

        run(image, 0)
        halves = registers.view(np.uint16).reshape(32, count, 2)
        np.testing.assert_array_equal(halves, expected)
        np.testing.assert_array_equal(result, image)
        run(np.zeros_like(image), 1)
        stored = np.zeros_like(image)
        stored[rows] = image[rows]
        np.testing.assert_array_equal(result, stored)


def sum_of_products(a: np.ndarray, b: np.ndarray, c: np.ndarray | float = 0.0) -> np.ndarray:
    return np.asarray(a.astype(np.float64) @ b.astype(np.float64) + c, np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mma(build: Builder, dtype: type) -> None:
    kernel = build.kernel("mma")
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        a, b = (rng.integers(-9, 9, shape).astype(dtype) for shape in ((16, 16), (16, 8)))
        c = rng.integers(-9, 9, (16, 8)).astype(np.float32)
        arrays = dict(a=words(a_fragment(a)), b=words(b_fragment(b)), c=accumulators(c))
        d = np.zeros((32, 4), np.float32)
        params = pack(*arrays.values(), d, int(dtype is not np.float16))
        kernel.launch(1, 32, 0, params, buffers(d=d, writable="d", **arrays), seed)
        np.testing.assert_array_equal(d, accumulators(sum_of_products(a, b, c)))


# --- wgmma ---------------------------------------------------------------------------------------


def multiply(
    build: Builder,
    n: int,
    image: np.ndarray,
    operands: np.ndarray | list,
    d: np.ndarray,
    *,
    a_place: int = 0,
    a_registers: np.ndarray = NOTHING,
    b_transposed: int = 0,
    bfloat16: int = 1,
    groups: int = 0,
    seed: int = 0,
) -> np.ndarray:
    """Run tests/host_kernels/products.cu and return the accumulators: (2, 128, n / 2)."""
    kernel = build.kernel("products", f"constexpr int kN = {n};")
    image = aligned(image).view(np.uint32).ravel()
    operands = np.ascontiguousarray(operands, np.int32)
    d = np.array(d, np.float32)
    arrays = dict(image=image, a=a_registers, operands=operands, d=d)
    params = pack(
        *arrays.values(), image.size, len(operands), a_place, b_transposed, bfloat16, groups
    )
    kernel.launch(
        1, 128, image.nbytes, params, buffers(writable="d", **arrays), seed, smem_alignment=1024
    )
    return d


#: The number of a swizzle in hw::Swizzle, by the number of its mode in a descriptor.
SWIZZLE_OF_MODE = np.array([0, 3, 2, 1])


@pytest.mark.parametrize("n", [64, 128])
@pytest.mark.parametrize("ta", [0, 1])
@pytest.mark.parametrize("tb", [0, 1])
def test_wgmma_as_recorded(
    build: Builder, golden: dict[str, np.ndarray], n: int, ta: int, tb: int
) -> None:
    a, b, recorded = (golden[f"wgmma_n{n}_a{ta}_b{tb}_{name}"] for name in ("adesc", "bdesc", "d"))

    def fields(descriptors: np.ndarray) -> list[np.ndarray]:
        columns = [(descriptors >> np.uint64(at) & np.uint64(0x3FFF)) * 16 for at in (0, 16, 32)]
        return [*columns, SWIZZLE_OF_MODE[descriptors >> np.uint64(62)]]

    operands = np.stack([*fields(a), *fields(b), np.ones(len(a))], 1).astype(np.int32)
    for case in range(len(a)):
        d = multiply(
            build, n, golden["image"], operands[case : case + 1], np.ones((2, 128, n // 2)),
            a_place=ta, b_transposed=tb, seed=SEEDS[case % len(SEEDS)],
        )  # fmt: skip
        np.testing.assert_array_equal(d[0], recorded[case])
        assert (d[1] == 1).all()


def swizzled(x: np.ndarray, span: int) -> np.ndarray:
    """Rows of shared memory as the TMA unit would write them: (rows, span / 2) elements."""
    pieces = x.reshape(-1, 8)
    unit = np.arange(len(pieces))
    result = np.zeros_like(pieces)
    result[unit ^ unit // 8 % (span // 16)] = pieces
    return result.reshape(x.shape)


@pytest.mark.parametrize("n", [8, 24, 64, 256])
@pytest.mark.parametrize("a_place", [0, 1, 2])
@pytest.mark.parametrize("b_transposed", [0, 1])
def test_chains_of_wgmma(build: Builder, n: int, a_place: int, b_transposed: int) -> None:
    """Of 64 values of k in tiles of 128 bytes a row, in one group, and in a group each."""
    dtype = DTYPES[n // 8 % 2]
    rng = np.random.default_rng(n)
    a, b = (rng.integers(-4, 5, shape).astype(dtype) for shape in ((64, 64), (64, n)))
    tile = 64 * 64 * 2
    left = swizzled(np.ascontiguousarray(a.T if a_place == 1 else a), 128)
    if b_transposed:
        # Chunks of 64 columns one behind the other, 64 values of k each.
        wide = np.pad(b, ((0, 0), (0, -n % 64))).reshape(64, -1, 64).transpose(1, 0, 2)
        right = swizzled(np.ascontiguousarray(wide.reshape(-1, 64)), 128)
    else:
        right = swizzled(np.ascontiguousarray(b.T), 128)
    image = np.concatenate([left.ravel(), right.ravel()]).view(np.uint16)
    operands = [
        [2048 * i if a_place == 1 else 32 * i, tile, 1024, 3,
         tile + (2048 * i if b_transposed else 32 * i), tile, 1024, 3, i > 0]
        for i in range(4)
    ]  # fmt: skip
    registers = np.zeros((4, 128, 4), np.uint32)
    for i in range(4):
        k = a[:, 16 * i : 16 * i + 16]
        registers[i] = np.concatenate([words(a_fragment(k[16 * w :][:16])) for w in range(4)])
    rest = dict(a_registers=registers, b_transposed=b_transposed, bfloat16=int(dtype != np.float16))
    before = np.full((2, 128, n // 2), 3.0)
    for seed in SEEDS[:3]:
        d = multiply(build, n, image, operands, before, a_place=a_place, seed=seed, **rest)
        np.testing.assert_array_equal(d[0], accumulators(sum_of_products(a, b)))
        d = multiply(
            build,
            n,
            image,
            np.array(operands),
            before,
            a_place=a_place,
            seed=seed,
            groups=1,
            **rest,
        )
        # Products 0 and 2 go to the first set, 1 and 3 to the second; one is added to a set each
        # time that its product is done and one of the other set is under way.
        even, odd = (
            sum_of_products(a.reshape(64, 2, 2, 16)[:, :, i].reshape(64, 32),
                            b.reshape(2, 2, 16, n)[:, i].reshape(32, n)) for i in (0, 1)
        )  # fmt: skip
        np.testing.assert_array_equal(d[0], accumulators(even) + 2)
        np.testing.assert_array_equal(d[1], accumulators(odd) + 1 + 3)


# --- The TMA unit --------------------------------------------------------------------------------

TMA_LOAD, TMA_STORE, TMA_REDUCE_ADD, BULK_LOAD, BULK_STORE, BULK_REDUCE_ADD = range(6)


def copy(
    build: Builder,
    op: int,
    image: np.ndarray,
    x: np.ndarray,
    *,
    tensor: TensorMap | None = None,
    at: tuple[int, ...] = (),
    offset: int = 0,
    start: int = 0,
    size: int = 0,
    hint: int = 0,
    seed: int = 0,
) -> None:
    """Run tests/host_kernels/boxes.cu: between `image`, which is shared memory, and `x`."""
    kernel = build.kernel("boxes")
    shared = image.view(np.uint32)
    tensor = tensor or TensorMap(x.ctypes.data, "uint8", (16,), (), (16,))
    size = size or math.prod(tensor.box) * tensor.itemsize
    place = x.reshape(-1).view(np.uint8)[start:]
    rank = len(at)
    params = pack(
        tensor, shared, place, shared.size, op, offset, size, hint, rank, *at, *(0,) * (5 - rank)
    )
    write = "image" if op in (TMA_LOAD, BULK_LOAD) else "image x"
    kernel.launch(
        1, 64, 1024 + image.nbytes, params, buffers(image=shared, x=x, writable=write), seed,
        smem_alignment=1024,
    )  # fmt: skip


@pytest.mark.parametrize("case", range(len(RECORDED_BOXES)))
def test_boxes_as_recorded(build: Builder, golden: dict[str, np.ndarray], case: int) -> None:
    swizzle, dims, box, coordinates, offset = RECORDED_BOXES[case]
    x = aligned(np.arange(math.prod(dims), dtype=np.uint16).reshape(dims[::-1]))
    tensor = tensor_map(x, box, swizzle, "bfloat16")
    for seed in SEEDS:
        image = np.full(2048, 0xDEADBEEF, np.uint32)
        copy(build, TMA_LOAD, image, x, tensor=tensor, at=coordinates, offset=offset, seed=seed)
        np.testing.assert_array_equal(image, golden[f"tma{case}_shared"])


@given(boxes())
@settings(max_examples=120)
def test_boxes_are_slices(build: Builder, case: tuple) -> None:
    """Of tensors with 1 to 5 axes of all types, swizzled or not, partly or wholly outside."""
    tensor, memory, at, offset = case
    here, there = overlap(tensor, at)
    address = places(tensor, offset) // 16
    size = (offset + int(address.max() + 1) * 16 + 1024) // 16 * 16
    seed, hint = int(memory.size % 7), int(memory.size % 3)
    expected = np.zeros(tensor.box[::-1], f"u{tensor.itemsize}")
    expected[there] = view(tensor, memory)[here]

    image = np.full(size, 0xA5, np.uint8)
    more = dict(tensor=tensor, at=at, offset=offset, seed=seed)
    if len(at) == 1 and not tensor.swizzle:
        with pytest.raises(KernelFault, match="must be swizzled"):
            copy(build, TMA_LOAD, image, memory, **more)
        return
    copy(build, TMA_LOAD, image, memory, hint=hint, **more)
    pieces = image.reshape(-1, 16)
    np.testing.assert_array_equal(pieces[address].ravel(), expected.ravel().view(np.uint8))
    assert (np.delete(pieces, address, 0) == 0xA5).all()

    # The other way with other numbers: what is outside of the box or the tensor stays.
    pieces[address] ^= 0x5A
    wanted = memory.copy()
    view(tensor, wanted)[here] = (
        pieces[address].ravel().view(expected.dtype).reshape(expected.shape)[there]
    )
    if min(at) < 0:
        wanted = memory.copy()
        with pytest.raises(KernelFault, match=r"coordinate \d of a store must not be negative"):
            copy(build, TMA_STORE, image, memory, **more)
    else:
        copy(build, TMA_STORE, image, memory, **more)
    np.testing.assert_array_equal(memory, wanted)


@pytest.mark.parametrize(("rank", "swizzle"), [(1, 64), (2, 128), (3, 64), (4, 32), (5, 0)])
def test_tma_reduce_add(build: Builder, rank: int, swizzle: int) -> None:
    rng = np.random.default_rng(rank)
    dims, box = (20, 5, 4, 3, 2)[:rank], (swizzle // 4 or 8, 3, 2, 2, 1)[:rank]
    at = (4, 3, 3, 0, 1)[:rank]
    before = rng.integers(-9, 9, dims[::-1]).astype(np.float32)
    for seed in SEEDS:
        x = aligned(before)
        tensor = tensor_map(x, box, swizzle)
        address = places(tensor, 256) // 16
        image = rng.integers(-9, 9, 4096).astype(np.float32)
        here, there = overlap(tensor, at)
        term = image.reshape(-1, 4)[address].reshape(box[::-1])
        expected = before.copy()
        expected[here] += term[there]
        copy(build, TMA_REDUCE_ADD, image, x, tensor=tensor, at=at, offset=256, seed=seed)
        np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize("op", [BULK_LOAD, BULK_STORE, BULK_REDUCE_ADD])
def test_bulk_copies(build: Builder, op: int) -> None:
    rng = np.random.default_rng(op)
    for seed in SEEDS:
        x, image = (aligned(rng.integers(-9, 9, 256).astype(np.float32)) for _ in range(2))
        start, offset, n = (4 * int(rng.integers(1, 20)) for _ in range(3))
        wanted_x, wanted_image = x.copy(), image.copy()
        there, here = slice(start, start + n), slice(offset, offset + n)
        if op == BULK_LOAD:
            wanted_image[here] = x[there]
        elif op == BULK_STORE:
            wanted_x[there] = image[here]
        else:
            wanted_x[there] += image[here]
        copy(build, op, image, x, start=4 * start, offset=4 * offset, size=4 * n, seed=seed)
        np.testing.assert_array_equal(x, wanted_x)
        np.testing.assert_array_equal(image, wanted_image)


# --- Between blocks ------------------------------------------------------------------------------


def run_blocks(build: Builder, seed: int, backwards: int = 0, resident: int = 0) -> np.ndarray:
    """Sums that depend on their order, so that only one order gives the expected one."""
    x = np.array([1e8, 3, -1e8, 0.25, 7e7, 1, 1e-3, -7e7], np.float32)
    counter, total, order = np.zeros(1, np.int32), np.zeros(64, np.float32), np.zeros(8, np.int32)
    arrays = buffers(counter=counter, sum=total, x=x, order=order, writable="counter sum order")
    kernel = build.kernel("blocks")
    kernel.launch(
        8, 64, 0, pack(counter, total, x, order, backwards), arrays, seed,
        in_order=True, resident=resident,
    )  # fmt: skip
    assert counter[0] == 8
    if not backwards:
        expected = np.float32(0)
        for term in x:
            expected += term
        assert (total == expected).all()
    return order


@pytest.mark.parametrize("resident", [0, 1, 2, 3, 4])
def test_blocks_that_wait_for_those_before(build: Builder, resident: int) -> None:
    for seed in range(7):
        assert run_blocks(build, seed, resident=resident).tolist() == list(range(8))


def test_blocks_alive_at_once(build: Builder) -> None:
    for seed in SEEDS:
        order = run_blocks(build, seed, backwards=1, resident=2)
        assert order[0] == 7
    stuck = r"the block cannot go on: .* semaphore_wait \(it is \d, and shall be at least 7\)"
    with pytest.raises(KernelFault, match=stuck):
        run_blocks(build, 0, backwards=1, resident=1)


# --- One thread ----------------------------------------------------------------------------------


def scalars(
    build: Builder, x: np.ndarray, y: np.ndarray, at: np.ndarray, sums: np.ndarray, together: int,
    seed: int = 0,
) -> np.ndarray:  # fmt: skip
    results = np.zeros((5, x.size), np.uint32)
    arrays = dict(x=x, y=y, results=results, at=at, sums=sums)
    kernel = build.kernel("scalars")
    kernel.launch(
        2, 64, 0, pack(*arrays.values(), x.size, together),
        buffers(writable="results sums", **arrays), seed,
    )  # fmt: skip
    return results


@pytest.mark.parametrize("together", [1, 2, 4])
def test_reduce_add(build: Builder, together: int) -> None:
    rng = np.random.default_rng(together)
    for seed in SEEDS:
        x = rng.integers(-99, 99, 256).astype(np.float32)
        at = (rng.integers(0, 16, 256) * 4).astype(np.int32)
        sums = aligned(rng.integers(-9, 9, 64).astype(np.float32))
        expected = sums.copy()
        for i in range(0, 256, together):
            expected[at[i] : at[i] + together] += 2 * x[i : i + together]  # by two blocks
        scalars(build, x, x, at, sums, together, seed)
        np.testing.assert_array_equal(sums, expected)


def test_approximations_and_packing(build: Builder) -> None:
    rng = np.random.default_rng(0)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, 1e-40, -1e-40, 127.9, 128.0, -126.0, -127.0]
    x = np.concatenate([special, rng.normal(size=100) * 30, np.exp2(rng.uniform(-126, 127, 100))])
    x = x[: x.size // 4 * 4].astype(np.float32)
    y = rng.permutation(x)
    at, sums = np.zeros(x.size, np.int32), aligned(np.zeros(4, np.float32))
    exp2, log2, rcp, half, brain = scalars(build, x, y, at, sums, 4)

    def flushed(x: np.ndarray) -> np.ndarray:
        return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x)

    with np.errstate(all="ignore"):
        wide = flushed(x).astype(np.float64)
        for bits, expected in ((exp2, np.exp2(wide)), (log2, np.log2(wide)), (rcp, 1 / wide)):
            expected = flushed(expected.astype(np.float32))
            np.testing.assert_allclose(bits.view(np.float32), expected, rtol=3e-7, atol=1e-38)
        for packed, dtype in ((half, np.float16), (brain, ml_dtypes.bfloat16)):
            pair = np.stack([x, y], 1).astype(dtype).view(np.uint16)
            pair[np.isnan(np.stack([x, y], 1))] = 0x7FFF
            np.testing.assert_array_equal(packed.view(np.uint16).reshape(-1, 2), pair)
