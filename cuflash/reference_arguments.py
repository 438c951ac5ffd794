# SPDX-License-Identifier: Apache-2.0
"""Arguments of the reference: checked, in float64, with axes (batch, heads, seq, dim)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

__all__ = [
    "ARRAYS",
    "DEFAULTS",
    "Options",
    "as_given",
    "entries",
    "float64",
    "heads_first",
    "of_entry",
    "read_dlse",
]

#: The options that are arrays.
ARRAYS = ("bias", "mask", "alibi_slopes", "sinks")


def heads_first(layout: str, *arrays: Any, packed: bool = False) -> list[np.ndarray]:
    """q, k, v[, dout] as float64 (batch, heads, seq, dim), if their shapes fit together."""
    if layout not in ("bshd", "bhsd"):
        raise ValueError(f"layout: expected 'bshd' or 'bhsd', got {layout!r}")
    given = [float64(x) for x in arrays]
    names = ("q", "k", "v", "dout")
    shapes = ", ".join(f"{n} {x.shape}" for n, x in zip(names, given, strict=False))
    if {x.ndim for x in given} not in ({3}, {3 if packed else 4}):
        axes = "3 axes each" if packed else "3 axes each or 4"
        raise ValueError(f"q, k, v: expected {axes}, got {shapes}")
    xs = [x if x.ndim == 4 else x[None] for x in given]
    xs = [x.swapaxes(1, 2) for x in xs] if layout == "bshd" else xs
    (batch, hq, sq, d), (_, hkv, sk, _), (*_, dv) = (x.shape for x in xs[:3])
    want = [(batch, hq, sq, d), (batch, hkv, sk, d), (batch, hkv, sk, dv), (batch, hq, sq, dv)]
    if [x.shape for x in xs] != want[: len(xs)] or hq != hq // max(hkv, 1) * hkv:
        raise ValueError(f"shapes do not fit together with layout={layout!r}: {shapes}")
    return xs


def as_given(layout: str, batched: bool, x: np.ndarray) -> np.ndarray:
    """Undo ``heads_first`` for a result."""
    x = x.swapaxes(1, 2) if layout == "bshd" else x
    return x if batched else x[0]


def read_dlse(dlse: Any, batched: bool, q: np.ndarray) -> np.ndarray:
    """Return the gradient of lse, with a batch axis; 0 by default."""
    if dlse is None:
        return np.zeros(q.shape[:-1], q.dtype)
    dlse = float64(dlse if batched else dlse[None])
    if dlse.shape != q.shape[:-1]:
        raise ValueError(f"dlse: expected shape {q.shape[not batched : -1]}, got another")
    return dlse


@dataclass
class Options:
    """The options of a call, arrays as float64 on the host."""

    scale: float | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    bias: Any = None
    mask: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    dropout_p: float = 0.0
    seed: int | None = None
    first: int = 0  # index of the first batch entry, for dropout

    def __post_init__(self) -> None:
        for name in ARRAYS:
            if (x := getattr(self, name)) is not None:
                setattr(self, name, _host(x) if name == "mask" else float64(x))
        if self.mask is not None and self.mask.dtype != bool:
            raise TypeError(f"mask: expected bool, got {self.mask.dtype}")
        if not 0 <= self.softcap < np.inf:
            raise ValueError(f"softcap: expected 0 or a positive number, got {self.softcap}")
        if not 0 <= self.dropout_p <= 1:
            raise ValueError(f"dropout_p: expected a number from 0 to 1, got {self.dropout_p}")
        if self.dropout_p and self.seed is None:
            raise ValueError("seed: expected an int with dropout_p, got None")

    def check_shapes(self, batch: int, heads: int) -> None:
        """Raise ValueError where broadcasting would not, or not yet."""
        for name, x in (("bias", self.bias), ("mask", self.mask)):
            sizes = ((1, batch), (1, heads))
            if (
                x is not None
                and x.ndim != 2
                and (x.ndim != 4 or any(n not in of for n, of in zip(x.shape, sizes, strict=False)))
            ):
                raise ValueError(f"{name}: expected (Sq, Sk) or (batch, Hq, Sq, Sk), got {x.shape}")
        slopes, sinks = self.alibi_slopes, self.sinks
        if slopes is not None and slopes.shape not in ((heads,), (batch, heads)):
            raise ValueError(f"alibi_slopes: expected (Hq,) or (batch, Hq), got {slopes.shape}")
        if sinks is not None and sinks.shape != (heads,):
            raise ValueError(f"sinks: expected (Hq,), got {sinks.shape}")


#: What a caller may give of these, with the values that stand for nothing.
DEFAULTS = {field.name: field.default for field in fields(Options) if field.name != "first"}


def entries(
    q: np.ndarray, cu_seqlens_q: Any, k: np.ndarray, cu_seqlens_k: Any, options: Options
) -> Iterator[tuple[slice, slice, Options]]:
    """Yield the queries, the keys and the options of each entry of a packed batch."""
    cu_q, cu_k = (_host(x).astype(np.int64) for x in (cu_seqlens_q, cu_seqlens_k))
    for name, cu, total in (("q", cu_q, q.shape[2]), ("k", cu_k, k.shape[2])):
        if cu.shape != (max(cu_q.size, 1),) or np.diff(cu, prepend=0, append=total).min() < 0:
            raise ValueError(f"cu_seqlens_{name}: expected batch + 1 rising offsets up to {total}")
    options.check_shapes(cu_q.size - 1, q.shape[1])
    pairs, slopes = {"bias": options.bias, "mask": options.mask}, options.alibi_slopes
    for b in range(cu_q.size - 1):
        i, j = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        own = {name: of_entry(x, b, i, j) for name, x in pairs.items() if x is not None}
        if slopes is not None and slopes.ndim == 2:
            own["alibi_slopes"] = slopes[b]
        yield i, j, replace(options, first=b, **own)


def of_entry(x: np.ndarray, b: int, i: slice, j: slice) -> np.ndarray:
    """View of the part of a bias or mask that belongs to an entry; axes of 1 stay."""
    whole, rows, keys = slice(None), slice(i.stop - i.start), slice(j.stop - j.start)
    parts = (slice(b, b + 1), whole, rows, keys)[-x.ndim :]
    return x[tuple(whole if n == 1 else y for n, y in zip(x.shape, parts, strict=True))]


def float64(x: Any) -> np.ndarray:
    """Return a host array of float64; a longdouble stays one, and so does all that follows."""
    x = _host(x)
    return x if x.dtype == np.longdouble else x.astype(np.float64)


def _host(x: Any) -> np.ndarray:
    return np.asarray(x.get() if hasattr(x, "get") else x)
