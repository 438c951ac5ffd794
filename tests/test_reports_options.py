# SPDX-License-Identifier: Apache-2.0
"""Reported faults, as in test_reports.py, of the options and of packed sequences.

A report of which another part is tested in test_reports.py has a comment with the part's name.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from check import Inputs, assert_close, bounds, exact
from conftest import Backend
from reports import (
    call,
    changed,
    check,
    every_dtype,
    normal,
    packed,
    run,
    same,
    solve,
    to_host,
    turns,
    weights,
)
from run import on

import cuflash
from cuflash import launch


def accumulator(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def lowest(dtype: str) -> float:
    """Return the lowest finite number, which people write into a bias to hide a key."""
    return float(ml_dtypes.finfo(np.dtype(dtype)).min)


def coins(seed: int, shape: tuple[int, ...], p: float = 0.7) -> np.ndarray:
    """Return an array of bool that is True with a probability."""
    return np.random.default_rng(seed).random(shape) < p


def entries(inputs: Inputs) -> list[tuple[slice, slice]]:
    """Return the rows of q and those of k of each packed entry."""
    cu_q, cu_k = inputs.cu_seqlens
    pairs = zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True)
    return [(slice(a, b), slice(c, d)) for a, b, c, d in pairs]


# --- nothing to do, and rows that see no key -----------------------------------------------------


# A3: Dao-AILab/flash-attention#2421
@turns(
    "offsets",
    [
        ([0, 50, 50, 113], [0, 60, 133, 200]),
        ([0, 0, 50, 50], [0, 60, 133, 200]),
        ([0, 50, 70, 113], [0, 60, 60, 130]),
        ([0, 0, 40], [0, 0, 40]),
    ],
)
def test_an_entry_without_queries(
    backend: Backend, offsets: tuple[list[int], list[int]], dtype: str
) -> None:
    """dk and dv of its keys were whatever registers held; an entry without keys is like it."""
    inputs = packed(offsets, heads=(6, 2), dtype=dtype, causal=True)
    results = solve(backend, inputs)
    for i, j in entries(inputs):
        if i.start == i.stop:
            assert not results.dk[j].any() and not results.dv[j].any()
        if j.start == j.stop:
            assert not results.out[i].any() and not results.dq[i].any()
            assert (results.lse[:, i] == -np.inf).all()


# A5: Dao-AILab/flash-attention#1619
@turns("offsets", [[0, 0, 0, 0, 1], [0, 1, 1, 1, 1], [0, 0, 1, 2, 2, 2, 2, 2, 3]])
def test_fewer_tokens_than_entries(backend: Backend, offsets: list[int], dtype: str) -> None:
    """A total below the number of entries was refused."""
    head_dim = 120 if backend.name == "gpu" else 60
    options: dict[str, Any] = dict(head_dim=head_dim, scale=head_dim**0.5, dtype=dtype, size=3.0)
    inputs = packed((offsets, offsets), heads=(21, 7), **options)
    results = solve(backend, changed(inputs, np.rint, "v", "dout"))  # sums are exact
    np.testing.assert_array_equal(results.out, np.repeat(np.rint(inputs.v), 3, axis=1))
    assert not results.dq.any() and not results.dk.any()
    nothing = packed(([0] * 5, [0] * 5), heads=(21, 7), **options)
    assert solve(backend, nothing).out.shape == (0, 21, head_dim)


# A7: pytorch/pytorch#81077
@every_dtype
def test_entries_of_which_all_is_masked(backend: Backend, dtype: str) -> None:
    """Lengths that included zero gave NaN; it was noticed when batch and length were equal."""
    n = 64 if backend.name == "gpu" else 20
    inputs = call((n, n), batch=n, head_dim=16, dtype=dtype)
    used = np.array([0, n // 2, n])[np.arange(n) % 3]
    mask = (np.arange(n) < used[:, None])[:, None, None]
    results = solve(backend, dataclasses.replace(inputs, mask=mask))
    assert all(np.isfinite(x).all() for x in (results.out, *results.grads))
    for b in np.flatnonzero(used == 0):
        assert not any(x[b].any() for x in (results.out, *results.grads))
        assert (results.lse[b] == -np.inf).all()


# B1: pytorch/pytorch#103963
@turns("length,rows", [8, 70, 130], ["second half", "first tile", "scattered", "all"])
def test_rows_of_a_mask_that_are_all_false(
    backend: Backend, length: int, rows: str, dtype: str
) -> None:
    """They gave NaN: nothing divided by nothing."""
    mask = np.zeros((length, length), bool)
    mask[:, : length // 2] = True
    dead = {"second half": slice(length // 2, None), "first tile": slice(64), "all": slice(None)}
    mask[dead.get(rows, [1, length // 3, length - 1])] = False
    inputs = call((length, length), heads=(1, 1), head_dim=16, dtype=dtype, mask=mask)
    results = solve(backend, inputs)
    empty = ~mask.any(axis=1)
    assert not results.out[:, empty].any() and not results.dq[:, empty].any()
    assert (results.lse[..., empty] == -np.inf).all()
    assert np.isfinite(results.lse[..., ~empty]).all()


# B5, packed: Dao-AILab/flash-attention#443
@turns("causal", [True, False])
def test_entries_of_a_single_key(backend: Backend, causal: bool, dtype: str) -> None:
    """Many queries over one key had NaN in dq, which is 0: a softmax of one score is constant."""
    offsets = [0, 76, 110, 256], [0, 1, 2, 3]
    inputs = packed(offsets, heads=(1, 1), dtype=dtype, size=3.0, causal=causal)
    solve(backend, inputs)
    # With whole numbers all sums are exact, and so is the result.
    results = solve(backend, changed(inputs, lambda x: np.ones_like(x), "dout", "v"))
    assert not results.dq.any() and not results.dk.any()
    for b, n in enumerate((76, 34, 146)):
        assert (results.dv[b] == (1 if causal else n)).all()


# B7, mask: Xilinx/brevitas#1591
@turns("length,dlse", [12, 100], [None, np.nan])
def test_zero_gradients_of_masked_rows(
    backend: Backend, length: int, dlse: float | None, dtype: str
) -> None:
    """A zero times the NaN probability of a row without keys is NaN again, in dk and dv."""
    dead = [3, 7]
    mask = coins(5, (1, 1, length, length), 0.6)
    mask[..., 0], mask[..., dead, :] = True, False
    inputs = call((length, length), head_dim=16, dtype=dtype, mask=mask)
    inputs.dout[:, dead] = 0
    if dlse is not None:
        rows = normal(4, (1, 2, length), accumulator(dtype))
        rows[..., dead] = dlse
        inputs = dataclasses.replace(inputs, dlse=rows)
    results = solve(backend, inputs)
    assert all(np.isfinite(x).all() for x in results.grads)


# --- what nobody sees ----------------------------------------------------------------------------


# C1, mask: pytorch/pytorch#101967
@turns("poison,how", [np.nan, np.inf, -np.inf], ["mask", "bias"])
def test_masked_keys_may_be_anything(backend: Backend, poison: float, how: str, dtype: str) -> None:
    """A huge number in a masked key did nothing, but a NaN reached the output."""
    small = np.arange(8, dtype=dtype).reshape(1, 2, 1, 4)
    only_first = np.array([[True, False]] * 2)
    tiny = Inputs(small, small.copy(), small.copy(), np.ones_like(small), mask=only_first)
    tiny.k[0, 1, 0, 0] = np.nan
    results = solve(backend, tiny)
    assert (results.out == small[:, :1]).all()
    assert not results.dk[:, 1].any() and not results.dv[:, 1].any()

    seen = coins(5, (90,))
    if how == "mask":
        hiding = {"mask": seen[None]}
    else:
        hiding = {"bias": np.where(seen, 0, -np.inf).astype(dtype)[None]}
    clean = call((20, 90), heads=(4, 2), head_dim=16, dtype=dtype, **hiding)
    want = solve(backend, clean)
    for names in (("k",), ("v",), ("k", "v")):
        inputs = changed(clean, np.copy, *names)
        for name in names:
            getattr(inputs, name)[:, ~seen] = poison
        same(run(backend, inputs), want)
    assert not want.dk[:, ~seen].any() and not want.dv[:, ~seen].any()


# C8: pytorch/pytorch#136232
@turns("name,causal", ["bias", "mask"], [True, False])
def test_only_the_corner_of_a_larger_buffer_is_read(
    backend: Backend, name: str, causal: bool, dtype: str
) -> None:
    """The backward pass trusted the extent of a mask that was made for the longest length."""
    inputs = call((100, 90), dtype=dtype, causal=causal)
    if name == "bias":
        buffer = np.full((1, 2, 160, 160), np.nan, dtype)
        buffer[..., :100, :90] = normal(5, (1, 2, 100, 90), dtype)
    else:
        buffer = np.ones((1, 2, 160, 160), bool)
        buffer[..., :100, :90] = coins(5, (1, 2, 100, 90))
    dlse = normal(4, (1, 2, 100), accumulator(dtype))
    inputs = dataclasses.replace(inputs, **{name: buffer[..., :100, :90], "dlse": dlse})
    want = solve(backend, inputs)
    if name == "bias" and causal:  # what causal order hides is not looked at
        hidden = np.arange(90) > np.arange(100)[:, None] - 10
        nan = np.where(hidden, np.nan, inputs.bias).astype(dtype)
        same(run(backend, dataclasses.replace(inputs, bias=nan)), want)


# C8, packed: pytorch/pytorch#136232
@every_dtype
def test_a_bias_for_the_longest_entry(backend: Backend, dtype: str) -> None:
    """An entry uses the corner of its own lengths, and nothing else of the bias has a gradient."""
    bias = normal(5, (3, 2, 80, 75), dtype)
    inputs = packed(([0, 10, 80, 99], [0, 25, 30, 99]), dtype=dtype, head_dim=16, bias=bias)
    for b, (i, j) in enumerate(entries(inputs)):
        bias[b, :, i.stop - i.start :] = bias[b, :, :, j.stop - j.start :] = np.nan
    results = solve(backend, inputs)
    assert np.isfinite(results.dbias).all() and not results.dbias[0, :, 10:].any()


# P9, packed: NVIDIA/TransformerEngine#3331
@turns("first", [0, 7])
def test_rows_of_no_entry_are_written(backend: Backend, first: int, dtype: str) -> None:
    """Spare rows of lse were not: a later step read them, and results changed by the run."""
    offsets = [first, 60, 114], [first, 60, 114]
    inputs = packed(offsets, slack=10, dtype=dtype, causal=True)
    spare = np.r_[:first, 114:124]
    for x in (inputs.q, inputs.k, inputs.v, inputs.dout):
        x[spare] = np.nan
    want = solve(backend, inputs)
    assert not any(x[spare].any() for x in (want.out, *want.grads))
    assert (want.lse[:, spare] == -np.inf).all()
    for old in (1000.0, -1e4):
        same(run(backend, inputs, old=old), want)


# --- bias and mask -------------------------------------------------------------------------------


# E3: pytorch/pytorch#153799
@turns("slope,length", [1, -1], [130, 65])
def test_positions_as_a_bias(backend: Backend, slope: int, length: int, dtype: str) -> None:
    """Rows past the end got huge scores from positions, and gradients were NaN, if causal."""
    if backend.name == "gpu":
        length = 1025 if length == 130 else length
    i = np.arange(length, dtype=np.float64)
    bias = slope * (i[:, None] - i) * (1024 / length)
    inputs = call((length, length), heads=(1, 1), dtype=dtype, causal=True)
    results = solve(
        backend, dataclasses.replace(inputs, bias=bias.astype(accumulator(dtype))[None, None])
    )
    assert all(np.isfinite(x).all() for x in (results.out, *results.grads, results.dbias))


# H9: facebookresearch/xformers#813, pytorch/pytorch#188246, tdrussell/diffusion-pipe#546
@turns("kind", ["contiguous", "padded", "transposed", "reversed", "every other", "expanded"])
def test_a_bias_may_have_any_strides(backend: Backend, kind: str, dtype: str) -> None:
    """A row stride that is no multiple of eight was refused."""
    heads = 16 if backend.name == "gpu" else 3
    plain = normal(5, (1, heads, 43, 43), dtype)
    bias = {
        "contiguous": plain,
        "padded": np.pad(plain, ((0, 0), (0, 0), (0, 0), (0, 5)))[..., :43],
        "transposed": np.ascontiguousarray(plain.swapaxes(2, 3)).swapaxes(2, 3),
        "reversed": plain[..., ::-1, ::-1],
        "every other": np.repeat(plain, 2, axis=3)[..., 1::2],
        "expanded": np.broadcast_to(plain[:, :1, :1], plain.shape),
    }[kind]
    inputs = call((43, 43), heads=(heads, heads), dtype=dtype, bias=bias)
    results = solve(backend, inputs)
    assert results.dbias.shape == bias.shape
    same(results, run(backend, dataclasses.replace(inputs, bias=np.ascontiguousarray(bias))))


# H13, mask: pytorch/pytorch#191937
@turns("keys", [33, 65, 97], dtypes=("bfloat16", "float32"))
def test_a_mask_over_broadcast_keys(backend: Backend, keys: int, dtype: str) -> None:
    """Keys with a stride of 0 were wrong when they were one more than a multiple of 32."""
    head_dim = 256 if backend.name == "gpu" else 64
    mask = coins(5, (1, 1, 20, 97), 0.8)
    mask[..., 96] = True
    inputs = call((20, 97), heads=(4, 4), head_dim=head_dim, dtype=dtype)
    inputs = changed(inputs, lambda x: np.broadcast_to(x[:, :, :1], x.shape)[:, :keys], "k", "v")
    solve(backend, dataclasses.replace(inputs, mask=mask[..., :keys]))
    wide = np.broadcast_to(mask[..., :1, :], (1, 4, 20, 97))[..., :keys]
    solve(backend, dataclasses.replace(inputs, mask=wide))


# I3, mask: ohdearquant/lattice#361
@pytest.mark.parametrize(
    ("dtype", "score"),
    [
        ("float16", -2e4),
        ("float32", -2e4),
        ("float32", -3e38),
        ("bfloat16", -3e38),
        ("float64", -1e308),
    ],
)
@pytest.mark.parametrize("keys", [2, 65, 130])
def test_masked_keys_weigh_less_than_any_score(
    backend: Backend, dtype: str, score: float, keys: int
) -> None:
    """Masked keys scored -10000, which is more than a visible key may score."""
    mask = np.zeros((1, keys), bool)
    inputs = call((1, keys), heads=(1, 1), head_dim=16, dtype=dtype, scale=1.0, mask=mask)
    inputs = changed(inputs, np.zeros_like, "q", "k")
    inputs = changed(inputs, lambda x: np.full_like(x, 100), "v")
    inputs.q[..., 0], inputs.k[..., 0] = score, 1
    at = keys // 2
    mask[:, at], inputs.v[:, at] = True, 1
    assert (solve(backend, inputs).out == 1).all()


# I10: jax-ml/jax#32242
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("wide", [True, False])
def test_a_bias_of_32_bits_with_inputs_of_16(backend: Backend, dtype: str, wide: bool) -> None:
    """Gradients were NaN, but right if the bias had 16 bits too."""
    (batch, length, heads) = (8, 128, 4) if backend.name == "gpu" else (3, 70, 2)
    inputs = call((length, length), heads=(heads, heads), batch=batch, dtype=dtype)
    inputs = dataclasses.replace(inputs, k=inputs.q, v=inputs.q)
    inputs = changed(inputs, np.ones_like, "dout")
    bias = normal(5, (1, heads, length, length), "float32" if wide else dtype)
    results = solve(backend, dataclasses.replace(inputs, bias=bias))
    assert results.dbias.dtype == bias.dtype and results.dbias.shape == bias.shape
    assert all(np.isfinite(x).all() for x in (*results.grads, results.dbias))


# J1: pytorch/pytorch#188302
@turns("wanted", [("bias",), ("q",), ("k", "bias"), ("v",), ("sinks",), ("bias", "sinks", "q")])
def test_only_some_gradients(backend: Backend, wanted: tuple[str, ...], dtype: str) -> None:
    """The backward pass read through a null pointer if only the bias needed a gradient."""
    inputs = call((50, 50), batch=2, dtype=dtype, bias=normal(5, (2, 2, 50, 50), dtype))
    if "sinks" in wanted:
        inputs = dataclasses.replace(inputs, sinks=normal(6, (2,), accumulator(dtype)))
    want = solve(backend, inputs).grads
    i = on(backend, inputs)
    out, lse, vjp = cuflash.attention_vjp(i.q, i.k, i.v, return_lse=True, **i.options)
    given = (i.dout, i.q, i.k, i.v, out, lse)
    for grads in (
        cuflash.attention_backward(*given, wrt=wanted, **i.options),
        vjp(i.dout, wrt=wanted),
    ):
        for name in ("q", "k", "v", "bias", "sinks"):
            got = getattr(grads, f"d{name}")
            assert (got is not None) == (name in wanted), name
            if got is not None:
                np.testing.assert_array_equal(to_host(backend, got), getattr(want, f"d{name}"))


# J3: jax-ml/jax#30593, jax-ml/jax#23701, jax-ml/jax#27184
@turns(
    "shape",
    [
        (2, 1, 33, 40),
        (1, 4, 1, 40),
        (1, 1, 33, 40),
        (33, 40),
        (2, 4, 33, 1),
        (1, 1, 1, 1),
        (1, 4, 33, 1),
        (1, 40),
    ],
)
def test_the_gradient_of_a_broadcast_bias_is_a_sum(
    backend: Backend, shape: tuple[int, ...], dtype: str
) -> None:
    """It was missing, without a word, or there for a batch of one only."""
    inputs = call((33, 40), heads=(4, 2), batch=2, dtype=dtype, bias=normal(5, shape, dtype))
    results = solve(backend, inputs)
    assert results.dbias.shape == shape
    full = np.broadcast_to(inputs.bias, (2, 4, 33, 40))
    each = run(backend, dataclasses.replace(inputs, bias=full)).dbias.astype(np.float64)
    axes = tuple(n for n, size in enumerate((1, 1, *shape)[-4:]) if size == 1)
    count = each.size / results.dbias.size
    slack = count * np.abs(each).max() * float(ml_dtypes.finfo(inputs.dtype).eps)
    allowed = bounds(inputs, {"dbias": exact(inputs, backward=True)["dbias"]})["dbias"]
    sums = each.sum(axis=axes, keepdims=True).reshape(shape)
    assert_close("dbias", results.dbias, sums, allowed + slack)


# J5: pytorch/pytorch#97514, pytorch/pytorch#126873
@turns("lengths", [(60, 60), (40, 75)])
def test_mask_bias_window_and_causal_order_at_once(
    backend: Backend, lengths: tuple[int, int], dtype: str
) -> None:
    """Such calls were refused; a key counts if all of them let it."""
    sq, sk = lengths
    mask = coins(5, (2, 1, *lengths))
    bias = normal(6, (1, 4, *lengths), dtype)
    hiding = coins(7, bias.shape, 0.2)
    bias[hiding] = -np.inf
    options: dict[str, Any] = dict(mask=mask, bias=bias, causal=True, window=(20, 0))
    solve(backend, call(lengths, heads=(4, 2), batch=2, dtype=dtype, **options))
    seen = weights(backend, lengths, dtype, heads=(4, 2), batch=2, **options) > 0
    distance = np.arange(sq)[:, None] + sk - sq - np.arange(sk)
    want = mask & ~hiding & (distance >= 0) & (distance <= 20)
    np.testing.assert_array_equal(seen, want)


# J7: erfanzar/jax-flash-attn2#1
@turns("causal,wide", [True, False], [False, True])
def test_a_bias_of_the_lowest_number(
    backend: Backend, causal: bool, wide: bool, dtype: str
) -> None:
    """Gradients were NaN, and not zero where the incoming gradient was."""
    bias_dtype = accumulator(dtype) if wide else dtype
    bias = np.where(coins(5, (2, 1, 48, 48)), 0, lowest(bias_dtype)).astype(bias_dtype)
    bias[..., 0] = 0  # every row has a key that is not hidden
    inputs = call((48, 48), batch=2, dtype=dtype, causal=causal, bias=bias)
    solve(backend, inputs)
    results = solve(backend, changed(inputs, np.zeros_like, "dout"))
    assert not any(x.any() for x in (*results.grads, results.dbias))


# J7, all keys: erfanzar/jax-flash-attn2#1
@every_dtype
@pytest.mark.parametrize("keys", [64, 100])
def test_rows_where_every_key_has_the_lowest_bias(backend: Backend, keys: int, dtype: str) -> None:
    """A finite number hides nothing: keys that all have the lowest one weigh the same."""
    bias = np.zeros((keys, keys), dtype)
    bias[keys // 2 :] = lowest(dtype)
    inputs = call((keys, keys), head_dim=16, dtype=dtype, bias=bias)
    inputs = changed(inputs, np.zeros_like, "q")
    results = solve(backend, inputs)
    means = inputs.v.astype(np.float64).mean(axis=1, keepdims=True)
    allowed = bounds(inputs, exact(inputs, backward=False))["out"]
    assert_close("out", results.out, np.broadcast_to(means, results.out.shape), 2 * allowed)
    zero = solve(backend, changed(inputs, np.zeros_like, "dout"))
    assert not any(x.any() for x in (*zero.grads, zero.dbias))


# W5: lucidrains/vit-pytorch#71, ArcInstitute/state#213
@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize("shape", [(2, 20, 20), (20,), (1, 2, 2, 20, 20), (), (2, 2, 20, 19)])
def test_a_mask_has_two_axes_or_four(backend: Backend, name: str, shape: tuple[int, ...]) -> None:
    """With three axes the batch was lined up with the heads, in silence if they were as many."""
    dtype = "bool" if name == "mask" else "float32"
    inputs = call((20, 20), batch=2, dtype="float32", **{name: np.ones(shape, dtype)})
    with pytest.raises(ValueError, match=rf"^{name}: expected shape .*\(batch, heads, "):
        run(backend, inputs)
    solve(backend, dataclasses.replace(inputs, **{name: None}))


# --- softcap and positions -----------------------------------------------------------------------


# K1: onnx/onnx#7865, Dao-AILab/flash-attention#1025, emmtrix/emx-onnx-cgen#731
@turns("how", ["causal", "window", "mask", "bias"])
def test_softcap_comes_before_what_hides(backend: Backend, how: str, dtype: str) -> None:
    """After it, minus infinity becomes minus the cap: a score that weighs something."""
    i = np.arange(40)
    seen = i <= i[:, None]
    bias = np.where(seen, 0.5, -np.inf).astype(dtype)
    hiding: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "window": {"window": (-1, 0)},
        "mask": {"mask": seen},
        "bias": {"bias": bias},
    }
    got = weights(backend, (40, 40), dtype, softcap=1.0, **hiding[how])
    np.testing.assert_array_equal(got > 0, seen)
    assert got[39].max() < got[39].min() * np.e**2 * 1.01  # the scores lie between -1 and 1
    solve(backend, call((40, 40), dtype=dtype, softcap=1.0, **hiding[how]))


# K3: Dao-AILab/flash-attention#2544
@turns("softcap,causal", [15.0, 1.0], [True, False])
def test_softcap_of_packed_sequences(
    backend: Backend, softcap: float, causal: bool, dtype: str
) -> None:
    """The packed backward pass took a softcap and did not use it."""
    head_dim = 128 if backend.name == "gpu" else 64
    inputs = packed(
        ([0, 128, 217], [0, 100, 189]),
        heads=(4, 2) if backend.name == "gpu" else (2, 1),
        **dict(head_dim=head_dim, dtype=dtype, size=2.0, causal=causal, softcap=softcap),
    )
    results = solve(backend, inputs)
    without = run(backend, dataclasses.replace(inputs, softcap=0.0))
    assert (results.dq != without.dq).any()


# K5: Dao-AILab/flash-attention#540
@turns("heads,lengths", [(40, 40), (6, 3)], [(77, 77), (50, 90), (90, 50)])
def test_slopes_of_any_number_of_heads(
    backend: Backend, heads: tuple[int, int], lengths: tuple[int, int], dtype: str
) -> None:
    """Tiles at the end lacked checks, and the number of heads had to be a power of two."""
    h = heads[0]
    slopes = (2.0 ** (-8.0 * np.arange(1, h + 1) / h)).astype(accumulator(dtype))
    if heads == (6, 3):
        slopes = np.stack([slopes, slopes[::-1]])
    sizes: dict[str, Any] = dict(heads=heads, batch=slopes.ndim, head_dim=16, dtype=dtype)
    solve(backend, call(lengths, causal=lengths != (50, 90), alibi_slopes=slopes, **sizes))


# K7: Dao-AILab/flash-attention#1585, vllm-project/vllm#1009, vllm-project/vllm#945
@turns("lengths,causal", [(50, 50), (30, 70)], [True, False])
def test_lse_of_the_very_term(
    backend: Backend, lengths: tuple[int, int], causal: bool, dtype: str
) -> None:
    """A term that differs by a constant of the row gives the same output, but not the same lse."""
    (sq, sk), accum = lengths, accumulator(dtype)
    slopes = np.array([0.5, 0.0625], accum)
    inputs = call(lengths, head_dim=16, dtype=dtype, causal=causal, alibi_slopes=slopes)
    inputs = dataclasses.replace(inputs, dlse=normal(4, (1, 2, sq), accum))
    results = solve(backend, inputs)
    distance = np.abs(np.arange(sq)[:, None] + sk - sq - np.arange(sk))
    bias = (-slopes[:, None, None] * distance).astype(accum)[None]
    as_bias = solve(backend, dataclasses.replace(inputs, alibi_slopes=None, bias=bias))
    allowed = bounds(inputs, exact(inputs, backward=False))
    assert_close("lse", results.lse, as_bias.lse, 2 * allowed["lse"])
    assert_close("out", *(x.out.astype(np.float64) for x in (results, as_bias)), 2 * allowed["out"])


# K9: HabanaAI/vllm-fork#503
@turns("lengths", [(7, 5000), (300, 300), (7, 1)])
def test_long_distances_are_exact(backend: Backend, lengths: tuple[int, int], dtype: str) -> None:
    """Distances times slopes in 16 bits: neighbours far away had the same bias."""
    slopes = np.array([1 / 1024, 0.7], accumulator(dtype))
    solve(
        backend,
        call(
            lengths,
            **dict(head_dim=16, dtype=dtype, alibi_slopes=slopes, backward=lengths[1] < 5000),
        ),
    )


# --- sinks ---------------------------------------------------------------------------------------


# L2: Dao-AILab/flash-attention#2752
@turns("sink,keys", [100.0, -100.0, 1e4, -1e4, -np.inf], [30, 70])
def test_sinks_take_part_in_the_maximum(
    backend: Backend, sink: float, keys: int, dtype: str
) -> None:
    """The sink was added after the maximum: lse was infinite, or NaN in rows without keys."""
    mask = np.ones((30, keys), bool)
    mask[0] = False
    sinks = np.array([sink, -100.0], accumulator(dtype))
    inputs = call((30, keys), head_dim=16, dtype=dtype, mask=mask, sinks=sinks)
    results = solve(backend, inputs)
    assert not results.out[:, 0].any()
    np.testing.assert_array_equal(results.lse[0, :, 0], sinks)
    if sink > 0:
        np.testing.assert_allclose(results.lse[0, 0], sink, atol=1e-2)
    assert np.isfinite(results.dsinks).all()
    nothing = changed(dataclasses.replace(inputs, mask=None), lambda x: x[:, :0], "k", "v")
    empty = solve(backend, nothing)
    np.testing.assert_array_equal(empty.lse[0], np.broadcast_to(sinks[:, None], (2, 30)))


# L4: NVIDIA/cudnn-frontend#421
@turns("sizes,window", [(128, 96), (40, 64), (16, 16)], [(2, 0), (-1, -1)])
def test_gradients_with_sinks(
    backend: Backend, sizes: tuple[int, int], window: tuple[int, int], dtype: str
) -> None:
    """For one pair of head sizes the backward pass left the sink out, and its gradient at 0."""
    if backend.name == "cpu" and sizes == (128, 96):
        sizes = 64, 48
    head_dim, head_dim_v = sizes
    sinks = np.array([1.0, 2.0], accumulator(dtype))
    inputs = call(
        (66, 66),
        **dict(head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, causal=True, window=window),
        sinks=sinks,
    )
    results = solve(backend, inputs)
    assert results.dsinks.all()
    # The same with a loss that uses lse.
    inputs = dataclasses.replace(inputs, dlse=normal(4, (1, 2, 66), accumulator(dtype)))
    solve(backend, inputs)


# L4, far above: NVIDIA/cudnn-frontend#421
@turns("bias", [9994.0, 9990.0, 9987.0, 9985.0], dtypes=("float32",))
def test_the_gradient_of_a_sink_far_above_all_keys(
    backend: Backend, bias: float, dtype: str
) -> None:
    """lse may be the sink itself in all its digits, and the keys weigh something all the same."""
    more = {"sinks": np.array([1e4, 9e3], dtype), "bias": np.full((1, 1), bias, dtype)}
    results = solve(backend, call((30, 30), head_dim=16, dtype=dtype, **more))
    if bias < 9988:
        assert (results.lse[:, 0] == 1e4).all()


# --- packed sequences ----------------------------------------------------------------------------


# M1: sgl-project/sglang#29497
@turns("index", [("i8", "i8"), ("i4", "i8"), ("i8", "i4")])
def test_offsets_of_64_bits(backend: Backend, index: tuple[str, str], dtype: str) -> None:
    """Read as 32 bits, every other offset is 0; a cumulative sum gives 64 bits by default."""
    inputs = packed(([0, 33, 70], [0, 40, 71]), dtype=dtype, causal=True)
    want = solve(backend, inputs)
    q, k = (x.astype(i) for x, i in zip(inputs.cu_seqlens, index, strict=True))
    same(run(backend, dataclasses.replace(inputs, cu_seqlens_q=q, cu_seqlens_k=k)), want)
    for other in ("u4", "u8", "i2", "f4", ">i4"):
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            given = getattr(inputs, name).astype(other)
            with pytest.raises(TypeError, match=f"^{name}: "):
                call = dataclasses.replace(inputs, **{name: given})
                cuflash.attention_varlen(call.q, call.k, call.v, *call.cu_seqlens)


# M3: Dao-AILab/flash-attention#2333
@turns("view", ["end", "start", "every other", "reversed"])
def test_nothing_past_the_offsets_is_read(backend: Backend, view: str, dtype: str) -> None:
    """Tiles past the last entry read one offset more than there are."""
    lengths = (1, 127, 128, 129) if backend.name == "gpu" else (1, 63, 64, 65)
    offsets = np.cumsum([0, *lengths]).astype(np.int32)
    buffer = np.full(15, 2**30, np.int32)
    at = {
        "end": slice(10, 15),
        "start": slice(0, 5),
        "every other": slice(1, 10, 2),
        "reversed": slice(12, 7, -1),
    }[view]
    buffer[at] = offsets
    inputs = packed((offsets, offsets), dtype=dtype, causal=True)
    want = solve(backend, inputs)
    cut = buffer[at]
    same(run(backend, dataclasses.replace(inputs, cu_seqlens_q=cut, cu_seqlens_k=cut)), want)


# M5: Dao-AILab/flash-attention#701
def test_the_longest_length_may_be_any_integer(backend: Backend) -> None:
    """A maximum of an array is an array scalar; a plain int was asked for."""
    inputs = packed(([0, 10, 45], [0, 20, 64]), dtype="float32")
    want = solve(backend, inputs)
    i = on(backend, inputs)
    given = (i.q, i.k, i.v, *i.cu_seqlens)

    def both(q: Any, k: Any) -> None:
        hints = dict(max_seqlen_q=q, max_seqlen_k=k)
        out, lse = cuflash.attention_varlen(*given, return_lse=True, **hints)
        again = cuflash.attention_varlen_backward(
            i.dout, *given[:3], out, lse, *i.cu_seqlens, **hints
        )
        arrays = (out, lse, again.dq, again.dk, again.dv)
        for x, y in zip(arrays, want, strict=False):
            np.testing.assert_array_equal(to_host(backend, x), y)

    for kind in (int, np.int64, np.int32, np.uint8, np.array, lambda n: np.array(n, np.int32)):
        both(kind(35), kind(44))
    for q, k in ((1, 1), (None, 44), (35, None), (0, 10**6)):  # only hints
        both(q, k)
    for wrong, error in (
        (35.0, TypeError),
        (np.float32(35), TypeError),
        (np.array([35, 44]), TypeError),
        ("35", TypeError),
        (True, TypeError),
        (-1, ValueError),
    ):
        for name in ("max_seqlen_q", "max_seqlen_k"):
            with pytest.raises(error, match=f"^{name}: "):
                cuflash.attention_varlen(*given, **{name: wrong})
    if backend.name == "gpu":
        for name in ("max_seqlen_q", "max_seqlen_k"):
            with pytest.raises(TypeError, match=f"^{name}: "):
                cuflash.attention_varlen(*given, **{name: backend.xp.asarray(35)})


# M7: Dao-AILab/flash-attention#1104
@turns("lengths", [[2, 1, 2, 5, 1, 1], [70, 3, 0, 64, 1]])
def test_entries_see_nothing_but_themselves(
    backend: Backend, lengths: list[int], dtype: str
) -> None:
    """How offsets relate to padded batches was not documented: each entry is a call of its own."""
    offsets = np.cumsum([0, *lengths])
    inputs = packed((offsets, offsets), heads=(4, 4), dtype=dtype, causal=True)
    results = solve(backend, inputs)
    allowed = bounds(inputs, exact(inputs, backward=True))
    for i, _ in entries(inputs):
        alone = changed(inputs, lambda x, i=i: x[i][None])
        alone = dataclasses.replace(alone, cu_seqlens_q=None, cu_seqlens_k=None)
        apart = solve(backend, alone)
        for name in ("out", "dq", "dk", "dv"):
            x, y = getattr(results, name)[i], getattr(apart, name)[0]
            assert_close(name, x.astype(np.float64), y.astype(np.float64), 2 * allowed[name])
        assert_close("lse", results.lse[:, i], apart.lse[0], 2 * allowed["lse"])
        # Whatever the others are.
        others = np.ones(len(inputs.q), bool)
        others[i] = False
        noise = changed(inputs, np.copy)
        for x in (noise.q, noise.k, noise.v, noise.dout):
            x[others] = np.nan
        again = run(backend, noise)
        for name in ("out", "dq", "dk", "dv"):
            x, y = (np.ascontiguousarray(getattr(r, name)[i]) for r in (results, again))
            assert x.tobytes() == y.tobytes(), name


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directions of the calls that came as far as running kernels."""
    calls: list[str] = []
    original = launch._run

    def count(direction: Any, *args: Any) -> None:
        calls.append(direction)
        original(direction, *args)

    monkeypatch.setattr(launch, "_run", count)
    return calls


