# SPDX-License-Identifier: Apache-2.0
"""The naive formula, as it is usually written: what attention costs without cuflash.

Arrays are (batch, heads, seqlen, dim) and contiguous, CuPy's or NumPy's. Elementwise steps work in
place, so that a score matrix is stored once and not seven times.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

__all__ = ["backward", "causal_mask", "forward"]


def _library(x: Any) -> Any:
    return np if isinstance(x, np.ndarray) else sys.modules["cupy"]


def causal_mask(seqlen_q: int, seqlen_kv: int, like: Any) -> Any:
    """Return what is added to the scores: -inf above the diagonal, which ends bottom right."""
    xp = _library(like)
    hidden = xp.full((seqlen_q, seqlen_kv), -np.inf, dtype=like.dtype)
    return xp.triu(hidden, k=1 + seqlen_kv - seqlen_q)


def forward(q: Any, k: Any, v: Any, mask: Any = None) -> tuple[Any, Any]:
    """Return out and P, which the backward needs."""
    xp = _library(q)
    s = q @ k.swapaxes(-1, -2)
    s *= q.shape[-1] ** -0.5
    if mask is not None:
        s += mask
    s -= s.max(axis=-1, keepdims=True)
    xp.exp(s, out=s)
    s /= s.sum(axis=-1, keepdims=True)
    return s @ v, s


def backward(dout: Any, q: Any, k: Any, v: Any, p: Any) -> tuple[Any, Any, Any]:
    """Return dq, dk and dv from the saved P; hidden pairs have P = 0 and need no mask."""
    dv = p.swapaxes(-1, -2) @ dout
    ds = dout @ v.swapaxes(-1, -2)
    ds -= (ds * p).sum(axis=-1, keepdims=True)
    ds *= p
    ds *= q.shape[-1] ** -0.5
    return ds @ k, ds.swapaxes(-1, -2) @ q, dv
