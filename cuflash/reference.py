# SPDX-License-Identifier: Apache-2.0
r"""Attention in float64 NumPy, forward and backward: what the kernels are tested against.

Written for the reader, not for speed: the whole score matrix is built. The softmax is that of [1]_,
the gradients are those of [2]_, one log-sum-exp per row is from [3]_ and the slopes are from [4]_.
Per query row :math:`i`, with sums over the keys :math:`j` that the row sees and with nothing taken
from the others:

.. math::

    y_{ij} &= \mathrm{scale} \; q_i \cdot k_j &
    x_{ij} &= c \tanh(y_{ij} / c) + \mathrm{bias}_{ij} - \mathrm{slope} \, |p_i - j|,
              \quad p_i = i + S_k - S_q \\
    P_{ij} &= e^{x_{ij} - m_i} / \ell_i &
    m_i &= \max(\max_j x_{ij}, \mathrm{sink}),
              \quad \ell_i = \sum_j e^{x_{ij} - m_i} + e^{\mathrm{sink} - m_i} \\
    o_i &= \sum_j P_{ij} D_{ij} v_j &
    \mathrm{lse}_i &= m_i + \log \ell_i \\
    dP_{ij} &= D_{ij} \; do_i \cdot v_j &
    dx_{ij} &= P_{ij} (dP_{ij} - \delta_i + d\mathrm{lse}_i), \quad \delta_i = do_i \cdot o_i \\
    dy_{ij} &= dx_{ij} (1 - \tanh^2(y_{ij} / c)) &
    d\mathrm{sink} &= \sum_i e^{\mathrm{sink} - \mathrm{lse}_i} (d\mathrm{lse}_i - \delta_i) \\
    dq_i &= \mathrm{scale} \sum_j dy_{ij} k_j &
    dk_j &= \mathrm{scale} \sum_i dy_{ij} q_i, \quad dv_j = \sum_i P_{ij} D_{ij} \, do_i

Without the options :math:`x = y`, the sink is :math:`-\infty` and :math:`D` is 1; with dropout
:math:`D` is 0 or :math:`1 / (1 - p)`.

References
----------
.. [1] M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018,
   arXiv:1805.02867: the softmax with its maximum taken out.
.. [2] T. Dao, D. Y. Fu, S. Ermon, A. Rudra, C. Ré, "FlashAttention: Fast and Memory-Efficient Exact
   Attention with IO-Awareness", 2022, arXiv:2205.14135: the gradients with :math:`\delta`.
.. [3] T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning",
   2023, arXiv:2307.08691: one log-sum-exp per row in place of maximum and sum.
.. [4] O. Press, N. A. Smith, M. Lewis, "Train Short, Test Long: Attention with Linear Biases
   Enables Input Length Extrapolation", 2021, arXiv:2108.12409: the slopes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .dropout import dropout_keep, kept
from .gradients import Gradients
from .reference_arguments import (
    Options,
    as_given,
    entries,
    float64,
    heads_first,
    of_entry,
    read_dlse,
)

__all__ = [
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "dropout_keep",
    "merge_states",
]


@np.errstate(all="ignore")  # NaN and Inf in the inputs are part of the definition
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    layout: str = "bshd",
    return_lse: bool = False,
) -> Any:
    """Compute exact attention in float64.

    Parameters
    ----------
    q : array, shape (batch, Sq, Hq, D) or (Sq, Hq, D)
        Queries; NumPy or CuPy, any real dtype, here and below. With ``numpy.longdouble`` arrays the
        whole computation is in that precision.
    k : array, shape (batch, Sk, Hkv, D) or (Sk, Hkv, D)
        Keys. Hq is a multiple of Hkv; query head h reads key head ``h // (Hq // Hkv)``.
    v : array, shape (batch, Sk, Hkv, Dv) or (Sk, Hkv, Dv)
        Values.
    scale : float, optional
        Factor of the scores; 1/sqrt(D) by default.
    causal : bool
        Query i, which stands at position p = i + Sk - Sq, sees only keys j <= p.
    window : (int, int)
        Query i sees only keys with p - left <= j <= p + right; -1 leaves a side open.
    softcap : float
        If positive, the scaled score y becomes ``softcap * tanh(y / softcap)``.
    bias : array, shape (Sq, Sk) or (batch, Hq, Sq, Sk), optional
        Is added to the capped score; -inf hides a pair. The axes are these in both layouts, each
        may be 1, and the first is 1 for arrays without a batch axis.
    mask : bool array, shaped like a bias, optional
        Query i sees only keys where this is True.
    alibi_slopes : array, shape (Hq,) or (batch, Hq), optional
        ``slope * abs(p - j)`` is subtracted from the score.
    sinks : array, shape (Hq,), optional
        One more score for each row of a head, whose key has the value 0.
    dropout_p : float
        Probability, from 0 to 1, with which a weight becomes 0; the others are divided by
        ``1 - dropout_p``. See :func:`dropout_keep` for which.
    seed : int or array of one int64, optional
        Seed of the dropout, modulo 2**64; needed with a ``dropout_p`` that is not 0.
    layout : {"bshd", "bhsd"}
        With "bhsd" the axes are (batch, heads, seq, dim), or (heads, seq, dim).
    return_lse : bool
        Also return the log-sum-exp of the scores of each row.

    Returns
    -------
    out : float64 array, shape (batch, Sq, Hq, Dv) or (Sq, Hq, Dv), in the given layout
        A row that sees no key is 0.
    lse : float64 array, shape (batch, Hq, Sq) or (Hq, Sq), only with ``return_lse``
        Natural logarithm, sinks included and dropout not; for a row that sees no key the sink, or
        -inf.

    Notes
    -----
    NaN and Inf reach exactly the rows that see them; dropout hides nothing. A visible score of -inf
    has weight 0; a row with no other score has out 0 and lse -inf, as if it saw nothing.
    """
    options = Options(
        scale, causal, window, softcap, bias, mask, alibi_slopes, sinks, dropout_p, seed
    )
    batched = np.ndim(q) == 4
    q, k, v = heads_first(layout, q, k, v)
    options.check_shapes(*q.shape[:2])
    out, lse = _forward(q, k, v, options)
    out = as_given(layout, batched, out)
    return (out, lse if batched else lse[0]) if return_lse else out


@np.errstate(all="ignore")
def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    *,
    dlse: Any = None,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    layout: str = "bshd",
) -> Gradients:
    """Compute the gradients of ``sum(out * dout) + sum(lse * dlse)`` in float64.

    Parameters
    ----------
    dout : array, shape (batch, Sq, Hq, Dv) or (Sq, Hq, Dv)
        Gradient of the loss with respect to ``out``.
    dlse : array, shape (batch, Hq, Sq) or (Hq, Sq), optional
        Gradient with respect to ``lse``; 0 by default.
    q, k, v, scale, causal, window, softcap, bias, mask, alibi_slopes, sinks, dropout_p, seed
        As for :func:`attention`, and so is ``layout``.

    Returns
    -------
    Gradients
        In float64, each with the shape of its argument. Gradients of queries that see no key and of
        keys and pairs that no query sees are 0.
    """
    options = Options(
        scale, causal, window, softcap, bias, mask, alibi_slopes, sinks, dropout_p, seed
    )
    batched = np.ndim(q) == 4
    q, k, v, dout = heads_first(layout, q, k, v, dout)
    options.check_shapes(*q.shape[:2])
    grads = _backward(dout, q, k, v, read_dlse(dlse, batched, q), options)
    dq, dk, dv = (as_given(layout, batched, x) for x in grads)
    return replace(grads, dq=dq, dk=dk, dv=dv)


@np.errstate(all="ignore")
def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    layout: str = "bshd",
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Compute exact attention of sequences packed one after another, in float64.

    Entry b of the batch is ``q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]]`` with the keys and values
    ``cu_seqlens_k[b]`` to ``cu_seqlens_k[b + 1]``.

    Parameters
    ----------
    q, k, v : array, shape (total, heads, dim), or (heads, total, dim) with layout "bhsd"
        As for :func:`attention`. Rows before the first offset and after the last belong to no
        entry, and what they hold does not matter.
    cu_seqlens_q, cu_seqlens_k : int array, shape (batch + 1,)
        Offsets, which do not decrease.
    layout : {"bshd", "bhsd"}
        Order of the axes.
    return_lse : bool
        Also return the log-sum-exp of each row.
    **options
        ``scale`` to ``seed`` of :func:`attention`. Positions count from the start of an entry. Of a
        ``bias`` or ``mask`` an entry uses the first of its queries and of its keys, so those axes
        are 1 or at least as long as the longest entry.

    Returns
    -------
    out : float64 array, shape (total_q, Hq, Dv), in the given layout
        Rows of no entry are 0.
    lse : float64 array, shape (Hq, total_q), only with ``return_lse``
        Rows of no entry are -inf, with sinks too.
    """
    q, k, v = heads_first(layout, q, k, v, packed=True)
    out = np.zeros((*q.shape[:-1], v.shape[-1]), np.result_type(q, k, v))
    lse = np.full(q.shape[:-1], -np.inf, out.dtype)
    for i, j, entry in entries(q, cu_seqlens_q, k, cu_seqlens_k, Options(**options)):
        out[:, :, i], lse[:, :, i] = _forward(q[:, :, i], k[:, :, j], v[:, :, j], entry)
    out = as_given(layout, False, out)
    return (out, lse[0]) if return_lse else out