# W1: facebookresearch/xformers#1122
@pytest.mark.parametrize(
    ("name", "offsets"),
    [
        ("cu_seqlens_k", [0, 20, 40]),
        ("cu_seqlens_k", [0, 20, 21]),
        ("cu_seqlens_k", [0, 21, 20]),
        ("cu_seqlens_k", [-1, 10, 20]),
        ("cu_seqlens_q", [0, 10, 41]),
        ("cu_seqlens_q", [0, 2**31 - 1, 20]),
    ],
)
def test_more_rows_described_than_there_are(
    backend: Backend, launched: list[str], name: str, offsets: list[int]
) -> None:
    """The call read on past the end of the keys."""
    good = packed(([0, 10, 20], [0, 10, 20]), dtype="float32")
    given = np.array(offsets, np.int32)
    i = on(backend, good)
    cu = [given if name == n else getattr(good, n) for n in ("cu_seqlens_q", "cu_seqlens_k")]
    with pytest.raises(ValueError, match=f"^{name}: "):
        cuflash.attention_varlen(i.q, i.k, i.v, *cu)
    lse = backend.array(np.zeros((2, 20), np.float32))
    with pytest.raises(ValueError, match=f"^{name}: "):
        cuflash.attention_varlen_backward(i.dout, i.q, i.k, i.v, i.q, lse, *cu)
    assert not launched
    if backend.name == "gpu":  # offsets that the host does not read: wrong results, no fault
        run(backend, dataclasses.replace(good, **{name: given}))
        backend.xp.cuda.Device().synchronize()
    solve(backend, good)


