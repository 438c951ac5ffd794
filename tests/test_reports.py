# SPDX-License-Identifier: Apache-2.0
"""Faults that were reported in public about attention libraries and about CuPy, as tests.

The comment above a test names the report: an id of ours, then the threads. A test stands for the
whole kind of fault, so it also runs the neighbours of what was reported. Both passes write to
memory full of NaN and are compared with the reference. Lengths are those of the report or, where
they only cost time, shorter ones with as many kinds of tiles. Options and packed sequences are in
test_reports_options.py, and what needs a GPU is in test_reports_gpu.py.

`COVERED` and `LATER`, at the end, list the reports that have no test here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from check import Inputs, assert_close, bounds, exact
from conftest import Backend
from reports import (
    ARRAYS,
    call,
    changed,
    check,
    every_dtype,
    normal,
    run,
    same,
    solve,
    turns,
    weights,
)
from run import on, schedule

import cuflash
from cuflash import compile

# --- nothing to do -------------------------------------------------------------------------------


# A1: Dao-AILab/flash-attention#1159, NVIDIA/cudnn-frontend#101, pytorch/pytorch#195812
@every_dtype
@pytest.mark.parametrize("causal", [False, True])
def test_an_empty_batch_launches_nothing(
    backend: Backend, monkeypatch: pytest.MonkeyPatch, dtype: str, causal: bool
) -> None:
    """A program with a fixed graph switches a branch off by a batch of zero, and got an error."""

    def launch(*_: Any) -> None:
        raise AssertionError("a kernel was launched")

    for kind in (compile.CpuKernel, compile.GpuKernel):
        monkeypatch.setattr(kind, "launch", launch)
    inputs = call((3952, 16), heads=(10, 10), batch=0, dtype=dtype, causal=causal)
    results = solve(backend, inputs)
    assert results.out.shape == (0, 3952, 10, 64) and results.lse.shape == (0, 10, 3952)
    assert results.dk.shape == (0, 16, 10, 64)


# A8: pytorch/pytorch#46572
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
@pytest.mark.parametrize("lengths", [(0, 33), (0, 0), (9, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_an_empty_call_leaves_no_error_behind(
    backend: Backend, lengths: tuple[int, int], heads: tuple[int, int], causal: bool
) -> None:
    """A grid of zero blocks set an error flag that a later, unrelated call reported."""
    results = solve(backend, call(lengths, heads=heads, batch=2, causal=causal))
    assert not results.dk.any() and not results.dv.any()
    assert backend.xp.arange(5).sum() == 10
    solve(backend, call((5, 33), heads=heads, batch=2, causal=causal))


# P1: Dao-AILab/flash-attention#978
@turns("lengths", [(9, 0), (9, 4), (70, 3)])
def test_lse_of_a_row_without_keys_is_minus_infinity(
    backend: Backend, lengths: tuple[int, int], dtype: str
) -> None:
    """It was plus infinity, which dominates when partial results are merged."""
    results = solve(backend, call(lengths, batch=2, dtype=dtype, causal=True))
    dead = lengths[0] - lengths[1]
    assert (results.lse[..., :dead] == -np.inf).all() and not results.out[:, :dead].any()
    assert np.isfinite(results.lse[..., dead:]).all()


# --- rows that see no key ------------------------------------------------------------------------


# B3: Dao-AILab/flash-attention#1778
@turns("lengths", [(200, 100), (66, 65), (64, 1), (129, 2), (300, 7)])
def test_more_queries_than_keys(backend: Backend, lengths: tuple[int, int], dtype: str) -> None:
    """Causal: the first rows see nothing, and the number of their key tiles became negative."""
    if backend.name == "gpu" and lengths == (200, 100):
        lengths = 2048, 1024
    results = solve(backend, call(lengths, dtype=dtype, causal=True))
    dead = lengths[0] - lengths[1]
    assert not results.out[:, :dead].any() and not results.dq[:, :dead].any()
    assert (results.lse[..., :dead] == -np.inf).all()


# B5: Dao-AILab/flash-attention#443
@turns("sq,causal", [76, 34, 146, 1], [True, False])
def test_a_single_key(backend: Backend, sq: int, causal: bool, dtype: str) -> None:
    """Many queries over one key had NaN in dq, which is 0: a softmax of one score is constant."""
    inputs = call((sq, 1), heads=(1, 1), head_dim=32, dtype=dtype, size=3.0, causal=causal)
    solve(backend, inputs)
    # With whole numbers all sums are exact, and so is the result.
    results = solve(backend, changed(inputs, lambda x: np.ones_like(x), "dout", "v"))
    assert not results.dq.any() and not results.dk.any()
    assert (results.dv == (1 if causal else sq)).all()


# B7: Xilinx/brevitas#1591
@pytest.mark.parametrize("window", [(-1, -1), (3, 2)])
@pytest.mark.parametrize("dlse", [None, np.inf])
def test_zero_gradients_of_dead_rows(
    backend: Backend, window: tuple[int, int], dlse: float | None
) -> None:
    """A zero times the NaN probability of a row without keys is NaN again, in dk and dv."""
    inputs = call((100, 40), dtype="float32", causal=window == (-1, -1), window=window)
    dead = 60 if inputs.causal else 60 - window[1]
    inputs.dout[:, :dead] = 0
    if dlse is not None:
        inputs = dataclasses.replace(inputs, dlse=normal(4, (1, 2, 100), "float32"))
        inputs.dlse[..., :dead] = dlse
    results = solve(backend, inputs)
    assert all(np.isfinite(x).all() for x in results.grads)


# --- what nobody sees ----------------------------------------------------------------------------


# C1: pytorch/pytorch#101967
@turns("poison,window", [np.nan, np.inf, -np.inf], [(5, 0), (70, -1)])
def test_keys_hidden_from_all_may_be_anything(
    backend: Backend, window: tuple[int, int], poison: float, dtype: str
) -> None:
    """A NaN in a hidden key reached the output: its weight is 0, and 0 times NaN is NaN."""
    clean = call((20, 150), heads=(4, 2), dtype=dtype, window=window)
    hidden = 130 - window[0]  # first key that the first query sees
    want = solve(backend, clean)
    for names in (("k",), ("v",), ("k", "v")):
        inputs = changed(clean, np.copy, *names)
        for name in names:
            getattr(inputs, name)[:, :hidden] = poison
        results = run(backend, inputs)
        same(results, want)
        assert not results.dk[:, :hidden].any() and not results.dv[:, :hidden].any()


# C2: Dao-AILab/flash-attention#2374, Dao-AILab/flash-attention#1745
@turns("poison,queries", [np.nan, np.inf], [1, 9])
def test_a_cache_that_is_not_filled(
    backend: Backend, queries: int, poison: float, dtype: str
) -> None:
    """Caches hold anything past the length in use, and tiles were loaded whole.

    The same with pages: flashinfer-ai/flashinfer#941, vllm-project/vllm#936.
    """
    lengths = [32, 64, 96, 48, 13, 1, 15, 17, 30, 127]
    inputs = call((queries, 128), batch=len(lengths), heads=(4, 2), dtype=dtype, causal=True)
    for b, n in enumerate(lengths):
        inputs.k[b, n:] = inputs.v[b, n:] = poison
    for b, n in enumerate(lengths):
        cut = lambda x, b=b: x[b : b + 1]
        used = lambda x, b=b, n=n: x[b : b + 1, :n]
        results = solve(backend, changed(changed(inputs, cut, "q", "dout"), used, "k", "v"))
        assert all(np.isfinite(x).all() for x in (results.out, *results.grads))


# --- edges of causal order and windows -----------------------------------------------------------


# D1: Dao-AILab/flash-attention#282, pytorch/pytorch#108108, ml-explore/mlx#2835
@turns("lengths", [(2, 5), (1, 33), (3, 70), (64, 65), (33, 96), (70, 90)])
def test_causal_order_is_aligned_at_the_last_token(
    backend: Backend, lengths: tuple[int, int], dtype: str
) -> None:
    """Tokens that continue a cache saw only its beginning: aligned at the first token."""
    sq, sk = lengths
    seen = weights(backend, lengths, dtype, causal=True) > 0
    for i in range(sq):
        assert seen[i].tolist() == [True] * (sk - sq + i + 1) + [False] * (sq - 1 - i)


HUGE = 2**31 - 1


# D3: Dao-AILab/flash-attention#895
@pytest.mark.parametrize("lengths", [(96, 32), (32, 96), (130, 70)])
@pytest.mark.parametrize(
    "window",
    [(-1, HUGE), (HUGE, -1), (HUGE, HUGE), (2**40, 2**70), (HUGE - 1, HUGE - 100), (129, 129)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_beyond_the_lengths_is_open(
    backend: Backend, lengths: tuple[int, int], window: tuple[int, int], causal: bool
) -> None:
    """The bound was cut to the number of keys, which hides keys when there are more queries."""
    inputs = call(lengths, heads=(1, 1), causal=causal)
    results = run(backend, dataclasses.replace(inputs, window=window))
    same(results, run(backend, inputs))
    check(results, inputs)


# D5: huggingface/transformers#39408, NVIDIA/TransformerEngine#1197, zml/zml#763
@turns(
    "window,lengths",
    [(7, 0), (0, 0), (0, 7), (1, 1), (63, 0), (64, 0), (31, 32), (-1, 3), (3, -1)],
    [(64, 64), (20, 80)],
)
def test_windows_include_both_ends(
    backend: Backend, lengths: tuple[int, int], window: tuple[int, int], dtype: str
) -> None:
    """Some count the token itself in the window's size: models ran with one key too many."""
    sq, sk = lengths
    seen = weights(backend, lengths, dtype, window=window) > 0
    left, right = (sk if side == -1 else side for side in window)
    for i in range(sq):
        p = sk - sq + i
        assert np.flatnonzero(seen[i]).tolist() == [
            *range(max(p - left, 0), min(p + right, sk - 1) + 1)
        ]
    if window == (7, 0) and sq == sk:
        assert seen.sum(axis=1).tolist() == [min(i, 7) + 1 for i in range(64)]


