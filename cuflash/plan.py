# SPDX-License-Identifier: Apache-2.0
"""Plans: the compile-time constants of kernels, and nothing else.

A call runs the kernels of its plan one after the other, all with the same Params. Each record below
belongs to one file of ``kernels/attention/``; its fields become ``plan::kTileQ`` and so on there.
`MergeStates` is the kernel of a call of its own, and `Realign` runs around the others; these two
have parameters of their own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, NamedTuple

from .dtypes import DTYPES
from .merge import Merge
from .problem import Problem
from .tensormap import MAP_BYTES

__all__ = [
    "BackwardApartSm90",
    "BackwardDbiasSimt",
    "BackwardDkSm90",
    "BackwardDkdvSimt",
    "BackwardDqMma",
    "BackwardDqSimt",
    "BackwardDqSm90",
    "BackwardDvSm90",
    "BackwardMma",
    "BackwardRowsMma",
    "BackwardRowsSm90",
    "BackwardSm90",
    "Box",
    "Delta",
    "Dsinks",
    "ForwardMma",
    "ForwardSimt",
    "ForwardSm90",
    "KernelPlan",
    "MergeStates",
    "Plan",
    "Realign",
    "SumParts",
    "UnitPlan",
    "dbias_split",
]

#: sizeof(Params) in kernels/attention/params.cuh; params.py packs so many bytes.
PARAMS_BYTES = 928
#: Where maps of tensors begin behind it, in TmaParams of params_tma.cuh.
MAPS_AT = -(-PARAMS_BYTES // 64) * 64
#: sizeof(TmaParams), the most that a kernel of a call takes.
TMA_PARAMS_BYTES = MAPS_AT + 4 * MAP_BYTES


@dataclass(frozen=True)
class UnitPlan:
    """The constants of one translation unit. `dtype` names the element type."""

    kernel: ClassVar[str]  # the file's stem, the entry point and the name in the cache
    params: ClassVar[str] = "Params"  # the type of the kernel's one parameter
    params_bytes: ClassVar[int] = PARAMS_BYTES  # its size
    target_suffix: ClassVar[str] = ""  # "a": code for this very architecture, as for wgmma
    smem_alignment: ClassVar[int] = 128  # 1024: of swizzled tiles
    waits_for_blocks: ClassVar[bool] = False  # blocks wait for those of lower index

    dtype: str

    @property
    def threads(self) -> int:
        """Threads of a block."""
        raise NotImplementedError

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block: sizeof(Smem)."""
        return 0

    def constants(self) -> Iterator[tuple[str, str, str]]:
        """Yield C++ type, name and value of each constant of namespace plan."""
        yield "int", "kParamsBytes", str(self.params_bytes)
        yield "int", "kThreads", str(self.threads)
        yield "int", "kSmemBytes", str(self.smem_bytes)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            name = "k" + field.name.title().replace("_", "")
            if isinstance(value, bool):
                yield "bool", name, str(value).lower()
            elif isinstance(value, int):
                yield "int", name, str(value)
            elif field.name != "dtype":
                raise TypeError(f"{field.name}: constants are bool or int, got {value!r}")


class Box(NamedTuple):
    """What TMA moves at once of one head: rows, and columns that are swizzled together."""

    rows: int
    columns: int


def _box(rows: int, dim: int) -> Box:
    """Return the box of a swizzled::Tile."""
    return Box(rows, next(n for n in (64, 32, 16) if dim % n == 0))


