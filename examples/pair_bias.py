# SPDX-License-Identifier: Apache-2.0
"""Attention with a bias for each pair, and the bias's gradient, as protein-structure models use it.

A pair representation z of shape (N, N, C) says something about each pair of N residues. Each of its
rows attends within itself ("triangle attention around the starting node"): row i is an entry of the
batch, its N elements are queries and keys, and a projection of z is added to the scores of all
rows. That bias is learned, so it needs a gradient. Runs on the GPU if CuPy finds one, else on the
CPU, where cuflash executes the same kernels::

    python examples/pair_bias.py
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


def project(z, present, w):
    n, heads = len(z), w["bias"].shape[1]
    qkv = [(z @ w[name]).reshape(n, n, heads, -1) for name in ("q", "k", "v")]
    # One bias for all rows: bias[0, h, j, k] belongs to z[j, k]. A view will do.
    bias = (z @ w["bias"]).transpose(2, 0, 1)[None]  # (1, H, N, N)
    # mask[i, 0, 0, k]: row i exists and element k of it too. Rows that do not exist give 0.
    mask = (present[:, None] & present)[:, None, None]  # (N, 1, 1, N)
    return qkv, {"bias": bias, "mask": mask}


def triangle_attention(z, present, w):
    """Return the update of z, and the function that pulls its gradient back to z and w."""
    qkv, options = project(z, present, w)
    out, vjp = cuflash.attention_vjp(*qkv, **options)  # (N, N, H, D)
    gate = 1 / (1 + xp.exp(-(z @ w["gate"]).reshape(out.shape)))
    gated = (gate * out).reshape(*z.shape[:2], -1)

    def pull_back(dy):
        dgated = (dy @ w["out"].T).reshape(out.shape)
        grads = vjp(dgated * gate)
        d = {"q": grads.dq, "k": grads.dk, "v": grads.dv, "gate": dgated * out * gate * (1 - gate)}
        d["bias"] = grads.dbias[0].transpose(1, 2, 0)  # (1, H, N, N), summed over the rows
        d = {name: x.reshape(*z.shape[:2], -1) for name, x in d.items()}
        dz = sum(x @ w[name].T for name, x in d.items())
        dw = {name: xp.tensordot(z, x, ((0, 1), (0, 1))) for name, x in d.items()}
        return dz, dw | {"out": xp.tensordot(gated, dy, ((0, 1), (0, 1)))}

    return gated @ w["out"], pull_back


def weights(rng, channels, heads, dim, dtype=np.float32):
    shapes = dict.fromkeys(("q", "k", "v", "gate"), (channels, heads * dim))
    shapes |= {"bias": (channels, heads), "out": (heads * dim, channels)}
    return {name: random(rng, *s, dtype=dtype) / s[0] ** 0.5 for name, s in shapes.items()}


def random(rng, *shape, dtype=np.float32):
    return xp.asarray(rng.standard_normal(shape), dtype=dtype)


def exactness(rng, n=24, channels=32, heads=4, dim=16):
    z, w = random(rng, n, n, channels), weights(rng, channels, heads, dim)
    present = xp.arange(n) % 7 != 3  # some residues are missing
    y, pull_back = triangle_attention(z, present, w)
    dz, _ = pull_back(xp.ones_like(y))
    print(f"z {z.shape} -> update {y.shape}, gradient {dz.shape}")

    qkv, options = project(z, present, w)
    dout = random(rng, n, n, heads, dim)
    grads = cuflash.attention_vjp(*qkv, **options)[1](dout)
    expected = cuflash.reference.attention_backward(dout, *qkv, **options)
    print(f"q, k, v {qkv[0].shape}, bias {options['bias'].shape}; against float64:")
    for name in ("dq", "dk", "dv", "dbias"):
        array, truth = getattr(grads, name), xp.asarray(getattr(expected, name))
        error = float(xp.abs(array - truth).max() / xp.abs(truth).max())
        print(f"  {name:6}{array.shape!s:17} largest relative error {error:.1e}")


def naive(dout, q, k, v, bias):
    """Compute the gradients with (N, H, N, N) matrices."""
    dout, q, k, v = (x.swapaxes(1, 2) for x in (dout, q, k, v))
    p = q @ k.swapaxes(2, 3) * q.shape[-1] ** -0.5 + bias
    p = xp.exp(p - p.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    dp = dout @ v.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(axis=-1, keepdims=True))
    dq, dk = (x * q.shape[-1] ** -0.5 for x in (ds @ k, ds.swapaxes(2, 3) @ q))
    return p @ v, dq, dk, p.swapaxes(2, 3) @ dout, ds.sum(axis=0, keepdims=True)


def memory(rng, n=512, heads=4, dim=32):
    matrix, results = n * heads * n * n * 4, 4 * n * n * heads * dim * 4 + heads * n * n * 4
    if xp is np:
        ours = results + 4 * heads * n * n * 4  # lse, delta, and dbias in two parts
        theirs = results + 3 * matrix  # p, dp and ds
        how = "computed, not measured"
    else:
        q, k, v, dout = (random(rng, n, n, heads, dim) for _ in range(4))
        bias = random(rng, 1, heads, n, n)
        ours = pool_growth(lambda: cuflash.attention_vjp(q, k, v, bias=bias)[1](dout))
        theirs = pool_growth(lambda: naive(dout, q, k, v, bias))
        how = "measured"
    print(f"memory of both passes for N = {n}, {heads} heads of {dim}, float32, {how}:")
    print(f"  cuflash       {ours / 2**20:8.1f} MiB, of which results {results / 2**20:.1f}")
    print(f"  naive formula {theirs / 2**20:8.1f} MiB")


def pool_growth(function):
    """Bytes that a call takes from the GPU, its results included: measured with an empty pool."""
    pool = xp.cuda.MemoryPool()
    with xp.cuda.using_allocator(pool.malloc):
        function()
    return pool.total_bytes()


if __name__ == "__main__":
    print("CPU (the kernels are emulated)" if xp is np else "GPU")
    rng = np.random.default_rng(0)
    exactness(rng)
    memory(rng)