@np.errstate(all="ignore")
def attention_varlen_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    dlse: Any = None,
    layout: str = "bshd",
    **options: Any,
) -> Gradients:
    """Compute the gradients of :func:`attention_varlen` in float64.

    Parameters
    ----------
    dout : array, shape (total_q, Hq, Dv), in the given layout
        Gradient of the loss with respect to ``out``.
    dlse : array, shape (Hq, total_q), optional
        Gradient with respect to ``lse``; 0 by default.
    q, k, v, cu_seqlens_q, cu_seqlens_k, layout, **options
        As for :func:`attention_varlen`.

    Returns
    -------
    Gradients
        In float64, each with the shape of its argument. What belongs to no entry has the gradient
        0.
    """
    q, k, v, dout = heads_first(layout, q, k, v, dout, packed=True)
    o, dlse = Options(**options), read_dlse(dlse, False, q)
    dq, dk, dv = (np.zeros(x.shape, np.result_type(q, k, v, dout)) for x in (q, k, v))
    dbias, dsinks = (None if x is None else np.zeros_like(x) for x in (o.bias, o.sinks))
    for i, j, entry in entries(q, cu_seqlens_q, k, cu_seqlens_k, o):
        grads = _backward(dout[:, :, i], q[:, :, i], k[:, :, j], v[:, :, j], dlse[:, :, i], entry)
        dq[:, :, i], dk[:, :, j], dv[:, :, j] = grads
        if dbias is not None:
            of_entry(dbias, entry.first, i, j)[...] += grads.dbias
        if dsinks is not None:
            dsinks += grads.dsinks
    dq, dk, dv = (as_given(layout, False, x) for x in (dq, dk, dv))
    return Gradients(dq, dk, dv, dbias, dsinks)


