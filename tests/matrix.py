# SPDX-License-Identifier: Apache-2.0
"""The plans that the tests compile: a fixed list, so that CI knows how long it takes.

`ROWS` are executed: tiles as small as they get, in which every loop runs several times at lengths
that are cheap on the CPU, in a pairwise covering list over dtype, tile shape, chunks and residency;
and the shipped plans of some head sizes. `CUBINS` are only compiled, for each architecture.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from cuflash import device, select
from cuflash.arch import mma, simt, sm90
from cuflash.dtypes import DTYPES
from cuflash.plan import (
    BackwardApartSm90,
    BackwardDbiasSimt,
    BackwardDkdvSimt,
    BackwardDqSimt,
    BackwardMma,
    BackwardSm90,
    Delta,
    Dsinks,
    ForwardMma,
    ForwardSimt,
    ForwardSm90,
    MergeStates,
    Plan,
    Realign,
    SumParts,
    UnitPlan,
)
from cuflash.problem import FEATURES, Traits


@dataclass(frozen=True)
class Row:
    """Plans for both passes, and the head sizes that they serve."""

    name: str
    dtype: str
    forward: Plan
    backward: Plan
    head_dim: int  # up to
    head_dim_v: int
    options: tuple[str, ...] = ()  # that the kernels have code for

    @cached_property
    def tile(self) -> tuple[int, int]:
        """The forward's tile, which lengths are drawn around, with keys of the larger one."""
        plan = self.forward[0]
        assert isinstance(plan, (ForwardSimt, ForwardMma, ForwardSm90))
        return plan.tile_q, max(
            [plan.tile_kv]
            + [x.tile_kv for x in self.backward if isinstance(x, BackwardSm90)]
            + [x.tile_kv * x.groups for x in self.backward if isinstance(x, BackwardApartSm90)]
        )

    @property
    def boxes(self) -> bool:
        """Whether the forward takes only what TMA can load."""
        return isinstance(self.forward[0], ForwardSm90)

    def family(self, direction: str) -> str:
        """The family of a pass; kernels of others may help."""
        plans = self.forward if direction == "forward" else self.backward
        return max((plan.family for plan in plans), key=("any", "simt", "mma", "sm90").index)


def _small(
    dtype: str,
    tile: str,
    chunks: int,
    chunks_v: int,
    resident: bool,
    options: tuple[str, ...] = (),
) -> Row:
    tile_q, tile_kv, threads_y, threads_x, chunk = _SMALL_TILES[tile]
    shape = dict(
        dtype=dtype,
        tile_q=tile_q,
        tile_kv=tile_kv,
        threads_y=threads_y,
        threads_x=threads_x,
        chunk=chunk,
        blocks_per_sm=1,
        unroll=1,
        **dict.fromkeys(options, True),
    )
    residents = chunks if resident else 0
    residents_v = chunks_v if resident else 0
    return Row(
        f"{dtype}-{tile}-{chunks}x{chunks_v}-{'resident' if resident else 'passing'}"
        + ("-options" if options else ""),
        dtype,
        (ForwardSimt(**shape, chunks=chunks_v, resident_chunks=residents),),
        (
            Delta(dtype),
            BackwardDqSimt(
                **shape, chunks=chunks, resident_chunks=residents, resident_chunks_v=residents_v
            ),
            BackwardDkdvSimt(
                **shape,
                chunks=chunks,
                chunks_v=chunks_v,
                resident_chunks=residents,
                resident_chunks_v=residents_v,
            ),
            *([BackwardDbiasSimt(**shape), SumParts(dtype), Dsinks(dtype)] if options else []),
        ),
        chunks * chunk,
        chunks_v * chunk,
        options,
    )


def _named(options: tuple[str, ...]) -> str:
    """Return how a row's name says what options its kernels have code for."""
    return ("-options" if options == FEATURES else "-" + "-".join(options)) if options else ""