@dataclass(frozen=True)
class KernelPlan(UnitPlan):
    """The constants of one kernel of an attention call.

    The options that a kernel has code for are true; a call may use fewer.
    """

    family: ClassVar[str]
    results: ClassVar[tuple[str, ...]] = ()  # it runs if one is wanted; (): if any other runs
    persistent: ClassVar[bool] = False  # a block stays and takes one part after the other

    _: KW_ONLY
    softcap: bool = False
    bias: bool = False
    mask: bool = False
    alibi: bool = False
    sinks: bool = False
    dropout: bool = False
    packed: bool = False

    def constants(self) -> Iterator[tuple[str, str, str]]:
        """Yield those of every plan, and the size of struct Params."""
        yield "int", "kCallBytes", str(PARAMS_BYTES)
        yield from super().constants()

    @property
    def smem_wanted(self) -> int:
        """Shared memory that a multiprocessor must have for the plan to be worth it."""
        return self.smem_bytes

    def parts(self, problem: Problem) -> int:
        """Return how many blocks the problem is cut into."""
        raise NotImplementedError

    def scratch(self, problem: Problem) -> dict[str, int]:
        """Return the bytes of workspace that the kernel fills, by the names of Params."""
        return {}

    def boxes(self) -> dict[str, Box]:
        """Return what TMA loads of the arrays in TmaParams, by name and in order."""
        return {}