# D10: huggingface/transformers#39408
@turns("right,lengths", [5, -1, 1, 64], [(96, 96), (70, 130), (100, 40)])
def test_causal_order_closes_the_right_side(
    backend: Backend, lengths: tuple[int, int], right: int, dtype: str
) -> None:
    """A wrapper passes the window's size for both sides, also with causal order."""
    inputs = call(lengths, heads=(2, 1), dtype=dtype, window=(5, 0), causal=True)
    want = run(backend, inputs)
    same(run(backend, dataclasses.replace(inputs, window=(5, right))), want)
    same(run(backend, dataclasses.replace(inputs, causal=False)), want)
    if right == 5:
        check(want, inputs)


# D8: Dao-AILab/flash-attention#436
@turns(
    "lengths,window",
    [(127, 190), (64, 65), (65, 129), (1, 127), (127, 128), (100, 190), (63, 191)],
    [(-1, -1), (50, 20)],
)
def test_the_diagonal_crosses_two_key_tiles(
    backend: Backend, lengths: tuple[int, int], window: tuple[int, int], dtype: str
) -> None:
    """With more keys than queries it was not enough to mask the last key tile."""
    solve(backend, call(lengths, dtype=dtype, causal=window == (-1, -1), window=window))


# --- lengths that do not fill a tile -------------------------------------------------------------