def _small_mma(dtype: str, tile: str, dim: int, dim_v: int, options: tuple[str, ...] = ()) -> Row:
    tile_q, tile_kv, warps = _MMA_TILES[tile]
    forward = ForwardMma(
        dtype=dtype,
        tile_q=tile_q,
        tile_kv=tile_kv,
        warps=warps,
        dim=dim,
        dim_v=dim_v,
        blocks_per_sm=1,
        aligned=0,  # see run.using
        **dict.fromkeys(options, True),
    )
    name = f"{dtype}-mma-{tile}-{dim}x{dim_v}{_named(options)}"
    traits = Traits(DTYPES[dtype], dim, dim_v, options, 0)
    small = mma.BackwardTile(max(dim, dim_v), *_MMA_BACKWARD_TILES[tile])
    others = [
        plan for plan in select.choose("backward", traits, device.CPU) if plan.family != "mma"
    ]
    backward = (*mma.backward(traits, small, frozenset(options)), *others)
    return Row(name, dtype, (forward,), backward, dim, dim_v, options)


# tile_q, tile_kv, warps: one slab of 16 rows a warp, or two; a warp, or several
_MMA_TILES = {
    "warp": (16, 16, 1),
    "slabs": (32, 16, 1),
    "warps": (32, 32, 2),
    "both": (64, 16, 2),
}

# tile_q, tile_kv, warps, query_warps, dq_warps, slots, splits, turn, blocks_per_sm: factors in
# registers or through shared memory, columns in one piece or split, a turn a tile or several
_MMA_BACKWARD_TILES = {
    "warp": (16, 16, 1, 1, 1, 2, 1, 1, 1),
    "slabs": (16, 32, 1, 1, 1, 1, 1, 2, 1),
    "warps": (32, 32, 4, 2, 2, 2, 1, 1, 1),
    "both": (32, 32, 2, 1, 1, 2, 2, 3, 1),
}


def _small_sm90(dtype: str, tile: str, dim: int, dim_v: int, options: tuple[str, ...] = ()) -> Row:
    traits = Traits(DTYPES[dtype], dim, dim_v, options)
    small = sm90.Tile(max(dim, dim_v), *_SM90_TILES[tile])
    name = f"{dtype}-sm90-{tile}-{dim}x{dim_v}{_named(options)}"
    forward = (sm90.forward(traits, small, frozenset(options)),)
    if tile in _SM90_APART_TILES:
        apart = sm90.ApartTile(max(dim, dim_v), *_SM90_APART_TILES[tile])
        backward = sm90.apart(traits, apart, frozenset(options))
    else:
        small_backward = sm90.BackwardTile(*_SM90_BACKWARD_TILES[tile])
        backward = sm90.backward(traits, small_backward, frozenset(options))
    others = [
        plan for plan in select.choose("backward", traits, device.CPU) if plan.family != "mma"
    ]
    return Row(name, dtype, forward, (*backward, *others), dim, dim_v, options)


# tile_q, tile_kv, slots, stages: 64 queries a warpgroup; three and more work in turns
_SM90_TILES = {
    "one": (64, 32, 2, 2),
    "two": (128, 16, 1, 2),
    "three": (192, 48, 2, 3),
    "four": (256, 16, 2, 4),
    "wide": (64, 32, 1, 2),
    "apart": (64, 64, 2, 2),
    "apart2": (128, 64, 1, 2),
    "apart3": (64, 32, 2, 2),
}

# groups, stages, stages_y, and those of dv: gradients apart, 64 queries or keys a warpgroup
_SM90_APART_TILES = {
    "apart": (1, 2, 1, 2, 1),
    "apart2": (2, 2, 1, 3, 2),
    "apart3": (3, 3, 2, 1, 2),
}

# head_dim, tile_q, tile_kv, column_groups, splits, stages, dout_stages, dq_places: 64 keys a
# warpgroup; dq by columns, or by rows
_SM90_BACKWARD_TILES = {
    "one": (64, 64, 64, 1, 1, 2, 2, 1),
    "two": (128, 64, 128, 1, 1, 3, 2, 1),
    "three": (128, 64, 128, 1, 1, 2, 1, 2),
    "four": (64, 128, 128, 1, 1, 2, 2, 2),
    "wide": (256, 64, 64, 2, 2, 2, 1, 1),
}

# tile_q, tile_kv, threads_y, threads_x, chunk
_SMALL_TILES = {
    "square": (16, 16, 8, 8, 16),
    "tall": (32, 16, 4, 8, 32),
    "wide": (16, 32, 8, 16, 16),
    "block": (32, 32, 16, 16, 32),
}

