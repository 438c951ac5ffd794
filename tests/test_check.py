# SPDX-License-Identifier: Apache-2.0
"""The tolerance rule passes what is correctly rounded and catches what is planted."""

from __future__ import annotations

import dataclasses
from typing import Any

import check as rule
import ml_dtypes
import numpy as np
import pytest
from check import Inputs, assert_close, bounds, check_backward, check_forward

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


NAMES = ("softcap", "bias", "mask", "alibi", "sinks", "dropout")


def with_options(dtype: Any, *names: str, wide_bias: bool = False, **options: Any) -> Inputs:
    """An example with some of the options from softcap on."""
    rng = np.random.default_rng(1)
    accum = np.float64 if dtype == np.float64 else np.float32
    bias = rng.normal(size=(1, 4, 37, 45))
    bias[0, 1, :, :5] = bias[0, 0, 3] = -np.inf
    given: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": 1.5},
        "bias": {"bias": bias.astype(accum if wide_bias else dtype)},
        "mask": {"mask": rng.random((2, 1, 37, 45)) < 0.7},
        "alibi": {"alibi_slopes": rng.random((2, 4)).astype(accum)},
        "sinks": {"sinks": rng.normal(size=4).astype(accum)},
        "dropout": {"dropout_p": 0.3, "seed": 5},
    }
    for name in names:
        options |= given[name]
    return example(dtype, **options)


def packed(dtype: Any, *names: str, layout: str = "bshd") -> Inputs:
    """The same in entries of 10 to 7, 0 to 3, 21 to 20 and 3 to 0 rows and keys, of 37 and 45."""
    inputs = with_options(dtype, *names, wide_bias=True, causal=True)
    arrays = {n: getattr(inputs, n)[0].copy() for n in ("q", "k", "v", "dout")}
    for name, (first, end) in {"q": (2, 36), "k": (1, 31), "v": (1, 31), "dout": (2, 36)}.items():
        arrays[name][:first] = arrays[name][end:] = np.nan
    if layout == "bhsd":
        arrays = {n: x.swapaxes(0, 1) for n, x in arrays.items()}
    if "mask" in names:
        arrays["mask"] = inputs.mask[:1]
    if "alibi" in names:
        arrays["alibi_slopes"] = inputs.alibi_slopes[0]
    return dataclasses.replace(
        inputs,
        **arrays,
        dlse=inputs.dlse[0],
        layout=layout,
        cu_seqlens_q=np.array([2, 12, 12, 33, 36], np.int32),
        cu_seqlens_k=np.array([1, 8, 11, 31, 31], np.int32),
    )


def exact(inputs: Inputs) -> dict[str, np.ndarray]:
    return rule.exact(inputs, backward=True)


def rounded(inputs: Inputs) -> dict[str, np.ndarray]:
    """The best results possible."""
    accum = np.float64 if inputs.dtype == np.float64 else np.float32
    dtypes = {"lse": accum, "dsinks": accum}
    if inputs.bias is not None:
        dtypes["dbias"] = inputs.bias.dtype
    return {name: x.astype(dtypes.get(name, inputs.dtype)) for name, x in exact(inputs).items()}


def check(inputs: Inputs, results: dict[str, Any]) -> None:
    check_forward(results["out"], results["lse"], inputs)
    check_backward(Gradients(*(results.get(name) for name in rule.GRADIENTS)), inputs)


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
@pytest.mark.parametrize("names", [*((name,) for name in NAMES), NAMES], ids="-".join)
def test_rounded_results_of_every_option_pass(dtype, names):
    for inputs in (
        with_options(dtype, *names, wide_bias=True),
        with_options(dtype, *names, causal=True, window=(20, 3)),
        packed(dtype, *names),
    ):
        check(inputs, rounded(inputs))


@every_dtype
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_rounded_results_of_packed_calls_pass(dtype, layout):
    inputs = packed(dtype, layout=layout)
    check(inputs, rounded(inputs))
    no_entries = {"cu_seqlens_q": np.array([4]), "cu_seqlens_k": np.array([0])}
    inputs = dataclasses.replace(packed(dtype, *NAMES, layout=layout), **no_entries)
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
    for inputs in (example(ml_dtypes.bfloat16), packed(ml_dtypes.bfloat16, *NAMES)):
        results = {name: OnDevice(x) for name, x in rounded(inputs).items()}
        check(inputs.moved(OnDevice), results)


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
@pytest.mark.parametrize("name", ["out", "lse", *rule.GRADIENTS])
@pytest.mark.parametrize("call", [with_options, packed])
def test_one_element_off_is_caught_with_all_options(call, dtype, name):
    inputs = call(dtype, *NAMES)
    results, want = rounded(inputs), exact(inputs)
    bound = bounds(inputs, want)[name]
    size = np.abs(np.where(np.isfinite(want[name]) & (want[name] != 0), want[name], np.inf))
    at = np.unravel_index(size.argmin(), size.shape)
    results[name][at] += 3 * bound
    with pytest.raises(AssertionError, match=f"{name}: 1 of .* worst at"):
        check(inputs, results)


@every_dtype
@pytest.mark.parametrize("call", [with_options, packed])
def test_bounds_with_all_options_are_tight(call, dtype):
    inputs = call(dtype, *NAMES)
    want = exact(inputs)
    allowed = bounds(inputs, want)
    assert allowed.pop("lse") < (1e-9 if dtype == np.float64 else 1.2e-4)
    for name, bound in allowed.items():
        assert bound < 32 * float(ml_dtypes.finfo(dtype).eps) * np.abs(want[name]).max(), name


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


