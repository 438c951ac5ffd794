# SPDX-License-Identifier: Apache-2.0
"""Choose a plan: the loop over the families, written once.

A family is an object with ``rejects``, ``forward`` and ``backward`` (see ``arch/``). For each step
of a direction, a kernel or several that agree, it offers candidates, best first; the first that
fits the device's shared memory is taken. Families are asked in order of speed, and the first that
can serve does.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal

from .arch.mma import Mma
from .arch.simt import Simt
from .arch.sm90 import Sm90
from .device import Device
from .plan import KernelPlan, Plan
from .problem import Traits

__all__ = ["FAMILIES", "choose"]

FAMILIES = (Sm90(), Mma(), Simt())


@functools.cache
def choose(direction: Literal["forward", "backward"], traits: Traits, device: Device) -> Plan:
    """Return the plan for a direction."""
    reasons = []
    for family in FAMILIES:
        reason = family.rejects(direction, traits, device)
        if reason is None:
            plan = [_first_fit(offers, device) for offers in getattr(family, direction)(traits)]
            if None not in plan:
                return tuple(kernel for kernels in plan if kernels for kernel in kernels)
            reason = f"no tile fits {device.smem_per_block} bytes of shared memory"
        reasons.append(f"{family.name}: {reason}")
    raise RuntimeError(f"no kernel for {traits} on {device.name} ({'; '.join(reasons)})")


def _first_fit(offers: Sequence[Plan], device: Device) -> Plan | None:
    return next((plan for plan in offers if all(_fits(kernel, device) for kernel in plan)), None)


def _fits(kernel: KernelPlan, device: Device) -> bool:
    return kernel.smem_bytes <= device.smem_per_block and kernel.smem_wanted <= device.smem_per_sm
