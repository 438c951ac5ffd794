# SPDX-License-Identifier: Apache-2.0
"""Choose a plan: the loop over the families, written once.

A family is an object with ``rejects``, ``forward`` and ``backward`` (see ``arch/``). They are asked
in order of speed; the first that neither rejects the problem nor runs out of shared memory serves.
"""

from __future__ import annotations

import functools
from typing import Literal

from .arch.simt import Simt
from .device import Device
from .dtypes import DType
from .plan import Plan

__all__ = ["FAMILIES", "choose"]

FAMILIES = (Simt(),)


@functools.cache
def choose(
    direction: Literal["forward", "backward"],
    dtype: DType,
    head_dim: int,
    head_dim_v: int,
    device: Device,
) -> Plan:
    """Return the plan for a direction. Lengths, strides and options do not matter for it."""
    reasons = []
    for family in FAMILIES:
        reason = family.rejects(dtype, head_dim, head_dim_v, device)
        if reason is None:
            for plan in getattr(family, direction)(dtype, head_dim, head_dim_v, device):
                if all(kernel.smem_bytes <= device.smem_per_block for kernel in plan):
                    return plan
            reason = f"no tile fits {device.smem_per_block} bytes of shared memory"
        reasons.append(f"{family.name}: {reason}")
    raise RuntimeError(
        f"no kernel for {dtype}, head sizes {head_dim} and {head_dim_v} on {device.name} "
        f"({'; '.join(reasons)})"
    )
