# SPDX-License-Identifier: Apache-2.0
"""What bench/probe.py recorded on an H200, repeated on the CPU back end.

The kernels of bench/probe.cu are compiled for the CPU, and each case is launched by the function
that launched it on the GPU, with a device of the same interface. So every array of
tests/data/h200_instructions_more.npz is compared with what the executor makes of the same
instruction. Those of h200_instructions.npz were recorded before there was a probe;
test_layouts.py and test_primitives.py repeat them.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from builder import ROOT, Builder, aligned
from test_layouts import a_fragment, accumulators, b_fragment

from bench import probe
from cuflash import host
from cuflash.tensormap import TensorMap

SEEDS = (0, 2026_11_29, 2026_11_30)  # the plain schedule, a random one, one with priorities
CASES = probe.all_cases()
SWIZZLES = (0, 32, 64, 128)  # bytes, by the number that the cases have


def recorded() -> dict[str, np.ndarray]:
    with np.load(ROOT / "tests" / "data" / "h200_instructions_more.npz") as archive:
        return dict(archive)


GOLDEN = recorded()
FAILED = json.loads(str(GOLDEN.pop("about")))["failed"]
APPROXIMATE = [f"{name}_approx_y" for name in ("exp2", "log2", "rcp")]
SUMS = [f"mma_{dtype}_d" for dtype in ("float16", "bfloat16")]
EXACT = sorted({*GOLDEN} - {*probe.constants(), *APPROXIMATE, *SUMS, "elect_one_elected"})


class Buffer:
    """An array in what the kernels take for global memory."""

    def __init__(self, x: np.ndarray) -> None:
        self.array = aligned(x)
        self.address = self.array.ctypes.data

    def get(self) -> np.ndarray:
        return self.array

    def range(self, name: str) -> tuple[str, int, int, bool]:
        return name, self.address, self.address + self.array.nbytes, True


class Map:
    """The map of a buffer, which the kernel that gets it may access."""

    def __init__(self, tensor: TensorMap, buffer: Buffer) -> None:
        self.text = tensor.encode_cpu()
        self.range = buffer.range


class Device:
    """The CPU back end, with the methods of probe.Device."""

    def __init__(self, kernel: host.HostKernel, names: list[str], seed: int) -> None:
        self.kernel, self.names, self.seed = kernel, names, seed

    def upload(self, x: np.ndarray) -> Buffer:
        return Buffer(x)

    def tensor_map(
        self, x: Buffer, dtype: str, dims: tuple[int, ...], box: tuple[int, ...], swizzle: int
    ) -> Map:
        dtype = {"uint16": "float16"}.get(dtype, dtype)  # its bytes are moved as they are
        size = np.dtype(dtype).itemsize
        strides = tuple(size * math.prod(dims[:axis]) for axis in range(1, len(dims)))
        return Map(TensorMap(x.address, dtype, dims, strides, box, SWIZZLES[swizzle]), x)

    def launch(
        self, name: str, threads: int, *arguments: Any, blocks: int = 1, smem: int = 8192
    ) -> None:
        call = b""
        for x in arguments:
            text, alignment = encoded(x)
            call += bytes(-len(call) % alignment) + text
        call = struct.pack("192si60x", call, self.names.index(name))
        ranges = [x.range(f"argument {i}") for i, x in enumerate(arguments) if hasattr(x, "range")]
        # Swizzles count from a multiple of 1024, as the probe's offsets do.
        self.kernel.launch(blocks, threads, smem, call, ranges, self.seed, smem_alignment=1024)


def encoded(x: Any) -> tuple[bytes, int]:
    """Return an argument as tests/host_kernels/arguments.h reads it, and its alignment."""
    if isinstance(x, Map):
        return x.text, 64
    if isinstance(x, Buffer):
        return struct.pack("P", x.address), 8
    return struct.pack("f" if isinstance(x, float) else "i", x), 4


class Names(Device):
    """Writes down which kernels would be launched."""

    def __init__(self) -> None:
        self.names = []

    def launch(self, name: str, *rest: Any, **more: Any) -> None:
        if name not in self.names:
            self.names.append(name)


@pytest.fixture(scope="module")
def names() -> list[str]:
    device = Names()
    for case in CASES.values():
        case(device)
    return device.names


@pytest.fixture(scope="module")
def kernel(build: Builder, names: list[str]) -> host.HostKernel:
    entries = ", ".join(f"with_arguments<{name}>" for name in names)
    text = f"""\