# Every pair of values of two columns occurs.
_COVERING = [
    ("float16", "square", 1, 1, True),
    ("float16", "tall", 2, 1, False),
    ("float16", "wide", 1, 2, True),
    ("float16", "block", 3, 3, False),
    ("bfloat16", "square", 2, 1, False),
    ("bfloat16", "tall", 1, 1, True),
    ("bfloat16", "wide", 3, 3, True),
    ("bfloat16", "block", 1, 2, False),
    ("float32", "square", 1, 2, False),
    ("float32", "tall", 3, 3, True),
    ("float32", "wide", 1, 1, False),
    ("float32", "block", 2, 1, True),
    ("float64", "square", 3, 3, False),
    ("float64", "tall", 1, 2, True),
    ("float64", "wide", 2, 1, False),
    ("float64", "block", 1, 1, True),
]


def shipped(
    dtype: str,
    head_dim: int,
    head_dim_v: int,
    where: device.Device = device.CPU,
    options: tuple[str, ...] = (),
) -> Row:
    """Return the plans that a call gets."""
    traits = Traits(DTYPES[dtype], head_dim, head_dim_v, options)
    name = f"{dtype}-shipped-{head_dim}x{head_dim_v}" + ("" if where.is_cpu else f"-{where.name}")
    name += f"-{'options' if options == FEATURES else '-'.join(options)}" if options else ""
    return Row(
        name,
        dtype,
        select.choose("forward", traits, where),
        select.choose("backward", traits, where),
        head_dim,
        head_dim_v,
        options,
    )


_SHIPPED_SIZES = [(16, 16), (64, 64), (128, 128), (96, 40)]

ROWS = [_small(*row) for row in _COVERING] + [
    shipped(dtype, *sizes) for dtype in DTYPES for sizes in _SHIPPED_SIZES
]
ROWS += [
    _small_mma("float16", "warp", 16, 48),
    _small_mma("float16", "both", 80, 32),
    _small_mma("bfloat16", "slabs", 48, 16),
    _small_mma("bfloat16", "warps", 32, 80),
]
ROWS += [
    _small_sm90("float16", "one", 64, 64),
    _small_sm90("bfloat16", "two", 64, 96),
    _small_sm90("bfloat16", "three", 96, 64),
    _small_sm90("float16", "four", 64, 64),
    _small_sm90("bfloat16", "wide", 136, 160),
    _small_sm90("float16", "apart", 64, 96),
    _small_sm90("bfloat16", "apart2", 96, 64),
    _small_sm90("float16", "apart3", 64, 64),
]

# Kernels with code for options: all of them, from which a call draws any, and the sets of few.
OPTION_ROWS = [
    _small("float16", "wide", 1, 2, True, FEATURES),
    _small("bfloat16", "block", 2, 1, False, FEATURES),
    _small("float32", "square", 2, 1, True, FEATURES),
    _small("float32", "tall", 1, 3, False, FEATURES),
    _small("float64", "tall", 1, 2, True, FEATURES),
    _small("float64", "wide", 2, 1, False, FEATURES),
    _small_mma("float16", "slabs", 32, 16, FEATURES),
    _small_mma("bfloat16", "warps", 16, 32, FEATURES),
    _small_sm90("float16", "two", 64, 64, FEATURES),
    _small_sm90("bfloat16", "one", 64, 64, FEATURES),
    # Scores that are made between exponentials.
    _small_mma("bfloat16", "warps", 16, 32, ("softcap", "alibi")),
    _small_mma("float16", "slabs", 32, 16, ("softcap",)),
    _small_sm90("float16", "one", 64, 64, ("softcap", "alibi")),
    _small_sm90("bfloat16", "two", 64, 64, ("alibi",)),
    _small_sm90("float16", "apart2", 64, 64, ("packed", "sinks")),
    *(shipped(dtype, 64, 64, options=FEATURES) for dtype in DTYPES),
    shipped("float32", 64, 64, options=("packed",)),
    shipped("float32", 64, 64, options=("bias",)),
]

# What GPUs with little shared memory get, and large heads: executed too, with fewer examples.
FEW_ROWS = [
    shipped(dtype, *sizes, device.architecture(7, 5))
    for dtype in ("bfloat16", "float32", "float64")
    for sizes in [(64, 64), (128, 128), (192, 256), (512, 512)]
]
FEW_ROWS += [  # whose gradients are computed apart
    shipped("bfloat16", 192, 136, device.architecture(9, 0)),
    shipped("float16", 192, 256, device.architecture(9, 0)),
]


