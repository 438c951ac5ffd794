# SPDX-License-Identifier: Apache-2.0
"""Arrays whose last elements lie more than 2^31 elements behind the first ones.

All arrays of a call are views of 8.8 GB: one of their axes has steps so long that its last index is
at the far end. Offsets in elements pass 2^31 in float32, 2^32 in float16. On the CPU only the pages
that the views touch become memory.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from check import Inputs, check_backward, check_forward
from conftest import Backend

import cuflash

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.families import fastest

pytestmark = pytest.mark.xdist_group("far")  # one process: each of them would take 9 GB

LIMIT = 2**31
# Bytes from the first to the last index of a long axis. For each length that an axis has here, they
# are steps of whole lines of 256 bytes, and so arrays lie beside one another at each step.
SPAN = 45 * 256 * math.lcm(2 - 1, 4 - 1, 40 - 1, 300 - 1, 41 - 1, 64 - 1)
ROOM = 2**27  # bytes for what lies behind an index, of all arrays
AXES = {"batch": 0, "rows": 1, "heads": 2, "dim": 3}
PAIRS = {"batch": 0, "heads": 1, "queries": 2, "keys": 3}


class Far:
    """A piece of memory, and views of it that lie beside one another."""

    def __init__(self, backend: Backend, start: Any) -> None:
        self.xp, self._start, self._used = backend.xp, start, 0

    def begin(self) -> None:
        """Forget all views; on a GPU every number becomes NaN."""
        self._used = 0
        if self.xp is not np:
            self._start.memset(255, SPAN + ROOM)

    def empty(self, shape: tuple[int, ...], dtype: Any, axis: int | None) -> Any:
        """Return an array with an axis whose last index is at the far end; None: it has none."""
        dtype = np.dtype(dtype)
        strides, size = [0] * len(shape), dtype.itemsize
        for i in reversed(range(len(shape))):
            if i != axis:
                strides[i] = size
                size *= shape[i]
        if axis is not None:
            strides[axis], rest = divmod(SPAN, shape[axis] - 1)
            assert rest == strides[axis] % 256 == 0 and LIMIT * dtype.itemsize < SPAN
        at = self._used
        self._used += -(-size // 256) * 256
        assert self._used < (ROOM if axis is None else min(ROOM, strides[axis]))
        if self.xp is np:
            return np.ndarray(shape, dtype, self._start, at, tuple(strides))
        return self.xp.ndarray(shape, dtype, self._start + at, tuple(strides))

    def put(self, value: np.ndarray, axis: int | None) -> Any:
        """Return an array with these values."""
        x = self.empty(value.shape, value.dtype, axis)
        for index in _slices(value.shape, axis):  # contiguous ones: nobody adds offsets but us
            one = np.ascontiguousarray(value[index])
            if self.xp is np:
                x[index] = one
            else:
                x[index].set(one)
        return x

    def get(self, x: Any, axis: int | None) -> np.ndarray:
        """Return the values of an array."""
        found = np.empty(x.shape, x.dtype)
        for index in _slices(x.shape, axis):
            found[index] = x[index] if self.xp is np else x[index].get()
        return found


def _slices(shape: tuple[int, ...], axis: int | None) -> list[Any]:
    """Return indices of the pieces of an array that lie in one piece of memory."""
    if axis is None:
        return [...]
    return [(slice(None),) * axis + (i,) for i in range(shape[axis])]


@pytest.fixture(scope="module")
def pages(backend: Backend) -> Iterator[Any]:
    size = SPAN + ROOM
    if backend.name == "cpu":
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        yield mmap.mmap(-1, size, flags=flags)
        return
    cupy = backend.xp
    if cupy.cuda.runtime.memGetInfo()[0] < size + 2**30:
        pytest.skip("needs 10 GB of free GPU memory")
    pool = cupy.cuda.MemoryPool()
    yield pool.malloc(size)
    cupy.cuda.Device().synchronize()
    pool.free_all_blocks()


@pytest.fixture
def far(backend: Backend, pages: Any) -> Far:
    found = Far(backend, pages)
    found.begin()
    return found


def _values(backend: Backend, dtype: str, dim: int) -> dict[str, np.ndarray]:
    """Return q, k, v and dout, on a GPU long enough for copies of rows that are not aligned."""
    seqlen = 300 if backend.name == "gpu" else 40
    rng = np.random.default_rng(0)
    shapes = {name: (2, seqlen, 4, dim) for name in ("q", "dout")}
    shapes |= {name: (2, seqlen, 2, dim) for name in ("k", "v")}
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def _call(
    far: Far,
    values: dict[str, np.ndarray],
    *,
    axis: int | None = None,
    lse_axis: int | None = None,
    pairs: int | None = None,
    offsets: tuple[Any, ...] = (),
    **options: Any,
) -> tuple[np.ndarray, np.ndarray, Any]:
    """Run both passes and return what they wrote; the axes are those that are long."""
    forward, backward = cuflash.attention, cuflash.attention_backward
    if offsets:
        forward, backward = cuflash.attention_varlen, cuflash.attention_varlen_backward
    q, k, v, dout = (far.put(values[name], axis) for name in ("q", "k", "v", "dout"))
    *batch, rows, heads, _ = q.shape
    out = far.empty(q.shape, q.dtype, axis)
    lse = far.empty((*batch, heads, rows), np.float32, lse_axis)
    forward(q, k, v, *offsets, causal=True, return_lse=True, out=(out, lse), **options)
    to = [far.empty(x.shape, x.dtype, axis) for x in (q, k, v)]
    if "bias" in options:
        to.append(far.empty(options["bias"].shape, options["bias"].dtype, pairs))
    backward(dout, q, k, v, out, lse, *offsets, causal=True, out=tuple(to), **options)
    if far.xp is not np:
        far.xp.cuda.Device().synchronize()
    grads = [far.get(x, axis) for x in to[:3]]
    grads += [far.get(x, pairs) for x in to[3:]]
    return far.get(out, axis), far.get(lse, lse_axis), cuflash.Gradients(*grads)


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize(
    ("dtype", "dim", "family"),
    [
        ("float16", 64, None),
        ("float16", 64, "mma"),
        ("float16", 64, "simt"),
        ("float16", 41, None),  # copied first
        ("float32", 64, None),
        ("float32", 41, None),
    ],
)
def test_arrays_of_more_than_32_bits(
    far: Far, backend: Backend, dtype: str, dim: int, family: str | None, axis: str
) -> None:
    values = _values(backend, dtype, dim)
    lse_axis = {"batch": 0, "heads": 1, "rows": 2, "dim": None}[axis]
    with fastest(family):
        out, lse, grads = _call(far, values, axis=AXES[axis], lse_axis=lse_axis)
    inputs = Inputs(**values, causal=True)
    check_forward(out, lse, inputs)
    check_backward(grads, inputs)


@pytest.mark.parametrize("axis", ["rows", "heads", "dim"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_packed_arrays_of_more_than_32_bits(
    far: Far, backend: Backend, dtype: str, axis: str
) -> None:
    values = {name: x[0] for name, x in _values(backend, dtype, 64).items()}
    rows = len(values["q"])
    offsets = (np.array([0, rows // 3, rows]), np.array([0, rows // 2, rows]))
    lse_axis = {"heads": 0, "rows": 1, "dim": None}[axis]
    out, lse, grads = _call(far, values, axis=AXES[axis] - 1, lse_axis=lse_axis, offsets=offsets)
    inputs = Inputs(**values, causal=True, cu_seqlens_q=offsets[0], cu_seqlens_k=offsets[1])
    check_forward(out, lse, inputs)
    check_backward(grads, inputs)


@pytest.mark.parametrize("axis", PAIRS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_pairs_of_more_than_32_bits(far: Far, backend: Backend, dtype: str, axis: str) -> None:
    values = _values(backend, dtype, 64)
    rng = np.random.default_rng(1)
    shape = (2, 4, values["q"].shape[1], values["k"].shape[1])
    bias, mask = rng.normal(size=shape).astype(dtype), rng.random(shape) < 0.7
    options = {"bias": far.put(bias, PAIRS[axis]), "mask": far.put(mask, PAIRS[axis])}
    out, lse, grads = _call(far, values, pairs=PAIRS[axis], **options)
    inputs = Inputs(**values, causal=True, bias=bias, mask=mask)
    check_forward(out, lse, inputs)
    check_backward(grads, inputs)
