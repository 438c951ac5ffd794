# SPDX-License-Identifier: Apache-2.0
"""Reported faults, as in test_reports.py, that only a GPU has or whose arrays are too large."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from check import Inputs, check_backward, check_forward
from conftest import Backend
from reports import call, every_dtype, normal, solve, to_host

import cuflash

pytestmark = pytest.mark.gpu


# T10: NVIDIA/numba-cuda-mlir#148, cupy/cupy#2118, pytorch/pytorch#162328
@every_dtype
@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 192, 256, 512])
def test_shared_memory_is_asked_for_on_every_device(
    backend: Backend, head_dim: int, dtype: str
) -> None:
    """More than 48 KiB is a setting per kernel and device; it was made on the first device only."""
    inputs = call((70, 70), head_dim=head_dim, dtype=dtype)
    for index in range(backend.xp.cuda.runtime.getDeviceCount()):
        with backend.xp.cuda.Device(index):
            solve(backend, inputs)


# --- more than 2**31 elements, and other large numbers -------------------------------------------


def large(backend: Backend, seed: int, shape: tuple[int, ...], dtype: str, size: float = 1) -> Any:
    """Return a device array, filled slice by slice with the same prime number of numbers."""
    part = backend.array(normal(seed, (1_000_003,), dtype, size).view(np.uint16))
    x = backend.xp.empty(int(np.prod(shape)), np.uint16)
    for start in range(0, x.size, part.size):
        piece = x[start : start + part.size]
        piece[...] = part[: piece.size]
    return x.view(np.dtype(dtype)).reshape(shape)


def check_heads(
    backend: Backend, arrays: list[Any], results: tuple[Any, ...], where: list[tuple[int, int]]
) -> None:
    """Compare single heads of single batch entries with the reference."""
    out, lse, grads = results
    for b, h in where:
        take = lambda x, b=b, h=h: to_host(backend, x[b : b + 1, :, h : h + 1])
        inputs = Inputs(*map(take, arrays))
        check_forward(take(out), backend.host(lse[b : b + 1, h : h + 1]), inputs)
        check_backward(cuflash.Gradients(*map(take, grads)), inputs)


LARGE = {  # queries, keys, and heads of batch entries that are compared
    # S1: Dao-AILab/flash-attention#1500, Dao-AILab/flash-attention#1311
    "batches past ten thousand": (
        *("bfloat16", (28800, 15, 16, 72), (28800, 15, 16, 72)),
        [(0, 0), (1, 15), (14400, 7), (28799, 0), (28799, 15)],
    ),
    # S3: pytorch/pytorch#142228, pytorch/pytorch#177985, pytorch/pytorch#176096
    "batch past 65535": (
        *("float16", (65537, 8, 1, 16), (65537, 8, 1, 16)),
        [(0, 0), (65534, 0), (65535, 0), (65536, 0)],
    ),
    "heads past 65535": (
        *("float16", (1, 8, 65537, 16), (1, 8, 65537, 16)),
        [(0, 0), (0, 65534), (0, 65535), (0, 65536)],
    ),
    # S9: PriorLabs/TabPFN#1184
    "queries past 2**31 elements": (
        *("float16", (400, 10496, 4, 128), (400, 128, 4, 128)),
        [(0, 0), (399, 0), (399, 3)],
    ),
    "keys past 2**31 elements": (
        *("float16", (400, 128, 4, 128), (400, 10496, 4, 128)),
        [(0, 0), (399, 0), (399, 3)],
    ),
}


@pytest.mark.parametrize("case", LARGE)
def test_large_arrays(backend: Backend, case: str) -> None:
    """Offsets in 32 bits, offsets of padded lengths, and axes of a grid end at such sizes."""
    dtype, shape_q, shape_kv, where = LARGE[case]
    shapes = (shape_q, shape_kv, shape_kv, shape_q)
    arrays = [large(backend, seed, shape, dtype) for seed, shape in enumerate(shapes)]
    q, k, v, dout = arrays
    out, lse, vjp = cuflash.attention_vjp(q, k, v, return_lse=True)
    check_heads(backend, arrays, (out, lse, vjp(dout)), where)
    del q, k, v, dout, arrays, out, lse, vjp
    backend.xp.get_default_memory_pool().free_all_blocks()


# S5: alexzhang13/flashattention2-custom-mask#2
def test_a_mask_of_more_than_2_to_the_31_elements(backend: Backend) -> None:
    """The mask is the largest array by far, and the offset of its rows overflowed in backward."""
    arrays = [large(backend, seed, (8, 4096, 28, 64), "float16") for seed in range(4)]
    mask = backend.xp.ones((8, 28, 4096, 4096), bool)
    mask[..., ::3] = False
    mask[7, :, :, 1::3] = False
    assert mask.size > 2**31
    q, k, v, dout = arrays
    out, lse, vjp = cuflash.attention_vjp(q, k, v, mask=mask, return_lse=True)
    grads = vjp(dout)
    for b, h in ((0, 0), (4, 16), (7, 0), (7, 27)):
        take = lambda x, b=b, h=h: to_host(backend, x[b : b + 1, :, h : h + 1])
        seen = backend.host(mask[b : b + 1, h : h + 1, :1])  # the same in all rows
        inputs = Inputs(*map(take, arrays), mask=seen)
        check_forward(take(out), backend.host(lse[b : b + 1, h : h + 1]), inputs)
        check_backward(cuflash.Gradients(*map(take, grads)), inputs)
    del q, k, v, dout, arrays, mask, out, lse, vjp, grads
    backend.xp.get_default_memory_pool().free_all_blocks()


# R1: Dao-AILab/flash-attention#359
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_repeats_are_equal_and_right(backend: Backend, dtype: str) -> None:
    """A missing barrier made the backward pass wrong now and then."""
    shapes = [(300, n, 1, 128) for n in (2048, 128, 128, 2048)]
    arrays = [large(backend, seed, shape, dtype, 3) for seed, shape in enumerate(shapes)]
    q, k, v, dout = arrays

    def both() -> tuple[Any, ...]:
        out, lse, vjp = cuflash.attention_vjp(q, k, v, return_lse=True)
        return out, lse, vjp(dout)

    first = both()
    check_heads(backend, arrays, first, [(0, 0), (150, 0), (299, 0)])
    for _ in range(50):
        again = both()
        for x, y in zip((*first[:2], *first[2]), (*again[:2], *again[2]), strict=True):
            assert (x.view(np.uint16) == y.view(np.uint16)).all()
