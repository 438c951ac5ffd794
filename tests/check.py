# SPDX-License-Identifier: Apache-2.0
"""How far from the float64 reference a correct result may be: one rule for every test.

The allowance is measured, not chosen. `careful` computes the plain formula in the way any careful
kernel of the dtype has to: the inputs as given, products accumulated in float32 (float64 for
float64), P and dS rounded to the dtype before they enter the second products, delta from the
rounded output, P in the backward from the stored lse, results rounded once. Twice its largest
error, plus one unit in the last place of the largest value, is allowed. lse is never rounded to the
dtype; it has a fixed bound, or twice the largest error if that is more. Errors of float64 are taken
against the reference in extended precision: the reference in float64 would be as far from the truth
as the kernel.

For float32 and float64 the order of a sum is what its error comes from, so there sums run in order,
one term after another, as in a kernel: BLAS sums in blocks and NumPy in pairs, which at 4000 keys
is 5 times more accurate than any loop over the keys. For 16-bit dtypes the roundings to the dtype
hide the order, and BLAS does it.

Which pairs count (masks, heads, NaN in hidden places) is the reference's own code here too: two
opinions on that would show as a large measured error, that is, as a bound that allows everything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from cuflash import reference
from cuflash.gradients import Gradients


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arguments of one call, NumPy or CuPy arrays; without ``dout`` there is no backward."""

    q: Any
    k: Any
    v: Any
    dout: Any = None
    dlse: Any = None
    scale: float | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    layout: str = "bshd"

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that both passes take."""
        names = ("scale", "causal", "window", "layout")
        return {name: getattr(self, name) for name in names}

    @property
    def dtype(self) -> np.dtype:
        return host(self.q).dtype


def host(x: Any) -> np.ndarray:
    return np.asarray(x.get() if hasattr(x, "get") else x)


def _accumulator(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _exactly(x: Any) -> np.ndarray:
    """A host array in the precision that the reference is to compute in."""
    x = host(x)
    return x.astype(np.longdouble) if x.dtype == np.float64 else x


def exact(inputs: Inputs, backward: bool) -> dict[str, np.ndarray]:
    """The reference's "out" and "lse", and "dq", "dk" and "dv" for the backward."""
    q, k, v = (_exactly(x) for x in (inputs.q, inputs.k, inputs.v))
    out, lse = reference.attention(q, k, v, **inputs.options, return_lse=True)
    results = {"out": out, "lse": lse}
    if backward:
        dlse = None if inputs.dlse is None else _exactly(inputs.dlse)
        dout = _exactly(inputs.dout)
        grads = reference.attention_backward(dout, q, k, v, dlse=dlse, **inputs.options)
        results |= {"dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
    return results


def check_forward(got_out: Any, got_lse: Any, inputs: Inputs) -> None:
    """Compare a forward result with the reference; ``got_lse`` None leaves lse out."""
    want = exact(inputs, backward=False)
    allowed = bounds(inputs, want)
    _assert_dtype("out", got_out, inputs.dtype)
    assert_close("out", got_out, want["out"], allowed["out"])
    _assert_unseen_is_zero(inputs, {"out": got_out})
    if got_lse is not None:
        _assert_dtype("lse", got_lse, _accumulator(inputs.dtype))
        assert_close("lse", got_lse, want["lse"], allowed["lse"])


def check_backward(got: Gradients, inputs: Inputs) -> None:
    """Compare gradients with the reference."""
    results = exact(inputs, backward=True)
    want = {name: results[name] for name in ("dq", "dk", "dv")}
    allowed = bounds(inputs, want)
    for name in want:
        _assert_dtype(name, getattr(got, name), inputs.dtype)
        assert_close(name, getattr(got, name), want[name], allowed[name])
    _assert_unseen_is_zero(inputs, {name: getattr(got, name) for name in want})


def bounds(inputs: Inputs, want: dict[str, np.ndarray]) -> dict[str, float]:
    """Largest absolute error allowed, for each of the results in ``want``.

    ``want`` holds the reference's values of "out", "lse", "dq", "dk" or "dv".
    """
    info = ml_dtypes.finfo(inputs.dtype)
    backward = bool({"dq", "dk", "dv"} & set(want))
    nearby = _neighbours(inputs)
    truth = exact(nearby, backward)
    measured = careful(nearby, backward)
    worst = _errors(measured, {name: truth[name] for name in want}, inputs.dtype)
    allowed = {}
    for name, value in want.items():
        top = float(np.abs(value[np.isfinite(value)]).max(initial=0.0))
        if name == "lse":  # large products that cancel make errors of more than its own size
            double = inputs.dtype == np.float64
            fixed = 1e-10 * (1 + top) if double else 1e-4 + 1e-6 * top
            allowed[name] = max(fixed, 2 * worst[name])
            continue
        # All zero is exact; otherwise one unit is at least the smallest step of the dtype.
        unit = max(float(info.eps) * top, float(info.smallest_subnormal)) if top else 0.0
        allowed[name] = (2 * worst[name] if top else 0.0) + unit
    return allowed


def _errors(
    measured: dict[str, np.ndarray], want: dict[str, np.ndarray], dtype: np.dtype
) -> dict[str, float]:
    """Largest error of each result, where the true value is finite."""
    worst = {}
    for name in want:
        finite = np.isfinite(want[name])
        error = np.abs(measured[name][finite].astype(want[name].dtype) - want[name][finite])
        if not np.isfinite(error).all():
            raise ValueError(f"{name} overflows {dtype}: these inputs test nothing")
        worst[name] = float(error.max(initial=0.0))
    return worst


def _neighbours(inputs: Inputs) -> Inputs:
    """The call itself, and if it has few rows some with inputs that differ in the last place.

    An error that a whole row shares (of its lse, its delta) makes the largest one, and with few
    rows its size is a matter of luck. Calls with nearly the same inputs have errors of the same
    kind. They are stacked along the batch axis.
    """
    given = [x for x in map(host, (inputs.q, inputs.k, inputs.v)) if x.size]
    rows = min((x.size // x.shape[-1] for x in given), default=1000)
    elements = min((x.size for x in given), default=4000)
    # (In 16 bits the roundings of single elements are larger, and there are many of those.)
    wide = host(inputs.q).dtype.itemsize > 2
    copies = 1 + min(max(500 // rows, 4000 // elements), 15) * wide
    rng = np.random.default_rng(0)

    def stacked(x: Any, batched: bool, nudge: bool) -> Any:
        if x is None:
            return None
        x = host(x) if batched else host(x)[None]
        parts = [x]
        for _ in range(copies - 1):  # about half of the numbers move by one unit towards 0
            moved = np.nextafter(x, np.zeros_like(x)) if nudge else x
            parts.append(np.where(np.isfinite(x) & (rng.random(x.shape) < 0.5), moved, x))
        return np.concatenate(parts)

    batched = host(inputs.q).ndim == 4
    names = ("q", "k", "v", "dout")
    arrays = {name: stacked(getattr(inputs, name), batched, True) for name in names}
    return replace(inputs, **arrays, dlse=stacked(inputs.dlse, batched, False))


@np.errstate(all="ignore")
def careful(inputs: Inputs, backward: bool) -> dict[str, np.ndarray]:
    """Results of the plain formula, rounded where a kernel of the dtype must round."""
    accum = _accumulator(inputs.dtype)
    rounded = _rounding_to(inputs.dtype)
    sum_visible = _sum_in_order if inputs.dtype.itemsize > 2 else reference._sum_visible
    layout, batched = inputs.layout, inputs.q.ndim == 4
    arrays = [x for x in (inputs.q, inputs.k, inputs.v, inputs.dout) if x is not None]
    q, k, v, *dout = (x.astype(accum) for x in reference._heads_first(layout, *arrays))
    (batch, heads, sq, _), (_, kv_heads, sk, _) = q.shape, k.shape
    k, v = reference._per_query_head(k, q), reference._per_query_head(v, q)
    scale = accum.type(q.shape[-1] ** -0.5 if inputs.scale is None else inputs.scale)
    visible = reference._visible(sq, sk, inputs.causal, inputs.window)
    visible = np.broadcast_to(visible, (batch, heads, sq, sk))
    everything = np.broadcast_to(True, (batch, heads, sq, max(q.shape[-1], v.shape[-1])))

    x = np.where(visible, sum_visible(q, k.mT, everything) * scale, accum.type(-np.inf))
    m = x.max(axis=-1, keepdims=True, initial=-np.inf)
    m = np.where(np.isfinite(m), m, accum.type(0))
    e = np.exp(x - m)
    total = sum_visible(e, np.ones_like(k[..., :1]), visible)
    inverse = np.where(total == 0, accum.type(0), 1 / total)
    out = rounded(sum_visible(rounded(e), v, visible) * inverse)
    lse = m + np.log(total)
    results = {"out": out}

    if backward:
        seen = total != 0
        p = np.where(visible & seen, np.exp(x - np.where(seen, lse, 0)), accum.type(0))
        delta = np.cumsum(dout[0] * out, axis=-1)[..., -1:]
        dx = sum_visible(dout[0], v.mT, everything) - delta
        if inputs.dlse is not None:
            dx += host(inputs.dlse).astype(accum).reshape(total.shape)
        ds = rounded(np.where(visible, p * dx, accum.type(0)))

        def by_key_head(x: np.ndarray) -> np.ndarray:
            # The query heads of a key head as one long sequence: its gradient is one sum.
            return x.reshape(batch, kv_heads, heads // max(kv_heads, 1) * sq, x.shape[-1])

        seen_by = by_key_head(visible).mT
        dk = sum_visible(by_key_head(ds).mT, by_key_head(q), seen_by)
        dv = sum_visible(by_key_head(rounded(p)).mT, by_key_head(dout[0]), seen_by)
        results["dq"] = rounded(sum_visible(ds, k, visible) * scale)
        results["dk"], results["dv"] = rounded(dk * scale), rounded(dv)
    results = {name: reference._as_given(layout, batched, x) for name, x in results.items()}
    return results | {"lse": lse[..., 0] if batched else lse[0, ..., 0]}


def _sum_in_order(weight: np.ndarray, x: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """The sums of `reference._sum_visible`, one term after another."""
    y = np.zeros((*weight.shape[:-1], x.shape[-1]), weight.dtype)
    finite = np.isfinite(x).all(axis=-1).all(axis=(0, 1))
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
    """Assert that NaN, inf and -inf stand where they should and the rest is within ``bound``."""
    got = host(got)
    assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
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


def _assert_dtype(name: str, got: Any, want: np.dtype) -> None:
    assert host(got).dtype == want, f"{name}: dtype {host(got).dtype}, expected {want}"


def _assert_unseen_is_zero(inputs: Inputs, results: dict[str, Any]) -> None:
    """Rows without keys and keys without rows are 0, and no bound applies to them."""
    axis = -3 if inputs.layout == "bshd" else -2
    sq, sk = inputs.q.shape[axis], inputs.k.shape[axis]
    visible = reference._visible(sq, sk, inputs.causal, inputs.window)
    for name, got in results.items():
        unseen = ~visible.any(axis=0 if name in ("dk", "dv") else 1)
        wrong = np.compress(unseen, host(got), axis=axis) != 0
        assert not wrong.any(), f"{name}: {wrong.sum()} elements of unseen rows are not 0"
