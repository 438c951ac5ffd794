# SPDX-License-Identifier: Apache-2.0
"""Checks of single arguments; their errors name the argument, what was expected and what came."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from .arrays import View
from .dtypes import DTYPES, DType, lookup

__all__ = ["element_type", "flag", "number", "same_place", "same_shape"]


def element_type(name: str, x: View) -> DType:
    """Return the element type of an array that kernels are compiled for."""
    dtype = lookup(x.dtype)
    if dtype is None:
        raise TypeError(
            f"{name}: expected dtype {', '.join(DTYPES)} in native byte order, got {x.dtype}; "
            "convert it with .astype(...)"
        )
    return dtype


def same_place(name: str, x: View, device: int | None, first: str = "q") -> None:
    """Raise an error if an array is not where the call's `first` array is."""
    if x.device != device:
        here, there = ("host memory" if i is None else f"GPU {i}" for i in (x.device, device))
        kind = TypeError if None in (x.device, device) else ValueError
        raise kind(
            f"{name}: expected an array in the same place as {first} ({there}), got one in {here}"
        )


def same_shape(name: str, got: tuple[int, ...], want: tuple[int, ...], source: str) -> None:
    """Raise an error if a shape is not the one that follows from `source`."""
    if got != want:
        raise ValueError(f"{name}: expected shape {want} ({source}), got {got}")


def flag(name: str, value: Any) -> bool:
    """Return an argument that must be True or False; an array or a number is an error."""
    if value is True or value is False:
        return value
    if not isinstance(value, np.bool_):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return bool(value)


def number(name: str, x: Any, dtype: DType) -> float:
    """Return a finite number of the host, as float."""
    if isinstance(x, np.ndarray) and x.ndim == 0:
        x = x[()]
    real = isinstance(x, numbers.Real) and not isinstance(x, (bool, np.timedelta64))
    if not real and not (isinstance(x, np.generic) and lookup(x.dtype)):
        raise TypeError(f"{name}: expected a real number on the host, got {type(x).__name__}")
    try:
        value = float(x)
    except OverflowError:  # of int and Fraction
        value = math.inf
    if not abs(value) <= float(np.finfo(dtype.accum).max):
        raise ValueError(f"{name}: expected a finite number (of {dtype.accum}), got {value}")
    return value
