# SPDX-License-Identifier: Apache-2.0
"""Problem: what a call asks for. Reads the arguments, checks them, and raises every error.

Below this module nothing is checked: a Problem is valid, and the arrays that go with it fit it.
"""

from __future__ import annotations

import functools
import math
import numbers
import operator
from typing import Any, NamedTuple

import numpy as np

from . import arrays
from .arrays import View
from .dtypes import DTYPES, DType, lookup

__all__ = [
    "OPEN",
    "Arrays",
    "Destinations",
    "Layout",
    "Problem",
    "Traits",
    "read",
    "read_backward",
    "read_flag",
]

#: No limit on that side of the window; kOpen in kernels/attention/params.cuh.
OPEN = 2**31 - 1

#: Lengths below this keep every sum of two positions in 32 bits.
_MAX_LENGTH = 2**30
_MAX_HEAD_DIM = 512


class Traits(NamedTuple):
    """The part of a Problem that decides which kernels run: what a Plan may depend on."""

    dtype: DType
    head_dim: int
    head_dim_v: int


class Problem(NamedTuple):
    """A valid call: sizes and options, no arrays."""

    dtype: DType
    batch: int
    heads_q: int
    heads_kv: int
    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    head_dim_v: int
    scale: float
    window_left: int  # keys before the diagonal; OPEN: all of them
    window_right: int  # keys after it; 0 when causal

    @property
    def traits(self) -> Traits:
        """What kernels are selected by; lengths, strides and the window are run-time values."""
        return Traits(self.dtype, self.head_dim, self.head_dim_v)


class Layout(NamedTuple):
    """Which axis of the caller's arrays is what; `batch` is None for arrays without a batch."""

    batch: int | None
    seq: int
    heads: int
    dim: int

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Return (batch, seq, heads, dim) of an array of this shape."""
        batch = 1 if self.batch is None else shape[self.batch]
        return batch, shape[self.seq], shape[self.heads], shape[self.dim]

    def shape(self, batch: int, seq: int, heads: int, dim: int) -> tuple[int, ...]:
        """Return the shape of an array of these sizes."""
        inner = (seq, heads) if self.seq < self.heads else (heads, seq)
        return (*inner, dim) if self.batch is None else (batch, *inner, dim)

    def row_shape(self, batch: int, heads: int, seq: int) -> tuple[int, ...]:
        """Return the shape of lse, which does not depend on the order of the other arrays."""
        return (heads, seq) if self.batch is None else (batch, heads, seq)


_LAYOUTS = {
    ("bshd", 4): Layout(0, 1, 2, 3),
    ("bshd", 3): Layout(None, 0, 1, 2),
    ("bhsd", 4): Layout(0, 2, 1, 3),
    ("bhsd", 3): Layout(None, 1, 0, 2),
}
_AXES = {
    "bshd": "(batch, seq, heads, dim) or (seq, heads, dim)",
    "bhsd": "(batch, heads, seq, dim) or (heads, seq, dim)",
}


class Arrays(NamedTuple):
    """The arrays that go with a Problem, in the caller's layout."""

    layout: Layout
    device: int | None  # GPU index; None: host memory
    q: View
    k: View
    v: View
    out: View | None = None
    lse: View | None = None
    dout: View | None = None
    dlse: View | None = None


#: What the fields of Arrays from `q` on are called in signatures.
_ARGUMENTS = ("q", "k", "v", "output", "lse", "dout", "dlse")


def read(
    q: Any, k: Any, v: Any, scale: Any, causal: Any, window: Any, layout: Any
) -> tuple[Problem, Arrays]:
    """Check the arguments that every call has."""
    q, k, v = arrays.adopt("q", q), arrays.adopt("k", k), arrays.adopt("v", v)
    dtype = _dtype(q)
    if not isinstance(layout, str) or layout not in _AXES:
        raise ValueError(f"layout: expected 'bshd' or 'bhsd', got {layout!r}")
    _same_kind("k", k, q, q.device)
    _same_kind("v", v, q, q.device)
    axes, sizes = _geometry(layout, q.shape, k.shape, v.shape)
    left, right = _window(window)
    if read_flag("causal", causal):
        right = 0
    problem = Problem(dtype, *sizes, _scale(scale, sizes[5], dtype), left, right)
    return problem, Arrays(axes, q.device, q, k, v)


