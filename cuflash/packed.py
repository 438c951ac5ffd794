# SPDX-License-Identifier: Apache-2.0
"""Packed calls: the reading of those whose entries lie one behind the other, and of offsets."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from . import arrays, checks
from .arrays import View
from .options import read_options
from .problem import MAX_LENGTH, Arrays, Problem, read

__all__ = ["read_packed"]


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
    """Check the arguments of a call with packed entries; `options` are those of read_options()."""
    q = arrays.adopt("q", q)
    if q.ndim != 3:
        raise ValueError(
            f"q: expected packed (total, heads, dim) or, with layout='bhsd', (heads, total, dim), "
            f"got shape {q.shape}"
        )
    problem, inputs = read(q, k, v, scale, causal, window, layout)
    cu_q = arrays.adopt("cu_seqlens_q", cu_seqlens_q)
    cu_k = arrays.adopt("cu_seqlens_k", cu_seqlens_k)
    longest_q = _offsets("cu_seqlens_q", cu_q, problem.seqlen_q, inputs.device)
    longest_k = _offsets("cu_seqlens_k", cu_k, problem.seqlen_kv, inputs.device)
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            f"cu_seqlens_k: expected {cu_q.shape[0]} offsets, as cu_seqlens_q has, "
            f"got {cu_k.shape[0]}"
        )
    _hint("max_seqlen_q", max_seqlen_q)
    _hint("max_seqlen_k", max_seqlen_k)
    problem = problem._replace(batch=cu_q.shape[0] - 1, features=("packed",))
    inputs = inputs._replace(cu_seqlens_q=cu_q, cu_seqlens_kv=cu_k)
    problem, inputs = read_options(problem, inputs, *options)
    for name, x in (("bias", inputs.bias), ("mask", inputs.mask)):
        if x is not None:
            _long_enough(name, x, longest_q, longest_k)
    return problem, inputs


def _offsets(name: str, x: View, total: int, device: int | None) -> int:
    """Check offsets; returns the longest entry, or 1 if they are on a device, unread."""
    if x.dtype not in (np.int32, np.int64):
        raise TypeError(f"{name}: expected dtype int32 or int64, got {x.dtype}")
    if x.ndim != 1 or not 1 <= x.shape[0] <= MAX_LENGTH:
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


def _long_enough(name: str, x: View, longest_q: int, longest_k: int) -> None:
    """Check that a bias or mask has the queries and keys of the longest entry."""
    lengths = (("queries", longest_q), ("keys", longest_k))
    for (what, length), got in zip(lengths, x.shape[-2:], strict=True):
        if got != 1 and got < length:
            raise ValueError(
                f"{name}: expected an axis of {what} of length 1 or of at least the longest "
                f"entry's {length}, got shape {x.shape}"
            )
