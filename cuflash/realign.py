# SPDX-License-Identifier: Apache-2.0
"""Which arrays of a call are copied, so that kernels can move their rows by 16 bytes.

The kernels of the fast families load rows by vectors or by TMA; those of head sizes that are no
multiple of 8, and of unusual strides, they load slowly or not at all. Where each row is loaded
often, such arrays are copied to workspace once, and results that cannot be written copied back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

from .arrays import Form
from .layout import Layout
from .params import has_boxes, pair_alignment, row_alignment
from .plan import Plan
from .problem import Problem, Traits

__all__ = ["MIN_LENGTH", "nbytes", "places", "traits"]

#: A call is left as it is if it has fewer queries or keys than this, an entry on average: each row
#: would be loaded too seldom to make up for its copy. See docs/design/0014-realign.md.
MIN_LENGTH = 256

#: The arrays that kernels load by vectors, and those that TMA moves.
_LOADED = {"forward": ("q", "k", "v"), "backward": ("q", "k", "v", "out", "dout")}
_MOVED = ("q", "k", "v", "out", "dout")

Direction = Literal["forward", "backward"]


def traits(
    direction: Direction, problem: Problem, layout: Layout, forms: Mapping[str, Form]
) -> Traits:
    """Return what kernels are selected by, for arrays of these forms."""
    group = problem.dtype.group
    aligned = min(row_alignment(forms[name], layout, group) for name in _LOADED[direction])
    boxes = all(_is_movable(forms[name], layout) for name in _MOVED if name in forms)
    found = problem.traits._replace(aligned=aligned, boxes=boxes)
    if direction == "forward":  # those of the backward that copy these choose on the GPU
        bias, mask = (forms.get(name) for name in ("bias", "mask"))
        if bias and (at_once := pair_alignment(bias)):
            wide = bias.itemsize == problem.dtype.accum.itemsize
            found = found._replace(aligned_bias=at_once, wide_bias=wide)
        if mask:
            found = found._replace(aligned_mask=pair_alignment(mask))
    elif not problem.deterministic:
        found = found._replace(deterministic=False)
    return found


def places(
    direction: Direction,
    problem: Problem,
    layout: Layout,
    forms: Mapping[str, Form],
    choose: Callable[[Traits], Plan],
) -> dict[str, Form]:
    """Return the forms of the copies that kernels take instead of arrays, by the arrays' names.

    `choose` returns the kernels that compute results.
    """
    p = problem
    entries = max(p.batch, 1) if p.is_packed else 1
    if p.dtype.itemsize != 2 or min(p.seqlen_q, p.seqlen_kv) < MIN_LENGTH * entries or not p.rows:
        return {}
    copies = {
        name: _place(forms[name], spread=direction == "backward" or name not in ("k", "v"))
        for name in _MOVED
        if name in forms and not _is_movable(forms[name], layout)
    }
    if not copies:
        return {}
    of_copies = traits(direction, p, layout, {**forms, **copies})
    if of_copies.boxes and any(kernel.boxes() for kernel in choose(of_copies)):
        return copies
    # Vectors of 8 bytes will do, and so will strides that only TMA refuses.
    loaded = _LOADED[direction]
    copies = {
        name: copy
        for name, copy in copies.items()
        if name in loaded and not row_alignment(forms[name], layout, p.dtype.group)
    }
    of_copies = traits(direction, p, layout, {**forms, **copies})
    return copies if any(kernel.family == "mma" for kernel in choose(of_copies)) else {}


def _is_movable(x: Form, layout: Layout) -> bool:
    """Return whether TMA can move an array."""
    return row_alignment(x, layout, 1) == 16 and has_boxes(x, layout)


def _place(x: Form, spread: bool) -> Form:
    """Return the form of a copy: rows one behind the other, filled up to multiples of 16 bytes.

    Axes that are broadcast are copied once, unless they are to be spread: the copy might be far
    larger than all else that the call has.
    """
    *lengths, dim = x.shape
    step = -(-dim * x.itemsize // 16) * 16
    width, strides = step // x.itemsize, [x.itemsize]
    for length, stride in zip(lengths[::-1], x.strides[-2::-1], strict=True):
        once = stride == 0 and length > 1 and not spread
        strides.append(0 if once else step)
        step *= 1 if once else length
    return Form((*lengths, width), tuple(strides[::-1]), x.itemsize, 0)


def nbytes(place: Form) -> int:
    """Return how many bytes a copy takes."""
    once = (1 if stride == 0 else n for n, stride in zip(place.shape, place.strides, strict=True))
    return math.prod(once) * place.itemsize
