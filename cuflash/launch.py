# SPDX-License-Identifier: Apache-2.0
"""Launch: Params bytes, workspace and grid, on the current stream of the current GPU.

The caller (api.py) makes the arrays' GPU the current one.
"""

from __future__ import annotations

import functools
import os
import struct
import sys
import time
import warnings
from typing import Any, Literal, NamedTuple

from . import arrays, compile, device, select
from .arrays import View
from .plan import PARAMS_BYTES, KernelPlan
from .problem import Arrays, Layout, Problem, Traits

__all__ = ["backward", "forward", "host_seed", "workspace_bytes"]

# struct Params of kernels/attention/params.cuh: eight Tensor, three RowTensor, then the scalars.
_PARAMS = struct.Struct("=" + 8 * "Q5q" + 3 * "Q3q" + "dq8i")
assert _PARAMS.size == PARAMS_BYTES

_NO_TENSOR = (0, 0, 0, 0, 0, 0)
_NO_ROWS = (0, 0, 0, 0)
_MAX_BLOCKS = 2**31 - 1

#: Scratch that a captured graph will use again whenever it is replayed, kept for good.
_captured: list[Any] = []

#: The CPU back end runs about so many multiply-adds of a call in a second.
_CPU_RATE = 2e8
_CPU_PATIENCE = 30.0  # seconds


def host_seed() -> int:
    """Return the seed of the CPU back end's schedule: $CUFLASH_HOST_SEED, 0 is first in first out.

    Results do not depend on it, unless a kernel lacks a barrier; tests vary it for that reason.
    """
    text = os.environ.get("CUFLASH_HOST_SEED") or "0"
    if not text.isascii() or not text.isdigit() or int(text) >= 2**64:
        raise ValueError(
            f"CUFLASH_HOST_SEED: expected an integer from 0 to 2**64 - 1, got {text!r}"
        )
    return int(text)


class Names(NamedTuple):
    """The arrays of Params by name, in its order; None where the call has no such array."""

    q: View | None = None
    k: View | None = None
    v: View | None = None
    out: View | None = None
    dout: View | None = None
    dq: View | None = None
    dk: View | None = None
    dv: View | None = None
    lse: View | None = None
    dlse: View | None = None
    delta: View | None = None


def forward(problem: Problem, inputs: Arrays, out: View, lse: View | None) -> None:
    """Fill `out`, and `lse` if it is not None."""
    names = Names(q=inputs.q, k=inputs.k, v=inputs.v, out=out, lse=lse)
    _run("forward", problem, inputs, names, writes=("out", "lse"))


def backward(
    problem: Problem, inputs: Arrays, dq: View, dk: View, dv: View, workspace: View | None = None
) -> None:
    """Fill `dq`, `dk` and `dv`. `workspace`: None, or an array of `workspace_bytes` bytes."""
    delta = _workspace(problem, inputs, workspace)
    names = Names(
        q=inputs.q,
        k=inputs.k,
        v=inputs.v,
        out=inputs.out,
        dout=inputs.dout,
        dq=dq,
        dk=dk,
        dv=dv,
        lse=inputs.lse,
        dlse=inputs.dlse,
        delta=delta,
    )
    _run("backward", problem, inputs, names, writes=("dq", "dk", "dv", "delta"))


def workspace_bytes(problem: Problem) -> int:
    """Return how much scratch memory a backward call takes."""
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    return rows * problem.dtype.accum.itemsize


def _workspace(problem: Problem, inputs: Arrays, workspace: View | None) -> View:
    shape = inputs.layout.row_shape(problem.batch, problem.heads_q, problem.seqlen_q)
    dtype = problem.dtype.accum
    if workspace is not None:
        used = workspace.array[: workspace_bytes(problem)]
        return arrays.view(used.view(dtype).reshape(shape))
    delta = arrays.empty(inputs.q, shape, dtype)
    if inputs.device is not None:
        import cupy

        if cupy.cuda.get_current_stream().is_capturing():
            _captured.append(delta)
    return delta


