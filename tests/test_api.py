# SPDX-License-Identifier: Apache-2.0
"""The manners of the public functions: where results go, what is touched, who may call when.

Values are compared with the reference once for each manner; that kernels are right is the business
of test_attention.py.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from check import Inputs, check_backward, check_forward
from conftest import Backend
from run import both, stepping, workspace_bytes

import cuflash
from cuflash import compile, launch, slow
from cuflash.plan import Delta

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
DTYPES["float64"] = np.float64


def normal(backend: Backend, seed: int, shape: tuple[int, ...], dtype: Any = np.float32) -> Any:
    return backend.array(np.random.default_rng(seed).normal(size=shape).astype(dtype))


def filled(backend: Backend, like: Any, value: float) -> Any:
    return backend.array(np.full(like.shape, value, like.dtype))


def swapped(x: Any) -> Any:
    """(batch, seq, heads, dim) as (batch, heads, seq, dim), or back."""
    return x.swapaxes(-3, -2)


def example(backend: Backend, dtype: Any = np.float32, dv: int = 24, **options: Any) -> Inputs:
    """Two batch entries, grouped heads, more keys than queries, more than one tile of keys."""
    return Inputs(
        q=normal(backend, 0, (2, 21, 4, 24), dtype),
        k=normal(backend, 1, (2, 69, 2, 24), dtype),
        v=normal(backend, 2, (2, 69, 2, dv), dtype),
        dout=normal(backend, 3, (2, 21, 4, dv), dtype),
        dlse=normal(backend, 4, (2, 4, 21), np.float64 if dtype == np.float64 else np.float32),
        **{"causal": True, "window": (40, -1), **options},
    )


def forward(i: Inputs, **more: Any) -> Any:
    return cuflash.attention(i.q, i.k, i.v, return_lse=True, **i.options, **more)


def backward(
    i: Inputs, out: Any, lse: Any, *, to: Any = None, workspace: Any = None, wrt: Any = None
) -> Any:
    return cuflash.attention_backward(
        *(i.dout, i.q, i.k, i.v, out, lse),
        **dict(dlse=i.dlse, out=to, workspace=workspace, wrt=wrt),
        **i.options,
    )


def same(backend: Backend, xs: Any, ys: Any) -> None:
    """Assert equality of every bit."""
    for x, y in zip(xs, ys, strict=True):
        x, y = backend.host(x), backend.host(y)
        assert x.dtype == y.dtype and x.shape == y.shape
        assert np.ascontiguousarray(x).tobytes() == np.ascontiguousarray(y).tobytes()


# --- where results go ----------------------------------------------------------------------------

GUARD = 0x5A


class Guarded:
    """A destination that is a view of a larger buffer, whose other bytes must stay as they were."""

    def __init__(self, backend: Backend, buffer: tuple[int, ...], dtype: Any, view: Callable):
        self.backend = backend
        count = int(np.prod(buffer)) * np.dtype(dtype).itemsize
        self.bytes = backend.xp.full(count, GUARD, np.uint8)
        self.array = view(self.bytes.view(dtype).reshape(buffer))

    def assert_intact(self) -> None:
        self.array[...] = 0
        holes = self.backend.host(self.bytes)
        expected = np.full_like(holes, GUARD)
        mirror = expected.view(self.backend.host(self.array).dtype)
        offset = self._address(self.array) - self._address(self.bytes)
        np.ndarray(self.array.shape, mirror.dtype, mirror, offset, self.array.strides)[...] = 0
        np.testing.assert_array_equal(holes, expected)

    def _address(self, x: Any) -> int:
        return x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr


# name -> the shape of a buffer and the view of it that has a given 4-D shape
VIEWS: dict[str, Callable[[tuple[int, ...]], tuple[tuple[int, ...], Callable]]] = {
    "whole": lambda s: (s, lambda x: x),
    "inside": lambda s: (tuple(n + 2 for n in s), lambda x: x[1:-1, 1:-1, 1:-1, 1:-1]),
    "sliced": lambda s: (
        (s[0], 2 * s[1], 3 * s[2], 2 * s[3]),
        lambda x: x[:, ::2, 1::3, 1::2],
    ),
    "reversed": lambda s: (s, lambda x: x[::-1, ::-1, ::-1, ::-1]),
    "sliced and reversed": lambda s: (
        (s[0], 2 * s[1] + 1, s[2], s[3]),
        lambda x: x[:, -2::-2, ::-1],
    ),
    "transposed": lambda s: (s[::-1], lambda x: x.transpose(3, 2, 1, 0)),
    "heads first": lambda s: ((s[0], s[2], s[1], s[3]), lambda x: x.transpose(0, 2, 1, 3)),
    "one of three": lambda s: ((s[0], s[1], 3, *s[2:]), lambda x: x[:, :, 1]),
    "at an odd place": lambda s: (
        (int(np.prod(s)) + 1,),
        lambda x: x[1:].reshape(s),
    ),
}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("view", VIEWS)
def test_results_go_where_they_are_wanted(backend: Backend, view: str, dtype: str) -> None:
    inputs = example(backend, DTYPES[dtype], dv=20)
    rows = inputs.dlse.shape

    def guarded(like: Any) -> Guarded:
        return Guarded(backend, *_buffer(VIEWS[view], like.shape, like.dtype))

    out = guarded(inputs.dout)
    # lse has three axes: the view of a 4-D array of one head dimension.
    lse4 = Guarded(backend, *_buffer(VIEWS[view], (*rows, 1), inputs.dlse.dtype))
    lse = lse4.array[..., 0]
    got = forward(inputs, out=(out.array, lse))
    assert got[0] is out.array and got[1] is lse
    check_forward(*got, inputs)

    to = [guarded(x) for x in (inputs.q, inputs.k, inputs.v)]
    grads = backward(inputs, *got, to=tuple(x.array for x in to))
    assert all(x is y.array for x, y in zip(grads, to, strict=True))
    check_backward(grads, inputs)
    for x in (out, lse4, *to):
        x.assert_intact()


def _buffer(view: Callable, shape: tuple[int, ...], dtype: Any) -> tuple:
    buffer, look = view(shape)
    return buffer, dtype, look


def test_out_alone(backend: Backend) -> None:
    inputs = example(backend)
    out = backend.xp.empty(inputs.dout.shape, np.float32)
    arguments = (inputs.q, inputs.k, inputs.v)
    assert cuflash.attention(*arguments, **inputs.options, out=out) is out
    check_forward(out, None, inputs)
    same(backend, [cuflash.attention(*arguments, **inputs.options)], [out])


def test_some_of_the_results_may_be_given(backend: Backend) -> None:
    inputs = example(backend)
    out, lse = forward(inputs)
    want = list(backward(inputs, out, lse))
    to_out, to_lse = backend.xp.empty_like(out), backend.xp.empty_like(lse)
    first, second = forward(inputs, out=(to_out, None)), forward(inputs, out=(None, to_lse))
    third = forward(inputs, out=to_out)  # without a pair: only out
    assert first[0] is to_out and second[1] is to_lse and third[0] is to_out
    for got in (first, second, third):
        same(backend, got, (out, lse))
    for given in range(3):
        to: list[Any] = [None] * 3
        to[given] = backend.xp.empty_like(want[given])
        got = list(backward(inputs, out, lse, to=to))
        assert got[given] is to[given]
        same(backend, got, want)


@pytest.mark.parametrize("order", ["inner", "outer"])
def test_gradients_into_one_buffer(backend: Backend, order: str) -> None:
    """Of a fused projection: dq, dk and dv interleaved, beside q, k and v interleaved."""
    shape, at = ((2, 21, 3, 4, 24), 2) if order == "inner" else ((3, 2, 21, 4, 24), 0)
    qkv = normal(backend, 0, shape)
    dqkv = backend.xp.full(shape, np.nan, np.float32)
    q, k, v = (_part(qkv, at, i).copy() for i in range(3))
    plain = Inputs(q, k, v, dout=normal(backend, 1, (2, 21, 4, 24)), causal=True)
    fused = dataclasses.replace(plain, **{n: _part(qkv, at, i) for i, n in enumerate("qkv")})
    out, lse = forward(fused)
    to = tuple(_part(dqkv, at, i) for i in range(3))
    grads = backward(fused, out, lse, to=to)
    assert all(x is y for x, y in zip(grads, to, strict=True))
    check_forward(out, lse, plain)
    check_backward(grads, plain)
    assert not backend.xp.isnan(dqkv).any()


def _part(x: Any, axis: int, i: int) -> Any:
    return x[(slice(None),) * axis + (i,)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_old_memory_does_not_matter(backend: Backend, dtype: str) -> None:
    inputs = example(backend, DTYPES[dtype])
    results = []
    for fill in (0.0, np.nan, np.inf):
        out, lse = (filled(backend, x, fill) for x in (inputs.dout, inputs.dlse))
        forward(inputs, out=(out, lse))
        to = tuple(filled(backend, x, fill) for x in (inputs.q, inputs.k, inputs.v))
        size = workspace_bytes(partial(backward, inputs, out, lse), backend.xp)
        workspace = backend.xp.full(size, 255 if fill else 0, np.uint8)
        results.append([out, lse, *backward(inputs, out, lse, to=to, workspace=workspace)])
    same(backend, results[1], results[0])
    same(backend, results[2], results[0])


@pytest.mark.parametrize("apart", [1, 2], ids=["rows", "every other column"])
@pytest.mark.parametrize("head_dim", [5, 16, 70])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_workspace_asked_for_is_enough(
    backend: Backend, dtype: str, head_dim: int, apart: int
) -> None:
    """Which kernels run depends on strides, and what they need on the kernels."""
    shape = (1, 40, 1, apart * head_dim)
    q, k, v, dout = (normal(backend, i, shape, DTYPES[dtype])[..., ::apart] for i in range(4))
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    call = partial(cuflash.attention_backward, dout, q, k, v, out, lse)
    size = workspace_bytes(call, backend.xp)
    room = backend.xp.full(size + 8192, 7, np.uint8)
    got = call(workspace=room[4096 : 4096 + size])
    assert (room[:4096] == 7).all() and (room[4096 + size :] == 7).all()
    same(backend, got, call())


def test_errors_leave_destinations_as_they_were(backend: Backend) -> None:
    inputs = example(backend)
    out, lse = forward(inputs)
    to_out, to_lse = (filled(backend, x, 7) for x in (out, lse))
    with pytest.raises(ValueError, match="lse of out"):
        forward(inputs, out=(to_out, to_lse[:1]))
    to = tuple(filled(backend, x, 7) for x in (inputs.q, inputs.k, inputs.v))
    with pytest.raises(ValueError, match="workspace"):
        backward(inputs, out, lse, to=to, workspace=backend.xp.empty(1, np.uint8))
    assert all((x == 7).all() for x in (to_out, to_lse, *to))


def test_inputs_are_not_modified(backend: Backend) -> None:
    inputs = example(backend)
    arrays = [inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse]
    before = [x.copy() for x in arrays]
    out, lse = forward(inputs)
    results = [out.copy(), lse.copy()]
    backward(inputs, out, lse)
    same(backend, [*arrays, out, lse], [*before, *results])


# --- ways to gradients ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_vjp_is_backward(backend: Backend, dtype: str) -> None:
    inputs = example(backend, DTYPES[dtype])
    want_out, want_lse = forward(inputs)
    arguments = (inputs.q, inputs.k, inputs.v)
    assert len(cuflash.attention_vjp(*arguments, **inputs.options)) == 2
    out, lse, vjp = cuflash.attention_vjp(*arguments, **inputs.options, return_lse=True)
    same(backend, (out, lse), (want_out, want_lse))

    plain = dataclasses.replace(inputs, dlse=None)
    want, want_plain = backward(inputs, out, lse), backward(plain, out, lse)
    same(backend, vjp(inputs.dout), want_plain)
    check_backward(want_plain, plain)
    same(backend, vjp(inputs.dout, dlse=inputs.dlse), want)
    check_backward(want, inputs)
    same(backend, vjp(inputs.dout), want_plain)  # and again, as if nothing had been

    to = tuple(backend.xp.empty_like(x) for x in arguments)
    size = workspace_bytes(partial(vjp, inputs.dout), backend.xp)
    workspace = backend.xp.empty(size + 5, np.uint8)  # a larger one is fine
    grads = vjp(inputs.dout, dlse=inputs.dlse, out=to, workspace=workspace)
    assert all(x is y for x, y in zip(grads, to, strict=True))
    same(backend, grads, want)


def test_vjp_keeps_what_it_needs(backend: Backend) -> None:
    inputs = example(backend)
    vjp = cuflash.attention_vjp(*(x.copy() for x in (inputs.q, inputs.k, inputs.v)))[1]
    [normal(backend, seed, (2, 69, 2, 24)) for seed in range(20)]  # where they would have been
    check_backward(vjp(inputs.dout), Inputs(inputs.q, inputs.k, inputs.v, inputs.dout))


def test_gradients_are_a_record(backend: Backend) -> None:
    x = normal(backend, 0, (5, 2, 8))
    grads = cuflash.attention_vjp(x, x, x)[1](x)
    assert isinstance(grads, cuflash.Gradients)
    dq, dk, dv = grads
    assert dq is grads.dq and dk is grads.dk and dv is grads.dv
    with pytest.raises(dataclasses.FrozenInstanceError):
        grads.dq = dk


# --- options -------------------------------------------------------------------------------------

NAMES = ("q", "k", "v", "bias", "sinks")


def loaded(backend: Backend, dtype: Any = np.float32, **changes: Any) -> Inputs:
    """Every option at once."""
    accum = np.float64 if dtype == np.float64 else np.float32
    seen = np.random.default_rng(9).random((2, 1, 21, 69)) < 0.8
    options = dict(
        softcap=3.0,
        bias=normal(backend, 5, (1, 4, 21, 69), accum),
        mask=backend.array(seen),
        alibi_slopes=normal(backend, 6, (2, 4), accum),
        sinks=normal(backend, 7, (4,), accum),
        dropout_p=0.3,
        seed=11,
    )
    return example(backend, dtype, **{**options, **changes})


def five(grads: Any) -> list[Any]:
    return [getattr(grads, f"d{name}") for name in NAMES]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_only_what_is_wanted_is_there_and_the_same(backend: Backend, dtype: str) -> None:
    inputs = loaded(backend, DTYPES[dtype])
    out, lse = forward(inputs)
    want = dict(zip(NAMES, five(backward(inputs, out, lse)), strict=True))
    _, vjp = cuflash.attention_vjp(inputs.q, inputs.k, inputs.v, **inputs.options)
    for bits in range(2 ** len(NAMES)):
        wrt = tuple(name for n, name in enumerate(NAMES) if bits >> n & 1)
        for grads in (
            backward(inputs, out, lse, wrt=wrt),
            vjp(inputs.dout, dlse=inputs.dlse, wrt=wrt),
        ):
            got = dict(zip(NAMES, five(grads), strict=True))
            assert {name for name, x in got.items() if x is not None} == set(wrt)
            same(backend, [got[name] for name in wrt], [want[name] for name in wrt])


def test_wanted_gradients_go_where_they_are_wanted(backend: Backend) -> None:
    inputs = loaded(backend)
    out, lse = forward(inputs)
    want = five(backward(inputs, out, lse))
    for wrt in (("k",), ("v", "bias"), ("sinks",), ("q", "sinks"), ()):
        to = tuple(
            backend.xp.full(x.shape, np.nan, x.dtype) if name in wrt else None
            for name, x in zip(NAMES, want, strict=True)
        )
        got = five(backward(inputs, out, lse, wrt=wrt, to=to))
        assert all(x is y for x, y in zip(got, to, strict=True))
        kept = [n for n, x in enumerate(to) if x is not None]
        same(backend, [to[n] for n in kept], [want[n] for n in kept])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("view", VIEWS)
def test_five_gradients_into_views(backend: Backend, view: str, dtype: str) -> None:
    inputs = loaded(backend, DTYPES[dtype])
    out, lse = forward(inputs)
    want = five(backward(inputs, out, lse))
    # dsinks has one axis: the view of a 4-D array with one element on the others.
    shapes = [*(x.shape for x in want[:4]), (1, 4, 1, 1)]
    to = [
        Guarded(backend, *_buffer(VIEWS[view], shape, x.dtype))
        for shape, x in zip(shapes, want, strict=True)
    ]
    arrays = [*(x.array for x in to[:4]), to[4].array[0, :, 0, 0]]
    grads = backward(inputs, out, lse, to=tuple(arrays))
    assert all(x is y for x, y in zip(five(grads), arrays, strict=True))
    same(backend, arrays, want)
    for x in to:
        x.assert_intact()


def test_every_option_in_both_passes(backend: Backend) -> None:
    inputs = loaded(backend)
    out, lse, grads = both(inputs)
    check_forward(out, lse, inputs)
    check_backward(grads, inputs)


BIAS_SHAPES = [(21, 69), (1, 69), (21, 1), (1, 1), (2, 1, 21, 69), (1, 4, 1, 69), (2, 4, 21, 69)]


@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
def test_dbias_has_the_shape_of_bias(backend: Backend, shape: tuple[int, ...]) -> None:
    inputs = loaded(backend, bias=normal(backend, 5, shape))
    out, lse = forward(inputs)
    want = backward(inputs, out, lse)
    check_backward(want, inputs)
    buffer = backend.xp.full([2 * n for n in shape], np.nan, np.float32)
    to = buffer[(slice(None, None, -2),) * len(shape)]
    got = backward(inputs, out, lse, to=(None, None, None, to)).dbias
    assert got is to
    same(backend, [got], [want.dbias])
    alone = backward(inputs, out, lse, wrt="bias").dbias
    same(backend, [alone], [want.dbias])


def test_strides_of_options_do_not_matter(backend: Backend) -> None:
    inputs = loaded(backend)
    want = both(inputs)
    xp = backend.xp

    def strided(x: Any) -> Any:
        buffer = xp.zeros([2 * n for n in x.shape], x.dtype)
        view = buffer[(slice(None, None, -2),) * x.ndim]
        view[...] = x
        return view

    names = ("bias", "mask", "alibi_slopes", "sinks")
    views = dataclasses.replace(inputs, **{name: strided(getattr(inputs, name)) for name in names})
    got = both(views)
    same(backend, [*got[:2], *five(got[2])], [*want[:2], *five(want[2])])
    # A view that repeats one array is as good as the array that it repeats.
    wide = dataclasses.replace(
        inputs,
        mask=xp.broadcast_to(inputs.mask, (2, 4, 21, 69)),
        bias=xp.broadcast_to(inputs.bias, (2, 4, 21, 69)),
    )
    got = both(wide)
    same(backend, [*got[:2], *five(got[2])[:3]], [*want[:2], *five(want[2])[:3]])
    assert got[2].dbias.shape == (2, 4, 21, 69)
    check_backward(got[2], wide)


def test_vjp_keeps_the_options(backend: Backend) -> None:
    inputs = loaded(backend)
    out, lse, want = both(inputs)
    names = ("bias", "mask", "alibi_slopes", "sinks")
    options = inputs.options | {name: getattr(inputs, name).copy() for name in names}
    options["seed"] = np.array([inputs.seed])  # of the host: read by the call
    got_out, vjp = cuflash.attention_vjp(inputs.q, inputs.k, inputs.v, **options)
    options["seed"][:] = 0
    del options
    [normal(backend, seed, (2, 4, 21, 69)) for seed in range(5)]  # where they would have been
    same(backend, [got_out], [out])
    for _ in range(2):
        same(backend, five(vjp(inputs.dout, dlse=inputs.dlse)), five(want))
    plain = dataclasses.replace(inputs, dlse=None)
    check_backward(vjp(inputs.dout), plain)
    same(backend, five(vjp(inputs.dout)), five(backward(plain, out, lse)))


@pytest.mark.parametrize("shape", [(21, 69), (1, 1), (2, 4, 21, 69)], ids=str)
def test_workspace_with_bias(backend: Backend, shape: tuple[int, ...]) -> None:
    inputs = loaded(backend, bias=normal(backend, 5, shape))
    out, lse = forward(inputs)
    want = backward(inputs, out, lse)
    for wrt in (None, ("bias",), ("q", "k", "v"), ("sinks",)):
        with pytest.raises(
            ValueError, match=r"^workspace: expected a .* of at least \d+ uint8"
        ) as e:
            backward(inputs, out, lse, wrt=wrt, workspace=backend.xp.empty(1, np.uint8))
        size = int(str(e.value).split("at least ")[1].split()[0])
        delta = -(-inputs.dlse.nbytes // 16) * 16
        assert size >= delta if wrt in (None, ("bias",)) else size == delta
        with pytest.raises(ValueError, match=f"at least {size} uint8"):
            backward(inputs, out, lse, wrt=wrt, workspace=backend.xp.empty(size - 1, np.uint8))
        workspace = backend.xp.full(size + 64, GUARD, np.uint8)
        got = backward(inputs, out, lse, wrt=wrt, workspace=workspace[:size])
        wanted = [n for n, name in enumerate(NAMES) if wrt is None or name in wrt]
        same(backend, [five(got)[n] for n in wanted], [five(want)[n] for n in wanted])
        assert (workspace[size:] == GUARD).all()


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_old_memory_does_not_matter_to_options(backend: Backend, dtype: str) -> None:
    inputs = loaded(backend, DTYPES[dtype], bias=normal(backend, 5, (1, 69), DTYPES[dtype]))
    results = []
    for fill in (0.0, np.nan, np.inf):
        out, lse = (filled(backend, x, fill) for x in (inputs.dout, inputs.dlse))
        forward(inputs, out=(out, lse))
        to = tuple(filled(backend, getattr(inputs, name), fill) for name in NAMES)
        workspace = backend.xp.full(10**6, 255 if fill else 0, np.uint8)
        results.append([out, lse, *five(backward(inputs, out, lse, to=to, workspace=workspace))])
    same(backend, results[1], results[0])
    same(backend, results[2], results[0])


def test_options_are_not_modified(backend: Backend) -> None:
    inputs = loaded(backend)
    arrays = [inputs.bias, inputs.mask, inputs.alibi_slopes, inputs.sinks]
    before = [x.copy() for x in arrays]
    both(inputs)
    same(backend, arrays, before)


def test_seeds_are_64_bits_whatever_they_come_as(backend: Backend) -> None:
    inputs = loaded(backend, seed=2**64 - 3)
    want = both(inputs)
    device = backend.array(np.array([-3], np.int64))
    for seed in (-3, np.int8(-3), np.uint64(2**64 - 3), np.array(-3), device):
        got = both(dataclasses.replace(inputs, seed=seed))
        same(backend, [*got[:2], *five(got[2])], [*want[:2], *five(want[2])])
    other = both(dataclasses.replace(inputs, seed=-4))
    same(backend, [other[1]], [want[1]])  # lse does not depend on dropout
    assert (other[0] != want[0]).any()


def test_options_that_do_nothing(backend: Backend) -> None:
    inputs = example(backend)
    want = both(inputs)
    for changes in (
        {"softcap": 0},
        {"dropout_p": 0},
        {"seed": 5},
        {"bias": backend.xp.zeros((1, 1), np.float32)},
        {"mask": backend.xp.ones((1, 1), bool)},
        {"alibi_slopes": backend.xp.zeros(4, np.float32)},
        {"sinks": backend.xp.full(4, -np.inf, np.float32)},
    ):
        got = both(dataclasses.replace(inputs, **changes))
        for x, y in zip([*got[:2], *got[2]], [*want[:2], *want[2]], strict=True):
            np.testing.assert_allclose(backend.host(x), backend.host(y), atol=2e-5)
    dropped = both(dataclasses.replace(inputs, dropout_p=1, seed=0))
    same(backend, [dropped[1]], [want[1]])
    assert not backend.host(dropped[0]).any() and not backend.host(dropped[2].dv).any()


# --- packed entries ------------------------------------------------------------------------------

CU_Q = [3, 24, 24, 30, 95, 95]  # three rows before the first entry, five behind the last
CU_K = [0, 69, 75, 75, 140, 150]


def packed(backend: Backend, dtype: Any = np.float32, **changes: Any) -> Inputs:
    """Five entries: a usual one, one without queries, without keys, a long one, one without."""
    options = dict(
        q=normal(backend, 0, (100, 4, 24), dtype),
        k=normal(backend, 1, (152, 2, 24), dtype),
        v=normal(backend, 2, (152, 2, 20), dtype),
        dout=normal(backend, 3, (100, 4, 20), dtype),
        dlse=normal(backend, 4, (4, 100), np.float64 if dtype == np.float64 else np.float32),
        cu_seqlens_q=np.array(CU_Q, np.int32),
        cu_seqlens_k=np.array(CU_K, np.int64),
        causal=True,
        window=(40, -1),
    )
    return Inputs(**{**options, **changes})


def loaded_packed(backend: Backend, **changes: Any) -> Inputs:
    options = dict(
        softcap=3.0,
        bias=normal(backend, 5, (1, 4, 70, 69)),
        mask=backend.array(np.random.default_rng(9).random((5, 1, 65, 80)) < 0.8),
        alibi_slopes=normal(backend, 6, (5, 4)),
        sinks=normal(backend, 7, (4,)),
        dropout_p=0.3,
        seed=11,
    )
    return packed(backend, **{**options, **changes})


def all_of(results: Any) -> list[Any]:
    """out, lse and those gradients that there are."""
    out, lse, grads = results
    return [out, lse, *(x for x in five(grads) if x is not None)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_calls(backend: Backend, dtype: str) -> None:
    inputs = packed(backend, DTYPES[dtype])
    out, lse, grads = both(inputs)
    check_forward(out, lse, inputs)
    check_backward(grads, inputs)
    slack = [*range(3), *range(95, 100)]
    assert not backend.host(out)[slack].any() and not backend.host(grads.dq)[slack].any()
    assert (backend.host(lse)[:, slack] == -np.inf).all()
    assert not backend.host(grads.dk)[150:].any() and not backend.host(grads.dv)[150:].any()
    same(backend, all_of(both(inputs)), all_of((out, lse, grads)))  # the same call, the same bits


def test_packed_calls_with_every_option(backend: Backend) -> None:
    inputs = loaded_packed(backend)
    out, lse, grads = both(inputs)
    check_forward(out, lse, inputs)
    check_backward(grads, inputs)
    assert not backend.host(grads.dbias)[..., 65:, :].any()  # beyond the longest entry
    same(backend, all_of(both(inputs)), all_of((out, lse, grads)))
    turned = dataclasses.replace(
        inputs,
        layout="bhsd",
        **{name: swapped(getattr(inputs, name)) for name in ("q", "k", "v", "dout")},
    )
    got = all_of(both(turned))
    same(backend, [swapped(got[0]), got[1]], [out, lse])
    same(backend, [*map(swapped, got[2:5]), *got[5:]], five(grads))


def entry(inputs: Inputs, b: int) -> Inputs:
    """An entry of a packed call as a call of its own."""
    rows, keys = slice(*CU_Q[b : b + 2]), slice(*CU_K[b : b + 2])
    sq, sk = rows.stop - rows.start, keys.stop - keys.start
    i, changes = inputs, dict[str, Any](cu_seqlens_q=None, cu_seqlens_k=None)
    changes |= dict(q=i.q[rows], k=i.k[keys], v=i.v[keys], dout=i.dout[rows], dlse=i.dlse[:, rows])
    for name in ("bias", "mask"):
        if (x := getattr(i, name)) is not None:
            changes[name] = x[min(b, len(x) - 1) :][:1, :, :sq, :sk]
    if i.alibi_slopes is not None:
        changes["alibi_slopes"] = i.alibi_slopes[b]
    return dataclasses.replace(inputs, **changes)


@pytest.mark.parametrize("options", ["none", "all but dropout"])
def test_packed_entries_are_calls_of_their_own(backend: Backend, options: str) -> None:
    """Bit for bit: the same tiles of rows and keys, so the same sums.

    Dropout draws by the number of the entry, which a call of its own does not have.
    """
    inputs = packed(backend)
    if options != "none":
        inputs = loaded_packed(backend, dropout_p=0.0, seed=None)
    out, lse, grads = both(inputs)
    for b in range(5):
        rows, keys = slice(*CU_Q[b : b + 2]), slice(*CU_K[b : b + 2])
        got_out, got_lse, got = both(entry(inputs, b))
        same(backend, [got_out, got_lse], [out[rows], lse[:, rows]])
        same(backend, got, [grads.dq[rows], grads.dk[keys], grads.dv[keys]])


def test_the_first_entry_drops_what_a_call_of_its_own_drops(backend: Backend) -> None:
    inputs = packed(backend, dropout_p=0.5, seed=3)
    out, lse, grads = both(inputs)
    got_out, got_lse, got = both(entry(inputs, 0))
    rows, keys = slice(*CU_Q[:2]), slice(*CU_K[:2])
    same(backend, [got_out, got_lse], [out[rows], lse[:, rows]])
    same(backend, got, [grads.dq[rows], grads.dk[keys], grads.dv[keys]])


def test_hints_do_not_matter(backend: Backend) -> None:
    inputs = packed(backend)
    i, cu = inputs, inputs.cu_seqlens
    want = all_of(both(inputs))
    for hints in ((65, 69), (0, 0), (1, 2**40), (10**6, None)):
        hints = dict(zip(("max_seqlen_q", "max_seqlen_k"), hints, strict=True))
        out, lse = cuflash.attention_varlen(
            i.q, i.k, i.v, *cu, **hints, return_lse=True, **i.options
        )
        grads = cuflash.attention_varlen_backward(
            i.dout, i.q, i.k, i.v, out, lse, *cu, **hints, dlse=i.dlse, **i.options
        )
        same(backend, [out, lse, *grads], want)


def test_kinds_of_offsets_do_not_matter(backend: Backend) -> None:
    inputs = loaded_packed(backend)
    want = all_of(both(inputs))

    def strided(x: np.ndarray) -> np.ndarray:
        return np.stack([x, np.full_like(x, -(2**30))], axis=1)[::-1, 0][::-1]

    for dtype in (np.int32, np.int64):
        q, k = np.array(CU_Q, dtype), np.array(CU_K, dtype)
        for offsets in ((q, k), (strided(q), strided(k)), map(backend.array, (q, k))):
            at = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), offsets, strict=True))
            same(backend, all_of(both(dataclasses.replace(inputs, **at))), want)
    reverse = [np.array(x, np.int64)[::-1].copy()[::-1] for x in (CU_Q, CU_K)]
    at = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), reverse, strict=True))
    same(backend, all_of(both(dataclasses.replace(inputs, **at))), want)


def test_packed_results_go_where_they_are_wanted(backend: Backend) -> None:
    inputs = loaded_packed(backend)
    i, cu = inputs, inputs.cu_seqlens
    want_out, want_lse, want = both(inputs)
    to_out, to_lse = (filled(backend, x, np.nan) for x in (want_out, want_lse))
    out, lse = cuflash.attention_varlen(
        i.q, i.k, i.v, *cu, **i.options, return_lse=True, out=(to_out, to_lse)
    )
    assert out is to_out and lse is to_lse
    same(backend, [out, lse], [want_out, want_lse])
    alone = filled(backend, want_out, np.nan)
    assert cuflash.attention_varlen(i.q, i.k, i.v, *cu, **i.options, out=alone) is alone
    same(backend, [alone], [want_out])
    to = tuple(filled(backend, x, np.nan) for x in five(want))
    call = partial(
        *(cuflash.attention_varlen_backward, i.dout, i.q, i.k, i.v, out, lse, *cu),
        **dict(dlse=i.dlse, **i.options),
    )
    got = call(out=to, workspace=backend.xp.full(10**6, 255, np.uint8))
    assert all(x is y for x, y in zip(five(got), to, strict=True))
    same(backend, to, five(want))
    some = call(wrt=("bias", "k"))
    assert some.dq is some.dv is some.dsinks is None
    same(backend, [some.dk, some.dbias], [want.dk, want.dbias])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("cu", [[0], [5], [0, 0], [4, 4, 4], [0, 9], [2, 7]], ids=str)
def test_packed_calls_of_few_entries(backend: Backend, cu: list[int], dtype: str) -> None:
    x = normal(backend, 0, (9, 2, 8), dtype)
    offsets, entries = np.array(cu, np.int32), len(cu) - 1
    inputs = Inputs(
        *(x, x, x, normal(backend, 1, x.shape, dtype), normal(backend, 2, (2, 9))),
        bias=normal(backend, 3, (1, 2, 9, 1)),
        mask=normal(backend, 4, (entries, 1, 9, 9)) > -1,
        alibi_slopes=abs(normal(backend, 5, (entries, 2))),
        sinks=normal(backend, 6, (2,)),
        cu_seqlens_q=offsets,
        cu_seqlens_k=offsets,
    )
    out, lse = cuflash.attention_varlen(
        x, x, x, offsets, offsets, return_lse=True, **inputs.options
    )
    to = tuple(backend.xp.full_like(y, np.nan) for y in (x, x, x, inputs.bias, inputs.sinks))
    grads = cuflash.attention_varlen_backward(
        *(inputs.dout, x, x, x, out, lse, offsets, offsets),
        **dict(dlse=inputs.dlse, out=to, **inputs.options),
    )
    if cu[0] == cu[-1]:
        assert not backend.host(out).any() and (backend.host(lse) == -np.inf).all()
        assert not any(backend.host(y).any() for y in to)
    else:
        check_forward(out, lse, inputs)
        check_backward(grads, inputs)


GARBAGE = {
    "huge": [0, 2**40, 2**62, 2**63 - 1],
    "beyond 32 bits": [0, 2**31 + 10, 2**32 + 20, 2**33 + 30],
    "negative": [-5, -(2**63), -1, 10],
    "shrinking": [90, 60, 30, 0],
    "up and down": [0, 100, 0, 100],
    "overlapping": [0, 80, 40, 100],
}


@pytest.mark.parametrize("side", ["queries", "keys", "both"])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_offsets_that_nobody_checked(
    monkeypatch: pytest.MonkeyPatch, garbage: str, side: str
) -> None:
    """As those on a GPU: an access outside of the arrays would be a KernelFault."""
    backend = Backend("cpu", np)
    monkeypatch.setattr("cuflash.packed._offsets", lambda *_: 1)
    right, bad = np.array([3, 43, 43, 95]), np.array(GARBAGE[garbage])
    inputs = loaded_packed(
        backend,
        bias=normal(backend, 5, (3, 1, 52, 52)),
        mask=np.ones((52, 52), bool),
        alibi_slopes=normal(backend, 6, (3, 4)),
        cu_seqlens_q=right if side == "keys" else bad,
        cu_seqlens_k=right if side == "queries" else bad,
    )
    out, lse, grads = both(inputs)
    assert out.shape == inputs.dout.shape and lse.shape == (4, 100)
    assert [x.shape for x in five(grads)] == [getattr(inputs, name).shape for name in NAMES]


# --- shapes and sizes ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_agree_bit_for_bit(backend: Backend, dtype: str) -> None:
    inputs = example(backend, DTYPES[dtype])
    out, lse = forward(inputs)
    grads = backward(inputs, out, lse)
    arrays = dict(q=inputs.q, k=inputs.k, v=inputs.v, dout=inputs.dout)
    solid = backend.xp.ascontiguousarray
    for change in (swapped, lambda x: solid(swapped(x))):
        turned = dataclasses.replace(
            inputs, layout="bhsd", **{name: change(x) for name, x in arrays.items()}
        )
        turned_out, turned_lse = forward(turned)
        same(backend, [swapped(turned_out), turned_lse], [out, lse])
        same(backend, map(swapped, backward(turned, turned_out, turned_lse)), grads)
    for b in range(2):
        single = dataclasses.replace(
            inputs, dlse=inputs.dlse[b], **{name: x[b] for name, x in arrays.items()}
        )
        single_out, single_lse = forward(single)
        same(backend, [single_out, single_lse], [out[b], lse[b]])
        same(backend, backward(single, single_out, single_lse), [x[b] for x in grads])
        turned = dataclasses.replace(
            single, layout="bhsd", **{name: swapped(x[b]) for name, x in arrays.items()}
        )
        turned_out, turned_lse = forward(turned)
        same(backend, [swapped(turned_out), turned_lse], [out[b], lse[b]])
        same(backend, map(swapped, backward(turned, turned_out, turned_lse)), [x[b] for x in grads])


ZERO_SIZES = {  # batch, seqlen_q, seqlen_kv, heads_q, heads_kv
    "batch": (0, 3, 5, 4, 2),
    "queries": (2, 0, 5, 4, 2),
    "keys": (2, 3, 0, 4, 2),
    "lengths": (2, 0, 0, 4, 2),
    "query heads": (2, 3, 5, 0, 2),
    "heads": (2, 3, 5, 0, 0),
    "batch and keys": (0, 3, 0, 4, 2),
    "everything": (0, 0, 0, 0, 0),
}


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("size", ZERO_SIZES.values(), ids=ZERO_SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_sizes(backend: Backend, dtype: str, size: tuple[int, ...], layout: str) -> None:
    batch, sq, sk, hq, hkv = size
    shapes = [(batch, sq, hq, 8), (batch, sk, hkv, 8), (batch, sk, hkv, 6), (batch, sq, hq, 6)]
    q, k, v, dout = (normal(backend, i, s, DTYPES[dtype]) for i, s in enumerate(shapes))
    if layout == "bhsd":
        q, k, v, dout = (x.swapaxes(1, 2) for x in (q, k, v, dout))
    accum = np.float64 if dtype == "float64" else np.float32
    inputs = Inputs(q, k, v, dout, normal(backend, 4, (batch, hq, sq), accum), layout=layout)
    full = partial(filled, backend, value=np.nan)

    for to_out in (None, (full(dout), full(inputs.dlse))):
        out, lse = forward(inputs, out=to_out)
        assert out.shape == dout.shape and out.dtype == dout.dtype
        assert lse.shape == inputs.dlse.shape and lse.dtype == accum
        assert not backend.host(out).any() and (backend.host(lse) == -np.inf).all()
        for to in (None, tuple(map(full, (q, k, v)))):
            grads = backward(inputs, out, lse, to=to)
            for x, like in zip(grads, (q, k, v), strict=True):
                assert x.shape == like.shape and x.dtype == like.dtype
                assert not backend.host(x).any()


@pytest.mark.parametrize("size", ZERO_SIZES.values(), ids=ZERO_SIZES)
def test_zero_sizes_with_options(backend: Backend, size: tuple[int, ...]) -> None:
    """Gradients of options are 0 where nothing is, and lse is the sink."""
    batch, sq, sk, hq, hkv = size
    shapes = [(batch, sq, hq, 8), (batch, sk, hkv, 8), (batch, sk, hkv, 6), (batch, sq, hq, 6)]
    q, k, v, dout = (normal(backend, i, s) for i, s in enumerate(shapes))
    sinks = normal(backend, 5, (hq,))
    for shape in [(1, 1), (sq, sk), (batch, hq, sq, sk), (1, hq, 1, sk)]:
        inputs = Inputs(
            *(q, k, v, dout, None),
            **dict(bias=normal(backend, 6, shape), sinks=sinks, dropout_p=0.5, seed=1),
        )
        out, lse = forward(inputs)
        assert not backend.host(out).any()
        want = np.broadcast_to(backend.host(sinks)[:, None], (batch, hq, sq))
        np.testing.assert_allclose(backend.host(lse), want, rtol=1e-6)
        to = tuple(
            backend.xp.full(x.shape, np.nan, np.float32) for x in (q, k, v, inputs.bias, sinks)
        )
        grads = backward(inputs, out, lse, to=to)
        for x, y in zip(five(grads), to, strict=True):
            assert x is y and not backend.host(x).any()


def test_rows_that_see_nothing_among_others(backend: Backend) -> None:
    """More queries than keys: with causal order the first ones see no key."""
    inputs = Inputs(
        *(normal(backend, i, (1, n, 2, 8)) for i, n in enumerate((40, 9, 9, 40))), causal=True
    )
    out, lse = forward(inputs, out=backend.xp.full((1, 40, 2, 8), np.nan, np.float32))
    check_forward(out, lse, inputs)
    assert (backend.host(lse)[..., :31] == -np.inf).all() and not backend.host(out)[:, :31].any()
    check_backward(backward(inputs, out, lse), inputs)


# --- arrays of other kinds -----------------------------------------------------------------------


class Dlpack:
    """An array of some other library: nothing but DLPack."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_dlpack_in_and_out(backend: Backend, dtype: str) -> None:
    inputs = example(backend, DTYPES[dtype])
    want, want_lse = forward(inputs)
    want_grads = backward(inputs, want, want_lse)
    names = ("q", "k", "v", "dout", "dlse")
    # Strided, so that strides have to come across.
    strided = {name: backend.xp.stack([getattr(inputs, name)] * 2, -2)[..., 1, :] for name in names}
    foreign = dataclasses.replace(inputs, **{name: Dlpack(x) for name, x in strided.items()})
    out, lse = forward(foreign)
    assert type(out) is backend.xp.ndarray and type(lse) is backend.xp.ndarray
    same(backend, (out, lse), (want, want_lse))
    same(backend, backward(foreign, Dlpack(out), Dlpack(lse)), want_grads)

    to_out, to_lse = Dlpack(backend.xp.empty_like(want)), Dlpack(backend.xp.empty_like(want_lse))
    got = forward(foreign, out=(to_out, to_lse))
    assert got == (to_out, to_lse)
    same(backend, (to_out.x, to_lse.x), (want, want_lse))
    to = tuple(Dlpack(backend.xp.empty_like(x)) for x in want_grads)
    grads = backward(foreign, to_out, to_lse, to=to)
    assert all(x is y for x, y in zip(grads, to, strict=True))
    same(backend, [x.x for x in to], want_grads)
    with pytest.raises(ValueError, match=r"^out: shares memory with q"):
        cuflash.attention(foreign.q, foreign.k, foreign.v, out=Dlpack(strided["q"]))


