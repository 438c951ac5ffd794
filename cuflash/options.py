# SPDX-License-Identifier: Apache-2.0
"""Options: the reading of what changes scores and probabilities, from softcap to dropout."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from . import arrays, checks
from .arrays import View
from .dtypes import DType
from .problem import FEATURES, Arrays, Problem

__all__ = ["read_options"]


def read_options(
    problem: Problem,
    inputs: Arrays,
    softcap: Any = 0.0,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout_p: Any = 0.0,
    seed: Any = None,
) -> tuple[Problem, Arrays]:
    """Check the options of a call; returns its problem and its arrays with them."""
    no_arrays = bias is mask is alibi_slopes is sinks is None
    if no_arrays and type(softcap) is type(dropout_p) is float and softcap == dropout_p == 0:
        return problem, inputs
    p, device = problem, inputs.device
    cap = _softcap(softcap, p.dtype)
    bias = None if bias is None else _bias(bias, p, inputs.q)
    mask = None if mask is None else _mask(mask, p, device)
    slopes = None if alibi_slopes is None else _slopes(alibi_slopes, p, device)
    sinks = None if sinks is None else _sinks(sinks, p, device)
    probability = _probability(dropout_p, p.dtype)
    number, seed = _seed(seed, device) if probability else (0, None)
    used = {
        "softcap": cap != 0,
        "bias": bias is not None,
        "mask": mask is not None,
        "alibi": slopes is not None,
        "sinks": sinks is not None,
        "dropout": probability != 0,
        "packed": p.is_packed,
    }
    problem = p._replace(
        softcap=cap,
        dropout_p=probability,
        seed=number,
        bias_shape=p.bias_shape if bias is None else _four_axes(bias.shape),
        features=tuple(name for name in FEATURES if used[name]),
    )
    inputs = inputs._replace(bias=bias, mask=mask, slopes=slopes, sinks=sinks, seed=seed)
    return problem, inputs


def _softcap(softcap: Any, dtype: DType) -> float:
    cap = checks.number("softcap", softcap, dtype)
    # The largest number of an accumulator has a reciprocal; the smallest cap must have one too.
    smallest = 1 / float(np.finfo(dtype.accum).max)
    if cap and not cap >= smallest:
        raise ValueError(
            f"softcap: expected 0 (none) or a positive number of at least {smallest:.1e}, "
            f"got {softcap!r}"
        )
    return cap


def _bias(bias: Any, p: Problem, q: View) -> View:
    x = arrays.adopt("bias", bias)
    if x.dtype not in (q.dtype, p.dtype.accum):
        either = " or ".join(dict.fromkeys([str(q.dtype), str(p.dtype.accum)]))
        raise TypeError(
            f"bias: expected dtype {either} for {p.dtype} inputs, got {x.dtype}; "
            "convert it with .astype(...)"
        )
    _of_pairs("bias", x, p, q.device)
    return x


def _mask(mask: Any, p: Problem, device: int | None) -> View:
    x = arrays.adopt("mask", mask)
    if x.dtype != np.bool_:
        raise TypeError(
            f"mask: expected dtype bool, True where a query sees a key, got {x.dtype}; "
            "pass numbers that are added to the scores as bias"
        )
    _of_pairs("mask", x, p, device)
    return x


def _slopes(alibi_slopes: Any, p: Problem, device: int | None) -> View:
    x = arrays.adopt("alibi_slopes", alibi_slopes)
    _of_heads("alibi_slopes", x, p, device)
    if x.shape not in ((p.heads_q,), (p.batch, p.heads_q)):
        raise ValueError(
            f"alibi_slopes: expected shape {(p.heads_q,)} or {(p.batch, p.heads_q)} "
            f"(heads of q, or batch and heads), got {x.shape}"
        )
    return x


def _sinks(sinks: Any, p: Problem, device: int | None) -> View:
    x = arrays.adopt("sinks", sinks)
    _of_heads("sinks", x, p, device)
    checks.same_shape("sinks", x.shape, (p.heads_q,), "the heads of q")
    return x


def _probability(dropout_p: Any, dtype: DType) -> float:
    probability = checks.number("dropout_p", dropout_p, dtype)
    if not 0 <= probability <= 1:
        raise ValueError(f"dropout_p: expected a probability from 0 to 1, got {dropout_p!r}")
    return probability


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


def _of_pairs(name: str, x: View, p: Problem, device: int | None) -> None:
    """Check place and shape of an array that belongs to pairs of a query and a key."""
    checks.same_place(name, x, device)
    full = (p.batch, p.heads_q, p.seqlen_q, p.seqlen_kv)
    shape = _four_axes(x.shape)
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


def _four_axes(shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return (batch, heads, queries, keys) of an array that may lack the first two."""
    return shape if len(shape) == 4 else (1, 1, *shape)  # type: ignore[return-value]


def _of_heads(name: str, x: View, p: Problem, device: int | None) -> None:
    """Check dtype and place of an array that belongs to heads."""
    if x.dtype != p.dtype.accum:
        raise TypeError(
            f"{name}: expected dtype {p.dtype.accum} for {p.dtype} inputs, got {x.dtype}; "
            "convert it with .astype(...)"
        )
    checks.same_place(name, x, device)
