# SPDX-License-Identifier: Apache-2.0
"""Copies of arrays whose rows cannot be moved by 16 bytes: when they are made, and that they are
right. Calls here are short, so that they are asked for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from check import Inputs, check_backward, check_forward
from conftest import Backend
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix import OPTION_ROWS, ROWS, Row
from run import backward, both, copying, forward, on, schedule, using, workspace_bytes
from strategies import arrays_of, cases

import cuflash
from cuflash import device, realign, select
from cuflash.arrays import Form
from cuflash.dtypes import DTYPES
from cuflash.layout import read_axes
from cuflash.plan import Plan
from cuflash.problem import OPEN, Problem, Traits

TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
FAST_ROWS = [
    row
    for row in ROWS + OPTION_ROWS
    if row.family("forward") in ("mma", "sm90") and "shipped" not in row.name
]
HOPPER = device.architecture(9, 0)


@pytest.mark.parametrize("row", FAST_ROWS, ids=lambda row: row.name)
@settings(max_examples=10)
@given(data=st.data())
def test_calls_on_copies_agree(backend: Backend, row: Row, data: st.DataObject) -> None:
    case = data.draw(cases(row, any_strides=True))
    inputs = arrays_of(case)
    with using(row.forward, row.backward), schedule(case.schedule, case.blocks), copying():
        out, lse, grads = both(on(backend, inputs))
    check_forward(out, lse, inputs)
    check_backward(grads, inputs)


# --- Which arrays are copied ----------------------------------------------------------------------

SHAPE = (2, 300, 4, 48)


def places(
    shapes: Mapping[str, tuple[int, ...]],
    strides: Mapping[str, tuple[int, ...]] | None = None,
    direction: realign.Direction = "forward",
    where: device.Device = HOPPER,
    **more: Any,
) -> dict[str, Form]:
    """Return the copies that a call makes of arrays of these shapes in bfloat16."""
    forms = {}
    for name, shape in shapes.items():
        contiguous = tuple(2 * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        forms[name] = Form(shape, (strides or {}).get(name, contiguous), 2, 0)
    layout = read_axes("q", "bshd", shapes["q"])
    batch, seqlen_q, heads_q, dim = layout.sizes(shapes["q"])
    _, seqlen_kv, heads_kv, _ = layout.sizes(shapes["k"])
    sizes = batch, heads_q, heads_kv, seqlen_q, seqlen_kv, dim, shapes["v"][-1]
    problem = Problem(DTYPES["bfloat16"], *sizes, 1.0, OPEN, OPEN)._replace(**more)

    def choose(traits: Traits) -> Plan:
        return select.choose(direction, traits, where)

    return realign.places(direction, problem, layout, forms, choose)


def of_forward(shape: tuple[int, ...], keys: int = 0) -> dict[str, tuple[int, ...]]:
    kv = (*shape[:1], keys, *shape[2:]) if keys else shape
    return {"q": shape, "k": kv, "v": kv, "out": shape}


@pytest.mark.parametrize("dim", [41, 100])
def test_tma_takes_copies_of_all_odd_arrays(dim: int) -> None:
    shape = (*SHAPE[:3], dim)
    found = places(of_forward(shape))
    width = -(-dim // 8) * 8
    assert list(found) == ["q", "k", "v", "out"]
    assert set(found.values()) == {
        Form((*SHAPE[:3], width), (2400 * width, 8 * width, 2 * width, 2), 2, 0)
    }
    assert all(realign.nbytes(place) == 2 * 300 * 4 * width * 2 for place in found.values())
    backward = {name: shape for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")}
    assert list(places(backward, direction="backward")) == ["q", "k", "v", "out", "dout"]


def test_only_odd_arrays_are_copied() -> None:
    assert not places(of_forward(SHAPE))
    apart = tuple(2 * s for s in (300 * 4 * 49, 4 * 49, 49, 1))
    for name in ("q", "k", "v", "out"):
        assert list(places(of_forward(SHAPE), {name: apart})) == [name]
    reverse = (300 * 384, 384, 96, -2)
    assert list(places(of_forward(SHAPE), {"k": reverse, "out": reverse})) == ["k", "out"]


def test_strides_of_axes_of_length_1_are_no_reason_to_copy() -> None:
    shape = (1, 300, 1, 48)
    odd = (2 * 77777, 96, 2 * 333, 2)
    for name in ("q", "k", "v", "out"):
        assert not places(of_forward(shape), {name: odd})
        assert list(places(of_forward((1, 300, 2, 48)), {name: odd})) == [name]


def test_vectors_of_8_bytes_are_fine_without_tma() -> None:
    where = device.architecture(8, 0)
    assert list(places(of_forward((2, 300, 4, 41)), where=where)) == ["q", "k", "v"]
    assert not places(of_forward((2, 300, 4, 100)), where=where)
    assert not places(of_forward((2, 300, 4, 48)), {"k": (0, 384, 96, 2)}, where=where)


def test_what_is_broadcast_is_copied_once_by_a_forward() -> None:
    shape = (2, 300, 4, 41)
    shared = {"k": (0, 4 * 82, 82, 2), "q": (0, 4 * 82, 82, 2)}
    found = places(of_forward(shape), shared)
    assert list(found) == ["q", "k", "v"]  # for vectors: TMA does not take k
    assert found["k"] == Form((2, 300, 4, 48), (0, 384, 96, 2), 2, 0)
    assert realign.nbytes(found["k"]) == 300 * 384
    assert realign.nbytes(found["q"]) == 2 * 300 * 384
    backward = {name: shape for name in ("q", "k", "v", "out", "dout")}
    found = places(backward, {**shared, "dout": (0, 0, 0, 0)}, direction="backward")
    assert list(found) == ["q", "k", "v", "out", "dout"]
    assert {realign.nbytes(place) for place in found.values()} == {2 * 300 * 384}


def test_small_calls_and_slow_families_are_left_alone() -> None:
    enough, few = realign.MIN_LENGTH, realign.MIN_LENGTH - 1
    assert places(of_forward((1, enough, 4, 41), enough))
    assert not places(of_forward((1, few, 4, 41), enough))
    assert not places(of_forward((1, enough, 4, 41), few))
    assert not places(of_forward((0, enough, 4, 41), enough))
    assert not places(of_forward((1, enough, 0, 41), enough))
    packed = of_forward((3 * enough, 4, 41))
    assert places(packed, features=("packed",), batch=3)
    assert not places(packed, features=("packed",), batch=4)
    assert places(packed, features=("packed",), batch=0)
    assert not places(of_forward((1, enough, 4, 41)), where=device.architecture(7, 5))
    assert not places(of_forward((1, enough, 4, 257)))
    assert not places(of_forward((1, enough, 4, 41)), dtype=DTYPES["float32"])


# --- Manners --------------------------------------------------------------------------------------


def example(
    backend: Backend,
    dtype: Any,
    dim: int,
    dim_v: int,
    seqlen: tuple[int, int] = (70, 90),
    seed: int = 0,
) -> Inputs:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Any:
        return backend.array(rng.standard_normal(shape).astype(dtype))

    rows, keys = seqlen
    q, k, v = normal(2, rows, 4, dim), normal(2, keys, 2, dim), normal(2, keys, 2, dim_v)
    return Inputs(q, k, v, normal(2, rows, 4, dim_v), causal=True)


def odd(backend: Backend, like: Any, fill: float) -> Any:
    """Return an array of that shape in the middle of a larger one, whose rows have odd strides."""
    *lengths, dim = like.shape
    lengths[1] += 1
    base = backend.array(np.full((*lengths, dim + 6), fill, like.dtype))
    return base[:, 1:, :, 3 : 3 + dim]


def plans(family: str, dtype: str) -> tuple[Plan, Plan]:
    """Return plans for head sizes up to 64."""
    traits = Traits(DTYPES[dtype], 64, 64, boxes=family == "sm90")
    return select.choose("forward", traits, HOPPER), select.choose("backward", traits, HOPPER)


def same(backend: Backend, got: Any, want: Any) -> None:
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(backend.host(x).view("u2"), backend.host(y).view("u2"))


FAMILIES = pytest.mark.parametrize("family", ["mma", "sm90"])


@FAMILIES
@pytest.mark.parametrize("dim", [41, 52])
@pytest.mark.parametrize("dtype", TYPES)
def test_the_workspace_asked_for_is_used_and_enough(
    backend: Backend, dtype: str, dim: int, family: str
) -> None:
    """Whatever lies in it, and in results that have odd strides, before."""
    inputs = example(backend, TYPES[dtype], dim, 35)
    with copying(), using(*plans(family, dtype)):
        out, lse = forward(inputs)
        check_forward(out, lse, inputs)
        call = partial(cuflash.attention_backward, inputs.dout, inputs.q, inputs.k, inputs.v)
        call = partial(call, out, lse, causal=True)
        want = call()
        check_backward(want, inputs)
        size = workspace_bytes(call, backend.xp)
        for fill in (0, 255):
            room = backend.xp.full(size + 8192, fill, np.uint8)
            to = tuple(odd(backend, x, np.nan) for x in (inputs.q, inputs.k, inputs.v))
            got = call(workspace=room[4096 : 4096 + size], out=to)
            assert (room[:4096] == fill).all() and (room[4096 + size :] == fill).all()
            assert all(x is y for x, y in zip(got, to, strict=True))
            same(backend, got, want)
    rows, keys = 2 * 70 * 4, 2 * 90 * 2
    odd_dims = family == "sm90" or dim == 41  # rows of 52 elements can be moved by 8 bytes
    copies = -(-dim // 8) * 8 * (rows + keys) if odd_dims else 0
    copies += 40 * (keys + 2 * rows)
    with copying(), using(*plans(family, dtype)):
        padded = example(backend, TYPES[dtype], 56 if odd_dims else 52, 40)
        out, lse = forward(padded)
        call = partial(cuflash.attention_backward, padded.dout, padded.q, padded.k, padded.v)
        assert size == 2 * copies + workspace_bytes(partial(call, out, lse), backend.xp)


@FAMILIES
@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "out", "to"])
def test_one_odd_array_is_enough(backend: Backend, name: str, family: str) -> None:
    """Rows of the others are aligned. What surrounds each array is NaN, and stays."""
    inputs = example(backend, np.float16, 48, 32)
    with copying(), using(*plans(family, "float16")):
        want_out, want_lse, want = both(inputs)
        if name in ("q", "k", "v", "dout"):
            x = getattr(inputs, name)
            view = odd(backend, x, np.nan)
            view[...] = x
            inputs = dataclasses.replace(inputs, **{name: view})
        out, lse, to = None, None, None
        if name == "to":
            to = odd(backend, inputs.dout, 7)
        call = partial(cuflash.attention, inputs.q, inputs.k, inputs.v, causal=True)
        out, lse = call(return_lse=True, out=None if to is None else (to, want_lse.copy()))
        same(backend, (out,), (want_out,))
        np.testing.assert_array_equal(backend.host(lse), backend.host(want_lse))
        if to is not None:
            assert out is to
            around = backend.host(to.base if to.base is not None else to)
            assert np.count_nonzero(around == 7) >= around.size - to.size
        if name == "out":
            view = odd(backend, out, np.nan)
            view[...] = out
            out = view
        same(backend, backward(inputs, out, lse), want)


@FAMILIES
def test_what_lies_behind_head_dim_never_matters(backend: Backend, family: str) -> None:
    plain = example(backend, np.float16, 41, 41)
    names = ("q", "k", "v", "dout")
    with copying(), using(*plans(family, "float16")):
        want_out, _, want = both(plain)
        for fill in (np.nan, np.inf):
            wide = {}
            for name in names:
                x = getattr(plain, name)
                base = backend.array(np.full((*x.shape[:-1], 48), fill, np.float16))
                base[..., :41] = x
                wide[name] = base[..., :41]
            inputs = dataclasses.replace(plain, **wide)
            out, _, got = both(inputs)
            same(backend, (out, *got), (want_out, *want))
            for name in names:
                rest = backend.host(getattr(inputs, name).base)[..., 41:]
                np.testing.assert_array_equal(rest, np.full_like(rest, fill))


@pytest.mark.parametrize("dim", [41, 100])
def test_a_call_that_is_long_enough_by_itself(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, capfd: Any, dim: int
) -> None:
    monkeypatch.setenv("CUFLASH_DEBUG", "1")
    inputs = example(backend, ml_dtypes.bfloat16, dim, dim, (256, 257))
    out, lse, grads = both(inputs)
    check_forward(out, lse, inputs)
    check_backward(grads, inputs)
    said = capfd.readouterr().err
    if dim == 41 or backend.is_hopper:  # rows of 100 elements can be moved by 8 bytes
        assert "cuflash: forward, on copies of q, k, v" in said
        assert "cuflash: backward, on copies of q, k, v, out, dout" in said
    else:
        assert "copies" not in said


@pytest.mark.gpu
@pytest.mark.parametrize("own_workspace", [False, True], ids=["scratch", "workspace"])
def test_a_replayed_graph_copies_anew(backend: Backend, own_workspace: bool) -> None:
    xp, options = backend.xp, {}
    inputs = example(backend, np.float16, 41, 35)
    i = inputs

    def run() -> Any:
        out, lse = forward(inputs)
        call = partial(cuflash.attention_backward, i.dout, i.q, i.k, i.v, out, lse, causal=True)
        if own_workspace and not options:
            options["workspace"] = xp.full(workspace_bytes(call, xp), 255, np.uint8)
        return out, lse, call(**options)

    pool = xp.cuda.MemoryPool()
    stream = xp.cuda.Stream(non_blocking=True)
    xp.cuda.Device().synchronize()
    with copying(), xp.cuda.using_allocator(pool.malloc), stream:
        run()
        stream.synchronize()
        stream.begin_capture()
        out, lse, grads = run()
        graph = stream.end_capture()
        # Whatever the pool gives away now is not the graph's.
        others = [xp.full(2**n, np.nan, np.float32) for n in range(8, 18) for _ in range(8)]
        stream.synchronize()
    for seed in (1, 2):
        new = example(backend, np.float16, 41, 35, seed=seed)
        for name in ("q", "k", "v", "dout"):
            to, x = getattr(inputs, name), getattr(new, name)
            to.data.copy_from_device(x.data, x.nbytes)
        xp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        check_forward(out, lse, new)
        check_backward(grads, new)
        assert all(np.isnan(x.get()).all() for x in others)
