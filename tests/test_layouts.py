# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of tensor-core and TMA instructions, against an H200 and against NumPy.

NumPy's side is written from the figures of the PTX ISA, as reshaping and transposing, not from the
formulas under test.
"""

from __future__ import annotations

import ctypes
import math
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

from cuflash import host, tensormap
from cuflash.tensormap import TensorMap

HERE = Path(__file__).parent
SHIM = HERE / "host_kernels" / "layouts.cpp"
INCLUDES = (HERE.parent / "kernels" / "host",)

U64, U32, INT = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int
ARRAY = ctypes.c_void_p
ARGUMENTS = {
    "descriptor": (U64, ARRAY),
    "addresses": (U64, INT, INT, ARRAY),
    "a_cells": (INT, ARRAY),
    "b_cells": (ARRAY,),
    "accumulator_cells": (INT, INT, ARRAY),
    "accumulator_registers": (INT, ARRAY),
    "ldmatrix": (INT, INT, ARRAY, ARRAY, ARRAY),
    "stmatrix": (INT, INT, ARRAY, ARRAY, ARRAY),
    "to_floats": (INT, ARRAY, INT, ARRAY),
    "mma_product": (INT, ARRAY, ARRAY, ARRAY, ARRAY),
    "wgmma_product": (INT, ARRAY, U64, INT, ARRAY, U64, INT, INT, INT, ARRAY),
    "problem_of_box": (ctypes.c_char_p, U32),
    "box_pieces": (ctypes.c_char_p, ARRAY, U32, ARRAY, ARRAY),
}
PIECE = np.dtype([("shared", "u4"), ("begin", "i4"), ("end", "i4"), ("", "u4"), ("global", "u8")])
DTYPES = (np.float16, ml_dtypes.bfloat16)


class Shim:
    """tests/host_kernels/layouts.cpp, whose functions take NumPy arrays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))
        self.descriptor.restype = self.problem_of_box.restype = ctypes.c_char_p

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.library, name)
        function.argtypes = ARGUMENTS[name]
        setattr(self, name, function)
        return function


def compile_shim(compiler: host.Compiler, folder: Path) -> Shim:
    path = folder / "layouts.so"
    text = SHIM.read_text(encoding="utf-8")
    host.compile_library(compiler, text, INCLUDES, path, kernel=False)
    return Shim(path)


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Shim:
    return compile_shim(host.find_compiler(), tmp_path_factory.mktemp("layouts"))


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(HERE / "data" / "h200_instructions.npz") as archive:
        return dict(archive)


def at(array: np.ndarray | None) -> int | None:
    assert array is None or array.flags.c_contiguous
    return None if array is None else array.ctypes.data


# --- wgmma: descriptors --------------------------------------------------------------------------


@pytest.mark.parametrize("n", [64, 128])
@pytest.mark.parametrize("ta", [0, 1])
@pytest.mark.parametrize("tb", [0, 1])
def test_wgmma_as_recorded(
    shim: Shim, golden: dict[str, np.ndarray], n: int, ta: int, tb: int
) -> None:
    check_recorded_wgmma(shim, golden, n, ta, tb)


