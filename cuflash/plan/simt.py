# SPDX-License-Identifier: Apache-2.0
"""Plans of the family simt."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..dtypes import DTYPES
from ..problem import Problem
from .base import KernelPlan, tiles
from .small import dbias_split, dbias_tiles

__all__ = ["BackwardDbiasSimt", "BackwardDkdvSimt", "BackwardDqSimt", "ForwardSimt"]


@dataclass(frozen=True)
class _Tiled(KernelPlan):
    """A kernel built from ``parts/tile.cuh``."""

    family = "simt"

    tile_q: int
    tile_kv: int
    threads_y: int  # lanes across the rows of a tile
    threads_x: int  # lanes across its columns
    chunk: int  # columns of the head dimension that are worked on at once
    blocks_per_sm: int  # what the compiler keeps registers free for
    unroll: int  # of the inner products, in steps of a 16-byte group

    @property
    def threads(self) -> int:
        return self.threads_y * self.threads_x

    def _tile_bytes(self, rows: int, cols: int) -> int:
        """Return sizeof(tile::Shared<rows, cols>): each row is padded by 16 bytes."""
        return rows * (cols * DTYPES[self.dtype].accum.itemsize + 16)


@dataclass(frozen=True)
class _Chunked(_Tiled):
    """A kernel that keeps a result of some columns in registers."""

    chunks: int  # chunks of the padded head dimension of the first accumulator
    resident_chunks: int  # chunks of head_dim of the stationary operand in shared memory; 0: none


@dataclass(frozen=True)
class ForwardSimt(_Chunked):
    """``forward_simt.cu``. `chunks` covers head_dim_v."""

    kernel = "forward_simt"
    results = ("out",)

    @property
    def smem_bytes(self) -> int:
        return (
            max(self.resident_chunks, 1) * self._tile_bytes(self.tile_q, self.chunk)
            + self._tile_bytes(self.tile_kv, self.chunk)
            + self._tile_bytes(self.tile_q, self.tile_kv)
        )

    def parts(self, problem: Problem) -> int:
        return tiles(problem, problem.heads_q, problem.seqlen_q, self.tile_q)


@dataclass(frozen=True)
class BackwardDqSimt(_Chunked):
    """``backward_dq_simt.cu``. `chunks` covers head_dim."""

    kernel = "backward_dq_simt"
    results = ("dq",)

    resident_chunks_v: int  # as resident_chunks, of head_dim_v

    @property
    def smem_bytes(self) -> int:
        resident = max(self.resident_chunks, 1) + max(self.resident_chunks_v, 1)
        return (
            resident * self._tile_bytes(self.tile_q, self.chunk)
            + self._tile_bytes(self.tile_kv, self.chunk)
            + self._tile_bytes(self.tile_q, self.tile_kv)
        )

    def parts(self, problem: Problem) -> int:
        return tiles(problem, problem.heads_q, problem.seqlen_q, self.tile_q)


@dataclass(frozen=True)
class BackwardDkdvSimt(_Chunked):
    """``backward_dkdv_simt.cu``. `chunks` covers head_dim, `chunks_v` head_dim_v."""

    kernel = "backward_dkdv_simt"
    results = ("dk", "dv")

    resident_chunks_v: int
    chunks_v: int

    @property
    def smem_bytes(self) -> int:
        resident = max(self.resident_chunks, 1) + max(self.resident_chunks_v, 1)
        return (
            resident * self._tile_bytes(self.tile_kv, self.chunk)
            + self._tile_bytes(self.tile_q, self.chunk)
            + self._tile_bytes(self.tile_kv, self.tile_q)
        )

    def parts(self, problem: Problem) -> int:
        return tiles(problem, problem.heads_kv, problem.seqlen_kv, self.tile_kv)


@dataclass(frozen=True)
class BackwardDbiasSimt(_Tiled):
    """``backward_dbias_simt.cu``."""

    kernel = "backward_dbias_simt"
    results = ("dbias",)

    @property
    def smem_bytes(self) -> int:
        return (
            self._tile_bytes(self.tile_q, self.chunk)
            + self._tile_bytes(self.tile_kv, self.chunk)
            + self._tile_bytes(self.tile_q, self.tile_kv)
        )

    def parts(self, problem: Problem) -> int:
        return dbias_tiles(problem, self.tile_q, self.tile_kv) * dbias_split(problem)[0]

    def scratch(self, problem: Problem) -> dict[str, int]:
        splits, _ = dbias_split(problem)
        size = math.prod(problem.bias_shape) * problem.dtype.accum.itemsize
        return {"dbias_parts": size * splits if splits > 1 else 0}
