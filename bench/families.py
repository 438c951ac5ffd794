# SPDX-License-Identifier: Apache-2.0
"""Which families of kernels may run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from cuflash import launch, select

__all__ = ["NAMES", "fastest"]

#: The fastest first.
NAMES = [family.name for family in select.FAMILIES]


@contextlib.contextmanager
def fastest(name: str | None) -> Iterator[None]:
    """Let no faster family of kernels than this one be chosen; None: any may be."""
    before = select.FAMILIES

    def allow(families: Any) -> None:
        select.FAMILIES = families
        select.choose.cache_clear()
        launch.forget()

    allow(before if name is None else before[NAMES.index(name) :])
    try:
        yield
    finally:
        allow(before)