#: What a call runs: its kernels in order.
Plan = tuple[KernelPlan, ...]


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _tiles(problem: Problem, heads: int, rows: int, tile: int) -> int:
    """Return work_parts() of ``parts/work.cuh``."""
    if problem.is_packed:
        return heads * (rows // tile + problem.batch + 2)
    return problem.batch * heads * _ceil(rows, tile)


def _pair_pitch(keys: int, size: int) -> int:
    """Return the bytes of a row of pair_tile::Tile, with elements of so many bytes."""
    gap = 32 if size == 4 else 16
    return (_ceil(keys * size, gap) | 1) * gap


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
        return _tiles(problem, problem.heads_q, problem.seqlen_q, self.tile_q)


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
        return _tiles(problem, problem.heads_q, problem.seqlen_q, self.tile_q)


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
        """The tiles; four jobs; a word and five barriers a stage, two a place or job, and two."""
        way = self.dim_v if self.slots > 1 else 2 * _box(16, self.dim_v).columns
        rows = self.tile_q * (self.slots * self.dim + way)
        rows += self.stages * self.tile_kv * (self.dim + self.dim_v)
        job = 80 + 16 * (self.tile_q // 64)
        rest = 4 * (job + 16) + self.slots * 16 + self.stages * (4 + 40) + 16
        return _ceil(rows * DTYPES[self.dtype].itemsize + rest, 1024) * 1024

    def parts(self, problem: Problem) -> int:
        return _tiles(problem, problem.heads_q, problem.seqlen_q, self.tile_q)

    def boxes(self) -> dict[str, Box]:
        return {
            "q": _box(64, self.dim),
            "k": _box(self.tile_kv, self.dim),
            "v": _box(self.tile_kv, self.dim_v),
            "out": _box(16, self.dim_v),
        }


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
        return _tiles(problem, problem.heads_q, problem.seqlen_q, self.tile_q * together)


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
        return self.splits * _tiles(problem, problem.heads_kv, problem.seqlen_kv, self.tile_kv)

    def scratch(self, problem: Problem) -> dict[str, int]:
        return {"dq_sums": self._query_tiles(problem) * self.tile_q * self.dq_dim * 4}


@dataclass(frozen=True)
class BackwardRowsSm90(BackwardRowsMma):
    """``backward_rows_sm90.cu``: a block has a tile of queries, whose rows are aligned."""

    kernel = "backward_rows_sm90"
    family = "sm90"
    target_suffix = "a"
    smem_alignment = 1024

    @property
    def smem_bytes(self) -> int:
        """A tile of out and one of dout."""
        return 2 * self.tile_q * self.dim_v * DTYPES[self.dtype].itemsize


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
        """The tiles, and dq; two numbers a row; jobs; a step, a word, barriers of stages; 13."""
        elements = (self.tile_kv + self.stages * self.tile_q) * self.dim
        elements += (self.tile_kv + self.dout_stages * self.tile_q) * self.dim_v
        elements += 2 * self.tile_q * self.tile_kv
        # dq in float32: two elements each.
        elements += 2 * self.dq_places * self.tile_q * self.dim // self.splits
        rest = self.stages * (8 * self.tile_q + 8 + 4 + 24) + self.dout_stages * 16
        rest += 3 * 96 + 8 + 8 * 13
        return _ceil(elements * DTYPES[self.dtype].itemsize + rest, 1024) * 1024

    def parts(self, problem: Problem) -> int:
        return _tiles(problem, problem.heads_kv, problem.seqlen_kv, self.tile_kv)

    def scratch(self, problem: Problem) -> dict[str, int]:
        return {"dq_sums": self._query_tiles(problem) * self.tile_q * self.dq_dim * 4}

    def boxes(self) -> dict[str, Box]:
        return {
            "q": _box(self.tile_q, self.dim),
            "k": _box(self.tile_kv, self.dim),
            "v": _box(self.tile_kv, self.dim_v),
            "dout": _box(self.tile_q, self.dim_v),
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
        rest = rows + jobs + _ceil(summed, 2) * 8 + 8 * barriers
        return _ceil(elements * DTYPES[self.dtype].itemsize + rest, 1024) * 1024

    def parts(self, problem: Problem) -> int:
        if self.of_queries:
            return _tiles(problem, problem.heads_q, problem.seqlen_q, self.tile_q * self.groups)
        return _tiles(problem, problem.heads_kv, problem.seqlen_kv, self.tile_kv * self.groups)

    def boxes(self) -> dict[str, Box]:
        return {
            "q": _box(self.tile_q, self.dim),
            "k": _box(self.tile_kv, self.dim),
            "v": _box(self.tile_kv, self.dim_v),
            "dout": _box(self.tile_q, self.dim_v),
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
        return _tiles(problem, problem.heads_q, problem.seqlen_q, self.tile_q)


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
        return _tiles(problem, problem.heads_kv, problem.seqlen_kv, self.tile_kv)


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
        return _dbias_tiles(problem, self.tile_q, self.tile_kv) * dbias_split(problem)[0]

    def scratch(self, problem: Problem) -> dict[str, int]:
        splits, _ = dbias_split(problem)
        size = math.prod(problem.bias_shape) * problem.dtype.accum.itemsize
        return {"dbias_parts": size * splits if splits > 1 else 0}


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
        return _ceil(math.prod(problem.bias_shape), self.threads)


def dbias_split(problem: Problem) -> tuple[int, int]:
    """Return into how many parts the sums of dbias are cut, and how many of them share an entry.

    As many as keep a GPU busy, of what there is to sum. From sizes alone, so that the same call has
    the same sums on every device.
    """
    batch, heads, queries, _ = problem.bias_shape
    pairs = (problem.batch if batch == 1 else 1) * (problem.heads_q if heads == 1 else 1)
    wanted = _ceil(_DBIAS_BLOCKS, max(_dbias_tiles(problem, _DBIAS_TILE, _DBIAS_TILE), 1))
    strides = 1
    if queries == 1:
        strides = max(min(wanted, _ceil(problem.seqlen_q, _DBIAS_TILE)), 1)
    return max(min(wanted, pairs * strides), 1), strides


_DBIAS_TILE = 64
_DBIAS_BLOCKS = 512


def _dbias_tiles(problem: Problem, tile_q: int, tile_kv: int) -> int:
    batch, heads, queries, keys = problem.bias_shape
    return batch * heads * _ceil(queries, tile_q) * _ceil(keys, tile_kv)


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
class Delta(KernelPlan):
    """``delta.cu``: one thread a row."""

    kernel = "delta"
    family = "any"

    @property
    def threads(self) -> int:
        return 128

    def parts(self, problem: Problem) -> int:
        return _ceil(problem.rows, self.threads)

    def scratch(self, problem: Problem) -> dict[str, int]:
        return {"delta": problem.rows * problem.dtype.accum.itemsize}


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
        return 1 if scan else max(_ceil(merge.dim, self.group), 1)

    def parts(self, merge: Merge, scan: bool) -> int:
        """Return how many blocks such a launch has."""
        return _ceil(merge.rows * self.groups(merge, scan), self.threads)

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
        return _ceil(groups, self.threads * self.groups_per_thread)
