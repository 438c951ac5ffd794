# SPDX-License-Identifier: Apache-2.0
"""The dense calls that a call consists of: what errors are measured on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..reference_arguments import DEFAULTS, Options, entries, heads_first, read_dlse
from .inputs import Inputs, host

__all__ = ["Dense", "count_copies", "dense_calls", "dense_entries", "exactly"]

#: Calls with fewer rows or elements than this are measured on neighbours too.
_FEW_ROWS, _FEW_ELEMENTS = 5 * 10**2, 4 * 10**3


@dataclass(frozen=True, eq=False)
class Dense:
    """A call with axes (batch, heads, seq, dim), arrays as precise as the reference needs."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray | None
    dlse: np.ndarray
    options: Options


def exactly(x: Any) -> np.ndarray:
    """Return a host array in the precision that the reference is to compute in."""
    x = host(x)
    return x.astype(np.longdouble) if x.dtype == np.float64 else x


def dense_entries(inputs: Inputs) -> list[tuple[slice, slice, Options]]:
    """Return the queries, keys and options of each dense call that a call consists of."""
    i = inputs.moved(exactly)
    options = Options(**{name: getattr(i, name) for name in DEFAULTS})
    if not i.cu_seqlens:
        return [(slice(None), slice(None), options)]
    q, k, _ = heads_first(i.layout, i.q, i.k, i.v)
    return list(entries(q, i.cu_seqlens_q, k, i.cu_seqlens_k, options))


def count_copies(inputs: Inputs) -> int:
    """Return how many calls to measure: the call itself and neighbours of it.

    An error that a whole row shares (of its lse, its delta) makes the largest one, and with few
    rows its size is a matter of luck. Calls with nearly the same inputs have errors of the same
    kind.
    """
    given = [x for x in map(host, (inputs.q, inputs.k, inputs.v)) if x.size]
    rows = min((x.size // x.shape[-1] for x in given), default=2 * _FEW_ROWS)
    elements = min((x.size for x in given), default=_FEW_ELEMENTS)
    # In 16 bits the roundings of single elements are larger than what a row shares, and few rows
    # have many of those; but not in sums.
    shared = inputs.dtype.itemsize > 2 or inputs.bias is not None or inputs.sinks is not None
    return 1 + min(max(_FEW_ROWS // rows * shared, _FEW_ELEMENTS // elements), 15)


def dense_calls(inputs: Inputs, copies: int) -> Iterator[Dense]:
    """Yield the dense calls that a call consists of, each stacked with its neighbours by batch.

    The neighbours have inputs that differ in the last place, and dropout takes other weights of
    theirs. bias has all of its axes, so that its gradient comes term by term.
    """
    rng = np.random.default_rng(0)
    i = inputs.moved(exactly)
    arrays = [x for x in (i.q, i.k, i.v, i.dout) if x is not None]
    arrays = heads_first(i.layout, *arrays)
    dlse = read_dlse(i.dlse, i.q.ndim == 4, arrays[0])

    def nudged(x: np.ndarray) -> np.ndarray:
        parts = [x]
        for _ in range(copies - 1):  # about half of the numbers move by one unit towards 0
            y = x.astype(inputs.dtype)
            y = np.nextafter(y, np.zeros_like(y)).astype(x.dtype)
            parts.append(np.where(np.isfinite(x) & (rng.random(x.shape) < 0.5), y, x))
        return np.concatenate(parts)

    for rows, keys, options in dense_entries(inputs):
        places = (rows, keys, keys, rows)
        q, k, v, *dout = (x[:, :, at] for x, at in zip(arrays, places, strict=False))
        shape = (*q.shape[:3], k.shape[2])
        own = {}
        for name in ("bias", "mask"):
            if (x := getattr(options, name)) is not None:
                own[name] = np.concatenate([np.broadcast_to(x, shape)] * copies)
        if options.alibi_slopes is not None:
            slopes = np.broadcast_to(options.alibi_slopes, shape[:2])
            own["alibi_slopes"] = np.concatenate([slopes] * copies)
        yield Dense(
            nudged(q),
            nudged(k),
            nudged(v),
            nudged(dout[0]) if dout else None,
            np.concatenate([dlse[:, :, rows]] * copies),
            replace(options, **own),
        )