# W7: NVlabs/alpamayo#52
def test_offsets_of_different_numbers_of_entries(backend: Backend, launched: list[str]) -> None:
    """The message spoke of a shape that the user had never set."""
    good = packed(([0, 10, 20], [0, 10, 20]), dtype="float32")
    for k in ([0, 5, 10, 20], [0, 20], []):
        i = on(backend, dataclasses.replace(good, cu_seqlens_k=np.array(k, np.int32)))
        with pytest.raises(ValueError, match=r"^cu_seqlens_k: expected .* offsets"):
            cuflash.attention_varlen(i.q, i.k, i.v, *i.cu_seqlens)
    assert not launched
    solve(backend, good)


# --- dropout -------------------------------------------------------------------------------------


def kept(backend: Backend, lengths: tuple[int, int], dtype: str, **options: Any) -> np.ndarray:
    """Return which weights of two entries with two heads are not dropped; sees every key."""
    return weights(backend, lengths, dtype, heads=(2, 2), batch=2, **options) > 0


# Q1: facebookresearch/xformers#173
@every_dtype
def test_the_seed_decides_what_is_dropped(backend: Backend, dtype: str) -> None:
    """The address of the seed was used for the seed: equal seeds gave different masks."""
    inputs = call((64, 64), head_dim=16, dtype=dtype, dropout_p=0.25, seed=1234)
    want = solve(backend, inputs)
    other = [np.empty(1000 * n) for n in range(5)]
    same(run(backend, inputs), want)
    assert other
    for seed in (np.int64(1234), np.uint16(1234), np.array(1234), np.array([1234], np.uint64)):
        same(run(backend, dataclasses.replace(inputs, seed=seed)), want)
    for n in (0, 1):
        seed = backend.array(np.array([1234 + n]))
        results = run(backend, dataclasses.replace(inputs, seed=seed))
        if n == 0:
            same(results, want)
        else:
            check(results, dataclasses.replace(inputs, seed=1235))
    for seed in (1235, 0, -1, 1234 + 2**32, 2**64 - 2):
        results = solve(backend, dataclasses.replace(inputs, seed=seed))
        assert (results.out != want.out).any()
    last = [run(backend, dataclasses.replace(inputs, seed=seed)) for seed in (-1, 2**64 - 1)]
    same(*last)
    with pytest.raises(ValueError, match=r"^seed: "):
        run(backend, dataclasses.replace(inputs, seed=None))