#include "host/cuda.h"
#include "{ROOT}/bench/probe.cu"
#include "arguments.h"
constexpr Kernel kKernels[] = {{{entries}}};
#include "host/entry.h"
"""
    return host.HostKernel(
        build.runtime(), build.library(host.find_compiler(), text, True), "probe"
    )


@pytest.fixture(scope="module", params=SEEDS)
def device(request: pytest.FixtureRequest, kernel: host.HostKernel, names: list[str]) -> Device:
    return Device(kernel, names, request.param)


@pytest.fixture(scope="module")
def repeated(device: Device) -> probe.Arrays:
    return probe.stacked(case(device) for name, case in CASES.items() if name not in FAILED)


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(f"u{x.itemsize}")


def test_everything_is_compared(repeated: probe.Arrays) -> None:
    constants = probe.constants()
    assert {*repeated, *constants} == {*GOLDEN}
    for name, x in constants.items():
        np.testing.assert_array_equal(x, GOLDEN[name])
    for name, x in repeated.items():
        assert x.dtype == GOLDEN[name].dtype and x.shape == GOLDEN[name].shape


@pytest.mark.parametrize("name", EXACT)
def test_bit_for_bit(repeated: probe.Arrays, name: str) -> None:
    """Arguments too, so that what was recorded is known to be about the same cases."""
    np.testing.assert_array_equal(bits(repeated[name]), bits(GOLDEN[name]))


def test_one_lane_is_elected(repeated: probe.Arrays) -> None:
    """The H200 took lane 0, but nothing promises that, and the CPU takes others."""
    for x in (GOLDEN["elect_one_elected"], repeated["elect_one_elected"]):
        assert sorted(x[0]) == [0] * 31 + [1]


# --- What the H200 does not do -------------------------------------------------------------------


@pytest.mark.parametrize("name", FAILED)
def test_illegal_instructions_are_refused(device: Device, name: str) -> None:
    box: probe.Box = CASES[name].args[0]  # type: ignore[attr-defined]
    if len(box.dims) == 1 and box.swizzle == probe.NONE:
        message = "a box of a tensor of one axis must be swizzled"
    else:
        axis = next(i for i, first in enumerate(box.at) if first < 0)
        message = rf"coordinate {axis} of a store must not be negative, got {box.at[axis]}"
    with pytest.raises(host.KernelFault, match=rf"{name.split()[0]}, probe\.cu:\d+: {message}"):
        CASES[name](device)


# --- Rounded results -----------------------------------------------------------------------------


def normal(bits: np.ndarray) -> np.ndarray:
    """Return where numbers are neither zero nor infinite nor NaN."""
    x = bits.view(np.float32)
    return np.isfinite(x) & (x != 0)


@pytest.mark.parametrize(
    # The bounds of the PTX ISA for the errors of the instructions; that of logarithms of numbers
    # around 1 is absolute. What the CPU adds, half a unit of the last place, fits in: the largest
    # differences found are 0.59, 0.75 (around 1; else 0.5) and 0.5 times 2^-22.
    ("name", "relative", "absolute"),
    [("exp2", 2**-22, 0.0), ("log2", 2**-22, 2**-22), ("rcp", 2**-23, 0.0)],
)
def test_approximations(
    repeated: probe.Arrays, name: str, relative: float, absolute: float
) -> None:
    """Zeros, infinities and NaNs have to agree bit for bit."""
    y, recorded = repeated[f"{name}_approx_y"], GOLDEN[f"{name}_approx_y"]
    x = GOLDEN[f"{name}_approx_x"].view(np.float32)
    rounded = normal(recorded)
    np.testing.assert_array_equal(y[~rounded], recorded[~rounded])
    assert normal(y)[rounded].all()
    y, recorded = (a[rounded].view(np.float32).astype(np.float64) for a in (y, recorded))
    around_1 = (x[rounded] > 0.5) & (x[rounded] < 2)
    bound = np.where(around_1 & (absolute > 0), absolute, relative * np.abs(recorded))
    assert (np.abs(y - recorded) <= bound).all()


def numbers(registers: np.ndarray, dtype: type) -> np.ndarray:
    return registers.view(np.uint16).view(dtype).astype(np.float64)


def matrix(fragment: Any, shape: tuple[int, int], registers: np.ndarray) -> np.ndarray:
    """Return the matrix of which these are the registers that `fragment` would give."""
    place = fragment(np.arange(math.prod(shape)).reshape(shape)).ravel()
    x = np.zeros(place.size)
    x[place] = registers.ravel()
    return x.reshape(shape)


def exponent(x: np.ndarray) -> np.ndarray:
    return np.where(x == 0, -1000, np.frexp(x)[1] - 1)


def cut(x: np.ndarray, unit: np.ndarray) -> np.ndarray:
    return np.trunc(x / unit) * unit


@pytest.mark.parametrize(("name", "dtype"), [(SUMS[0], np.float16), (SUMS[1], ml_dtypes.bfloat16)])
def test_sums_of_mma(repeated: probe.Arrays, name: str, dtype: type) -> None:
    """The rule of the H200's rounding explains its results bit for bit, and those here nearly.

    The 17 summands of an element, the accumulator and 16 exact products, are cut off 25 bits below
    the largest exponent, which for a product is the sum of its factors' exponents, and added; the
    sum is cut off to float32. The CPU back end rounds each of 16 additions instead. Of numbers up
    to 14, the largest differences found are 2^-19 (float16) and 2^-20 (bfloat16).
    """
    operands = [GOLDEN[name[:-1] + letter] for letter in "abc"]
    for case, (a, b, c, d) in enumerate(zip(*operands, GOLDEN[name], strict=True)):
        a = matrix(a_fragment, (16, 16), numbers(a, dtype))
        b = matrix(b_fragment, (16, 8), numbers(b, dtype))
        c, d, here = (matrix(accumulators, (16, 8), x) for x in (c, d, repeated[name][case]))
        terms = np.concatenate([a[:, :, None] * b, c[:, None]], 1)  # (16, 17, 8)
        exponents = np.concatenate([exponent(a)[:, :, None] + exponent(b), exponent(c)[:, None]], 1)
        unit = 2.0 ** (exponents.max(1) - 25)
        total = cut(terms, unit[:, None]).sum(1)
        last = 2.0 ** (exponent(total) - 23)
        np.testing.assert_array_equal(cut(total, last), d)
        if case < 8:  # integers
            np.testing.assert_array_equal(here, d)
        bound = 17 * unit + last + 2**-24 * 16 * np.abs(terms).sum(1)
        assert (np.abs(here - d) <= bound).all()
