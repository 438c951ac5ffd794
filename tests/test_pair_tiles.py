# SPDX-License-Identifier: Apache-2.0
"""Bias and mask on tensor cores, copied in tiles or read where they lie, whatever their strides."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import Backend
from matrix import OPTION_ROWS, Row
from run import schedule, using

import cuflash
from cuflash import device, params, select
from cuflash.arrays import Form
from cuflash.dtypes import DTYPES
from cuflash.plan import ForwardMma
from cuflash.problem import FEATURES, Traits

ROWS = {row.dtype: row for row in OPTION_ROWS if "-mma-" in row.name and row.options == FEATURES}
KINDS = {"float16": np.dtype("float16"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}

#: Ways that rows of 80 keys lie, and how many bytes of them can be copied, of 2 bytes an element.
VIEWS = {
    "contiguous": 16,
    "inside": 16,  # of longer rows
    "half aligned": 4,
    "word aligned": 4,
    "odd": 0,
    "queries reversed": 16,
    "keys reversed": 0,
    "every other": 0,
    "turned": 0,
    "one row": 16,  # of stride 0
}


def laid(x: np.ndarray, view: str) -> np.ndarray:
    """Return an array equal to `x` that lies as told; what is around it is False or NaN."""
    *outer, queries, keys = x.shape
    fill = False if x.dtype == bool else np.nan

    def within(first: int, keys_of: int) -> np.ndarray:
        room = np.full((*outer, queries, keys_of), fill, x.dtype)
        space = np.zeros(room.nbytes + 16, np.uint8)
        room = space[-space.ctypes.data % 16 :][: room.nbytes].view(x.dtype).reshape(room.shape)
        room[...] = fill
        inner = room[..., first : first + keys]
        inner[...] = x
        return inner

    step = 16 // x.itemsize
    if view == "contiguous":
        return within(0, keys)
    if view == "inside":
        return within(step, keys + 3 * step)
    if view == "half aligned":
        return within(step // 2, keys + step // 2 + step)
    if view == "word aligned":
        return within(step // 4, keys + step // 4 + step)
    if view == "odd":
        return within(1, keys + 1)
    if view == "queries reversed":
        return laid(x[..., ::-1, :], "contiguous")[..., ::-1, :]
    if view == "keys reversed":
        return laid(x[..., ::-1], "contiguous")[..., ::-1]
    if view == "every other":
        return np.repeat(x, 2, axis=-1)[..., ::2]
    if view == "turned":
        return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    assert view == "one row"
    return np.broadcast_to(laid(x[..., :1, :], "contiguous"), x.shape)


def agree(backend: Backend, row: Row, q: Any, k: Any, v: Any, **options: Any) -> None:
    """Compare out and lse with the reference, and NaN and infinities exactly."""
    arrays = (backend.array(x) for x in (q, k, v))
    given = {
        name: backend.array(x) if isinstance(x, np.ndarray) else x for name, x in options.items()
    }
    with using(row.forward, row.backward), schedule(3):
        out, lse = (backend.host(x) for x in cuflash.attention(*arrays, return_lse=True, **given))
    wanted, wanted_lse = cuflash.reference.attention(q, k, v, return_lse=True, **options)
    np.testing.assert_allclose(out.astype("f8"), wanted, rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(lse.astype("f8"), wanted_lse, rtol=1e-4, atol=1e-4)


def qkv(row: Row, queries: int, keys: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(queries)
    kind = KINDS[row.dtype]
    heads, dims = (2, 1, 1), (row.head_dim, row.head_dim, row.head_dim_v)
    return tuple(
        rng.standard_normal((2, n, h, d)).astype(kind)
        for n, h, d in zip((queries, keys, keys), heads, dims, strict=True)
    )


@pytest.mark.parametrize("dtype", ROWS)
@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "float32"])
@pytest.mark.parametrize("view", VIEWS)
def test_bias_of_any_strides(backend: Backend, dtype: str, wide: bool, view: str) -> None:
    row = ROWS[dtype]
    q, k, v = qkv(row, 71, 80)
    rng = np.random.default_rng(1)
    bias = rng.standard_normal((2, 2, 71, 80))
    if view == "one row":
        bias[:] = bias[..., :1, :]
    bias[..., rng.random(80) < 0.2] = -np.inf
    bias[..., 7] = -np.inf  # in a row of numbers that nobody may see
    k[:, 7], v[:, 7] = np.inf, np.nan
    bias = laid(bias.astype("f4" if wide else KINDS[dtype]), view)
    agree(backend, row, q, k, v, bias=bias)
    agree(backend, row, q, k, v, bias=bias, causal=True, softcap=5.0)


@pytest.mark.parametrize("dtype", ROWS)
@pytest.mark.parametrize("view", VIEWS)
def test_mask_of_any_strides(backend: Backend, dtype: str, view: str) -> None:
    row = ROWS[dtype]
    q, k, v = qkv(row, 71, 80)
    mask = np.random.default_rng(2).random((2, 2, 71, 80)) < 0.7
    if view == "one row":
        mask[:] = mask[..., :1, :]
    mask[..., 7] = False
    k[:, 7], v[:, 7] = np.inf, np.nan
    mask = laid(mask, view)
    agree(backend, row, q, k, v, mask=mask)
    agree(backend, row, q, k, v, mask=mask, window=(30, 20))


@pytest.mark.parametrize("shape", [(2, 2, 71, 80), (1, 2, 1, 80), (2, 1, 71, 1), (71, 80), (1, 80)])
def test_broadcast_axes(backend: Backend, shape: tuple[int, ...]) -> None:
    row = ROWS["bfloat16"]
    q, k, v = qkv(row, 71, 80)
    rng = np.random.default_rng(3)
    bias = laid(rng.standard_normal(shape).astype("f4"), "contiguous")
    mask = laid(rng.random(shape) < 0.7, "contiguous")
    agree(backend, row, q, k, v, bias=bias, mask=mask)


@pytest.mark.parametrize("keys", [48, 50, 51])
def test_packed_entries_count_from_their_own_first_rows(backend: Backend, keys: int) -> None:
    row = ROWS["float16"]
    cu_q, cu_k = np.array([1, 36, 71], np.int32), np.array([3, 50, 50 + 31], np.int32)
    q, k, v = (x[0] for x in qkv(row, 75, 83))
    rng = np.random.default_rng(4)
    bias = laid(rng.standard_normal((2, 1, 35, keys)).astype("f2"), "contiguous")
    mask = laid(rng.random((2, 2, 35, keys)) < 0.8, "contiguous")
    with using(row.forward, row.backward):
        arrays = (backend.array(x) for x in (q, k, v, cu_q, cu_k))
        given = {"bias": backend.array(bias), "mask": backend.array(mask)}
        both = cuflash.attention_varlen(*arrays, return_lse=True, **given)
        out, lse = (backend.host(x) for x in both)
    for entry in range(2):
        rows, cols = slice(*cu_q[entry : entry + 2]), slice(*cu_k[entry : entry + 2])
        size = cu_k[entry + 1] - cu_k[entry]
        wanted, wanted_lse = cuflash.reference.attention(
            q[rows], k[cols], v[cols], return_lse=True,
            bias=bias[entry : entry + 1, ..., :size], mask=mask[entry : entry + 1, ..., :size],
        )  # fmt: skip
        np.testing.assert_allclose(out[rows].astype("f8"), wanted, rtol=2e-2, atol=2e-2)
        np.testing.assert_allclose(lse[:, rows], wanted_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("view", "at_once"), VIEWS.items())
def test_what_can_be_copied(view: str, at_once: int) -> None:
    x = laid(np.ones((2, 2, 71, 80), np.float16), view)
    form = Form(x.shape, x.strides, x.itemsize, x.ctypes.data % 16)
    assert params.pair_alignment(form) == at_once


def test_one_key_is_broadcast_not_copied() -> None:
    assert params.pair_alignment(Form((2, 2, 64, 1), (256, 128, 2, 2), 2, 0)) == 0


def test_large_tiles_serve_what_is_copied() -> None:
    hopper = device.architecture(9, 0)
    traits = Traits(DTYPES["bfloat16"], 128, 128, ("bias",), boxes=False)
    (reads,) = select.choose("forward", traits, hopper)
    (copies,) = select.choose("forward", traits._replace(aligned_bias=16), hopper)
    assert isinstance(reads, ForwardMma) and isinstance(copies, ForwardMma)
    assert (reads.tile_q, reads.aligned_bias) == (64, 0)
    assert (copies.tile_q, copies.aligned_bias) == (128, 16)