def check_recorded_wgmma(
    shim: Shim, golden: dict[str, np.ndarray], n: int, ta: int, tb: int
) -> None:
    a, b, d = (golden[f"wgmma_n{n}_a{ta}_b{tb}_{name}"] for name in ("adesc", "bdesc", "d"))
    assert len(d) == 12
    for case in range(12):
        result = np.ones((128, n // 2), np.float32)
        shim.wgmma_product(
            1, at(golden["image"]), int(a[case]), ta, None, int(b[case]), tb, n, 1, at(result)
        )
        np.testing.assert_array_equal(result, d[case])


def encode_descriptor(start: int, leading: int, stride: int, mode: int) -> int:
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | mode << 62


def test_descriptor_fields(shim: Shim) -> None:
    fields = np.zeros(4, np.uint32)
    for mode, span in enumerate((16, 128, 64, 32)):
        bits = encode_descriptor(0x3FFF0, 0x12340, 0x2BCD0, mode)
        assert shim.descriptor(bits, at(fields)) is None
        assert fields.tolist() == [0x3FFF0, 0x12340, 0x2BCD0, span]


@pytest.mark.parametrize("bit", range(64))
def test_illegal_descriptors_are_told(shim: Shim, bit: int) -> None:
    problem = shim.descriptor(1 << bit, at(np.zeros(4, np.uint32)))
    if bit in (49, 50, 51):
        assert b"base offset" in problem
    elif bit in (14, 15, 30, 31, 46, 47, 48, *range(52, 62)):
        assert b"must be zero" in problem
    else:
        assert problem is None


@pytest.mark.parametrize(("mode", "span"), [(0, 16), (1, 128), (2, 64), (3, 32)])
@pytest.mark.parametrize("transposed", [0, 1])
def test_operands_are_found_in_tidy_tiles(
    shim: Shim, mode: int, span: int, transposed: int
) -> None:
    """A tile of 64 x 16 as a kernel would lay it out: cores of 8 rows, each row a `span`."""
    mn, width = 64, span // 2
    x = np.arange(mn * 16).reshape(mn, 16)
    if transposed:
        x = x.T
    rows, columns = x.shape
    if columns < width:  # the row of a K-major core goes on with what other instructions take
        x = np.pad(x, ((0, 0), (0, width - columns)))
        columns = width
    # Chunks of `width` columns one behind the other, in each the groups of 8 rows.
    tile = x.reshape(rows // 8, 8, columns // width, width).transpose(2, 0, 1, 3)
    unit = np.arange(tile.size // 8)
    memory = np.zeros((tile.size // 8, 8), int)
    memory[unit ^ unit // 8 % (span // 16)] = tile.reshape(-1, 8)

    within, across = 8 * span, 8 * span * (rows // 8)  # next group of rows, next chunk
    leading, stride = across, within
    if transposed and mode == 0:
        leading, stride = within, across
    found = np.zeros((mn, 16), np.uint32)
    shim.addresses(encode_descriptor(0, leading, stride, mode), transposed, mn, at(found))
    np.testing.assert_array_equal(memory.ravel()[found // 2], np.arange(mn * 16).reshape(mn, 16))


# --- Fragments -----------------------------------------------------------------------------------


def fragment(x: np.ndarray) -> np.ndarray:
    """What each lane has of an 8 x 8 matrix: (32, 2). Four lanes share a row."""
    return x.reshape(8, 4, 2).reshape(32, 2)


def a_fragment(x: np.ndarray) -> np.ndarray:
    """(16, 16) -> (32, 4, 2): upper left, lower left, upper right, lower right."""
    quarters = (x[:8, :8], x[8:, :8], x[:8, 8:], x[8:, 8:])
    return np.stack([fragment(quarter) for quarter in quarters], 1)


def b_fragment(x: np.ndarray) -> np.ndarray:
    """(16 k, 8 n) -> (32, 2, 2): lanes have pairs along k, four of them share a column."""
    return np.stack([fragment(half.T) for half in (x[:8], x[8:])], 1)


def accumulators(x: np.ndarray) -> np.ndarray:
    """(rows, n) -> (threads, n / 2): warps side by side take 16 rows each."""
    warps, n = len(x) // 16, x.shape[1]
    # warp, half of its rows, row; block of 8 columns, lane of four, element
    y = x.reshape(warps, 2, 8, n // 8, 4, 2)
    return y.transpose(0, 2, 4, 3, 1, 5).reshape(32 * warps, n // 2)


def labels(rows: int, columns: int) -> np.ndarray:
    """A matrix in which element (r, c) is 1000 r + c."""
    return np.arange(rows)[:, None] * 1000 + np.arange(columns)


def test_fragments_of_a(shim: Shim) -> None:
    cells = np.zeros((128, 4, 2, 2), np.int32)
    shim.a_cells(128, at(cells))
    x = labels(64, 16)
    expected = np.concatenate([a_fragment(x[16 * warp :][:16]) for warp in range(4)])
    np.testing.assert_array_equal(x[cells[..., 0], cells[..., 1]], expected)


def test_fragments_of_b(shim: Shim) -> None:
    cells = np.zeros((32, 2, 2, 2), np.int32)
    shim.b_cells(at(cells))
    x = labels(16, 8)
    np.testing.assert_array_equal(x[cells[..., 0], cells[..., 1]], b_fragment(x))


@pytest.mark.parametrize(("threads", "n"), [(32, 8), (128, 8), (128, 64), (128, 104), (128, 256)])
def test_accumulators(shim: Shim, threads: int, n: int) -> None:
    cells = np.zeros((threads, n // 2, 2), np.int32)
    shim.accumulator_cells(threads, n, at(cells))
    x = labels(threads // 2, n)
    np.testing.assert_array_equal(x[cells[..., 0], cells[..., 1]], accumulators(x))
    if threads == 128:
        back = np.zeros((64, n, 2), np.int32)
        shim.accumulator_registers(n, at(back))
        np.testing.assert_array_equal(accumulators(x)[back[..., 0], back[..., 1]], x)


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_and_stmatrix(shim: Shim, count: int, transposed: int) -> None:
    rng = np.random.default_rng(count)
    memory = rng.integers(0, 2**16, (64, 8), np.uint16)
    # Lane 8 j + r points to row r of matrix j; the other lanes to nothing.
    rows = np.full(32, -(2**20), np.int32)
    rows[: 8 * count] = rng.permutation(64)[: 8 * count]
    matrices = memory[rows[: 8 * count]].reshape(count, 8, 8)
    if transposed:
        matrices = matrices.transpose(0, 2, 1)
    expected = np.stack([fragment(matrix) for matrix in matrices], 1)

    registers = np.zeros((32, count), np.uint32)
    shim.ldmatrix(count, transposed, at(memory), at(rows), at(registers))
    np.testing.assert_array_equal(registers.view(np.uint16).reshape(32, count, 2), expected)

    copy = np.zeros_like(memory)
    shim.stmatrix(count, transposed, at(copy), at(rows), at(registers))
    untouched = np.setdiff1d(np.arange(64), rows)
    assert not copy[untouched].any()
    copy[untouched] = memory[untouched]
    np.testing.assert_array_equal(copy, memory)


# --- Products ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_16_bit_number(shim: Shim, dtype: type) -> None:
    check_every_number(shim, dtype)


def check_every_number(shim: Shim, dtype: type) -> None:
    x = np.arange(2**16, dtype=np.uint16)
    y = np.zeros(2**16, np.float32)
    shim.to_floats(int(dtype is not np.float16), at(x), x.size, at(y))
    with np.errstate(all="ignore"):
        expected = x.view(dtype).astype(np.float32)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(y.view(np.uint32)[number], expected.view(np.uint32)[number])
    assert np.isnan(y[~number]).all()


def words(fragments: np.ndarray) -> np.ndarray:
    """16-bit elements as registers."""
    return np.ascontiguousarray(fragments).view(np.uint32)[..., 0]


def in_order(a: np.ndarray, b: np.ndarray, c: np.ndarray | None) -> np.ndarray:
    """C + A B in float32, one rounding after the other in the order that products.h promises."""
    a, b = a.astype(np.float32), b.astype(np.float32)
    total = np.zeros((len(a), b.shape[1]), np.float32)
    for k in range(a.shape[1]):
        total += a[:, k, None] * b[k]
    return total if c is None else c + total


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mma(shim: Shim, dtype: type, accumulate: bool) -> None:
    rng = np.random.default_rng(0)
    bfloat16 = int(dtype is not np.float16)
    for draw in (lambda *shape: rng.integers(-9, 9, shape), lambda *shape: rng.normal(size=shape)):
        a, b, c = draw(16, 16).astype(dtype), draw(16, 8).astype(dtype), draw(16, 8)
        c = c.astype(np.float32) if accumulate else None
        d = np.full((32, 4), np.nan, np.float32)
        a_words, b_words = words(a_fragment(a)), words(b_fragment(b))
        c_registers = None if c is None else accumulators(c)
        shim.mma_product(bfloat16, at(a_words), at(b_words), at(c_registers), at(d))
        np.testing.assert_array_equal(d, accumulators(in_order(a, b, c)))


@pytest.mark.parametrize("n", [8, 24, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_wgmma_with_a_in_registers(shim: Shim, dtype: type, n: int) -> None:
    rng = np.random.default_rng(n)
    bfloat16 = int(dtype is not np.float16)
    a = rng.normal(size=(64, 16)).astype(dtype)
    b = rng.normal(size=(16, n)).astype(dtype)
    c = rng.normal(size=(64, n)).astype(np.float32)
    a_words = np.concatenate([words(a_fragment(a[16 * warp :][:16])) for warp in range(4)])
    # K-major without swizzling: cores of 8 columns x 8 values of k, those along k first.
    memory = np.ascontiguousarray(b.T.reshape(n // 8, 8, 2, 8).transpose(0, 2, 1, 3))
    descriptor = encode_descriptor(0, 128, 256, 0)
    for add in (0, 1):
        d = accumulators(c) if add else np.full((128, n // 2), np.nan, np.float32)
        shim.wgmma_product(bfloat16, at(memory), 0, 0, at(a_words), descriptor, 0, n, add, at(d))
        np.testing.assert_array_equal(d, accumulators(in_order(a, b, c if add else None)))


# --- TMA: boxes ----------------------------------------------------------------------------------


def pieces(
    shim: Shim, tensor: TensorMap, coordinates: tuple[int, ...], shared: int
) -> tuple[np.ndarray, int]:
    """The pieces of a box, and how many bytes of shared memory it spans."""
    box_bytes = math.prod(tensor.box) * tensor.itemsize
    sizes = np.zeros(2, np.uintp)
    out = np.zeros(box_bytes // 16 + 1, PIECE)
    where = np.array(coordinates, np.int32)
    count = shim.box_pieces(tensor.encode_cpu(), at(where), shared, at(sizes), at(out))
    assert count == box_bytes // 16
    assert sizes[0] == box_bytes
    return out[:count], int(sizes[1])


def load(
    shim: Shim, tensor: TensorMap, coordinates: tuple[int, ...], memory: np.ndarray, shared: int
) -> np.ndarray:
    """Load a box of a tensor that lies in `memory` into a copy of shared memory, 0xA5 before."""
    found, span = pieces(shim, tensor, coordinates, shared)
    result = np.full(shared + span + 1024, 0xA5, np.uint8)
    for piece in found:
        begin, end = int(piece["begin"]), int(piece["end"])
        values = np.zeros(16, np.uint8)
        if begin < end:
            start = int(piece["global"]) - memory.ctypes.data
            assert start >= 0 and start + end - begin <= memory.size
            values[begin:end] = memory[start : start + end - begin]
        result[piece["shared"] :][:16] = values
    return result


RECORDED_BOXES = [
    (128, (64, 40, 3), (64, 16, 1), (0, 0, 0), 0),
    (128, (64, 40, 3), (64, 16, 1), (0, 30, 2), 1024),
    (128, (64, 40, 3), (64, 16, 1), (0, -5, 1), 2048),
    (128, (72, 40, 3), (64, 16, 1), (16, 8, 1), 0),
    (64, (64, 40, 3), (32, 16, 1), (32, 3, 1), 512),
    (32, (64, 40, 3), (16, 16, 2), (16, 3, 1), 256),
    (0, (64, 40, 3), (24, 16, 1), (8, 3, 1), 128),
    (128, (64, 40, 3), (64, 8, 2), (0, 3, 1), 128),
    (128, (64, 40, 3), (64, 8, 2), (0, 3, 1), 1408),
    (128, (64, 40, 3), (32, 16, 1), (0, 3, 1), 0),
]


@pytest.mark.parametrize("case", range(len(RECORDED_BOXES)))
def test_boxes_as_recorded(shim: Shim, golden: dict[str, np.ndarray], case: int) -> None:
    swizzle, dims, box, coordinates, offset = RECORDED_BOXES[case]
    memory, address = aligned(math.prod(dims) * 2)
    memory.view(np.uint16)[:] = np.arange(math.prod(dims))
    strides = (dims[0] * 2, dims[0] * dims[1] * 2)
    tensor = TensorMap(address, "bfloat16", dims, strides, box, swizzle)
    found, _ = pieces(shim, tensor, coordinates, offset)
    result = load(shim, tensor, coordinates, memory, offset)
    expected = golden[f"tma{case}_shared"].view(np.uint8)
    filled = np.full(2048, 0xDEADBEEF, np.uint32).view(np.uint8)
    for piece in found:
        filled[piece["shared"] :][:16] = result[piece["shared"] :][:16]
    np.testing.assert_array_equal(filled, expected)


def aligned(size: int) -> tuple[np.ndarray, int]:
    """Bytes that begin at a multiple of 16."""
    space = np.zeros(size + 16, np.uint8)
    memory = space[-space.ctypes.data % 16 :][:size]
    return memory, memory.ctypes.data


@st.composite
def boxes(draw: st.DrawFn) -> tuple[TensorMap, np.ndarray, tuple[int, ...], int]:
    """A map of a random tensor with gaps, its memory, coordinates, and a shared address."""
    rank = draw(st.integers(1, 5))
    dtype = draw(st.sampled_from(sorted(tensormap.ELEMENT_BYTES)))
    size = tensormap.ELEMENT_BYTES[dtype]
    swizzle = draw(st.sampled_from([0, 32, 64, 128]))
    row_pieces = draw(st.integers(1, swizzle // 16 if swizzle else min(16 * size, 12)))
    dims = [draw(st.integers(1, 300 // size)), *(draw(st.integers(1, 6)) for _ in range(rank - 1))]
    box = [row_pieces * 16 // size, *(draw(st.integers(1, 5)) for _ in range(rank - 1))]
    coordinates = [draw(st.integers(-b - 1, d + 1)) for b, d in zip(box, dims, strict=True)]
    # Axes in any order in memory.
    strides, extent = [0] * (rank - 1), dims[0] * size
    for axis in draw(st.permutations(range(1, rank))):
        strides[axis - 1] = -(-extent // 16) * 16 + 16 * draw(st.integers(0, 1))
        extent = strides[axis - 1] * dims[axis]
    memory, address = aligned(extent)
    memory[:] = np.random.default_rng(extent).integers(0, 256, extent)
    shared = 128 * draw(st.integers(0, 9))
    tensor = TensorMap(address, dtype, tuple(dims), tuple(strides), tuple(box), swizzle)
    return tensor, memory, tuple(coordinates), shared


def view(tensor: TensorMap, memory: np.ndarray) -> np.ndarray:
    """The tensor, its elements as unsigned integers, outermost axis first."""
    kind = np.dtype(f"u{tensor.itemsize}")
    return np.ndarray(
        tensor.dims[::-1], kind, memory, strides=(*tensor.strides[::-1], tensor.itemsize)
    )


def overlap(tensor: TensorMap, coordinates: tuple[int, ...]) -> tuple[tuple, tuple]:
    """What tensor and box have in common, as slices of each."""
    here, there = [], []
    for dim, box, first in zip(tensor.dims, tensor.box, coordinates, strict=True):
        low, high = max(first, 0), max(min(first + box, dim), max(first, 0))
        here.append(slice(low, high))
        there.append(slice(low - first, high - first))
    return tuple(here[::-1]), tuple(there[::-1])


def places(tensor: TensorMap, shared: int) -> np.ndarray:
    """The shared address of each 16-byte piece of the box, in its order."""
    row = tensor.box[0] * tensor.itemsize // 16
    rows = math.prod(tensor.box[1:])
    pitch = tensor.swizzle // 16 or row
    unit = shared // 16 + pitch * np.arange(rows)[:, None] + np.arange(row)
    line, place = np.divmod(unit, 8)
    if tensor.swizzle:
        place = place ^ line % (tensor.swizzle // 16)
    return (8 * line + place).ravel() * 16


@given(boxes())
@settings(max_examples=400)
def test_boxes_are_slices(shim: Shim, case: tuple) -> None:
    tensor, memory, coordinates, shared = case
    x = view(tensor, memory)
    here, there = overlap(tensor, coordinates)
    expected = np.zeros(tensor.box[::-1], x.dtype)
    expected[there] = x[here]

    result = load(shim, tensor, coordinates, memory, shared)
    address = places(tensor, shared)
    found = result.reshape(-1, 16)[address // 16]
    np.testing.assert_array_equal(found.ravel(), expected.ravel().view(np.uint8))
    rest = np.delete(result.reshape(-1, 16), address // 16, 0)
    assert (rest == 0xA5).all()

    # The other way: what is not in the tensor is left out, so nothing else changes.
    other, _ = aligned(memory.size)
    other[:] = memory
    wanted = view(tensor, other)
    wanted[here] += expected[there]
    sums, _ = aligned(memory.size)
    sums[:] = memory
    kind = x.dtype
    for piece in pieces(shim, tensor, coordinates, shared)[0]:
        begin, end = int(piece["begin"]), int(piece["end"])
        if begin < end:
            start = int(piece["global"]) - memory.ctypes.data
            target = sums[start : start + end - begin].view(kind)
            target += result[piece["shared"] :][begin:end].view(kind)
    np.testing.assert_array_equal(sums, other)


def test_every_box_of_every_rank_is_walked(shim: Shim) -> None:
    """Rank by rank with all of the tensor inside of the box, so that each axis matters."""
    for rank in range(1, 6):
        dims = (8, 3, 2, 3, 2)[:rank]
        strides = tuple(16 * math.prod(dims[1:axis]) for axis in range(1, rank))
        memory, address = aligned(16 * math.prod(dims[1:]))
        memory[:] = np.arange(memory.size) % 251
        tensor = TensorMap(address, "float16", dims, strides, dims)
        result = load(shim, tensor, (0,) * rank, memory, 0)
        np.testing.assert_array_equal(result[: memory.size], memory)


def test_large_dimensions(shim: Shim) -> None:
    """Addresses that need more than 32 bits; only arithmetic, nothing is there."""
    tensor = TensorMap(2**40, "uint8", (2**32, 2**32), (2**32,), (16, 2))
    found, _ = pieces(shim, tensor, (2**31 - 16, 2**31 - 2), 0)
    first = 2**40 + 2**31 - 16 + (2**31 - 2) * 2**32
    assert found["global"].tolist() == [first, first + 2**32]
    assert found["end"].tolist() == [16, 16]


def test_wrong_boxes_are_told(shim: Shim) -> None:
    tensor = TensorMap(4096, "float32", (64,), (), (32,), 128).encode_cpu()
    assert len(tensor) == tensormap.MAP_BYTES == 128
    assert shim.problem_of_box(tensor, 1024 + 128) is None
    assert b"multiple of 128" in shim.problem_of_box(tensor, 1024 + 16)
    assert b"no tensor map" in shim.problem_of_box(bytes(128), 0)
    plain = TensorMap(4096, "float32", (64,), (), (32,)).encode_cpu()
    assert b"of one axis must be swizzled" in shim.problem_of_box(plain, 0)


# --- TensorMap -----------------------------------------------------------------------------------

GOOD = dict(
    address=1 << 20, dtype="bfloat16", dims=(64, 100, 3), strides=(128, 12800), box=(64, 16, 1),
    swizzle=128,
)  # fmt: skip
BAD = [
    ("address", 0, "a multiple of 16, got 0x0"),
    ("address", 1048584, "a multiple of 16, got 0x100008"),
    ("address", 2**64, "a multiple of 16"),
    ("dtype", "int32", "uint8, float16, bfloat16, float32, float64, got 'int32'"),
    ("dims", (), "1 to 5 axes, got 0"),
    ("dims", (1,) * 6, "1 to 5 axes, got 6"),
    ("dims", (64, 0, 3), "from 1 to 2**32, got (64, 0, 3)"),
    ("dims", (64, 2**32 + 1, 3), "from 1 to 2**32"),
    ("strides", (128,), "2, one less than dims, got 1"),
    ("strides", (128, 12808), "multiples of 16 from 0 to below 2**40, got (128, 12808)"),
    ("strides", (-128, 12800), "multiples of 16"),
    ("strides", (128, 2**40), "multiples of 16"),
    ("box", (64, 16), "3 numbers, as dims has, got 2"),
    ("box", (64, 257, 1), "from 1 to 256, got (64, 257, 1)"),
    ("box", (64, 0, 1), "from 1 to 256"),
    ("box", (12, 16, 1), "rows of a multiple of 16 bytes, got 24"),
    ("box", (72, 16, 1), "rows of at most 128 bytes, as they are swizzled, got 144"),
    ("swizzle", 16, "0, 32, 64 or 128, got 16"),
    ("swizzle", 64, "box: expected rows of at most 64 bytes"),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_rules_of_maps(name: str, value: Any, message: str) -> None:
    TensorMap(**GOOD)
    with pytest.raises(ValueError) as caught:
        TensorMap(**{**GOOD, name: value})
    text = str(caught.value)
    assert message in text
    assert text.startswith(f"{name}: expected ") or message.startswith("box: ")


def test_maps_at_their_limits() -> None:
    TensorMap(16, "float64", (2**32,) * 5, (2**40 - 16,) * 4, (256,) * 5)
    TensorMap(2**64 - 16, "uint8", (1,), (), (16,), 32)
    assert TensorMap(**{**GOOD, "dims": [64, np.int64(100), 3]}) == TensorMap(**GOOD)
    with pytest.raises(TypeError):
        TensorMap(**{**GOOD, "dims": (64, 100.0, 3)})


def test_what_the_driver_is_asked_for(shim: Shim, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a library in its place that writes down its arguments."""
    library = ctypes.CDLL(str(shim.path))
    monkeypatch.setattr(tensormap.ctypes, "CDLL", lambda name: library)
    tensormap._encode_tiled.cache_clear()
    try:
        said = TensorMap(**GOOD).encode_gpu()
        assert np.frombuffer(said, np.uint64)[:10].tolist() == [
            1 << 20, 64, 100, 3, 0, 0, 128, 12800, 0, 0,
        ]  # fmt: skip
        small = np.frombuffer(said, np.int32)[20:28].tolist()
        assert small == [9, 3, 0, 3, 2, 0, (64 * 256 + 16) * 256 + 1, 3]
        types = {"uint8": 0, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
        for dtype, number in types.items():
            said = TensorMap(64, dtype, (64,), (), (16,)).encode_gpu(256)
            small = np.frombuffer(said, np.int32)[20:28].tolist()
            assert small == [number, 1, 0, 0, 3, 0, 16, 1]
        with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled returned error 700 for"):
            TensorMap(64, "uint8", (256,), (), (256,)).encode_gpu()
        with pytest.raises(ValueError, match=r"^l2_promotion: expected 0, 64, 128 or 256, got 32$"):
            TensorMap(**GOOD).encode_gpu(32)
    finally:
        tensormap._encode_tiled.cache_clear()


@pytest.mark.gpu
def test_the_driver_takes_every_kind_of_map() -> None:
    import cupy

    memory = cupy.zeros(1 << 16, np.uint8)
    maps = set()
    for dtype, size in tensormap.ELEMENT_BYTES.items():
        for swizzle in (0, 32, 64, 128):
            for rank in range(1, 6):
                dims, box = (64, *(2,) * (rank - 1)), (32 // size, *(2,) * (rank - 1))
                strides = tuple(1024 * 2**axis for axis in range(rank - 1))
                tensor = TensorMap(memory.data.ptr, dtype, dims, strides, box, swizzle)
                maps.add(tensor.encode_gpu())
    assert len(maps) == 100


# --- Compilers -----------------------------------------------------------------------------------


@pytest.mark.skipif(not find_spec("ziglang"), reason="the package ziglang is missing")
def test_zig(tmp_path: Path, golden: dict[str, np.ndarray]) -> None:
    shim = compile_shim(host.probe((sys.executable, "-m", "ziglang", "c++")), tmp_path)
    for n in (64, 128):
        for transposed in range(4):
            check_recorded_wgmma(shim, golden, n, transposed // 2, transposed % 2)
    for dtype in DTYPES:
        check_every_number(shim, dtype)
