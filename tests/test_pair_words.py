# SPDX-License-Identifier: Apache-2.0
"""Bias and mask that Hopper's forward reads by words, and those that it cannot read so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import Backend
from run import using

import cuflash
from cuflash import reference, select
from cuflash.arch import sm90
from cuflash.device import CPU
from cuflash.dtypes import DTYPES
from cuflash.plan import Plan
from cuflash.problem import FEATURES, Traits

QUERIES, KEYS, HEADS = 130, 272, 2
TILE = sm90.Tile(64, 128, 64, 2, 2)

Array = np.ndarray


def _at_odd_element(x: Array) -> Array:
    wide = np.zeros((*x.shape[:-1], x.shape[-1] + 1), x.dtype)
    wide[..., 1:] = x
    return wide[..., 1:]


def _every_other(x: Array) -> Array:
    wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


#: How an array lies in memory, of the same elements.
PLACES: dict[str, Callable[[Array], Array]] = {
    "as-it-is": lambda x: x,
    "rows-in-reverse": lambda x: np.ascontiguousarray(x[..., ::-1, :])[..., ::-1, :],
    "keys-in-reverse": lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    "at-an-odd-element": _at_odd_element,
    "every-other-key": _every_other,
    "keys-first": lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
}
SHAPES = {
    "of-all-heads": (QUERIES, KEYS),
    "of-a-head": (1, HEADS, QUERIES, KEYS),
    "of-a-row": (1, KEYS),
    "of-a-column": (QUERIES, 1),
}


def _plan(options: tuple[str, ...]) -> Plan:
    traits = Traits(DTYPES["bfloat16"], 64, 64, options)
    return (sm90.forward(traits, TILE, frozenset(options)),)


def _agrees(backend: Backend, options: dict[str, Any], compiled: tuple[str, ...]) -> None:
    rng = np.random.default_rng(3)
    keys = options.pop("keys", KEYS)
    q = rng.standard_normal((1, QUERIES, HEADS, 64)).astype(ml_dtypes.bfloat16)
    k, v = rng.standard_normal((2, 1, keys, HEADS, 64)).astype(ml_dtypes.bfloat16)
    want, want_lse = reference.attention(q, k, v, return_lse=True, **options)
    given = {
        name: backend.array(x) if isinstance(x, np.ndarray) else x for name, x in options.items()
    }
    traits = Traits(DTYPES["bfloat16"], 64, 64)
    with using(_plan(compiled), select.choose("backward", traits, CPU)):
        arrays = (backend.array(x) for x in (q, k, v))
        out, lse = cuflash.attention(*arrays, return_lse=True, **given)
    seen = np.isfinite(want_lse)
    np.testing.assert_array_equal(np.isfinite(backend.host(lse)), seen)
    np.testing.assert_allclose(backend.host(lse)[seen], want_lse[seen], rtol=0, atol=4e-6)
    np.testing.assert_allclose(backend.host(out).astype(float), want.astype(float), atol=1e-2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("place", PLACES)
def test_masks(backend: Backend, place: str, shape: str) -> None:
    mask = np.random.default_rng(1).random(SHAPES[shape]) < 0.6
    _agrees(backend, {"mask": PLACES[place](mask), "causal": shape == "of-a-head"}, ("mask",))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_biases(backend: Backend, dtype: str, place: str, shape: str) -> None:
    rng = np.random.default_rng(1)
    bias = rng.standard_normal(SHAPES[shape]).astype(np.dtype(dtype))
    bias[..., rng.random(SHAPES[shape][-1]) < 0.2] = -np.inf
    _agrees(backend, {"bias": PLACES[place](bias), "window": (90, 40)}, ("bias",))


@pytest.mark.parametrize("keys", [271, 270, 268, 65])
def test_rows_that_do_not_end_with_a_tile(backend: Backend, keys: int) -> None:
    rng = np.random.default_rng(1)
    mask, bias = rng.random((QUERIES, keys)) < 0.6, rng.standard_normal((QUERIES, keys))
    _agrees(backend, {"keys": keys, "mask": mask}, ("mask",))
    _agrees(backend, {"keys": keys, "bias": bias.astype(np.float32)}, ("bias",))
    both = {"keys": keys, "bias": bias.astype(ml_dtypes.bfloat16), "mask": mask, "softcap": 9.0}
    _agrees(backend, both, FEATURES)


def test_bytes_of_a_mask_that_are_neither_0_nor_1(backend: Backend) -> None:
    numbers = np.random.default_rng(1).integers(0, 256, (QUERIES, KEYS), np.uint8)
    numbers[numbers < 100] = 0
    _agrees(backend, {"mask": numbers.view(bool)}, ("mask",))


def test_entries_of_packed_arrays_begin_anywhere(backend: Backend) -> None:
    rng = np.random.default_rng(5)
    cu = np.array([0, 67, 130], np.int32)
    q, k, v = rng.standard_normal((3, 130, HEADS, 64)).astype(ml_dtypes.bfloat16)
    options = {
        "mask": rng.random((2, 1, 67, 68)) < 0.6,
        "bias": rng.standard_normal((1, HEADS, 67, 68)).astype(ml_dtypes.bfloat16),
    }
    want = reference.attention_varlen(q, k, v, cu, cu, **options)
    traits = Traits(DTYPES["bfloat16"], 64, 64, FEATURES)
    with using(_plan(FEATURES), select.choose("backward", traits, CPU)):
        arrays = (backend.array(x) for x in (q, k, v, cu, cu))
        given = {name: backend.array(x) for name, x in options.items()}
        out = cuflash.attention_varlen(*arrays, **given)
    np.testing.assert_allclose(backend.host(out).astype(float), want.astype(float), atol=1e-2)
