# SPDX-License-Identifier: Apache-2.0
"""Backward calls with ``deterministic=False``: as right as the others, with other turns."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, cast

import numpy as np
import pytest
from check import check_backward
from conftest import Backend
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix import ARCHITECTURES, UNORDERED_ROWS, Row
from run import on, schedule, using, workspace_bytes
from strategies import Case, arrays_of, cases

import cuflash
from cuflash import device, select
from cuflash.describe import describe
from cuflash.dtypes import DTYPES
from cuflash.plan import BackwardMma, BackwardRowsMma, BackwardSm90
from cuflash.problem import FEATURES, Traits
from cuflash.testing import Inputs

ROWS = {row.name: row for row in UNORDERED_ROWS}


def forward(inputs: Inputs) -> tuple[Any, Any]:
    """Return out and lse."""
    i, cu = inputs, inputs.cu_seqlens
    call = cuflash.attention_varlen if cu else cuflash.attention
    return call(i.q, i.k, i.v, *cu, return_lse=True, **i.options)


def backward(inputs: Inputs, out: Any, lse: Any, **more: Any) -> cuflash.Gradients:
    """Return the gradients, by default those of a call that need not be deterministic."""
    i, cu = inputs, inputs.cu_seqlens
    call = cuflash.attention_varlen_backward if cu else cuflash.attention_backward
    more = {"deterministic": False, **more}
    return call(i.dout, i.q, i.k, i.v, out, lse, *cu, dlse=i.dlse, **i.options, **more)


def case(row: Row, seqlen_q: int, seqlen_kv: int, **more: Any) -> Case:
    """Return a call of two key heads, each read by two query heads."""
    given: dict[str, Any] = dict(
        dtype=row.dtype,
        batch=1,
        heads_kv=2,
        group=2,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        head_dim=row.head_dim,
        head_dim_v=row.head_dim_v,
        causal=False,
        window=(-1, -1),
        scale=None,
        layout="bshd",
        views=("contiguous",) * 4,
        values="normal",
        with_dlse=False,
        seed=7,
        schedule=0,
    )
    return Case(**{**given, **more})


@pytest.mark.parametrize("row", UNORDERED_ROWS, ids=lambda row: row.name)
@settings(max_examples=8)
@given(data=st.data())
def test_any_call_agrees_with_the_reference(
    backend: Backend, row: Row, data: st.DataObject
) -> None:
    drawn = data.draw(cases(row))
    inputs = arrays_of(drawn)
    given = on(backend, inputs)
    with using(row.forward, row.backward), schedule(drawn.schedule, drawn.blocks):
        check_backward(backward(given, *forward(given)), inputs)


@pytest.mark.parametrize("family", ["mma-both", "mma-warps", "sm90-four", "sm90-wide"])
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (70, 0), (40, 90)], ids=str)
def test_races(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, family: str, window: tuple[int, int]
) -> None:
    """Of all accesses, where three key tiles and more add to a query tile."""
    if backend.name == "gpu":
        pytest.skip("the CPU back end looks for races")
    monkeypatch.setenv("CUFLASH_HOST_RACES", "1")
    row = next(row for name, row in ROWS.items() if family in name)
    main = next(x for x in row.backward if isinstance(x, (BackwardMma, BackwardSm90)))
    keys = max(3 * main.tile_kv, 160) + 5
    inputs = arrays_of(case(row, keys - 40, keys, window=window, heads_kv=1))
    for seed in (1, 2):
        with using(row.forward, row.backward), schedule(seed, 3):
            check_backward(backward(inputs, *forward(inputs)), inputs)


def turns(row: Row, got: np.ndarray, seqlen_q: int, heads: int) -> np.ndarray:
    """Return the counters of turns that a call has left in its workspace: (heads, tiles)."""
    rows = row.backward[0]
    assert isinstance(rows, BackwardRowsMma)
    tiles = math.ceil(seqlen_q / rows.tile_q)
    start = heads * tiles * rows.tile_q * 8
    groups = math.ceil(tiles / rows.turn)
    count = heads * groups * rows.splits
    found = np.ascontiguousarray(got[start : start + 4 * count]).view("i4")
    return found.reshape(heads, groups, rows.splits)


@pytest.mark.parametrize("name", ["mma-both", "mma-warp", "sm90-one", "sm90-three"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_nobody_has_a_turn_but_those_that_may_be_the_first(
    backend: Backend, name: str, causal: bool
) -> None:
    """A call that comes to its end has waited for no turn that was not had."""
    row = next(row for key, row in ROWS.items() if name in key and not row.options)
    main = next(x for x in row.backward if isinstance(x, (BackwardMma, BackwardSm90)))
    rows = main.tile_q * main.turn
    keys = 4 * main.tile_kv + 3
    inputs = on(backend, arrays_of(case(row, 2 * rows + 1, keys, causal=causal)))
    some = 1 + math.ceil((rows - main.tile_q) / main.tile_kv)  # that may be the first of a tile
    for ordered in (False, True):
        plan = tuple(_replaced(kernel, ordered) for kernel in row.backward)
        with using(row.forward, plan), schedule(3, 3):
            out, lse = forward(inputs)

            def call(workspace: Any, out: Any = out, lse: Any = lse) -> cuflash.Gradients:
                return backward(inputs, out, lse, workspace=workspace)

            workspace = backend.xp.zeros(workspace_bytes(call, backend.xp), "u1")
            call(workspace)
        found = turns(row, backend.host(workspace), 2 * rows + 1, 4)
        tiles = np.full(found.shape, 5)  # that see queries of a turn
        if causal:
            first = np.arange(found.shape[1]) * rows + keys - (2 * rows + 1)
            last = np.minimum(first + rows - 1, keys - 1)
            tiles[:] = (last // main.tile_kv + 1)[:, None]
        np.testing.assert_array_equal(found, tiles if ordered else np.minimum(tiles, some))


def _replaced(kernel: Any, ordered: bool) -> Any:
    return dataclasses.replace(kernel, ordered=ordered) if hasattr(kernel, "ordered") else kernel


@pytest.mark.parametrize("name", ["mma-warp", "sm90-one"])
def test_dq_is_added_up_in_any_order(backend: Backend, name: str) -> None:
    """In some schedule of the CPU its sums have other bits; dk and dv never do."""
    if backend.name == "gpu":
        pytest.skip("a GPU chooses no schedule")
    row = next(row for key, row in ROWS.items() if name in key and not row.options)
    main = next(x for x in row.backward if isinstance(x, (BackwardMma, BackwardSm90)))
    inputs = arrays_of(case(row, 70, 6 * main.tile_kv, heads_kv=1, group=1))
    with using(row.forward, row.backward):
        out, lse = forward(inputs)
        size = workspace_bytes(
            lambda workspace: backward(inputs, out, lse, workspace=workspace), np
        )
    found: dict[bool, list[Any]] = {}
    for ordered in (False, True):
        plan = tuple(_replaced(kernel, ordered) for kernel in row.backward)
        for seed in range(8):
            workspace = np.zeros(size, "u1")
            with using(row.forward, plan), schedule(seed, 4):
                grads = backward(inputs, out, lse, workspace=workspace)
            check_backward(grads, inputs)
            results = (workspace, grads.dk, grads.dv)
            found.setdefault(ordered, []).append([x.tobytes() for x in results])
    for results in found.values():
        assert len({(dk, dv) for _, dk, dv in results}) == 1
    assert len({sums for sums, _, _ in found[True]}) == 1
    assert len({sums for sums, _, _ in found[False]}) > 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_calls(backend: Backend, dtype: str, packed: bool) -> None:
    """What users get, in every way to ask for it, in a workspace of the size that is asked for."""
    row = next(row for row in UNORDERED_ROWS if "shipped" in row.name)
    options = ("packed",) if packed else ()
    sizes = dict(dtype=dtype, head_dim=24, head_dim_v=40, options=options, entries=2)
    one = case(row, 150, 280, **sizes, batch=None if packed else 2, causal=True)
    inputs = arrays_of(one)
    given = on(backend, inputs)
    out, lse = forward(given)
    check_backward(backward(given, out, lse), inputs)
    check_backward(backward(given, out, lse, deterministic=np.bool_(False)), inputs)
    if not packed:
        _, vjp = cuflash.attention_vjp(given.q, given.k, given.v, **given.options)
        check_backward(vjp(given.dout, deterministic=False), inputs)

    def call(workspace: Any) -> cuflash.Gradients:
        return backward(given, out, lse, workspace=workspace)

    size = workspace_bytes(call, backend.xp)
    room = backend.xp.full(size + 8192, 0xAA, "u1")
    check_backward(call(room[4096 : 4096 + size]), inputs)
    assert (room[:4096] == 0xAA).all() and (room[4096 + size :] == 0xAA).all()


@pytest.mark.parametrize("value", [None, 0, 1, "no", np.zeros(1, bool)], ids=repr)
def test_what_is_no_bool_is_an_error(value: Any) -> None:
    q = np.zeros((3, 2, 8), np.float32)
    out, lse, vjp = cuflash.attention_vjp(q, q, q, return_lse=True)
    cu = np.array([0, 3])
    message = r"^deterministic: expected True or False, got "
    with pytest.raises(TypeError, match=message):
        vjp(out, deterministic=value)
    with pytest.raises(TypeError, match=message):
        cuflash.attention_backward(out, q, q, q, out, lse, deterministic=value)
    with pytest.raises(TypeError, match=message):
        cuflash.attention_varlen_backward(
            out, q, q, q, out, lse, cu, cu, deterministic=cast(bool, value)
        )
    with pytest.raises(TypeError, match=message):
        cuflash.precompile("float32", 8, arch="cpu", deterministic=value)


@pytest.mark.parametrize("options", [(), ("alibi",), FEATURES], ids=["plain", "alibi", "all"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["sm_75", "sm_80", "sm_90"])
def test_only_the_kernel_that_adds_up_dq_differs(
    name: str, dtype: str, options: tuple[str, ...]
) -> None:
    for head_dim in (64, 128, 256, 512):
        traits = Traits(DTYPES[dtype], head_dim, head_dim, options)
        plans = {
            ordered: select.choose(
                "backward", traits._replace(deterministic=ordered), ARCHITECTURES[name]
            )
            for ordered in (False, True)
        }
        kernels = {ordered: [x.kernel for x in plan] for ordered, plan in plans.items()}
        assert kernels[False] == kernels[True]
        differ = [a for a, b in zip(plans[False], plans[True], strict=True) if a != b]
        adding = [x for x in kernels[True] if x in ("backward_mma", "backward_sm90")]
        assert [x.kernel for x in differ] == adding
        assert not any(x.ordered for x in differ if isinstance(x, (BackwardMma, BackwardSm90)))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_debug_says_so(direction: Literal["forward", "backward"]) -> None:
    facts = device.architecture(9, 0)
    traits = Traits(DTYPES["bfloat16"], 64, 64, deterministic=False)
    text = describe(direction, traits, facts, select.choose(direction, traits, facts))
    lines = [line for line in text.splitlines() if line.endswith("; dq is added up in any order")]
    assert len(lines) == (direction == "backward")
    assert all("backward_sm90" in line for line in lines)


def test_precompile(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel differs from what is compiled by default."""
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path))
    given: dict[str, Any] = dict(direction="backward", arch="sm_90")
    before = {x.path for x in cuflash.precompile("bfloat16", 64, **given)}
    after = cuflash.precompile("bfloat16", 64, deterministic=False, **given)
    assert [x.kernel for x in after if x.path not in before] == ["backward_sm90"]
