# SPDX-License-Identifier: Apache-2.0
"""The warning that a large call on the CPU back end takes long."""

from __future__ import annotations

import time

import numpy as np

from . import host, notice
from .problem import Arrays, Problem

__all__ = ["warn_if_slow"]

_CPU_PATIENCE = 30.0  # seconds
_warned = False


def warn_if_slow(direction: str, problem: Problem, inputs: Arrays) -> None:
    """Say once how long a large call takes on the CPU back end."""
    global _warned
    if _warned:
        return
    p = problem
    products = 7 if direction == "backward" else 2
    keys = min(p.seqlen_kv, p.window_left + p.window_right + 1)  # that a query sees, at most
    pairs = p.rows * keys
    if inputs.cu_seqlens_q is not None and inputs.cu_seqlens_kv is not None:
        lengths = (np.diff(x.array) for x in (inputs.cu_seqlens_q, inputs.cu_seqlens_kv))
        seen = sum(int(a) * min(int(b), keys) for a, b in zip(*lengths, strict=True))
        pairs = min(pairs, p.heads_q * seen)
    rate = 2e9 if "clang" in host.find_compiler().version else 4e8  # multiply-adds in a second
    seconds = pairs * products * max(p.head_dim, p.head_dim_v) / rate
    if seconds > _CPU_PATIENCE:
        _warned = True
        until = time.strftime("%H:%M", time.localtime(time.time() + seconds))
        notice.warn(
            f"this {direction} on NumPy arrays will take about {seconds:.0f} seconds "
            f"(until {until}): the CPU back end verifies kernels and is not fast. "
            "Use CuPy arrays for speed"
        )
