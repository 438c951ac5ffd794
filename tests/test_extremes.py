# SPDX-License-Identifier: Apache-2.0
"""Scales, caps, sinks and products near the ends of what numbers can hold, in every family."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import Backend
from matrix import OPTION_ROWS, ROWS, Row
from run import using

import cuflash
from cuflash import reference


def _rows(rows: list[Row]) -> list[Row]:
    """Return one row of few registers and small tiles for each family and dtype of 16 bits."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row.dtype in ("float16", "bfloat16") and "shipped" not in row.name:
            found.setdefault((row.family("forward"), row.dtype), row)
    return list(found.values())


PLAIN, OPTIONS = _rows(ROWS), _rows(OPTION_ROWS)
each_plain = pytest.mark.parametrize("row", PLAIN, ids=lambda row: row.name)
each_option = pytest.mark.parametrize("row", OPTIONS, ids=lambda row: row.name)


def test_there_is_a_row_of_each_family() -> None:
    assert {row.family("forward") for row in PLAIN} == {"simt", "mma", "sm90"}
    assert {row.family("forward") for row in OPTIONS} == {"simt", "mma", "sm90"}


def _dtype(row: Row) -> Any:
    return np.dtype(ml_dtypes.bfloat16 if row.dtype == "bfloat16" else np.float16)


def _normal(row: Row, seed: int, seq: int, heads: int = 1, *, of_v: bool = False) -> np.ndarray:
    """Return numbers for q or k, or for v, out and dout, of the largest head sizes of a row."""
    dim = row.head_dim_v if of_v else row.head_dim
    return np.random.default_rng(seed).standard_normal((1, seq, heads, dim))


def _forward(backend: Backend, row: Row, *arrays: np.ndarray, **options: Any) -> Any:
    given = [backend.array(x.astype(_dtype(row))) for x in arrays]
    options = {
        name: backend.array(x) if isinstance(x, np.ndarray) else x for name, x in options.items()
    }
    with using(row.forward, row.backward):
        out, lse = cuflash.attention(*given, return_lse=True, **options)
    return backend.host(out).astype(float), backend.host(lse).astype(float)


@each_plain
@pytest.mark.parametrize("scale", [0.0, 1e-38, -1e-38])
def test_a_scale_near_zero_makes_all_scores_alike(backend: Backend, row: Row, scale: float) -> None:
    huge = 1e16 if row.dtype == "bfloat16" else 6e4
    q, k = (huge * np.sign(_normal(row, i, 70, 2)) for i in range(2))
    v = _normal(row, 2, 70, 2, of_v=True)
    out, lse = _forward(backend, row, q, k, v, scale=scale)
    mean = v.astype(_dtype(row)).astype(float).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(out, np.broadcast_to(mean, out.shape), atol=1e-2)
    np.testing.assert_allclose(lse, np.log(70), rtol=1e-4)


@each_plain
def test_a_scale_near_the_largest_number_leaves_scores_finite(backend: Backend, row: Row) -> None:
    tiny = 2.0**-60 if row.dtype == "bfloat16" else 0.0
    q, k = (_normal(row, i, 40, 2) for i in range(2))
    v = _normal(row, 2, 40, 2, of_v=True)
    q, k = np.sign(q) * tiny, np.sign(k) * tiny
    out, lse = _forward(backend, row, q, k, v, scale=3e38)
    inputs = (x.astype(_dtype(row)) for x in (q, k, v))
    want, want_lse = reference.attention(*inputs, scale=3e38, return_lse=True)
    np.testing.assert_allclose(out, want.astype(float), atol=1e-2)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5)


@each_option
@pytest.mark.parametrize("cap", [50.0, 1e4])
def test_a_score_beyond_the_cap_costs_other_rows_nothing(
    backend: Backend, row: Row, cap: float
) -> None:
    q, k = (_normal(row, i, 48) for i in range(2))
    v = _normal(row, 2, 48, of_v=True)
    q[0, 5] *= 4 * cap / np.abs(q[0, 5, 0] @ k[0, :, 0].T).max()
    out, lse = _forward(backend, row, q, k, v, scale=1.0, softcap=cap)
    inputs = (x.astype(_dtype(row)) for x in (q, k, v))
    want, want_lse = reference.attention(*inputs, scale=1.0, softcap=cap, return_lse=True)
    others = np.arange(48) != 5
    np.testing.assert_allclose(lse[..., others], want_lse[..., others], rtol=3e-7, atol=2e-6)
    np.testing.assert_allclose(lse, want_lse, rtol=3e-7, atol=2e-7 * cap)
    np.testing.assert_allclose(out, want.astype(float), atol=2e-2)