# Q3: pytorch/pytorch#197563
@turns("causal", [False, True])
def test_one_dropout_mask_in_both_passes(backend: Backend, causal: bool, dtype: str) -> None:
    """The backward pass read the seed before the device had written it, and used another mask.

    With unit vectors as values the output is P with dropout, and with unit vectors as dout dv is
    that matrix again, transposed.
    """
    inputs = call((64, 64), head_dim=16, head_dim_v=64, batch=2, dtype=dtype, causal=causal)
    inputs = dataclasses.replace(inputs, dropout_p=0.25, seed=1234)
    unit = lambda x: np.broadcast_to(np.eye(64, dtype=x.dtype)[:, None], x.shape)
    inputs = changed(inputs, unit, "v", "dout")
    want = solve(backend, inputs)
    np.testing.assert_array_equal(want.out != 0, want.dv.transpose(0, 3, 2, 1) != 0)
    if backend.name == "gpu":
        i, xp = on(backend, inputs), backend.xp
        options = {**i.options, "seed": xp.zeros(1, np.int64)}
        busy = xp.ones((8192, 8192), np.float32)
        for _ in range(5):
            busy = busy @ busy * np.float32(1e-9)
        options["seed"] += 1234 + 0 * busy[0, 0].astype(np.int64)
        out, vjp = cuflash.attention_vjp(i.q, i.k, i.v, **options)
        grads = vjp(i.dout)
        for x, name in ((out, "out"), (grads.dq, "dq"), (grads.dk, "dk"), (grads.dv, "dv")):
            np.testing.assert_array_equal(to_host(backend, x), getattr(want, name))


