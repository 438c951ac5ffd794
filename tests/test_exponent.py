# SPDX-License-Identifier: Apache-2.0
"""Scores that softcap and ALiBi make between exponentials, where nothing is hidden."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from check import Inputs, check_backward, check_forward
from conftest import Backend
from matrix import OPTION_ROWS, Row
from run import both, on, using

import cuflash
from cuflash import reference

ROWS = [
    row for row in OPTION_ROWS if row.options in (("softcap", "alibi"), ("softcap",), ("alibi",))
]

#: Caps that few products are beyond, some and most; and whether products grow out of the reference.
CALLS: dict[str, dict[str, Any]] = {
    "far-below-the-cap": {"softcap": 40.0},
    "near-the-cap": {"softcap": 5.0},
    "beyond-the-cap": {"softcap": 0.8},
    "no-cap": {},
    "no-cap-growing": {"scale": 0.3, "grows": True},
    "no-cap-negative-scale": {"scale": -0.2},
    "negative-scale": {"softcap": 40.0, "scale": -0.2},
    "large-scale": {"softcap": 30.0, "scale": 1.0},
    "growing": {"softcap": 60.0, "scale": 0.3, "grows": True},
}
SLOPES = {"no-slope": 0.0, "flat": 0.01, "steep": 0.4, "negative": -0.02}


def test_there_are_rows_of_both_families() -> None:
    assert {row.family("forward") for row in ROWS} == {"mma", "sm90"}


def _cases() -> list[Any]:
    """Return a row, a call and a slope each, as far as the row has code for them."""
    return [
        pytest.param(row, call, slope, id=f"{row.name}-{name}-{steep}")
        for row in ROWS
        for name, call in CALLS.items()
        for steep, slope in SLOPES.items()
        if ("softcap" in row.options or "softcap" not in call)
        and ("alibi" in row.options or steep == "no-slope")
    ]


@pytest.mark.parametrize(("row", "call", "slope"), _cases())
def test_whole_tiles_agree_with_the_reference(
    backend: Backend, row: Row, call: dict[str, Any], slope: float
) -> None:
    options = {name: x for name, x in call.items() if name != "grows"}
    rng = np.random.default_rng(7)
    q = rng.standard_normal((1, 96, 2, row.head_dim))
    k = rng.standard_normal((1, 200, 2, row.head_dim))
    v = rng.standard_normal((1, 200, 2, row.head_dim_v))
    if call.get("grows"):
        k *= np.linspace(0.1, 4.0, 200)[:, None, None]
    dtype = np.dtype(ml_dtypes.bfloat16 if row.dtype == "bfloat16" else np.float16)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    slopes = np.array([slope, slope / 3], np.float32)
    with_slopes = {"alibi_slopes": slopes} if "alibi" in row.options else {}
    want, want_lse = reference.attention(q, k, v, return_lse=True, **options, **with_slopes)
    with using(row.forward, row.backward):
        given = {name: backend.array(x) for name, x in with_slopes.items()}
        arrays = (backend.array(x) for x in (q, k, v))
        out, lse = cuflash.attention(*arrays, return_lse=True, **options, **given)
    size = np.abs(want_lse).max()
    np.testing.assert_allclose(backend.host(lse), want_lse, rtol=0, atol=2e-6 * max(1, size))
    np.testing.assert_allclose(backend.host(out).astype(float), want.astype(float), atol=2e-2)


@pytest.mark.parametrize(
    "row", [row for row in ROWS if "alibi" in row.options], ids=lambda r: r.name
)
@pytest.mark.parametrize("slope", [1e29, 1e36, 3e38, np.inf])
def test_the_largest_slopes_agree_with_the_reference(
    backend: Backend, row: Row, slope: float
) -> None:
    """A query then sees no key but the one in its own place; 0 times infinity is NaN."""
    rng = np.random.default_rng(8)
    dtype = np.dtype(ml_dtypes.bfloat16 if row.dtype == "bfloat16" else np.float16)

    def normal(length: int, dim: int) -> Any:
        return rng.standard_normal((1, length, 2, dim)).astype(dtype)

    inputs = Inputs(
        q=normal(96, row.head_dim),
        k=normal(200, row.head_dim),
        v=normal(200, row.head_dim_v),
        dout=normal(96, row.head_dim_v),
        alibi_slopes=np.array([slope, slope / 3], np.float32),
    )
    with using(row.forward, row.backward):
        out, lse, grads = both(on(backend, inputs))
    check_forward(out, lse, inputs)
    check_backward(grads, inputs)
