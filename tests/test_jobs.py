# SPDX-License-Identifier: Apache-2.0
"""Blocks on Hopper that stay: one job after the other, many of them without work."""

from __future__ import annotations

import shutil
from pathlib import Path

import ml_dtypes  # noqa: F401  (gives NumPy its bfloat16)
import numpy as np
import pytest
from conftest import Backend
from matrix import OPTION_ROWS, ROWS, Row
from run import schedule, using

import cuflash
from cuflash import compile, reference, source

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


FORWARD = [row for row in ROWS if row.boxes and "apart" not in row.name]


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("where", ["first", "last", "all"])
@pytest.mark.parametrize("row", FORWARD, ids=lambda row: row.name)
def test_jobs_that_hidden_values_spoil(backend: Backend, row: Row, where: str, blocks: int) -> None:
    """They are done again: among others, and when no others are left."""
    rng = np.random.default_rng(1)
    dtype, tile = np.dtype(row.dtype), row.tile[0]
    length = 2 * tile + 5
    q, k, v = (
        rng.standard_normal((2, length, 2, size)).astype("f4").astype(dtype)
        for size in (row.head_dim, row.head_dim, row.head_dim_v)
    )
    places = {"first": (0, 1), "last": (1, length - 1), "all": (slice(None), slice(1, None, tile))}
    v[places[where]] = np.inf
    q[0, 3, 0] = np.nan  # some warps of a job find their results spoilt, others have written theirs
    want = reference.attention(q, k, v, causal=True)
    with using(row.forward, row.backward), schedule(1, blocks):
        got = backend.host(cuflash.attention(*map(backend.array, (q, k, v)), causal=True))
    assert np.isinf(want).any()
    np.testing.assert_allclose(got.astype(float), want, atol=5e-2 if dtype != "f2" else 5e-3)


#: One place for the queries of a job, and two.
PLACES = {
    row.name: row for row in OPTION_ROWS if row.boxes and {"packed", "bias"} <= set(row.options)
}


@pytest.fixture
def late_loaders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels whose loaders sleep just before they might wait for a block's first queries."""
    root = tmp_path / "kernels"
    shutil.copytree(source.KERNEL_ROOT, root)
    path = root / "attention" / "forward_sm90_tiles.cuh"
    text = path.read_text(encoding="utf-8")
    wait = "            const bool waits ="
    assert text.count(wait) == 1, "the place to sleep at is gone: renew the test"
    sleep = "if (stage.count == kUrgent) for (int i = 0; i < 3000; ++i) __threadfence();\n"
    path.write_text(text.replace(wait, sleep + wait), encoding="utf-8")
    monkeypatch.setattr(source, "KERNEL_ROOT", root)
    monkeypatch.setattr(compile, "_kernels", {})
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "libraries"))


@pytest.mark.usefixtures("late_loaders")
@pytest.mark.parametrize("row", PLACES.values(), ids=PLACES)
def test_loaders_that_are_late(row: Row) -> None:
    """By then their place has had other queries, in a schedule that lets copies arrive early."""
    assert len({other.forward[0].slots for other in PLACES.values()}) == 2
    rng = np.random.default_rng(2)
    queries, keys = row.forward[0].tile_q, row.forward[0].tile_kv
    for tiles in ([1, 1, 1, 1, 1], [0, 1, 2, 0, 1], [0, 0, 2, 1, 1], [1, 0, 2, 2, 0]):
        lengths_q, lengths_k = [queries] * len(tiles), [keys * n for n in tiles]
        cu_q, cu_k = (np.cumsum([0, *lengths]).astype("i4") for lengths in (lengths_q, lengths_k))
        q, k, v = (
            rng.standard_normal((n, 1, size)).astype("f4").astype(row.dtype)
            for n, size in (
                (cu_q[-1], row.head_dim),
                (cu_k[-1], row.head_dim),
                (cu_k[-1], row.head_dim_v),
            )
        )
        want = reference.attention_varlen(q, k, v, cu_q, cu_k)
        for seed in (5, 13):
            with using(row.forward, row.backward), schedule(seed, 1):
                got = cuflash.attention_varlen(q, k, v, cu_q, cu_k)
            np.testing.assert_allclose(got.astype(float), want, atol=5e-2)
