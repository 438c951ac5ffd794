# SPDX-License-Identifier: Apache-2.0
"""Calls that have been read: where results go, the launch, and what the caller gets.

Reads out=, wrt= and workspace=: which results the caller wants, and where; and deterministic=.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from . import arrays, checks, launch, launch_merge
from .arrays import View
from .destinations import Destinations
from .gradients import Gradients
from .merge import Merge, Parts, read_pair
from .problem import Arrays, Problem

__all__ = ["backward", "forward", "merge", "results"]


def forward(problem: Problem, inputs: Arrays, want_lse: bool, out: Any) -> tuple[View, View | None]:
    """Compute out and, if it is wanted, lse, in the arrays of `out` or new ones."""
    p, layout = problem, inputs.layout
    to_out, to_lse = out if want_lse and isinstance(out, tuple) and len(out) == 2 else (out, None)
    if isinstance(to_out, tuple):
        raise TypeError(
            "out: expected one array, or a pair (out, lse) together with return_lse=True, "
            f"got a tuple of {len(to_out)}"
        )
    q = inputs.q
    to = Destinations("q", q, inputs)
    with arrays.on(inputs.device):
        shape = q.shape if p.head_dim_v == p.head_dim else (*q.shape[:-1], p.head_dim_v)
        result = to.result("out", to_out, shape, q.dtype)
        lse = None
        if want_lse:
            rows = layout.row_shape(p.batch, p.heads_q, p.seqlen_q)
            lse = to.result("lse of out", to_lse, rows, p.dtype.accum)
        launch.forward(problem, inputs, result, lse)
    return result, lse


def results(result: View, lse: View | None, out: Any) -> Any:
    """Return what the caller of a forward function gets."""
    if lse is None:
        return _given(out, result)
    to_out, to_lse = out if isinstance(out, tuple) else (out, None)
    return _given(to_out, result), _given(to_lse, lse)


def backward(
    problem: Problem, inputs: Arrays, wrt: Any, out: Any, workspace: Any, deterministic: Any
) -> Gradients:
    """Compute the gradients that `wrt` names, in the arrays of `out` or new ones."""
    if not checks.flag("deterministic", deterministic):
        problem = problem._replace(deterministic=False)
    wanted = _read_wanted(wrt, problem)
    given = (None,) * 3 if out is None else out
    if not isinstance(given, (tuple, list)) or not 3 <= len(given) <= 5:
        raise TypeError(f"out: expected (dq, dk, dv[, dbias[, dsinks]]), got {_kind(out)}")
    i = inputs
    of = {"q": i.q, "k": i.k, "v": i.v, "bias": i.bias, "sinks": i.sinks}
    to = Destinations("q", inputs.q, inputs)
    gradients: dict[str, View] = {}
    found: list[Any] = []
    with arrays.on(inputs.device):
        for (name, x), destination in zip_longest(of.items(), given):
            if name in wanted and x is not None:
                label = "d" + name
                gradients[label] = y = to.result(label + " of out", destination, x.shape, x.dtype)
                found.append(y.array if destination is None else destination)
            elif destination is None:
                found.append(None)
            else:
                raise ValueError(f"out: d{name} is not computed by this call; pass None for it")
        for name, other in (("dk", "dv"), ("dv", "dk")):  # one kernel computes both
            if other in gradients and name not in gradients:
                x = i.k if name == "dk" else i.v
                gradients[name] = arrays.empty(x, x.shape, x.dtype)
        if workspace is not None:
            size = launch.workspace_bytes(problem, inputs, gradients)
            workspace = to.workspace(workspace, size)
        launch.backward(problem, inputs, gradients, workspace)
    return Gradients(*found)


def merge(problem: Merge, parts: Parts, out: Any) -> tuple[Any, Any]:
    """Compute out and lse of a merge, in the arrays of `out` or new ones."""
    to_out, to_lse = read_pair(out)
    first_out, first_lse = parts.outs[0], parts.lses[0]
    with arrays.on(parts.device):
        to = Destinations("outs[0]", first_out, parts)
        result = to.result("out", to_out, first_out.shape, first_out.dtype)
        lse = to.result("lse of out", to_lse, first_lse.shape, first_lse.dtype)
        launch_merge.merge(problem, parts, result, lse)
    return _given(to_out, result), _given(to_lse, lse)


def _read_wanted(wrt: Any, problem: Problem) -> tuple[str, ...]:
    """Return which gradients are wanted, of q, k, v, bias and sinks."""
    there = ["q", "k", "v"]
    if problem.features:
        there += [name for name in ("bias", "sinks") if name in problem.features]
    if wrt is None:
        return tuple(there)
    try:
        names = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    except TypeError:
        raise TypeError(f"wrt: expected names out of {there}, got {type(wrt).__name__}") from None
    for name in names:
        if not isinstance(name, str) or name not in there:
            raise ValueError(f"wrt: expected some of {there}, the call's arrays, got {name!r}")
    return names


def _kind(x: Any) -> str:
    return f"{type(x).__name__} of {len(x)}" if isinstance(x, (tuple, list)) else type(x).__name__


def _given(given: Any, result: View) -> Any:
    """Return the very object that the caller gave, as NumPy does, or the new array."""
    return result.array if given is None else given
