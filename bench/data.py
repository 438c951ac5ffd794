# SPDX-License-Identifier: Apache-2.0
"""Inputs of a case: random normal numbers, in enough copies that no cache holds them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.cases import Case

__all__ = ["ITEMSIZE", "L2_BYTES", "Inputs", "as_float64", "normal", "sets_of"]

L2_BYTES = 60 * 2**20
ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
SEED = 1  # of dropout


@dataclass(frozen=True)
class Inputs:
    """Arrays (batch, seqlen, heads, dim), and options under cuflash's names."""

    q: Any
    k: Any
    v: Any
    dout: Any
    options: dict[str, Any] = field(default_factory=dict)
    offsets: Any = None  # of packed sequences


def normal(shape: tuple[int, ...], dtype: str, xp: Any = None) -> Any:
    """Return random values of mean 0 and variance 1, of CuPy or another `xp`."""
    if xp is None:
        import cupy as xp
    kind = np.dtype(dtype) if dtype != "bfloat16" else _bfloat16()
    if xp is np:
        return np.random.standard_normal(shape).astype(kind)
    if dtype == "float64":
        return xp.random.standard_normal(shape, dtype=xp.float64)
    return _as_kind(xp.random.standard_normal(shape, dtype=xp.float32), kind, xp)


def _as_kind(x: Any, kind: np.dtype, xp: Any) -> Any:
    """Return float32 numbers in another dtype."""
    if kind.name != "bfloat16":
        return x.astype(kind, copy=False)
    # By its bits (the upper half of a float32), whatever CuPy can do with bfloat16.
    return (x.view(xp.uint32) >> 16).astype(xp.uint16).view(kind)


def _bfloat16() -> np.dtype:
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def as_float64(x: Any, xp: Any) -> Any:
    """Return an array as float64, bfloat16 by its bits."""
    if x.dtype.name == "bfloat16":
        x = (x.view(xp.uint16).astype(xp.uint32) << 16).view(xp.float32)
    return x.astype(xp.float64)


def sets_of(case: Case, dtype: str, xp: Any = None) -> list[Inputs]:
    """Return sets of inputs that calls take in turn: one, or so many that no cache holds them."""
    if xp is None:
        import cupy as xp
    xp.random.seed(0)
    shape_q = (case.batch, case.seqlen_q, case.heads, case.head_dim)
    shape_k = (case.batch, case.seqlen_kv, case.kv_heads, case.head_dim)
    shape_v = (*shape_k[:3], case.head_dim_v)
    shape_o = (*shape_q[:3], case.head_dim_v)
    shapes = (shape_q, shape_k, shape_v, shape_o)
    size = ITEMSIZE[dtype] * sum(math.prod(shape) for shape in shapes)
    count = 1 if size > L2_BYTES else math.ceil(2 * L2_BYTES / size)
    options = _options_of(case, dtype, xp)
    offsets = None
    if case.packed:
        offsets = xp.asarray(np.arange(case.batch + 1, dtype=np.int32) * case.seqlen_q)
    found = []
    for _ in range(count):
        q, k, v, dout = (normal(shape, dtype, xp) for shape in shapes)
        if case.growing:
            _grow(case, q, k, xp)
        found.append(Inputs(q, k, v, dout, options, offsets))
    return found


def _grow(case: Case, q: Any, k: Any, xp: Any) -> None:
    """Let one number of each query and key make scores grow by 1/16 from key to key.

    In powers of two that is 5.8 for each 64 keys, 11.5 for 128.
    """
    kind = k.dtype
    steps = xp.arange(case.seqlen_kv, dtype=xp.float32) / 16 * math.sqrt(case.head_dim) / 16
    if case.growing == "down":
        steps = steps[::-1]
    q[..., 0] = _as_kind(xp.full(1, 16.0, xp.float32), kind, xp)[0]
    k[..., 0] = _as_kind(steps, kind, xp)[None, :, None]


def _options_of(case: Case, dtype: str, xp: Any) -> dict[str, Any]:
    """Return the options of a case as cuflash takes them."""
    pairs = (case.seqlen_q, case.seqlen_kv)
    accum = "float64" if dtype == "float64" else "float32"
    found: dict[str, Any] = {"causal": case.causal}
    if case.window != (-1, -1):
        found["window"] = case.window
    if case.softcap:
        found["softcap"] = case.softcap
    if case.bias:
        heads = {"heads": case.heads, "shared": 1}[case.bias]
        found["bias"] = normal((1, heads, *pairs), dtype, xp)
    if case.mask:
        found["mask"] = xp.random.random((1, 1, *pairs)) < 0.7
    if case.alibi:
        found["alibi_slopes"] = xp.abs(normal((case.heads,), accum, xp)) / 64
    if case.sinks:
        found["sinks"] = normal((case.heads,), accum, xp)
    if case.dropout:
        found |= {"dropout_p": case.dropout, "seed": SEED}
    return found
