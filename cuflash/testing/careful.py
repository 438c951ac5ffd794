# SPDX-License-Identifier: Apache-2.0
"""A dense call computed twice: by the reference, and carefully in the precision of a kernel.

For float32 and float64 the order of a sum is what its error comes from, so there sums run in order,
one term after another, as in a kernel: BLAS sums in blocks and NumPy in pairs, which at 4000 keys
is 5 times more accurate than any loop over the keys. For 16-bit dtypes the roundings to the dtype
hide the order, and BLAS does it.

Which pairs count (masks, heads, NaN in hidden places) is the reference's own code here too: two
opinions on that would show as a large measured error, that is, as a bound that allows everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import reference
from .dense import Dense

__all__ = ["GRADIENTS", "SUMS", "accumulator", "careful", "finfo", "rounding_to", "truth"]

GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")
SUMS = ("dbias", "dsinks")

_HEADROOM = 8 * math.log(2)  # of scores above a reference that need not be the largest


def truth(call: Dense, backward: bool) -> dict[str, np.ndarray]:
    """Return the reference's results, those of `SUMS` term by term."""
    c, sinks = call, call.options.sinks
    out, lse = reference._forward(c.q, c.k, c.v, c.options)
    results = {"out": out, "lse": lse}
    if backward:
        assert c.dout is not None
        grads = reference._backward(c.dout, c.q, c.k, c.v, c.dlse, c.options)
        results |= {name: getattr(grads, name) for name in GRADIENTS}
        if sinks is not None:
            seen = reference._visible((*lse.shape, c.k.shape[2]), c.options).any(axis=-1)
            delta = np.where(seen, (c.dout * out).sum(axis=-1), 0)
            results["dsinks"] = reference._sink_terms(sinks, lse, c.dlse - delta)[..., None]
    return results


def careful(call: Dense, dtype: np.dtype, backward: bool) -> dict[str, np.ndarray]:
    """Return the results of the plain formula, rounded where a kernel of the dtype must round.

    Those of `SUMS` come term by term.
    """
    accum, rounded = accumulator(dtype), rounding_to(dtype)
    sum_visible = _sum_in_order if dtype.itemsize > 2 else reference._sum_visible
    o, zero = call.options, accum.type(0)
    q, k, v, dlse = (x.astype(accum) for x in (call.q, call.k, call.v, call.dlse))
    (batch, heads, sq, _), (_, kv_heads, sk, _) = q.shape, k.shape
    k, v = reference._per_query_head(k, q), reference._per_query_head(v, q)
    scale = accum.type(q.shape[-1] ** -0.5 if o.scale is None else o.scale)
    visible = reference._visible((batch, heads, sq, sk), o)
    everything = np.broadcast_to(True, (batch, heads, sq, max(q.shape[-1], v.shape[-1])))

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a @ b if dtype.itemsize == 2 else _sum_in_order(a, b, everything)

    x, slope = product(q, k.mT) * scale, accum.type(1)
    if o.softcap:
        t = np.tanh(x / accum.type(o.softcap))
        x, slope = accum.type(o.softcap) * t, 1 - t * t
    if o.bias is not None:
        x = x + o.bias.astype(accum)
    if o.alibi_slopes is not None:
        distance = reference._distance(sq, sk).astype(accum)
        x = x - o.alibi_slopes.astype(accum)[..., None, None] * distance
    x = np.where(visible, x, -np.inf)
    sink = accum.type(-np.inf) if o.sinks is None else o.sinks.astype(accum)[:, None, None]
    m = np.maximum(x.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    if dtype.itemsize == 2:  # a lazy softmax rounds relative to the sink or what came first
        early = np.partition(x, -2, axis=-1)[..., -2:-1] if sk > 1 else m  # the second largest
        early = np.where(np.isfinite(sink), sink, early)
        m = np.where(m - early < _HEADROOM, early, m)
    m = np.where(np.isfinite(m), m, zero)
    e = np.exp(x - m)
    total = sum_visible(e, np.ones_like(k[..., :1]), visible) + np.exp(sink - m)
    inverse = np.where(total == 0, zero, 1 / total)
    drop = np.asarray(reference._drop(x.shape, o)).astype(accum)
    out = rounded(sum_visible(rounded(e) * drop, v, visible) * inverse)
    lse = m + np.log(total)
    results = {"out": out, "lse": lse[..., 0]}

    if backward:
        assert call.dout is not None
        dout, seen = call.dout.astype(accum), np.asarray(total != 0)
        p = np.where(visible & seen, np.exp(x - np.where(seen, lse, 0)), zero)
        delta = np.where(
            visible.any(axis=-1, keepdims=True), np.cumsum(dout * out, -1)[..., -1:], zero
        )
        dp = product(dout, v.mT) * drop
        dx = np.where(visible, p * (dp - delta + dlse[..., None]), zero)
        ds = rounded(np.where(visible, dx * slope, zero))

        def by_key_head(x: np.ndarray) -> np.ndarray:
            # The query heads of a key head as one long sequence: its gradient is one sum.
            return x.reshape(batch, kv_heads, heads // max(kv_heads, 1) * sq, x.shape[-1])

        seen_by = by_key_head(visible).mT
        dk = sum_visible(by_key_head(ds).mT, by_key_head(q), seen_by)
        dv = sum_visible(by_key_head(rounded(p) * drop).mT, by_key_head(dout), seen_by)
        results["dq"] = rounded(sum_visible(ds, k, visible) * scale)
        results["dk"], results["dv"] = rounded(dk * scale), rounded(dv)
        results["dbias"] = dx
        if o.sinks is not None:
            terms = reference._sink_terms(o.sinks.astype(accum), lse[..., 0], dlse - delta[..., 0])
            results["dsinks"] = terms[..., None]
            # What rounding each element of out does to delta, if none of the errors cancel by luck.
            step = accum.type(float(finfo(dtype).eps) / 4) * np.abs(dout * out)
            weight = reference._sink_terms(
                o.sinks.astype(accum), lse[..., 0], np.sqrt((step**2).sum(axis=-1))
            )
            results["dsinks rounding"] = np.where(visible.any(-1), weight, zero)[..., None]
    return results


def _sum_in_order(weight: np.ndarray, x: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Return the sums of `reference._sum_visible`, one term after another."""
    y = np.zeros((*weight.shape[:-1], x.shape[-1]), weight.dtype)
    finite: Any = np.isfinite(x).all(axis=(0, 1, 3))
    for j in range(x.shape[-2]):
        term = weight[..., j, None] * x[..., j, None, :]
        y += term if finite[j] else np.where(visible[..., j, None], term, weight.dtype.type(0))
    return y


def rounding_to(dtype: np.dtype) -> Callable[[np.ndarray], np.ndarray]:
    """Accumulator -> the nearest one that ``dtype`` holds."""
    if dtype.itemsize >= 4:
        return lambda x: x
    return lambda x: x.astype(dtype).astype(np.float32)


def accumulator(dtype: np.dtype) -> np.dtype:
    """Return the dtype of sums."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def finfo(dtype: np.dtype) -> Any:
    """Return the limits of a floating-point dtype."""
    if dtype.name != "bfloat16":
        return np.finfo(dtype)
    import ml_dtypes  # whoever has such an array has it

    return ml_dtypes.finfo(dtype)
