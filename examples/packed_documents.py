# SPDX-License-Identifier: Apache-2.0
"""Documents of different lengths, packed one behind the other, in one call without padding.

Compares the packed call with a loop over the documents and with a padded batch, forward and
backward, then draws a next token for each document. Runs on the GPU if CuPy finds one, else on the
CPU, where cuflash executes the same kernels::

    python examples/packed_documents.py
"""

import itertools

import numpy as np

import cuflash

try:
    import cupy as xp

    if not xp.is_available():
        raise ImportError("CuPy finds no GPU")
except ImportError:
    import numpy as xp

LENGTHS = (37, 150, 5, 64, 1, 90)
HEADS, KEY_HEADS, DIM, VOCABULARY = 4, 2, 32, 1000


def packed(dout, q, k, v, cu):
    """One call for all documents; `cu` says where each begins: [0, 37, 187, ...]."""
    # `cu` may lie on the host, where it is checked, or on the GPU, where the host never reads it.
    out, lse = cuflash.attention_varlen(q, k, v, cu, cu, causal=True, return_lse=True)
    grads = cuflash.attention_varlen_backward(dout, q, k, v, out, lse, cu, cu, causal=True)
    return out, *grads


def loop(dout, q, k, v, cu):
    """One call for each document: many small launches."""
    results = []
    for begin, end in itertools.pairwise(cu.tolist()):
        one = slice(begin, end)
        out, vjp = cuflash.attention_vjp(q[one], k[one], v[one], causal=True)
        results.append((out, *vjp(dout[one])))
    return tuple(xp.concatenate(parts) for parts in zip(*results, strict=True))


def padded(dout, q, k, v, cu):
    """One batch, in which each document is as long as the longest."""
    lengths = np.diff(cu)
    # Row and column of each token in the batch. Padding comes last, so causal order hides it.
    row = np.repeat(np.arange(len(lengths)), lengths)
    where = xp.asarray(row), xp.asarray(np.arange(cu[-1]) - cu[row])
    batches = []
    for x in (dout, q, k, v):
        batch = xp.zeros((len(lengths), int(lengths.max()), *x.shape[1:]), x.dtype)
        batch[where] = x
        batches.append(batch)
    dout, q, k, v = batches
    out, vjp = cuflash.attention_vjp(q, k, v, causal=True)
    return tuple(x[where] for x in (out, *vjp(dout)))


def compare(arrays, cu):
    lengths = np.diff(cu)
    total, slots = int(lengths.sum()), len(lengths) * int(lengths.max())
    print(f"{len(lengths)} documents, {total} tokens; a padded batch has {slots} rows:")
    print(f"  {1 - total / slots:.0%} of them are padding")
    ours = packed(*arrays, cu)
    for name, function in (("loop", loop), ("padded", padded)):
        for label, x, y in zip(("out", "dq", "dk", "dv"), ours, function(*arrays, cu), strict=True):
            difference = float(xp.abs(x - y).max() / xp.abs(y).max())
            print(f"  packed and {name:6} {label:3} differ by at most {difference:.1e}")
    return ours[0]


def sample(rng, out, cu):
    """Draw a next token for each document, from the output at its last token."""
    last = out[xp.asarray(cu[1:] - 1)].reshape(len(cu) - 1, -1)  # (documents, HEADS * DIM)
    logits = last @ random(rng, HEADS * DIM, VOCABULARY)
    noise = -np.log(rng.exponential(size=logits.shape))  # Gumbel: the maximum is a fair draw
    return (logits + xp.asarray(noise)).argmax(axis=1)


def random(rng, *shape):
    return xp.asarray(rng.standard_normal(shape), dtype=np.float32)


if __name__ == "__main__":
    print("CPU (the kernels are emulated)" if xp is np else "GPU")
    rng = np.random.default_rng(0)
    cu = np.concatenate([[0], np.cumsum(LENGTHS)])  # (documents + 1,)
    heads = (HEADS, HEADS, KEY_HEADS, KEY_HEADS)  # of dout, q, k, v
    out = compare([random(rng, cu[-1], h, DIM) for h in heads], cu)
    print("next tokens:", *sample(rng, out, cu).tolist())
