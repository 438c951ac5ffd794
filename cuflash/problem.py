# SPDX-License-Identifier: Apache-2.0
"""Problem: what a call asks for. Reads the arguments, checks them, and raises every error.

Below this module nothing is checked: a Problem is valid, and the arrays that go with it fit it.
"""

from __future__ import annotations

import functools
import math
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
    "OPEN",
    "Arrays",
    "Problem",
    "Traits",
    "read",
    "read_backward",
    "read_packed",
    "read_wanted",
]

#: No limit on that side of the window; kOpen in kernels/attention/params.cuh.
OPEN = 2**31 - 1

#: Lengths below this keep every sum of two positions in 32 bits.
_MAX_LENGTH = 2**30
_MAX_HEAD_DIM = 512


#: Options that kernels are compiled for; the others are run-time values and cost nothing.
FEATURES = ("softcap", "bias", "mask", "alibi", "sinks", "dropout", "packed")


class Traits(NamedTuple):
    """The part of a Problem that decides which kernels run: what a Plan may depend on."""

    dtype: DType
    head_dim: int
    head_dim_v: int
    features: tuple[str, ...] = ()  # of FEATURES, in its order


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
    q: Any,
    k: Any,
    v: Any,
    scale: Any,
    causal: Any,
    window: Any,
    layout: Any,
    softcap: Any = 0.0,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout_p: Any = 0.0,
    seed: Any = None,
) -> tuple[Problem, Arrays]:
    """Check the arguments that every call has."""
    problem, inputs = _read_plain(q, k, v, scale, causal, window, layout)
    options = (softcap, bias, mask, alibi_slopes, sinks, dropout_p, seed)
    return _read_options(problem, inputs, *options)


def _read_plain(
    q: Any, k: Any, v: Any, scale: Any, causal: Any, window: Any, layout: Any
) -> tuple[Problem, Arrays]:
    q, k, v = arrays.adopt("q", q), arrays.adopt("k", k), arrays.adopt("v", v)
    dtype = checks.element_type("q", q)
    layout = read_layout(layout)
    _same_kind("k", k, q, q.device)
    _same_kind("v", v, q, q.device)
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
        if not 1 <= size <= _MAX_HEAD_DIM:
            raise ValueError(
                f"{name}: head size (its last axis) must be 1 to {_MAX_HEAD_DIM}, got {size}; "
                f"the shape is read as {AXES[layout]}"
            )
    if heads_q % heads_kv if heads_kv else heads_q:
        raise ValueError(
            f"k: the {heads_q} heads of q must be a multiple of its heads, got {heads_kv}; "
            f"shapes are read as {AXES[layout]}: pass layout= if heads come before seq"
        )
    for name, size in (("q", max(seqlen_q, heads_q)), ("k", max(seqlen_kv, heads_kv))):
        if size >= _MAX_LENGTH:
            raise ValueError(f"{name}: lengths and heads must be below 2**30, got {size}")
    return axes, (batch, heads_q, heads_kv, seqlen_q, seqlen_kv, head_dim, head_dim_v)


