# SPDX-License-Identifier: Apache-2.0
"""Plans of the family sm90."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..dtypes import DTYPES
from ..problem import Problem
from .base import TMA_PARAMS_BYTES, Box, KernelPlan, box, ceil_div, tiles
from .mma import BackwardRowsMma, _BackwardMma

__all__ = [
    "BackwardApartSm90",
    "BackwardDkSm90",
    "BackwardDqSm90",
    "BackwardDvSm90",
    "BackwardRowsSm90",
    "BackwardSm90",
    "ForwardSm90",
]


@dataclass(frozen=True)
class ForwardSm90(KernelPlan):
    """``forward_sm90.cu``."""

    kernel = "forward_sm90"
    family = "sm90"
    results = ("out",)
    params = "TmaParams"
    params_bytes = TMA_PARAMS_BYTES
    target_suffix = "a"
    smem_alignment = 1024
    persistent = True

    tile_q: int  # 64 for each warpgroup that computes
    tile_kv: int
    dim: int  # head_dim and head_dim_v, padded to multiples of 16
    dim_v: int
    slots: int  # places of queries: 2, or 1 to save shared memory
    stages: int  # of keys, and of values
    cache_bytes: int  # with a band: of keys and values of heads whose tiles are taken together
    heads_together: int  # at least

    @property
    def threads(self) -> int:
        return 2 * self.tile_q + 128

    @property
    def smem_bytes(self) -> int:
        """The tiles; four jobs, each with a word of each warp; barriers, and a word a stage."""
        way = self.dim_v if self.slots > 1 else 2 * box(16, self.dim_v).columns
        rows = self.tile_q * (self.slots * self.dim + way)
        rows += self.stages * self.tile_kv * (self.dim + self.dim_v)
        job = 80 + 16 * (self.tile_q // 64)
        rest = 4 * (job + 16 + self.tile_q // 4) + self.slots * 16 + self.stages * (4 + 40) + 16
        return ceil_div(rows * DTYPES[self.dtype].itemsize + rest, 1024) * 1024

    def parts(self, problem: Problem) -> int:
        return tiles(problem, problem.heads_q, problem.seqlen_q, self.tile_q)

    def boxes(self) -> dict[str, Box]:
        return {
            "q": box(self.tile_q, self.dim),
            "k": box(self.tile_kv, self.dim),
            "v": box(self.tile_kv, self.dim_v),
            "out": box(16, self.dim_v),
        }


@dataclass(frozen=True)
class BackwardRowsSm90(BackwardRowsMma):
    """``backward_rows_sm90.cu``: a block has a tile of queries, whose rows are aligned."""

    kernel = "backward_rows_sm90"
    family = "sm90"
    target_suffix = "a"
    smem_alignment = 1024

    @property
    def smem_bytes(self) -> int:
        """A tile of out and one of dout; a sum for each row."""
        tiles = 2 * self.tile_q * self.dim_v * DTYPES[self.dtype].itemsize
        return ceil_div(tiles + 4 * self.tile_q, 1024) * 1024


@dataclass(frozen=True)
class BackwardSm90(_BackwardMma):
    """``backward_sm90.cu``; behind it runs a kernel of the mma family."""

    kernel = "backward_sm90"
    family = "sm90"
    results = ("dq", "dk", "dv")
    params = "TmaParams"
    params_bytes = TMA_PARAMS_BYTES
    target_suffix = "a"
    smem_alignment = 1024
    persistent = True

    dim_v: int  # as dim, of head_dim_v
    column_groups: int  # warpgroups with the same keys, which share the columns of dk and dv
    stages: int  # of q
    dout_stages: int
    dq_places: int  # for dq, of so many visits: 1 or 2
    cache_bytes: int  # of q, dout and dq of heads whose jobs are drawn tile by tile
    heads_together: int  # with a band: at least
    ordered: bool = True  # as in BackwardMma

    @property
    def threads(self) -> int:
        """Warpgroups for each 64 keys, and one more."""
        return 2 * self.tile_kv * self.column_groups + 128

    @property
    def smem_bytes(self) -> int:
        """The tiles, and dq; two numbers a row; jobs; steps, words of warps, and barriers."""
        elements = (self.tile_kv + self.stages * self.tile_q) * self.dim
        elements += (self.tile_kv + self.dout_stages * self.tile_q) * self.dim_v
        elements += 2 * self.tile_q * self.tile_kv
        # dq in float32: two elements each.
        elements += 2 * self.dq_places * self.tile_q * self.dim // self.splits
        rest = self.stages * (8 * self.tile_q + 8 + 16) + self.dout_stages * 16
        rest += 3 * 96 + 8 + 8 * (self.threads // 32 - 4) + 8 * 13
        return ceil_div(elements * DTYPES[self.dtype].itemsize + rest, 1024) * 1024

    def parts(self, problem: Problem) -> int:
        return tiles(problem, problem.heads_kv, problem.seqlen_kv, self.tile_kv)

    def scratch(self, problem: Problem) -> dict[str, int]:
        return {"dq_sums": self._query_tiles(problem) * self.tile_q * self.dq_dim * 4}

    def boxes(self) -> dict[str, Box]:
        return {
            "q": box(self.tile_q, self.dim),
            "k": box(self.tile_kv, self.dim),
            "v": box(self.tile_kv, self.dim_v),
            "dout": box(self.tile_q, self.dim_v),
        }


@dataclass(frozen=True)
class BackwardApartSm90(KernelPlan):
    """``backward_apart_sm90.cuh``, of which each gradient has a file."""

    family = "sm90"
    params = "TmaParams"
    params_bytes = TMA_PARAMS_BYTES
    target_suffix = "a"
    smem_alignment = 1024
    persistent = True
    of_queries: ClassVar[bool] = False  # a block owns queries, else keys
    of_weights: ClassVar[bool] = False  # sums of weights, else of gradients of scores

    tile_q: int  # 64: a warpgroup's own rows, and the boxes that all three share
    tile_kv: int
    dim: int  # head_dim and head_dim_v, padded to multiples of 16
    dim_v: int
    groups: int  # warpgroups that compute
    stages: int  # of what is multiplied for scores: keys or queries
    stages_y: int  # of values or dout
    cache_bytes: int  # with a band: as in ForwardSm90, of what is walked
    heads_together: int

    @property
    def threads(self) -> int:
        return 128 * (self.groups + 1)

    @property
    def smem_bytes(self) -> int:
        """The tiles; row statistics of queries that pass; jobs; a word and barriers of stages."""
        own = self.dim if self.of_weights else self.dim + self.dim_v
        elements = 64 * self.groups * own
        passing = self.tile_kv if self.of_queries else self.tile_q
        elements += passing * (self.stages * self.dim + self.stages_y * self.dim_v)
        rows = 16 if self.of_queries else 8 * self.stages * passing
        jobs = 2 * (16 * (1 + self.groups) + 64)
        summed = self.stages_y if self.of_weights else self.stages
        barriers = 9 + 2 * (self.stages + self.stages_y) + summed
        rest = rows + jobs + ceil_div(summed, 2) * 8 + 8 * barriers
        return ceil_div(elements * DTYPES[self.dtype].itemsize + rest, 1024) * 1024

    def parts(self, problem: Problem) -> int:
        if self.of_queries:
            return tiles(problem, problem.heads_q, problem.seqlen_q, self.tile_q * self.groups)
        return tiles(problem, problem.heads_kv, problem.seqlen_kv, self.tile_kv * self.groups)

    def boxes(self) -> dict[str, Box]:
        return {
            "q": box(self.tile_q, self.dim),
            "k": box(self.tile_kv, self.dim),
            "v": box(self.tile_kv, self.dim_v),
            "dout": box(self.tile_q, self.dim_v),
        }


@dataclass(frozen=True)
class BackwardDqSm90(BackwardApartSm90):
    """``backward_dq_sm90.cu``."""

    kernel = "backward_dq_sm90"
    results = ("dq",)
    of_queries = True


@dataclass(frozen=True)
class BackwardDkSm90(BackwardApartSm90):
    """``backward_dk_sm90.cu``."""

    kernel = "backward_dk_sm90"
    results = ("dk",)


@dataclass(frozen=True)
class BackwardDvSm90(BackwardApartSm90):
    """``backward_dv_sm90.cu``."""

    kernel = "backward_dv_sm90"
    results = ("dv",)
    of_weights = True