@np.errstate(all="ignore")
def merge_states(
    outs: Sequence[Any], lses: Sequence[Any], *, layout: str = "bshd"
) -> tuple[np.ndarray, np.ndarray]:
    """Merge results over disjoint sets of keys into the result over all of them.

    Parameters
    ----------
    outs : sequence of arrays, shape (batch, Sq, Hq, Dv) or (Sq, Hq, Dv), in the given layout
        One output for each set of keys.
    lses : sequence of arrays, shape (batch, Hq, Sq) or (Hq, Sq)
        Their log-sum-exp. Where it is -inf, or so far below another that its weight underflows to
        0, the output counts for nothing, whatever it holds.
    layout : {"bshd", "bhsd"}
        Order of the axes.

    Returns
    -------
    out, lse : float64 arrays, shaped like the parts
        ``sum(exp(lse_n - lse) * out_n)`` and ``log(sum(exp(lse_n)))``; 0 and -inf where no part saw
        a key.
    """
    if not outs or len(outs) != len(lses):
        raise ValueError(f"expected as many outs as lses, got {len(outs)} and {len(lses)}")
    x, lse = np.stack([float64(x) for x in outs]), np.stack([float64(x) for x in lses])
    x = x.swapaxes(-3, -2) if layout == "bshd" else x
    if x.shape[:-1] != lse.shape:
        raise ValueError(f"shapes do not fit together: {outs[0].shape} and {lses[0].shape}")
    m = lse.max(axis=0)
    m = np.where(np.isfinite(m), m, 0.0)
    e = np.exp(lse - m)
    total = e.sum(axis=0)
    weight = np.where(e == 0, 0.0, e / total)[..., None]  # 0 / 0 where no part saw a key
    out = np.where(weight == 0, 0.0, weight * x).sum(axis=0)
    return out.swapaxes(-3, -2) if layout == "bshd" else out, m + np.log(total)


