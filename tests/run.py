# SPDX-License-Identifier: Apache-2.0
"""Run a call with a given plan and schedule."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any, Literal
from unittest import mock

from check import Inputs

import cuflash
from cuflash import context, device, host, launch, realign, select
from cuflash.plan import KernelPlan, Plan
from cuflash.problem import Traits


@contextlib.contextmanager
def using(forward_plan: Plan, backward_plan: Plan) -> Iterator[None]:
    """Let every call run these plans instead of those that `select` would choose.

    How arrays are copied is decided by the call's strides all the same. Arrays that TMA cannot
    load, such as empty ones, get what `select` would choose.
    """

    def plan(direction: Literal["forward", "backward"], traits: Traits, index: int | None) -> Plan:
        where = device.CPU if index is None else device.gpu(index)
        wanted = forward_plan if direction == "forward" else backward_plan
        if not traits.boxes and any(kernel.boxes() for kernel in wanted):
            wanted = select.choose(direction, traits, where)
        return tuple(
            dataclasses.replace(kernel, **_alignments(kernel, traits)) for kernel in wanted
        )

    try:
        launch.forget()
        with mock.patch.object(launch, "_plan", plan):
            yield
    finally:
        launch.forget()


def _alignments(kernel: KernelPlan, traits: Traits) -> dict[str, Any]:
    """Return the fields of a plan that say how the arrays of a call can be copied."""
    names = ("aligned", "aligned_bias", "wide_bias", "aligned_mask")
    return {name: getattr(traits, name) for name in names if hasattr(kernel, name)}


@contextlib.contextmanager
def stepping(steps: Any) -> Iterator[None]:
    """Let every call run what a function says instead of `launch._steps`."""
    try:
        launch.forget()
        with mock.patch.object(launch, "_steps", lambda *given: steps(*given[:3])):
            yield
    finally:
        launch._recipe.cache_clear()


@contextlib.contextmanager
def copying(min_length: int = 1) -> Iterator[None]:
    """Copy arrays that cannot be moved by 16 bytes in calls of so many queries and keys."""
    try:
        launch._recipe.cache_clear()
        with mock.patch.object(realign, "MIN_LENGTH", min_length):
            yield
    finally:
        launch._recipe.cache_clear()


@contextlib.contextmanager
def schedule(seed: int, blocks: int = 0) -> Iterator[None]:
    """Run the threads of the CPU back end in the order that belongs to a seed.

    `blocks` is the most that a kernel is launched with, so that one computes several parts; 0: as
    many as ever. Few blocks are alive all at once, since one may wait for another's next part.
    """
    run = functools.partialmethod(host.HostKernel.launch, resident=blocks)
    launch._recipe.cache_clear()
    with (
        mock.patch.object(context, "host_seed", lambda: seed),
        mock.patch.object(context, "MAX_BLOCKS", blocks or context.MAX_BLOCKS),
        mock.patch.object(host.HostKernel, "launch", run),
    ):
        try:
            yield
        finally:
            launch._recipe.cache_clear()


def on(backend: Any, inputs: Inputs) -> Inputs:
    """Return the same call with arrays of a back end."""
    return inputs.moved(backend.array)


def forward(inputs: Inputs) -> tuple[Any, Any]:
    """Return out and lse of a call, packed or not."""
    i, cu = inputs, inputs.cu_seqlens
    call = cuflash.attention_varlen if cu else cuflash.attention
    return call(i.q, i.k, i.v, *cu, return_lse=True, **i.options)


def backward(inputs: Inputs, out: Any, lse: Any) -> cuflash.Gradients:
    """Return the gradients of a call, packed or not."""
    i, cu = inputs, inputs.cu_seqlens
    call = cuflash.attention_varlen_backward if cu else cuflash.attention_backward
    return call(i.dout, i.q, i.k, i.v, out, lse, *cu, dlse=i.dlse, **i.options)


def both(inputs: Inputs) -> tuple[Any, Any, cuflash.Gradients]:
    """Return out, lse and the gradients of a call."""
    out, lse = forward(inputs)
    return out, lse, backward(inputs, out, lse)


def workspace_bytes(call: Any, xp: Any) -> int:
    """Return how much workspace `call(workspace=...)` asks for, from what its error says."""
    try:
        call(workspace=xp.empty(0, "uint8"))
    except ValueError as error:
        found = re.search(r"at least (\d+) uint8", str(error))
        assert found, error
        return int(found[1])
    raise AssertionError("no workspace is needed")
