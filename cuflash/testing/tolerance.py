# SPDX-License-Identifier: Apache-2.0
"""How far from the float64 reference a correct result may be: one rule for every test.

The allowance is measured, not chosen. `careful` computes the plain formula in the way any careful
kernel of the dtype has to: the inputs as given, products accumulated in float32 (float64 for
float64), P and dS rounded to the dtype before they enter the second products (P before dropout, and
in the forward relative to a score that need not be the largest, as in a lazy online softmax), delta
from the rounded output, P in the backward from the stored lse, results rounded once. Twice its
largest error, plus one unit in the last place of the largest value, is allowed. lse is never
rounded to the dtype; it has a fixed bound, or twice the largest error if that is more. Errors of
float64 are taken against the reference in extended precision: the reference in float64 would be as
far from the truth as the kernel.

For float32 and float64 the order of a sum is what its error comes from, so there sums run in order,
one term after another, as in a kernel: BLAS sums in blocks and NumPy in pairs, which at 4000 keys
is 5 times more accurate than any loop over the keys. For 16-bit dtypes the roundings to the dtype
hide the order, and BLAS does it.

dbias (of a bias that is broadcast) and dsinks are sums of many terms and may be few numbers, so
whether the errors of the terms cancel is luck. The error that counts there is the measured one, or
twice what terms of these sizes and random signs add up to. Terms of one row have one sign: they
share the errors of the row's lse and delta.

Which pairs count (masks, heads, NaN in hidden places) is the reference's own code here too: two
opinions on that would show as a large measured error, that is, as a bound that allows everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import reference
from ..gradients import Gradients
from ..reference_arguments import (
    Options,
    as_given,
    entries,
    heads_first,
    of_entry,
    read_dlse,
)
from .inputs import Inputs, host

__all__ = [
    "GRADIENTS",
    "SUMS",
    "assert_close",
    "bounds",
    "check_backward",
    "check_forward",
    "exact",
]

GRADIENTS = ("dq", "dk", "dv", "dbias", "dsinks")
SUMS = ("dbias", "dsinks")

#: Calls with fewer rows or elements than this are measured on neighbours too.
_FEW_ROWS, _FEW_ELEMENTS = 5 * 10**2, 4 * 10**3
_HEADROOM = 8 * math.log(2)  # of scores above a reference that need not be the largest


def _finfo(dtype: np.dtype) -> Any:
    if dtype.name != "bfloat16":
        return np.finfo(dtype)
    import ml_dtypes  # whoever has such an array has it

    return ml_dtypes.finfo(dtype)


def _accumulator(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _exactly(x: Any) -> np.ndarray:
    """Return a host array in the precision that the reference is to compute in."""
    x = host(x)
    return x.astype(np.longdouble) if x.dtype == np.float64 else x


def exact(inputs: Inputs, backward: bool = False) -> dict[str, np.ndarray]:
    """Return the exact results of a call, by name.

    Parameters
    ----------
    inputs : Inputs
        The call.
    backward : bool
        Whether the gradients are wanted too; then `inputs` has ``dout``.

    Returns
    -------
    dict
        ``"out"`` and ``"lse"`` of `cuflash.reference`, in float64 (for float64 in extended
        precision); for the backward also ``"dq"``, ``"dk"``, ``"dv"``, and, if the call has them,
        ``"dbias"`` and ``"dsinks"``.
    """
    i, packed = inputs.moved(_exactly), bool(inputs.cu_seqlens)
    forward = reference.attention_varlen if packed else reference.attention
    out, lse = forward(i.q, i.k, i.v, *i.cu_seqlens, **i.options, return_lse=True)
    results = {"out": out, "lse": lse}
    if backward:
        solve = reference.attention_varlen_backward if packed else reference.attention_backward
        grads = solve(i.dout, i.q, i.k, i.v, *i.cu_seqlens, dlse=i.dlse, **i.options)
        results |= {name: getattr(grads, name) for name in GRADIENTS}
    return {name: x for name, x in results.items() if x is not None}


def check_forward(out: Any, lse: Any, inputs: Inputs) -> None:
    """Assert that the results of a forward call are as exact as the rule demands.

    Parameters
    ----------
    out : array
        What the code under test makes of the call: of the shape and dtype of ``inputs.q``, with
        the last axis of ``inputs.v``.
    lse : array or None
        The same for lse; None leaves it out.
    inputs : Inputs
        The call.

    Raises
    ------
    AssertionError
        A result has a wrong shape or dtype, NaN or infinity in a wrong place, is not 0 in a row
        that sees no key, or has an error beyond `bounds`; the message shows the worst element.
    ValueError
        The exact result overflows the dtype, so that the call tests nothing.
    """
    _check({"out": out, "lse": lse}, exact(inputs, backward=False), inputs)


def check_backward(got: Gradients, inputs: Inputs) -> None:
    """Assert that gradients are as exact as the rule demands.

    Parameters
    ----------
    got : Gradients
        Of ``sum(out * inputs.dout)``, plus ``sum(lse * inputs.dlse)`` where there is a ``dlse``:
        each of the shape and dtype of its argument, ``dbias`` and ``dsinks`` only for a call that
        has them.
    inputs : Inputs
        The call.

    Raises
    ------
    AssertionError, ValueError
        As `check_forward`.
    """
    want = exact(inputs, backward=True)
    for name in GRADIENTS:
        missing = getattr(got, name) is None
        if missing != (name not in want):
            raise AssertionError(f"{name}: {'missing' if missing else 'unexpected'}")
    _check({name: getattr(got, name) for name in GRADIENTS}, want, inputs)


def _check(got: dict[str, Any], want: dict[str, np.ndarray], inputs: Inputs) -> None:
    got = {name: host(x) for name, x in got.items() if x is not None}
    allowed = bounds(inputs, {name: want[name] for name in got})
    for name, x in got.items():
        dtype = _dtype_of(name, inputs)
        if x.dtype != dtype:
            raise AssertionError(f"{name}: dtype {x.dtype}, expected {dtype}")
        assert_close(name, x, want[name], allowed[name])
    _assert_unseen_is_zero(inputs, got)


def _dtype_of(name: str, inputs: Inputs) -> np.dtype:
    if name == "dbias":
        return host(inputs.bias).dtype
    return _accumulator(inputs.dtype) if name in ("lse", "dsinks") else inputs.dtype


def bounds(inputs: Inputs, want: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the largest absolute error that is allowed, for each of some results.

    Parameters
    ----------
    inputs : Inputs
        The call.
    want : dict
        Some or all of the results of `exact`.

    Returns
    -------
    dict
        For each name in `want`, twice the largest error of the plain formula computed carefully in
        the call's dtype, plus one unit in the last place of the largest element of the result.
    """
    measured = _measure(inputs, set(want))
    allowed = {}
    for name, value in want.items():
        dtype, error = _dtype_of(name, inputs), measured[name]
        top = float(np.abs(value[np.isfinite(value)]).max(initial=0.0))
        if name == "lse":  # large products that cancel make errors of more than its own size
            fixed = 1e-10 * (1 + top) if dtype == np.float64 else 1e-4 + 1e-6 * top
            allowed[name] = max(fixed, 2 * error)
            continue
        # All zero is exact, but for sums that cancel, and for what dropout multiplies before it
        # cancels; otherwise one unit is at least the smallest step of the dtype. In extended
        # precision there are numbers that float64 does not have.
        zero = not value.any()
        error = 0.0 if zero and name not in SUMS and not inputs.dropout_p else error
        info = _finfo(dtype)
        unit = 0.0 if zero else max(float(info.eps) * top, float(info.smallest_subnormal))
        allowed[name] = 2 * error + unit
    return allowed


