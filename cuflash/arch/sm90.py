# SPDX-License-Identifier: Apache-2.0
"""The family of Hopper: TMA, wgmma and specialised warps, for float16 and bfloat16.

Tile shapes are data; see docs/measured.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..device import Device
from ..plan import (
    BackwardDkSm90,
    BackwardDqMma,
    BackwardDqSm90,
    BackwardDvSm90,
    BackwardRowsSm90,
    BackwardSm90,
    Delta,
    ForwardSm90,
    Plan,
)
from ..problem import FEATURES, Traits
from . import simt
from .mma import compiled_for

__all__ = ["ApartTile", "BackwardTile", "Sm90", "Tile", "apart", "backward", "forward"]

_MAX_HEAD_DIM = 256
_LACKING = frozenset({"dropout"})
_CACHE_BYTES = 32 << 20  # of 50 MB of L2 cache: what is to stay there for a while


class Tile(NamedTuple):
    """A tile shape, for head sizes (the larger of the two) up to `head_dim`."""

    head_dim: int
    tile_q: int
    tile_kv: int
    slots: int
    stages: int
    most: int = len(FEATURES)  # so many options it has registers for,
    without: tuple[str, ...] = ()  # and none of these


# Where several rows serve a head size, the first that fits the shared memory is taken.
_FORWARD = (
    Tile(64, 256, 64, 2, 4, 1, without=("softcap", "bias", "mask", "alibi", "dropout", "packed")),
    Tile(64, 192, 64, 2, 4, 1),
    Tile(64, 128, 64, 2, 4),
    Tile(96, 128, 128, 2, 2, 1, without=("bias",)),
    Tile(96, 128, 64, 2, 2),
    Tile(128, 128, 128, 2, 2, 1, without=("bias",)),
    Tile(128, 128, 80, 2, 2, 1),
    Tile(128, 128, 64, 2, 2),
    Tile(192, 128, 96, 1, 2, 1, without=("bias",)),
    Tile(192, 128, 64, 1, 2, 1),
    Tile(192, 64, 48, 1, 2),
    Tile(256, 128, 64, 1, 2, 1, without=("bias", "alibi")),
    Tile(256, 128, 48, 1, 2, 1, without=("bias",)),
    Tile(256, 128, 32, 1, 2, 1),
    Tile(256, 64, 32, 1, 2),
)


class BackwardTile(NamedTuple):
    """The same for the backward."""

    head_dim: int
    tile_q: int
    tile_kv: int
    column_groups: int
    splits: int
    stages: int
    dout_stages: int
    dq_places: int
    without: tuple[str, ...] = ()


_BACKWARD = (
    BackwardTile(64, 128, 128, 1, 1, 2, 2, 2, without=("softcap", "alibi")),
    BackwardTile(128, 64, 128, 1, 1, 2, 2, 2),
    BackwardTile(256, 64, 64, 2, 2, 2, 1, 1),
)


class ApartTile(NamedTuple):
    """The same for a backward whose gradients are computed apart."""

    head_dim: int
    groups: int
    stages: int  # of dq and dk
    stages_y: int
    dv_stages: int
    dv_stages_y: int


#: For wide heads; without the options that it has no code for.
_APART = (ApartTile(192, 2, 3, 2, 3, 3), ApartTile(256, 2, 2, 1, 3, 2))
_APART_HEAD_DIM = 128  # beyond it
_APART_OPTIONS = frozenset({"packed", "sinks"})

#: Padded head sizes; every size in between runs as the next one.
_PADDED = (64, 96, 128, 192, 256)


class Sm90:
    """See the module's docstring."""

    name = "sm90"

    def rejects(self, direction: str, traits: Traits, device: Device) -> str | None:
        """Return why the family cannot serve a problem, or None."""
        if traits.dtype.itemsize != 2:
            return f"wgmma takes float16 and bfloat16, not {traits.dtype}"
        if max(traits.head_dim, traits.head_dim_v) > _MAX_HEAD_DIM:
            return f"head sizes end at {_MAX_HEAD_DIM}"
        if direction == "backward" and not _LACKING.isdisjoint(compiled_for(traits.features)):
            return f"its backward has no registers for {', '.join(sorted(_LACKING))}"
        if not traits.boxes:
            return "TMA cannot move arrays with these strides"
        if device.capability[0] != 9:
            return "it needs compute capability 9.0"
        return None

    def forward(self, traits: Traits) -> list[list[Plan]]:
        """Return the candidates for the one kernel of the forward, best first."""
        options = compiled_for(traits.features)
        need = max(traits.head_dim, traits.head_dim_v)
        size = min(row.head_dim for row in _FORWARD if row.head_dim >= need)
        return [
            [
                (forward(traits, row, options),)
                for row in _FORWARD
                if row.head_dim == size
                and len(options) <= row.most
                and options.isdisjoint(row.without)
            ]
        ]

    def backward(self, traits: Traits) -> list[list[Plan]]:
        """Return the candidates for each step of the backward, best first."""
        options = compiled_for(traits.features)
        need = max(traits.head_dim, traits.head_dim_v)
        steps: list[list[Plan]] = [
            [
                apart(traits, row, options)
                for row in _APART
                if row.head_dim >= need > _APART_HEAD_DIM and options <= _APART_OPTIONS
            ]
            + [
                backward(traits, row, options)
                for row in _BACKWARD
                if row.head_dim >= need and options.isdisjoint(row.without)
            ]
        ]
        extra = simt.of_options(traits)
        if extra:
            steps.append([(Delta(traits.dtype.name),)])
        return steps + extra


