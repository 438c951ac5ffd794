# SPDX-License-Identifier: Apache-2.0
"""Ordinary calls with some things changed, run into memory full of NaN."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest
from check import Inputs, check_backward, check_forward
from conftest import Backend
from run import on

import cuflash

DTYPES = ("float16", "bfloat16", "float32", "float64")
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
ARRAYS = ("q", "k", "v", "dout")


def turns(
    names: str, *values: Iterable[Any], dtypes: tuple[str, ...] = DTYPES
) -> pytest.MarkDecorator:
    """Parametrize by `names` and "dtype": the first row in every dtype, the others in turn."""
    rows = list(itertools.product(*values))
    cases = [(*rows[0], dtype) for dtype in dtypes]
    cases += [(*row, dtypes[i % len(dtypes)]) for i, row in enumerate(rows[1:])]
    return pytest.mark.parametrize(f"{names},dtype", cases)


def normal(seed: int, shape: tuple[int, ...], dtype: str, size: float = 1.0) -> np.ndarray:
    x = size * np.random.default_rng(seed).standard_normal(shape)
    return x.astype(np.dtype(dtype))


def call(
    lengths: tuple[int, int],
    *,
    heads: tuple[int, int] = (2, 2),
    head_dim: int = 64,
    head_dim_v: int | None = None,
    batch: int = 1,
    dtype: str = "float16",
    size: float = 1.0,
    backward: bool = True,
    **options: Any,
) -> Inputs:
    """Return an ordinary call; `lengths` and `heads` are those of queries and keys."""
    (sq, sk), (hq, hkv) = lengths, heads
    dv = head_dim if head_dim_v is None else head_dim_v
    return Inputs(
        normal(0, (batch, sq, hq, head_dim), dtype, size),
        normal(1, (batch, sk, hkv, head_dim), dtype, size),
        normal(2, (batch, sk, hkv, dv), dtype, size),
        normal(3, (batch, sq, hq, dv), dtype) if backward else None,
        **options,
    )


def changed(inputs: Inputs, change: Callable[[np.ndarray], np.ndarray], *names: str) -> Inputs:
    """Return a call with some of its arrays replaced by what a function makes of them."""
    return dataclasses.replace(inputs, **{n: change(getattr(inputs, n)) for n in names or ARRAYS})


def packed(
    offsets: tuple[Iterable[int], Iterable[int]], *, slack: int = 0, index: str = "i4", **sizes: Any
) -> Inputs:
    """Return a call on entries with these offsets of queries and keys, before some spare rows."""
    cu_q, cu_k = (np.array(list(x), index) for x in offsets)
    lengths = int(cu_q[-1]) + slack, int(cu_k[-1]) + slack
    inputs = changed(call(lengths, **sizes), lambda x: x[0])
    return dataclasses.replace(inputs, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


class Results(NamedTuple):
    """Host arrays, or None; without a dout there are no gradients."""

    out: np.ndarray
    lse: np.ndarray
    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dsinks: Any = None

    @property
    def grads(self) -> cuflash.Gradients:
        return cuflash.Gradients(*self[2:])


def to_host(backend: Backend, x: Any) -> np.ndarray:
    """Return a host array; as integers, since CuPy copies views of bfloat16 only with headers."""
    return backend.host(x.view(f"u{x.itemsize}")).view(x.dtype)


def run(
    backend: Backend, inputs: Inputs, place: Callable[..., Any] | None = None, old: float = np.nan
) -> Results:
    """Run both passes. They write to what ``place(shape, dtype)`` returns, or to fresh memory.

    Fresh memory, results and scratch, is full of `old`.
    """
    i = on(backend, inputs)
    accum = np.dtype("f8" if inputs.dtype == np.float64 else "f4")
    *batch, a, b, _ = i.q.shape
    rows = (*batch, b, a) if inputs.layout == "bshd" else (*batch, a, b)
    fresh = lambda shape, dtype: backend.array(np.full(shape, old, dtype))
    place = place or fresh
    to_out = place((*i.q.shape[:-1], i.v.shape[-1]), inputs.dtype), place(rows, accum)
    forward = cuflash.attention_varlen if i.cu_seqlens else cuflash.attention
    out, lse = forward(i.q, i.k, i.v, *i.cu_seqlens, return_lse=True, out=to_out, **i.options)
    host = functools.partial(to_host, backend)
    if i.dout is None:
        return Results(host(out), host(lse))
    of = (i.q, i.k, i.v, i.bias, i.sinks)
    backward = cuflash.attention_varlen_backward if i.cu_seqlens else cuflash.attention_backward
    solve = functools.partial(
        *(backward, i.dout, i.q, i.k, i.v, out, lse, *i.cu_seqlens),
        dlse=i.dlse,
        out=tuple(None if x is None else place(x.shape, x.dtype) for x in of),
        **i.options,
    )
    size = 0
    try:
        solve(workspace=fresh((0,), accum).view(np.uint8))
    except ValueError as error:  # it says how many bytes are needed
        size = int(re.findall(r"^workspace: .* at least (\d+)", str(error))[0])
    workspace = fresh((-(-size // accum.itemsize),), accum).view(np.uint8)
    grads = solve(workspace=workspace)
    results = (*grads, grads.dbias, grads.dsinks)
    return Results(host(out), host(lse), *(None if x is None else host(x) for x in results))


def solve(backend: Backend, inputs: Inputs, place: Callable[..., Any] | None = None) -> Results:
    """Run both passes and compare them with the reference."""
    results = run(backend, inputs, place)
    check(results, inputs)
    return results


def check(results: Results, inputs: Inputs) -> None:
    check_forward(results.out, results.lse, inputs)
    if inputs.dout is not None:
        check_backward(results.grads, inputs)


def weights(
    backend: Backend,
    lengths: tuple[int, int],
    dtype: str,
    heads: tuple[int, int] = (1, 1),
    **options: Any,
) -> np.ndarray:
    """Return the probabilities: values that are unit vectors make them the output.

    The shape is (batch, heads, queries, keys), of a single head (queries, keys).
    """
    sk = lengths[1]
    inputs = call(lengths, heads=heads, head_dim=16, head_dim_v=sk, dtype=dtype, **options)
    unit = lambda v: np.broadcast_to(np.eye(sk, dtype=v.dtype)[:, None], v.shape)
    out = solve(backend, changed(inputs, unit, "v")).out.astype(np.float64).swapaxes(1, 2)
    return out[0, 0] if heads == (1, 1) else out


def same(results: Results, others: Results) -> None:
    """Assert equality of every bit."""
    for name, x, y in zip(Results._fields, results, others, strict=True):
        assert (x is None) == (y is None), name
        if x is not None:
            assert x.dtype == y.dtype and x.shape == y.shape, name
            assert np.ascontiguousarray(x).tobytes() == np.ascontiguousarray(y).tobytes(), name
