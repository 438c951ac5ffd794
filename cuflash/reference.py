# SPDX-License-Identifier: Apache-2.0
r"""Attention in float64 NumPy, forward and backward: what the kernels are tested against.

Written for the reader, not for speed: the whole score matrix is built. Per query row :math:`i`,
with sums over the keys :math:`j` that the row sees and with nothing taken from the others:

.. math::

    x_{ij} &= \mathrm{scale} \; q_i \cdot k_j &
    P_{ij} &= e^{x_{ij} - m_i} / \ell_i, \quad m_i = \max_j x_{ij},
              \quad \ell_i = \sum_j e^{x_{ij} - m_i} \\
    o_i &= \sum_j P_{ij} v_j &
    \mathrm{lse}_i &= m_i + \log \ell_i \\
    dP_{ij} &= do_i \cdot v_j &
    dx_{ij} &= P_{ij} (dP_{ij} - \delta_i + d\mathrm{lse}_i), \quad \delta_i = do_i \cdot o_i \\
    dq_i &= \mathrm{scale} \sum_j dx_{ij} k_j &
    dk_j &= \mathrm{scale} \sum_i dx_{ij} q_i, \quad dv_j = \sum_i P_{ij} \, do_i

References
----------
.. [1] M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018,
   arXiv:1805.02867: the softmax with its maximum taken out.
.. [2] T. Dao, D. Y. Fu, S. Ermon, A. Rudra, C. Ré, "FlashAttention: Fast and Memory-Efficient Exact
   Attention with IO-Awareness", 2022, arXiv:2205.14135: the gradients with :math:`\delta`.
.. [3] T. Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning",
   2023, arXiv:2307.08691: one log-sum-exp per row in place of maximum and sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .gradients import Gradients

__all__ = ["attention", "attention_backward"]


@np.errstate(all="ignore")  # NaN and Inf in the inputs are part of the definition
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    layout: str = "bshd",
    return_lse: bool = False,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
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
    layout : {"bshd", "bhsd"}
        With "bhsd" the axes are (batch, heads, seq, dim), or (heads, seq, dim).
    return_lse : bool
        Also return the log-sum-exp of the scores of each row.

    Returns
    -------
    out : float64 array, shape (batch, Sq, Hq, Dv) or (Sq, Hq, Dv), in the given layout
        A row that sees no key is 0.
    lse : float64 array, shape (batch, Hq, Sq) or (Hq, Sq), only with ``return_lse``
        Natural logarithm; -inf for a row that sees no key.

    Notes
    -----
    NaN and Inf reach exactly the rows that see them. A visible score of -inf has weight 0; a row
    with no other score has out 0 and lse -inf, as if it saw nothing.
    """
    batched = q.ndim == 4
    q, k, v = _heads_first(layout, q, k, v)
    p, lse, visible, _ = _softmax(q, _per_query_head(k, q), scale, causal, window)
    out = _as_given(layout, batched, _sum_visible(p, _per_query_head(v, q), visible))
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
    layout: str = "bshd",
) -> Gradients:
    """Compute the gradients of ``sum(out * dout) + sum(lse * dlse)`` in float64.

    Parameters
    ----------
    dout : array, shape (batch, Sq, Hq, Dv) or (Sq, Hq, Dv)
        Gradient of the loss with respect to ``out``.
    dlse : array, shape (batch, Hq, Sq) or (Hq, Sq), optional
        Gradient with respect to ``lse``; 0 by default.
    q, k, v, scale, causal, window, layout
        As for :func:`attention`.

    Returns
    -------
    Gradients
        ``dq``, ``dk``, ``dv`` in float64, each with the shape of its argument. Gradients of queries
        that see no key and of keys that no query sees are 0.
    """
    batched, kv_heads = q.ndim == 4, k.shape[-2 if layout == "bshd" else -3]
    q, k, v, dout = _heads_first(layout, q, k, v, dout)
    k, v = _per_query_head(k, q), _per_query_head(v, q)
    p, lse, visible, scale = _softmax(q, k, scale, causal, window)
    dlse = np.zeros_like(lse) if dlse is None else _float64(dlse if batched else dlse[None])
    if dlse.shape != lse.shape:
        raise ValueError(f"dlse: expected shape {lse.shape[not batched :]}, got another")

    delta = (dout * _sum_visible(p, v, visible)).sum(axis=-1)
    dp = dout @ v.mT
    dx = np.where(visible, p * (dp - delta[..., None] + dlse[..., None]), 0.0)
    dq = _sum_visible(scale * dx, k, visible)
    dk = _sum_visible(scale * dx.mT, q, visible.mT)
    dv = _sum_visible(p.mT, dout, visible.mT)
    dk, dv = _per_key_head(dk, kv_heads), _per_key_head(dv, kv_heads)
    return Gradients(*(_as_given(layout, batched, x) for x in (dq, dk, dv)))