@each_option
def test_a_sink_that_drowns_keys_hides_none_of_their_gradient(backend: Backend, row: Row) -> None:
    q, k = (_normal(row, i, 4) for i in range(2))
    v, dout = (_normal(row, i, 4, of_v=True) for i in range(2, 4))
    q, v[0, 1] = 0 * q, np.nan
    sinks = np.array([30.0], np.float32)
    dtype = _dtype(row)
    given = [backend.array(x.astype(dtype)) for x in (q, k, v)]
    with using(row.forward, row.backward):
        at = backend.array(sinks)
        out, lse = cuflash.attention(*given, sinks=at, return_lse=True)
        dout_given = backend.array(dout.astype(dtype))
        grads = cuflash.attention_backward(dout_given, *given, out, lse, sinks=at)
    assert np.isnan(backend.host(grads.dsinks)).all()


@each_plain
def test_nan_reaches_keys_whose_weight_is_too_small_for_a_number(
    backend: Backend, row: Row
) -> None:
    """Whatever tile a key is in: a row that NaN has reached makes NaN of all that it sees."""
    seq = 150
    q, k = (_normal(row, i, seq) for i in range(2))
    v, dout = (_normal(row, i, seq, of_v=True) for i in range(2, 4))
    k[0, ::3] *= 100.0  # of these products most are so negative that exp() is 0
    v[0, 20] = np.nan
    dtype = _dtype(row)
    given = [x.astype(dtype) for x in (q, k, v)]
    dout = dout.astype(dtype)
    out, lse = reference.attention(*given, causal=True, return_lse=True)
    want = reference.attention_backward(dout, *given, causal=True)
    there = [backend.array(x) for x in (dout, *given, out.astype(dtype), lse.astype(np.float32))]
    with using(row.forward, row.backward):
        got = cuflash.attention_backward(*there, causal=True)
    for name in ("dq", "dk", "dv"):
        seen = np.isnan(backend.host(getattr(got, name)).astype(float))
        np.testing.assert_array_equal(seen, np.isnan(getattr(want, name)), err_msg=name)


SOFTENING = [
    row
    for row in OPTION_ROWS
    if row.options == ("softcap",) or (row in OPTIONS and row.family("forward") != "simt")
]


@pytest.mark.parametrize("row", SOFTENING, ids=lambda row: row.name)
@pytest.mark.parametrize("poison", [30.0, 1e4])
def test_what_hidden_keys_hold_changes_no_bit_of_a_softcap(
    backend: Backend, row: Row, poison: float
) -> None:
    rng = np.random.default_rng(11)
    dtype = np.dtype(ml_dtypes.bfloat16 if row.dtype == "bfloat16" else np.float16)
    q, dout = (rng.standard_normal((1, 20, 2, n)) for n in (row.head_dim, row.head_dim_v))
    k, v = (rng.standard_normal((1, 150, 2, n)) for n in (row.head_dim, row.head_dim_v))
    options = {"causal": True, "window": (5, 0), "softcap": 60.0}
    found = []
    for value in (0.0, poison):
        k[:, :125] = value  # the first query stands at 130
        arrays = [backend.array(x.astype(dtype)) for x in (q, k, v, dout)]
        with using(row.forward, row.backward):
            out, lse = cuflash.attention(*arrays[:3], return_lse=True, **options)
            grads = cuflash.attention_backward(arrays[3], *arrays[:3], out, lse, **options)
        found.append([backend.host(x).tobytes() for x in (out, lse, *grads)])
    assert found[0] == found[1]


@pytest.mark.parametrize("row", SOFTENING, ids=lambda row: row.name)
@pytest.mark.parametrize(("cap", "scale"), [(1e-11, None), (1e-3, 1e6), (1.0, 1e9), (1e-38, 1e3)])
def test_products_of_0_have_no_share_of_a_small_cap(
    backend: Backend, row: Row, cap: float, scale: float | None
) -> None:
    zeros = _normal(row, 1, 40) * 0
    v = _normal(row, 2, 40, of_v=True)
    out, lse = _forward(backend, row, zeros, zeros, v, softcap=cap, scale=scale)
    want = v.astype(_dtype(row)).astype(float).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(out, np.broadcast_to(want, out.shape), atol=2e-3)
    np.testing.assert_allclose(lse, np.log(40), atol=1e-6)
