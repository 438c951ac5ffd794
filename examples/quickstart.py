# SPDX-License-Identifier: Apache-2.0
"""cuflash in one page: attention, its gradients, how exact they are, and what memory they take.

Runs on the GPU if CuPy finds one, else on the CPU, where cuflash executes the same kernels::

    python examples/quickstart.py
"""

import numpy as np

import cuflash
import cuflash.reference

try:
    import cupy as xp

    if not xp.is_available():
        raise ImportError("CuPy finds no GPU")
except ImportError:
    import numpy as xp


def random(rng, *shape, dtype=np.float32):
    return xp.asarray(rng.standard_normal(shape), dtype=dtype)


def error(array, expected):
    """Largest difference, relative to the largest expected number."""
    expected = xp.asarray(expected)  # float64
    return float(xp.abs(array - expected).max() / xp.abs(expected).max())


def exactness(rng):
    q = random(rng, 1, 200, 4, 64)  # (batch, Sq, query heads, D)
    k = random(rng, 1, 300, 2, 64)  # (batch, Sk, key heads, D): two query heads share one
    v = random(rng, 1, 300, 2, 64)
    dout = random(rng, 1, 200, 4, 64)  # gradient of some loss with respect to out

    out, vjp = cuflash.attention_vjp(q, k, v, causal=True)  # attention(...) if out is all you need
    dq, dk, dv = vjp(dout)

    expected = cuflash.reference.attention(q, k, v, causal=True)
    gradients = cuflash.reference.attention_backward(dout, q, k, v, causal=True)
    print(f"q {q.shape}, k and v {k.shape}, {q.dtype}, causal; against float64:")
    for name, array, truth in zip(
        ("out", "dq", "dk", "dv"), (out, dq, dk, dv), (expected, *gradients), strict=True
    ):
        print(f"  {name:4}largest relative error {error(array, truth):.1e}")


def naive(q, k, v):
    """Compute the textbook formula, with the whole (heads, Sq, Sk) matrix of scores."""
    q, k, v = (x.swapaxes(0, 1) for x in (q, k, v))  # (heads, S, D)
    scores = q @ k.swapaxes(1, 2) * q.shape[-1] ** -0.5
    scores = xp.where(xp.tri(*scores.shape[1:], dtype=bool), scores, xp.asarray(-np.inf, q.dtype))
    weights = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return (weights @ v).swapaxes(0, 1)


def pool_growth(function):
    """Bytes that a call takes from the GPU, its result included: measured with an empty pool."""
    pool = xp.cuda.MemoryPool()
    with xp.cuda.using_allocator(pool.malloc):
        function()
    return pool.total_bytes()


def memory(rng, length=8192, heads=4, dim=64):
    if xp is np:
        ours = length * heads * dim * 2  # the output
        theirs = length * heads * dim * 2 + 2 * heads * length**2 * 2  # output, scores, weights
        how = "computed, not measured"
    else:
        q, k, v = (random(rng, length, heads, dim, dtype=np.float16) for _ in range(3))
        ours = pool_growth(lambda: cuflash.attention(q, k, v, causal=True))
        theirs = pool_growth(lambda: naive(q, k, v))
        how = "measured"
    print(f"memory for {heads} heads of {length} queries and keys, float16, {how}:")
    print(f"  cuflash       {ours / 2**20:8.1f} MiB")
    print(f"  naive formula {theirs / 2**20:8.1f} MiB")


if __name__ == "__main__":
    print("CPU (the kernels are emulated)" if xp is np else "GPU")
    rng = np.random.default_rng(0)
    exactness(rng)
    memory(rng)
