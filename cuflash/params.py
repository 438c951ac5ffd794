# SPDX-License-Identifier: Apache-2.0
"""The bytes of the structs that kernels take: same fields, same order.

Params of ``kernels/attention/params.cuh``; MergeParams of ``merge_states.cu`` and RealignParams of
``realign.cu`` beside it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from .arrays import Form, View
from .layout import Layout
from .merge import Merge, Parts
from .plan import PARAMS_BYTES, Box, MergeStates, Realign, dbias_split
from .problem import Problem
from .tensormap import TensorMap

__all__ = [
    "ADDRESSES",
    "COPY_ADDRESSES",
    "SEED",
    "Operands",
    "has_boxes",
    "pack",
    "pack_copies",
    "pack_merge",
    "pair_alignment",
    "row_alignment",
    "tensor_map",
]


class Operands(NamedTuple):
    """The arrays of Params, in its order; None where a call has no such array.

    What lies in workspace is an address.
    """

    q: View | Form | None = None
    k: View | Form | None = None
    v: View | Form | None = None
    out: View | Form | None = None
    dout: View | Form | None = None
    dq: View | Form | None = None
    dk: View | Form | None = None
    dv: View | Form | None = None
    lse: View | Form | None = None
    dlse: View | Form | None = None
    delta: int = 0
    bias: View | Form | None = None
    dbias: View | Form | None = None
    mask: View | Form | None = None
    slopes: View | Form | None = None
    sinks: View | Form | None = None
    dsinks: View | Form | None = None
    cu_seqlens_q: View | Form | None = None
    cu_seqlens_kv: View | Form | None = None
    dbias_parts: int = 0
    row_stats: int = 0
    dq_sums: int = 0
    dq_turns: int = 0
    tickets: int = 0
    seed: View | Form | None = None


def pack(buffer: Any, problem: Problem, layout: Layout, operands: Operands) -> None:
    """Write struct Params into `buffer`."""
    p, x = problem, operands
    fields: list[Any] = []
    for tensor in x[:8]:
        fields += _NO_TENSOR if tensor is None else _tensor(tensor, layout, p.dtype.group)
    fields += _NO_ROWS if x.lse is None else _rows(x.lse)
    fields += _NO_ROWS if x.dlse is None else _rows(x.dlse)
    fields += (x.delta, 0 if p.is_packed else p.heads_q * p.seqlen_q, p.seqlen_q, 1)
    params, kept, dropped = _PLAIN, 1.0, 0
    if p.features:
        params = _PARAMS
        fields += _options(p, x)
        if p.dropout_p:
            kept = 1 / (1 - p.dropout_p) if p.dropout_p < 1 else 0.0
            dropped = min(round(p.dropout_p * 2**32), 2**32 - 1)
    params.pack_into(
        buffer,
        0,
        *fields,
        p.scale,
        p.softcap,
        kept,
        p.batch,
        dropped,
        p.heads_q,
        p.heads_kv,
        p.seqlen_q,
        p.seqlen_kv,
        p.head_dim,
        p.head_dim_v,
        p.window_left,
        p.window_right,
        *(dbias_split(p) if x.dbias is not None else (0, 0)),
        0,
    )


# Eight Tensor, three RowTensor, three PairTensor, three HeadTensor, two Offsets, five addresses of
# workspace, seed_at, seed, then the scalars.
_OPTIONS = 3 * "Q4q4iq" + 3 * "Q2q" + 2 * "Q2q" + "QQQQQQQ"
_ARRAYS, _SCALARS = 8 * "Q5q" + 3 * "Q3q", "3dqI11i"
_PARAMS = struct.Struct(f"={_ARRAYS}{_OPTIONS}{_SCALARS}")
#: The same for a call without options, where that part is zero.
_PLAIN = struct.Struct(f"={_ARRAYS}{struct.calcsize('=' + _OPTIONS)}x{_SCALARS}")
assert _PARAMS.size == _PLAIN.size == PARAMS_BYTES


def _addresses() -> dict[str, int]:
    words, place = {}, 0
    kinds = 8 * ("Q5q",) + 3 * ("Q3q",) + 3 * ("Q4q4iq",) + 3 * ("Q2q",) + 2 * ("Q2q",) + 6 * ("Q",)
    for name, kind in zip(Operands._fields, kinds, strict=True):
        words[name] = place // 8
        place += struct.calcsize("=" + kind)
    return words


#: Where the address of each operand lies in Params, in words of 8 bytes; the seed comes last.
ADDRESSES = _addresses()
SEED = ADDRESSES["seed"] + 1

_NO_TENSOR = (0,) * 6
_NO_ROWS = (0,) * 4
_NO_PAIRS = (0,) * 10
_NO_HEADS = (0,) * 3


def _used_strides(x: View | Form) -> list[int]:
    """Return the strides, with 0 for axes of length 1: along these nothing moves."""
    return [0 if n == 1 else stride for n, stride in zip(x.shape, x.strides, strict=True)]


def row_alignment(x: View | Form, layout: Layout, group: int) -> int:
    """Return how many bytes of a row can be moved at once: 16, 8 or, if it is not contiguous, 0.

    Never less than `group` elements.
    """
    strides, size = _used_strides(x), x.itemsize
    if x.strides[layout.dim] != size:
        return 0
    bits = x.address | strides[layout.seq] | strides[layout.heads] | x.shape[layout.dim] * size
    if layout.batch is not None:
        bits |= strides[layout.batch]
    return next((n for n in (16, 8) if n >= group * size and not bits % n), 0)


def pair_alignment(x: View | Form) -> int:
    """Return how many bytes of a row of a bias or mask are copied at once: 16, 4 or 0.

    Not 8: each of them is a kernel of its own, and a mask may grow by a key at each call.
    """
    *outer, step = x.strides
    if step != x.itemsize or x.shape[-1] == 1:
        return 0
    bits = x.address | x.shape[-1] * x.itemsize
    for length, stride in zip(x.shape, outer, strict=False):
        bits |= stride if length > 1 else 0
    return next((n for n in (16, 4) if not bits % n), 0)


def has_boxes(x: View | Form, layout: Layout) -> bool:
    """Return whether TMA can move a tensor, whose rows are aligned to 16 bytes.

    Axes that are broadcast, reversed, or empty it cannot.
    """
    strides = (s for n, s in zip(x.shape, x.strides, strict=True) if n > 1)
    return 0 not in x.shape and all(0 < s < 2**40 for s in strides)


def tensor_map(x: View | Form, dtype: str, layout: Layout, box: Box) -> TensorMap:
    """Return the map of a tensor, with the axes (dim, seq, head, batch), for boxes of it."""
    axes = [layout.dim, layout.seq, layout.heads, layout.batch]
    dims = [1 if axis is None else x.shape[axis] for axis in axes]
    # No stride of an axis of length 1 is used.
    strides = [16 if n == 1 else x.strides[axis] for n, axis in zip(dims, axes, strict=True)][1:]
    swizzle = box.columns * x.itemsize
    return TensorMap(
        x.address, dtype, tuple(dims), tuple(strides), (box.columns, box.rows, 1, 1), swizzle
    )


def _tensor(x: View | Form, layout: Layout, group: int) -> tuple[int, ...]:
    """Return struct Tensor: address, strides in elements, and the bytes that can move at once."""
    strides, size = _used_strides(x), x.itemsize
    batch = 0 if layout.batch is None else strides[layout.batch]
    seq, head, dim = strides[layout.seq], strides[layout.heads], strides[layout.dim]
    aligned = row_alignment(x, layout, group)
    return x.address, batch // size, seq // size, head // size, dim // size, aligned


def _rows(x: View | Form) -> tuple[int, ...]:
    """Return struct RowTensor: address and strides in elements."""
    size, strides = x.itemsize, x.strides
    batch = strides[0] // size if len(strides) == 3 else 0
    return x.address, batch, strides[-2] // size, strides[-1] // size


def _options(p: Problem, x: Operands) -> list[int]:
    """Return the fields from `bias` to `seed`."""
    fields: list[int] = []
    for pairs in (x.bias, x.dbias, x.mask):
        fields += _NO_PAIRS if pairs is None else _pairs(pairs, p.dtype.accum.itemsize)
    for heads in (x.slopes, x.sinks, x.dsinks):
        fields += _NO_HEADS if heads is None else _heads(heads)
    for offsets in (x.cu_seqlens_q, x.cu_seqlens_kv):
        if offsets is None:
            fields += _NO_HEADS
        else:
            size = offsets.itemsize
            fields += (offsets.address, offsets.strides[0] // size, size == 8)
    fields += (x.dbias_parts, x.row_stats, x.dq_sums, x.dq_turns, x.tickets)
    fields += (0 if x.seed is None else x.seed.address, p.seed)
    return fields


def _pairs(x: View | Form, wide: int) -> tuple[int, ...]:
    """Return struct PairTensor; `wide` is the size of an accumulator."""
    shape, size = x.shape, x.itemsize
    strides = [0 if n == 1 else s // size for n, s in zip(shape, x.strides, strict=True)]
    if len(shape) == 2:
        shape, strides = (1, 1, *shape), [0, 0, *strides]
    return x.address, *strides, *shape, size == wide


def _heads(x: View | Form) -> tuple[int, ...]:
    """Return struct HeadTensor."""
    batch = x.strides[0] // x.itemsize if len(x.shape) == 2 and x.shape[0] > 1 else 0
    return x.address, batch, x.strides[-1] // x.itemsize


# --- realign --------------------------------------------------------------------------------------


def pack_copies(
    buffer: Any, plan: Realign, copies: Sequence[tuple[Form, Form]], layout: Layout
) -> int:
    """Write struct RealignParams into `buffer`; returns how many blocks there are to launch.

    Each copy goes from an array to another one, of which one has longer rows.
    """
    fields: list[int] = []
    parts = 0
    for source, to in copies:
        # An axis that is broadcast in what is written is written once.
        lengths = [1 if stride == 0 else n for n, stride in zip(to.shape, to.strides, strict=True)]
        *_, middle, inner, width = lengths
        rows, groups = math.prod(lengths[:-1]), -(-width // plan.group)
        cols = min(source.shape[-1], width)
        fields += (*_side(source, layout), *_side(to, layout), rows, middle, inner, cols, groups)
        parts += plan.parts(rows * groups)
    fields += _NO_COPY * (plan.max_copies - len(copies))
    _COPIES.pack_into(buffer, 0, *fields, parts)
    return parts


_COPY = 2 * "Q5q" + "q4i"
_COPIES = struct.Struct("=" + Realign.max_copies * _COPY + "q")
assert _COPIES.size == Realign.params_bytes

_NO_COPY = (0,) * 17

#: Where the addresses of each copy's two arrays lie in RealignParams, in words of 8 bytes.
COPY_ADDRESSES = tuple(
    (at, at + 6)
    for at in (n * struct.calcsize("=" + _COPY) // 8 for n in range(Realign.max_copies))
)


def _side(x: Form, layout: Layout) -> tuple[int, ...]:
    """Return struct Side, without its address."""
    outer, middle, inner, dim = ((0,) * (4 - len(x.strides)) + x.strides)[-4:]
    size = x.itemsize
    vectors = row_alignment(x, layout, 1) == 16
    return 0, outer // size, middle // size, inner // size, dim // size, vectors


# --- merge_states ---------------------------------------------------------------------------------


def pack_merge(
    buffer: Any,
    plan: MergeStates,
    merge: Merge,
    parts: Parts,
    results: tuple[View, View],
    scratch: tuple[int, int],
    first: int,
    scan: bool,
) -> None:
    """Write struct MergeParams of the launch that begins with part `first` into `buffer`.

    `results` are out and lse, `scratch` the addresses of states and sums, or zeros.
    """
    end = first + plan.max_parts
    outs, lses = parts.outs[first:end], parts.lses[first:end]
    fields: list[int] = []
    for out, lse in zip(outs, lses, strict=True):
        fields += _state(out, lse, parts.layout, plan.group)
    fields += _NO_STATE * (plan.max_parts - len(outs))
    fields += _state(*results, parts.layout, plan.group)
    middle, inner = merge.shape[-2:]
    fields += (*scratch, merge.rows, middle, inner, merge.dim, plan.groups(merge, scan))
    _MERGE.pack_into(buffer, 0, *fields, len(outs), scan, first == 0, end >= len(parts.outs))


_MERGE = struct.Struct("=" + (MergeStates.max_parts + 1) * "Q4qqQ3q" + "QQ5q4i")
assert _MERGE.size == MergeStates.params_bytes

_NO_STATE = (0,) * 10


def _state(out: View, lse: View, layout: Layout, group: int) -> tuple[int, ...]:
    """Return struct State; its axes are in the order of those of `out`."""
    size, strides, address = out.itemsize, out.strides, out.address
    batch, outer, inner, dim = (0,) * (4 - len(strides)) + strides
    vectors = (
        dim == size
        and out.shape[-1] % group == 0
        and not (address | batch | outer | inner) % (group * size)
    )
    wide = lse.itemsize
    lse_batch, lse_outer, lse_inner = (0,) * (3 - len(lse.strides)) + lse.strides
    if layout.seq < layout.heads:
        lse_outer, lse_inner = lse_inner, lse_outer
    return (
        *(address, batch // size, outer // size, inner // size, dim // size, vectors),
        *(lse.address, lse_batch // wide, lse_outer // wide, lse_inner // wide),
    )