class Elsewhere(Dlpack):
    def __dlpack_device__(self) -> Any:
        return (10, 0)  # ROCm


class Broken(Dlpack):
    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("gradients are required")


def test_dlpack_that_does_not_come_in() -> None:
    x = np.zeros((3, 2, 8), "f4")
    with pytest.raises(
        TypeError, match=r"^q: expected an array on a CUDA GPU or the CPU, got .*10"
    ):
        cuflash.attention(Elsewhere(x), x, x)
    with pytest.raises(TypeError, match=r"^k: Broken does not come in .*: gradients are required"):
        cuflash.attention(x, Broken(x), x)
    with pytest.raises(TypeError, match=r"^v: Dlpack does not come in through DLPack"):
        cuflash.attention(x, x, Dlpack(x.astype(ml_dtypes.bfloat16)))


def test_unaligned_numpy_arrays() -> None:
    """Fields of packed records. A GPU array of this kind is an error: see test_gpu.py."""
    inputs = example(Backend("cpu", np))
    names = ("q", "k", "v", "dout", "dlse")

    def packed(x: np.ndarray) -> np.ndarray:
        field = np.empty(x.shape, np.dtype([("tag", "u1"), ("x", x.dtype)]))["x"]
        field[...] = x
        assert not field.flags.aligned
        return field

    unaligned = dataclasses.replace(inputs, **{n: packed(getattr(inputs, n)) for n in names})
    out, lse = forward(inputs)
    same(Backend("cpu", np), forward(unaligned), (out, lse))
    grads = backward(unaligned, packed(out), packed(lse))
    same(Backend("cpu", np), grads, backward(inputs, out, lse))