@np.errstate(all="ignore")
def _measure(inputs: Inputs, names: set[str]) -> dict[str, float]:
    """Return the largest error of the careful formula, for each of these results."""
    backward, copies = bool(names & set(GRADIENTS)), _copies(inputs)
    calls: list[tuple[Any, Any]] = [
        (careful(call, inputs.dtype, backward), _truth(call, backward))
        for call in _dense_calls(inputs, copies)
    ]
    worst = dict.fromkeys(names, 0.0)
    for name in names if calls else ():
        got, want = [x[name] for x, _ in calls], [x[name] for _, x in calls]
        if name in SUMS:
            steps = [x.get(f"{name} rounding", np.zeros_like(x[name])) for x, _ in calls]
            terms = (_side_by_side(x, copies) for x in (got, want, steps))
            worst[name] = _largest_error_of_sums(inputs, name, *terms)
        else:
            errors = (_largest_error(name, x, y, inputs) for x, y in zip(got, want, strict=True))
            worst[name] = max(errors)
    return worst


def _largest_error(name: str, got: np.ndarray, want: np.ndarray, inputs: Inputs) -> float:
    """Largest error where the true value is finite."""
    finite = np.isfinite(want)
    error = np.abs(got[finite].astype(want.dtype) - want[finite])
    if not np.isfinite(error).all():
        raise ValueError(f"{name} overflows {_dtype_of(name, inputs)}: these inputs test nothing")
    return float(error.max(initial=0.0))


