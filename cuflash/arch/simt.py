# SPDX-License-Identifier: Apache-2.0
"""The family without tensor cores: every dtype and head size, on any GPU and on the CPU.

Tile shapes are data. Each row was chosen so that no kernel spills registers, and by measurement
where two would do; see docs/measured.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..device import Device
from ..dtypes import DTYPES, DType
from ..plan import (
    BackwardDbiasSimt,
    BackwardDkdvSimt,
    BackwardDqSimt,
    Delta,
    Dsinks,
    ForwardSimt,
    KernelPlan,
    Plan,
    SumParts,
)
from ..problem import FEATURES, Traits

__all__ = ["Simt"]


class _Tile(NamedTuple):
    """A tile shape, for head sizes (the larger of the two) up to `head_dim`."""

    head_dim: int
    tile_q: int
    tile_kv: int
    threads_y: int
    threads_x: int
    chunk: int
    blocks_per_sm: int
    unroll: int
    options: tuple[int, int] = (0, len(FEATURES))  # how many options it serves, from and to


# By bytes of an accumulator. Where several rows serve a head size, the first that fits is taken,
# with the stationary operand kept in shared memory if that fits too.
_FORWARD = {
    4: (
        _Tile(16, 64, 64, 8, 16, 16, 3, 2),
        _Tile(32, 64, 64, 8, 16, 32, 3, 2),
        _Tile(64, 64, 64, 8, 16, 64, 3, 4, options=(0, 0)),
        _Tile(64, 64, 128, 8, 16, 64, 3, 2, options=(1, 1)),
        _Tile(64, 64, 64, 8, 16, 64, 3, 4),
        _Tile(96, 64, 64, 16, 8, 32, 2, 2),
        _Tile(128, 64, 64, 16, 8, 64, 2, 4),
        _Tile(256, 64, 64, 16, 16, 64, 1, 2),
        _Tile(512, 32, 64, 16, 16, 64, 1, 2),
    ),
    8: (
        _Tile(16, 32, 64, 8, 16, 16, 3, 2),
        _Tile(32, 32, 64, 8, 16, 32, 2, 2),
        _Tile(64, 64, 64, 16, 8, 64, 1, 2, options=(0, 0)),
        _Tile(64, 32, 32, 8, 16, 32, 2, 2),
        _Tile(96, 64, 32, 16, 8, 32, 1, 2),
        _Tile(128, 64, 32, 16, 8, 64, 1, 2, options=(0, 0)),
        _Tile(128, 32, 32, 16, 16, 32, 1, 2),
        _Tile(256, 32, 32, 16, 16, 32, 1, 2),
        _Tile(512, 16, 32, 16, 16, 32, 1, 2),
    ),
}
_BACKWARD_DQ = {
    4: (
        _Tile(16, 64, 64, 16, 8, 16, 3, 2),
        _Tile(32, 64, 64, 16, 8, 32, 3, 1),
        _Tile(64, 64, 64, 16, 8, 64, 3, 1),
        _Tile(64, 64, 32, 16, 16, 32, 1, 2),
        _Tile(96, 64, 64, 16, 16, 32, 1, 2),
        _Tile(128, 128, 64, 16, 16, 128, 1, 4, options=(0, 1)),
        _Tile(128, 64, 64, 16, 16, 64, 1, 2),
        _Tile(128, 64, 32, 16, 16, 32, 1, 2),
        _Tile(256, 64, 32, 16, 16, 64, 1, 2),
        _Tile(512, 32, 32, 16, 16, 64, 1, 2),
    ),
    8: (
        _Tile(16, 32, 32, 8, 16, 16, 2, 2),
        _Tile(32, 32, 32, 8, 16, 32, 2, 2),
        _Tile(64, 64, 32, 16, 8, 64, 1, 2, options=(0, 1)),
        _Tile(64, 32, 32, 16, 16, 32, 1, 2),
        _Tile(96, 64, 32, 16, 16, 32, 1, 2),
        _Tile(128, 64, 64, 16, 16, 64, 1, 2, options=(0, 0)),
        _Tile(128, 32, 32, 16, 16, 32, 1, 2),
        _Tile(256, 32, 32, 16, 16, 32, 1, 2),
        _Tile(512, 16, 32, 16, 16, 32, 1, 2),
    ),
}
_BACKWARD_DKDV = {
    4: (
        _Tile(16, 64, 64, 16, 16, 16, 1, 2),
        _Tile(32, 64, 64, 16, 16, 32, 1, 2),
        _Tile(64, 32, 64, 8, 16, 64, 3, 1),
        _Tile(96, 64, 64, 16, 16, 32, 1, 2),
        _Tile(128, 128, 64, 16, 16, 128, 1, 4, options=(0, 1)),
        _Tile(128, 32, 64, 16, 16, 32, 1, 2),
        _Tile(256, 32, 32, 16, 16, 64, 1, 2),
        _Tile(512, 32, 16, 16, 16, 64, 1, 2),
    ),
    8: (
        _Tile(16, 32, 32, 8, 16, 16, 2, 2),
        _Tile(32, 32, 32, 8, 16, 32, 2, 2),
        _Tile(64, 64, 32, 8, 16, 64, 1, 2, options=(0, 1)),
        _Tile(64, 32, 32, 16, 16, 32, 1, 2),
        _Tile(96, 32, 32, 16, 16, 32, 1, 2),
        _Tile(128, 32, 64, 16, 16, 128, 1, 2, options=(0, 1)),
        _Tile(128, 32, 32, 16, 16, 32, 1, 2),
        _Tile(256, 32, 16, 16, 16, 32, 1, 2),
        _Tile(512, 32, 16, 16, 16, 16, 1, 2),
    ),
}

# Any head size passes by in chunks.
_BACKWARD_DBIAS = {
    4: (
        _Tile(512, 64, 64, 16, 16, 32, 1, 2, options=(0, 1)),
        _Tile(512, 64, 32, 16, 16, 32, 1, 2),
    ),
    8: (_Tile(512, 32, 32, 16, 16, 32, 1, 2),),
}

#: Sets of options that kernels are compiled for, the quickest first. A call gets the first that has
#: all of its options; what a call does not use costs little at run time, but it costs registers.
FEATURE_SETS = (
    frozenset[str](),
    frozenset({"packed"}),
    frozenset({"bias"}),
    frozenset(FEATURES),
)

#: Padded head sizes; every size in between runs as the next one.
_PADDED = (16, 32, 64, 96, 128, 192, 256, 384, 512)


class Simt:
    """See the module's docstring."""

    name = "simt"

    def rejects(self, direction: str, traits: Traits, device: Device) -> str | None:
        """Return why the family cannot serve a problem: never."""
        return None

    def forward(self, traits: Traits) -> list[list[Plan]]:
        """Return the candidates for the one kernel of the forward, best first."""
        return [_candidates(_FORWARD, forward, traits)]

    def backward(self, traits: Traits) -> list[list[Plan]]:
        """Return the candidates for each step of the backward, best first."""
        kernels: list[list[Plan]] = [
            [(Delta(traits.dtype.name),)],
            _candidates(_BACKWARD_DQ, backward_dq, traits),
            _candidates(_BACKWARD_DKDV, backward_dkdv, traits),
        ]
        return kernels + of_options(traits)


