# SPDX-License-Identifier: Apache-2.0
"""Plans of the family mma."""

from __future__ import annotations

from dataclasses import dataclass

from ..dtypes import DTYPES
from ..problem import Problem
from .base import KernelPlan, ceil_div, tiles

__all__ = ["BackwardDqMma", "BackwardMma", "BackwardRowsMma", "ForwardMma"]


def _pair_pitch(keys: int, size: int) -> int:
    """Return the bytes of a row of pair_tile::Tile, with elements of so many bytes."""
    gap = 32 if size == 4 else 16
    return (ceil_div(keys * size, gap) | 1) * gap


@dataclass(frozen=True)
class ForwardMma(KernelPlan):
    """``forward_mma.cu``."""

    kernel = "forward_mma"
    family = "mma"
    results = ("out",)

    tile_q: int
    tile_kv: int
    warps: int
    dim: int  # head_dim and head_dim_v, padded to multiples of 16
    dim_v: int
    blocks_per_sm: int  # what the compiler keeps registers free for
    aligned: int  # bytes of rows of q, k and v that are copied at once: 16, 8, or 0 for any strides
    aligned_bias: int = 0  # the same of a bias and a mask: 16, 4, or 0: they are not copied
    wide_bias: bool = False  # elements of a bias that is copied are accumulators
    aligned_mask: int = 0

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def smem_bytes(self) -> int:
        """Q, and two tiles of each of the others; rows of q, k and v are padded by 8 elements."""
        size = DTYPES[self.dtype].itemsize
        rows = self.tile_q * (self.dim + 8) + 2 * self.tile_kv * (self.dim + self.dim_v + 16)
        found = rows * size
        if self.aligned_bias:
            found += 2 * self.tile_q * _pair_pitch(self.tile_kv, 4 if self.wide_bias else size)
        if self.aligned_mask:
            found += 2 * self.tile_q * _pair_pitch(self.tile_kv, 1)
        return found

    def parts(self, problem: Problem) -> int:
        return tiles(problem, problem.heads_q, problem.seqlen_q, self.tile_q)


@dataclass(frozen=True)
class _BackwardMma(KernelPlan):
    """What the three kernels of the mma family's backward agree on."""

    family = "mma"

    tile_q: int
    tile_kv: int
    dim: int  # head_dim, padded to a multiple of 16
    dq_dim: int  # the same, of the sums of dq
    splits: int  # of the columns of dq, dk and dv, by different blocks
    turn: int  # tiles of queries to whose dq a block adds at once

    def _query_tiles(self, problem: Problem, together: int = 1) -> int:
        return tiles(problem, problem.heads_q, problem.seqlen_q, self.tile_q * together)


@dataclass(frozen=True)
class BackwardRowsMma(_BackwardMma):
    """``backward_rows_mma.cu``: a block has a tile of queries."""

    kernel = "backward_rows_mma"

    dim_v: int  # as dim, of head_dim_v
    aligned: int  # as in ForwardMma, of q, k, v, out and dout

    @property
    def threads(self) -> int:
        """A warp for 16 queries."""
        return 2 * self.tile_q

    @property
    def smem_bytes(self) -> int:
        """A tile of out and one of dout."""
        return 2 * self.tile_q * (self.dim_v + 8) * DTYPES[self.dtype].itemsize

    def parts(self, problem: Problem) -> int:
        return self._query_tiles(problem)

    def scratch(self, problem: Problem) -> dict[str, int]:
        return {
            "row_stats": self._query_tiles(problem) * self.tile_q * 8,
            "dq_turns": self._query_tiles(problem, self.turn) * self.splits * 4,
        }


@dataclass(frozen=True)
class BackwardMma(_BackwardMma):
    """``backward_mma.cu``."""

    kernel = "backward_mma"
    results = ("dq", "dk", "dv")
    waits_for_blocks = True

    warps: int
    query_warps: int  # of them side by side, along the queries of scores and the columns of dk, dv
    dq_warps: int  # of them one below the other, along the queries of dq
    slots: int  # of tiles of q and dout: 2, or 1 to save shared memory
    dim_v: int  # as dim, of head_dim_v
    blocks_per_sm: int  # what the compiler keeps registers free for
    together: int  # blocks of several heads that are launched tile by tile
    aligned: int  # as in ForwardMma, of q, k, v, out and dout
    ordered: bool = True  # dq is summed up in the order of key tiles

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def smem_bytes(self) -> int:
        """K and V, the slots of Q and dout, dscores, and two numbers a row."""
        cols = self.dim + self.dim_v + 16  # rows of tiles are padded by 8 elements
        elements = (self.tile_kv + self.slots * self.tile_q) * cols
        elements += (2 if self.query_warps > 1 else 1) * self.tile_kv * (self.tile_q + 8)
        return elements * DTYPES[self.dtype].itemsize + self.slots * self.tile_q * 8 + 96

    @property
    def smem_wanted(self) -> int:
        return self.blocks_per_sm * self.smem_bytes

    def parts(self, problem: Problem) -> int:
        return self.splits * tiles(problem, problem.heads_kv, problem.seqlen_kv, self.tile_kv)

    def scratch(self, problem: Problem) -> dict[str, int]:
        return {"dq_sums": self._query_tiles(problem) * self.tile_q * self.dq_dim * 4}


@dataclass(frozen=True)
class BackwardDqMma(_BackwardMma):
    """``backward_dq_mma.cu``: a block has a tile of queries."""

    kernel = "backward_dq_mma"
    results = ("dq",)

    @property
    def threads(self) -> int:
        return 128

    @property
    def smem_bytes(self) -> int:
        """Sixteen rows of so many columns for each warp, padded by 8 elements."""
        unit = next(n for n in (64, 32, 16) if self.dq_dim % n == 0)
        return self.threads // 32 * 16 * (unit + 8) * DTYPES[self.dtype].itemsize

    def parts(self, problem: Problem) -> int:
        return self._query_tiles(problem)