def unordered(row: Row) -> Row:
    """Return the plans of calls that need not be deterministic."""
    backward = tuple(
        replace(plan, ordered=False) if isinstance(plan, (BackwardMma, BackwardSm90)) else plan
        for plan in row.backward
    )
    return replace(row, name=f"{row.name}-unordered", backward=backward)


# Executed with `deterministic=False`: each way to share out dq, and turns of several query tiles.
UNORDERED_ROWS = [
    unordered(row)
    for row in [
        _small_mma("float16", "warp", 16, 48),
        _small_mma("float16", "both", 32, 32),
        _small_mma("bfloat16", "slabs", 32, 16, FEATURES),
        _small_mma("bfloat16", "warps", 32, 64, ("packed",)),
        _small_sm90("float16", "one", 64, 64),
        _small_sm90("bfloat16", "three", 128, 64),
        _small_sm90("float16", "four", 64, 64, ("packed",)),
        _small_sm90("bfloat16", "wide", 256, 256, ("alibi",)),
        _small_sm90("bfloat16", "two", 64, 64, FEATURES),
        shipped("bfloat16", 64, 64),
        shipped("float16", 128, 128),
    ]
]

ARCHITECTURES = {
    name: device.architecture(*capability)
    for name, capability in {
        "sm_75": (7, 5),
        "sm_80": (8, 0),
        "sm_86": (8, 6),
        "sm_89": (8, 9),
        "sm_90": (9, 0),
        "sm_120": (12, 0),
    }.items()
}
HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256, 384, 512)


_FEATURE_SETS = [tuple(n for n in FEATURES if n in s) for s in simt.FEATURE_SETS][::-1]
_FEATURE_SETS = [(), *(options for options in _FEATURE_SETS if options)]


def cubins(full: bool = False) -> list[tuple[str, UnitPlan]]:
    """Return (architecture, plan) of what must compile without spilling.

    Every architecture meets every head size and every dtype, and every dtype every head size;
    `full` is the whole product. sm_89 meets tensor cores only: it has the registers and the shared
    memory of sm_86.
    """
    found: dict[tuple[str, UnitPlan], None] = {}
    others = [item for item in ARCHITECTURES.items() if full or item[0] != "sm_89"]
    for i, (name, where) in enumerate(others):
        for dtype in DTYPES:
            found[name, MergeStates(dtype)] = None
            if DTYPES[dtype].itemsize == 2 and where.capability >= (8, 0):
                found[name, Realign(dtype)] = None
        for j, head_dim in enumerate(HEAD_DIMS):
            for k, dtype in enumerate(DTYPES):
                if full or (i + j) % len(DTYPES) == k:
                    sets = _FEATURE_SETS if full else (_FEATURE_SETS[0], _FEATURE_SETS[(i + j) % 4])
                    for options in sets:
                        row = shipped(dtype, head_dim, head_dim, where, options)
                        for plan in row.forward + row.backward:
                            if plan.family != "mma":
                                found[name, plan] = None
    tensor_cores = [*_mma_cubins(full), *_sm90_cubins(full)]
    tensor_cores += _unordered_cubins(tensor_cores, full)
    return list(found | dict.fromkeys(tensor_cores))


def _mma_cubins(full: bool) -> list[tuple[str, UnitPlan]]:
    """Return the same of the family mma.

    Every head size meets two architectures without options, every other set of options three, and
    each alignment. Their head sizes differ.
    """
    names = [name for name, where in ARCHITECTURES.items() if where.capability >= (8, 0)]
    n = len(names)
    sets = [tuple(n for n in FEATURES if n in s) for s in mma.FEATURE_SETS]
    dtypes, sizes, alignments = ("float16", "bfloat16"), mma._PADDED, (16, 8, 0)
    calls = list(itertools.product(names, dtypes, sizes, sets, alignments))
    if not full:
        calls = [
            (names[(2 * i + j) % n], dtypes[(i + j) % 2], size, (), alignments[(i + j) % 3])
            for i, size in enumerate(sizes)
            for j in range(2)
        ]
        calls += [
            (names[(i + 2 * j) % n], dtypes[j % 2], sizes[(i + 4 * j) % 12], options, aligned)
            for i, options in enumerate(sets[1:])
            for j, aligned in enumerate(alignments)
        ]
    found = [
        (name, plan)
        for name, dtype, size, options, aligned in calls
        for direction in ("forward", "backward")
        if not _is_known_to_spill(name, direction, size, options, aligned)
        for plan in select.choose(
            direction,
            Traits(DTYPES[dtype], size, size, options, aligned, boxes=False),
            ARCHITECTURES[name],
        )
        if plan.family == "mma" and (plan.kernel in ("forward_mma", "backward_mma") or not options)
    ]
    return found + _pair_cubins(full)


