# SPDX-License-Identifier: Apache-2.0
"""hypothesis strategies that draw a whole call: sizes, options, strides, values, schedule.

A `Case` is a small record; its repr is the repro. `arrays_of` turns it into arrays.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from check import Inputs
from hypothesis import strategies as st
from matrix import Row

VIEWS = ("contiguous", "heads first", "inside", "reversed", "every other", "shared heads", "offset")
VALUES = ("normal", "positive mean", "peaked", "large", "poison")


@dataclass(frozen=True)
class Case:
    """One call of both passes."""

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

    def tiles(self, tile_q: int, tile_kv: int) -> str:
        """Say whether rows and keys span more than one tile each, in some entry."""
        rows, keys = self.seqlen_q, self.seqlen_kv
        if "packed" in self.options:
            rows, keys = (int(np.diff(at).max(initial=0)) for at in offsets(self))
        return f"{'n' if rows > tile_q else '1'}x{'n' if keys > tile_kv else '1'}"


def lengths(tile: int) -> st.SearchStrategy[int]:
    """Lengths around the edges of tiles, up to about four of them; mostly more than one."""
    edges = [0, 1, tile - 1, tile, tile + 1, 2 * tile - 1, 2 * tile, 2 * tile + 1]
    several = st.integers(tile + 1, 4 * tile if tile <= 32 else 2 * tile + 20)
    return several | several | st.sampled_from(edges) | st.integers(1, 2 * tile)


@st.composite
def cases(draw: st.DrawFn, row: Row) -> Case:
    """Draw a call that the plans of `row` can serve."""
    tile_q, tile_kv = row.tile
    seqlen_q, seqlen_kv = draw(lengths(tile_q)), draw(lengths(tile_kv))
    sizes = st.integers(1, row.head_dim) | st.just(row.head_dim)
    sizes_v = st.integers(1, row.head_dim_v) | st.just(row.head_dim_v)
    # By the bits of one number: hypothesis would change a set, once drawn, only a little.
    chosen = draw(st.integers(0, 2 ** len(row.options) - 1))
    options = [name for bit, name in enumerate(row.options) if chosen >> bit & 1]
    packed = "packed" in options
    if packed:  # so that entries span several tiles too
        seqlen_q, seqlen_kv = seqlen_q + draw(lengths(tile_q)), seqlen_kv + draw(lengths(tile_kv))
    side = st.just(-1) | st.integers(0, max(seqlen_kv, 1)) | st.integers(0, tile_kv)
    return Case(
        dtype=row.dtype,
        batch=None if packed else draw(st.sampled_from([None, 1, 2])),
        heads_kv=draw(st.integers(1, 2)),
        group=draw(st.integers(1, 3)),
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        head_dim=draw(sizes),
        head_dim_v=draw(sizes_v),
        causal=draw(st.booleans()),
        window=draw(st.just((-1, -1)) | st.tuples(side, side)),
        scale=draw(st.none() | st.sampled_from([0.3, -0.2, 1.0])),
        layout=draw(st.sampled_from(["bshd", "bhsd"])),
        views=draw(st.tuples(*[st.just("contiguous") | st.sampled_from(VIEWS)] * 4)),
        values=draw(st.sampled_from((*VALUES, *["poison"] * 3) if options else VALUES)),
        with_dlse=draw(st.booleans()),
        seed=draw(st.integers(0, 10**6)),
        schedule=draw(st.integers(0, 6)),
        options=tuple(options),
        entries=draw(st.sampled_from([1, 2, 2, 3, 4, 0])) if packed else 1,
    )


def _rng(case: Case, purpose: int) -> np.random.Generator:
    """Return a generator that differs for cases that differ in anything."""
    return np.random.default_rng((zlib.crc32(repr(case).encode()), purpose))


def offsets(case: Case) -> list[np.ndarray]:
    """Return the offsets of a packed case: slack around the entries, some of them empty."""
    rng = _rng(case, 1)
    found = []
    for total in (case.seqlen_q, case.seqlen_kv):
        cuts = np.sort(rng.integers(0, total + 1, case.entries + 1))
        if rng.random() < 0.5:
            cuts[0], cuts[-1] = 0, total
        if case.entries > 1 and rng.random() < 0.3:
            cuts[1] = cuts[0]
        found.append(cuts.astype(rng.choice([np.int32, np.int64])))
    return found


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def arrays_of(case: Case) -> Inputs:
    """Return the arrays of a case, as NumPy arrays."""
    c, rng = case, np.random.default_rng(case.seed)
    heads_q = c.heads_kv * c.group
    q = _array(c, rng, c.views[0], c.seqlen_q, heads_q, c.head_dim)
    k = _array(c, rng, c.views[1], c.seqlen_kv, c.heads_kv, c.head_dim)
    v = _array(c, rng, c.views[2], c.seqlen_kv, c.heads_kv, c.head_dim_v)
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
    c: Case, rng: np.random.Generator, view: str, seq: int, heads: int, dim: int
) -> np.ndarray:
    """Return values in a view of the given kind, with the axes of the case's layout."""
    batch = 1 if c.batch is None else c.batch
    x = rng.standard_normal((batch, seq, heads, dim))
    if c.values == "positive mean":
        x += 1
    elif c.values == "peaked":  # few keys get all the weight, so that a lost one shows
        x *= 3
    elif c.values == "large":
        x *= 8 if c.dtype == "float16" else 30  # whose gradients would overflow
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
    """Put NaN and infinities where nobody looks, and one NaN where some do."""
    axis = -3 if c.layout == "bshd" else -2  # of the sequence
    if "packed" in c.options:
        for x, at in ((q, 0), (k, 1), (v, 1), (dout, 0)):
            if x.flags.writeable:  # not a broadcast view
                cuts = offsets(c)[at]
                rows = np.moveaxis(x, axis, 0)
                rows[: cuts[0]], rows[cuts[-1] :] = np.nan, np.inf
        return
    seen = np.broadcast_to(visible(c), (c.batch or 1, c.heads_kv * c.group, *visible(c).shape))
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
    some = np.flatnonzero(seen.any(axis=0) & ~seen.all(axis=0))
    if some.size and v.flags.writeable:
        np.moveaxis(v, axis, 0)[rng.choice(some)] = np.nan
