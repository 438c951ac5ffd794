# SPDX-License-Identifier: Apache-2.0
"""Destinations: the arrays that a call writes to, of the caller or new."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from . import arrays, checks
from .arrays import View

__all__ = ["Destinations"]


class Inputs(Protocol):
    """The arrays that a call reads."""

    def named(self) -> Iterator[tuple[str, View]]:
        """Yield each with its name."""
        ...


class Destinations:
    """Where a call writes: arrays fit for that, which share no memory with inputs or each other.

    Results lie where `like` does, an input that messages call `name`. `inputs` have all arrays that
    the call reads; they are asked for when the caller gives a destination.
    """

    def __init__(self, name: str, like: View, inputs: Inputs) -> None:
        self._name = name
        self._like = like
        self._inputs = inputs
        self._taken: list[tuple[str, View, int, int]] = []  # name, array and its addresses

    def result(self, name: str, given: Any, shape: tuple[int, ...], dtype: np.dtype) -> View:
        """Return the array to write a result to: `given`, or a new one if that is None."""
        if given is None:
            return arrays.empty(self._like, shape, dtype)
        x = arrays.adopt(name, given)
        checks.same_place(name, x, self._like.device, self._name)
        if x.dtype != dtype:
            raise TypeError(f"{name}: expected dtype {dtype}, the result's, got {x.dtype}")
        checks.same_shape(name, x.shape, shape, "the result's")
        self._claim(name, x, given)
        return x

    def workspace(self, given: Any, size: int) -> View:
        """Return the caller's scratch memory, if `given` is at least `size` bytes of it."""
        x = arrays.adopt("workspace", given)
        checks.same_place("workspace", x, self._like.device, self._name)
        if x.dtype != np.uint8:
            raise TypeError(f"workspace: expected dtype uint8, got {x.dtype}")
        if x.ndim != 1 or x.shape[0] < size:
            raise ValueError(
                f"workspace: expected a one-dimensional array of at least {size} uint8, "
                f"got shape {x.shape}"
            )
        if x.address % 16 or not x.array.flags.c_contiguous:
            raise ValueError("workspace: expected a contiguous array aligned to 16 bytes")
        self._claim("workspace", x, given)
        return x

    def _claim(self, name: str, x: View, given: Any) -> None:
        if x.device is None:
            if not x.array.flags.writeable:
                raise ValueError(f"{name}: expected a writable array, got a read-only one")
            if x.array is not given and x.array.flags.owndata:  # a copy: the result would be lost
                raise ValueError(
                    f"{name}: expected an aligned array, got one with unaligned elements"
                )
        if arrays.self_overlap(x):
            raise ValueError(
                f"{name}: expected an array whose elements lie apart, got strides {x.strides} for "
                f"shape {x.shape}, as of a broadcast view"
            )
        if not self._taken:
            self._taken = [(other, y, *arrays.extent(y)) for other, y in self._inputs.named()]
        low, high = arrays.extent(x)
        for other, y, first, end in self._taken:
            if low < end and first < high and arrays.overlap(x, y):
                raise ValueError(
                    f"{name}: shares memory with {other}, which this call also uses; "
                    "pass another array"
                )
        self._taken.append((name, x, low, high))