# E2: flagos-ai/FlagGems#898
@turns("length,heads,layout", [100, 65, 63, 129], [(2, 2), (4, 2)], ["bshd", "bhsd"])
def test_a_tail_tile_stays_in_its_head(
    backend: Backend, layout: str, heads: tuple[int, int], length: int, dtype: str
) -> None:
    """The last tile of one head was written into the first rows of the next head's dv."""
    inputs = call((length, length), heads=heads, dtype=dtype, layout=layout)
    if layout == "bhsd":
        inputs = changed(inputs, lambda x: np.ascontiguousarray(x.swapaxes(1, 2)))
    solve(backend, inputs)


# E5: Dao-AILab/flash-attention#334
@every_dtype
@pytest.mark.parametrize("head_dim", [1, 16, 24, 64])
@pytest.mark.parametrize("causal", [False, True])
def test_everything_is_one(backend: Backend, head_dim: int, causal: bool, dtype: str) -> None:
    """The smallest problem had NaN in dq: rows past the end were not cleared."""
    sizes = dict(heads=(1, 1), head_dim=head_dim, dtype=dtype, size=3.0)
    inputs = call((1, 1), causal=causal, **sizes)  # type: ignore[arg-type]
    inputs = changed(inputs, np.ones_like, "dout")
    results = solve(backend, inputs)
    np.testing.assert_array_equal(results.out, inputs.v)
    np.testing.assert_array_equal(results.dv, inputs.dout)
    assert not results.dq.any() and not results.dk.any()


class Framed:
    """Destinations that are the inner part of larger arrays, which must stay as they were."""

    VALUE = 7.0

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.buffers: list[tuple[Any, tuple[slice, ...]]] = []

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> Any:
        margins = (1, 3, 2, 8)[-len(shape) :]
        sizes = [n + 2 * m for n, m in zip(shape, margins, strict=True)]
        inner = tuple(slice(m, m + n) for n, m in zip(shape, margins, strict=True))
        buffer = self.backend.array(np.full(sizes, self.VALUE, dtype))
        self.buffers.append((buffer, inner))
        return buffer[inner]

    def assert_intact(self) -> None:
        for buffer, inner in self.buffers:
            frame = self.backend.host(buffer).astype(np.float64)
            assert (frame[inner] != self.VALUE).any()
            frame[inner] = self.VALUE
            assert (frame == self.VALUE).all()


# E6: triton-lang/triton#2059
@turns("lengths", [(17, 512), (3, 70), (1, 65), (63, 200), (70, 17)])
def test_fewer_queries_than_a_tile_has_rows(
    backend: Backend, lengths: tuple[int, int], dtype: str
) -> None:
    """Results drifted once the queries did not fill a tile; rows past the end are not stored."""
    frame = Framed(backend)
    solve(backend, call(lengths, batch=2, dtype=dtype), frame)
    assert len(frame.buffers) == 5
    frame.assert_intact()


# E8: amorehead/jvp_flash_attention#13
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [425, 31, 33, 95, 97, 161])
def test_backward_takes_every_length_that_forward_takes(
    backend: Backend, length: int, causal: bool
) -> None:
    """Training stopped at the first length that was no multiple of 32."""
    if backend.name == "gpu" and length == 425:
        length = 4250
    solve(backend, call((length, length), heads=(1, 1), causal=causal))


# --- head sizes ----------------------------------------------------------------------------------


# F1: Dao-AILab/flash-attention#2896, Dao-AILab/flash-attention#2492
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [("bfloat16", d) for d in (72, 104, 40, 8)] + [("float16", d) for d in (72, 104, 1, 33, 65)],
)
def test_head_sizes_that_are_padded(backend: Backend, head_dim: int, dtype: str) -> None:
    """The tail of an accumulator was never written, and dq read what had been there before."""
    length, heads = (512, 8) if backend.name == "gpu" else (130, 2)
    inputs = call((length, length), heads=(heads, heads), head_dim=head_dim, dtype=dtype)
    solve(backend, inputs, Framed(backend))


# F3: Dao-AILab/flash-attention#498
@turns("head_dim", [160, 192, 224, 256, 320, 512], dtypes=("float32", "float16"))
def test_large_head_sizes(backend: Backend, head_dim: int, dtype: str) -> None:
    """Gradients were off by hundreds from 160 on, with one version of the compiler."""
    small = backend.name == "cpu"
    heads, length = ((1, 1), 70 if head_dim > 256 else 97) if small else ((2, 2), 97)
    solve(backend, call((length, length), heads=heads, head_dim=head_dim, dtype=dtype))


# F5: Dao-AILab/flash-attention#2552, Dao-AILab/flash-attention#753
@turns(
    "sizes",
    [(128, 96), (128, 8), (128, 24), (128, 40), (128, 72), (64, 128), (8, 96), (1, 65)],
    dtypes=("float16", "float32"),
)
def test_values_of_another_size(backend: Backend, sizes: tuple[int, int], dtype: str) -> None:
    """Columns of dv were counted by the head size of q and k; some were wrong."""
    heads = (2, 2) if backend.name == "gpu" else (1, 1)
    inputs = call((130, 130), heads=heads, head_dim=sizes[0], head_dim_v=sizes[1], dtype=dtype)
    solve(backend, inputs, Framed(backend))