def _read_options(
    problem: Problem,
    inputs: Arrays,
    softcap: Any,
    bias: Any,
    mask: Any,
    alibi_slopes: Any,
    sinks: Any,
    dropout_p: Any,
    seed: Any,
) -> tuple[Problem, Arrays]:
    """Check the options that change scores and probabilities."""
    no_arrays = bias is mask is alibi_slopes is sinks is None
    if no_arrays and type(softcap) is type(dropout_p) is float and softcap == dropout_p == 0:
        return problem, inputs
    p, found, features = problem, {}, set()
    cap = checks.number("softcap", softcap, p.dtype)
    # The largest number of an accumulator has a reciprocal; the smallest cap must have one too.
    smallest = 1 / float(np.finfo(p.dtype.accum).max)
    if cap and not cap >= smallest:
        raise ValueError(
            f"softcap: expected 0 (none) or a positive number of at least {smallest:.1e}, "
            f"got {softcap!r}"
        )
    if cap:
        features.add("softcap")
    bias_shape = p.bias_shape
    if bias is not None:
        found["bias"] = x = arrays.adopt("bias", bias)
        if x.dtype not in (inputs.q.dtype, p.dtype.accum):
            either = " or ".join(dict.fromkeys([str(inputs.q.dtype), str(p.dtype.accum)]))
            raise TypeError(
                f"bias: expected dtype {either} for {p.dtype} inputs, got {x.dtype}; "
                "convert it with .astype(...)"
            )
        bias_shape = _pair_shape("bias", x, p, inputs.device)
        features.add("bias")
    if mask is not None:
        found["mask"] = x = arrays.adopt("mask", mask)
        if x.dtype != np.bool_:
            raise TypeError(
                f"mask: expected dtype bool, True where a query sees a key, got {x.dtype}; "
                "pass numbers that are added to the scores as bias"
            )
        _pair_shape("mask", x, p, inputs.device)
        features.add("mask")
    if alibi_slopes is not None:
        found["slopes"] = x = arrays.adopt("alibi_slopes", alibi_slopes)
        _per_head("alibi_slopes", x, p, inputs.device)
        if x.shape not in ((p.heads_q,), (p.batch, p.heads_q)):
            raise ValueError(
                f"alibi_slopes: expected shape {(p.heads_q,)} or {(p.batch, p.heads_q)} "
                f"(heads of q, or batch and heads), got {x.shape}"
            )
        features.add("alibi")
    if sinks is not None:
        found["sinks"] = x = arrays.adopt("sinks", sinks)
        _per_head("sinks", x, p, inputs.device)
        checks.same_shape("sinks", x.shape, (p.heads_q,), "the heads of q")
        features.add("sinks")
    probability = checks.number("dropout_p", dropout_p, p.dtype)
    if not 0 <= probability <= 1:
        raise ValueError(f"dropout_p: expected a probability from 0 to 1, got {dropout_p!r}")
    number = 0
    if probability:
        number, x = _seed(seed, inputs.device)
        if x is not None:
            found["seed"] = x
        features.add("dropout")
    problem = p._replace(
        softcap=cap,
        dropout_p=probability,
        seed=number,
        bias_shape=bias_shape,
        features=tuple(name for name in FEATURES if name in features or name in p.features),
    )
    return problem, inputs._replace(**found)


