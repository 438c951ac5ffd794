# SPDX-License-Identifier: Apache-2.0
"""The largest error of the careful formula on a call.

dbias (of a bias that is broadcast) and dsinks are sums of many terms and may be few numbers, so
whether the errors of the terms cancel is luck. The error that counts there is the measured one, or
twice what terms of these sizes and random signs add up to. Terms of one row have one sign: they
share the errors of the row's lse and delta.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .careful import GRADIENTS, SUMS, accumulator, careful, rounding_to, truth
from .dense import count_copies, dense_calls
from .inputs import Inputs, host

__all__ = ["dtype_of", "measure"]


@np.errstate(all="ignore")
def measure(inputs: Inputs, names: set[str]) -> dict[str, float]:
    """Return the largest error of the careful formula, for each of these results."""
    backward, copies = bool(names & set(GRADIENTS)), count_copies(inputs)
    calls: list[tuple[Any, Any]] = [
        (careful(call, inputs.dtype, backward), truth(call, backward))
        for call in dense_calls(inputs, copies)
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
        raise ValueError(f"{name} overflows {dtype_of(name, inputs)}: these inputs test nothing")
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
    sums = rounding_to(dtype_of(name, inputs))(partial[..., -1:].sum(axis=-1))
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


def dtype_of(name: str, inputs: Inputs) -> np.dtype:
    """Return the dtype of a result of a call."""
    if name == "dbias":
        return host(inputs.bias).dtype
    return accumulator(inputs.dtype) if name in ("lse", "dsinks") else inputs.dtype
