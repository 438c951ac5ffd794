# SPDX-License-Identifier: Apache-2.0
"""Plans of the small kernels, which belong to no family: sums, merging, and copies."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..dtypes import DTYPES
from ..merge import Merge
from ..problem import Problem
from .base import KernelPlan, UnitPlan, ceil_div

__all__ = ["Delta", "Dsinks", "MergeStates", "Realign", "SumParts", "dbias_split", "dbias_tiles"]


@dataclass(frozen=True)
class Delta(KernelPlan):
    """``delta.cu``: one thread a row."""

    kernel = "delta"
    family = "any"

    @property
    def threads(self) -> int:
        return 128

    def parts(self, problem: Problem) -> int:
        return ceil_div(problem.rows, self.threads)

    def scratch(self, problem: Problem) -> dict[str, int]:
        return {"delta": problem.rows * problem.dtype.accum.itemsize}


@dataclass(frozen=True)
class Dsinks(KernelPlan):
    """``dsinks.cu``: one block a head."""

    kernel = "dsinks"
    family = "any"
    results = ("dsinks",)

    @property
    def threads(self) -> int:
        return 256

    @property
    def smem_bytes(self) -> int:
        return self.threads * DTYPES[self.dtype].accum.itemsize

    def parts(self, problem: Problem) -> int:
        return problem.heads_q


@dataclass(frozen=True)
class SumParts(KernelPlan):
    """``sum_parts.cu``: one thread an element of dbias."""

    kernel = "sum_parts"
    family = "any"
    results = ("dbias",)

    @property
    def threads(self) -> int:
        return 128

    def parts(self, problem: Problem) -> int:
        if dbias_split(problem)[0] == 1:
            return 0
        return ceil_div(math.prod(problem.bias_shape), self.threads)


def dbias_split(problem: Problem) -> tuple[int, int]:
    """Return into how many parts the sums of dbias are cut, and how many of them share an entry.

    As many as keep a GPU busy, of what there is to sum. From sizes alone, so that the same call has
    the same sums on every device.
    """
    batch, heads, queries, _ = problem.bias_shape
    pairs = (problem.batch if batch == 1 else 1) * (problem.heads_q if heads == 1 else 1)
    wanted = ceil_div(_DBIAS_BLOCKS, max(dbias_tiles(problem, _DBIAS_TILE, _DBIAS_TILE), 1))
    strides = 1
    if queries == 1:
        strides = max(min(wanted, ceil_div(problem.seqlen_q, _DBIAS_TILE)), 1)
    return max(min(wanted, pairs * strides), 1), strides


_DBIAS_TILE = 64
_DBIAS_BLOCKS = 512


def dbias_tiles(problem: Problem, tile_q: int, tile_kv: int) -> int:
    """Return into how many tiles dbias is cut."""
    batch, heads, queries, keys = problem.bias_shape
    return batch * heads * ceil_div(queries, tile_q) * ceil_div(keys, tile_kv)


@dataclass(frozen=True)
class MergeStates(UnitPlan):
    """``merge_states.cu``: one thread a group of elements of a row, 16 bytes where that is aligned.

    One launch merges up to `max_parts` parts. More take several launches: first over the lses of
    all parts, then over their outs.
    """

    kernel = "merge_states"
    params = "MergeParams"
    params_bytes = 1432

    max_parts: int = 16

    @property
    def threads(self) -> int:
        return 128

    @property
    def group(self) -> int:
        """Elements of a thread."""
        return 16 // DTYPES[self.dtype].itemsize

    def groups(self, merge: Merge, scan: bool) -> int:
        """Return how many threads share a row; `scan`: in a launch that only looks at lses."""
        return 1 if scan else max(ceil_div(merge.dim, self.group), 1)

    def parts(self, merge: Merge, scan: bool) -> int:
        """Return how many blocks such a launch has."""
        return ceil_div(merge.rows * self.groups(merge, scan), self.threads)

    def scratch_bytes(self, merge: Merge) -> tuple[int, int]:
        """Return the bytes of MergeParams' states and sums, which several launches share."""
        size = merge.dtype.accum.itemsize
        return merge.rows * 2 * size, merge.rows * merge.dim * size


@dataclass(frozen=True)
class Realign(UnitPlan):
    """``realign.cu``: a thread copies some groups of 16 bytes.

    Runs before a call's kernels, and again behind them if results are to be copied.
    """

    kernel = "realign"
    params = "RealignParams"
    params_bytes = 608

    max_copies: int = 5
    groups_per_thread: int = 4

    @property
    def threads(self) -> int:
        return 256

    @property
    def group(self) -> int:
        """Elements that are moved at once."""
        return 16 // DTYPES[self.dtype].itemsize

    def parts(self, groups: int) -> int:
        """Return how many blocks a copy of so many groups has."""
        return ceil_div(groups, self.threads * self.groups_per_thread)