def test_subclasses_and_files_are_arrays(tmp_path: Any) -> None:
    x = np.random.default_rng(0).normal(size=(9, 2, 8)).astype("f4")
    x.tofile(tmp_path / "x")
    mapped = np.memmap(tmp_path / "x", "f4", mode="r", shape=x.shape)
    want = cuflash.attention(x, x, x)
    same(Backend("cpu", np), [cuflash.attention(mapped, mapped, mapped)], [want])
    out = np.memmap(tmp_path / "out", "f4", mode="w+", shape=x.shape)
    assert cuflash.attention(mapped, mapped, mapped, out=out) is out
    same(Backend("cpu", np), [out], [want])


# --- threads and processes -----------------------------------------------------------------------


def test_threads_may_call_at_once(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the very first time, when there is no kernel yet."""
    inputs = example(backend)
    want_out, want_lse = forward(inputs)
    want = [want_out, want_lse, *backward(inputs, want_out, want_lse)]
    for kernel in list(compile._kernels):
        monkeypatch.delitem(compile._kernels, kernel)
    launch.forget()

    made: list[Any] = []
    for kind in (compile.CpuKernel, compile.GpuKernel):
        make = kind.__init__
        monkeypatch.setattr(
            kind,
            "__init__",
            lambda self, plan, *rest, make=make: (
                made.append(plan),
                time.sleep(0.05),
                make(self, plan, *rest),
            )[-1],
        )
    start = threading.Barrier(4)
    results: list[Any] = []

    def work() -> None:
        start.wait()
        out, lse = forward(inputs)
        results.append([out, lse, *backward(inputs, out, lse)])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for result in results:
        same(backend, result, want)
    assert made and len(made) == len(set(made))  # each kernel is made once


FORK = """
import os, signal, sys, threading
import numpy as np
import cuflash

x = np.random.default_rng(0).normal(size=(40, 2, 8)).astype("f4")
want, vjp = cuflash.attention_vjp(x, x, x, causal=True)
grads = list(vjp(x))
# Another thread holds the lock of the compilation while the process forks.
held, done = threading.Event(), threading.Event()
from cuflash import compile
def hold():
    with compile._lock:
        held.set()
        done.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if not child:
    signal.alarm(100)  # should it hang
    out, vjp = cuflash.attention_vjp(x, x, x, causal=True)
    right = np.array_equal(out, want)
    right &= all(np.array_equal(a, b) for a, b in zip(vjp(x), grads))
    y = x.astype("f2")  # needs kernels that the parent has not
    right &= cuflash.attention(y, y, y).dtype == np.float16
    os._exit(0 if right else 1)
done.set()
thread.join()
_, status = os.waitpid(child, 0)
assert np.array_equal(cuflash.attention(x, x, x, causal=True), want)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_fork_after_a_call() -> None:
    """On the CPU back end; CUDA does not survive a fork."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=120,
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


# --- words ---------------------------------------------------------------------------------------


class Idle:
    """A kernel that does not run."""

    def launch(self, *_: Any) -> None:
        pass


def test_a_slow_call_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(*_: Any) -> list[Any]:
        return [(Delta("float32"), Idle())]

    with stepping(steps):
        _slow_calls(monkeypatch)


def _slow_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow, "_warned", False)
    small = np.zeros((1, 100, 1, 64), "f4")
    huge = np.broadcast_to(small[:, :1], (1, 2**20, 1, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cuflash.attention(small, small, small)
    message = r"this forward on NumPy arrays will take about \d+ seconds \(until \d\d:\d\d\)"
    with pytest.warns(RuntimeWarning, match=message) as caught:
        cuflash.attention(small, huge, huge, out=small.copy())
        cuflash.attention(huge[:, :1000], huge, huge)
        cuflash.attention(huge[:, :1000], huge, huge)
    assert len(caught) == 1 and caught[0].filename == __file__

    # Many short entries are quick, however many rows there are.
    monkeypatch.setattr(slow, "_warned", False)
    offsets = np.arange(0, 2**20 + 1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cuflash.attention_varlen(huge[0], huge[0], huge[0], offsets, offsets)
    monkeypatch.setattr(slow, "_warned", True)

    vjp = cuflash.attention_vjp(huge[:, :200], huge, huge)[1]
    monkeypatch.setattr(slow, "_warned", False)
    with pytest.warns(RuntimeWarning, match="this backward on NumPy arrays") as caught:
        vjp(huge[:, :200], out=(None, None, None))
    assert len(caught) == 1 and caught[0].filename == __file__


def test_debug_names_problem_and_plan(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUFLASH_DEBUG", "1")
    launch.forget()
    x = normal(backend, 0, (5, 2, 8))
    cuflash.attention(x, x, x)
    cuflash.attention(x, x, x)
    said = capsys.readouterr().err.splitlines()
    lines = [line for line in said if "compiled" not in line]
    assert len(lines) == 2 and all(line.startswith("cuflash: ") for line in said)
    for part in ("cuflash: forward on ", "float32", "head sizes 8 and 8", "options none"):
        assert part in lines[0]
    for part in ("  forward_simt (simt): ", "bytes of shared", "tile_q ", "code for no options"):
        assert part in lines[1]
    cuflash.attention(x, x, x, sinks=backend.array(np.zeros(2, np.float32)))
    said = capsys.readouterr().err
    assert "options sinks, rows" in said and "code for softcap bias mask" in said


def test_public_names() -> None:
    assert set(cuflash.__all__) <= set(dir(cuflash))
    for name in cuflash.__all__:
        assert getattr(cuflash, name).__doc__