class _Softmax(NamedTuple):
    """What both passes need of the scores; arrays of shape (batch, Hq, Sq, Sk), lse without Sk."""

    visible: np.ndarray  # who sees whom
    slope: Any  # derivative of the score by q_i . k_j
    p: np.ndarray  # probabilities, before dropout
    drop: Any  # what dropout multiplies them with
    lse: np.ndarray


def _softmax(q: np.ndarray, k: np.ndarray, options: Options) -> _Softmax:
    """Scores, with every option, and their softmax."""
    o, slope = options, float(q.shape[-1] ** -0.5 if options.scale is None else options.scale)
    x = slope * (q @ k.mT)
    visible = _visible(x.shape, o)
    if o.softcap:
        t = np.tanh(x / o.softcap)
        x, slope = o.softcap * t, np.where(visible, slope * (1 - t * t), 0.0)
    if o.bias is not None:
        x = x + np.broadcast_to(o.bias, x.shape)
    if o.alibi_slopes is not None:
        x = x - o.alibi_slopes[..., None, None] * _distance(*x.shape[-2:])
    # By selection, not by adding -inf: a hidden score may be NaN.
    x = np.where(visible, x, -np.inf)
    sink = -np.inf if o.sinks is None else o.sinks[:, None, None]
    m = np.maximum(x.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    m = np.where(np.isfinite(m), m, 0.0)
    e = np.exp(x - m)
    total = e.sum(axis=-1, keepdims=True) + np.exp(sink - m)
    p = np.where(visible & (total != 0), e / total, 0.0)
    return _Softmax(visible, slope, p, _drop(x.shape, o), (m + np.log(total))[..., 0])


def _forward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, options: Options
) -> tuple[np.ndarray, np.ndarray]:
    """Return out and lse, axes (batch, heads, seq, dim) here and in the next function."""
    s = _softmax(q, _per_query_head(k, q), options)
    return _sum_visible(s.p * s.drop, _per_query_head(v, q), s.visible), s.lse


