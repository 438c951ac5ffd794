# SPDX-License-Identifier: Apache-2.0
"""The element types: one row each. Adding a dtype begins here."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

__all__ = ["DTYPES", "DType", "lookup"]


@dataclass(frozen=True, eq=False)
class DType:
    """An element type. Compared by identity: there is one object a dtype."""

    name: str
    cxx: str  # its name in kernels/parts/types.cuh
    itemsize: int
    accum: np.dtype  # what sums are kept in; the dtype of lse and delta

    @functools.cached_property
    def group(self) -> int:
        """Elements that kernels move at once: 16 bytes of accumulators."""
        return 16 // self.accum.itemsize

    def __repr__(self) -> str:
        return self.name


DTYPES = {
    row.name: row
    for row in (
        DType("float16", "float16", 2, np.dtype(np.float32)),
        DType("bfloat16", "bfloat16", 2, np.dtype(np.float32)),
        DType("float32", "float", 4, np.dtype(np.float32)),
        DType("float64", "double", 8, np.dtype(np.float64)),
    )
}

_BY_NUMPY = {np.dtype(name): DTYPES[name] for name in ("float16", "float32", "float64")}


def lookup(dtype: np.dtype) -> DType | None:
    """Return the row of a NumPy dtype, or None.

    bfloat16 is the extension type of ``ml_dtypes``; whoever holds such an array has imported that
    package, so this module need not.
    """
    row = _BY_NUMPY.get(dtype)
    if row is None and dtype.name == "bfloat16" and dtype.isnative:
        row = _BY_NUMPY[dtype] = DTYPES["bfloat16"]
    return row
