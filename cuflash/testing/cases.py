# SPDX-License-Identifier: Apache-2.0
"""Cases: sizes, options, strides and values of a call in a small record, and its arrays.

The repr of a `Case` is enough to make the same arrays again with `arrays_of`.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import environment
from .inputs import Inputs

__all__ = ["VALUES", "VIEWS", "Case", "arrays_of", "numpy_dtype", "offsets", "visible"]

BOXES = ("contiguous", "heads first", "apart")  # that TMA can load
VIEWS = ("contiguous", "heads first", "inside", "reversed", "every other", "shared heads", "offset")
WHOLE_VIEWS = ("contiguous", "heads first", "shared heads")  # that keep rows as aligned as they are
VALUES = ("normal", "positive mean", "peaked", "large", "growing", "far", "poison")


@dataclass(frozen=True)
class Case:
    """One call of both passes, in numbers and words; `arrays_of` makes its arrays.

    `schedule` and `blocks` say how the library's own tests run it, and change no array.
    """

    dtype: str
    batch: int | None  # None: arrays without a batch axis
    heads_kv: int
    group: int
    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool
    window: tuple[int, int]
    scale: float | None
    layout: str
    views: tuple[str, str, str, str]  # of q, k, v, dout
    values: str
    with_dlse: bool
    seed: int  # of the values
    schedule: int  # of the CPU back end
    options: tuple[str, ...] = ()  # of problem.FEATURES; their arrays follow from `seed`
    entries: int = 1  # of packed sequences
    blocks: int = 0  # the most that a kernel is launched with; 0: as many as ever

    def tiles(self, tile_q: int, tile_kv: int) -> str:
        """Say whether rows and keys span more than one tile each, in some entry."""
        rows, keys = self.seqlen_q, self.seqlen_kv
        if "packed" in self.options:
            rows, keys = (int(np.diff(at).max(initial=0)) for at in offsets(self))
        return f"{'n' if rows > tile_q else '1'}x{'n' if keys > tile_kv else '1'}"


def _rng(case: Case, purpose: int) -> np.random.Generator:
    """Return a generator that differs for cases that differ in anything."""
    return np.random.default_rng((zlib.crc32(repr(case).encode()), purpose))


def offsets(case: Case) -> list[np.ndarray]:
    """Return the offsets of a packed case: slack around the entries, some of them empty."""
    rng = _rng(case, 1)
    found, kinds = [], ("i4", "i8")
    for total in (case.seqlen_q, case.seqlen_kv):
        cuts = np.sort(rng.integers(0, total + 1, case.entries + 1))
        if rng.random() < 0.5:
            cuts[0], cuts[-1] = 0, total
        if case.entries > 1 and rng.random() < 0.3:
            cuts[1] = cuts[0]
        found.append(cuts.astype(str(rng.choice(kinds))))
    return found


def numpy_dtype(name: str) -> np.dtype:
    """Return the dtype of a name; "bfloat16" needs the package ml_dtypes."""
    if name != "bfloat16":
        return np.dtype(name)
    problem = environment.ml_dtypes_problem()
    if problem:
        raise ImportError(problem)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def arrays_of(case: Case) -> Inputs:
    """Return the arguments of a case's call, with NumPy arrays; always the same ones."""
    c, rng = case, np.random.default_rng(case.seed)
    heads_q = c.heads_kv * c.group
    q = _array(c, rng, c.views[0], c.seqlen_q, heads_q, c.head_dim, "q")
    k = _array(c, rng, c.views[1], c.seqlen_kv, c.heads_kv, c.head_dim, "k")
    v = _array(c, rng, c.views[2], c.seqlen_kv, c.heads_kv, c.head_dim_v, "v")
    dout = _array(c, rng, c.views[3], c.seqlen_q, heads_q, c.head_dim_v)
    given = _options_of(c)
    if c.values == "poison":
        _poison(c, rng, q, k, v, dout, given)
    dlse = None
    if c.with_dlse:
        batch = () if c.batch is None else (c.batch,)
        shape = (*batch, heads_q, c.seqlen_q)
        dlse = rng.standard_normal(shape).astype("f8" if c.dtype == "float64" else "f4")
    return Inputs(q, k, v, dout, dlse, c.scale, c.causal, c.window, c.layout, **given)


