# SPDX-License-Identifier: Apache-2.0
"""Problem: what a call asks for, and the reading of a plain one, without options.

Whoever takes a Problem checks nothing: it is valid, and the arrays that go with it fit it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from . import arrays, checks
from .arrays import View
from .dtypes import DType
from .layout import AXES, Layout, read_axes, read_layout

__all__ = [
    "FEATURES",
    "MAX_HEAD_DIM",
    "MAX_LENGTH",
    "OPEN",
    "Arrays",
    "Problem",
    "Traits",
    "read",
    "read_backward",
]

#: No limit on that side of the window; kOpen in kernels/attention/params.cuh.
OPEN = 2**31 - 1

#: Lengths below this keep every sum of two positions in 32 bits.
MAX_LENGTH = 2**30
MAX_HEAD_DIM = 512  # of q and k, and of v

#: Options that kernels are compiled for; the others are run-time values and cost nothing.
FEATURES = ("softcap", "bias", "mask", "alibi", "sinks", "dropout", "packed")


class Traits(NamedTuple):
    """The part of a Problem that decides which kernels run: what a Plan may depend on."""

    dtype: DType
    head_dim: int
    head_dim_v: int
    features: tuple[str, ...] = ()  # of FEATURES, in its order
    aligned: int = 16  # bytes of rows of q, k and v that can be moved at once: 16, 8, or 0
    boxes: bool = True  # TMA can move q, k, v, out and dout
    aligned_bias: int = 0  # bytes of rows of the bias that are copied at once: 16, 4, or 0
    wide_bias: bool = False  # such a bias is not of q's dtype but of its accumulators'
    aligned_mask: int = 0  # as aligned_bias
    deterministic: bool = True  # sums of the backward have one order


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
    softcap: float = 0.0  # 0: none
    dropout_p: float = 0.0
    seed: int = 0  # of dropout, in 64 bits, if it is known to the host
    bias_shape: tuple[int, int, int, int] = (0, 0, 0, 0)  # each axis full or 1
    features: tuple[str, ...] = ()  # what the call uses of FEATURES
    deterministic: bool = True  # of a backward: the same bits every time

    @property
    def traits(self) -> Traits:
        """What kernels are selected by; lengths, strides and the window are run-time values."""
        return Traits(self.dtype, self.head_dim, self.head_dim_v, self.features)

    @property
    def is_packed(self) -> bool:
        """Whether the entries of the batch lie one behind the other along the sequence axis."""
        return "packed" in self.features

    @property
    def rows(self) -> int:
        """Number of elements of lse."""
        return (1 if self.is_packed else self.batch) * self.heads_q * self.seqlen_q


#: What the fields of Arrays from `q` on are called in signatures.
_ARGUMENTS = (
    *("q", "k", "v", "output", "lse", "dout", "dlse"),
    *("bias", "mask", "alibi_slopes", "sinks", "seed", "cu_seqlens_q", "cu_seqlens_k"),
)


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
    bias: View | None = None
    mask: View | None = None
    slopes: View | None = None
    sinks: View | None = None
    seed: View | None = None
    cu_seqlens_q: View | None = None  # these two may lie on the host
    cu_seqlens_kv: View | None = None

    def named(self) -> Iterator[tuple[str, View]]:
        """Yield the arrays that there are, each with what signatures call it."""
        for name, x in zip(_ARGUMENTS, self[2:], strict=True):
            if x is not None:
                yield name, x


def read(
    q: Any, k: Any, v: Any, scale: Any, causal: Any, window: Any, layout: Any
) -> tuple[Problem, Arrays]:
    """Check the arguments that every call has."""
    q, k, v = arrays.adopt("q", q), arrays.adopt("k", k), arrays.adopt("v", v)
    dtype = checks.element_type("q", q)
    layout = read_layout(layout)
    for name, x in (("k", k), ("v", v)):
        if x.dtype is not q.dtype or x.device != q.device:
            _same_kind(name, x, q, q.device)
    left, right = _window(window)
    if checks.flag("causal", causal):
        right = 0
    factor = None if scale is None else checks.number("scale", scale, dtype)
    axes, problem = _plain(dtype, layout, q.shape, k.shape, v.shape, factor, left, right)
    return problem, Arrays(axes, q.device, q, k, v)


@functools.lru_cache(maxsize=1024)  # calls come with the same shapes over and over
def _plain(
    dtype: DType,
    layout: str,
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    scale: float | None,
    left: int,
    right: int,
) -> tuple[Layout, Problem]:
    """Check shapes; returns which axis is what, and the Problem."""
    axes, sizes = _geometry(layout, q, k, v)
    head_dim = sizes[5]
    factor = head_dim**-0.5 if scale is None else scale
    return axes, Problem(dtype, *sizes, factor, left, right)


def _geometry(
    layout: str, q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]
) -> tuple[Layout, tuple[int, int, int, int, int, int, int]]:
    """Check shapes; returns which axis is what, and the sizes as Problem has them."""
    axes = read_axes("q", layout, q)
    for name, shape in (("k", k), ("v", v)):
        if len(shape) != len(q):
            raise ValueError(
                f"{name}: expected {len(q)} dimensions {AXES[layout]}, as q has, got shape {shape}"
            )
    batch, seqlen_q, heads_q, head_dim = axes.sizes(q)
    _, seqlen_kv, heads_kv, _ = axes.sizes(k)
    head_dim_v = v[axes.dim]
    k_shape = axes.shape(batch, seqlen_kv, heads_kv, head_dim)
    v_shape = axes.shape(batch, seqlen_kv, heads_kv, head_dim_v)
    checks.same_shape("k", k, k_shape, "batch and head_dim of q")
    checks.same_shape("v", v, v_shape, "batch, length, heads of k")
    for name, size in (("q", head_dim), ("v", head_dim_v)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(
                f"{name}: head size (its last axis) must be 1 to {MAX_HEAD_DIM}, got {size}; "
                f"the shape is read as {AXES[layout]}"
            )
    if heads_q % heads_kv if heads_kv else heads_q:
        raise ValueError(
            f"k: the {heads_q} heads of q must be a multiple of its heads, got {heads_kv}; "
            f"shapes are read as {AXES[layout]}: pass layout= if heads come before seq"
        )
    for name, size in (("q", max(seqlen_q, heads_q)), ("k", max(seqlen_kv, heads_kv))):
        if size >= MAX_LENGTH:
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
        checks.same_shape(name, x.shape, shape, "the output of this call")
    lse = arrays.adopt("lse", lse)
    _rows("lse", lse, rows, p.dtype, device)
    if dlse is not None:
        dlse = arrays.adopt("dlse", dlse)
        _rows("dlse", dlse, rows, p.dtype, device)
    return Arrays(*inputs[:5], out, lse, dout, dlse, *inputs[9:])


def _same_kind(name: str, x: View, q: View, device: int | None) -> None:
    if x.dtype is not q.dtype and x.dtype != q.dtype:
        raise TypeError(f"{name}: expected dtype {q.dtype}, as q has, got {x.dtype}")
    if x.device != device:
        checks.same_place(name, x, device)


def _rows(name: str, x: View, shape: tuple[int, ...], dtype: DType, device: int | None) -> None:
    if x.dtype != dtype.accum:
        raise TypeError(f"{name}: expected dtype {dtype.accum} for {dtype} inputs, got {x.dtype}")
    checks.same_place(name, x, device)
    checks.same_shape(name, x.shape, shape, "(batch, heads, seq) of q, in either layout")


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