# F7: triton-lang/triton#621
@turns(
    "sizes",
    [(128, 64), (96, 64), (256, 192), (512, 448), (65, 64)],
    dtypes=("float16", "float32"),
)
def test_all_the_signal_is_in_the_last_channels(
    backend: Backend, sizes: tuple[int, int], dtype: str
) -> None:
    """A head size was fixed in the code, and the channels past it were left out."""
    head_dim, silent = sizes
    length = 128 if head_dim <= 128 else 40
    inputs = call((length, length), heads=(1, 1), head_dim=head_dim, dtype=dtype, size=2.0)
    for name in ("q", "k", "v"):
        getattr(inputs, name)[..., :silent] = 0
    results = solve(backend, inputs)
    assert all(x[..., silent:].any() for x in (results.out, results.dq, results.dk))


# --- grouped heads -------------------------------------------------------------------------------


# G1: marin-community/levanter#449
@turns("heads,causal", [(8, 2), (4, 1), (6, 3)], [True, False])
def test_gradients_of_shared_heads_are_sums(
    backend: Backend, heads: tuple[int, int], causal: bool, dtype: str
) -> None:
    """The backward pass did not sum over the query heads that share a key head."""
    inputs = call((70, 70), heads=heads, dtype=dtype, causal=causal)
    results = solve(backend, inputs)
    group = heads[0] // heads[1]
    apart = run(backend, changed(inputs, lambda x: np.repeat(x, group, axis=2), "k", "v"))
    allowed = bounds(inputs, exact(inputs, backward=True))
    for name in ("dk", "dv"):
        # Each head's own gradient is rounded to the dtype before they are summed here.
        each = getattr(apart, name).astype(np.float64).reshape(1, 70, heads[1], group, 64)
        slack = group * np.abs(each).max() * float(ml_dtypes.finfo(inputs.dtype).eps)
        assert_close(name, getattr(results, name), each.sum(axis=3), 2 * allowed[name] + slack)


# G3: Dao-AILab/flash-attention#708
@pytest.mark.parametrize("queries", [1, 2, 4, 8])
@pytest.mark.parametrize("used", [50, 33, 8])
def test_as_many_queries_as_heads_in_a_group(backend: Backend, queries: int, used: int) -> None:
    """A short prompt was mistaken for heads folded into the sequence axis, as decoding does."""
    inputs = call((queries, 50), heads=(8, 2), batch=2, causal=True)
    solve(backend, changed(inputs, lambda x: x[:, :used], "k", "v"))


# G4: flashinfer-ai/flashinfer#5245
@pytest.mark.parametrize("heads", [(32, 8), (8, 2), (6, 1)])
@pytest.mark.parametrize("used", [90, 1, 64])
def test_lse_of_every_head_for_a_single_query(
    backend: Backend, heads: tuple[int, int], used: int
) -> None:
    """lse was written for the first head of each group only."""
    inputs = call((1, 90), heads=heads, head_dim=128, batch=3, backward=False)
    inputs = changed(inputs, lambda x: x[:, :used], "k", "v")
    assert np.isfinite(solve(backend, inputs).lse).all()


# G6: xlite-dev/ffpa-attn#301
def test_shared_heads_are_not_copied(backend: Backend) -> None:
    """The backward pass repeated keys and values for every query head: many times the memory."""
    gpu = backend.name == "gpu"
    lengths, heads = ((256, 12288), (16, 2)) if gpu else ((32, 320), (16, 1))
    inputs = on(backend, call(lengths, heads=heads, head_dim=128))

    def both() -> None:
        _, vjp = cuflash.attention_vjp(inputs.q, inputs.k, inputs.v)
        vjp(inputs.dout)

    both()
    if gpu:
        pool = backend.xp.cuda.MemoryPool()
        with backend.xp.cuda.using_allocator(pool.malloc):
            both()
            backend.xp.cuda.Device().synchronize()
        most = pool.total_bytes()
    else:
        tracemalloc.start()
        both()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    given = sum(x.nbytes for x in (inputs.q, inputs.k, inputs.v))
    results = 2 * inputs.q.nbytes + 2 * inputs.k.nbytes
    assert results <= most < 3 * 2 * given  # 2: as if they were float32


# --- strides and views ---------------------------------------------------------------------------


# H1: Dao-AILab/flash-attention#355
@turns("kind", ["transposed", "expanded", "every other", "reversed"])
def test_dout_has_strides_of_its_own(backend: Backend, kind: str, dtype: str) -> None:
    """The backward pass took the strides of the output for those of the incoming gradient."""
    inputs = call((32, 32), heads=(4, 1), head_dim=128, batch=2, dtype=dtype)
    make: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "transposed": lambda x: x.reshape(4, 128, 2, 32).transpose(2, 3, 0, 1),
        "expanded": lambda x: np.broadcast_to(np.ones(1, x.dtype), x.shape),  # of a plain sum
        "every other": lambda x: np.repeat(x, 2, axis=1)[:, 1::2],
        "reversed": lambda x: x[:, ::-1],
    }
    inputs = changed(inputs, make[kind], "dout")
    results = solve(backend, inputs)
    same(results, run(backend, changed(inputs, np.ascontiguousarray, "dout")))


# H3: flagos-ai/FlagGems#5896
@turns("name", ["v", "q", "k", "dout"])
def test_one_array_is_a_transposed_view(backend: Backend, name: str, dtype: str) -> None:
    """Values that had come out of another operator as a view were read as if contiguous."""
    inputs = call((60, 60), heads=(2, 2), batch=2, dtype=dtype)
    view = changed(inputs, lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2), name)
    assert not getattr(view, name).flags.c_contiguous
    same(solve(backend, view), run(backend, inputs))