@functools.lru_cache(maxsize=1024)  # calls come with the same shapes over and over
def _geometry(
    layout: str, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]
) -> tuple[Layout, tuple[int, int, int, int, int, int, int]]:
    """Check shapes; returns which axis is what, and the sizes as Problem has them."""
    axes = _LAYOUTS.get((layout, len(q)))
    if axes is None:
        raise ValueError(f"q: expected {_AXES[layout]}, got shape {q}")
    for name, shape in (("k", k), ("v", v)):
        if len(shape) != len(q):
            raise ValueError(
                f"{name}: expected {len(q)} dimensions {_AXES[layout]}, as q has, got shape {shape}"
            )
    batch, seqlen_q, heads_q, head_dim = axes.sizes(q)
    _, seqlen_kv, heads_kv, _ = axes.sizes(k)
    head_dim_v = v[axes.dim]
    _shape("k", k, axes.shape(batch, seqlen_kv, heads_kv, head_dim), "batch and head_dim of q")
    _shape("v", v, axes.shape(batch, seqlen_kv, heads_kv, head_dim_v), "batch, length, heads of k")
    for name, size in (("q", head_dim), ("v", head_dim_v)):
        if not 1 <= size <= _MAX_HEAD_DIM:
            raise ValueError(
                f"{name}: head size (its last axis) must be 1 to {_MAX_HEAD_DIM}, got {size}; "
                f"the shape is read as {_AXES[layout]}"
            )
    if heads_q % heads_kv if heads_kv else heads_q:
        raise ValueError(
            f"k: the {heads_q} heads of q must be a multiple of its heads, got {heads_kv}; "
            f"shapes are read as {_AXES[layout]}: pass layout= if heads come before seq"
        )
    for name, size in (("q", max(seqlen_q, heads_q)), ("k", max(seqlen_kv, heads_kv))):
        if size >= _MAX_LENGTH:
            raise ValueError(f"{name}: lengths and heads must be below 2**30, got {size}")
    return axes, (batch, heads_q, heads_kv, seqlen_q, seqlen_kv, head_dim, head_dim_v)


def read_backward(
    problem: Problem, inputs: Arrays, dout: Any, out: Any, lse: Any, dlse: Any
) -> Arrays:
    """Check the arrays that only the backward takes; returns `inputs` with them."""
    p, axes, device = problem, inputs.layout, inputs.device
    shape = axes.shape(p.batch, p.seqlen_q, p.heads_q, p.head_dim_v)
    rows = axes.row_shape(p.batch, p.heads_q, p.seqlen_q)
    dout, out = arrays.adopt("dout", dout), arrays.adopt("output", out)
    for name, x in (("dout", dout), ("output", out)):
        _same_kind(name, x, inputs.q, device)
        _shape(name, x.shape, shape, "the output of this call")
    lse = arrays.adopt("lse", lse)
    _rows("lse", lse, rows, p.dtype, device)
    if dlse is not None:
        dlse = arrays.adopt("dlse", dlse)
        _rows("dlse", dlse, rows, p.dtype, device)
    return Arrays(axes, device, inputs.q, inputs.k, inputs.v, out, lse, dout, dlse)


