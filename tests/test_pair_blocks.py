# SPDX-License-Identifier: Apache-2.0
"""Bias and mask that Hopper's backward brings to shared memory, whatever their strides."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from check import Inputs, check_backward
from conftest import Backend
from run import both, on, schedule, using
from test_pair_tiles import VIEWS, laid

import cuflash
from cuflash import select
from cuflash.arch import sm90
from cuflash.device import CPU
from cuflash.dtypes import DTYPES
from cuflash.plan import Plan
from cuflash.problem import FEATURES, Traits

QUERIES, KEYS, HEADS = 150, 144, 2
KINDS = {"narrow": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype("float32")}

#: Tiles of 64 and 128 queries, and one whose keys two warpgroups have.
TILES = {
    "rows": (sm90.BackwardTile(64, 128, 128, 1, 1, 2, 2, 1), 16),
    "columns": (sm90.BackwardTile(128, 64, 128, 1, 1, 2, 2, 1), 16),
    "shared": (sm90.BackwardTile(256, 64, 64, 2, 2, 2, 1, 1), 136),
}


def _plans(tile: str, options: tuple[str, ...]) -> tuple[Plan, Plan]:
    row, head_dim = TILES[tile]
    traits = Traits(DTYPES["bfloat16"], head_dim, head_dim, options)
    others = [plan for plan in select.choose("backward", traits, CPU) if plan.family != "mma"]
    backward = sm90.backward(traits, row, frozenset(options))
    return select.choose("forward", traits, CPU), (*backward, *others)


@functools.lru_cache(maxsize=4)
def _arrays(head_dim: int, queries: int, keys: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(3)
    shapes = [(n, HEADS, head_dim) for n in (queries, keys, keys, queries)]
    return tuple(rng.standard_normal((1, *s)).astype(ml_dtypes.bfloat16) for s in shapes)


def _agrees(
    backend: Backend,
    tile: str,
    compiled: tuple[str, ...],
    options: dict[str, Any],
    queries: int = QUERIES,
    keys: int = KEYS,
) -> None:
    q, k, v, dout = _arrays(TILES[tile][1], queries, keys)
    inputs = Inputs(q, k, v, dout, **options)
    with using(*_plans(tile, compiled)), schedule(5):
        check_backward(both(on(backend, inputs))[2], inputs)


def _mask(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).random(shape) < 0.6


def _bias(kind: str, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    bias = rng.standard_normal(shape)
    bias[..., rng.random(shape[-1]) < 0.2] = -np.inf
    return bias.astype(KINDS[kind])


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("view", VIEWS)
def test_masks(backend: Backend, tile: str, view: str) -> None:
    mask = _mask(1, HEADS, QUERIES, KEYS)
    if view == "one row":
        mask[:] = mask[..., :1, :]
    _agrees(backend, tile, ("mask",), {"mask": laid(mask, view)})


#: By 16 bytes, 4, or one after the other; float32 has two of these ways.
WAYS = [("narrow", view) for view in VIEWS]
WAYS += [("float32", view) for view in ("contiguous", "odd", "queries reversed", "turned")]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("kind", "view"), WAYS)
def test_biases(backend: Backend, tile: str, kind: str, view: str) -> None:
    bias = _bias(kind, 1, HEADS, QUERIES, KEYS)
    if view == "one row":
        bias[:] = bias[..., :1, :]
    _agrees(backend, tile, ("bias",), {"bias": laid(bias, view), "window": (90, 40)})


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(
    "shape", [(QUERIES, KEYS), (1, KEYS), (QUERIES, 1), (1, HEADS, 1, 1), (1, 1)], ids=str
)
def test_axes_of_length_1(backend: Backend, tile: str, shape: tuple[int, ...]) -> None:
    mask = _mask(*shape)
    mask[..., :1, :1] = True
    _agrees(backend, tile, ("mask",), {"mask": mask, "causal": True})
    for kind in KINDS:
        bias = np.random.default_rng(1).standard_normal(shape).astype(KINDS[kind])
        _agrees(backend, tile, ("bias",), {"bias": bias, "causal": True})


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("queries", "keys"), [(63, 65), (64, 16), (129, 15), (1, 128)])
def test_ends(backend: Backend, tile: str, queries: int, keys: int) -> None:
    """Nothing beyond the array is read; the back end would say so."""
    sizes = queries, keys
    _agrees(backend, tile, ("mask",), {"mask": _mask(*sizes)}, *sizes)
    for kind in KINDS:
        _agrees(backend, tile, ("bias",), {"bias": _bias(kind, *sizes)}, *sizes)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("kind", KINDS)
def test_both(backend: Backend, tile: str, kind: str) -> None:
    options = {"mask": _mask(QUERIES, KEYS), "bias": _bias(kind, HEADS, QUERIES, KEYS)[None]}
    _agrees(backend, tile, FEATURES, {**options, "softcap": 9.0})
    _agrees(backend, tile, FEATURES, {"bias": options["bias"]})
    _agrees(backend, tile, FEATURES, {"mask": options["mask"], "causal": True})
    _agrees(backend, tile, FEATURES, {})


@pytest.mark.parametrize("wrt", [("q",), ("k", "v")], ids=str)
def test_gradients_that_are_not_wanted(backend: Backend, wrt: tuple[str, ...]) -> None:
    """Biases lie where ds of the visit before was, also if nobody waits for its dq."""
    q, k, v, dout = _arrays(TILES["shared"][1], QUERIES, KEYS)
    inputs = on(backend, Inputs(q, k, v, dout, bias=_bias("narrow", QUERIES, KEYS)))
    with using(*_plans("shared", ("bias",))), schedule(5):
        out, lse, whole = both(inputs)
        given = inputs.dout, inputs.q, inputs.k, inputs.v, out, lse
        some = cuflash.attention_backward(*given, wrt=wrt, **inputs.options)
    for name in wrt:
        x, y = (backend.host(getattr(grads, f"d{name}")) for grads in (whole, some))
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("tile", TILES)
def test_bytes_of_a_mask_that_are_neither_0_nor_1(backend: Backend, tile: str) -> None:
    numbers = np.random.default_rng(1).integers(0, 256, (QUERIES, KEYS), np.uint8)
    numbers[numbers < 100] = 0
    numbers[5, :8] = 1, 2, 4, 8, 16, 32, 64, 128
    _agrees(backend, tile, ("mask",), {"mask": numbers.view(bool)})


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("kind", KINDS)
def test_packed(backend: Backend, tile: str, kind: str) -> None:
    """Entries of different lengths; those of the arrays are those of the longest."""
    head_dim = TILES[tile][1]
    q, k, v, dout = (x[0] for x in _arrays(head_dim, QUERIES, KEYS))
    cu_q, cu_k = np.array([0, 70, 70, 150], np.int32), np.array([0, 17, 50, 144], np.int32)
    options = {"mask": _mask(3, 1, 80, 94), "bias": _bias(kind, 1, HEADS, 80, 94)}
    inputs = Inputs(q, k, v, dout, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    with using(*_plans(tile, FEATURES)), schedule(5):
        check_backward(both(on(backend, inputs))[2], inputs)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("option", ["mask", "narrow", "float32"])
def test_hidden_keys_may_hold_anything(backend: Backend, tile: str, option: str) -> None:
    q, k, v, dout = (x.copy() for x in _arrays(TILES[tile][1], QUERIES, KEYS))
    k[:, 7], v[:, 7], k[:, 100, 0] = np.inf, np.nan, np.nan
    mask = _mask(QUERIES, KEYS)
    mask[:, [7, 100]] = False
    mask[3] = False  # sees nothing
    given: dict[str, Any] = {"mask": mask}
    if option != "mask":
        bias = np.random.default_rng(1).standard_normal(mask.shape)
        given = {"bias": np.where(mask, bias, -np.inf).astype(KINDS[option])}
    inputs = Inputs(q, k, v, dout, **given)
    with using(*_plans(tile, (next(iter(given)),))), schedule(5):
        check_backward(both(on(backend, inputs))[2], inputs)
