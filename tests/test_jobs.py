# SPDX-License-Identifier: Apache-2.0
"""Blocks of Hopper's backward that stay: one job after the other, most of them without work."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import Backend
from matrix import ROWS, Row
from run import schedule, using

import cuflash
from cuflash import reference

STAYING = {
    row.name: row
    for row in ROWS
    if row.name
    in ("float16-sm90-one-64x64", "float16-sm90-apart-64x96", "float16-sm90-apart3-64x64")
}


def test_there_are_both_kinds() -> None:
    assert len(STAYING) == 3


@pytest.mark.parametrize("row", STAYING.values(), ids=STAYING)
def test_many_keys_that_no_query_sees(backend: Backend, row: Row) -> None:
    """The jobs of these keys end at once, so that a slot is full, empty and full again."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, n, 1, row.head_dim)).astype("f2") for n in (1, 1000))
    v, dout = (rng.standard_normal((1, n, 1, row.head_dim_v)).astype("f2") for n in (1000, 1))
    want = reference.attention_backward(dout, q, k, v, window=(0, -1))
    for seed in (0, 1, 2, 3, 16):  # 16: a lane of the warp that takes jobs was late
        with using(row.forward, row.backward), schedule(seed, 1):
            given = [backend.array(x) for x in (q, k, v)]
            out, lse = cuflash.attention(*given, return_lse=True, window=(0, -1))
            of_out = backend.array(dout)
            grads = cuflash.attention_backward(of_out, *given, out, lse, window=(0, -1))
        for got, right in zip(grads, want, strict=True):
            np.testing.assert_allclose(backend.host(got).astype(float), right, atol=2e-3)
