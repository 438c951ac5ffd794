# SPDX-License-Identifier: Apache-2.0
"""What is asked of everybody who is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from bench.cases import Case
from bench.data import Inputs

__all__ = ["OURS", "UNORDERED", "Call", "Peer", "only_plain"]

OURS = "cuflash"
UNORDERED = "unordered"  # ours with deterministic=False


class Call(NamedTuple):
    """A prepared call, and how its result is read as arrays (batch, seqlen, heads, dim)."""

    run: Callable[[], Any]
    read: Callable[[Any], tuple[Any, ...]]


class Peer:
    """An implementation of attention."""

    name = ""
    on_stream = True  # whether it works on CuPy's current stream, so that events see it
    allowance = 1.0  # factor of the tolerance for its results

    def available(self) -> str | None:
        """Return why it cannot be used here, or None."""
        return None

    def rejects(self, case: Case, dtype: str, direction: str) -> str | None:
        """Return why it cannot do a call, or None."""
        return None

    def prepare(self, case: Case, direction: str, inputs: Inputs) -> Call:
        """Do all that need not be timed."""
        raise NotImplementedError

    def wait(self, result: Any) -> None:
        """Wait for a result that synchronising the GPU does not wait for."""

    def free(self) -> None:
        """Give memory that nobody uses back to the device."""


def only_plain(case: Case, dtype: str) -> str | None:
    """Return why a library of 16-bit kernels without our options cannot do a call."""
    if case.options():
        return "no options"
    if dtype not in ("float16", "bfloat16"):
        return f"no {dtype}"
    if case.head_dim_v != case.head_dim:
        return "no value size of its own"
    if case.causal and case.seqlen_q != case.seqlen_kv:
        return "causal is aligned at the top left"
    return None
