# SPDX-License-Identifier: Apache-2.0
"""The launches of a merge of states; launch.py has those of attention."""

from __future__ import annotations

import functools
from typing import Any

from . import arrays, compile, context
from .arrays import View
from .context import Room, captured, current_stream, facts
from .merge import Merge, Parts
from .params import pack_merge
from .plan import MergeStates

__all__ = ["merge"]

_params = Room(MergeStates.params_bytes)


def merge(problem: Merge, parts: Parts, out: View, lse: View) -> None:
    """Fill `out` and `lse` with what the parts are together."""
    plan, kernel = _kernel(problem.dtype.name, parts.device)
    firsts = range(0, len(parts.outs), plan.max_parts)
    states, sums, size, owner = 0, 0, 0, None
    if len(firsts) > 1:
        states_bytes, sums_bytes = plan.scratch_bytes(problem)
        size = states_bytes + sums_bytes
        states, owner = arrays.scratch(out, size)
        sums = states + states_bytes
        if parts.device is not None and current_stream().is_capturing():
            captured.append(owner)
    buffers = []
    if parts.device is None:
        for name, views in (("outs", parts.outs), ("lses", parts.lses)):
            buffers += [(f"{name}[{n}]", *arrays.extent(x), False) for n, x in enumerate(views)]
        buffers += [(name, *arrays.extent(x), True) for name, x in (("out", out), ("lse", lse))]
        if size:
            buffers.append(("workspace", states, states + size, True))
    room = _params
    for scan in (True, False) if size else (False,):
        blocks = min(plan.parts(problem, scan), context.MAX_BLOCKS)
        for first in firsts if blocks else ():
            to, scratch = (out, lse), (states, sums)
            pack_merge(room.bytes, plan, problem, parts, to, scratch, first, scan)
            if parts.device is None:
                kernel.launch(blocks, room.bytes.raw, buffers, context.host_seed())
            else:
                kernel.launch(blocks, room.list, current_stream().ptr)
    del owner  # not before here: its memory may be given away


@functools.cache
def _kernel(dtype: str, index: int | None) -> tuple[MergeStates, Any]:
    """Return the plan of a merge with its kernel, ready to launch on one device."""
    plan = MergeStates(dtype)
    return plan, compile.kernel(plan, facts(index), index)