def _backward(
    dout: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dlse: np.ndarray,
    options: Options,
) -> Gradients:
    kv_heads = k.shape[1]
    k, v = _per_query_head(k, q), _per_query_head(v, q)
    visible, slope, p, drop, lse = _softmax(q, k, options)
    weight = p * drop
    delta = (dout * _sum_visible(weight, v, visible)).sum(axis=-1)
    delta = np.where(visible.any(axis=-1), delta, 0.0)
    dp = dout @ v.mT * drop
    dx = np.where(visible, p * (dp - delta[..., None] + dlse[..., None]), 0.0)
    dy = slope * dx
    dq = _sum_visible(dy, k, visible)
    dk = _per_key_head(_sum_visible(dy.mT, q, visible.mT), kv_heads)
    dv = _per_key_head(_sum_visible(weight.mT, dout, visible.mT), kv_heads)
    dbias = None if options.bias is None else _sum_to(options.bias.shape, dx)
    dsinks = None
    if options.sinks is not None:
        dsinks = _sink_terms(options.sinks, lse, dlse - delta).sum(axis=(0, 2))
    return Gradients(dq, dk, dv, dbias, dsinks)


def _distance(sq: int, sk: int) -> np.ndarray:
    """Return how far each query's position is from each key."""
    return np.abs(np.arange(sq)[:, None] + sk - sq - np.arange(sk))


def _visible(shape: tuple[int, ...], options: Options) -> np.ndarray:
    """Which query (row) sees which key (column), for each batch entry and head."""
    (*_, sq, sk), (left, right) = shape, options.window
    p, j = np.arange(sq)[:, None] + sk - sq, np.arange(sk)
    visible = (j <= p) | (not options.causal)
    visible &= (j >= p - left) | (left < 0)
    visible &= (j <= p + right) | (right < 0)
    if options.mask is not None:
        visible = visible & np.broadcast_to(options.mask, shape)
    if options.bias is not None:
        visible = visible & np.broadcast_to(~np.isneginf(options.bias), shape)
    return np.broadcast_to(visible, shape)


def _drop(shape: tuple[int, ...], options: Options) -> Any:
    """Return what dropout multiplies probabilities of a shape with."""
    p, (batch, *rest) = options.dropout_p, shape
    if not p or options.seed is None:
        return 1.0
    keep = kept(options.seed, p, options.first + np.arange(batch), *rest)
    return keep / (1 - p) if p < 1 else 0.0


def _sum_visible(weight: np.ndarray, x: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """``y_i = sum_j weight_ij x_j`` over the visible pairs; hidden weights are 0."""
    finite: np.ndarray = np.all(np.isfinite(x), axis=-1)
    y = weight @ np.where(finite[..., None], x, 0.0)
    # 0 * NaN is NaN, so the rows of x that are not finite join one by one, and only where seen.
    for j in np.unique(np.nonzero(~finite)[-1]):
        seen = visible[..., j] & ~finite[..., j, None]
        y += np.where(seen[..., None], weight[..., j, None] * x[..., j, None, :], 0.0)
    return y


def _per_query_head(x: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Keys or values (batch, Hkv, Sk, dim) as each of the query heads reads them."""
    return np.repeat(x, q.shape[1] // max(x.shape[1], 1), axis=1)


def _per_key_head(x: np.ndarray, kv_heads: int) -> np.ndarray:
    """Sum gradients (batch, Hq, Sk, dim) over the query heads that read the same key head."""
    batch, heads, *rest = x.shape
    return x.reshape(batch, kv_heads, heads // max(kv_heads, 1), *rest).sum(axis=2)


def _sum_to(shape: tuple[int, ...], dx: np.ndarray) -> np.ndarray:
    """Sum over the axes along which an array of a shape was broadcast."""
    missing = dx.ndim - len(shape)
    ones = tuple(n for n, size in enumerate(shape, missing) if size == 1)
    return dx.sum(axis=(*range(missing), *ones), keepdims=True).reshape(shape)


def _sink_terms(sinks: np.ndarray, lse: np.ndarray, dlse: np.ndarray) -> np.ndarray:
    """Return what each row adds to the gradient of its sink, given ``dlse - delta``."""
    return np.where(np.isneginf(lse), 0.0, np.exp(sinks[:, None] - lse) * dlse)
