# SPDX-License-Identifier: Apache-2.0
"""The bytes of struct Params of ``kernels/attention/params.cuh``: same fields, same order."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from .arrays import View
from .plan import PARAMS_BYTES
from .problem import Layout, Problem

__all__ = ["Operands", "pack"]


class Operands(NamedTuple):
    """The arrays of Params, in its order; None where a call has no such array."""

    q: View | None = None
    k: View | None = None
    v: View | None = None
    out: View | None = None
    dout: View | None = None
    dq: View | None = None
    dk: View | None = None
    dv: View | None = None
    lse: View | None = None
    dlse: View | None = None
    delta: int | None = None  # the address of scratch memory


def pack(buffer: Any, problem: Problem, layout: Layout, operands: Operands) -> None:
    """Write struct Params into `buffer`."""
    p = problem
    fields: list[Any] = []
    for x in operands[:8]:
        fields += _NO_TENSOR if x is None else _tensor(x, layout, p.dtype.group)
    for x in operands[8:10]:
        fields += _NO_ROWS if x is None else _rows(x)
    rows = p.heads_q * p.seqlen_q
    fields += _NO_ROWS if operands.delta is None else (operands.delta, rows, p.seqlen_q, 1)
    _PARAMS.pack_into(
        buffer,
        0,
        *fields,
        p.scale,
        p.batch,
        p.heads_q,
        p.heads_kv,
        p.seqlen_q,
        p.seqlen_kv,
        p.head_dim,
        p.head_dim_v,
        p.window_left,
        p.window_right,
    )


# Eight Tensor, three RowTensor, then the scalars.
_PARAMS = struct.Struct("=" + 8 * "Q5q" + 3 * "Q3q" + "dq8i")
assert _PARAMS.size == PARAMS_BYTES

_NO_TENSOR = (0, 0, 0, 0, 0, 0)
_NO_ROWS = (0, 0, 0, 0)


def _tensor(x: View, layout: Layout, group: int) -> tuple[int, ...]:
    """Return struct Tensor: address, strides in elements, and whether vectors can be moved."""
    strides, size, address = x.strides, x.itemsize, x.address
    batch = 0 if layout.batch is None else strides[layout.batch]
    seq, head, dim = strides[layout.seq], strides[layout.heads], strides[layout.dim]
    vectors = (
        dim == size
        and x.shape[layout.dim] % group == 0
        and not (address | batch | seq | head) % (group * size)
    )
    return address, batch // size, seq // size, head // size, dim // size, vectors


def _rows(x: View) -> tuple[int, ...]:
    """Return struct RowTensor: address and strides in elements."""
    size, strides = x.itemsize, x.strides
    batch = strides[0] // size if len(strides) == 3 else 0
    return x.address, batch, strides[-2] // size, strides[-1] // size