def test_hidden_pairs_must_have_gradients_of_exactly_zero():
    for inputs, at in (
        (with_options(np.float32, "bias", causal=True), (0, 1, 9, 3)),  # hidden by -inf
        (with_options(np.float32, "bias", causal=True), (0, 2, 0, 44)),  # by causal
        (packed(np.float32, "bias"), (0, 1, 30, 7)),  # of no entry
    ):
        results = rounded(inputs)
        results["dbias"][at] = 1e-12
        with pytest.raises(AssertionError, match="dbias: 1 elements of unseen"):
            check(inputs, results)


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_rows_of_no_entry_must_be_exactly_zero(name):
    inputs = packed(np.float32)
    results = rounded(inputs)
    results[name][0, 1] = 1e-12
    with pytest.raises(AssertionError, match=f"{name}: .* unseen"):
        check(inputs, results)


def test_rows_that_a_mask_hides_in_one_head_must_be_exactly_zero():
    inputs = with_options(np.float32, "bias")
    results = rounded(inputs)
    results["out"][0, 3, 0] = 1e-12
    with pytest.raises(AssertionError, match=r"out: .* unseen"):
        check(inputs, results)


@pytest.mark.parametrize("name", ["dbias", "dsinks"])
def test_missing_and_unexpected_gradients_are_caught(name):
    inputs = with_options(np.float32, "bias", "sinks")
    results = rounded(inputs)
    with pytest.raises(AssertionError, match=f"{name}: missing"):
        check(inputs, {**results, name: None})
    without = example(np.float32)
    with pytest.raises(AssertionError, match=f"{name}: unexpected"):
        check(without, {**rounded(without), name: results[name]})


def test_dtypes_of_gradients_of_bias_and_sinks():
    inputs = with_options(np.float16, "bias", "sinks", wide_bias=True)
    results = rounded(inputs)
    for name in ("dbias", "dsinks"):
        with pytest.raises(AssertionError, match=f"{name}: dtype float16, expected float32"):
            check(inputs, {**results, name: results[name].astype(np.float16)})


@every_dtype
def test_swapped_entries_are_caught(dtype):
    inputs = packed(dtype)
    shifted = dataclasses.replace(inputs, cu_seqlens_k=np.array([1, 11, 11, 31, 31]))
    with pytest.raises(AssertionError, match="out: "):
        check(inputs, rounded(shifted))


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


@every_dtype
def test_other_values_of_options_are_caught(dtype):
    inputs = with_options(dtype, *NAMES)
    mask = inputs.mask.copy()
    mask[1, 0, 20, 30] ^= True
    changes: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": 1.6},
        "bias": {"bias": inputs.bias[:, ::-1]},
        "mask": {"mask": mask},
        "alibi": {"alibi_slopes": inputs.alibi_slopes[::-1]},
        "sinks": {"sinks": inputs.sinks[::-1]},
        "dropout": {"seed": 6},
        "probability": {"dropout_p": 0.31},
    }
    for change in changes.values():
        with pytest.raises(AssertionError, match="out: "):
            check(inputs, rounded(dataclasses.replace(inputs, **change)))


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


def other_sums(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """dbias and dsinks of one head in the accumulator, as a kernel with powers of 2 has them."""
    accum = inputs.sinks.dtype.type
    q, k, v, dout = (x[:, 0].astype(accum) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    log2e, bias, sink = accum(np.log2(np.e)), inputs.bias, inputs.sinks[0]
    x = q @ k.T * (log2e / accum(q.shape[1] ** 0.5)) + bias * log2e
    m = np.maximum(x.max(axis=1, keepdims=True), sink * log2e)
    total = np.exp2(x - m).sum(axis=1, keepdims=True) + np.exp2(sink * log2e - m)
    out = (np.exp2(x - m) @ v / total).astype(inputs.dtype).astype(accum)
    lse = m + np.log2(total)
    delta = (dout * out).sum(axis=1, keepdims=True)
    dx = np.exp2(x - lse) * (dout @ v.T - delta)
    axes = tuple(n for n, size in enumerate(bias.shape) if size == 1)
    dsink = (np.exp2(sink * log2e - lse) * -delta).sum()
    return dx.sum(axis=axes, keepdims=True), np.array([dsink])


@every_dtype
@pytest.mark.parametrize("shape", [(1, 1), (20, 1), (1, 30), (20, 30)], ids=str)
def test_sums_of_few_numbers_pass_in_another_order(dtype, shape):
    # A measured error of one number is 0 or large by luck.
    for seed, sq in ((seed, sq) for seed in range(10) for sq in (1, 3, 20)):
        rng = np.random.default_rng(seed)
        accum = np.float64 if dtype == np.float64 else np.float32
        arrays = [rng.normal(size=(n, 1, 8)).astype(dtype) for n in (sq, 30, 30, sq)]
        bias = rng.normal(size=(min(shape[0], sq), shape[1])).astype(accum)
        inputs = Inputs(*arrays, bias=bias, sinks=rng.normal(size=1).astype(accum))
        want = {name: x for name, x in exact(inputs).items() if name in rule.SUMS}
        allowed = bounds(inputs, want)
        for name, got in zip(("dbias", "dsinks"), other_sums(inputs), strict=True):
            assert_close(name, got, want[name], allowed[name])
        if (seed, sq) == (0, 20):  # but not with a row less
            short = {n: getattr(inputs, n)[:-1] for n in ("q", "dout")}
            short["bias"] = bias if shape[0] == 1 else bias[:-1]
            dsinks = other_sums(dataclasses.replace(inputs, **short))[1]
            with pytest.raises(AssertionError, match="dsinks: 1 of 1"):
                assert_close("dsinks", dsinks, want["dsinks"], allowed["dsinks"])


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