# H5: cupy/cupy#10303, cupy/cupy#10172, cupy/cupy#5665
@turns("axis,names", [1, 2, 3, 0], [("k", "v"), ("q",), ARRAYS])
def test_reversed_views(backend: Backend, names: tuple[str, ...], axis: int, dtype: str) -> None:
    """Negative strides were taken for positive ones, or divided as unsigned numbers."""
    inputs = changed(call((50, 50), batch=2, dtype=dtype), lambda x: np.flip(x, axis), *names)
    results = run(backend, inputs)
    check(results, inputs)
    # On tensor cores tiles are others where rows are not contiguous, and so may be the last bits.
    # Hopper's kernels leave reversed axes to those of other GPUs altogether.
    if dtype in ("float32", "float64") or (axis != 3 and not backend.is_hopper):
        same(results, run(backend, changed(inputs, np.ascontiguousarray)))


# H7: flashinfer-ai/flashinfer#3800, flashinfer-ai/flashinfer#3801
@every_dtype
def test_rows_of_larger_buffers(backend: Backend, dtype: str) -> None:
    """The batch stride was given as one token's: the first entry was right, the others were not."""
    inputs = Inputs(
        normal(0, (3, 80, 4, 64), dtype)[:, :33],
        normal(1, (3, 128, 2, 64), dtype)[:, 5:61],
        normal(2, (3, 90, 2, 64), dtype)[:, 10:66],
        normal(3, (3, 40, 4, 64), dtype)[:, 7:],
    )
    solve(backend, inputs, Framed(backend))


# H11: flashinfer-ai/flashinfer#4270
@every_dtype
@pytest.mark.parametrize("views_first", [False, True])
def test_the_same_shapes_with_other_strides(
    backend: Backend, views_first: bool, dtype: str
) -> None:
    """A plan had strides built in that its cache key lacked: the second call ran the first's."""
    kv = normal(5, (2, 64, 2, 2, 64), dtype)
    views = dataclasses.replace(call((64, 64), batch=2, dtype=dtype), k=kv[:, :, 0], v=kv[:, :, 1])
    copies = changed(views, np.ascontiguousarray, "k", "v")
    first, second = (views, copies) if views_first else (copies, views)
    want = solve(backend, first)
    same(run(backend, second), want)
    same(run(backend, first), want)


# H13: pytorch/pytorch#191937
@pytest.mark.parametrize("keys", [33, 65, 97])
@pytest.mark.parametrize("axis", [0, 2])
def test_broadcast_keys_and_values(backend: Backend, keys: int, axis: int) -> None:
    """Keys with a stride of 0 were wrong when they were one more than a multiple of 32."""
    inputs = call((20, 97), heads=(4, 4), head_dim=256, dtype="bfloat16", batch=2)
    first = (slice(None),) * axis + (slice(1),)
    inputs = changed(inputs, lambda x: np.broadcast_to(x[first], x.shape)[:, :keys], "k", "v")
    assert inputs.k.strides[axis] == 0
    if backend.name == "cpu":
        inputs = changed(inputs, lambda x: x[:1] if axis == 2 else x[:, :, :2])
    solve(backend, inputs)


# --- numbers at the limits -----------------------------------------------------------------------


# I1: pytorch/pytorch#121558, deepseek-ai/FlashMLA#68
@pytest.mark.parametrize(
    ("dtype", "value", "queries"),
    [
        ("bfloat16", 133120.0, 1),
        ("bfloat16", 133120.0, 65),
        ("float16", 65504.0, 1),
        ("float16", 4096.0, 65),
        ("float32", 2.0**60, 65),
        ("float64", 2.0**500, 65),
    ],
)
def test_equal_numbers_of_great_size(
    backend: Backend, dtype: str, value: float, queries: int
) -> None:
    """A score minus itself was not 0: rounded for the maximum, unrounded in the exponent."""
    inputs = call((queries, 1), heads=(1, 1), dtype=dtype)
    inputs = changed(inputs, lambda x: np.full_like(x, value), "q", "k", "v")
    inputs = changed(inputs, np.ones_like, "dout")
    results = solve(backend, inputs)
    assert (results.out == value).all()
    assert not results.dq.any() and not results.dk.any() and (results.dv == queries).all()


# I3: ohdearquant/lattice#361
@pytest.mark.parametrize(
    ("dtype", "score"),
    [
        ("float16", -2e4),
        ("float32", -2e4),
        ("float32", -3e38),
        ("bfloat16", -3e38),
        ("float64", -1e308),
    ],
)
@pytest.mark.parametrize("keys", [2, 65, 130])
@pytest.mark.parametrize("side", ["left", "right"])
def test_hidden_keys_weigh_less_than_any_score(
    backend: Backend, dtype: str, score: float, keys: int, side: str
) -> None:
    """Hidden keys scored -10000, which is more than a visible key may score."""
    rows = 1 if side == "left" else keys
    inputs = call((rows, keys), heads=(1, 1), head_dim=16, dtype=dtype, scale=1.0)
    inputs = dataclasses.replace(inputs, window=(0, -1), causal=side == "right")
    inputs = changed(inputs, np.zeros_like, "q", "k")
    inputs = changed(inputs, lambda x: np.full_like(x, 100), "v")
    inputs.q[..., 0], inputs.k[..., 0] = score, 1
    inputs.v[:, -1] = 1
    results = solve(backend, inputs)
    assert (results.out[:, -1] == 1).all() and (results.out[:, :-1] == 100).all()


