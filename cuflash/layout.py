# SPDX-License-Identifier: Apache-2.0
"""Layout: which axis of the caller's arrays is what."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["AXES", "Layout", "read_axes", "read_layout"]

#: How shapes are read, in the words of messages.
AXES = {
    "bshd": "(batch, seq, heads, dim) or (seq, heads, dim)",
    "bhsd": "(batch, heads, seq, dim) or (heads, seq, dim)",
}


class Layout(NamedTuple):
    """Which axis of the caller's arrays is what; `batch` is None for arrays without a batch."""

    batch: int | None
    seq: int
    heads: int
    dim: int

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
        """Return (batch, seq, heads, dim) of an array of this shape."""
        batch = 1 if self.batch is None else shape[self.batch]
        return batch, shape[self.seq], shape[self.heads], shape[self.dim]

    def shape(self, batch: int, seq: int, heads: int, dim: int) -> tuple[int, ...]:
        """Return the shape of an array of these sizes."""
        inner = (seq, heads) if self.seq < self.heads else (heads, seq)
        return (*inner, dim) if self.batch is None else (batch, *inner, dim)

    def row_shape(self, batch: int, heads: int, seq: int) -> tuple[int, ...]:
        """Return the shape of lse, which does not depend on the order of the other arrays."""
        return (heads, seq) if self.batch is None else (batch, heads, seq)


_LAYOUTS = {
    ("bshd", 4): Layout(0, 1, 2, 3),
    ("bshd", 3): Layout(None, 0, 1, 2),
    ("bhsd", 4): Layout(0, 2, 1, 3),
    ("bhsd", 3): Layout(None, 1, 0, 2),
}


def read_layout(layout: Any) -> str:
    """Return the argument `layout`, which must be one of the two."""
    if not isinstance(layout, str) or layout not in AXES:
        raise ValueError(f"layout: expected 'bshd' or 'bhsd', got {layout!r}")
    return layout


def read_axes(name: str, layout: str, shape: tuple[int, ...]) -> Layout:
    """Return which axis of an array of this shape is what."""
    axes = _LAYOUTS.get((layout, len(shape)))
    if axes is None:
        raise ValueError(f"{name}: expected {AXES[layout]}, got shape {shape}")
    return axes
