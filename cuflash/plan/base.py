# SPDX-License-Identifier: Apache-2.0
"""What plans have in common: the record of a kernel, and how work is cut into blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, NamedTuple

from ..problem import Problem
from ..tensormap import MAP_BYTES

__all__ = [
    "MAPS_AT",
    "PARAMS_BYTES",
    "TMA_PARAMS_BYTES",
    "Box",
    "KernelPlan",
    "Plan",
    "UnitPlan",
    "box",
    "ceil_div",
    "tiles",
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


def box(rows: int, dim: int) -> Box:
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


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def tiles(problem: Problem, heads: int, rows: int, tile: int) -> int:
    """Return work_parts() of ``parts/work.cuh``."""
    if problem.is_packed:
        return heads * (rows // tile + problem.batch + 2)
    return problem.batch * heads * ceil_div(rows, tile)
