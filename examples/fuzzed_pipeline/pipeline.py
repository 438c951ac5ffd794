# SPDX-License-Identifier: Apache-2.0
"""A program that uses cuflash: causal self-attention over a sequence that arrives in pieces.

Keys and values are kept in arrays of a fixed capacity, of which the front is filled. A piece may be
a prompt, one new token, or nothing. The arrays are NumPy or CuPy arrays, (seq, heads, dim) or
(batch, seq, heads, dim).
"""

from __future__ import annotations

from typing import Any

import numpy as np

import cuflash


class Decoder:
    """Keys and values of the tokens so far, and attention of new tokens to all of them."""

    def __init__(self, k: Any, v: Any, capacity: int, **options: Any) -> None:
        """Make room for so many tokens, of the kind of k and v; `options` are attention's."""
        self._length = 0
        self._keys, self._values = _room(k, capacity), _room(v, capacity)
        self._options = options

    def step(self, q: Any, k: Any, v: Any) -> Any:
        """Append the keys and values of new tokens; returns what their queries see."""
        new = slice(self._length, self._length + q.shape[-3])
        self._keys[..., new, :, :] = k
        self._values[..., new, :, :] = v
        self._length = new.stop
        keys = self._keys[..., : self._length, :, :]
        values = self._values[..., : self._length, :, :]
        return cuflash.attention(q, keys, values, causal=True, **self._options)


def _room(x: Any, capacity: int) -> Any:
    """Return an array like `x` for so many tokens, filled with NaN as if nobody had written it."""
    xp = np if isinstance(x, np.ndarray) else __import__("cupy")
    *batch, _, heads, dim = x.shape
    return xp.full((*batch, capacity, heads, dim), np.nan, x.dtype)
