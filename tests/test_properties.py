# SPDX-License-Identifier: Apache-2.0
"""Ring 4: what must hold without any reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from check import Inputs, assert_close, bounds, exact, host
from conftest import Backend
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix import ROWS, Row, candidates
from run import both, on, schedule, using
from strategies import Case, arrays_of, cases, visible

import cuflash
from cuflash.dtypes import DTYPES

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
Results = tuple[Any, Any, cuflash.Gradients]
SMALL = [row for row in ROWS if "shipped" not in row.name]
FLOAT64 = next(row for row in SMALL if row.name == "float64-tall-1x2-resident")


def call(dtype: str, **changes: object) -> Case:
    """Return an ordinary call over several tiles of the shipped plans."""
    case = Case(
        dtype=dtype,
        batch=2,
        heads_kv=2,
        group=2,
        seqlen_q=70,
        seqlen_kv=90,
        head_dim=24,
        head_dim_v=20,
        causal=False,
        window=(-1, -1),
        scale=None,
        layout="bshd",
        views=("contiguous",) * 4,
        values="normal",
        with_dlse=True,
        seed=0,
        schedule=0,
    )
    return replace(case, **changes)  # type: ignore[arg-type]


def same(name: str, got: object, want: object) -> None:
    np.testing.assert_array_equal(host(got), host(want), err_msg=name)


def pairs(results: Results, others: Results) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, result and other result of everything that `both` returns."""
    (out, lse, grads), (out_2, lse_2, grads_2) = results, others
    names = ("out", "lse", "dq", "dk", "dv")
    yield from zip(names, (out, lse, *grads), (out_2, lse_2, *grads_2), strict=True)


def all_same(results: Results, others: Results) -> None:
    for name, x, y in pairs(results, others):
        same(name, x, y)


def close(results: Results, others: Results, inputs: Inputs) -> None:
    """Both results may be off by the bound, so they may differ by twice that."""
    allowed = bounds(inputs, exact(inputs, backward=True))
    for name, x, y in pairs(results, others):
        assert_close(name, x, host(y).astype(np.float64), 2 * allowed[name])


@every_dtype
@pytest.mark.parametrize("causal", [False, True])
def test_values_of_one_give_one(backend: Backend, dtype: str, causal: bool) -> None:
    inputs = arrays_of(call(dtype, causal=causal, values="peaked"))
    inputs = on(backend, replace(inputs, v=np.ones_like(inputs.v)))
    out = cuflash.attention(inputs.q, inputs.k, inputs.v, causal=causal)
    # Numerator and denominator are sums of up to 90 rounded terms, in two orders. In the numerator
    # of 16-bit calls probabilities are rounded to the dtype, and so is the quotient.
    accum = DTYPES[dtype].accum
    bound = 90**0.5 * np.finfo(accum).eps
    if DTYPES[dtype].itemsize == 2:
        bound = float(ml_dtypes.finfo(np.dtype(dtype)).eps)
    assert_close("out", out, np.ones(out.shape), bound)


@every_dtype
def test_twice_gives_the_same_bits_in_any_schedule(backend: Backend, dtype: str) -> None:
    inputs = on(backend, arrays_of(call(dtype, causal=True)))
    first = both(inputs)
    for seed in range(1, 5):
        with schedule(seed):
            again = both(inputs)
        all_same(again, first)


@every_dtype
def test_batch_entries_and_heads_do_not_meet(backend: Backend, dtype: str) -> None:
    inputs = arrays_of(call(dtype))
    out, lse, grads = both(on(backend, inputs))
    one = Inputs(
        inputs.q[1:, :, 2:],
        inputs.k[1:, :, 1:],
        inputs.v[1:, :, 1:],
        inputs.dout[1:, :, 2:],
        inputs.dlse[1:, 2:],
    )
    out_1, lse_1, grads_1 = both(on(backend, one))
    same("out", out_1, out[1:, :, 2:])
    same("lse", lse_1, lse[1:, 2:])
    same("dq", grads_1.dq, grads.dq[1:, :, 2:])
    same("dk", grads_1.dk, grads.dk[1:, :, 1:])
    same("dv", grads_1.dv, grads.dv[1:, :, 1:])


@every_dtype
def test_the_order_of_keys_does_not_matter(backend: Backend, dtype: str) -> None:
    inputs = arrays_of(call(dtype))
    order = np.random.default_rng(1).permutation(inputs.k.shape[1])
    out, lse, grads = both(on(backend, inputs))
    shuffled = replace(inputs, k=inputs.k[:, order], v=inputs.v[:, order])
    out_2, lse_2, grads_2 = both(on(backend, shuffled))
    undo = np.argsort(order)
    restored = cuflash.Gradients(grads_2.dq, host(grads_2.dk)[:, undo], host(grads_2.dv)[:, undo])
    close((out, lse, grads), (out_2, lse_2, restored), inputs)