# Q5: PaddlePaddle/Paddle#70527
def test_no_random_state_is_touched(backend: Backend) -> None:
    """With a dropout of 0 the call drew numbers, so an unrelated option changed training."""
    inputs = call((40, 40), dtype="float32")
    want = solve(backend, inputs)
    for p, seed in ((0.0, None), (0.0, 7), (0, 7), (0.5, 7)):
        np.random.seed(0)
        backend.xp.random.seed(0)
        results = run(backend, dataclasses.replace(inputs, dropout_p=p, seed=seed))
        drawn = np.random.random(), float(backend.xp.random.random(()))
        np.random.seed(0)
        backend.xp.random.seed(0)
        assert drawn == (np.random.random(), float(backend.xp.random.random(())))
        if not p:
            same(results, want)


# Q7: Dao-AILab/flash-attention#612
@every_dtype
def test_what_is_dropped_does_not_depend_on_tiles(backend: Backend, dtype: str) -> None:
    """Both passes walk the matrix in tiles of their own: the mask is one of indices alone."""
    keep = cuflash.reference.dropout_keep(1234, 0.25, 2, 2, 140, 64)
    dropout: dict[str, Any] = dict(dropout_p=0.25, seed=1234)
    for sq in (64, 140, 9):
        np.testing.assert_array_equal(kept(backend, (sq, 64), dtype, **dropout), keep[:, :, :sq])
    fewer = kept(backend, (64, 40), dtype, **dropout)
    np.testing.assert_array_equal(fewer, keep[:, :, :64, :40])
    hidden = kept(backend, (64, 64), dtype, causal=True, **dropout)
    np.testing.assert_array_equal(hidden, np.tril(keep[:, :, :64]))
    capped = kept(backend, (64, 64), dtype, softcap=3.0, **dropout)
    np.testing.assert_array_equal(capped, keep[:, :, :64])
    # Packed, the rows of an entry count from 0.
    inputs = packed(
        ([0, 50, 114], [0, 64, 128]), head_dim=16, head_dim_v=64, dtype=dtype, **dropout
    )
    unit = np.tile(np.eye(64, dtype=dtype), (2, 1))[:, None]
    inputs = changed(inputs, lambda v: np.broadcast_to(unit, v.shape), "v")
    results = solve(backend, inputs)
    for b, (i, _) in enumerate(entries(inputs)):
        seen = results.out[i].swapaxes(0, 1) != 0
        np.testing.assert_array_equal(seen, keep[b, :, : i.stop - i.start])


