# SPDX-License-Identifier: Apache-2.0
"""A million tokens: both passes over 1 048 576 queries and keys, causal, without and with a window.

The matrix of scores would have 10^12 numbers for each head. Memory beyond inputs and results is
measured at a quarter, a half and the whole of the length, and rows of the results are compared
with float64. It needs a GPU with some 30 GB of memory; without one the kernels run on the CPU, and
the length is 512::

    python examples/long_sequence.py [--length N] [--window N] [--heads N] [--key-heads N]
"""

import argparse
import time

import ml_dtypes
import numpy as np

import cuflash

try:
    import cupy as xp

    if not xp.is_available():
        raise ImportError("CuPy finds no GPU")
except ImportError:
    import numpy as xp

DIM, SCALE = 128, 128**-0.5
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
BLOCK = 1 << 16  # keys or queries that exist in float64 at a time


def random(length, heads):
    """Draw normal numbers in bfloat16, which is the upper half of a float32."""
    draw = xp.random.standard_normal
    x = draw((length, heads, DIM)) if xp is np else draw((length, heads, DIM), dtype=np.float32)
    bits = x.astype(np.float32, copy=False).view(np.uint32)
    return (bits >> 16).astype(np.uint16).view(BFLOAT16)


def widen(x):
    """Return bfloat16 numbers as float64."""
    return (x.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def seconds_of(function):
    """Return a result, and how long it took until it was there."""
    begin = time.perf_counter()
    result = function()
    if xp is not np:
        xp.cuda.Device().synchronize()
    return result, time.perf_counter() - begin


def both_passes(arrays, options):
    """Run the call; return its results with the seconds of each pass."""
    q, k, v, dout = arrays
    (out, lse), forward = seconds_of(
        lambda: cuflash.attention(q, k, v, causal=True, return_lse=True, **options)
    )
    grads, backward = seconds_of(
        lambda: cuflash.attention_backward(dout, q, k, v, out, lse, causal=True, **options)
    )
    return (out, lse, grads.dq, grads.dk, grads.dv), forward, backward


def pairs(length, window):
    """Return how many keys the queries see, added up."""
    if window is None:
        return length * (length + 1) // 2
    seen = min(window, length)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def measure(arrays, window):
    """Print time and memory of one length, and return the results."""
    length, heads = arrays[0].shape[:2]
    options = {} if window is None else {"window": (window - 1, 0)}
    memory = "measured on a GPU only"
    if xp is np:
        results, forward, backward = both_passes(arrays, options)
    else:
        pool = xp.cuda.MemoryPool()
        with xp.cuda.using_allocator(pool.malloc):
            results, forward, backward = both_passes(arrays, options)
        beyond = pool.total_bytes() - sum(x.nbytes for x in results)
        memory = f"{beyond / 2**20:.1f} MiB"
    flop = 4 * heads * pairs(length, window) * DIM
    print(f"  length {length}:")
    print(f"    forward  {forward:8.3f} s, {flop / forward / 1e12:.3g} TFLOP/s")
    print(f"    backward {backward:8.3f} s, {2.5 * flop / backward / 1e12:.3g} TFLOP/s")
    print(f"    memory beyond inputs and results: {memory}")
    return results


def blocks(begin, end):
    """Cut positions into blocks."""
    return [slice(at, min(at + BLOCK, end)) for at in range(begin, end, BLOCK)]


def expected_row(arrays, row, head, window):
    """Return lse, out and dq of one query in float64."""
    q, k, v, dout = arrays
    key_head = head // (q.shape[1] // k.shape[1])
    first = 0 if window is None else max(0, row + 1 - window)
    keys = blocks(first, row + 1)
    query, done = widen(q[row, head]), widen(dout[row, head])
    s = xp.concatenate([SCALE * (widen(k[block, key_head]) @ query) for block in keys])
    dp = xp.concatenate([widen(v[block, key_head]) @ done for block in keys])
    lse = s.max() + xp.log(xp.exp(s - s.max()).sum())
    p = xp.exp(s - lse)
    ds = SCALE * p * (dp - p @ dp)
    out, dq = xp.zeros(DIM), xp.zeros(DIM)
    for block in keys:
        at = slice(block.start - first, block.stop - first)
        out += p[at] @ widen(v[block, key_head])
        dq += ds[at] @ widen(k[block, key_head])
    return float(lse), out, dq


def expected_key(arrays, out, lse, key, key_head, window):
    """Return dk and dv of one key in float64.

    That takes lse and out of all queries that see the key. They are those of the forward pass: to
    compute them in float64 would be all of its work again.
    """
    q, k, v, dout = arrays
    group = q.shape[1] // k.shape[1]
    last = len(q) if window is None else min(len(q), key + window)
    one, value = widen(k[key, key_head]), widen(v[key, key_head])
    dk, dv = xp.zeros(DIM), xp.zeros(DIM)
    for head in range(key_head * group, (key_head + 1) * group):
        for rows in blocks(key, last):
            queries, douts = widen(q[rows, head]), widen(dout[rows, head])
            p = xp.exp(SCALE * (queries @ one) - lse[head, rows].astype(np.float64))
            delta = (douts * widen(out[rows, head])).sum(axis=1)
            dv += p @ douts
            dk += SCALE * ((p * (douts @ value - delta)) @ queries)
    return dk, dv


def error(x, expected):
    """Largest difference, relative to the largest expected number."""
    return float(xp.abs(widen(x) - expected).max() / xp.abs(expected).max())


def check(arrays, results, window):
    """Compare some rows with float64."""
    out, lse, dq, dk, dv = results
    length, heads = out.shape[:2]
    places = sorted({1, length // 3, length // 2 + 1, length - 2, length - 1})
    worst = dict.fromkeys(("out", "lse", "dq", "dk", "dv"), 0.0)
    for head in (0, heads - 1):
        for row in places:
            right = expected_row(arrays, row, head, window)
            found = {
                "lse": abs(float(lse[head, row]) - right[0]),
                "out": error(out[row, head], right[1]),
                "dq": error(dq[row, head], right[2]),
            }
            worst |= {name: max(worst[name], x) for name, x in found.items()}
    for key_head in (0, dk.shape[1] - 1):
        for key in places:
            right = expected_key(arrays, out, lse, key, key_head, window)
            found = {"dk": error(dk[key, key_head], right[0])}
            found["dv"] = error(dv[key, key_head], right[1])
            worst |= {name: max(worst[name], x) for name, x in found.items()}
    print(f"  rows {', '.join(map(str, places))} against float64:")
    for name, x in worst.items():
        print(f"    {name:4}largest {'error' if name == 'lse' else 'relative error'} {x:.1e}")


def parse():
    """Read the arguments; without a GPU the defaults are small."""
    cpu = xp is np
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--length", type=int, default=512 if cpu else 1 << 20)
    parser.add_argument("--window", type=int, default=100 if cpu else 4096)
    parser.add_argument("--heads", type=int, default=2 if cpu else 8)
    parser.add_argument("--key-heads", type=int, default=1 if cpu else 2)
    return parser.parse_args()


if __name__ == "__main__":
    given = parse()
    print("CPU (the kernels are emulated)" if xp is np else "GPU")
    xp.random.seed(0)
    heads = (given.heads, given.key_heads, given.key_heads, given.heads)  # of q, k, v, dout
    whole = [random(given.length, h) for h in heads]
    for window in (None, given.window):
        short = [x[: min(1024, given.length // 4)] for x in whole]
        both_passes(short, {} if window is None else {"window": (window - 1, 0)})  # compiles
        words = "causal" if window is None else f"causal, window of {window} keys"
        print(f"{words}, {given.heads} heads, {given.key_heads} key heads, bfloat16, D {DIM}:")
        results = None
        for part in (4, 2, 1):
            results = None  # gives the memory of the last ones back
            arrays = [x[: given.length // part] for x in whole]
            results = measure(arrays, window)
        check(whole, results, window)