def padded(head_dim: int) -> int:
    """Return the head size that a kernel computes with."""
    return next(size for size in _PADDED if size >= head_dim)


def forward(traits: Traits, tile: Tile, options: frozenset[str] = frozenset()) -> ForwardSm90:
    """Return the forward plan of a tile shape."""
    dim, dim_v = padded(traits.head_dim), padded(traits.head_dim_v)
    shared: dict[str, Any] = dict(
        dtype=traits.dtype.name,
        tile_q=tile.tile_q,
        tile_kv=tile.tile_kv,
        dim=dim,
        dim_v=dim_v,
        slots=tile.slots,
        stages=tile.stages,
        cache_bytes=_CACHE_BYTES,
        heads_together=tile.tile_q // 4,
    )
    given: dict[str, Any] = {**dict.fromkeys(options, True)}
    return ForwardSm90(**shared, **given)


def backward(traits: Traits, tile: BackwardTile, options: frozenset[str] = frozenset()) -> Plan:
    """Return the backward plans of a tile shape."""
    shared: dict[str, Any] = dict(
        dtype=traits.dtype.name,
        tile_q=tile.tile_q,
        tile_kv=tile.tile_kv,
        dim=tile.head_dim,
        dq_dim=-(-traits.head_dim // 16) * 16,
        splits=tile.splits,
        turn=1,
    )
    dim_v = tile.head_dim
    given: dict[str, Any] = {**dict.fromkeys(options, True)}
    main = BackwardSm90(
        **shared,
        dim_v=dim_v,
        column_groups=tile.column_groups,
        stages=tile.stages,
        dout_stages=tile.dout_stages,
        dq_places=tile.dq_places,
        cache_bytes=_CACHE_BYTES,
        heads_together=2048 // tile.head_dim,
        ordered=traits.deterministic,
        **given,
    )
    packed = "packed" in options
    rows = BackwardRowsSm90(**shared, dim_v=dim_v, aligned=traits.aligned, packed=packed)
    return rows, main, BackwardDqMma(**shared, packed=packed)


def apart(traits: Traits, tile: ApartTile, options: frozenset[str] = frozenset()) -> Plan:
    """Return the backward plans of a tile shape whose gradients are computed apart."""
    dim, dim_v = padded(traits.head_dim), padded(traits.head_dim_v)
    rows = 64
    shared: dict[str, Any] = dict(
        dtype=traits.dtype.name, tile_q=rows, tile_kv=rows, dim=dim, dim_v=dim_v
    )
    given: dict[str, Any] = {
        **shared,
        **dict.fromkeys(options, True),
        "groups": tile.groups,
        "cache_bytes": _CACHE_BYTES,
        "heads_together": 4096 // tile.head_dim,
    }
    of_scores: dict[str, Any] = dict(given, stages=tile.stages, stages_y=tile.stages_y)
    return (
        BackwardRowsSm90(
            **shared,
            dq_dim=dim,
            splits=0,  # nobody takes turns
            turn=1,
            aligned=traits.aligned,
            packed="packed" in options,
        ),
        BackwardDqSm90(**of_scores),
        BackwardDkSm90(**of_scores),
        BackwardDvSm90(**given, stages=tile.dv_stages, stages_y=tile.dv_stages_y),
    )
