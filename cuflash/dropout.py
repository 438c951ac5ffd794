# SPDX-License-Identifier: Apache-2.0
"""Which weights dropout keeps, in NumPy: what kernels/parts/dropout.cuh computes, bit for bit.

References
----------
.. [1] J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel Random Numbers: As Easy as 1,
   2, 3", SC 2011: Philox4x32-10.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["dropout_keep", "kept", "philox"]

_LOW = 2**32 - 1


def dropout_keep(
    seed: int, dropout_p: float, batch: int, heads: int, seqlen_q: int, seqlen_kv: int
) -> np.ndarray:
    """Which weights dropout keeps: a bool array of shape (batch, heads, seqlen_q, seqlen_kv).

    An element depends on ``seed``, ``dropout_p`` and its own indices, and on nothing else. Each row
    has two numbers from Philox4x32-10, and a hash makes of them and of j one number for each key j.
    """
    return kept(seed, dropout_p, np.arange(batch), heads, seqlen_q, seqlen_kv)


def kept(seed: int, p: float, entries: np.ndarray, heads: int, sq: int, sk: int) -> np.ndarray:
    """`dropout_keep` for the batch entries of these indices."""
    b, h, i = np.ix_(
        entries.astype(np.uint64), *(np.arange(n, dtype=np.uint64) for n in (heads, sq))
    )
    counter = np.broadcast_arrays(i, h, b & _LOW, b >> 32)
    seed = int(np.asarray(seed).item()) % 2**64
    a, b, *_ = philox(counter, (seed & _LOW, seed >> 32))
    x = a.astype(np.uint32)[..., None] + np.arange(sk, dtype=np.uint32) * np.uint32(0x9E3779B9)
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x ^= b.astype(np.uint32)[..., None]
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    x ^= x >> 16
    return x.astype(np.uint64) >= round(p * 2**32)


def philox(counter: Sequence[np.ndarray], key: tuple[int, int]) -> Sequence[np.ndarray]:
    """Philox4x32-10: four words of 32 bits, in uint64 arrays, from four others and a key."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        x, y = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (y >> 32) ^ c1 ^ k0, y & _LOW, (x >> 32) ^ c3 ^ k1, x & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3
