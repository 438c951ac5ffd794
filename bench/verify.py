# SPDX-License-Identifier: Apache-2.0
"""Whether a result is right, before its speed is believed.

Of two of the key heads (the first of the first batch entry, the last of the last) and the query
heads that read them, all rows are computed anew in float64 on the same device, by the formula and
with every option. Rows are compared in blocks of 64, each by the norm of its difference: the rows
of a causal call differ in size by a factor of a hundred, and a norm over all of them would see only
the first ones. Elements elsewhere must be finite.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bench.cases import Case
from bench.data import Inputs, as_float64

__all__ = ["TOLERANCE", "Expected", "errors", "expected", "wrong"]

#: Largest norm of the difference of a block of rows, relative to the norm of what is expected.
#: Good kernels reach 2e-3 to 3e-3 in bfloat16, an eighth of that in float16.
TOLERANCE = {"float64": 1e-11, "float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}
NAMES = {"forward": ("out",), "backward": ("dq", "dk", "dv")}
BLOCK = 64
CHUNK = 1024  # query rows whose scores exist at a time

#: For each (batch entry, key head): the expected rows by name. q's have a leading axis of heads.
Expected = dict[tuple[int, int], dict[str, Any]]


def sampled(case: Case) -> list[tuple[int, int]]:
    """Return the batch entries and key heads that are checked."""
    first, last = (0, 0), (case.batch - 1, case.kv_heads - 1)
    # What dropout keeps is slow to know for a late entry.
    return [first] if first == last or case.dropout else [first, last]


def expected(case: Case, inputs: Inputs, xp: Any = None) -> Expected:
    """Compute what the results should be, of the sampled heads."""
    if xp is None:
        import cupy as xp
    return {at: _one(case, inputs, *at, xp) for at in sampled(case)}


def _one(case: Case, inputs: Inputs, entry: int, kv_head: int, xp: Any) -> dict[str, Any]:
    """Compute both passes of one key head: out, dq (heads, Sq, ·) and dk, dv (Sk, ·)."""
    k, v = (as_float64(x[entry, :, kv_head], xp) for x in (inputs.k, inputs.v))
    group = case.heads // case.kv_heads
    dk, dv = xp.zeros_like(k), xp.zeros_like(v)
    out = xp.empty((group, case.seqlen_q, case.head_dim_v))
    dq = xp.empty((group, case.seqlen_q, case.head_dim))
    for i in range(group):
        head = kv_head * group + i
        kept = _kept(case, inputs.options, head)
        q, dout = (as_float64(x[entry, :, head], xp) for x in (inputs.q, inputs.dout))
        for start in range(0, case.seqlen_q, CHUNK):
            rows = slice(start, min(start + CHUNK, case.seqlen_q))
            p, slope = _probabilities(case, inputs, q[rows], k, entry, head, rows, xp)
            drop = 1.0 if kept is None else xp.asarray(kept[rows]) / (1 - case.dropout)
            out[i, rows] = (p * drop) @ v
            dv += (p * drop).T @ dout[rows]
            dp = (dout[rows] @ v.T) * drop
            ds = p * (dp - (dout[rows] * out[i, rows]).sum(axis=1)[:, None]) * slope
            dq[i, rows] = ds @ k
            dk += ds.T @ q[rows]
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def _probabilities(
    case: Case, inputs: Inputs, q: Any, k: Any, entry: int, head: int, rows: slice, xp: Any
) -> tuple[Any, Any]:
    """Return P, before dropout, and the derivative of the scores by q @ k.T."""
    options = inputs.options
    slope: Any = case.head_dim**-0.5
    x = slope * (q @ k.T)
    if case.softcap:
        t = xp.tanh(x / case.softcap)
        x, slope = case.softcap * t, slope * (1 - t * t)
    position = xp.arange(rows.start, rows.stop)[:, None] + case.seqlen_kv - case.seqlen_q
    key = xp.arange(case.seqlen_kv)[None, :]
    if case.bias:
        x = x + as_float64(_of(options["bias"], entry, head)[rows], xp)
    if case.alibi:
        x = x - float(options["alibi_slopes"][head]) * xp.abs(position - key)
    left, right = case.window
    seen = xp.ones(x.shape, dtype=bool)
    if case.causal:
        seen &= key <= position
    if left >= 0:
        seen &= key >= position - left
    if right >= 0:
        seen &= key <= position + right
    if case.mask:
        seen &= _of(options["mask"], entry, head)[rows]
    x = xp.where(seen, x, -np.inf)
    most = x.max(axis=1, keepdims=True)
    sink = float(options["sinks"][head]) if case.sinks else -math.inf
    most = xp.maximum(most, sink)
    most = xp.where(xp.isfinite(most), most, 0.0)
    p = xp.exp(x - most)
    total = p.sum(axis=1, keepdims=True) + xp.exp(sink - most)
    p /= xp.where(total > 0, total, 1.0)
    return p, slope


def _of(x: Any, entry: int, head: int) -> Any:
    """Return the pairs of one head of a bias or mask, whose leading axes may be 1."""
    return x[entry if x.shape[0] > 1 else 0, head if x.shape[1] > 1 else 0]


def _kept(case: Case, options: dict[str, Any], head: int) -> np.ndarray | None:
    """Return which pairs of a head of the first batch entry dropout keeps."""
    if not case.dropout:
        return None
    from cuflash import reference

    sizes = (1, head + 1, case.seqlen_q, case.seqlen_kv)
    return reference.dropout_keep(options["seed"], case.dropout, *sizes)[0, head]


def errors(
    case: Case, direction: str, got: tuple[Any, ...], want: Expected, xp: Any = None
) -> dict[str, float]:
    """Return the largest error of each result; infinite where an element is not finite.

    `got` has the shapes of q, k and v: (batch, seqlen, heads, dim).
    """
    if xp is None:
        import cupy as xp
    group = case.heads // case.kv_heads
    found: dict[str, float] = {}
    for name, x in zip(NAMES[direction], got, strict=True):
        worst = 0.0 if bool(xp.isfinite(_floats(x, xp)).all()) else math.inf
        for (entry, kv_head), one in want.items():
            if name in ("dk", "dv"):
                pairs = [(x[entry, :, kv_head], one[name])]
            else:
                heads = range(group)
                pairs = [(x[entry, :, kv_head * group + i], one[name][i]) for i in heads]
            worst = max([worst, *(_error(as_float64(a, xp), b, xp) for a, b in pairs)])
        found[name] = worst
    return found


def _floats(x: Any, xp: Any) -> Any:
    return as_float64(x, xp).astype(xp.float32) if x.dtype.name == "bfloat16" else x


def _error(got: Any, want: Any, xp: Any) -> float:
    """Return the largest relative norm of the difference of a block of rows."""
    difference, size = (_sums(x, xp) for x in (got - want, want))
    ratio = xp.sqrt(difference / xp.where(size > 0, size, 1.0))
    worst = float(ratio.max())
    return worst if math.isfinite(worst) else math.inf


def _sums(x: Any, xp: Any) -> Any:
    """Return the sum of squares of each block of rows."""
    padded = xp.zeros(-(-len(x) // BLOCK) * BLOCK)
    padded[: len(x)] = (x**2).sum(axis=1)
    return padded.reshape(-1, BLOCK).sum(axis=1)


def wrong(found: dict[str, float], dtype: str, allowance: float = 1.0) -> list[str]:
    """Return the names of results whose error is too large."""
    return [name for name, error in found.items() if not error <= allowance * TOLERANCE[dtype]]