# I5: ggml-org/llama.cpp#6646, ggml-org/llama.cpp#17558, ggml-org/llama.cpp#7805
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_beyond_half_precision(backend: Backend, sign: int) -> None:
    """Products of q and k, and even the scaled scores, may exceed the range of float16."""
    inputs = call((5, 40), head_dim=128)
    inputs = changed(inputs, lambda x: np.full_like(x, 60), "q", "k")
    inputs.q[...] *= sign
    inputs.k[:, ::3, :, :4] = 59
    assert np.abs(solve(backend, inputs).lse).max() > 4e4


# I6: NVIDIA/FasterTransformer#43
@pytest.mark.parametrize(
    ("dtype", "value"),
    [("float32", 5.0), ("float32", -5.0), ("bfloat16", 5.0), ("float64", 20.0), ("float64", -20.0)],
)
@pytest.mark.parametrize("keys", [50, 200])
def test_exponentials_that_would_overflow(
    backend: Backend, dtype: str, value: float, keys: int
) -> None:
    """A softmax that did not subtract the maximum overflowed on a user's own model."""
    inputs = call((20, keys), dtype=dtype)
    rng = np.random.default_rng(1)
    inputs = changed(inputs, lambda x: np.full_like(x, value), "q")
    inputs = changed(inputs, lambda x: (rng.random(x.shape) + 5.5).astype(x.dtype), "k")
    limit = 709 if dtype == "float64" else 88
    assert np.abs(solve(backend, inputs).lse).min() > limit


# I8: Dao-AILab/flash-attention#385, Dao-AILab/flash-attention#1624
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_inputs_with_a_positive_mean(backend: Backend, dtype: str) -> None:
    """Nearly uniform weights: gradients are small differences of large sums."""
    length, heads = (1024, 2) if backend.name == "gpu" else (330, 1)
    inputs = call((length, length), heads=(heads, heads), head_dim=128, dtype=dtype)
    rng = np.random.default_rng(0)
    solve(backend, changed(inputs, lambda x: rng.random(x.shape).astype(x.dtype)))


# --- decoding, as plain attention over what is in use --------------------------------------------


# O4: infinigence/ApxInf#82
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_one_key_head_of_the_largest_common_size(backend: Backend, dtype: str) -> None:
    """The path of many keys gave NaN on a card with an unusual number of processors."""
    heads = (8, 1) if backend.name == "gpu" else (3, 1)
    solve(backend, call((50, 400), heads=heads, head_dim=256, dtype=dtype, backward=False))


# O7: EleutherAI/gpt-neox#1178
@turns("keys,heads", [33, 64, 65], [(4, 4), (4, 1)])
def test_the_last_token_sees_everything(
    backend: Backend, keys: int, heads: tuple[int, int], dtype: str
) -> None:
    """A single causal query over a cache saw only the first key."""
    inputs = call((1, keys), heads=heads, batch=2, dtype=dtype, causal=True)
    results = run(backend, inputs)
    same(results, run(backend, dataclasses.replace(inputs, causal=False)))
    check(results, inputs)


# O8: vllm-project/vllm#3585
@pytest.mark.parametrize("keys", [511, 512, 513, 1025])
def test_a_token_over_a_long_cache(backend: Backend, keys: int) -> None:
    """Grouped heads and partitions of 512 keys are easy to get wrong."""
    heads = (32, 8) if backend.name == "gpu" else (4, 2)
    solve(backend, call((1, keys), heads=heads, head_dim=128, causal=True, backward=False))


# --- lse -----------------------------------------------------------------------------------------


# P5: Dao-AILab/flash-attention#889, Dao-AILab/flash-attention#141
@turns("layout", ["bshd", "bhsd"])
def test_the_gradient_of_lse_counts(backend: Backend, layout: str, dtype: str) -> None:
    """A penalty on lse in the loss did nothing, without an error."""
    accum = "float64" if dtype == "float64" else "float32"
    inputs = call((50, 50), heads=(4, 2), dtype=dtype, causal=True, layout=layout)
    if layout == "bhsd":
        inputs = changed(inputs, lambda x: x.swapaxes(1, 2))
    inputs = changed(inputs, np.zeros_like, "dout")
    inputs = dataclasses.replace(inputs, dlse=normal(4, (1, 4, 50), accum))
    results = solve(backend, inputs)
    assert not results.dv.any()
    # dq = scale * sum_j p_ij dlse_i k_j, and the sum of p_ij k_j is attention with k for v.
    mean = cuflash.reference.attention(inputs.q, inputs.k, inputs.k, causal=True, layout=layout)
    dlse = inputs.dlse.astype(np.float64)[..., None]
    want = mean / 8 * (dlse.swapaxes(1, 2) if layout == "bshd" else dlse)
    allowed = bounds(inputs, exact(inputs, backward=True))
    assert_close("dq", results.dq, want, allowed["dq"])


# P8: Dao-AILab/flash-attention#404
@every_dtype
@pytest.mark.parametrize("causal", [False, True])
def test_parts_of_the_keys_are_merged_by_lse(backend: Backend, causal: bool, dtype: str) -> None:
    """Users could not tell whether lse holds the maximum: only the true one merges parts."""
    inputs = call((30, 150), heads=(4, 2), batch=2, dtype=dtype, causal=causal, backward=False)
    parts = []
    for a, z in ((0, 40), (40, 41), (41, 100), (100, 140), (140, 150)):
        # The last query stands at the last key of each part; the window moves it back.
        part = changed(inputs, lambda x, a=a, z=z: x[:, a:z], "k", "v")
        window = (-1, 150 - z) if causal else (-1, -1)
        parts.append(run(backend, dataclasses.replace(part, causal=False, window=window)))
    empty = [bool((part.lse == -np.inf).any()) for part in parts]
    assert empty == [False, False, False, False, causal]
    lses = np.array([part.lse for part in parts], np.float64)
    lse = np.logaddexp.reduce(lses)
    share = np.exp(lses - lse).swapaxes(2, 3)[..., None]
    merged = (share * np.array([part.out.astype(np.float64) for part in parts])).sum(axis=0)
    want = exact(inputs, backward=False)
    allowed = bounds(inputs, want)
    assert_close("lse", lse, want["lse"].astype(np.float64), 2 * allowed["lse"])
    # Each part is rounded to the dtype before the merge.
    top = float(np.abs(want["out"]).max() * ml_dtypes.finfo(inputs.dtype).eps)
    assert_close("out", merged, want["out"].astype(np.float64), 2 * allowed["out"] + top)


