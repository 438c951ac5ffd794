# SPDX-License-Identifier: Apache-2.0
"""hypothesis strategies that draw a whole call: sizes, options, strides, values, schedule.

A `Case` is a small record; its repr is the repro. `arrays_of` turns it into arrays. Both, and what
the values are, are in cuflash/testing/cases.py; here is which calls the tests draw.
"""

from __future__ import annotations

import random

from hypothesis import strategies as st
from matrix import Row

from cuflash.testing.cases import (
    BOXES,
    VALUES,
    VIEWS,
    WHOLE_VIEWS,
    Case,
    arrays_of,
    numpy_dtype,
    offsets,
    visible,
)

__all__ = ["Case", "arrays_of", "case_of", "cases", "numpy_dtype", "offsets", "visible"]


def _length(rng: random.Random, tile: int) -> int:
    """Return a length of some tiles, or at the edge of one; mostly more than one."""
    edges = (0, 1, tile - 1, tile, tile + 1, 2 * tile - 1, 2 * tile, 2 * tile + 1)
    several = rng.randint(tile + 1, 2 * tile + (64 if tile <= 32 else 20))
    return rng.choice([several, several, rng.choice(edges), rng.randint(1, 2 * tile)])


def _size(rng: random.Random, largest: int, piece: int) -> int:
    """Return a head size in whole pieces; often the largest."""
    return rng.choice([largest, rng.randint(1, largest // piece) * piece])


def _side(rng: random.Random, seqlen_q: int, seqlen_kv: int, tile_kv: int) -> int:
    """Return a side of a window: narrow, or with its edge at some pair."""
    position = rng.randrange(max(seqlen_q, 1)) + seqlen_kv - seqlen_q
    distance = abs(position - rng.randrange(max(seqlen_kv, 1)))
    return rng.choice([rng.randint(0, tile_kv), distance, distance])


def cases(row: Row, any_strides: bool = False) -> st.SearchStrategy[Case]:
    """Draw a call that the plans of `row` can serve, at once or with `any_strides` after copies.

    All of it follows from one number. Of what is drawn field by field hypothesis copies one field
    over another, once it has ten examples, and most that come then differ little from those.
    """
    return st.integers(0, 2**24 - 1).map(lambda number: case_of(row, number, any_strides))


def case_of(row: Row, number: int, any_strides: bool = False) -> Case:
    """Return the call with a number."""
    rng = random.Random(f"{row.name} {number}")
    tile_q, tile_kv = row.tile
    seqlen_q, seqlen_kv = _length(rng, tile_q), _length(rng, tile_kv)
    options = [name for name in row.options if rng.random() < 0.5]
    packed = "packed" in options
    if packed:  # so that entries span several tiles too
        seqlen_q, seqlen_kv = seqlen_q + _length(rng, tile_q), seqlen_kv + _length(rng, tile_kv)
    # Elements that can be moved at once. 4 take a compilation of their own, for small plans only.
    boxes = row.boxes and not any_strides
    piece = rng.choice([8] if boxes else [1, 8] if "shipped" in row.name else [1, 4, 8])
    views = BOXES if boxes else VIEWS if piece == 1 else WHOLE_VIEWS
    more = ["poison"] * 5 + ["growing", "far", "far"] * (not options)
    values = rng.choice([*VALUES, *more])
    sides = [_side(rng, seqlen_q, seqlen_kv, tile_kv) for _ in range(2)]
    window = rng.choice(
        [(-1, -1), (-1, -1), (sides[0], -1), (sides[0], -1), (-1, sides[1]), tuple(sides)]
    )
    far = values == "far"  # exact scores, in tiles that hide nothing
    return Case(
        dtype=row.dtype,
        batch=None if packed else rng.choice([None, 1, 2]),
        heads_kv=rng.randint(1, 2),
        group=rng.randint(1, 3),
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        head_dim=_size(rng, row.head_dim, piece),
        head_dim_v=_size(rng, row.head_dim_v, piece),
        causal=rng.random() < (0.2 if far else 0.5),
        window=(-1, -1) if far else window,
        scale=rng.choice([1.0, -0.5] if far else [None, None, None, 0.3, -0.2, 1.0]),
        layout=rng.choice(["bshd", "bhsd"]),
        views=tuple(rng.choice(["contiguous", rng.choice(views)]) for _ in range(4)),
        values=values,
        with_dlse=rng.random() < 0.5,
        seed=rng.randrange(10**6),
        schedule=rng.randint(0, 6),
        options=tuple(options),
        entries=rng.choice([1, 2, 2, 3, 4, 0]) if packed else 1,
        blocks=rng.choice([0, 0, 1, 3]),
    )
