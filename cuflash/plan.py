# SPDX-License-Identifier: Apache-2.0
"""Plans: the compile-time constants of kernels, and nothing else.

A call runs the kernels of its plan one after the other, all with the same Params. Each record below
belongs to one file of ``kernels/attention/``; its fields become ``plan::kTileQ`` and so on there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from .dtypes import DTYPES
from .problem import Problem

__all__ = ["BackwardDkdvSimt", "BackwardDqSimt", "Delta", "ForwardSimt", "KernelPlan", "Plan"]

#: sizeof(Params) in kernels/attention/params.cuh; launch.py packs so many bytes.
PARAMS_BYTES = 528


@dataclass(frozen=True)
class KernelPlan:
    """The constants of one kernel. `dtype` names the element type."""

    kernel: ClassVar[str]  # the file's stem, the entry point and the name in the cache
    family: ClassVar[str]
    target_suffix: ClassVar[str] = ""  # "a": code for this very architecture, as for wgmma

    dtype: str

    @property
    def threads(self) -> int:
        """Threads of a block."""
        raise NotImplementedError

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block: sizeof(Smem)."""
        return 0

    def parts(self, problem: Problem) -> int:
        """Return how many blocks the problem is cut into."""
        raise NotImplementedError

    def constants(self) -> Iterator[tuple[str, str, str]]:
        """Yield C++ type, name and value of each constant of namespace plan."""
        yield "int", "kParamsBytes", str(PARAMS_BYTES)
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


#: What a call runs: its kernels in order.
Plan = tuple[KernelPlan, ...]


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class _Tiled(KernelPlan):
    """A kernel built from ``parts/tile.cuh``."""

    family = "simt"

    tile_q: int
    tile_kv: int
    threads_y: int  # lanes across the rows of a tile
    threads_x: int  # lanes across its columns
    chunk: int  # columns of the head dimension that are worked on at once
    chunks: int  # chunks of the padded head dimension of the first accumulator
    resident_chunks: int  # chunks of head_dim of the stationary operand in shared memory; 0: none
    blocks_per_sm: int  # what the compiler keeps registers free for
    unroll: int  # of the inner products, in steps of a 16-byte group

    @property
    def threads(self) -> int:
        return self.threads_y * self.threads_x

    def _tile_bytes(self, rows: int, cols: int) -> int:
        """Return sizeof(tile::Shared<rows, cols>): each row is padded by 16 bytes."""
        return rows * (cols * DTYPES[self.dtype].accum.itemsize + 16)


@dataclass(frozen=True)
class ForwardSimt(_Tiled):
    """``forward_simt.cu``. `chunks` covers head_dim_v."""

    kernel = "forward_simt"

    @property
    def smem_bytes(self) -> int:
        return (
            max(self.resident_chunks, 1) * self._tile_bytes(self.tile_q, self.chunk)
            + self._tile_bytes(self.tile_kv, self.chunk)
            + self._tile_bytes(self.tile_q, self.tile_kv)
        )

    def parts(self, problem: Problem) -> int:
        return problem.batch * problem.heads_q * _ceil(problem.seqlen_q, self.tile_q)


@dataclass(frozen=True)
class BackwardDqSimt(_Tiled):
    """``backward_dq_simt.cu``. `chunks` covers head_dim."""

    kernel = "backward_dq_simt"

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
        return problem.batch * problem.heads_q * _ceil(problem.seqlen_q, self.tile_q)


@dataclass(frozen=True)
class BackwardDkdvSimt(_Tiled):
    """``backward_dkdv_simt.cu``. `chunks` covers head_dim, `chunks_v` head_dim_v."""

    kernel = "backward_dkdv_simt"

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
        return problem.batch * problem.heads_kv * _ceil(problem.seqlen_kv, self.tile_kv)


@dataclass(frozen=True)
class Delta(KernelPlan):
    """``delta.cu``: one thread a row."""

    kernel = "delta"
    family = "any"

    @property
    def threads(self) -> int:
        return 128

    def parts(self, problem: Problem) -> int:
        return _ceil(problem.batch * problem.heads_q * problem.seqlen_q, self.threads)
