# SPDX-License-Identifier: Apache-2.0
"""Record what single instructions of an H200 do, so that the CPU back end can be compared with it.

``python3 -m bench.probe --output golden_more.npz`` compiles ``probe.cu``, runs it in a process of
its own, and starts another after a case in which one hangs or fails. Numbers are integers where
results must be exact. ``about`` is JSON: the machine, and the cases that failed: they have no rows.

Every array has one row per case, in the order of the cases. Shared memory begins at a multiple of
1024; offsets are from there, in bytes. Words are uint32, pairs of elements of 16 bits, the first in
the lower half. A register array is (case, lane or thread, register).

mma_{float16,bfloat16}_{a,b,c,d}
    mma.sync.m16n8k16: registers of the operands (uint32) and of the sums before and after
    (float32). The first eight cases are integers; the other four are normal numbers, whose sums
    depend on order and truncation.
ldmatrix_x{1,2,4}_{0,1}_{offsets,registers}
    1 is .trans. Shared memory is 512 words of the elements 0, 1, 2, ...; ``offsets`` are the lanes'
    addresses (int32). Tidy rows, rows 80 bytes apart, rows anywhere and repeated.
stmatrix_x{1,2,4}_{0,1}_{offsets,registers,image}
    Into 512 words of the same elements; ``image`` is shared memory afterwards. No two rows in one
    place, except those of lanes whose address is not used.
wgmma_image, wgmma_case, wgmma_a, wgmma_d
    ``image`` (no rows): (32768,) int8, which is all of shared memory, converted to the type.
    ``case``: int32, columns: type (0 float16, 1 bfloat16), N, where a is (0 shared memory, K-major;
    1 shared memory, MN-major; 2 registers), whether b is MN-major, then for a and for b: offset,
    leading_bytes, stride_bytes, swizzle (0 none, 1 32, 2 64, 3 128 bytes), as wgmma_descriptor
    takes them; accumulate; the value of all of d before.
    ``a``: registers, (case, 128, 4) uint32; of every case, used if a is in registers.
    ``d``: int8, all cases one after the other, 64 N numbers each: [thread][register]. There is no
    wgmma_odd_{i}: it would be a result in float32 that is not made of small integers.
tma_load_case, tma_load_shared
    ``case``: int32, columns: swizzle, offset, rank, dims[5], box[5], at[5], cache hint (0 none, 1
    evict first, 2 evict last); innermost first, ones and zeros beyond the rank. The tensor is
    dense, of uint16 1, 2, 3, ...; out of bounds is zero. ``shared``: 1024 words, which were
    0xdeadbeef. The barrier received the bytes of the full box, or the case would have hung.
tma_store_case, tma_store_image, tma_store_tensor
    ``case`` as above. ``image`` (no rows): 2048 elements 1, 2, 3, ... in shared memory. ``tensor``:
    1536 uint16, which were 0xbeef; the tensor is the first of them, the others must stay.
tma_reduce_add_case, tma_reduce_add_image, tma_reduce_add_tensor
    The same with 1024 elements of float32, i % 251 - 100, added to a tensor of -0.5 i, by as many
    blocks as the last column says. ``tensor``: 768 float32.
bulk_{load,store,reduce_add}_case, _result
    ``case``: int32: offset in global memory, offset in shared memory, bytes. The side that is read
    has the elements of tma_store (bulk_reduce_add: of tma_reduce_add), the other the filling of the
    tma kernel: bulk_load 1024 words, bulk_store 2048 uint16, bulk_reduce_add 1024 float32.
reduce_add_{1,2,4}_{at,values,result}
    red.global.add of 1, 2, 4 numbers by each of 32 lanes, at element ``at`` of 256 float32, which
    were -0.5 i; several lanes to one place.
{exp2,log2,rcp}_approx_{x,y}
    Bits (uint32) of one argument per row and of its result.
pack2_{float16,bfloat16}_{low,high,y}
    Bits (uint32) of the arguments and the result.
elect_one_elected
    (1, 32) int32: which lane was elected.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.machine import facts, now

SOURCE = Path(__file__).with_name("probe.cu")
WORDS, MATRIX_WORDS, IMAGE_WORDS, FILL = 1024, 512, 16384, 0xDEADBEEF  # as in probe.cu
SPAN = (16, 32, 64, 128)  # bytes of a row, by swizzle
NONE, S32, S64, S128 = range(4)
COLUMNS = (8, 24, 80, 96, 128, 192, 256)
Arrays = dict[str, np.ndarray]


class Unit(NamedTuple):
    """What compile_cubin wants to know of a plan."""

    kernel: str = "probe"
    target_suffix: str = "a"


class Buffer:
    """An array in global memory."""

    def __init__(self, x: np.ndarray) -> None:
        import cupy

        self.array = cupy.asarray(np.ascontiguousarray(x))
        self.address = int(self.array.data.ptr)

    def get(self) -> np.ndarray:
        """Return what it holds now."""
        return self.array.get()


class Device:
    """The kernels on the GPU."""

    def __init__(self, cubin: Path) -> None:
        import cupy

        self._module = cupy.RawModule(path=str(cubin))

    def upload(self, x: np.ndarray) -> Buffer:
        """Return a copy on the GPU."""
        return Buffer(x)

    def launch(
        self, name: str, threads: int, *arguments: Any, blocks: int = 1, smem: int = 8192
    ) -> None:
        """Run a kernel to its end. Arguments are buffers, integers, floats and tensor maps."""
        import cupy

        kernel = self._module.get_function(name)
        kernel.max_dynamic_shared_size_bytes = smem
        held = [_argument(x) for x in arguments]
        addresses = (ctypes.c_void_p * len(held))(*(ctypes.addressof(x) for x in held))
        cupy.cuda.driver.launchKernel(
            kernel.kernel.ptr, blocks, 1, 1, threads, 1, 1, smem, 0, ctypes.addressof(addresses), 0
        )
        cupy.cuda.runtime.deviceSynchronize()

    def tensor_map(
        self, x: Buffer, dtype: str, dims: tuple[int, ...], box: tuple[int, ...], swizzle: int
    ) -> Any:
        """Describe a dense tensor; dims are innermost first."""
        size = np.dtype(dtype).itemsize
        rank = len(dims)
        strides = [size * math.prod(dims[: i + 1]) for i in range(rank - 1)]
        memory = ctypes.create_string_buffer(128 + 64)
        start = -ctypes.addressof(memory) % 64
        error = _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(ctypes.addressof(memory) + start),
            ctypes.c_int({"uint16": 1, "float32": 7}[dtype]),
            ctypes.c_uint32(rank),
            ctypes.c_void_p(x.address),
            (ctypes.c_uint64 * rank)(*dims),
            (ctypes.c_uint64 * max(rank - 1, 1))(*strides),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
            ctypes.c_int(0),  # no interleaving
            ctypes.c_int(swizzle),
            ctypes.c_int(0),  # no promotion in the L2 cache
            ctypes.c_int(0),  # zeros out of bounds
        )
        if error:
            raise RuntimeError(f"cuTensorMapEncodeTiled: error {error}")
        return (ctypes.c_ubyte * 128).from_buffer_copy(memory, start)


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _argument(x: Any) -> Any:
    if hasattr(x, "address"):
        return ctypes.c_void_p(x.address)
    if isinstance(x, float):
        return ctypes.c_float(x)
    return ctypes.c_int(x) if isinstance(x, (int, np.integer)) else x


def rng(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


def row(**arrays: Any) -> Arrays:
    return {name: np.asarray(x)[None] for name, x in arrays.items()}


def renamed(prefix: str, arrays: Arrays) -> Arrays:
    return {f"{prefix}_{name}": x for name, x in arrays.items()}


def elements(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return numbers as bits of a type of 16 bits, two in a word along the last axis."""
    if dtype == "float16":
        bits = x.astype(np.float16).view(np.uint16)
    else:  # exact, or cut off
        bits = (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.ascontiguousarray(bits).view(np.uint32)


# --- Registers -----------------------------------------------------------------------------------
# Each of these functions is one case: it launches a kernel, or a few, and returns rows of arrays.


def mma(dtype: str, i: int, device: Device) -> Arrays:
    draw = rng(f"mma {dtype} {i}")
    if i < 8:
        a, b = (draw.integers(-8, 9, (32, n)) for n in (8, 4))
        c = draw.integers(-64, 65, (32, 4))
    else:
        a, b, c = (draw.standard_normal((32, n)) for n in (8, 4, 4))
    a, b, c = elements(a, dtype), elements(b, dtype), c.astype(np.float32)
    to = device.upload(np.zeros((32, 4), np.float32))
    device.launch(f"mma_{dtype}", 32, *map(device.upload, (a, b, c)), to)
    return renamed(f"mma_{dtype}", row(a=a, b=b, c=c, d=to.get()))


def matrix_offsets(draw: np.random.Generator, kind: int, used: int) -> np.ndarray:
    """Return where the lanes' rows are: 32 multiples of 16 below 2048."""
    if kind == 0:
        return 16 * np.arange(32)
    if kind == 1:  # as in a padded tile
        return 80 * np.arange(32) % 2048
    offsets = 16 * draw.permutation(128)[:32]
    offsets[used:] = offsets[draw.integers(0, used, 32 - used)]
    return offsets


def matrix_image() -> np.ndarray:
    return np.arange(2 * MATRIX_WORDS, dtype=np.uint16).view(np.uint32)


def ldmatrix(number: int, trans: int, kind: int, device: Device) -> Arrays:
    name = f"ldmatrix_x{number}_{trans}"
    draw = rng(f"{name} {kind}")
    offsets = matrix_offsets(draw, kind, 8 * number).astype(np.int32)
    if kind == 3:
        offsets = draw.choice(offsets, 32)  # some rows twice
    to = device.upload(np.zeros((32, number), np.uint32))
    device.launch(name, 32, device.upload(matrix_image()), device.upload(offsets), to)
    return renamed(name, row(offsets=offsets, registers=to.get()))


def stmatrix(number: int, trans: int, kind: int, device: Device) -> Arrays:
    name = f"stmatrix_x{number}_{trans}"
    offsets = matrix_offsets(rng(f"{name} {kind}"), kind, 8 * number).astype(np.int32)
    registers = 40000 + np.arange(64 * number, dtype=np.uint16)
    registers = registers.view(np.uint32).reshape(32, number)
    to = device.upload(matrix_image())
    device.launch(name, 32, device.upload(registers), device.upload(offsets), to)
    return renamed(name, row(offsets=offsets, registers=registers, image=to.get()))


def bits_of(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32).view(np.uint32)


SPECIAL = np.concatenate(
    [
        bits_of(0.0, 1.0, 2.0**-14, 2.0**-24, 2.0**-126, 2.0**-149, 1e-40, math.inf, 3.4028235e38),
        np.array([0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x7FA12345], np.uint32),
    ]
)


def math_arguments(name: str) -> np.ndarray:
    draw = rng(name)
    special = np.concatenate([SPECIAL, SPECIAL | 0x80000000])
    if name == "exp2_approx":
        edges = bits_of(-126, -126.5, -127, -148, -149, -150, -151, 127, 127.99999, 128, 129, 1e9)
        usual = draw.uniform(-30, 0, 500).astype(np.float32).view(np.uint32)
        wide = draw.uniform(-152, 130, 400).astype(np.float32).view(np.uint32)
        whole = np.arange(-31, 31).astype(np.float32).view(np.uint32)
        return np.concatenate([special, edges, usual, wide, whole])
    usual = draw.uniform(0.5, 4, 100).astype(np.float32).view(np.uint32)
    return np.concatenate([special, usual, draw.integers(0, 2**32, 150, np.uint32)])


def special_function(name: str, device: Device) -> Arrays:
    x = math_arguments(name)
    to = device.upload(np.zeros_like(x))
    device.launch(name, 128, device.upload(x), to, len(x), blocks=-(-len(x) // 128))
    return {f"{name}_x": x, f"{name}_y": to.get()}


def pack_arguments() -> np.ndarray:
    """Return bits of floats: ties and limits of both types, what has no value, and any."""
    ties = [1 + 2**-11, 1 + 3 * 2**-11, 2049, 2051, 65504, 65519.99, 65520, 65536, 1e30]
    ties += [2**-25, 2**-25 * 1.0001, 3 * 2**-25, 2**-14 - 2**-25, 2**-14 - 2**-24, 2**-26]
    ties += [2**-24 * 1.5, 5 * 2**-25, 7 * 2**-25, 1023.5 * 2**-24, 2**-15 + 2**-25]
    upper = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF]
    upper += [0x00008000, 0x00018000, 0x00008001, 0x00004000, 0x007F8000, 0x007FFFFF, 0x00010000]
    every = np.concatenate([SPECIAL, bits_of(*ties), np.array(upper, np.uint32)])
    draw = rng("pack2")
    middling = draw.standard_normal(60).astype(np.float32).view(np.uint32)
    anything = draw.integers(0, 2**32, 60, np.uint32)
    return np.concatenate([every, every | 0x80000000, middling, anything])


def pack2(dtype: str, device: Device) -> Arrays:
    low = pack_arguments()
    high = low[::-1].copy()
    to = device.upload(np.zeros_like(low))
    given = device.upload(low), device.upload(high)
    device.launch(f"pack2_{dtype}", 128, *given, to, len(low), blocks=-(-len(low) // 128))
    return renamed(f"pack2_{dtype}", {"low": low, "high": high, "y": to.get()})


def halves(n: int) -> np.ndarray:
    return np.float32(-0.5) * np.arange(n, dtype=np.float32)


def reduce_add(number: int, device: Device) -> Arrays:
    name = f"reduce_add_{number}"
    draw = rng(name)
    at = (number * draw.integers(0, 40, 32)).astype(np.int32)
    values = draw.integers(-100, 101, (32, number)).astype(np.float32)
    to = device.upload(halves(256))
    device.launch(name, 32, to, device.upload(at), device.upload(values))
    return renamed(name, row(at=at, values=values, result=to.get()))


def elect_one(device: Device) -> Arrays:
    to = device.upload(np.zeros(32, np.int32))
    device.launch("elect_one", 32, to)
    return row(elect_one_elected=to.get())


# --- wgmma ---------------------------------------------------------------------------------------


def wgmma_image() -> np.ndarray:
    return rng("wgmma_image").integers(-1, 2, 2 * IMAGE_WORDS).astype(np.int8)


def k_major(draw: np.random.Generator, start: int, swizzle: int, tidy: bool) -> list[int]:
    """Return an operand whose rows are neighbours in k: offset, leading, stride, swizzle."""
    if swizzle == NONE:  # 8 rows of 8 elements, the other 8 of k, then the next 8 rows
        return [start, 128, 256, NONE] if tidy else [start + 48, 4096, 144, NONE]
    atom = 8 * SPAN[swizzle]
    if tidy:
        return [start, 16, atom, swizzle]
    step = 32 * int(draw.integers(0, SPAN[swizzle] // 32))
    return [start + 2 * atom + step, 16, 2 * atom, swizzle]


def mn_major(start: int, columns: int, swizzle: int, tidy: bool) -> list[int]:
    """Return an operand whose rows are neighbours in m or n."""
    if swizzle == NONE:  # leading: to the other 8 of k; stride: to the next 8 columns
        return [start, 128, 256, NONE] if tidy else [start + 16, 8192, 128, NONE]
    span = SPAN[swizzle]
    if tidy:  # 16 rows of k, then the next columns
        return [start, 16 * span, 8 * span, swizzle]
    chunks = -(-2 * columns // span)
    return [start + 8 * span, 8 * span, 8 * span * chunks, swizzle]


class Product(NamedTuple):
    """One wgmma."""

    dtype: str
    columns: int
    a: int  # 0: shared memory, K-major; 1: shared memory, MN-major; 2: registers
    trans_b: int
    swizzle_a: int
    swizzle_b: int
    tidy: bool


def products() -> list[Product]:
    todo = []
    for i, columns in enumerate(COLUMNS):
        for j, (a, trans) in enumerate(((0, 0), (1, 1), (2, 0), (2, 1))):
            todo.append(Product("float16", columns, a, trans, S64, S64, (i + j) % 2 == 0))
    for trans in (0, 1):
        for tidy in (True, False):
            todo.append(Product("float16", 96, 2, trans, NONE, NONE, tidy))
        for swizzle in (S128, S32):
            todo.append(Product("float16", 96, 2, trans, NONE, swizzle, trans == 1))
        todo.append(Product("bfloat16", 96, 2, trans, NONE, S64, False))
    todo.append(Product("float16", 96, 0, 1, S64, S128, False))
    todo.append(Product("float16", 96, 1, 0, S32, S64, False))
    todo.append(Product("float16", 96, 0, 1, NONE, S64, True))
    todo.append(Product("float16", 96, 1, 0, NONE, S128, True))
    return todo


def wgmma(i: int, x: Product, device: Device) -> Arrays:
    draw = rng(f"wgmma {i}")
    a, b = (
        mn_major(start, columns, swizzle, x.tidy)
        if trans
        else k_major(draw, start, swizzle, x.tidy)
        for start, columns, swizzle, trans in (
            (0, 64, x.swizzle_a, x.a == 1),
            (16384, x.columns, x.swizzle_b, x.trans_b),
        )
    )
    registers = elements(draw.integers(-1, 2, (128, 8)), x.dtype)
    accumulate, before = (1, 1) if i % 2 else (0, 99)
    to = device.upload(np.zeros(64 * x.columns, np.float32))
    where = ("kK", "kMn", "kRegisters")[x.a]
    device.launch(
        f"wgmma_{x.dtype}_{x.columns}_{where}_{x.trans_b}",
        128,
        device.upload(elements(wgmma_image(), x.dtype)),
        device.upload(np.array([a, b], np.int32)),
        device.upload(registers),
        accumulate,
        float(before),
        to,
        smem=4 * IMAGE_WORDS + 1024,
    )
    d = to.get()
    odd = {} if (np.abs(d) < 128).all() and (d == np.rint(d)).all() else {f"wgmma_odd_{i}": d}
    kind = [int(x.dtype == "bfloat16"), x.columns, x.a, x.trans_b]
    case = np.array([*kind, *a, *b, accumulate, before], np.int32)
    d = np.nan_to_num(d).clip(-128, 127).astype(np.int8)
    return {**row(wgmma_case=case, wgmma_a=registers), "wgmma_d": d, **odd}


# --- TMA -----------------------------------------------------------------------------------------


class Box(NamedTuple):
    """One box of a tensor; all sizes are innermost first."""

    swizzle: int
    offset: int  # in shared memory
    dims: tuple[int, ...]
    box: tuple[int, ...]
    at: tuple[int, ...]
    last: int = 0  # cache hint, or number of blocks

    @property
    def case(self) -> np.ndarray:
        """Return the columns of the array of cases."""
        rank = len(self.dims)
        padded = [
            *(*self.dims, *[1] * (5 - rank)),
            *(*self.box, *[1] * (5 - rank)),
            *(*self.at, *[0] * (5 - rank)),
        ]
        return np.array([self.swizzle, self.offset, rank, *padded, self.last], np.int32)


LOADS = (
    # Boxes narrower than the swizzle.
    Box(S128, 0, (64, 40), (8, 16), (0, 0)),
    Box(S128, 128, (64, 40), (8, 16), (24, 3)),
    Box(S128, 0, (64, 40), (16, 16), (16, 3)),
    Box(S128, 1280, (64, 40), (16, 8), (0, 38)),
    Box(S128, 0, (64, 40), (32, 16), (0, 3)),
    Box(S128, 896, (64, 40), (32, 16), (32, -2)),
    Box(S128, 0, (64, 40), (24, 8), (8, 1)),
    Box(S128, 256, (64, 40), (40, 8), (56, 1)),
    Box(S128, 0, (64, 10, 3), (16, 4, 3), (16, 8, 0)),
    Box(S128, 0, (32, 5, 4, 6), (32, 2, 2, 4), (0, 1, 2, 1)),
    Box(S64, 0, (64, 40), (16, 16), (0, 0)),
    Box(S64, 640, (64, 40), (16, 16), (48, 30)),
    Box(S64, 0, (64, 40), (8, 16), (8, 5)),
    Box(S64, 128, (64, 40), (24, 8), (8, -3)),
    Box(S32, 0, (64, 40), (8, 16), (8, 5)),
    # Boxes as wide as the swizzle.
    Box(S64, 256, (64, 40), (32, 16), (16, 2)),
    Box(S64, 0, (64, 40), (32, 16), (48, 28), 1),
    Box(S128, 640, (64, 40), (64, 16), (0, 2), 2),
    Box(S128, 1024, (96, 40), (64, 16), (-16, 2), 1),
    # Ranks 1, 4 and 5.
    Box(NONE, 0, (1000,), (256,), (100,)),
    Box(NONE, 128, (1000,), (128,), (950,), 1),
    Box(S128, 640, (1000,), (64,), (64,), 2),
    Box(S128, 0, (1000,), (32,), (-8,)),
    Box(S64, 512, (1000,), (32,), (8,)),
    Box(S128, 0, (64, 10, 3, 4), (64, 4, 2, 2), (0, 8, 1, -1), 1),
    Box(S64, 512, (64, 10, 3, 4), (32, 4, 3, 2), (32, 2, 0, 3), 2),
    Box(S64, 0, (32, 6, 3, 3, 3), (32, 4, 1, 2, 2), (0, 3, 1, 1, 2), 1),
    Box(NONE, 0, (16, 5, 3, 3, 2), (16, 3, 2, 2, 1), (8, 3, 1, 1, 1), 2),
    Box(S128, 128, (64, 7, 2, 3, 2), (64, 5, 1, 2, 1), (0, 4, 1, 1, 1)),
    Box(S32, 256, (16, 5, 3, 3, 2), (16, 3, 2, 2, 2), (0, 3, -1, 1, 1)),
)

STORES = (
    Box(NONE, 0, (24, 20), (24, 8), (0, 3)),
    Box(S128, 0, (64, 20), (64, 8), (0, 16)),
    Box(S128, 1024, (64, 20), (64, 8), (0, -3)),
    Box(S128, 384, (40, 20), (64, 8), (0, 2)),
    Box(S64, 512, (64, 20), (32, 8), (48, 5)),
    Box(S64, 128, (64, 20), (32, 8), (32, 15)),
    Box(S32, 0, (64, 20), (16, 8), (-8, 0)),
    Box(S128, 0, (64, 20), (32, 8), (32, 1)),
    Box(S128, 0, (64, 20), (8, 8), (16, 1)),
    Box(S64, 256, (64, 20), (16, 8), (16, 1)),
    Box(S128, 384, (64, 6, 3), (64, 4, 2), (0, 4, 2)),
    Box(NONE, 0, (200,), (64,), (170,)),
    Box(S128, 0, (64, 4, 2, 2), (64, 2, 2, 2), (0, 3, 0, 1)),
    Box(S64, 0, (32, 3, 2, 2, 2), (32, 2, 2, 1, 2), (0, 2, 0, 1, -1)),
)

REDUCTIONS = (
    Box(NONE, 0, (12, 10), (12, 4), (0, 8), 1),
    Box(S128, 1024, (32, 10), (32, 8), (0, -2), 1),
    Box(S128, 0, (32, 10), (32, 8), (0, 5), 4),
    Box(S128, 128, (32, 10), (8, 8), (8, 1), 2),
    Box(S64, 512, (32, 10), (16, 8), (24, 1), 3),
    Box(NONE, 0, (200,), (64,), (-16,), 2),
    Box(S128, 0, (32, 3, 4), (32, 2, 2), (0, 2, 1), 1),
    Box(S128, 0, (32, 3, 2, 2), (32, 2, 2, 2), (0, 1, 1, 0), 2),
    Box(S32, 256, (8, 3, 2, 2, 2), (8, 2, 2, 2, 2), (0, 2, 0, 0, 0), 1),
)


def counting(n: int) -> np.ndarray:
    return (np.arange(n) + 1).astype(np.uint16)


def wave(n: int) -> np.ndarray:
    return (np.arange(n) % 251 - 100).astype(np.float32)


def tma_load(x: Box, device: Device) -> Arrays:
    tensor = device.upload(counting(math.prod(x.dims)))
    to = device.upload(np.zeros(WORDS, np.uint32))
    device.launch(
        "tma_load" + ("", "_evict_first", "_evict_last")[x.last],
        128,
        device.tensor_map(tensor, "uint16", x.dims, x.box, x.swizzle),
        len(x.dims),
        device.upload(np.array(x.at, np.int32)),
        x.offset,
        2 * math.prod(x.box),
        to,
    )
    return row(tma_load_case=x.case, tma_load_shared=to.get())


def tma_store(x: Box, device: Device) -> Arrays:
    tensor = device.upload(np.full(1536, 0xBEEF, np.uint16))
    device.launch(
        "tma_store",
        128,
        device.tensor_map(tensor, "uint16", x.dims, x.box, x.swizzle),
        len(x.dims),
        device.upload(np.array(x.at, np.int32)),
        x.offset,
        device.upload(counting(2 * WORDS)),
    )
    return row(tma_store_case=x.case, tma_store_tensor=tensor.get())


def tma_reduce_add(x: Box, device: Device) -> Arrays:
    tensor = device.upload(halves(768))
    device.launch(
        "tma_reduce_add",
        128,
        device.tensor_map(tensor, "float32", x.dims, x.box, x.swizzle),
        len(x.dims),
        device.upload(np.array(x.at, np.int32)),
        x.offset,
        device.upload(wave(WORDS)),
        blocks=x.last,
    )
    return row(tma_reduce_add_case=x.case, tma_reduce_add_tensor=tensor.get())


#: Offset in global memory, in shared memory, bytes.
RUNS = ((0, 0, 16), (16, 48, 16), (48, 16, 80), (32, 128, 512), (1024, 1008, 1040))


def bulk(name: str, run: tuple[int, int, int], device: Device) -> Arrays:
    if name == "bulk_load":
        start, given, to = counting(2 * WORDS), None, np.zeros(WORDS, np.uint32)
    elif name == "bulk_store":
        start, given, to = np.full(2 * WORDS, 0xBEEF, np.uint16), counting(2 * WORDS), None
    else:
        start, given, to = halves(WORDS), wave(WORDS), None
    in_global = device.upload(start)
    other = device.upload(given if to is None else to)
    device.launch(name, 128, in_global, *run, other)
    result = (in_global if to is None else other).get()
    return renamed(name, row(case=np.array(run, np.int32), result=result))


# --- All of them ---------------------------------------------------------------------------------


def all_cases() -> dict[str, Callable[[Device], Arrays]]:
    """Return the cases by name, in the order of the rows."""
    found: dict[str, Callable[[Device], Arrays]] = {"elect_one": elect_one}

    def add(function: Callable[..., Arrays], *arguments: Any) -> None:
        found[f"{function.__name__} {len(found)}"] = functools.partial(function, *arguments)

    for dtype in ("float16", "bfloat16"):
        for i in range(12):
            add(mma, dtype, i)
        add(pack2, dtype)
    for number in (1, 2, 4):
        add(reduce_add, number)
        for trans in (0, 1):
            for kind in range(4):
                add(ldmatrix, number, trans, kind)
            for kind in range(3):
                add(stmatrix, number, trans, kind)
    for name in ("exp2_approx", "log2_approx", "rcp_approx"):
        add(special_function, name)
    for i, product in enumerate(products()):
        add(wgmma, i, product)
    for name in ("bulk_load", "bulk_store", "bulk_reduce_add"):
        for run in RUNS:
            add(bulk, name, run)
    for function, boxes in ((tma_load, LOADS), (tma_store, STORES), (tma_reduce_add, REDUCTIONS)):
        for box in boxes:
            add(function, box)
    return found


def constants() -> Arrays:
    """Return the arrays without rows."""
    return {
        "wgmma_image": wgmma_image(),
        "tma_store_image": counting(2 * WORDS),
        "tma_reduce_add_image": wave(WORDS),
    }


def stacked(parts: Iterable[Arrays]) -> Arrays:
    """Return arrays of the rows of cases, in their order."""
    rows: dict[str, list[np.ndarray]] = {}
    for part in parts:
        for key, x in part.items():
            rows.setdefault(key, []).append(x)
    return {key: np.concatenate(found) for key, found in rows.items()}


def gathered(folder: Path, names: list[str]) -> Iterator[Arrays]:
    """Return the rows of all cases that have a file."""
    for name in names:
        path = folder / f"{name}.npz"
        if path.exists():
            with np.load(path) as part:
                yield dict(part)


def compile_probe(folder: Path, capability: tuple[int, int] = (9, 0)) -> Path:
    """Compile the kernels; needs no GPU."""
    from cuflash import compile, device

    text, where = SOURCE.read_text(encoding="utf-8"), device.architecture(*capability)
    image, log = compile.compile_cubin(text, Unit(), where)  # type: ignore[arg-type]
    usage = compile.usage(log)
    if usage.warnings or usage.spill_bytes:
        raise RuntimeError(log)
    path = folder / "probe.cubin"
    path.write_bytes(image)
    return path


def run_cases(folder: Path, device: Device) -> None:
    """Run what has neither a file nor failed before; the last line of `begun` is what runs."""
    failed = (folder / "failed").read_text().splitlines()
    for name, case in all_cases().items():
        path = folder / f"{name}.npz"
        if path.exists() or name in failed:
            continue
        with (folder / "begun").open("a") as begun:
            begun.write(name + "\n")
        arrays = case(device)
        part = folder / "part.npz"
        np.savez(part, **arrays)
        part.rename(path)


def supervise(folder: Path, seconds: float) -> tuple[list[str], list[str]]:
    """Run the cases in processes, a new one after each that dies or stands still, up to ten.

    Returns the names of the cases that failed, and what the processes said.
    """
    begun, failed, said = folder / "begun", folder / "failed", []
    failed.touch()
    while True:
        begun.write_text("")
        output = folder / "output"
        with output.open("w") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "bench.probe", "--child", str(folder)],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            while child.poll() is None:
                # The first case waits for CuPy and the driver too.
                limit = seconds * (6 if begun.read_text().count("\n") < 2 else 1)
                if time.time() - begun.stat().st_mtime > limit:
                    child.kill()
                    child.wait()
                time.sleep(0.05)
        if child.returncode == 0 or len(said) == 10:
            return failed.read_text().splitlines(), said
        names = begun.read_text().splitlines()
        if not names:
            raise RuntimeError(f"no case began:\n{output.read_text()}")
        said.append(f"{names[-1]}: exit {child.returncode}: {output.read_text()[-1000:]}")
        print(said[-1], flush=True)
        with failed.open("a") as names_of_failed:
            names_of_failed.write(names[-1] + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench.probe", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="the file to write, .npz")
    parser.add_argument("--timeout", type=float, default=10, help="seconds without a step forward")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        run_cases(arguments.child, Device(arguments.child / "probe.cubin"))
        return 0
    if not arguments.output:
        parser.error("--output is missing")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compile_probe(folder)
        failed, said = supervise(folder, arguments.timeout)
        cases = list(all_cases())
        about: dict[str, Any] = {"cases": len(cases), "failed": failed, "said": said, "date": now()}
        with contextlib.suppress(Exception):  # what was recorded counts more
            about |= facts()
        arrays = {**constants(), **stacked(gathered(folder, cases))}
        done = sum((folder / f"{name}.npz").exists() for name in cases)
    np.savez_compressed(arguments.output, about=np.array(json.dumps(about)), **arrays)
    size, seconds = os.path.getsize(arguments.output), time.monotonic() - begin
    print(f"{done} of {len(cases)} cases, {size} bytes, {seconds:.1f} s")
    return 0 if done == len(cases) else 1


if __name__ == "__main__":
    raise SystemExit(main())
