# SPDX-License-Identifier: Apache-2.0
"""Merge: what a call of merge_states asks for. Reads its arguments and checks them.

As problem.py is to attention: whoever takes a Merge checks nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from . import arrays, checks
from .arrays import View
from .dtypes import DType
from .layout import Layout, read_axes, read_layout

__all__ = ["Merge", "Parts", "read_merge", "read_pair"]


class Merge(NamedTuple):
    """A valid call: sizes, no arrays."""

    dtype: DType
    shape: tuple[int, ...]  # of a row's axes: (batch,) if there is one, then as `layout` has them
    dim: int

    @property
    def rows(self) -> int:
        """Number of elements of lse."""
        return math.prod(self.shape)


class Parts(NamedTuple):
    """The arrays that go with a Merge, in the caller's layout."""

    layout: Layout
    device: int | None  # GPU index; None: host memory
    outs: tuple[View, ...]
    lses: tuple[View, ...]

    def named(self) -> Iterator[tuple[str, View]]:
        """Yield the arrays, each with what messages call it."""
        for name, views in (("outs", self.outs), ("lses", self.lses)):
            for n, x in enumerate(views):
                yield f"{name}[{n}]", x


def read_merge(outs: Any, lses: Any, layout: Any) -> tuple[Merge, Parts]:
    """Check the arguments of merge_states but `out`."""
    layout = read_layout(layout)
    for name, given in (("outs", outs), ("lses", lses)):
        # The slices of one array would be merged, whatever its first axis is.
        if not isinstance(given, (list, tuple)):
            raise TypeError(
                f"{name}: expected a list or tuple of arrays, got {type(given).__name__}; "
                "list(x) makes one of the first axis of an array"
            )
    if not outs:
        raise ValueError("outs: expected at least one array, got none")
    if len(lses) != len(outs):
        raise ValueError(f"lses: expected {len(outs)} arrays, as outs has, got {len(lses)}")
    outs = tuple(arrays.adopt(f"outs[{n}]", x) for n, x in enumerate(outs))
    lses = tuple(arrays.adopt(f"lses[{n}]", x) for n, x in enumerate(lses))
    first = outs[0]
    dtype = checks.element_type("outs[0]", first)
    axes = read_axes("outs[0]", layout, first.shape)
    batch, seq, heads, dim = axes.sizes(first.shape)
    for n, x in enumerate(outs):
        what = "that of outs[0]"
        _fits(f"outs[{n}]", x, first.dtype, what, first.shape, what, first.device)
    rows = axes.row_shape(batch, heads, seq)
    for n, x in enumerate(lses):
        why, what = f"for {dtype} outs", "(batch, heads, seq) of outs, in either layout"
        _fits(f"lses[{n}]", x, dtype.accum, why, rows, what, first.device)
    return Merge(dtype, first.shape[:-1], dim), Parts(axes, first.device, outs, lses)


def read_pair(out: Any) -> tuple[Any, Any]:
    """Return where out and lse shall be written, each an array or None."""
    if out is None:
        return None, None
    if not isinstance(out, tuple) or len(out) != 2:
        size = f" of {len(out)}" if isinstance(out, tuple) else ""
        raise TypeError(f"out: expected a pair (out, lse), got {type(out).__name__}{size}")
    return out


def _fits(
    name: str,
    x: View,
    dtype: np.dtype,
    why: str,
    shape: tuple[int, ...],
    what: str,
    device: int | None,
) -> None:
    if x.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {dtype}, {why}, got {x.dtype}")
    checks.same_place(name, x, device, "outs[0]")
    if x.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, {what}, got {x.shape}")
