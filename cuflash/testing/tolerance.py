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

`errors.py` says how the error of a call is measured, and why sums such as dsinks are different.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import reference
from ..gradients import Gradients
from ..reference_arguments import as_given, heads_first, of_entry
from .careful import GRADIENTS, SUMS, finfo
from .dense import dense_entries, exactly
from .errors import dtype_of, measure
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
    i, packed = inputs.moved(exactly), bool(inputs.cu_seqlens)
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
        dtype = dtype_of(name, inputs)
        if x.dtype != dtype:
            raise AssertionError(f"{name}: dtype {x.dtype}, expected {dtype}")
        assert_close(name, x, want[name], allowed[name])
    _assert_unseen_is_zero(inputs, got)


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
    measured = measure(inputs, set(want))
    allowed = {}
    for name, value in want.items():
        dtype, error = dtype_of(name, inputs), measured[name]
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
        info = finfo(dtype)
        unit = 0.0 if zero else max(float(info.eps) * top, float(info.smallest_subnormal))
        allowed[name] = 2 * error + unit
    return allowed


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
    for i, j, options in dense_entries(inputs):
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