def of_options(traits: Traits) -> list[list[Plan]]:
    """Return the candidates for the kernels that options add to a backward; they need `Delta`."""
    name = traits.dtype.name
    kernels: list[list[Plan]] = []
    if "bias" in traits.features:
        kernels.append(_candidates(_BACKWARD_DBIAS, backward_dbias, traits))
        kernels.append([(SumParts(name),)])
    if "sinks" in traits.features:
        kernels.append([(Dsinks(name),)])
    return kernels


def compiled_for(features: tuple[str, ...]) -> frozenset[str]:
    """Return the set of options whose kernels serve a call with these ones."""
    return next(options for options in FEATURE_SETS if options.issuperset(features))


def _candidates(
    table: dict[int, tuple[_Tile, ...]], make: Callable[..., KernelPlan], traits: Traits
) -> list[Plan]:
    """Return the plans of the rows for the smallest sufficient head size, in order."""
    rows = table[traits.dtype.accum.itemsize]
    need = max(traits.head_dim, traits.head_dim_v)
    size = min(row.head_dim for row in rows if row.head_dim >= need)
    options = compiled_for(traits.features)
    return [
        (make(traits.dtype, row, traits.head_dim, traits.head_dim_v, resident, options),)
        for row in rows
        if row.head_dim == size and row.options[0] <= len(options) <= row.options[1]
        for resident in (True, False)
    ]


