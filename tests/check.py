# SPDX-License-Identifier: Apache-2.0
"""How far from the float64 reference a correct result may be: one rule for every test.

The allowance is measured, not chosen. `careful` computes the plain formula in the way any careful
kernel of the dtype has to: the inputs as given, products accumulated in float32, P and dS rounded
to the dtype before they enter the second products, delta from the rounded output, results rounded
once. Twice its largest error, plus one unit in the last place of the largest value, is allowed.
lse is never rounded to the dtype and has fixed bounds. float64 is measured in float32 and scaled.

For float32 and float64 the order of a sum is what its error comes from, so there sums run in order,
one term after another, as in a kernel: BLAS sums in blocks and NumPy in pairs, which at 4000 keys
is 5 times more accurate than any loop over the keys. For 16-bit dtypes the roundings to the dtype
hide the order, and BLAS does it.

Which pairs count (masks, heads, NaN in hidden places) is the reference's own code here too: two
opinions on that would show as a large measured error, that is, as a bound that allows everything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


def check_forward(got_out: Any, got_lse: Any, inputs: Inputs) -> None:
    """Compare a forward result with the reference; ``got_lse`` None leaves lse out."""
    q, k, v = host(inputs.q), host(inputs.k), host(inputs.v)
    out, lse = reference.attention(q, k, v, **inputs.options, return_lse=True)
    want = {"out": out, "lse": lse}
    allowed = bounds(inputs, want)
    _assert_dtype("out", got_out, inputs.dtype)
    assert_close("out", got_out, out, allowed["out"])
    _assert_unseen_is_zero(inputs, {"out": got_out})
    if got_lse is not None:
        _assert_dtype("lse", got_lse, np.dtype(np.float64 if q.dtype == np.float64 else np.float32))
        assert_close("lse", got_lse, lse, allowed["lse"])


def check_backward(got: Gradients, inputs: Inputs) -> None:
    """Compare gradients with the reference."""
    arrays = [host(x) for x in (inputs.dout, inputs.q, inputs.k, inputs.v)]
    dlse = None if inputs.dlse is None else host(inputs.dlse)
    grads = reference.attention_backward(*arrays, dlse=dlse, **inputs.options)
    want = {"dq": grads.dq, "dk": grads.dk, "dv": grads.dv}
    allowed = bounds(inputs, want)
    for name in want:
        _assert_dtype(name, getattr(got, name), inputs.dtype)
        assert_close(name, getattr(got, name), want[name], allowed[name])
    _assert_unseen_is_zero(inputs, {name: getattr(got, name) for name in want})


def bounds(inputs: Inputs, want: dict[str, np.ndarray]) -> dict[str, float]:
    """Largest absolute error allowed, for each of the results in ``want``.

    ``want`` holds the reference's float64 values of "out", "lse", "dq", "dk" or "dv".
    """
    info = ml_dtypes.finfo(inputs.dtype)
    double = inputs.dtype == np.float64
    measured = careful(inputs, backward=bool({"dq", "dk", "dv"} & set(want)))
    allowed = {}
    for name, exact in want.items():
        finite = np.isfinite(exact)
        top = float(np.abs(exact[finite]).max(initial=0.0))
        if name == "lse":
            allowed[name] = 1e-10 * (1 + top) if double else 1e-4 + 1e-6 * top
            continue
        error = np.abs(measured[name][finite].astype(np.float64) - exact[finite])
        if not np.isfinite(error).all():
            raise ValueError(f"{name} overflows {inputs.dtype}: these inputs test nothing")
        worst = float(error.max(initial=0.0))
        if double:
            worst *= float(info.eps) / float(np.finfo(np.float32).eps)
        # All zero is exact; otherwise one unit is at least the smallest step of the dtype.
        unit = max(float(info.eps) * top, float(info.smallest_subnormal)) if top else 0.0
        allowed[name] = 2 * worst + unit
    return allowed


@np.errstate(all="ignore")
def careful(inputs: Inputs, backward: bool) -> dict[str, np.ndarray]:
    """Results of the plain formula in float32, rounded where a kernel of the dtype must round."""
    rounded = _rounding_to(inputs.dtype)
    sum_visible = _sum_in_order if inputs.dtype.itemsize > 2 else reference._sum_visible
    layout, batched = inputs.layout, inputs.q.ndim == 4
    arrays = [x for x in (inputs.q, inputs.k, inputs.v, inputs.dout) if x is not None]
    q, k, v, *dout = (x.astype(np.float32) for x in reference._heads_first(layout, *arrays))
    (batch, heads, sq, _), (_, kv_heads, sk, _) = q.shape, k.shape
    k, v = reference._per_query_head(k, q), reference._per_query_head(v, q)
    scale = np.float32(q.shape[-1] ** -0.5 if inputs.scale is None else inputs.scale)
    visible = reference._visible(sq, sk, inputs.causal, inputs.window)
    visible = np.broadcast_to(visible, (batch, heads, sq, sk))
    everything = np.broadcast_to(True, (batch, heads, sq, max(q.shape[-1], v.shape[-1])))

    x = np.where(visible, sum_visible(q, k.mT, everything) * scale, np.float32(-np.inf))
    m = x.max(axis=-1, keepdims=True, initial=-np.inf)
    m = np.where(np.isfinite(m), m, np.float32(0))
    e = np.exp(x - m)
    total = sum_visible(e, np.ones_like(k[..., :1]), visible)
    inverse = np.where(total == 0, np.float32(0), 1 / total)
    out = rounded(sum_visible(rounded(e), v, visible) * inverse)
    results = {"out": out}

    if backward:
        p = np.where(visible, e * inverse, np.float32(0))
        delta = np.cumsum(dout[0] * out, axis=-1)[..., -1:]
        dx = sum_visible(dout[0], v.mT, everything) - delta
        if inputs.dlse is not None:
            dx += host(inputs.dlse).astype(np.float32).reshape(total.shape)
        ds = rounded(np.where(visible, p * dx, np.float32(0)))

        def by_key_head(x: np.ndarray) -> np.ndarray:
            # The query heads of a key head as one long sequence: its gradient is one sum.
            return x.reshape(batch, kv_heads, heads // max(kv_heads, 1) * sq, x.shape[-1])

        seen_by = by_key_head(visible).mT
        dk = sum_visible(by_key_head(ds).mT, by_key_head(q), seen_by)
        dv = sum_visible(by_key_head(rounded(p)).mT, by_key_head(dout[0]), seen_by)
        results["dq"] = rounded(sum_visible(ds, k, visible) * scale)
        results["dk"], results["dv"] = rounded(dk * scale), rounded(dv)
    return {name: reference._as_given(layout, batched, x) for name, x in results.items()}


def _sum_in_order(weight: np.ndarray, x: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """The sums of `reference._sum_visible`, one term after another."""
    y = np.zeros((*weight.shape[:-1], x.shape[-1]), np.float32)
    finite = np.isfinite(x).all(axis=-1).all(axis=(0, 1))
    for j in range(x.shape[-2]):
        term = weight[..., j, None] * x[..., j, None, :]
        y += term if finite[j] else np.where(visible[..., j, None], term, np.float32(0))
    return y


def _rounding_to(dtype: np.dtype) -> Callable[[np.ndarray], np.ndarray]:
    """float32 -> the nearest float32 that ``dtype`` holds."""
    if dtype.itemsize >= 4:
        return lambda x: x
    return lambda x: x.astype(dtype).astype(np.float32)


def assert_close(name: str, got: Any, want: np.ndarray, bound: float) -> None:
    """Assert that NaN, inf and -inf stand where they should and the rest is within ``bound``."""
    got = host(got)
    assert got.shape == want.shape, f"{name}: shape {got.shape}, expected {want.shape}"
    got, want = got.astype(np.float64), want.astype(np.float64)
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