@pytest.mark.parametrize("shift", [30.0, -200.0])
def test_a_constant_added_to_all_scores_moves_only_lse(backend: Backend, shift: float) -> None:
    # One more column: 1 in every key and shift in every query, with the scale taken out of it.
    inputs = arrays_of(call("float64", scale=1.0))
    wide = lambda x, value: np.concatenate([x, np.full_like(x[..., :1], value)], axis=-1)
    moved = replace(inputs, q=wide(inputs.q, shift), k=wide(inputs.k, 1.0))
    out, lse, grads = both(on(backend, inputs))
    out_2, lse_2, grads_2 = both(on(backend, moved))
    np.testing.assert_allclose(host(out_2), host(out), atol=1e-12)
    np.testing.assert_allclose(host(lse_2), host(lse) + shift, rtol=1e-13)
    np.testing.assert_allclose(host(grads_2.dv), host(grads.dv), atol=1e-11)
    np.testing.assert_allclose(host(grads_2.dq)[..., :-1], host(grads.dq), atol=1e-11)


def test_the_output_is_linear_in_the_values(backend: Backend) -> None:
    inputs = arrays_of(call("float64", causal=True))
    other = np.random.default_rng(2).standard_normal(inputs.v.shape)
    run = lambda v: host(
        cuflash.attention(*(backend.array(x) for x in (inputs.q, inputs.k, v)), causal=True)
    )
    np.testing.assert_allclose(
        run(2 * inputs.v - 3 * other), 2 * run(inputs.v) - 3 * run(other), atol=1e-13
    )


@every_dtype
def test_later_tokens_do_not_reach_earlier_rows(backend: Backend, dtype: str) -> None:
    inputs = arrays_of(call(dtype, seqlen_q=90, causal=True))
    n = 41
    start = Inputs(*(x[:, :n] for x in (inputs.q, inputs.k, inputs.v)), causal=True)
    whole, part = (
        cuflash.attention(*(backend.array(x) for x in (i.q, i.k, i.v)), causal=True)
        for i in (inputs, start)
    )
    same("out", part, whole[:, :n])


@every_dtype
@pytest.mark.parametrize("cuts", [(40,), (1, 40, 41), (64,)])
def test_parts_of_the_keys_merge(backend: Backend, dtype: str, cuts: tuple[int, ...]) -> None:
    inputs = arrays_of(call(dtype))
    q = backend.array(inputs.q)
    outs, lses = [], []
    for a, z in zip((0, *cuts), (*cuts, 90), strict=True):
        k, v = (backend.array(x[:, a:z]) for x in (inputs.k, inputs.v))
        out, lse = cuflash.attention(q, k, v, return_lse=True)
        outs.append(host(out).astype(np.float64)), lses.append(host(lse).astype(np.float64))
    lse = np.logaddexp.reduce(lses)
    weights = [np.exp(x - lse).swapaxes(1, 2)[..., None] for x in lses]
    merged = sum(w * x for w, x in zip(weights, outs, strict=True))
    want = exact(inputs, backward=False)
    allowed = bounds(inputs, want)
    assert_close("out", merged, want["out"], 2 * allowed["out"])
    assert_close("lse", lse, want["lse"], 2 * allowed["lse"])


@every_dtype
@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(120, 90), (60, 110)])
@pytest.mark.parametrize("what", [np.nan, np.inf])
def test_what_nobody_sees_may_be_anything(
    backend: Backend, dtype: str, seqlen_q: int, seqlen_kv: int, what: float
) -> None:
    # Queries without a key, keys without a query, and ("inside") the memory around the arrays.
    case = call(
        dtype, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, window=(20, 0), views=("inside",) * 4
    )
    clean = arrays_of(case)
    seen = visible(case)
    blind, unseen = ~seen.any(axis=1), ~seen.any(axis=0)
    assert blind.any() or unseen.any()
    dirty = {name: getattr(clean, name).copy() for name in ("q", "k", "v", "dout")}
    for name, x in dirty.items():
        x[:, blind if name in ("q", "dout") else unseen] = what
    all_same(both(on(backend, replace(clean, **dirty))), both(on(backend, clean)))


