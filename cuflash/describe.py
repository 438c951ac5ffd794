# SPDX-License-Identifier: Apache-2.0
"""What CUFLASH_DEBUG prints of a plan."""

from __future__ import annotations

import dataclasses

from . import device
from .plan import Plan
from .problem import FEATURES, Traits

__all__ = ["describe"]


def describe(direction: str, traits: Traits, facts: device.Device, plan: Plan) -> str:
    """Return a line about a plan, and one about each kernel."""
    t = traits
    options = " ".join(t.features) or "none"
    lines = [
        f"cuflash: {direction} on {facts.name}: {t.dtype}, head sizes {t.head_dim} and "
        f"{t.head_dim_v}, options {options}, rows moved by {t.aligned or t.dtype.itemsize} bytes"
        f"{' or TMA' if t.boxes else ''}"
    ]
    for kernel in plan:
        fields = dataclasses.asdict(kernel)
        flags = " ".join(name for name in FEATURES if fields.get(name))
        sizes = ", ".join(f"{x} {y}" for x, y in fields.items() if type(y) is int)
        lines.append(
            f"cuflash:   {kernel.kernel} ({kernel.family}): {kernel.threads} threads, "
            f"{kernel.smem_bytes} bytes of shared memory; {sizes and sizes + '; '}"
            f"code for {flags or 'no options'}"
            f"{'' if fields.get('ordered', True) else '; dq is added up in any order'}"
        )
    return "\n".join(lines)