def _largest_error_of_sums(
    inputs: Inputs, name: str, got: np.ndarray, want: np.ndarray, steps: np.ndarray
) -> float:
    """Largest error of dbias or dsinks, given their terms (copies, batch, Hq, Sq, Sk).

    `steps` are errors that terms may have even where those of `got` happen to be smaller.
    """
    shape = [1, 1, *host(inputs.bias).shape][-4:] if name == "dbias" else [1, 0, 1, 1]
    axes = [n for n, size in enumerate(shape, 1) if size == 1]
    others = [n for n in range(5) if n not in axes]
    count = math.prod(got.shape[n] for n in axes)
    flat = got.transpose(others + axes).reshape(*(got.shape[n] for n in others), count)
    partial = np.cumsum(flat, axis=-1)  # in order
    sums = _rounding_to(_dtype_of(name, inputs))(partial[..., -1:].sum(axis=-1))
    true_sums = want.sum(axis=tuple(axes))
    worst = _largest_error(name, sums, true_sums, inputs)
    if count < 2:
        return worst
    error = got.astype(want.dtype) - want
    rows = error.sum(axis=4, keepdims=True) if 4 in axes else error
    rows = np.maximum(np.abs(rows), steps.astype(want.dtype))
    addition = np.finfo(got.dtype).eps / 4 * partial
    spread = np.sqrt((rows**2).sum(axis=tuple(axes)) + (addition**2).sum(axis=-1))
    return max(worst, 2 * float(spread[np.isfinite(true_sums)].max(initial=0.0)))