def _run(
    direction: Literal["forward", "backward"],
    problem: Problem,
    inputs: Arrays,
    names: Names,
    writes: tuple[str, ...],
) -> None:
    params = _pack(problem, inputs.layout, names)
    steps = _steps(direction, problem.traits, inputs.device)
    if inputs.device is None:
        buffers = [
            (name, *arrays.extent(x), name in writes)
            for name, x in zip(Names._fields, names, strict=True)
            if x is not None
        ]
        _warn_if_slow(direction, problem)
        seed = host_seed()
        for plan, kernel in steps:
            blocks = plan.parts(problem)
            if blocks:
                kernel.launch(min(blocks, _MAX_BLOCKS), params, buffers, seed)
        return
    for plan, kernel in steps:
        blocks = plan.parts(problem)
        if blocks:
            kernel.launch(min(blocks, _MAX_BLOCKS), params)


@functools.cache
def _steps(
    direction: Literal["forward", "backward"], traits: Traits, index: int | None
) -> tuple[tuple[KernelPlan, Any], ...]:
    """Return the plans of a call with their kernels, ready to launch on one device."""
    facts = device.CPU if index is None else device.gpu(index)
    plan = select.choose(direction, traits, facts)
    if os.environ.get("CUFLASH_DEBUG"):
        for kernel in plan:
            print(
                f"cuflash: {direction}, {traits}, {facts.name} -> {kernel}, "
                f"{kernel.threads} threads, {kernel.smem_bytes} bytes of shared memory",
                file=sys.stderr,
            )
    return tuple((kernel, compile.kernel(kernel, facts, index)) for kernel in plan)


def _pack(problem: Problem, layout: Layout, names: Names) -> bytes:
    """Return the bytes of struct Params."""
    p = problem
    group = p.dtype.group
    fields: list[int] = []
    for x in names[:8]:
        fields += _NO_TENSOR if x is None else _tensor(x, layout, group)
    for x in names[8:]:
        fields += _NO_ROWS if x is None else _rows(x)
    return _PARAMS.pack(
        *fields,
        p.scale,
        p.batch,
        p.heads_q,
        p.heads_kv,
        p.seqlen_q,
        p.seqlen_kv,
        p.head_dim,
        p.head_dim_v,
        p.window_left,
        p.window_right,
    )


def _tensor(x: View, layout: Layout, group: int) -> tuple[int, ...]:
    """Return struct Tensor: address, strides in elements, and whether vectors can be moved."""
    strides, size, address = x.strides, x.itemsize, x.address
    batch = 0 if layout.batch is None else strides[layout.batch]
    seq, head, dim = strides[layout.seq], strides[layout.heads], strides[layout.dim]
    vectors = (
        dim == size
        and x.shape[layout.dim] % group == 0
        and not (address | batch | seq | head) % (group * size)
    )
    return address, batch // size, seq // size, head // size, dim // size, vectors


def _rows(x: View) -> tuple[int, ...]:
    """Return struct RowTensor: address and strides in elements."""
    size, strides = x.itemsize, x.strides
    batch = strides[0] // size if len(strides) == 3 else 0
    return x.address, batch, strides[-2] // size, strides[-1] // size


_warned = False


def _warn_if_slow(direction: str, problem: Problem) -> None:
    """Say once how long a large call takes on the CPU back end."""
    global _warned
    p = problem
    products = 7 if direction == "backward" else 2
    keys = min(p.seqlen_kv, p.window_left + p.window_right + 1)  # that a query sees, at most
    pairs = p.batch * p.heads_q * p.seqlen_q * keys
    seconds = pairs * products * max(p.head_dim, p.head_dim_v) / _CPU_RATE
    if seconds > _CPU_PATIENCE and not _warned:
        _warned = True
        until = time.strftime("%H:%M", time.localtime(time.time() + seconds))
        warnings.warn(
            f"cuflash: this {direction} on NumPy arrays will take about {seconds:.0f} seconds "
            f"(until {until}): the CPU back end verifies kernels and is not fast. "
            "Use CuPy arrays for speed",
            RuntimeWarning,
            stacklevel=6,  # where the public function was called
        )