# P9: NVIDIA/TransformerEngine#3331
@turns("lengths", [(60, 60), (114, 40)])
def test_old_memory_is_never_read(backend: Backend, lengths: tuple[int, int], dtype: str) -> None:
    """Entries of lse that were never written got into the results: they changed by the run."""
    inputs = call(lengths, dtype=dtype, causal=True)
    want = solve(backend, inputs)
    for old in (1000.0, -1e4):
        same(run(backend, inputs, old=old), want)


# --- races and what ran before -------------------------------------------------------------------


# R3: ggml-org/llama.cpp#13438, ggml-org/llama.cpp#27678, ggml-org/llama.cpp#27870
@every_dtype
def test_no_order_of_threads_changes_a_bit(backend: Backend, dtype: str) -> None:
    """Races and barriers that not all threads reach had passed the tests.

    The CPU back end draws the order of threads from the seed, and reports a stuck barrier.
    """
    inputs = call((70, 130), heads=(2, 1), head_dim=192, head_dim_v=128, dtype=dtype, causal=True)
    want = solve(backend, inputs)
    for seed in (1, 2) if dtype == "float16" else (1,):
        with schedule(seed):
            same(run(backend, inputs), want)


def history_digest(name: str) -> str:
    """Return a digest of all results of a call."""
    backend = Backend(name, __import__("cupy") if name == "gpu" else np)
    results = run(backend, call((100, 100), heads=(4, 2), batch=2, causal=True))
    arrays = (results.out, results.lse, *results.grads)
    return hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in arrays)).hexdigest()


FILL_SHARED = r"""
extern "C" __global__ void fill(int count) {
    extern __shared__ unsigned words[];
    for (int i = threadIdx.x; i < count; i += blockDim.x) words[i] = 0xffffffffu;  // NaN
    __syncthreads();
    if (words[(threadIdx.x * 7) % count] != 0xffffffffu) __trap();
}
"""