# --- merging -------------------------------------------------------------------------------------


# P3: flashinfer-ai/flashinfer#4051, vllm-project/vllm#28181, flashinfer-ai/flashinfer#5262
@turns("layout,where", ["bshd", "bhsd"], ["all", "some"])
def test_parts_without_keys_are_merged(
    backend: Backend, layout: str, where: str, dtype: str
) -> None:
    """Two empty parts gave NaN: the exponential of minus infinity less minus infinity."""
    rows = (1, 2, 4)
    shape = (1, 4, 2, 64) if layout == "bshd" else (1, 2, 4, 64)
    lse = normal(4, rows, accumulator(dtype))
    out = normal(5, shape, dtype)
    some = np.ones(rows, bool) if where == "all" else coins(6, rows, 0.5)
    at = some.swapaxes(1, 2) if layout == "bshd" else some
    no_lse = np.where(some, -np.inf, lse - 1).astype(lse.dtype)

    def merge(*parts: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        outs, lses = zip(*[map(backend.array, part) for part in parts], strict=True)
        place = tuple(backend.array(np.full_like(x, np.nan)) for x in (out, lse))
        results = cuflash.merge_states(outs, lses, layout=layout, out=place)
        return to_host(backend, results[0]), to_host(backend, results[1])

    for poison in (0, np.nan, np.inf):
        empty = np.where(at[..., None], poison, out).astype(dtype), no_lse
        merged, total = merge(empty, empty)
        assert (total[some] == -np.inf).all() and not merged[at].any()
        assert np.isfinite(total[~some]).all()
        for parts in ([empty, (out, lse)], [(out, lse), empty], [empty, (out, lse), empty]):
            merged, total = merge(*parts)
            np.testing.assert_array_equal(merged[at], out[at])
            np.testing.assert_array_equal(total[some], lse[some])
        merged, total = merge(empty)
        assert (total[some] == -np.inf).all() and not merged[at].any()


# P8, merge_states: Dao-AILab/flash-attention#404
@turns("layout,causal", ["bshd", "bhsd"], [False, True])
def test_merge_states_of_parts_is_the_whole(
    backend: Backend, layout: str, causal: bool, dtype: str
) -> None:
    """Users could not tell whether lse holds the maximum; parts that a row cannot see count 0."""
    inputs = call((30, 150), heads=(4, 2), batch=2, dtype=dtype, causal=causal, backward=False)
    axis = 1
    if layout == "bhsd":
        axis = 2
        inputs = changed(inputs, lambda x: x.swapaxes(1, 2), "q", "k", "v")
        inputs = dataclasses.replace(inputs, layout=layout)
    outs, lses = [], []
    for a, z in ((0, 40), (40, 41), (41, 100), (100, 140), (140, 150)):
        # The last query stands at the last key of each part; the window moves it back.
        cut = (slice(None),) * axis + (slice(a, z),)
        window = (-1, 150 - z) if causal else (-1, -1)
        part = changed(inputs, lambda x, cut=cut: x[cut], "k", "v")
        results = run(backend, dataclasses.replace(part, causal=False, window=window))
        outs.append(backend.array(results.out))
        lses.append(backend.array(results.lse))
    assert bool((to_host(backend, lses[-1]) == -np.inf).any()) == causal
    out, lse = (to_host(backend, x) for x in cuflash.merge_states(outs, lses, layout=layout))
    want = exact(inputs, backward=False)
    allowed = bounds(inputs, want)
    assert_close("lse", lse, want["lse"], 2 * allowed["lse"])
    # Each part is rounded to the dtype before the merge.
    top = float(np.abs(want["out"]).max() * ml_dtypes.finfo(inputs.dtype).eps)
    assert_close("out", out, want["out"], 2 * allowed["out"] + top)


# --- options in the key of the kernels -----------------------------------------------------------


# T1, options: Dao-AILab/flash-attention#2402
@every_dtype
def test_calls_that_differ_in_one_more_option(backend: Backend, dtype: str) -> None:
    """A constant of the compiled kernel was not in the cache's key: a call ran another's kernel."""
    accum = accumulator(dtype)
    changes: list[dict[str, Any]] = [
        {"softcap": 15.0},
        {"softcap": 3.0},
        {"dropout_p": 0.25, "seed": 1},
        {"dropout_p": 0.25, "seed": 2},
        {"dropout_p": 0.5, "seed": 2},
        {"alibi_slopes": np.array([0.5, 0.25], accum)},
        {"alibi_slopes": np.array([0.25, 0.5], accum)},
        {"sinks": np.array([0.5, 0.25], accum)},
        {"bias": normal(5, (60, 60), dtype)},
        {"bias": normal(5, (60, 60), accum, 2.0)},
        {"bias": normal(5, (1, 2, 1, 60), dtype)},
        {"mask": coins(5, (60, 60))},
        {"mask": coins(6, (1, 60))},
        {"mask": coins(6, (1, 60)), "causal": True, "softcap": 3.0, "scale": 0.2},
        {},
    ]
    inputs = call((60, 60), heads=(2, 1), head_dim=16, dtype=dtype, size=2.0)
    calls = [dataclasses.replace(inputs, **change) for change in changes]
    first = [solve(backend, i) for i in calls]
    for i, want in zip(reversed(calls), reversed(first), strict=True):
        same(run(backend, i), want)
    assert len({x.out.tobytes() for x in first}) == len(first)


# T11, options: cupy/cupy#8485, cupy/cupy#6940
@every_dtype
@pytest.mark.parametrize("name", ["softcap", "dropout_p"])
def test_options_may_be_numbers_of_any_kind(backend: Backend, name: str, dtype: str) -> None:
    """A Python float went to the kernel as a double where it expected a float."""
    inputs = call((40, 40), head_dim=16, dtype=dtype, seed=3, **{name: 0.25})
    want = solve(backend, inputs)
    kinds = (np.float16, np.float32, np.float64, np.array, ml_dtypes.bfloat16)
    for kind in kinds:
        same(run(backend, dataclasses.replace(inputs, **{name: kind(0.25)})), want)
    whole = solve(backend, dataclasses.replace(inputs, **{name: 1.0}))
    for one in (1, np.int32(1), np.uint8(1)):
        same(run(backend, dataclasses.replace(inputs, **{name: one})), whole)
    if backend.name == "gpu":
        with pytest.raises(TypeError, match=f"^{name}: "):
            run(backend, dataclasses.replace(inputs, **{name: backend.xp.asarray(0.25)}))