class Destinations:
    """Where a call writes: arrays fit for that, which share no memory with inputs or each other."""

    def __init__(self, inputs: Arrays) -> None:
        self._inputs = inputs
        self._taken: list[tuple[str, View, int, int]] = []  # name, array and its addresses

    def result(self, name: str, given: Any, shape: tuple[int, ...], dtype: np.dtype) -> View:
        """Return the array to write a result to: `given`, or a new one if that is None."""
        if given is None:
            return arrays.empty(self._inputs.q, shape, dtype)
        x = arrays.adopt(name, given)
        _same_place(name, x, self._inputs.device)
        if x.dtype != dtype:
            raise TypeError(f"{name}: expected dtype {dtype}, the result's, got {x.dtype}")
        _shape(name, x.shape, shape, "the result's")
        self._claim(name, x, given)
        return x

    def workspace(self, given: Any, size: int) -> View:
        """Return the caller's scratch memory, if `given` is at least `size` bytes of it."""
        x = arrays.adopt("workspace", given)
        _same_place("workspace", x, self._inputs.device)
        if x.dtype != np.uint8:
            raise TypeError(f"workspace: expected dtype uint8, got {x.dtype}")
        if x.ndim != 1 or x.shape[0] < size:
            raise ValueError(
                f"workspace: expected a one-dimensional array of at least {size} uint8, "
                f"got shape {x.shape}"
            )
        if x.address % 16 or not x.array.flags.c_contiguous:
            raise ValueError("workspace: expected a contiguous array aligned to 16 bytes")
        self._claim("workspace", x, given)
        return x

    def _claim(self, name: str, x: View, given: Any) -> None:
        if x.device is None:
            if not x.array.flags.writeable:
                raise ValueError(f"{name}: expected a writable array, got a read-only one")
            if x.array is not given and x.array.flags.owndata:  # a copy: the result would be lost
                raise ValueError(
                    f"{name}: expected an aligned array, got one with unaligned elements"
                )
        if arrays.self_overlap(x):
            raise ValueError(
                f"{name}: expected an array whose elements lie apart, got strides {x.strides} for "
                f"shape {x.shape}, as of a broadcast view"
            )
        if not self._taken:
            for other, y in zip(_ARGUMENTS, self._inputs[2:], strict=True):
                if y is not None:
                    self._taken.append((other, y, *arrays.extent(y)))
        low, high = arrays.extent(x)
        for other, y, first, end in self._taken:
            if low < end and first < high and arrays.overlap(x, y):
                raise ValueError(
                    f"{name}: shares memory with {other}, which this call also uses; "
                    "pass another array"
                )
        self._taken.append((name, x, low, high))


def _dtype(q: View) -> DType:
    dtype = lookup(q.dtype)
    if dtype is None:
        raise TypeError(
            f"q: expected dtype {', '.join(DTYPES)} in native byte order, got {q.dtype}; "
            "convert it with .astype(...)"
        )
    return dtype


def _same_place(name: str, x: View, device: int | None) -> None:
    if x.device != device:
        here, there = ("host memory" if i is None else f"GPU {i}" for i in (x.device, device))
        kind = TypeError if None in (x.device, device) else ValueError
        raise kind(f"{name}: expected an array in the same place as q ({there}), got one in {here}")


def _same_kind(name: str, x: View, q: View, device: int | None) -> None:
    if x.dtype != q.dtype:
        raise TypeError(f"{name}: expected dtype {q.dtype}, as q has, got {x.dtype}")
    _same_place(name, x, device)


def _shape(name: str, got: tuple[int, ...], want: tuple[int, ...], source: str) -> None:
    if got != want:
        raise ValueError(f"{name}: expected shape {want} ({source}), got {got}")


def _rows(name: str, x: View, shape: tuple[int, ...], dtype: DType, device: int | None) -> None:
    if x.dtype != dtype.accum:
        raise TypeError(f"{name}: expected dtype {dtype.accum} for {dtype} inputs, got {x.dtype}")
    _same_place(name, x, device)
    _shape(name, x.shape, shape, "(batch, heads, seq) of q, in either layout")


def read_flag(name: str, value: Any) -> bool:
    """Return an argument that must be True or False; an array or a number is an error."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return bool(value)


def _window(window: Any) -> tuple[int, int]:
    if type(window) is tuple and window == (-1, -1):
        return OPEN, OPEN
    try:
        if not isinstance(window, (tuple, list, np.ndarray)):
            raise TypeError
        left, right = window
        if isinstance(left, (bool, np.bool_)) or isinstance(right, (bool, np.bool_)):
            raise TypeError
        sides = operator.index(left), operator.index(right)
    except (TypeError, ValueError):
        raise TypeError(f"window: expected a pair (left, right) of int, got {window!r}") from None
    if min(sides) < -1:
        raise ValueError(
            f"window: expected 0 or more keys on each side, or -1 for no limit, got {sides}"
        )
    return tuple(OPEN if side == -1 else min(side, OPEN) for side in sides)  # type: ignore[return-value]


def _scale(scale: Any, head_dim: int, dtype: DType) -> float:
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, np.ndarray) and scale.ndim == 0:
        scale = scale[()]
    real = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
    if not real and not (isinstance(scale, np.generic) and lookup(scale.dtype)):
        raise TypeError(
            f"scale: expected a real number on the host or None, got {type(scale).__name__}"
        )
    try:
        value = float(scale)
    except OverflowError:  # of int and Fraction
        value = math.inf
    if not abs(value) <= np.finfo(dtype.accum).max:
        raise ValueError(f"scale: expected a finite number (of {dtype.accum}), got {value}")
    return value