def _side_by_side(terms: list[np.ndarray], copies: int) -> np.ndarray:
    """Terms (copies * batch, Hq, Sq, Sk) of dense calls as one (copies, batch, Hq, Sq, Sk)."""
    parts = [x.reshape(copies, len(x) // copies, *x.shape[1:]) for x in terms]
    batch = sum(x.shape[1] for x in parts)
    heads, *longest = np.max([x.shape[2:] for x in parts], axis=0)
    whole = np.zeros((copies, batch, heads, *longest), parts[0].dtype)
    for b, x in enumerate(parts):  # several with one entry each, or one with all of them
        whole[:, b : b + x.shape[1], :, : x.shape[3], : x.shape[4]] = x
    return whole


@dataclass(frozen=True, eq=False)
class _Dense:
    """A call with axes (batch, heads, seq, dim), arrays as precise as the reference needs."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray | None
    dlse: np.ndarray
    options: Options


def _entries(inputs: Inputs) -> list[tuple[slice, slice, Options]]:
    """Return the queries, keys and options of each dense call that a call consists of."""
    i = inputs.moved(_exactly)
    given = {name: x for name, x in i.options.items() if name != "layout"}
    options = Options(**given)
    if not i.cu_seqlens:
        return [(slice(None), slice(None), options)]
    q, k, _ = heads_first(i.layout, i.q, i.k, i.v)
    return list(entries(q, i.cu_seqlens_q, k, i.cu_seqlens_k, options))


def _copies(inputs: Inputs) -> int:
    """Return how many calls to measure: the call itself and neighbours of it.

    An error that a whole row shares (of its lse, its delta) makes the largest one, and with few
    rows its size is a matter of luck. Calls with nearly the same inputs have errors of the same
    kind.
    """
    given = [x for x in map(host, (inputs.q, inputs.k, inputs.v)) if x.size]
    rows = min((x.size // x.shape[-1] for x in given), default=2 * _FEW_ROWS)
    elements = min((x.size for x in given), default=_FEW_ELEMENTS)
    # In 16 bits the roundings of single elements are larger than what a row shares, and few rows
    # have many of those; but not in sums.
    shared = inputs.dtype.itemsize > 2 or inputs.bias is not None or inputs.sinks is not None
    return 1 + min(max(_FEW_ROWS // rows * shared, _FEW_ELEMENTS // elements), 15)


def _dense_calls(inputs: Inputs, copies: int) -> Iterator[_Dense]:
    """Yield the dense calls that a call consists of, each stacked with its neighbours by batch.

    The neighbours have inputs that differ in the last place, and dropout takes other weights of
    theirs. bias has all of its axes, so that its gradient comes term by term.
    """
    rng = np.random.default_rng(0)
    i = inputs.moved(_exactly)
    arrays = [x for x in (i.q, i.k, i.v, i.dout) if x is not None]
    arrays = heads_first(i.layout, *arrays)
    dlse = read_dlse(i.dlse, i.q.ndim == 4, arrays[0])

    def nudged(x: np.ndarray) -> np.ndarray:
        parts = [x]
        for _ in range(copies - 1):  # about half of the numbers move by one unit towards 0
            y = x.astype(inputs.dtype)
            y = np.nextafter(y, np.zeros_like(y)).astype(x.dtype)
            parts.append(np.where(np.isfinite(x) & (rng.random(x.shape) < 0.5), y, x))
        return np.concatenate(parts)

    for rows, keys, options in _entries(inputs):
        places = (rows, keys, keys, rows)
        q, k, v, *dout = (x[:, :, at] for x, at in zip(arrays, places, strict=False))
        shape = (*q.shape[:3], k.shape[2])
        own = {}
        for name in ("bias", "mask"):
            if (x := getattr(options, name)) is not None:
                own[name] = np.concatenate([np.broadcast_to(x, shape)] * copies)
        if options.alibi_slopes is not None:
            slopes = np.broadcast_to(options.alibi_slopes, shape[:2])
            own["alibi_slopes"] = np.concatenate([slopes] * copies)
        yield _Dense(
            nudged(q),
            nudged(k),
            nudged(v),
            nudged(dout[0]) if dout else None,
            np.concatenate([dlse[:, :, rows]] * copies),
            replace(options, **own),
        )


def _truth(call: _Dense, backward: bool) -> dict[str, np.ndarray]:
    """Return the reference's results, those of `SUMS` term by term."""
    c, sinks = call, call.options.sinks
    out, lse = reference._forward(c.q, c.k, c.v, c.options)
    results = {"out": out, "lse": lse}
    if backward:
        assert c.dout is not None
        grads = reference._backward(c.dout, c.q, c.k, c.v, c.dlse, c.options)
        results |= {name: getattr(grads, name) for name in GRADIENTS}
        if sinks is not None:
            seen = reference._visible((*lse.shape, c.k.shape[2]), c.options).any(axis=-1)
            delta = np.where(seen, (c.dout * out).sum(axis=-1), 0)
            results["dsinks"] = reference._sink_terms(sinks, lse, c.dlse - delta)[..., None]
    return results


def careful(call: _Dense, dtype: np.dtype, backward: bool) -> dict[str, np.ndarray]:
    """Return the results of the plain formula, rounded where a kernel of the dtype must round.

    Those of `SUMS` come term by term.
    """
    accum, rounded = _accumulator(dtype), _rounding_to(dtype)
    sum_visible = _sum_in_order if dtype.itemsize > 2 else reference._sum_visible
    o, zero = call.options, accum.type(0)
    q, k, v, dlse = (x.astype(accum) for x in (call.q, call.k, call.v, call.dlse))
    (batch, heads, sq, _), (_, kv_heads, sk, _) = q.shape, k.shape
    k, v = reference._per_query_head(k, q), reference._per_query_head(v, q)
    scale = accum.type(q.shape[-1] ** -0.5 if o.scale is None else o.scale)
    visible = reference._visible((batch, heads, sq, sk), o)
    everything = np.broadcast_to(True, (batch, heads, sq, max(q.shape[-1], v.shape[-1])))

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a @ b if dtype.itemsize == 2 else _sum_in_order(a, b, everything)

    x, slope = product(q, k.mT) * scale, accum.type(1)
    if o.softcap:
        t = np.tanh(x / accum.type(o.softcap))
        x, slope = accum.type(o.softcap) * t, 1 - t * t
    if o.bias is not None:
        x = x + o.bias.astype(accum)
    if o.alibi_slopes is not None:
        distance = reference._distance(sq, sk).astype(accum)
        x = x - o.alibi_slopes.astype(accum)[..., None, None] * distance
    x = np.where(visible, x, -np.inf)
    sink = accum.type(-np.inf) if o.sinks is None else o.sinks.astype(accum)[:, None, None]
    m = np.maximum(x.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    if dtype.itemsize == 2:  # a lazy softmax rounds relative to the sink or what came first
        early = np.partition(x, -2, axis=-1)[..., -2:-1] if sk > 1 else m  # the second largest
        early = np.where(np.isfinite(sink), sink, early)
        m = np.where(m - early < _HEADROOM, early, m)
    m = np.where(np.isfinite(m), m, zero)
    e = np.exp(x - m)
    total = sum_visible(e, np.ones_like(k[..., :1]), visible) + np.exp(sink - m)
    inverse = np.where(total == 0, zero, 1 / total)
    drop = np.asarray(reference._drop(x.shape, o)).astype(accum)
    out = rounded(sum_visible(rounded(e) * drop, v, visible) * inverse)
    lse = m + np.log(total)
    results = {"out": out, "lse": lse[..., 0]}

    if backward:
        assert call.dout is not None
        dout, seen = call.dout.astype(accum), np.asarray(total != 0)
        p = np.where(visible & seen, np.exp(x - np.where(seen, lse, 0)), zero)
        delta = np.where(
            visible.any(axis=-1, keepdims=True), np.cumsum(dout * out, -1)[..., -1:], zero
        )
        dp = product(dout, v.mT) * drop
        dx = np.where(visible, p * (dp - delta + dlse[..., None]), zero)
        ds = rounded(np.where(visible, dx * slope, zero))

        def by_key_head(x: np.ndarray) -> np.ndarray:
            # The query heads of a key head as one long sequence: its gradient is one sum.
            return x.reshape(batch, kv_heads, heads // max(kv_heads, 1) * sq, x.shape[-1])

        seen_by = by_key_head(visible).mT
        dk = sum_visible(by_key_head(ds).mT, by_key_head(q), seen_by)
        dv = sum_visible(by_key_head(rounded(p) * drop).mT, by_key_head(dout), seen_by)
        results["dq"] = rounded(sum_visible(ds, k, visible) * scale)
        results["dk"], results["dv"] = rounded(dk * scale), rounded(dv)
        results["dbias"] = dx
        if o.sinks is not None:
            terms = reference._sink_terms(o.sinks.astype(accum), lse[..., 0], dlse - delta[..., 0])
            results["dsinks"] = terms[..., None]
            # What rounding each element of out does to delta, if none of the errors cancel by luck.
            step = accum.type(float(_finfo(dtype).eps) / 4) * np.abs(dout * out)
            weight = reference._sink_terms(
                o.sinks.astype(accum), lse[..., 0], np.sqrt((step**2).sum(axis=-1))
            )
            results["dsinks rounding"] = np.where(visible.any(-1), weight, zero)[..., None]
    return results


def _sum_in_order(weight: np.ndarray, x: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Return the sums of `reference._sum_visible`, one term after another."""
    y = np.zeros((*weight.shape[:-1], x.shape[-1]), weight.dtype)
    finite: Any = np.isfinite(x).all(axis=(0, 1, 3))
    for j in range(x.shape[-2]):
        term = weight[..., j, None] * x[..., j, None, :]
        y += term if finite[j] else np.where(visible[..., j, None], term, weight.dtype.type(0))
    return y


def _rounding_to(dtype: np.dtype) -> Callable[[np.ndarray], np.ndarray]:
    """Accumulator -> the nearest one that ``dtype`` holds."""
    if dtype.itemsize >= 4:
        return lambda x: x
    return lambda x: x.astype(dtype).astype(np.float32)


def assert_close(name: str, got: Any, want: np.ndarray, bound: float) -> None:
    """Assert that NaN, inf and -inf stand where they should and the rest is within a bound.

    Parameters
    ----------
    name : str
        What the message calls the array.
    got : array
        NumPy or CuPy array.
    want : array
        What is right, of the same shape.
    bound : float
        The largest absolute error.

    Raises
    ------
    AssertionError
        The message says how many elements are off, and shows the worst and the first.
    """
    got = host(got)
    if got.shape != want.shape:
        raise AssertionError(f"{name}: shape {got.shape}, expected {want.shape}")
    with np.errstate(invalid="ignore"):  # a signalling NaN, out of memory nobody wrote
        got = got.astype(want.dtype)
    for label, test in (("NaN", np.isnan), ("inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = test(got) != test(want)
        if wrong.any():
            at = _first(wrong)
            raise AssertionError(
                f"{name}: {label} in the wrong place or missing at {wrong.sum()} of {got.size} "
                f"elements, first at {at}: got {got[at]}, want {want[at]}"
            )
    finite = np.isfinite(want)
    error = np.abs(np.where(finite, got, 0.0) - np.where(finite, want, 0.0))
    off = error > bound
    if off.any():
        at = tuple(int(i) for i in np.unravel_index(error.argmax(), error.shape))
        raise AssertionError(
            f"{name}: {off.sum()} of {got.size} elements are off, worst at {at}: "
            f"got {got[at]:.9g}, want {want[at]:.9g}, error {error[at]:.3g}, "
            f"allowed {bound:.3g}; first at {_first(off)}"
        )


def _first(where: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.argwhere(where)[0])


def _assert_unseen_is_zero(inputs: Inputs, results: dict[str, np.ndarray]) -> None:
    """Rows without keys, keys without rows and hidden pairs are 0, and no bound applies to them."""
    q, k, _ = heads_first(inputs.layout, *map(host, (inputs.q, inputs.k, inputs.v)))
    rows, keys = np.zeros(q.shape[:3], bool), np.zeros(k.shape[:3], bool)
    seen = {"out": rows, "dq": rows, "dk": keys, "dv": keys}
    if "dbias" in results:
        seen["dbias"] = np.zeros(results["dbias"].shape, bool)
    for i, j, options in _entries(inputs):
        batch, heads, sq = rows[:, :, i].shape
        visible = reference._visible((batch, heads, sq, keys[:, :, j].shape[2]), options)
        rows[:, :, i] = visible.any(axis=-1)
        by_any: Any = visible.any(axis=-2)
        keys[:, :, j] = reference._per_key_head(by_any[..., None], k.shape[1])[..., 0]
        if "dbias" in results:
            pairs = seen["dbias"]
            pairs = of_entry(pairs, options.first, i, j) if inputs.cu_seqlens else pairs
            pairs |= reference._sum_to(pairs.shape, visible) > 0
    for name in results.keys() & seen.keys():
        got, where = results[name], seen[name]
        if name != "dbias":
            where = where[..., None]
            where = as_given(inputs.layout, got.ndim == 4, where)
        wrong = ~where & (got != 0)
        if wrong.any():
            raise AssertionError(f"{name}: {wrong.sum()} elements of unseen rows are not 0")