def _pair_cubins(full: bool) -> list[tuple[str, UnitPlan]]:
    """Return the same of forwards that copy tiles of a bias or mask.

    Each head size meets an array of each kind, and each of these an architecture of its own.
    """
    names = [name for name, where in ARCHITECTURES.items() if where.capability >= (8, 0)]
    copied: list[tuple[tuple[str, ...], dict[str, Any]]] = [
        (("bias",), {"aligned_bias": 16}),
        (("bias",), {"aligned_bias": 16, "wide_bias": True}),
        (("mask",), {"aligned_mask": 16}),
        (FEATURES, {"aligned_bias": 4, "aligned_mask": 4}),
    ]
    sizes = (16, 32, 64, 96, 128, 192, 256)
    calls = list(itertools.product(range(len(names)), range(len(sizes)), range(len(copied))))
    return [
        (names[i], plan)
        for i, j, k in calls
        if full or i == (j + k) % len(names)
        if not (names[i] == "sm_80" and sizes[j] == 128 and len(copied[k][0]) == 1)
        # Up to 24 bytes, since special values are added by a loop.
        if not (names[i] in ("sm_86", "sm_89", "sm_90") and (sizes[j], k) == (128, 2))
        for plan in select.choose(
            "forward",
            Traits(
                DTYPES["bfloat16" if j % 2 else "float16"],
                *(sizes[j], sizes[j], copied[k][0]),
                boxes=False,
                **copied[k][1],
            ),
            ARCHITECTURES[names[i]],
        )
        if isinstance(plan, ForwardMma) and (plan.aligned_bias or plan.aligned_mask)
    ]


def _sm90_cubins(full: bool) -> list[tuple[str, UnitPlan]]:
    """Return the same of the family sm90.

    Every head size meets both dtypes without options, and every set of options two head sizes.
    """
    sets = [tuple(n for n in FEATURES if n in s) for s in mma.FEATURE_SETS]
    dtypes, sizes = ("float16", "bfloat16"), sm90._PADDED
    calls = list(itertools.product(dtypes, sizes, sets))
    if not full:
        calls = [(dtype, size, ()) for dtype in dtypes for size in sizes]
        calls += [
            (dtypes[(i + j) % 2], sizes[(i + 2 * j) % 5], options)
            for i, options in enumerate(sets[1:])
            for j in range(2)
        ]
    return [
        ("sm_90", plan)
        for dtype, size, options in calls
        for direction in ("forward", "backward")
        for plan in select.choose(
            direction, Traits(DTYPES[dtype], size, size, options), ARCHITECTURES["sm_90"]
        )
        if plan.family == "sm90"
    ]


def _unordered_cubins(
    tensor_cores: list[tuple[str, UnitPlan]], full: bool
) -> list[tuple[str, UnitPlan]]:
    """Return the same of backwards that need not be deterministic: of one dtype, aligned."""
    return [
        (name, replace(plan, ordered=False))
        for name, plan in tensor_cores
        if isinstance(plan, (BackwardMma, BackwardSm90))
        if full or (plan.dtype == "bfloat16" and getattr(plan, "aligned", 16) == 16)
    ]


def _is_known_to_spill(
    name: str, direction: str, size: int, options: tuple[str, ...], aligned: int
) -> bool:
    """A few registers: up to 20 bytes in the forward of head size 112, 68 with all options."""
    if (direction, size, options) == ("forward", 112, ()):
        return name in ("sm_86", "sm_89") and aligned > 0
    if options != FEATURES or aligned:
        return False
    return size == 256 or ((name, direction) == ("sm_80", "backward") and size in (112, 128))


def candidates(direction: str, dtype: str, head_dim: int, head_dim_v: int) -> list[Plan]:
    """Return plans that use each candidate of each step of a direction."""
    offers = getattr(simt.Simt(), direction)(Traits(DTYPES[dtype], head_dim, head_dim_v))
    longest = max(len(plans) for plans in offers)
    return [
        tuple(kernel for plans in offers for kernel in plans[min(i, len(plans) - 1)])
        for i in range(longest)
    ]
