# SPDX-License-Identifier: Apache-2.0
"""Launch: Params, scratch memory and grids, on the current stream of the current GPU.

The caller (api.py) makes the arrays' GPU the current one.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import time
import warnings
from typing import Any, Literal

from . import arrays, compile, device, host, select
from .arrays import View
from .params import Operands, pack
from .plan import PARAMS_BYTES, KernelPlan
from .problem import Arrays, Problem, Traits

__all__ = ["backward", "forward", "host_seed", "workspace_bytes"]

_MAX_BLOCKS = 2**31 - 1

#: Scratch that a captured graph will use again whenever it is replayed, kept for good.
_captured: list[Any] = []

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


def forward(problem: Problem, inputs: Arrays, out: View, lse: View | None) -> None:
    """Fill `out`, and `lse` if it is not None."""
    operands = Operands(q=inputs.q, k=inputs.k, v=inputs.v, out=out, lse=lse)
    _run("forward", problem, inputs, operands, writes=("out", "lse"))


def backward(
    problem: Problem, inputs: Arrays, dq: View, dk: View, dv: View, workspace: View | None = None
) -> None:
    """Fill `dq`, `dk` and `dv`. `workspace`: None, or an array of `workspace_bytes` bytes."""
    size = workspace_bytes(problem)
    if workspace is not None:
        delta, owner = workspace.address, workspace.array
    else:
        delta, owner = arrays.scratch(inputs.q, size)
        if inputs.device is not None and _stream().is_capturing():
            _captured.append(owner)
    operands = Operands(
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
    _run("backward", problem, inputs, operands, writes=("dq", "dk", "dv"), scratch=(delta, size))
    del owner  # not before here: the memory may be given away


def workspace_bytes(problem: Problem) -> int:
    """Return how much scratch memory a backward call takes."""
    rows = problem.batch * problem.heads_q * problem.seqlen_q
    return rows * problem.dtype.accum.itemsize


class _Params(threading.local):
    """Room for the bytes of Params, and what a launch takes: a list of the parameters' addresses.

    The driver copies the parameters when a kernel is launched, so one room a thread is enough.
    """

    def __init__(self) -> None:
        self.bytes = ctypes.create_string_buffer(PARAMS_BYTES)
        self._list = (ctypes.c_void_p * 1)(ctypes.addressof(self.bytes))
        self.list = ctypes.addressof(self._list)


_params = _Params()


def _stream() -> Any:
    return sys.modules["cupy"].cuda.get_current_stream()


def _run(
    direction: Literal["forward", "backward"],
    problem: Problem,
    inputs: Arrays,
    operands: Operands,
    writes: tuple[str, ...],
    scratch: tuple[int, int] | None = None,
) -> None:
    steps = _steps(direction, problem.traits, inputs.device)
    grids = [(kernel, min(plan.parts(problem), _MAX_BLOCKS)) for plan, kernel in steps]
    params = _params
    pack(params.bytes, problem, inputs.layout, operands)
    if inputs.device is None:
        _warn_if_slow(direction, problem)
        buffers = [
            (name, *arrays.extent(x), name in writes)
            for name, x in zip(Operands._fields, operands, strict=True)
            if isinstance(x, View)
        ]
        if scratch is not None:
            buffers.append(("workspace", scratch[0], sum(scratch), True))
        call: tuple[Any, ...] = params.bytes.raw, buffers, host_seed()
    else:
        call = params.list, _stream().ptr
    for kernel, blocks in grids:
        if blocks:
            kernel.launch(blocks, *call)


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


_warned = False


def _warn_if_slow(direction: str, problem: Problem) -> None:
    """Say once how long a large call takes on the CPU back end."""
    global _warned
    if _warned:
        return
    p = problem
    products = 7 if direction == "backward" else 2
    keys = min(p.seqlen_kv, p.window_left + p.window_right + 1)  # that a query sees, at most
    pairs = p.batch * p.heads_q * p.seqlen_q * keys
    rate = 2e9 if "clang" in host.find_compiler().version else 4e8  # multiply-adds in a second
    seconds = pairs * products * max(p.head_dim, p.head_dim_v) / rate
    if seconds > _CPU_PATIENCE:
        _warned = True
        until = time.strftime("%H:%M", time.localtime(time.time() + seconds))
        warnings.warn(
            f"cuflash: this {direction} on NumPy arrays will take about {seconds:.0f} seconds "
            f"(until {until}): the CPU back end verifies kernels and is not fast. "
            "Use CuPy arrays for speed",
            RuntimeWarning,
            stacklevel=6,  # where the public function was called
        )
