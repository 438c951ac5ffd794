# SPDX-License-Identifier: Apache-2.0
"""The float64 reference against values worked out by hand, finite differences and poison."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from check import Inputs
from hypothesis import given, settings
from hypothesis import strategies as st

from cuflash.reference import attention, attention_backward

LN3 = np.log(3.0)


def forward(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    out, lse = attention(inputs.q, inputs.k, inputs.v, **inputs.options, return_lse=True)
    return out, lse


def backward(inputs: Inputs) -> Any:
    i = inputs
    return attention_backward(i.dout, i.q, i.k, i.v, dlse=i.dlse, **i.options)


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
def problems(draw, smallest: int = 0, layouts: tuple[str, ...] = ("bshd", "bhsd")) -> Inputs:
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
    return Inputs(
        *arrays,
        dlse,
        scale=draw(st.sampled_from([None, 0.7, -1.3])),
        causal=draw(st.booleans()),
        window=(draw(st.integers(-1, 4)), draw(st.integers(-1, 4))),
        layout=layout,
    )


def sees(inputs: Inputs, sq: int, sk: int) -> np.ndarray:
    """The rule of visibility once more, pair by pair."""
    left, right = inputs.window
    seen = np.zeros((sq, sk), bool)
    for i in range(sq):
        p = i + sk - sq
        for j in range(sk):
            too_late = inputs.causal and j > p
            outside = (left >= 0 and j < p - left) or (right >= 0 and j > p + right)
            seen[i, j] = not too_late and not outside
    return seen


def loss(inputs: Inputs) -> float:
    out, lse = forward(inputs)
    total = (out * inputs.dout).sum()
    if inputs.dlse is not None:
        total += (np.where(lse == -np.inf, 0.0, lse) * inputs.dlse).sum()
    return float(total)


@given(problems())
@settings(deadline=None, max_examples=60)
def test_gradients_are_finite_differences(inputs):
    step = 1e-5
    for name, got in zip("qkv", backward(inputs), strict=True):
        x = getattr(inputs, name)
        want = np.zeros(x.shape)
        for at in np.ndindex(x.shape):
            one = np.zeros(x.shape)
            one[at] = step
            up = loss(dataclasses.replace(inputs, **{name: x + one}))
            down = loss(dataclasses.replace(inputs, **{name: x - one}))
            want[at] = (up - down) / (2 * step)
        close(got, want, 1e-7)


@given(problems())
@settings(deadline=None)
def test_row_by_row(inputs):
    """One query of one head at a time, over the keys it sees and no others."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if inputs.q.ndim == 3:
        q, k, v = q[None], k[None], v[None]
    if inputs.layout == "bshd":
        q, k, v = q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2)
    batch, hq, sq, d = q.shape
    seen, group = sees(inputs, sq, k.shape[2]), hq // k.shape[1]
    scale = inputs.scale or 1 / np.sqrt(d)
    want, want_lse = np.zeros((batch, hq, sq, v.shape[-1])), np.full((batch, hq, sq), -np.inf)
    for b, h, i in np.ndindex(batch, hq, sq):
        keys = seen[i]
        if keys.any():
            weight = np.exp(scale * k[b, h // group, keys] @ q[b, h, i])
            want[b, h, i] = weight @ v[b, h // group, keys] / weight.sum()
            want_lse[b, h, i] = np.log(weight.sum())
    want = want.swapaxes(1, 2) if inputs.layout == "bshd" else want
    out, lse = forward(inputs)
    close(out, want.reshape(out.shape))
    close(lse, want_lse.reshape(lse.shape))


@given(problems(smallest=1, layouts=("bhsd",)), st.sampled_from(["q", "k", "v", "dout"]), st.data())
@settings(deadline=None, max_examples=300)
def test_nan_reaches_what_sees_it_and_nothing_else(inputs, name, data):
    x = getattr(inputs, name)
    *outer, row, _ = data.draw(st.sampled_from(list(np.ndindex(x.shape))))
    poisoned = x.copy()
    poisoned[(*outer, row)] = np.nan
    bad = dataclasses.replace(inputs, **{name: poisoned})

    seen = sees(inputs, inputs.q.shape[-2], inputs.k.shape[-2])
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
@settings(deadline=None)
def test_what_nobody_sees_does_not_matter(inputs, poison):
    axis = -3 if inputs.layout == "bshd" else -2
    seen = sees(inputs, inputs.q.shape[axis], inputs.k.shape[axis])
    dead = {"q": ~seen.any(axis=1), "k": ~seen.any(axis=0)}
    dead.update(dout=dead["q"], v=dead["k"])
    changed = {}
    for name, rows in dead.items():
        x = np.moveaxis(getattr(inputs, name), axis, 0).copy()
        x[rows] = poison
        changed[name] = np.moveaxis(x, 0, axis)
    if inputs.dlse is not None:
        changed["dlse"] = np.where(dead["q"], poison, inputs.dlse)
    bad = dataclasses.replace(inputs, **changed)
    for got, want in zip(
        [*forward(bad), *backward(bad)], [*forward(inputs), *backward(inputs)], strict=True
    ):
        close(got, want)


def test_visible_infinity_shows_as_arithmetic_shows_it():
    v = np.array([[1.0, 2.0], [np.inf, 4.0]]).reshape(2, 1, 2)
    x = np.zeros((2, 1, 1))
    out = attention(x, x, v, causal=True)
    assert out[:, 0].tolist() == [[1.0, 2.0], [np.inf, 3.0]]
    # Weight 0 by underflow is still a visible key: 0 * inf.
    k = np.array([0.0, -1e4]).reshape(2, 1, 1)
    out = attention(np.ones((1, 1, 1)), k, v)
    np.testing.assert_array_equal(out.ravel(), [np.nan, 2.0])