def chunks_of(head_dim: int, chunk: int) -> int:
    """Return how many chunks the padded head size takes."""
    padded = next(size for size in _PADDED if size >= head_dim)
    return -(-padded // chunk)


def _shape(dtype: DType, tile: _Tile, options: frozenset[str]) -> dict[str, Any]:
    """Return the fields that every tiled kernel has."""
    return dict(
        dtype=dtype.name,
        tile_q=tile.tile_q,
        tile_kv=tile.tile_kv,
        threads_y=tile.threads_y,
        threads_x=tile.threads_x,
        chunk=tile.chunk,
        # Options take registers, so fewer blocks share a multiprocessor.
        blocks_per_sm=max(tile.blocks_per_sm - 1, 1) if options else tile.blocks_per_sm,
        unroll=tile.unroll,
        **dict.fromkeys(options, True),
    )


def forward(
    dtype: DType,
    tile: _Tile,
    head_dim: int,
    head_dim_v: int,
    resident: bool,
    options: frozenset[str] = frozenset(),
) -> ForwardSimt:
    """Return the forward plan of a tile shape."""
    return ForwardSimt(
        **_shape(dtype, tile, options),
        chunks=chunks_of(head_dim_v, tile.chunk),
        resident_chunks=chunks_of(head_dim, tile.chunk) if resident else 0,
    )


def backward_dq(
    dtype: DType,
    tile: _Tile,
    head_dim: int,
    head_dim_v: int,
    resident: bool,
    options: frozenset[str] = frozenset(),
) -> BackwardDqSimt:
    """Return the plan of a tile shape for the gradient of q."""
    return BackwardDqSimt(
        **_shape(dtype, tile, options),
        chunks=chunks_of(head_dim, tile.chunk),
        resident_chunks=chunks_of(head_dim, tile.chunk) if resident else 0,
        resident_chunks_v=chunks_of(head_dim_v, tile.chunk) if resident else 0,
    )


def backward_dkdv(
    dtype: DType,
    tile: _Tile,
    head_dim: int,
    head_dim_v: int,
    resident: bool,
    options: frozenset[str] = frozenset(),
) -> BackwardDkdvSimt:
    """Return the plan of a tile shape for the gradients of k and v."""
    return BackwardDkdvSimt(
        **_shape(dtype, tile, options),
        chunks=chunks_of(head_dim, tile.chunk),
        chunks_v=chunks_of(head_dim_v, tile.chunk),
        resident_chunks=chunks_of(head_dim, tile.chunk) if resident else 0,
        resident_chunks_v=chunks_of(head_dim_v, tile.chunk) if resident else 0,
    )


def backward_dbias(
    dtype: DType,
    tile: _Tile,
    head_dim: int,
    head_dim_v: int,
    resident: bool,
    options: frozenset[str] = frozenset(),
) -> BackwardDbiasSimt:
    """Return the plan of a tile shape for the gradient of the bias."""
    return BackwardDbiasSimt(**_shape(dtype, tile, options))


assert set(_FORWARD) == {row.accum.itemsize for row in DTYPES.values()}
