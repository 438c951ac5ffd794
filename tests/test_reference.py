# SPDX-License-Identifier: Apache-2.0
"""The float64 reference against values worked out by hand, finite differences and poison.

The options are held against a second implementation of the same definition (fixed numbers), against
a loop over rows and pairs, and, alone and two at a time, against finite differences.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from check import GRADIENTS, Inputs
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash import dropout
from cuflash.reference import (
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
    dropout_keep,
    merge_states,
)

LN3 = np.log(3.0)


def forward(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    i, solve = inputs, attention_varlen if inputs.cu_seqlens else attention
    out, lse = solve(i.q, i.k, i.v, *i.cu_seqlens, **i.options, return_lse=True)
    return out, lse


def backward(inputs: Inputs) -> Any:
    i, solve = inputs, attention_varlen_backward if inputs.cu_seqlens else attention_backward
    return solve(i.dout, i.q, i.k, i.v, *i.cu_seqlens, dlse=i.dlse, **i.options)


def results(inputs: Inputs) -> dict[str, np.ndarray]:
    out, lse = forward(inputs)
    grads = backward(inputs)
    values = {"out": out, "lse": lse, **{name: getattr(grads, name) for name in GRADIENTS}}
    return {name: x for name, x in values.items() if x is not None}


def close(got: np.ndarray, want: Any, atol: float = 1e-12) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)


# ---------------------------------------------------------------- by hand


def two_keys(**options: Any) -> Inputs:
    """One query, scores 0 and ln 3: the probabilities are 1/4 and 3/4."""
    q = np.ones((1, 1, 1, 1))
    k = np.array([0.0, LN3]).reshape(1, 2, 1, 1)
    v = np.array([[4.0, 0.0], [0.0, 8.0]]).reshape(1, 2, 1, 2)
    dout = np.array([1.0, 0.0]).reshape(1, 1, 1, 2)
    return Inputs(q, k, v, dout, scale=1.0, **options)


def test_forward_by_hand():
    out, lse = forward(two_keys())
    close(out.ravel(), [1.0, 6.0])
    close(lse.ravel(), [np.log(4.0)])


def test_backward_by_hand():
    # dP = (4, 0), delta = 1, dx = (1/4 * 3, 3/4 * -1)
    dq, dk, dv = backward(two_keys())
    close(dq.ravel(), [-0.75 * LN3])
    close(dk.ravel(), [0.75, -0.75])
    close(dv[0, :, 0], [[0.25, 0.0], [0.75, 0.0]])


def test_gradient_of_lse_by_hand():
    # dx as above, plus 2 P
    dq, dk, dv = backward(two_keys(dlse=np.full((1, 1, 1), 2.0)))
    close(dq.ravel(), [0.75 * LN3])
    close(dk.ravel(), [1.25, 0.75])
    close(dv[0, :, 0], [[0.25, 0.0], [0.75, 0.0]])


def test_scale_is_one_over_root_d_by_default():
    ones = np.ones((1, 1, 1, 16))
    assert forward(Inputs(ones, ones, ones))[1].item() == 4.0
    assert forward(Inputs(ones, ones, ones, scale=-0.5))[1].item() == -8.0


def test_large_scores_do_not_overflow():
    inputs = dataclasses.replace(two_keys(), k=two_keys().k + 1e5)
    out, lse = forward(inputs)
    close(out.ravel(), [1.0, 6.0], 1e-9)
    close(lse.ravel(), [1e5 + np.log(4.0)], 1e-9)
    close(forward(dataclasses.replace(inputs, k=two_keys().k - 1e5))[0].ravel(), [1.0, 6.0], 1e-9)


def test_softcap_by_hand():
    # Scores 0 and tanh(ln 3) = 4/5; the slope there is 9/25.
    inputs = two_keys(softcap=1.0)
    weight = 1 / (1 + np.exp(-0.8))
    out, lse = forward(inputs)
    close(out.ravel(), [4 * (1 - weight), 8 * weight])
    close(lse.ravel(), [np.log(1 + np.exp(0.8))])
    dx = weight * (1 - weight) * 4  # dP = (4, 0)
    grads = backward(inputs)
    close(grads.dk.ravel(), [dx, -dx * 9 / 25])
    close(grads.dq.ravel(), [-dx * 9 / 25 * LN3])


def test_bias_by_hand():
    # Scores ln 3 and ln 3: equal probabilities, dP = (4, 0), delta = 2.
    inputs = two_keys(bias=np.array([[LN3, 0.0]]))
    close(forward(inputs)[0].ravel(), [2.0, 4.0])
    close(forward(inputs)[1].ravel(), [np.log(6.0)])
    close(backward(inputs).dbias, [[1.0, -1.0]])
    hidden = dataclasses.replace(inputs, bias=np.array([[-np.inf, 0.0]]))
    close(forward(hidden)[0].ravel(), [0.0, 8.0])
    assert backward(hidden).dbias.tolist() == [[0.0, 0.0]]


def test_alibi_by_hand():
    # The query stands at 1: key 0 is one away, and its score becomes -ln 3.
    inputs = two_keys(alibi_slopes=np.array([LN3]))
    close(forward(inputs)[0].ravel(), [0.4, 7.2])
    # The query stands at -1 of one key: again one away, on the other side.
    q, k = np.zeros((3, 1, 1)), np.zeros((1, 1, 1))
    lse = attention(q, k, k, alibi_slopes=np.array([2.0]), return_lse=True)[1]
    assert lse.tolist() == [[-4.0, -2.0, 0.0]]


def test_sink_by_hand():
    # Weights 1, 3 and 4 of the sink, dP = (4, 0), delta = 1/2.
    inputs = two_keys(sinks=np.array([np.log(4.0)]), dlse=np.full((1, 1, 1), 2.0))
    out, lse = forward(inputs)
    close(out.ravel(), [0.5, 3.0])
    close(lse.ravel(), [np.log(8.0)])
    grads = backward(inputs)
    close(grads.dk.ravel(), [1 / 8 * (4 - 0.5 + 2), 3 / 8 * (0 - 0.5 + 2)])
    close(grads.dsinks, [0.5 * (2 - 0.5)])


def test_dropout_by_hand():
    keep = dropout_keep(5, 0.5, 1, 1, 1, 2)
    assert keep.ravel().tolist() == [False, True]
    inputs = two_keys(dropout_p=0.5, seed=5, dlse=np.full((1, 1, 1), 2.0))
    inputs = dataclasses.replace(inputs, dout=np.array([0.0, 1.0]).reshape(1, 1, 1, 2))
    out, lse = forward(inputs)
    close(out.ravel(), [0.0, 12.0])
    close(lse.ravel(), [np.log(4.0)])
    # dP = (0, 16), delta = 12
    grads = backward(inputs)
    close(grads.dk.ravel(), [1 / 4 * (0 - 12 + 2), 3 / 4 * (16 - 12 + 2)])
    close(grads.dv[0, :, 0], [[0.0, 0.0], [0.0, 1.5]])


PICTURES = [
    # causal, window, one string per query, one character per key
    (False, (-1, -1), ["1111", "1111"]),
    (True, (-1, -1), ["1110", "1111"]),
    (True, (-1, -1), ["100", "110", "111"]),
    (True, (-1, -1), ["00", "00", "10", "11"]),
    (False, (0, 0), ["0010", "0001"]),
    (False, (1, -1), ["0111", "0011"]),
    (False, (-1, 0), ["1110", "1111"]),
    (False, (1, 1), ["110", "111", "011"]),
    (False, (0, 2), ["111", "011", "001"]),
    (True, (1, 2), ["100", "110", "011"]),
    (True, (0, -1), ["00", "00", "00", "10", "01"]),
    (False, (0, 1), ["00", "10", "11", "01"]),
]


@pytest.mark.parametrize("causal, window, picture", PICTURES)
def test_who_sees_whom(causal, window, picture):
    # Equal scores and unit values: out is the picture itself, divided by its row sums.
    seen = np.array([[int(c) for c in row] for row in picture])
    sq, sk = seen.shape
    q, k, v = np.zeros((sq, 1, 3)), np.ones((sk, 1, 3)), np.eye(sk)[:, None, :]
    out, lse = forward(Inputs(q, k, v, causal=causal, window=window))
    count = seen.sum(axis=1)
    close(out[:, 0], seen / np.maximum(count, 1)[:, None])
    with np.errstate(divide="ignore"):
        close(lse[0], np.log(count))


def test_query_heads_read_their_key_head():
    q, k = np.ones((1, 1, 6, 2)), np.ones((1, 1, 3, 2))
    v = np.array([5.0, 6.0, 7.0]).reshape(1, 1, 3, 1)
    assert attention(q, k, v).ravel().tolist() == [5, 5, 6, 6, 7, 7]
    dout = np.array([1.0, 2, 4, 8, 16, 32]).reshape(1, 1, 6, 1)
    assert attention_backward(dout, q, k, v).dv.ravel().tolist() == [3, 12, 48]


def test_score_of_minus_infinity_has_weight_zero():
    k = np.array([-np.inf, 0.0]).reshape(2, 1, 1)
    v = np.array([3.0, 5.0]).reshape(2, 1, 1)
    out, lse = forward(Inputs(np.ones((1, 1, 1)), k, v))
    assert (out.item(), lse.item()) == (5.0, 0.0)
    out, lse = forward(Inputs(np.ones((1, 1, 1)), k[:1], v[:1]))
    assert (out.item(), lse.item()) == (0.0, -np.inf)


# ---------------------------------------------------------------- arrays and shapes


def test_layouts_and_batch_axis_agree():
    rng = np.random.default_rng(0)
    shapes = [(1, 5, 4, 3), (1, 7, 2, 3), (1, 7, 2, 6), (1, 5, 4, 6), (1, 4, 5)]
    arrays = [rng.normal(size=shape) for shape in shapes]
    base = Inputs(*arrays, causal=True, window=(3, -1))
    turned = [x.swapaxes(1, 2) for x in arrays[:4]]
    variants = {
        "bshd": base,
        "bhsd": dataclasses.replace(base, layout="bhsd", **named(turned)),
        "shd": dataclasses.replace(base, dlse=base.dlse[0], **named([x[0] for x in arrays[:4]])),
        "hsd": dataclasses.replace(
            base, layout="bhsd", dlse=base.dlse[0], **named([x[0] for x in turned])
        ),
    }
    out, lse = forward(base)
    for name, inputs in variants.items():
        got = [forward(inputs)[0], *backward(inputs)]
        for x, want, like in zip(got, [out, *backward(base)], ("dout", *"qkv"), strict=True):
            assert x.shape == getattr(inputs, like).shape
            x = x if "b" in name else x[None]
            close(x.swapaxes(1, 2) if "hs" in name else x, want, 1e-14)
        close(forward(inputs)[1], lse if "b" in name else lse[0], 1e-14)


def named(arrays: list[np.ndarray]) -> dict[str, np.ndarray]:
    return dict(zip(("q", "k", "v", "dout"), arrays, strict=True))


class OnDevice:
    """What a CuPy array shows of itself here: its shape, and `get`."""

    def __init__(self, x: np.ndarray):
        self.get, self.shape, self.ndim = lambda: x, x.shape, x.ndim


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_other_arrays_are_read_exactly(dtype):
    rng = np.random.default_rng(0)
    small = [rng.normal(size=(2, 3, 2, 4)).astype(dtype) for _ in range(4)]
    double = [x.astype(np.float64) for x in small]
    want = [*forward(Inputs(*double)), *backward(Inputs(*double))]
    for arrays in (small, [OnDevice(x) for x in small]):
        got = [*forward(Inputs(*arrays)), *backward(Inputs(*arrays))]
        for x, y in zip(got, want, strict=True):
            assert x.dtype == np.float64
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("empty", ["batch", "sq", "sk", "heads", "q_heads"])
def test_zero_sizes(empty, layout):
    size = {"batch": 2, "sq": 3, "sk": 4, "heads": 2, "q_heads": 4, empty: 0}
    b, hkv, hq = size["batch"], size["heads"], size["q_heads"] if size["heads"] else 0
    shapes = [(size["sq"], hq, 5), (size["sk"], hkv, 5), (size["sk"], hkv, 6), (size["sq"], hq, 6)]
    arrays = [np.ones((b, *s)) for s in shapes]
    if layout == "bhsd":
        arrays = [x.swapaxes(1, 2) for x in arrays]
    inputs = Inputs(*arrays, dlse=np.ones((b, hq, size["sq"])), layout=layout)
    out, lse = forward(inputs)
    assert out.shape == inputs.dout.shape and lse.shape == inputs.dlse.shape
    assert not out.any() and (lse == -np.inf).all()
    for got, like in zip(backward(inputs), (inputs.q, inputs.k, inputs.v), strict=True):
        assert got.shape == like.shape and not got.any()


@pytest.mark.parametrize(
    "shapes, layout",
    [
        ([(1, 2, 3, 4), (1, 2, 2, 4), (1, 2, 2, 4)], "bshd"),  # 3 query heads on 2 key heads
        ([(1, 2, 1, 4), (1, 2, 0, 4), (1, 2, 0, 4)], "bshd"),  # on none
        ([(2, 2, 2, 4), (1, 2, 2, 4), (1, 2, 2, 4)], "bshd"),  # batch
        ([(1, 2, 2, 4), (1, 2, 2, 5), (1, 2, 2, 4)], "bshd"),  # D
        ([(1, 2, 2, 4), (1, 3, 2, 4), (1, 2, 2, 4)], "bshd"),  # Sk
        ([(2, 2, 4), (1, 2, 2, 4), (1, 2, 2, 4)], "bshd"),  # axes
        ([(1, 2, 2, 4)] * 4, "bsdh"),
        ([(1, 2, 2, 4)] * 3 + [(1, 2, 1, 4)], "bshd"),  # dout
    ],
)
def test_arrays_that_do_not_fit_are_errors(shapes, layout):
    arrays = [np.ones(s) for s in shapes]
    with pytest.raises(ValueError):
        if len(arrays) == 4:
            attention_backward(arrays[3], *arrays[:3], layout=layout)
        else:
            attention(*arrays, layout=layout)


def test_dlse_of_another_shape_is_an_error():
    x = np.ones((1, 2, 3, 4))
    with pytest.raises(ValueError, match="dlse"):
        attention_backward(x, x, x, x, dlse=np.ones((1, 2, 3)))


# ---------------------------------------------------------------- any problem


@st.composite
def problems(
    draw, smallest: int = 0, layouts: tuple[str, ...] = ("bshd", "bhsd"), plain: bool = False
) -> Inputs:
    size = st.integers(smallest, 5)
    batch, hkv, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    sq, sk, d, dv = draw(size), draw(size), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    hq = hkv * group
    arrays = [
        rng.normal(size=(batch, sq, hq, d)),
        rng.normal(size=(batch, sk, hkv, d)) + 0.5,
        rng.normal(size=(batch, sk, hkv, dv)) + 0.5,
        rng.normal(size=(batch, sq, hq, dv)),
    ]
    dlse = rng.normal(size=(batch, hq, sq)) if draw(st.booleans()) else None
    layout = draw(st.sampled_from(layouts))
    if layout == "bhsd":
        arrays = [x.swapaxes(1, 2) for x in arrays]
    if batch == 1 and draw(st.booleans()):
        arrays, dlse = [x[0] for x in arrays], None if dlse is None else dlse[0]
    more = {} if plain else draw(options_of(rng, (batch, hq, sq, sk)))
    return Inputs(
        *arrays,
        dlse,
        scale=draw(st.sampled_from([None, 0.7, -1.3])),
        causal=draw(st.booleans()),
        window=(draw(st.integers(-1, 4)), draw(st.integers(-1, 4))),
        layout=layout,
        **more,
    )


@st.composite
def options_of(draw, rng: np.random.Generator, shape: tuple[int, int, int, int]) -> dict[str, Any]:
    """Some of the options from softcap on."""
    given = draw(st.sets(st.sampled_from(["softcap", "bias", "mask", "alibi", "sinks", "dropout"])))
    options = {}
    if "softcap" in given:
        options["softcap"] = draw(st.sampled_from([0.5, 2.0]))
    for name in given & {"bias", "mask"}:
        axes = draw(st.sampled_from([2, 4]))
        broadcast = draw(st.lists(st.booleans(), min_size=axes, max_size=axes))
        x = rng.normal(
            size=[1 if one else n for n, one in zip(shape[-axes:], broadcast, strict=True)]
        )
        options[name] = np.where(x < -1, -np.inf, x) if name == "bias" else x > -1
    if "alibi" in given:
        options["alibi_slopes"] = rng.random(shape[: draw(st.sampled_from([1, 2]))][-2:])
        if options["alibi_slopes"].ndim == 1:
            options["alibi_slopes"] = rng.random(shape[1])
    if "sinks" in given:
        options["sinks"] = rng.normal(size=shape[1])
    if "dropout" in given:
        options["dropout_p"] = draw(st.sampled_from([0.1, 0.5, 1.0]))
        options["seed"] = draw(st.integers(-(2**70), 2**70))
    return options


def sizes(inputs: Inputs) -> tuple[int, int, int, int]:
    """Batch, query heads, queries and keys."""
    seq, heads = (-3, -2) if inputs.layout == "bshd" else (-2, -3)
    q, k = inputs.q, inputs.k
    return q.shape[0] if q.ndim == 4 else 1, q.shape[heads], q.shape[seq], k.shape[seq]


def sees(inputs: Inputs) -> np.ndarray:
    """The rule of visibility once more, pair by pair: (batch, Hq, Sq, Sk)."""
    left, right = inputs.window
    _, _, sq, sk = shape = sizes(inputs)
    seen = np.zeros(shape, bool)
    for i in range(sq):
        p = i + sk - sq
        for j in range(sk):
            too_late = inputs.causal and j > p
            outside = (left >= 0 and j < p - left) or (right >= 0 and j > p + right)
            seen[:, :, i, j] = not too_late and not outside
    if inputs.mask is not None:
        seen &= inputs.mask
    return seen if inputs.bias is None else seen & (inputs.bias > -np.inf)


def loss(inputs: Inputs) -> float:
    out, lse = forward(inputs)
    total = (out * inputs.dout).sum()
    if inputs.dlse is not None:
        total += (np.where(lse == -np.inf, 0.0, lse) * inputs.dlse).sum()
    return float(total)


def check_finite_differences(inputs: Inputs) -> None:
    grads, step = backward(inputs), 1e-5
    for name in ("q", "k", "v", "bias", "sinks"):
        x, got = getattr(inputs, name), getattr(grads, "d" + name)
        assert (x is None) == (got is None)
        if x is None:
            continue
        want = np.zeros(x.shape)
        for at in np.ndindex(x.shape):
            one = np.zeros(x.shape)
            one[at] = step
            up = loss(dataclasses.replace(inputs, **{name: x + one}))
            down = loss(dataclasses.replace(inputs, **{name: x - one}))
            want[at] = (up - down) / (2 * step)
        close(got, want, 1e-7)


@given(problems())
@settings(deadline=None, max_examples=60)
def test_gradients_are_finite_differences(inputs):
    check_finite_differences(inputs)


@given(problems())
@settings(deadline=None, max_examples=300)
def test_row_by_row(inputs):
    """One query of one head at a time, over the keys it sees and no others."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if inputs.q.ndim == 3:
        q, k, v = q[None], k[None], v[None]
    if inputs.layout == "bshd":
        q, k, v = q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2)
    batch, hq, sq, d = q.shape
    sk, group = k.shape[2], hq // k.shape[1]
    seen, scale, p = sees(inputs), inputs.scale or 1 / np.sqrt(d), inputs.dropout_p
    bias = np.broadcast_to(0.0 if inputs.bias is None else inputs.bias, seen.shape)
    slopes = np.broadcast_to(0 if inputs.alibi_slopes is None else inputs.alibi_slopes, (batch, hq))
    keep = dropout_keep(inputs.seed or 0, p, *seen.shape)
    want, want_lse = np.zeros((batch, hq, sq, v.shape[-1])), np.full((batch, hq, sq), -np.inf)
    for b, h, i in np.ndindex(batch, hq, sq):
        sink = -np.inf if inputs.sinks is None else inputs.sinks[h]
        want_lse[b, h, i] = sink
        keys = np.flatnonzero(seen[b, h, i])
        if keys.size:
            x = scale * k[b, h // group, keys] @ q[b, h, i]
            if inputs.softcap:
                x = inputs.softcap * np.tanh(x / inputs.softcap)
            x = x + bias[b, h, i, keys] - slopes[b, h] * abs(i + sk - sq - keys)
            weight, total = np.exp(x), np.exp(x).sum() + np.exp(sink)
            kept = weight * keep[b, h, i, keys] / max(1 - p, 1e-9)
            want[b, h, i] = kept @ v[b, h // group, keys] / total
            want_lse[b, h, i] = np.log(total)
    want = want.swapaxes(1, 2) if inputs.layout == "bshd" else want
    out, lse = forward(inputs)
    close(out, want.reshape(out.shape))
    close(lse, want_lse.reshape(lse.shape))


@given(problems(1, ("bhsd",), plain=True), st.sampled_from(["q", "k", "v", "dout"]), st.data())
@settings(deadline=None, max_examples=300)
def test_nan_reaches_what_sees_it_and_nothing_else(inputs, name, data):
    x = getattr(inputs, name)
    *outer, row, _ = data.draw(st.sampled_from(list(np.ndindex(x.shape))))
    poisoned = x.copy()
    poisoned[(*outer, row)] = np.nan
    bad = dataclasses.replace(inputs, **{name: poisoned})

    seen = sees(inputs)[0, 0]
    group = inputs.q.shape[-3] // inputs.k.shape[-3]
    head = outer[-1] if name in "kv" else outer[-1] // group
    # The queries hit, and the keys hit through them: of one key head and its query heads for a
    # key or value, of one query head and its key head for a query or dout.
    if name in "kv":
        rows, q_heads = seen[:, row], slice(head * group, (head + 1) * group)
    else:
        rows = (np.arange(len(seen)) == row) & seen[row].any()
        q_heads = slice(outer[-1], outer[-1] + 1)
    keys = seen[rows].any(axis=0)
    k_heads = slice(head, head + 1)

    out, lse = forward(inputs)
    dq, dk, dv = backward(inputs)
    hit = {
        "q": {"out", "lse", "dq", "dk", "dv"},
        "k": {"out", "lse", "dq", "dk", "dv"},
        "v": {"out", "dq", "dk"},
        "dout": {"dq", "dk", "dv"},
    }[name]
    want = {"out": out, "lse": lse[..., None], "dq": dq, "dk": dk, "dv": dv}
    for result, value in want.items():
        heads, where = (k_heads, keys) if result in ("dk", "dv") else (q_heads, rows)
        if result in hit:
            value[(*outer[:-1], heads)][..., where, :] = np.nan
    got_out, got_lse = forward(bad)
    got = dict(zip(want, [got_out, got_lse[..., None], *backward(bad)], strict=True))
    for result, value in want.items():
        np.testing.assert_allclose(got[result], value, rtol=1e-12, atol=1e-12, err_msg=result)


@given(problems(), st.sampled_from([np.nan, np.inf, -np.inf]))
@settings(deadline=None, max_examples=300)
def test_what_nobody_sees_does_not_matter(inputs, poison):
    seen = sees(inputs)
    batch, hq, _, sk = seen.shape
    hkv = inputs.k.shape[-2 if inputs.layout == "bshd" else -3]
    rows, keys = ~seen.any(axis=3), ~seen.any(axis=2)
    keys = keys.reshape(batch, hkv, hq // hkv, sk).all(axis=2)
    changed = {}
    for name, dead in (("q", rows), ("dout", rows), ("k", keys), ("v", keys)):
        dead = dead[..., None] if inputs.layout == "bhsd" else dead.swapaxes(1, 2)[..., None]
        x = getattr(inputs, name)
        changed[name] = np.where(dead if x.ndim == 4 else dead[0], poison, x)
    if inputs.dlse is not None and inputs.sinks is None:
        changed["dlse"] = np.where(rows.reshape(inputs.dlse.shape), poison, inputs.dlse)
    if inputs.bias is not None and inputs.bias.shape == seen.shape:
        changed["bias"] = np.where(seen | (inputs.bias == -np.inf), inputs.bias, poison)
    got, want = results(dataclasses.replace(inputs, **changed)), results(inputs)
    for name in want:
        close(got[name], want[name])


def test_visible_infinity_shows_as_arithmetic_shows_it():
    v = np.array([[1.0, 2.0], [np.inf, 4.0]]).reshape(2, 1, 2)
    x = np.zeros((2, 1, 1))
    out = attention(x, x, v, causal=True)
    assert out[:, 0].tolist() == [[1.0, 2.0], [np.inf, 3.0]]
    # Weight 0 by underflow is still a visible key: 0 * inf.
    k = np.array([0.0, -1e4]).reshape(2, 1, 1)
    out = attention(np.ones((1, 1, 1)), k, v)
    np.testing.assert_array_equal(out.ravel(), [np.nan, 2.0])


# ---------------------------------------------------------------- options, one and two at a time


def one_of_each() -> dict[str, dict[str, Any]]:
    """Options for `small`: 2 entries, 2 query heads on 1 key head, 4 queries, 3 keys."""
    rng = np.random.default_rng(5)
    bias = rng.normal(size=(2, 1, 4, 3))
    bias[0, 0, :, 1] = bias[1, 0, 2] = -np.inf
    mask = rng.random((1, 2, 4, 3)) < 0.7
    return {
        "causal": {"causal": True},
        "window": {"window": (1, 1)},
        "softcap": {"softcap": 0.8},
        "bias": {"bias": bias},
        "mask": {"mask": mask},
        "alibi": {"alibi_slopes": rng.random((2, 2))},
        "sinks": {"sinks": rng.normal(size=2)},
        "dropout": {"dropout_p": 0.3, "seed": 7},
        "dlse": {"dlse": rng.normal(size=(2, 2, 4))},
    }


def small(*names: str) -> Inputs:
    rng = np.random.default_rng(6)
    shapes = [(2, 4, 2, 2), (2, 3, 1, 2), (2, 3, 1, 2), (2, 4, 2, 2)]
    given: dict[str, Any] = {}
    for name in names:
        given |= one_of_each()[name]
    return Inputs(*(rng.normal(size=shape) for shape in shapes), **given)


NAMES = list(one_of_each())


@pytest.mark.parametrize(
    "names", [*itertools.combinations_with_replacement(NAMES, 2)], ids="-".join
)
def test_pairs_of_options_are_finite_differences(names):
    check_finite_differences(small(*names))


def test_all_options_together_are_finite_differences():
    check_finite_differences(small(*NAMES))


@pytest.mark.parametrize("name", NAMES)
def test_every_option_changes_the_results(name):
    changed, plain = results(small(name)), results(small())
    assert all((changed[n] != plain[n]).any() for n in ("dq", "dk"))


def waves(*shape: int, start: int = 0) -> np.ndarray:
    n = np.arange(start, start + np.prod(shape))
    return np.round(2 * np.sin(n**2 * 0.7 + start), 3).reshape(shape)


# From another implementation of the definition, in float64, rounded.
EXPECTED = {
    "plain": {
        "out": [-1.443932, -1.539882, -1.315888, -1.449004, 1.31451, 1.299458, 0.66723, 0.672125],
        "dq": [
            *[0.824946, -1.805356, -0.97085, -2.174669, 0.055059, -0.24924, 0.128109, -1.73254],
            *[-0.049877, -1.197421, 0.041592, -0.786461, -0.511541, -2.002163, -0.118505],
            -1.252985,
        ],
    },
    "softcap": {
        "out": [-1.459696, -1.534868, -1.333806, -1.446572, 1.304342, 1.290645, 0.655523, 0.66014],
        "dq": [
            *[0.031101, -0.616005, -0.782213, -1.691071, 0.010745, -0.192368, 0.173673, -1.446472],
            *[-0.047473, -1.129096, 0.028714, -0.789686, -0.136007, -0.482268, -0.101233],
            -1.018605,
        ],
    },
    "bias": {
        "out": [-1.367, -1.367, -1.370798, -1.564714, 1.36194, 1.349186, 0.656505, 0.541723],
        "dbias": [
            *[-3.255, 0.0, 0.0, 0.419915, -1.75449, 0.528575, -2.723624, -0.317376, 0.0, -0.834362],
            *[1.458086, -0.324724],
        ],
    },
    "mask": {
        "out": [-1.443932, -1.571, -1.315888, -1.504165, 1.31451, 0.653, 0.66723, -0.093688],
    },
    "alibi": {
        "out": [-1.468908, -1.545919, -1.293676, -1.449547, 1.221662, 1.253618, 0.648514, 0.46845],
    },
    "sinks": {
        "out": [-1.366331, -0.715501, -1.081636, -0.883222, 0.997021, 0.527101, 0.6097, 0.409122],
        "dsinks": [0.703007, -4.315776],
    },
    "dropout": {
        "out": [-1.135309, -2.053176, -1.754517, -1.199017, 0.219134, 1.498652, 0.895957, 0.896167],
        "dq": [
            *[1.149102, -1.854321, -0.925823, -2.18147, 0.099027, -0.296751, 1.469827, -2.18771],
            *[0.139621, 0.013103, 0.012502, -0.972288, -0.504156, -1.962386, -0.064322, -1.173316],
        ],
    },
    "all": {
        "out": [-1.564772, 0.0, -1.337393, -1.658976, 0.081383, 0.0, 0.777331, -0.015208],
        "lse": [1.455505, 0.588813, 1.0, 2.576658, -0.129433, 2.523139, 1.030699, 2.308448],
        "dq": [
            *[0.540435, -0.49693, 0.0, 0.0, 0.073309, -0.091384, -0.953927, -1.0202, 0.044485],
            *[-0.008215, 0.011131, 0.045273, -0.155589, -0.634649, -0.086663, -0.152301],
        ],
        "dk": [
            *[0.0, -0.34804, -0.098483, -0.386231, -0.095156, -0.098314, -0.29579, -0.061226],
            *[0.791984, -1.271386, 0.715728, -0.34629],
        ],
        "dv": [0.302194, 0.183203, 0.321017, 0.0, 1.505633, -0.571746],
        "dbias": [
            *[-1.23203, 0.0, 0.0, 0.0, -1.321241, 0.050699, -0.26783, -0.311004, 0.0, 0.0],
            *[1.264375, -0.534015],
        ],
        "dsinks": [0.304679, -4.756634],
    },
}


@pytest.mark.parametrize("name", EXPECTED)
def test_values_of_another_implementation(name):
    bias, mask = waves(2, 1, 2, 3, start=70), np.ones((1, 2, 1, 3), bool)
    bias[0, 0, 0, 1], mask[0, 1, 0, 0] = -np.inf, False
    options: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": 1.5},
        "bias": {"bias": bias},
        "mask": {"mask": mask},
        "alibi": {"alibi_slopes": np.array([0.5, 0.25])},
        "sinks": {"sinks": np.array([-0.5, 1.0])},
        "dropout": {"dropout_p": 0.25, "seed": 11},
    }
    given = options.get(name, {})
    if name == "all":
        given = {"window": (1, -1)}
        for option in options.values():
            given |= option
    arrays = [waves(2, 2, 2, 2), waves(2, 3, 1, 2, start=20), waves(2, 3, 1, 1, start=40)]
    arrays += [waves(2, 2, 2, 1, start=50), waves(2, 2, 2, start=60)]
    got = results(Inputs(*arrays, scale=0.8, causal=True, **given))
    for result, want in EXPECTED[name].items():
        close(got[result].ravel(), want, 1e-6)


@pytest.mark.parametrize("ones", [*itertools.product([False, True], repeat=4)], ids=str)
def test_bias_and_mask_of_any_broadcast_shape(ones):
    full = (2, 2, 4, 3)
    shape = tuple(1 if one else n for n, one in zip(full, ones, strict=True))
    rng = np.random.default_rng(3)
    bias, mask = rng.normal(size=shape), rng.random(shape) < 0.7
    inputs = dataclasses.replace(small("sinks", "dlse"), bias=bias, mask=mask)
    wide = dataclasses.replace(
        inputs, bias=np.broadcast_to(bias, full), mask=np.broadcast_to(mask, full)
    )
    got, want = results(inputs), results(wide)
    axes = tuple(n for n, one in enumerate(ones) if one)
    want["dbias"] = want["dbias"].sum(axis=axes, keepdims=True)
    assert got["dbias"].shape == shape
    for name in want:
        close(got[name], want[name])
    if ones[0] and ones[1]:
        flat = results(dataclasses.replace(inputs, bias=bias[0, 0], mask=mask[0, 0]))
        assert flat["dbias"].shape == shape[2:]
        for name in want:
            close(flat[name].ravel(), want[name].ravel())
    turned = {n: getattr(inputs, n).swapaxes(1, 2) for n in ("q", "k", "v", "dout")}
    heads_first = results(dataclasses.replace(inputs, layout="bhsd", **turned))
    close(heads_first["out"].swapaxes(1, 2), want["out"])
    close(heads_first["dbias"], want["dbias"])


@pytest.mark.parametrize(
    "options",
    [
        {"bias": np.zeros((2, 4, 3))},
        {"mask": np.ones((2, 4, 3), bool)},
        {"bias": np.zeros((3, 1, 4, 3))},
        {"bias": np.zeros((4, 2))},
        {"mask": np.ones((1, 3, 4, 3), bool)},
        {"alibi_slopes": np.ones(1)},
        {"alibi_slopes": np.ones((1, 2))},
        {"sinks": np.ones(1)},
        {"sinks": np.ones((2, 2))},
        {"softcap": -1.0},
        {"softcap": np.nan},
        {"dropout_p": 0.5},
        {"dropout_p": 1.5, "seed": 1},
        {"dropout_p": -0.5, "seed": 1},
    ],
    ids=str,
)
def test_options_that_do_not_fit_are_errors(options):
    i = small()
    with pytest.raises(ValueError):
        attention(i.q, i.k, i.v, **options)
    with pytest.raises(ValueError):
        attention_backward(i.dout, i.q, i.k, i.v, **options)


def test_a_mask_of_numbers_is_an_error():
    i = small()
    with pytest.raises(TypeError, match="mask"):
        attention(i.q, i.k, i.v, mask=np.zeros((4, 3)))


def test_rows_without_keys():
    inputs = dataclasses.replace(small("dlse"), mask=np.arange(4)[:, None] % 2 * np.ones(3) > 0)
    out, lse = forward(inputs)
    assert not out[:, ::2].any() and (lse[:, :, ::2] == -np.inf).all()
    assert not backward(inputs).dq[:, ::2].any()
    sinks = np.array([-3.0, 40.0])
    with_sinks = dataclasses.replace(inputs, sinks=sinks)
    out, lse = forward(with_sinks)
    assert not out[:, ::2].any() and (lse[:, :, ::2] == sinks[:, None]).all()
    grads = backward(with_sinks)
    assert not grads.dq[:, ::2].any()
    # There the whole gradient of lse is that of the sink, whatever dout is.
    dlse = np.where(np.arange(4) % 2, 0.0, inputs.dlse)
    dout = np.where(np.arange(4)[:, None, None] % 2, 0.0, np.nan)
    dout = np.broadcast_to(dout, inputs.dout.shape)
    close(
        backward(dataclasses.replace(with_sinks, dlse=dlse, dout=dout)).dsinks,
        dlse.sum(axis=(0, 2)),
    )
    # A sink of -inf is none.
    none = dataclasses.replace(with_sinks, sinks=np.full(2, -np.inf))
    got, want = results(none), results(inputs)
    assert got.pop("dsinks").tolist() == [0.0, 0.0]
    for name in want:
        close(got[name], want[name])


def test_longdouble_stays_longdouble():
    inputs = small(*NAMES).moved(lambda x: x.astype(np.longdouble) if x.dtype == float else x)
    double = results(small(*NAMES))
    for name, x in results(inputs).items():
        assert x.dtype == np.longdouble
        error = np.abs(np.where(x == double[name], 0, x - double[name]))
        assert error.max() < 1e-14
        assert error.max() > 0


# ---------------------------------------------------------------- dropout


@pytest.mark.parametrize(
    "counter, key, want",
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (
            [0xFFFFFFFF] * 4,
            [0xFFFFFFFF] * 2,
            [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD],
        ),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_values(counter, key, want):
    words = dropout.philox([np.array([x], np.uint64) for x in counter], tuple(key))
    assert [int(x[0]) for x in words] == want


def test_dropout_is_the_documented_function():
    """Once more in whole numbers, element by element, with large indices and seeds."""
    low = 2**32 - 1
    for seed, b in ((0, 0), (-1, 3), (2**64 + 5, 2**33 + 1), (123456789123456789, 2**32)):
        keep = dropout.kept(seed, 0.3, np.array([b]), 3, 4, 50)
        for h, i in np.ndindex(3, 4):
            counter = [np.array([x], np.uint64) for x in (i, h, b & low, b >> 32)]
            key = (seed % 2**64 & low, seed % 2**64 >> 32)
            first, second, *_ = (int(x[0]) for x in dropout.philox(counter, key))
            for j in range(50):
                x = (first + j * 0x9E3779B9) & low
                x = ((x ^ x >> 16) * 0x85EBCA6B) & low
                x ^= second
                x = ((x ^ x >> 13) * 0xC2B2AE35) & low
                x ^= x >> 16
                assert keep[0, h, i, j] == (x >= round(0.3 * 2**32))


def test_dropout_depends_on_the_indices_alone():
    large = dropout_keep(9, 0.4, 3, 4, 20, 30)
    np.testing.assert_array_equal(dropout_keep(9, 0.4, 2, 3, 7, 11), large[:2, :3, :7, :11])
    np.testing.assert_array_equal(dropout_keep(9 + 2**64, 0.4, 3, 4, 20, 30), large)
    more = dropout_keep(9, 0.6, 3, 4, 20, 30)
    assert (more <= large).all() and (more != large).any()
    for shape in ((0, 4, 20, 30), (3, 4, 0, 30), (3, 4, 20, 0)):
        assert dropout_keep(9, 0.4, *shape).shape == shape


@pytest.mark.parametrize("p", [0.0, 1e-12, 0.1, 0.5, 0.9, 1.0])
def test_rate_of_dropout(p):
    keep = dropout_keep(1, p, 4, 8, 128, 256)
    for axes in ((), (3,), (2,), (2, 3)):  # elements at a time: all, per row, per key, per head
        rates = keep.mean() if not axes else keep.mean(axis=axes)
        count = keep.size / np.size(rates)
        assert np.abs(rates - (1 - p)).max() <= 6 * np.sqrt(p * (1 - p) / count) + 1e-9


def test_neighbours_drop_independently():
    keep = dropout_keep(1, 0.3, 4, 8, 128, 256)
    others = [np.roll(keep, n, axis) for axis, n in itertools.product(range(4), (1, 2, 3))]
    others += [np.roll(keep, n, (2, 3)) for n in ((1, 1), (-1, 1), (16, 0), (0, 16), (0, 64))]
    others += [dropout_keep(seed, 0.3, 4, 8, 128, 256) for seed in (0, 2, 1 + 2**32, 2**63 + 1)]
    for other in others:  # both keep 49 in 100
        assert abs((keep & other).mean() - 0.49) < 6 * np.sqrt(0.49 * 0.51 / keep.size)
    # Rows differ as those of a fair draw.
    counts = keep.sum(axis=3)
    assert 0.9 < counts.var() / (256 * 0.21) < 1.1


def test_dropping_nothing_and_everything():
    plain = small("sinks", "dlse", "bias")
    nothing = dataclasses.replace(plain, dropout_p=1e-12, seed=1)
    everything = dataclasses.replace(plain, dropout_p=1.0, seed=1)
    want, got, none = results(plain), results(nothing), results(everything)
    for name in want:
        close(got[name], want[name], 1e-9)
    close(none["lse"], want["lse"])
    assert not none["out"].any() and not none["dv"].any()
    # What is left is the gradient through lse.
    through_lse = results(dataclasses.replace(plain, dout=np.zeros_like(plain.dout)))
    for name in ("dq", "dk", "dbias", "dsinks"):
        close(none[name], through_lse[name])


def test_dropout_hides_nothing():
    i = small("dropout")
    v = i.v.copy()
    v[0, 0] = np.nan
    assert np.isnan(attention(i.q, i.k, v, dropout_p=1.0, seed=0)[0]).all()


# ---------------------------------------------------------------- packed sequences


CU_Q, CU_K = [1, 4, 4, 9, 11], [0, 2, 5, 11, 11]  # with rows that belong to no entry


def packed(*names: str, layout: str = "bshd") -> Inputs:
    """Entries of 3 to 2, 0 to 3, 5 to 6 and 2 to 0 rows and keys, with NaN around them."""
    rng = np.random.default_rng(8)
    shapes = [(12, 4, 3), (13, 2, 3), (13, 2, 2), (12, 4, 2)]
    arrays = [rng.normal(size=shape) for shape in shapes]
    for x, cu in zip(arrays, (CU_Q, CU_K, CU_K, CU_Q), strict=True):
        x[: cu[0]] = x[cu[-1] :] = np.nan
    if layout == "bhsd":
        arrays = [x.swapaxes(0, 1) for x in arrays]
    dlse = rng.normal(size=(4, 12))
    dlse[:, :1] = dlse[:, 11:] = np.nan
    options: dict[str, dict[str, Any]] = {
        **one_of_each(),
        "bias": {"bias": rng.normal(size=(4, 1, 5, 7))},
        "mask": {"mask": rng.random((1, 4, 6, 6)) < 0.7},
        "alibi": {"alibi_slopes": rng.random((4, 4))},
        "sinks": {"sinks": rng.normal(size=4)},
        "dlse": {"dlse": dlse},
    }
    options["bias"]["bias"][2, 0, 1:3] = -np.inf
    given: dict[str, Any] = {}
    for name in names:
        given |= options[name]
    cu_seqlens = {"cu_seqlens_q": np.array(CU_Q, np.int32), "cu_seqlens_k": np.array(CU_K)}
    return Inputs(*arrays, layout=layout, **cu_seqlens, **given)


def entry_alone(inputs: Inputs, b: int) -> dict[str, np.ndarray]:
    """Results of an entry, as the last one of a batch in which only it has gradients."""
    i, j = slice(CU_Q[b], CU_Q[b + 1]), slice(CU_K[b], CU_K[b + 1])
    whole, rows, keys = slice(None), slice(i.stop - i.start), slice(j.stop - j.start)

    def batch(x: np.ndarray | None, at: slice, last: bool = False) -> np.ndarray | None:
        if x is None:
            return None
        x = x[at] if x.ndim == 3 and inputs.layout == "bshd" else x[:, at]
        return np.stack([x * (not last)] * b + [x])

    own: dict[str, Any] = {n: batch(getattr(inputs, n), j) for n in ("k", "v")}
    own |= {"q": batch(inputs.q, i), "dout": batch(inputs.dout, i, last=True)}
    own["dlse"] = batch(inputs.dlse, i, last=True)
    for name, at in (("bias", b), ("mask", 0)):
        if (x := getattr(inputs, name)) is not None:
            own[name] = x[at : at + 1, whole, rows, keys]
    if inputs.alibi_slopes is not None:
        own["alibi_slopes"] = inputs.alibi_slopes[b]
    part = results(dataclasses.replace(inputs, cu_seqlens_q=None, cu_seqlens_k=None, **own))
    return {n: x if n in ("dbias", "dsinks") else x[b] for n, x in part.items()}


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("names", [(), *((name,) for name in NAMES), tuple(NAMES)], ids="-".join)
def test_a_packed_call_is_separate_calls(names, layout):
    inputs = packed(*names, layout=layout)
    axis = 0 if layout == "bshd" else 1
    shapes = {"q": "dq", "k": "dk", "v": "dv", "dout": "out", "bias": "dbias", "sinks": "dsinks"}
    given = {name: getattr(inputs, of) for of, name in shapes.items()}
    want = {name: np.zeros(x.shape) for name, x in given.items() if x is not None}
    want["lse"] = np.full((4, 12), -np.inf)
    for b in range(4):
        i, j = slice(CU_Q[b], CU_Q[b + 1]), slice(CU_K[b], CU_K[b + 1])
        part = entry_alone(inputs, b)
        want["lse"][:, i] = part["lse"]
        for name, at in (("out", i), ("dq", i), ("dk", j), ("dv", j)):
            np.moveaxis(want[name], axis, 0)[at] = np.moveaxis(part[name], axis, 0)
        if "dbias" in want:
            want["dbias"][b, :, : i.stop - i.start, : j.stop - j.start] = part["dbias"][0]
        if "dsinks" in want:
            want["dsinks"] += part["dsinks"]
    got = results(inputs)
    assert got.keys() == want.keys()
    for name in want:
        close(got[name], want[name])


@pytest.mark.parametrize("name", NAMES)
def test_packed_gradients_are_finite_differences(name):
    inputs = packed(name)
    # Finite where nobody looks, or the loss is not.
    clean = inputs.moved(lambda x: np.nan_to_num(x, neginf=-np.inf))
    check_finite_differences(clean)


@pytest.mark.parametrize("shape", [(5, 6), (1, 6), (8, 1), (1, 1), (4, 1, 5, 1), (1, 4, 1, 9)])
def test_packed_bias_and_mask_of_any_broadcast_shape(shape):
    rng = np.random.default_rng(3)
    bias, mask = rng.normal(size=shape), rng.random(shape) < 0.8
    inputs = dataclasses.replace(packed(), bias=bias, mask=mask)
    # In full, and longer than any entry.
    full = (4, 4, max(shape[-2], 5) + 1, max(shape[-1], 6) + 2)
    longer = [(0, (m - n) * (n > 1)) for n, m in zip(shape[::-1], full[::-1], strict=False)][::-1]
    wide = [np.broadcast_to(np.pad(x, longer), full) for x in (bias, mask)]
    got, want = results(inputs), results(dataclasses.replace(inputs, bias=wide[0], mask=wide[1]))
    summed = tuple(n for n, size in enumerate((1, 1, *shape)[-4:]) if size == 1)
    dbias = want.pop("dbias").sum(axis=summed, keepdims=True)
    dbias = dbias.reshape(dbias.shape[-len(shape) :])
    close(got.pop("dbias"), dbias[tuple(slice(n) for n in shape)])
    for name in want:
        close(got[name], want[name])


@pytest.mark.parametrize(
    "changes",
    [
        {"cu_seqlens_q": np.array([0, 4, 13])},
        {"cu_seqlens_q": np.array([0, 4, 3, 5, 6])},
        {"cu_seqlens_q": np.array([-1, 4, 4, 9, 11])},
        {"cu_seqlens_q": np.array([1, 4, 9, 11])},
        {"cu_seqlens_k": np.array([0, 2, 5, 11, 14], np.uint32)},
        {"cu_seqlens_q": np.array([]), "cu_seqlens_k": np.array([])},
        {"cu_seqlens_q": np.zeros((1, 5), int)},
        {"bias": np.zeros((3, 1, 5, 6))},
        {"bias": np.zeros((4, 6))},
        {"bias": np.zeros((5, 5))},
        {"mask": np.ones((1, 5, 5, 6), bool)},
        {"alibi_slopes": np.ones((3, 4))},
    ],
    ids=str,
)
def test_packed_calls_that_do_not_fit_are_errors(changes):
    inputs = dataclasses.replace(packed(), **changes)
    with pytest.raises(ValueError):
        forward(inputs)
    with pytest.raises(ValueError):
        backward(inputs)


def test_lists_are_arrays_and_shapes_are_named():
    i = small()
    expected = attention_backward(i.dout, i.q, i.k, i.v)
    lists = attention_backward(*(x.tolist() for x in (i.dout, i.q, i.k, i.v)))
    for name in ("dq", "dk", "dv"):
        assert np.array_equal(getattr(lists, name), getattr(expected, name))
    assert np.array_equal(attention(i.q.tolist(), i.k, i.v), attention(i.q, i.k, i.v))
    message = rf"do not fit together with layout='bshd': q {i.q.shape}, k {i.k[:, :1].shape}, v "
    with pytest.raises(ValueError, match=re.escape(message)):
        attention(i.q, i.k[:, :1], i.v)


def test_packed_arrays_have_no_batch_axis():
    i = small()
    with pytest.raises(ValueError, match="3 axes"):
        attention_varlen(i.q, i.k, i.v, [0, 4], [0, 3])


def test_packed_with_no_entries():
    inputs = dataclasses.replace(
        packed("sinks"), cu_seqlens_q=np.array([2]), cu_seqlens_k=np.array([0])
    )
    got = results(inputs)
    assert (got.pop("lse") == -np.inf).all()
    assert not any(x.any() for x in got.values())


# ---------------------------------------------------------------- merging


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("batched", [True, False])
def test_merged_parts_are_the_whole(layout, batched):
    rng = np.random.default_rng(4)
    q, k, v = (
        rng.normal(size=(2, 5, 4, 3)),
        rng.normal(size=(2, 9, 2, 3)),
        rng.normal(size=(2, 9, 2, 2)),
    )
    mask, bias = rng.random((5, 9)) < 0.5, 50 * rng.normal(size=(5, 9))
    mask[1] = False
    mask[2, :6] = False
    parts = [slice(0, 1), slice(1, 1), slice(1, 6), slice(6, 9)]

    def part(keys: slice) -> Any:
        arrays = [q, k[:, keys], v[:, keys]]
        arrays = arrays if layout == "bshd" else [x.swapaxes(1, 2) for x in arrays]
        arrays = arrays if batched else [x[0] for x in arrays]
        options = {"bias": bias[:, keys], "mask": mask[:, keys], "layout": layout}
        return attention(*arrays, **options, return_lse=True)

    outs, lses = zip(*(part(keys) for keys in parts), strict=True)
    row = np.arange(5)[:, None] if layout == "bhsd" else np.arange(5)[:, None, None]
    outs = [np.where((row == 2) & (n < 3), np.nan, x) for n, x in enumerate(outs)]
    out, lse = merge_states(outs, lses, layout=layout)
    want, want_lse = part(slice(9))
    close(out, want)
    close(lse, want_lse)
    assert (lse[..., 1] == -np.inf).all()


def test_merge_is_exact_for_large_and_distant_parts():
    outs = [np.full((1, 1, 1), x) for x in (1.0, 3.0, 7.0)]
    lses = [np.full((1, 1), x) for x in (1e5, 1e5, -1e5)]
    out, lse = merge_states(outs, lses)
    close(out.item(), 2.0)
    close(lse.item(), 1e5 + np.log(2))
    longer = merge_states([x.astype(np.longdouble) for x in outs], lses)
    assert longer[0].dtype == np.longdouble


@pytest.mark.parametrize("distance", [800.0, 745.0])  # exp(-745) / 3 underflows, exp(-745) not yet
def test_merge_ignores_parts_of_no_weight(distance):
    outs = [np.full((1, 1, 1), x) for x in (1.0, np.nan, 1.0, 4.0)]
    out, lse = merge_states(outs, [np.full((1, 1), x) for x in (0.0, -distance, 0.0, 0.0)])
    close(out.item(), 2.0)
    close(lse.item(), np.log(3))
    out, lse = merge_states([np.full((1, 1, 1), np.nan)] * 2, [np.full((1, 1), -np.inf)] * 2)
    assert out.item() == 0 and lse.item() == -np.inf
    for odd in (np.nan, np.inf):
        out, lse = merge_states(outs[::2], [np.full((1, 1), x) for x in (0.0, odd)])
        assert np.isnan(out.item())
        np.testing.assert_equal(lse.item(), odd)


def test_merging_what_does_not_fit_is_an_error():
    out, lse = np.zeros((2, 5, 4, 3)), np.zeros((2, 4, 5))
    for outs, lses in (([], []), ([out], []), ([out], [lse[0]]), ([out], [lse.swapaxes(1, 2)])):
        with pytest.raises(ValueError):
            merge_states(outs, lses)


@pytest.mark.parametrize("seed", [7, np.int64(7), np.array(7), np.array([7], np.int64), 7 + 2**64])
def test_a_seed_is_any_integer(seed: Any) -> None:
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 9, 2, 4))
    want = attention(q, k, v, dropout_p=0.5, seed=7)
    np.testing.assert_array_equal(attention(q, k, v, dropout_p=0.5, seed=seed), want)