def _options_of(c: Case) -> dict[str, Any]:
    """Return the arguments of a case's options."""
    rng = _rng(c, 2)
    accum = "f8" if c.dtype == "float64" else "f4"
    heads, given = c.heads_kv * c.group, {}
    full = (c.batch or 1, heads, c.seqlen_q, c.seqlen_kv)
    if "packed" in c.options:
        given["cu_seqlens_q"], given["cu_seqlens_k"] = at = offsets(c)
        longest = (max(int(np.diff(x).max(initial=0)), 1) for x in at)
        full = (c.entries, heads, *longest)
    if "softcap" in c.options:
        given["softcap"] = float(rng.choice([0.8, 5.0, 40.0]))
    if "bias" in c.options:
        bias = rng.standard_normal(_some_axes(rng, full))
        if c.values == "poison" or rng.random() < 0.4:
            bias[rng.random(bias.shape) < 0.2] = -np.inf
            bias[..., rng.random(bias.shape[-1]) < 0.2] = -np.inf
        dtype = numpy_dtype(c.dtype) if rng.random() < 0.5 else accum
        given["bias"] = _pair_view(rng, bias.astype(dtype))
    if "mask" in c.options:
        mask = rng.random(_some_axes(rng, full)) < 0.7
        if mask.size and rng.random() < 0.5:
            mask[..., rng.integers(mask.shape[-2]), :] = False
        given["mask"] = _pair_view(rng, mask)
    if "alibi" in c.options:
        shape = full[:2] if rng.random() < 0.5 else full[1:2]
        given["alibi_slopes"] = rng.uniform(0, 0.3, shape).astype(accum)
    if "sinks" in c.options:
        sinks = 2 * rng.standard_normal(heads)
        if rng.random() < 0.2:
            sinks[0] = -np.inf
        given["sinks"] = sinks.astype(accum)
    if "dropout" in c.options:
        given["dropout_p"] = float(rng.choice([0.1, 0.4, 0.9]))
        given["seed"] = int(rng.integers(-(2**63), 2**63 - 1))
    return given