def _pair_shape(name: str, x: View, p: Problem, device: int | None) -> tuple[int, int, int, int]:
    """Return the shape with four axes of an array that belongs to pairs of a query and a key."""
    checks.same_place(name, x, device)
    full = (p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
    shape = x.shape if x.ndim == 4 else (1, 1, *x.shape)
    fits = x.ndim in (2, 4) and max(shape) < 2**31
    for got, want in zip(shape[:2], full[:2], strict=False):
        fits &= got in (1, want)
    if p.is_packed:
        fitting = f"(queries, keys) or ({full[0]} entries, {full[1]} heads, queries, keys)"
    else:
        for got, want in zip(shape[2:], full[2:], strict=False):
            fits &= got in (1, want)
        fitting = f"{full[2:]} or {full} (batch, heads, queries, keys)"
    if not fits:
        raise ValueError(
            f"{name}: expected shape {fitting}, where any axis may have length 1, got {x.shape}"
        )
    return shape  # type: ignore[return-value]


def _per_head(name: str, x: View, p: Problem, device: int | None) -> None:
    if x.dtype != p.dtype.accum:
        raise TypeError(
            f"{name}: expected dtype {p.dtype.accum} for {p.dtype} inputs, got {x.dtype}; "
            "convert it with .astype(...)"
        )
    checks.same_place(name, x, device)


def _seed(seed: Any, device: int | None) -> tuple[int, View | None]:
    """Return the seed in 64 bits, or the array on the device that holds it."""
    if seed is None:
        raise ValueError(
            "seed: expected an int, or an array of one int64, when dropout_p > 0; pass the same "
            "one to the backward call, and another one to each forward call"
        )
    if isinstance(seed, (int, np.integer)) and not isinstance(seed, (bool, np.bool_)):
        if not -(2**63) <= seed < 2**64:
            raise ValueError(f"seed: expected an integer of 64 bits, got {seed}")
        return int(seed) % 2**64, None
    try:
        x = arrays.adopt("seed", seed)
    except TypeError:
        raise TypeError(
            f"seed: expected an int or an array of one int64, got {type(seed).__name__}"
        ) from None
    if x.dtype not in (np.int64, np.uint64) or math.prod(x.shape) != 1:
        raise TypeError(
            f"seed: expected an int or an array of one int64, got an array of dtype {x.dtype} "
            f"and shape {x.shape}"
        )
    if x.device is None:
        return int(x.array.reshape(())) % 2**64, None
    checks.same_place("seed", x, device)
    return 0, x


def read_packed(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    scale: Any,
    causal: Any,
    window: Any,
    layout: Any,
    *options: Any,
) -> tuple[Problem, Arrays]:
    """Check the arguments of a call with packed entries; `options` are those of read()."""
    q = arrays.adopt("q", q)
    if q.ndim != 3:
        raise ValueError(
            f"q: expected packed (total, heads, dim) or, with layout='bhsd', (heads, total, dim), "
            f"got shape {q.shape}"
        )
    problem, inputs = _read_plain(q, k, v, scale, causal, window, layout)
    offsets = [arrays.adopt("cu_seqlens_q", cu_seqlens_q)]
    offsets += [arrays.adopt("cu_seqlens_k", cu_seqlens_k)]
    longest = []
    totals = problem.seqlen_q, problem.seqlen_kv
    names = "cu_seqlens_q", "cu_seqlens_k"
    for name, x, total in zip(names, offsets, totals, strict=True):
        longest.append(_offsets(name, x, total, inputs.device))
    entries = [x.shape[0] - 1 for x in offsets]
    if entries[0] != entries[1]:
        raise ValueError(
            f"cu_seqlens_k: expected {entries[0] + 1} offsets, as cu_seqlens_q has, "
            f"got {entries[1] + 1}"
        )
    for name, hint in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        _hint(name, hint)
    features = ("packed",)
    problem = problem._replace(batch=entries[0], features=features)
    inputs = inputs._replace(cu_seqlens_q=offsets[0], cu_seqlens_kv=offsets[1])
    problem, inputs = _read_options(problem, inputs, *options)
    for name, x in (("bias", inputs.bias), ("mask", inputs.mask)):
        if x is None:
            continue
        for what, length, got in zip(("queries", "keys"), longest, x.shape[-2:], strict=True):
            if got != 1 and got < length:
                raise ValueError(
                    f"{name}: expected an axis of {what} of length 1 or of at least the longest "
                    f"entry's {length}, got shape {x.shape}"
                )
    return problem, inputs


def _offsets(name: str, x: View, total: int, device: int | None) -> int:
    """Check offsets; returns the longest entry, or 1 if they are on a device, unread."""
    if x.dtype not in (np.int32, np.int64):
        raise TypeError(f"{name}: expected dtype int32 or int64, got {x.dtype}")
    if x.ndim != 1 or not 1 <= x.shape[0] <= _MAX_LENGTH:
        raise ValueError(
            f"{name}: expected one axis of (number of entries) + 1 offsets, got shape {x.shape}"
        )
    if x.device is not None:
        checks.same_place(name, x, device)
        return min(1, total)
    first, end = x.array[:-1], x.array[1:]
    if x.array[0] < 0 or x.array[-1] > total or (end < first).any():  # differences might wrap
        raise ValueError(
            f"{name}: expected offsets from 0 to {total}, the rows there are, each at least the "
            f"one before, got {np.array2string(x.array, threshold=8)}"
        )
    return int((end - first).max(initial=0))


def _hint(name: str, value: Any) -> None:
    """Check a hint for the choice of kernels; no kernel here needs it."""
    if value is None:
        return
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer, np.ndarray)):
        raise TypeError(f"{name}: expected an int or None, got {type(value).__name__}")
    try:
        length = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an int or None, got {value!r}") from None
    if length < 0:
        raise ValueError(f"{name}: expected a length, got {length}")


def read_wanted(wrt: Any, problem: Problem) -> tuple[str, ...]:
    """Return which gradients are wanted, of q, k, v, bias and sinks."""
    there = ["q", "k", "v"]
    if problem.features:
        there += [name for name in ("bias", "sinks") if name in problem.features]
    if wrt is None:
        return tuple(there)
    try:
        names = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    except TypeError:
        raise TypeError(f"wrt: expected names out of {there}, got {type(wrt).__name__}") from None
    for name in names:
        if not isinstance(name, str) or name not in there:
            raise ValueError(f"wrt: expected some of {there}, the call's arrays, got {name!r}")
    return names


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
    if x.dtype != q.dtype:
        raise TypeError(f"{name}: expected dtype {q.dtype}, as q has, got {x.dtype}")
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
