# SPDX-License-Identifier: Apache-2.0
"""The family of ``mma.sync``: float16 and bfloat16 on tensor cores, from Ampere on.

Tile shapes are data; see docs/measured.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..device import Device
from ..plan import BackwardDqMma, BackwardMma, BackwardRowsMma, Delta, ForwardMma, Plan
from ..problem import FEATURES, Traits
from . import simt

__all__ = ["BackwardTile", "Mma"]

_MAX_HEAD_DIM = 256

# What takes registers beyond the plain call's. "strides": rows that cannot be copied by vectors.
# In the forward, "tiles": tiles of a bias or mask are copied, "wide": of a float32 bias, and
# "pairs": a bias or mask is read where it lies.
_OPTIONS = (*FEATURES, "strides")


class _Tile(NamedTuple):
    """A tile shape, for head sizes (the larger of the two) up to `head_dim`."""

    head_dim: int
    tile_q: int
    tile_kv: int
    warps: int
    blocks_per_sm: int
    most: int = len(_OPTIONS)  # so many of _OPTIONS it has registers for,
    without: tuple[str, ...] = ()  # and none of these


# Where several rows serve a head size, the first that fits the shared memory is taken.
_FORWARD = (
    _Tile(32, 128, 64, 4, 2, 1),
    _Tile(32, 64, 64, 4, 2),
    _Tile(64, 128, 32, 4, 3, 0),
    _Tile(64, 128, 64, 4, 2, 1, without=("wide",)),
    _Tile(64, 128, 32, 4, 2, 1, without=("pairs",)),
    _Tile(64, 64, 64, 4, 2),
    _Tile(96, 128, 64, 4, 2, 1, without=("softcap", "bias", "dropout", "strides", "tiles")),
    _Tile(96, 64, 64, 4, 2),
    _Tile(96, 64, 32, 4, 2),
    _Tile(128, 128, 48, 4, 2, 1, without=("softcap", "bias", "mask", "dropout", "strides")),
    _Tile(128, 128, 32, 4, 2, 1, without=("strides", "pairs")),
    _Tile(128, 64, 64, 4, 2, without=("tiles",)),
    _Tile(128, 64, 32, 4, 2),
    _Tile(192, 128, 48, 8, 1, 1),
    _Tile(192, 64, 48, 4, 1),
    _Tile(192, 64, 32, 4, 1),
    _Tile(256, 128, 48, 8, 1, 1),
    _Tile(256, 64, 48, 4, 1, 1),
    _Tile(256, 64, 32, 4, 1, len(FEATURES)),
    _Tile(256, 64, 16, 4, 1, without=("tiles",)),
)


class BackwardTile(NamedTuple):
    """The same for the backward."""

    head_dim: int
    tile_q: int
    tile_kv: int
    warps: int
    query_warps: int
    dq_warps: int
    slots: int
    splits: int
    turn: int
    blocks_per_sm: int
    without: tuple[str, ...] = ()  # what it has no registers for, of _OPTIONS


_BACKWARD = (
    BackwardTile(
        64, 32, 128, 4, 1, 1, 2, 1, 4, 2, without=("strides", "softcap", "bias", "mask", "dropout")
    ),
    BackwardTile(64, 32, 128, 8, 2, 2, 2, 1, 4, 1),
    BackwardTile(128, 64, 128, 8, 2, 4, 2, 1, 2, 1, without=("strides", "dropout")),
    BackwardTile(128, 32, 128, 8, 2, 2, 2, 1, 2, 1),
    BackwardTile(128, 32, 64, 4, 2, 2, 2, 1, 2, 1),
    BackwardTile(256, 32, 128, 8, 2, 2, 2, 2, 2, 1),
    BackwardTile(256, 32, 64, 4, 2, 2, 1, 2, 2, 1),
    BackwardTile(256, 32, 32, 2, 2, 2, 1, 2, 2, 1, without=("strides", "dropout")),
    BackwardTile(256, 16, 32, 2, 1, 1, 1, 2, 2, 1),
)
_TOGETHER = 2112  # sixteen blocks for each multiprocessor of an H100 or H200

#: Sets of options that kernels are compiled for, the quickest first. A call gets the first that has
#: all of its options.
FEATURE_SETS = (
    frozenset[str](),
    *(frozenset({name}) for name in FEATURES),
    frozenset(FEATURES),
)

#: Padded head sizes; every size in between runs as the next one.
_PADDED = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)


class Mma:
    """See the module's docstring."""

    name = "mma"

    def rejects(self, direction: str, traits: Traits, device: Device) -> str | None:
        """Return why the family cannot serve a problem, or None."""
        if traits.dtype.itemsize != 2:
            return f"tensor cores take float16 and bfloat16, not {traits.dtype}"
        if max(traits.head_dim, traits.head_dim_v) > _MAX_HEAD_DIM:
            return f"head sizes end at {_MAX_HEAD_DIM}"
        if not device.is_cpu and device.capability < (8, 0):
            return "it needs compute capability 8.0"
        return None

    def forward(self, traits: Traits) -> list[list[Plan]]:
        """Return the candidates for the one kernel of the forward, best first."""
        plans: list[Plan] = [(plan,) for plan in _forwards(traits)]
        if traits.aligned_bias or traits.aligned_mask:  # where no tile of these fits beside others
            in_place = traits._replace(aligned_bias=0, wide_bias=False, aligned_mask=0)
            plans += [(plan,) for plan in _forwards(in_place)]
        return [plans]

    def backward(self, traits: Traits) -> list[list[Plan]]:
        """Return the candidates for each step of the backward, best first."""
        options = compiled_for(traits.features)
        need = max(traits.head_dim, traits.head_dim_v)
        size = min(row.head_dim for row in _BACKWARD if row.head_dim >= need)
        wants = _wanted(traits, options)
        steps: list[list[Plan]] = [
            [
                backward(traits, row, options)
                for row in _BACKWARD
                if row.head_dim == size and wants.isdisjoint(row.without)
            ]
        ]
        extra = simt.of_options(traits)
        if extra:
            steps.append([(Delta(traits.dtype.name),)])
        return steps + extra