# R5: flashinfer-ai/flashinfer#1046
def test_what_ran_before_does_not_matter(backend: Backend) -> None:
    """The result depended on unrelated kernels that had run before it."""
    fresh = python(
        "import sys, test_reports; print(test_reports.history_digest(sys.argv[1]))", backend.name
    )
    assert history_digest(backend.name) == fresh.split()[-1]
    for other in (
        call((33, 200), window=(9, 3)),
        call((100, 100), heads=(4, 2), batch=2, scale=-3.0),
        call((17, 5), head_dim=20, dtype="float64"),
        call((130, 70), heads=(4, 1), size=100.0, causal=True),
    ):
        run(backend, other)
    if backend.name == "gpu":
        runtime = backend.xp.cuda.runtime
        facts = runtime.getDeviceProperties(runtime.getDevice())
        size = facts["sharedMemPerBlockOptin"]
        kernel = backend.xp.RawKernel(FILL_SHARED, "fill")
        kernel.max_dynamic_shared_size_bytes = size
        blocks = 4 * facts["multiProcessorCount"]
        kernel((blocks,), (256,), (np.int32(size // 4),), shared_mem=size)
    assert history_digest(backend.name) == fresh.split()[-1]


# --- compiling and processes ---------------------------------------------------------------------

TESTS = Path(__file__).parent


def python(code: str, *arguments: str, **variables: str | None) -> str:
    """Run Python code in a process of its own and return what it printed."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        env={name: value for name, value in environment.items() if value is not None},
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, f"{result.returncode}: {result.stderr}"
    return result.stdout


# T1: Dao-AILab/flash-attention#2402
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_calls_that_differ_in_one_option(backend: Backend, dtype: str) -> None:
    """A constant of the compiled kernel was not in the cache's key: a call ran another's kernel."""
    changes: list[dict[str, Any]] = [
        {"scale": 0.1},
        {"scale": 0.2},
        {"window": (8, 0)},
        {"window": (16, 0)},
        {"window": (16, 4)},
        {"causal": True},
        {},
    ]
    inputs = call((60, 60), heads=(2, 1), dtype=dtype, size=2.0)
    calls = [dataclasses.replace(inputs, **change) for change in changes]
    first = [solve(backend, i) for i in calls]
    for i, want in zip(reversed(calls), reversed(first), strict=True):
        same(run(backend, i), want)
    assert len({x.out.tobytes() for x in first}) == len(first)


NO_TOOLKIT = """
import sys
import numpy as np, ml_dtypes
import cuflash
from cuflash import compile, device, select
from cuflash.dtypes import DTYPES
from cuflash.problem import Traits
if sys.argv[1] == "gpu":
    import cupy
    for dtype in (np.float16, ml_dtypes.bfloat16):
        x = cupy.asarray(np.ones((5, 2, 16), dtype).view(np.uint16)).view(dtype)
        assert (cuflash.attention(x, x, x).get() == 1).all()
else:
    sm90 = device.architecture(9, 0)
    for dtype in ("float16", "bfloat16"):
        for plan in select.choose("forward", Traits(DTYPES[dtype], 16, 16), sm90):
            compile.compile_cubin(compile.translation_unit(plan, cpu=False), plan, sm90)
"""


# T5: cupy/cupy#8466, cupy/cupy#8146, NVIDIA/cuda-python#844, NVIDIA/jitify#56
@pytest.mark.parametrize("toolkit", ["none", "another"])
def test_no_toolkit_is_needed(backend: Backend, tmp_path: Path, toolkit: str) -> None:
    """Half-precision headers of one version include what another version, or none, does not have.

    The kernels include nothing of a toolkit, so it may be absent or unusable.
    """
    home = None
    if toolkit == "another":
        home = str(tmp_path / "cuda")
        (tmp_path / "cuda" / "include").mkdir(parents=True)
        for name in ("cuda_fp16.h", "cuda_bf16.h", "cuda_runtime.h", "cuda.h", "mma.h"):
            (tmp_path / "cuda" / "include" / name).write_text("#error another version\n")
    elsewhere = {"CPATH": None, "CPLUS_INCLUDE_PATH": None, "PATH": "/usr/bin:/bin"}
    python(
        NO_TOOLKIT,
        backend.name,
        CUDA_PATH=home,
        CUDA_HOME=home,
        CUFLASH_CACHE_DIR=str(tmp_path / "cache"),
        **elsewhere,
    )


# T11: cupy/cupy#8485, cupy/cupy#6940
@every_dtype
def test_scale_may_be_a_number_of_any_kind(backend: Backend, dtype: str) -> None:
    """A Python float went to the kernel as a double where it expected a float: a scale of 0."""
    inputs = call((40, 40), dtype=dtype, scale=0.25)
    want = solve(backend, inputs)
    for scale in (np.float16(0.25), np.float32(0.25), np.float64(0.25), np.array(0.25)):
        same(run(backend, dataclasses.replace(inputs, scale=scale)), want)
    whole = solve(backend, dataclasses.replace(inputs, scale=2.0))
    for scale in (2, np.int32(2), np.uint8(2), ml_dtypes.bfloat16(2)):
        same(run(backend, dataclasses.replace(inputs, scale=scale)), whole)
    if backend.name == "gpu":
        with pytest.raises(TypeError, match=r"^scale: "):
            run(backend, dataclasses.replace(inputs, scale=backend.xp.asarray(0.25)))


FORK = """
import os, sys
import numpy as np
import cuflash
import cuflash.reference
if sys.argv[1] == "gpu":
    import cupy as xp
else:
    xp = np

def right():
    x = np.random.default_rng(0).standard_normal((40, 2, 8)).astype("f4")
    y = xp.asarray(x)
    out, vjp = cuflash.attention_vjp(y, y, y, causal=True)
    grads = vjp(y)
    host = lambda a: a.get() if hasattr(a, "get") else a
    want = cuflash.reference.attention(x, x, x, causal=True)
    wants = cuflash.reference.attention_backward(x, x, x, x, causal=True)
    pairs = [(out, want), *zip(grads, wants)]
    return all(np.allclose(host(a), b, atol=1e-4) for a, b in pairs)

child = os.fork()
if not child:
    os._exit(0 if right() else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert status == 0, f"in the child: {status}"
assert right()
"""


# V9: mars-project/mars#479, inducer/pycuda#137, cupy/cupy#3193
def test_a_process_may_fork_after_the_import(backend: Backend) -> None:
    """An import that touches the device breaks forked workers, and machines without a device."""
    python(FORK, backend.name)
    python(FORK, "cpu", CUDA_VISIBLE_DEVICES="")


# --- reports without a test here -----------------------------------------------------------------

#: Tested elsewhere.
COVERED = {
    "T3": "test_cache.py: processes that start at once with an empty cache",
    "T7": "test_cache.py: every file is read as UTF-8, in any locale",
    "T9": "test_cache.py: GPUs older or newer than NVRTC or cuflash know",
    "V1": "test_gpu.py: another GPU than the current one",
    "V2": "test_gpu.py: arrays in several places are an error",
    "V3": "test_api.py: threads that make the first call at once",
    "V5": "test_gpu.py: the current stream is used and nobody waits",
    "V7": "test_gpu.py: captured calls can be replayed, packed ones too",
    "W2": "test_problem.py: heads that do not divide",
    "W3": "test_problem.py: windows below -1",
}

#: Open: what each waits for. Those that are also tested above are tested as far as they can be.
LATER = {
    "C3": "pages: NaN in the free slots of the last page",
    "C5": "pages: infinities in all free slots",
    "G3": "cache: a length per batch entry in one call",
    "G4": "cache: a length per batch entry in one call",
    "L6": "sinks with pages and a window",
    "O2": "pages: a prefix in shuffled pages",
    "O4": "split keys: every number of splits",
    "O5": "split keys: empty splits",
    "O8": "pages of 32",
    "R3": "compute-sanitizer over the GPU tests: not from here, bench runs it",
    "S7": "pages of more than 2**31 elements",
    "W9": "cache: append past the capacity",
}


def test_every_report_has_one_place() -> None:
    texts = [path.read_text("utf-8") for path in TESTS.glob("test_reports*.py")]
    tested = re.findall(r"^ *# ([A-Z]\d+): \S+/\S+#\d+", "".join(texts), re.M)
    twice = [name for name, n in Counter([*tested, *COVERED]).items() if n > 1]
    assert not twice and not COVERED.keys() & LATER.keys()
    print(f"{len(tested)} reports tested here, {len(COVERED)} elsewhere, open:")
    for name, what in LATER.items():
        print(f"  {name}: {what}")
