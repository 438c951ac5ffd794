# SPDX-License-Identifier: Apache-2.0
"""The tolerance rule passes what is correctly rounded and catches what is planted."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from check import Inputs, assert_close, bounds, check_backward, check_forward

from cuflash import reference
from cuflash.gradients import Gradients

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)


def example(dtype: Any, sq: int = 37, sk: int = 45, **options: Any) -> Inputs:
    rng = np.random.default_rng(0)
    shapes = [(2, sq, 4, 24), (2, sk, 2, 24), (2, sk, 2, 16), (2, sq, 4, 16)]
    q, k, v, dout = ((rng.normal(size=s) + 0.2).astype(dtype) for s in shapes)
    lse_dtype = np.float64 if dtype == np.float64 else np.float32
    dlse = rng.normal(size=(2, 4, sq)).astype(lse_dtype)
    return Inputs(q, k, v, dout, dlse, **options)


def exact(inputs: Inputs) -> dict[str, np.ndarray]:
    i = inputs
    out, lse = reference.attention(i.q, i.k, i.v, **i.options, return_lse=True)
    dq, dk, dv = reference.attention_backward(i.dout, i.q, i.k, i.v, dlse=i.dlse, **i.options)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def rounded(inputs: Inputs) -> dict[str, np.ndarray]:
    """The best results possible."""
    results = {name: x.astype(inputs.dtype) for name, x in exact(inputs).items() if name != "lse"}
    lse_dtype = np.float64 if inputs.dtype == np.float64 else np.float32
    return {**results, "lse": exact(inputs)["lse"].astype(lse_dtype)}


def check(inputs: Inputs, results: dict[str, Any]) -> None:
    check_forward(results["out"], results["lse"], inputs)
    check_backward(Gradients(results["dq"], results["dk"], results["dv"]), inputs)


OPTIONS = [
    {},
    {"causal": True, "scale": 0.5},
    {"window": (7, 3)},
    {"causal": True, "sq": 50, "sk": 30},
    {"sq": 0},
    {"sk": 0},
]


@every_dtype
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rounded_results_pass(dtype, options):
    inputs = example(dtype, **options)
    check(inputs, rounded(inputs))


@every_dtype
def test_other_layout_and_no_batch_pass(dtype):
    inputs = example(dtype, causal=True)
    arrays = {n: getattr(inputs, n)[0].swapaxes(0, 1) for n in ("q", "k", "v", "dout")}
    inputs = dataclasses.replace(inputs, dlse=inputs.dlse[0], layout="bhsd", **arrays)
    check(inputs, rounded(inputs))


class OnDevice:
    def __init__(self, x: np.ndarray):
        self.get, self.shape, self.ndim, self.dtype = lambda: x, x.shape, x.ndim, x.dtype


def test_device_arrays_pass():
    inputs = example(ml_dtypes.bfloat16)
    arrays = {n: OnDevice(getattr(inputs, n)) for n in ("q", "k", "v", "dout", "dlse")}
    results = {name: OnDevice(x) for name, x in rounded(inputs).items()}
    check(dataclasses.replace(inputs, **arrays), results)


@every_dtype
@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
def test_one_element_off_is_caught(dtype, name):
    inputs = example(dtype, causal=True)
    results, want = rounded(inputs), exact(inputs)
    bound = bounds(inputs, want)[name]
    # Where the result is small, so that the dtype can show a step of three bounds.
    at = np.unravel_index(np.abs(want[name]).argmin(), want[name].shape)
    results[name][at] += 3 * bound
    with pytest.raises(AssertionError, match=f"{name}: 1 of .* worst at") as failure:
        check(inputs, results)
    assert str(tuple(int(i) for i in at)) in str(failure.value)


@every_dtype
def test_bounds_are_tight(dtype):
    # A few units in the last place of the largest value, at least one and not more than these.
    inputs = example(dtype)
    want = exact(inputs)
    allowed = bounds(inputs, want)
    assert allowed.pop("lse") < (1e-9 if dtype == np.float64 else 1.2e-4)
    for name, bound in allowed.items():
        assert bound < 16 * float(ml_dtypes.finfo(dtype).eps) * np.abs(want[name]).max()


@every_dtype
def test_one_unit_is_always_allowed(dtype):
    # With one key, out is its value and the careful formula makes no error at all.
    inputs = example(dtype, sk=1)
    want = exact(inputs)["out"]
    eps = float(ml_dtypes.finfo(dtype).eps)
    assert bounds(inputs, {"out": want}) == {"out": eps * np.abs(want).max()}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
def test_stray_nan_and_infinity_are_caught(name, value):
    inputs = example(np.float16)
    results = rounded(inputs)
    results[name][1, 2, 1] = value
    with pytest.raises(AssertionError, match=f"{name}: .*wrong place.* first at \\(1, 2, 1"):
        check(inputs, results)


def test_lse_of_an_empty_row_must_be_minus_infinity():
    inputs = example(np.float32, causal=True, sq=50, sk=30)
    results = rounded(inputs)
    results["lse"] = np.where(np.isneginf(results["lse"]), np.float32(-1e30), results["lse"])
    with pytest.raises(AssertionError, match="lse: -inf in the wrong place or missing at 160 of"):
        check(inputs, results)


@pytest.mark.parametrize("name", ["out", "dq"])
def test_empty_rows_must_be_exactly_zero(name):
    inputs = example(np.float32, causal=True, sq=50, sk=30)
    results = rounded(inputs)
    results[name][0, 3] = 1e-12
    with pytest.raises(AssertionError, match=f"{name}: .* unseen"):
        check(inputs, results)


def test_unseen_keys_must_have_gradients_of_exactly_zero():
    inputs = example(np.float32, window=(3, -1))
    results = rounded(inputs)
    results["dk"][0, 2] = 1e-12
    with pytest.raises(AssertionError, match=r"dk: .* unseen"):
        check(inputs, results)


@every_dtype
@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_swapped_heads_are_caught(dtype, name):
    inputs = example(dtype)
    results = rounded(inputs)
    results[name] = results[name][:, :, ::-1]
    with pytest.raises(AssertionError, match=f"{name}: "):
        check(inputs, results)


@every_dtype
@pytest.mark.parametrize("base", [2.0, 10.0])
def test_lse_in_another_base_is_caught(dtype, base):
    inputs = example(dtype)
    results = rounded(inputs)
    results["lse"] = (results["lse"] / np.log(base)).astype(results["lse"].dtype)
    with pytest.raises(AssertionError, match="lse: "):
        check(inputs, results)


@every_dtype
def test_other_options_are_caught(dtype):
    inputs = example(dtype, causal=True, window=(9, -1))
    for change in ({"causal": False, "window": (9, 1)}, {"window": (8, -1)}, {"scale": 0.21}):
        with pytest.raises(AssertionError, match="out: "):
            check(inputs, rounded(dataclasses.replace(inputs, **change)))
    with pytest.raises(AssertionError, match="dq: "):
        check(inputs, rounded(dataclasses.replace(inputs, dlse=None)))


def test_wrong_shape_and_dtype_are_caught():
    inputs = example(np.float16)
    results = rounded(inputs)
    with pytest.raises(AssertionError, match="out: shape"):
        check(inputs, {**results, "out": results["out"][:1]})
    with pytest.raises(AssertionError, match="lse: dtype float16"):
        check(inputs, {**results, "lse": results["lse"].astype(np.float16)})
    with pytest.raises(AssertionError, match="dk: dtype float32"):
        check(inputs, {**results, "dk": results["dk"].astype(np.float32)})


@every_dtype
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_poison_that_nobody_sees_changes_no_bound(dtype, poison):
    inputs = example(dtype, window=(3, -1))  # keys 0 to 4 are seen by nobody
    want = bounds(inputs, exact(inputs))
    for name in "kv":
        getattr(inputs, name)[:, :5] = poison
    assert bounds(inputs, exact(inputs)) == want
    check(inputs, rounded(inputs))


@every_dtype
def test_visible_nan_leaves_the_rest_measured(dtype):
    inputs = example(dtype, causal=True)
    clean = bounds(inputs, exact(inputs))
    inputs.v[0, 40, 1, 3] = np.nan
    inputs.q[1, 5, 2] = np.nan
    want = exact(inputs)
    assert all(np.isnan(x).any() and np.isfinite(x).any() for x in want.values())
    for name, bound in bounds(inputs, want).items():
        assert 0 < bound <= clean[name]
    results = rounded(inputs)
    check(inputs, results)
    results["out"][0, 36, 3, 3] = 0.0
    with pytest.raises(AssertionError, match=r"out: NaN .* missing at 1 of"):
        check(inputs, results)


def test_results_that_overflow_the_dtype_are_an_error_of_the_test():
    inputs = example(np.float16)
    inputs.dout[:] = 6e4
    with pytest.raises(ValueError, match="dv overflows float16"):
        bounds(inputs, {"dv": exact(inputs)["dv"]})


def test_nothing_is_allowed_where_everything_is_zero():
    inputs = example(np.float32, sk=0)
    assert bounds(inputs, {"out": exact(inputs)["out"]}) == {"out": 0.0}


def online_softmax(inputs: Inputs, tile: int) -> np.ndarray:
    """The forward pass of one head as kernels do it: tiles of keys, a running maximum and sum."""
    q, k, v = (x[:, 0].astype(np.float32) for x in (inputs.q, inputs.k, inputs.v))
    scale = np.float32(q.shape[1] ** -0.5)
    m = np.full((len(q), 1), -np.inf, np.float32)
    total, acc = np.zeros_like(m), np.zeros((len(q), v.shape[1]), np.float32)
    for start in range(0, len(k), tile):
        keys = slice(start, start + tile)
        x = q @ k[keys].T * scale
        m, before = np.maximum(m, x.max(axis=1, keepdims=True)), m
        acc, total = acc * np.exp(before - m), total * np.exp(before - m)
        p = np.exp(x - m)
        total += p.sum(axis=1, keepdims=True)
        p = p.astype(inputs.dtype).astype(np.float32)
        for j in range(p.shape[1]):
            acc += p[:, j, None] * v[start + j]
    return (acc / total).astype(inputs.dtype)[:, None]


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("sk", [100, 3000])
def test_an_online_softmax_in_tiles_passes(dtype, sk):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(n, 1, 64)) + (n == sk) for n in (64, sk, sk))
    v[-16:] += 30  # or 16 keys of 3000 are less than bfloat16 can tell
    inputs = Inputs(q.astype(dtype), k.astype(dtype), v.astype(dtype))
    out = online_softmax(inputs, 32)
    check_forward(out, None, inputs)
    # The same without the last 16 keys does not pass.
    short = dataclasses.replace(inputs, k=inputs.k[:-16], v=inputs.v[:-16])
    with pytest.raises(AssertionError, match="out: "):
        check_forward(online_softmax(short, 32), None, inputs)


def test_message_shows_the_worst_element():
    got, want = np.zeros((2, 3)), np.zeros((2, 3))
    got[0, 1], got[1, 2] = 0.25, -0.5
    with pytest.raises(AssertionError) as failure:
        assert_close("dq", got, want, 0.125)
    assert str(failure.value) == (
        "dq: 2 of 6 elements are off, worst at (1, 2): got -0.5, want 0, error 0.5, "
        "allowed 0.125; first at (0, 1)"
    )