def _forwards(traits: Traits) -> list[ForwardMma]:
    options = compiled_for(traits.features)
    need = max(traits.head_dim, traits.head_dim_v)
    size = min(row.head_dim for row in _FORWARD if row.head_dim >= need)
    wants, pairs = _wanted(traits, options), _pairs_wanted(traits, options)
    return [
        forward(traits, row, options)
        for row in _FORWARD
        if row.head_dim == size
        and len(wants) <= row.most
        and (wants | pairs).isdisjoint(row.without)
    ]


def compiled_for(features: tuple[str, ...]) -> frozenset[str]:
    """Return the set of options whose kernel serves a call with these ones."""
    return next(options for options in FEATURE_SETS if options.issuperset(features))


def _wanted(traits: Traits, options: frozenset[str]) -> frozenset[str]:
    """Return which of `_OPTIONS` a kernel needs registers for."""
    return options if traits.aligned else options | {"strides"}


def _pairs_wanted(traits: Traits, options: frozenset[str]) -> frozenset[str]:
    """Return how a kernel of the forward reads bias and mask: "tiles", "wide", "pairs"."""
    found = {
        "tiles": traits.aligned_bias or traits.aligned_mask,
        "wide": traits.wide_bias,
        "pairs": ("bias" in options and not traits.aligned_bias)
        or ("mask" in options and not traits.aligned_mask),
    }
    return frozenset(name for name, wanted in found.items() if wanted)


def padded(head_dim: int, step: int = 16) -> int:
    """Return the head size that a kernel computes with, a multiple of `step`."""
    return next(size for size in _PADDED if size >= head_dim and size % step == 0)


def forward(traits: Traits, tile: _Tile, options: frozenset[str] = frozenset()) -> ForwardMma:
    """Return the forward plan of a tile shape."""
    return ForwardMma(
        dtype=traits.dtype.name,
        tile_q=tile.tile_q,
        tile_kv=tile.tile_kv,
        warps=tile.warps,
        dim=padded(traits.head_dim),
        dim_v=padded(traits.head_dim_v),
        blocks_per_sm=tile.blocks_per_sm,
        aligned=traits.aligned,
        aligned_bias=traits.aligned_bias,
        wide_bias=traits.wide_bias,
        aligned_mask=traits.aligned_mask,
        **dict.fromkeys(options, True),
    )


def backward(traits: Traits, tile: BackwardTile, options: frozenset[str] = frozenset()) -> Plan:
    """Return the backward plans of a tile shape."""
    step = 16 * tile.query_warps * tile.splits
    shared: dict[str, Any] = dict(
        dtype=traits.dtype.name,
        tile_q=tile.tile_q,
        tile_kv=tile.tile_kv,
        dim=padded(traits.head_dim, step),
        dq_dim=padded(traits.head_dim, step),
        splits=tile.splits,
        turn=tile.turn,
    )
    copied: dict[str, Any] = dict(dim_v=padded(traits.head_dim_v, step), aligned=traits.aligned)
    flags: dict[str, Any] = dict.fromkeys(options, True)
    main = BackwardMma(
        **shared,
        **copied,
        warps=tile.warps,
        query_warps=tile.query_warps,
        dq_warps=tile.dq_warps,
        slots=tile.slots,
        blocks_per_sm=tile.blocks_per_sm,
        together=_TOGETHER,
        ordered=traits.deterministic,
        **flags,
    )
    packed = "packed" in options
    rows = BackwardRowsMma(**shared, **copied, packed=packed)
    return rows, main, BackwardDqMma(**shared, packed=packed)