def _visible(sq: int, sk: int, causal: bool, window: tuple[int, int]) -> np.ndarray:
    """Which query (row) sees which key (column)."""
    left, right = window
    p, j = np.arange(sq)[:, None] + sk - sq, np.arange(sk)
    visible = np.ones((sq, sk), bool)
    visible &= (j <= p) | (not causal)
    visible &= (j >= p - left) | (left < 0)
    visible &= (j <= p + right) | (right < 0)
    return visible


def _softmax(
    q: np.ndarray, k: np.ndarray, scale: float | None, causal: bool, window: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Probabilities (batch, Hq, Sq, Sk), lse (batch, Hq, Sq), who sees whom, and the scale."""
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    x = factor * (q @ k.mT)
    visible = np.broadcast_to(_visible(q.shape[-2], k.shape[-2], causal, window), x.shape)
    # By selection, not by adding -inf: a hidden score may be NaN.
    x = np.where(visible, x, -np.inf)
    m = x.max(axis=-1, keepdims=True, initial=-np.inf)
    m = np.where(np.isfinite(m), m, 0.0)
    e = np.exp(x - m)
    total = e.sum(axis=-1, keepdims=True)
    p = np.where(visible & (total != 0), e / total, 0.0)
    return p, (m + np.log(total))[..., 0], visible, factor


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


def _float64(x: Any) -> np.ndarray:
    """Return a host array of float64; a longdouble stays one, and so does all that follows."""
    x = np.asarray(x.get() if hasattr(x, "get") else x)
    return x if x.dtype == np.longdouble else x.astype(np.float64)


def _heads_first(layout: str, *arrays: Any) -> list[np.ndarray]:
    """q, k, v[, dout] as float64 (batch, heads, seq, dim), if their shapes fit together."""
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f"layout: expected 'bshd' or 'bhsd', got {layout!r}")
    if {x.ndim for x in arrays} not in ({3}, {4}):
        raise ValueError(f"expected 3 axes each or 4 axes each, got {[x.ndim for x in arrays]}")
    xs = [_float64(x) if x.ndim == 4 else _float64(x)[None] for x in arrays]
    xs = [x.swapaxes(1, 2) for x in xs] if layout == "bshd" else xs
    (batch, hq, sq, d), (_, hkv, sk, _), (*_, dv) = (x.shape for x in xs[:3])
    want = [(batch, hq, sq, d), (batch, hkv, sk, d), (batch, hkv, sk, dv), (batch, hq, sq, dv)]
    if [x.shape for x in xs] != want[: len(xs)] or hq != hq // max(hkv, 1) * hkv:
        raise ValueError(f"shapes do not fit together: {[x.shape for x in arrays]}")
    return xs


def _as_given(layout: str, batched: bool, x: np.ndarray) -> np.ndarray:
    """Undo ``_heads_first`` for a result."""
    x = x.swapaxes(1, 2) if layout == "bshd" else x
    return x if batched else x[0]