@every_dtype
@pytest.mark.parametrize("seqlen_q", [64, 70])
def test_infinite_keys_do_not_meet_rows_that_are_not_there(
    backend: Backend, dtype: str, seqlen_q: int
) -> None:
    """Rows past the last query are zeros, and 0 times infinity is NaN: it got into dk and dv."""
    inputs = arrays_of(call(dtype, seqlen_q=seqlen_q, with_dlse=False))
    k = inputs.k.copy()
    k[:, 5, :, 3] = -np.inf  # all queries see this key, with a score of -inf and no weight
    inputs = replace(inputs, q=np.abs(inputs.q), k=k)
    grads = both(on(backend, inputs))[2]
    assert np.isfinite(host(grads.dk).astype("f8")).all()
    assert np.isfinite(host(grads.dv).astype("f8")).all()
    assert not host(grads.dk)[:, 5].any() and not host(grads.dv)[:, 5].any()


@every_dtype
def test_an_infinite_score_stays_in_its_rows(backend: Backend, dtype: str) -> None:
    """lse is +inf in rows with a score of +inf, also if more tiles follow, and NaN in none."""
    inputs = arrays_of(call(dtype, seqlen_q=100, seqlen_kv=200, window=(1, -1), with_dlse=False))
    k = inputs.k.copy()
    k[:, 153] = np.inf  # seen by rows up to 53
    inputs = replace(inputs, q=np.abs(inputs.q), k=k)
    want = exact(inputs, backward=True)
    out, lse, grads = both(on(backend, inputs))
    np.testing.assert_array_equal(np.isposinf(host(lse)), np.isposinf(want["lse"]))
    for name, got in {"out": out, "lse": lse, "dq": grads.dq, "dv": grads.dv}.items():
        np.testing.assert_array_equal(np.isnan(host(got)), np.isnan(want[name]), err_msg=name)


@pytest.mark.parametrize("row", SMALL, ids=lambda row: row.name)
@settings(max_examples=6)
@given(data=st.data())
def test_strides_and_plans_do_not_matter(backend: Backend, row: Row, data: st.DataObject) -> None:
    """Views equal contiguous copies bit for bit; the small plans equal the shipped ones nearly.

    And bits do not depend on the order of threads, nor on how many blocks there are.
    """
    case = data.draw(cases(row).filter(lambda case: case.values in ("normal", "peaked")))
    inputs = arrays_of(case)
    contiguous = replace(
        inputs, **{n: np.ascontiguousarray(getattr(inputs, n)) for n in ("q", "k", "v", "dout")}
    )
    with using(row.forward, row.backward):
        with schedule(case.schedule, case.blocks):
            strided = both(on(backend, inputs))
        plain = both(on(backend, contiguous))
    all_same(strided, plain)
    close(plain, both(on(backend, contiguous)), inputs)


@every_dtype
@pytest.mark.parametrize("head_dim", [40, 100, 200])
def test_every_candidate_plan_agrees(backend: Backend, dtype: str, head_dim: int) -> None:
    case = call(dtype, head_dim=head_dim, head_dim_v=head_dim, batch=1, heads_kv=1, causal=True)
    inputs = arrays_of(case)
    want = exact(inputs, backward=True)
    allowed = bounds(inputs, want)
    forwards = candidates("forward", dtype, head_dim, head_dim)
    backwards = candidates("backward", dtype, head_dim, head_dim)
    for i in range(max(len(forwards), len(backwards))):
        with using(forwards[i % len(forwards)], backwards[i % len(backwards)]):
            out, lse, grads = both(on(backend, inputs))
        results = {"out": out, "lse": lse, "dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
        for name, got in results.items():
            assert_close(name, got, want[name], allowed[name])


@settings(max_examples=12)
@given(data=st.data())
def test_gradients_are_those_of_finite_differences(backend: Backend, data: st.DataObject) -> None:
    normal = cases(FLOAT64).filter(lambda c: c.values == "normal" and c.seqlen_q * c.seqlen_kv)
    case = data.draw(normal)
    inputs = arrays_of(replace(case, views=("contiguous",) * 4))
    rng = np.random.default_rng(case.seed)
    with using(FLOAT64.forward, FLOAT64.backward):
        grads = both(on(backend, inputs))[2]

        def loss(arrays: dict[str, np.ndarray]) -> float:
            i = on(backend, replace(inputs, **arrays))
            out, lse = cuflash.attention(i.q, i.k, i.v, return_lse=True, **inputs.options)
            total = np.sum(host(out) * inputs.dout)
            if inputs.dlse is not None:
                seen = np.isfinite(host(lse))
                total += np.sum(np.where(seen, host(lse), 0) * inputs.dlse)
            return float(total)

        for name in ("q", "k", "v"):
            x = getattr(inputs, name)
            direction = rng.standard_normal(x.shape)
            step = 1e-5
            there, back = (loss({name: x + sign * step * direction}) for sign in (1, -1))
            slope = np.sum(host(getattr(grads, f"d{name}")) * direction)
            assert (there - back) / (2 * step) == pytest.approx(slope, rel=1e-6, abs=1e-6)