def _some_axes(rng: np.random.Generator, full: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape that broadcasts to `full`, of two or four axes."""
    shape = tuple(1 if rng.random() < 0.3 else n for n in full)
    return shape[2:] if rng.random() < 0.25 else shape


def _pair_view(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
    """Return an array equal to a bias or mask, sometimes with other strides."""
    kind = rng.choice(["contiguous", "turned", "every other", "reversed"])
    if kind == "turned":
        return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    if kind == "every other":
        return np.repeat(x, 2, axis=-1)[..., ::2]
    if kind == "reversed":
        return np.ascontiguousarray(x[..., ::-1, ::-1])[..., ::-1, ::-1]
    return x


def _array(
    c: Case, rng: np.random.Generator, view: str, seq: int, heads: int, dim: int, factor: str = ""
) -> np.ndarray:
    """Return values in a view of the given kind, with the axes of the case's layout.

    `factor`: "q", "k" or "v", where that matters.
    """
    batch = 1 if c.batch is None else c.batch
    x = rng.standard_normal((batch, seq, heads, dim))
    if c.values == "positive mean":
        x += 1
    elif c.values == "peaked":  # few keys get all the weight, so that a lost one shows
        x *= 3
    elif c.values == "large":
        x *= 8 if c.dtype == "float16" else 30  # whose gradients would overflow
    elif c.values == "growing" and factor in ("q", "k"):  # so do maxima, from tile to tile
        x = np.abs(x)
        if factor == "k":
            x *= np.linspace(0, rng.choice([2, 10, 40]), seq)[:, None, None]
    elif c.values == "far" and factor:  # scores differ little, and are exact, far away from 0
        x = np.rint(x / 2)
        if factor == "q":
            x[..., 0] = np.sign(c.scale or 1) * 512
            if rng.random() < 0.3:
                x[..., 0] *= rng.choice([-1, 1], x.shape[:-1])
        elif factor == "k":
            x[..., 0] = 4096
        else:  # what a tile weighs shows
            x = x / 4 + np.linspace(-1, 1, seq)[:, None, None]
    if view == "shared heads":
        x[:] = x[:, :, :1]
    x = x.astype(numpy_dtype(c.dtype))
    y = _view(x, view)
    if c.layout == "bhsd":
        y = y.transpose(0, 2, 1, 3)
    return y[0] if c.batch is None else y


def _view(x: np.ndarray, view: str) -> np.ndarray:
    """Return an array equal to `x` with other strides."""
    batch, seq, heads, dim = x.shape
    if view == "heads first":
        return np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    if view == "inside":  # of a larger buffer, whose rest is NaN
        buffer = np.full((batch, seq + 3, heads + 1, dim + 5), np.nan, x.dtype)
        y = buffer[:, 2 : 2 + seq, :heads, 3 : 3 + dim]
        y[...] = x
        return y
    if view == "apart":  # the same, with rows at multiples of 16 bytes
        buffer = np.full((batch, seq + 3, heads + 1, dim + 16), np.nan, x.dtype)
        y = buffer[:, 2 : 2 + seq, :heads, 8 : 8 + dim]
        y[...] = x
        return y
    if view == "reversed":
        return np.ascontiguousarray(x[:, ::-1, ::-1, ::-1])[:, ::-1, ::-1, ::-1]
    if view == "every other":
        buffer = np.full((batch, 2 * seq, heads, 2 * dim), np.nan, x.dtype)
        y = buffer[:, ::2, :, ::2]
        y[...] = x
        return y
    if view == "shared heads":
        return np.broadcast_to(x[:, :, :1], x.shape)
    if view == "offset":  # contiguous rows at odd addresses
        buffer = np.empty(x.size + 1, x.dtype)
        buffer[1:] = x.ravel()
        return buffer[1:].reshape(x.shape)
    return x


def visible(case: Case) -> np.ndarray:
    """Return which query sees which key, by the definition."""
    position = np.arange(case.seqlen_q)[:, None] + case.seqlen_kv - case.seqlen_q
    key = np.arange(case.seqlen_kv)[None, :]
    left, right = case.window
    seen = (key <= position) if case.causal else np.ones((case.seqlen_q, case.seqlen_kv), bool)
    if left >= 0:
        seen &= key >= position - left
    if right >= 0:
        seen &= key <= position + right
    return seen


def _poison(
    c: Case,
    rng: np.random.Generator,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    dout: np.ndarray,
    given: dict[str, Any],
) -> None:
    """Put NaN and infinities where nobody looks, and into two arrays where some do."""
    axis = -3 if c.layout == "bshd" else -2  # of the sequence
    if "packed" in c.options:
        for x, at in ((q, 0), (k, 1), (v, 1), (dout, 0)):
            if x.flags.writeable:  # not a broadcast view
                cuts = offsets(c)[at]
                rows = np.moveaxis(x, axis, 0)
                rows[: cuts[0]], rows[cuts[-1] :] = np.nan, np.inf
        return
    seen: Any = np.broadcast_to(visible(c), (c.batch or 1, c.heads_kv * c.group, *visible(c).shape))
    mask, bias = given.get("mask"), given.get("bias")
    if mask is not None:
        seen = seen & mask
    if bias is not None:
        seen = seen & ~np.isneginf(bias.astype("f8"))
        if bias.shape == seen.shape:
            bias[~seen & ~np.isneginf(bias.astype("f8"))] = np.nan
    seen = seen.any(axis=(0, 1))  # by anybody
    unseen_keys, blind_queries = ~seen.any(axis=0), ~seen.any(axis=1)
    for x, rows, what in (
        (k, unseen_keys, np.nan),
        (v, unseen_keys, np.inf),
        (q, blind_queries, np.inf),
        (dout, blind_queries, np.nan),
    ):
        if x.flags.writeable:  # not a broadcast view
            np.moveaxis(x, axis, 0)[rows] = what

    def some(seen: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Return two rows of `x` that some look at and others do not."""
        partly = np.flatnonzero(seen.any(axis=1) & ~seen.all(axis=1))
        return rng.permutation(partly if x.flags.writeable else partly[:0])[:2]

    victims = rng.choice(["v dout", "k", "q", "k q"]).split()
    if "v" in victims:
        # Infinities only where no probability is 0, or rounded to it: 0 * inf is NaN.
        finite = c.scale is None and not {"alibi", "dropout"} & set(c.options)
        kinds = (np.nan, np.inf, -np.inf, 1) if finite else (np.nan,)
        for x, chosen in ((v, some(seen.T, v)), (dout, some(seen, dout))):
            if chosen.size:
                rows = np.moveaxis(x, axis, 0)
                rows[chosen] = rng.choice(kinds, rows[chosen].shape)
        return
    # Scores of -inf: a factor that is infinite in one column, but has no weight.
    for name, x, other, col, chosen in (
        ("k", k, q, -1, some(seen.T, k)),
        ("q", q, k, 0, some(seen, q)),
    ):
        apart = c.head_dim > 1 or len(victims) == 1  # columns
        if name in victims and chosen.size and other.flags.writeable and apart:
            finite = np.isfinite(other[..., col])
            other[..., col] = np.where(finite, np.abs(other[..., col]) + 1, other[..., col])
            np.moveaxis(x, axis, 0)[chosen, ..., col] = -np.inf * (c.scale or 1.0)
