# SPDX-License-Identifier: Apache-2.0
"""Random calls for as long as you like, and some calls a thousand times.

``python tests/soak.py --backend gpu --seconds 90 --repeats 1000`` first repeats calls that fill a
GPU: all their bits must be equal. Then it runs calls of random dtypes, head sizes, options,
lengths, strides and values, as ``strategies.py`` draws them, on the kernels that users get, which
takes a minute to compile. Each runs twice: bits must be equal, and results right.

Before a call it is printed, so that one that hangs is known; after a minute Python says where it
hangs, and ends. The exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from typing import Any

import numpy as np
from check import check_backward, check_forward, host
from conftest import Backend
from matrix import Row, shipped
from run import both, on
from strategies import Case, arrays_of, case_of, numpy_dtype

import cuflash
from cuflash import device
from cuflash.problem import FEATURES

HANGS_AFTER = 60.0  # seconds
DTYPES = ("float16", "bfloat16", "float16", "bfloat16", "float32", "float64")
SIZES = (16, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256)


def draw(rng: random.Random, where: device.Device) -> Row:
    """Return the plans that random calls get."""
    dtype = rng.choice(DTYPES)
    # Below 8 `case_of` finds no size that can be moved by whole pieces.
    head_dim = rng.choice([rng.choice(SIZES), rng.randint(8, 256)])
    head_dim_v = rng.choice([head_dim, head_dim, rng.choice(SIZES), rng.randint(8, 256)])
    options = tuple(name for name in FEATURES if rng.random() < 0.2)
    return shipped(dtype, head_dim, head_dim_v, where, options)


def compile_for(row: Row) -> None:
    """Run a call of a row on the GPU, so that its kernels come from the disk from then on."""
    import cupy

    both(on(Backend("gpu", cupy), arrays_of(case_of(row, 0))))


def bits(results: Any) -> list[np.ndarray]:
    """Return out, lse and the gradients that there are, as bytes."""
    out, lse, grads = results
    found = (out, lse, *(getattr(grads, field.name) for field in fields(grads)))
    return [np.ascontiguousarray(host(x)).view(np.uint8) for x in found if x is not None]


def wrong(case: Case, backend: Backend) -> str | None:
    """Run a call twice; return what is wrong with it, or None."""
    inputs = arrays_of(case)
    given = on(backend, inputs)
    first = both(given)
    again = both(given)
    if not all(map(np.array_equal, bits(first), bits(again))):
        return "a second call has other bits"
    out, lse, grads = first
    try:
        check_forward(out, lse, inputs)
        check_backward(grads, inputs)
    except AssertionError as error:
        return str(error)
    return None


def repeated(backend: Backend, small: bool) -> Iterator[tuple[str, Any]]:
    """Yield calls that are to give the same bits every time: a name, and a function."""
    xp, rng = backend.xp, np.random.default_rng(0)
    batch, seqlen = (1, 150) if small else (8, 1500)
    for head_dim in (64, 128, 256):
        for causal in (False, True):
            for packed in (False, True):
                shape = (batch, seqlen, 4, head_dim)
                q, dout = (rng.standard_normal(shape, "f4") for _ in range(2))
                k, v = (rng.standard_normal((batch, seqlen, 2, head_dim), "f4") for _ in range(2))
                q, k, v, dout = (
                    backend.array(x.astype(numpy_dtype("bfloat16"))) for x in (q, k, v, dout)
                )
                offsets: tuple[Any, ...] = ()
                call, back = cuflash.attention, cuflash.attention_backward
                if packed:
                    q, k, v, dout = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v, dout))
                    ends = np.arange(batch + 1) * seqlen
                    ends[1:-1] += 7
                    offsets = (backend.array(ends.astype("i4")),) * 2
                    call, back = cuflash.attention_varlen, cuflash.attention_varlen_backward

                def run(
                    arrays: Any = (q, k, v, dout),
                    offsets: Any = offsets,
                    call: Any = call,
                    back: Any = back,
                    causal: bool = causal,
                ) -> list[Any]:
                    q, k, v, dout = arrays
                    out, lse = call(q, k, v, *offsets, causal=causal, return_lse=True)
                    grads = back(dout, q, k, v, out, lse, *offsets, causal=causal)
                    return [x.view(xp.uint8) for x in (out, lse, *grads) if x is not None]

                mask = "causal" if causal else "full"
                yield f"d{head_dim} {mask}" + (" packed" if packed else ""), run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--seconds", type=float, default=90, help="of random calls; 0 for none")
    parser.add_argument("--rows", type=int, default=48, help="of dtype, head sizes and options")
    parser.add_argument("--workers", type=int, default=16, help="processes that compile for them")
    parser.add_argument("--repeats", type=int, default=0, help="of each call that is repeated")
    parser.add_argument("--seed", type=int, default=0, help="of the random calls")
    given = parser.parse_args()
    if given.backend == "gpu":
        import cupy as xp
    else:
        xp = np
    backend = Backend(given.backend, xp)
    where = device.gpu(0) if given.backend == "gpu" else device.CPU
    faults = 0
    for name, run in repeated(backend, small=given.backend == "cpu") if given.repeats else ():
        want, other = run(), 0
        for _ in range(given.repeats):
            faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
            other += not all(bool((x == y).all()) for x, y in zip(run(), want, strict=True))
        faults += other > 0
        print(f"{name}: {given.repeats} repeats, {other} with other bits", flush=True)
    faulthandler.cancel_dump_traceback_later()
    if given.seconds <= 0:
        return 1 if faults else 0
    rng, calls = random.Random(given.seed), 0
    rows = [draw(rng, where) for _ in range(given.rows)]
    if given.backend == "gpu":
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(given.workers, mp_context=spawn) as pool:
            list(pool.map(compile_for, rows))
    end = time.monotonic() + given.seconds
    while time.monotonic() < end:
        faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
        case = case_of(rng.choice(rows), rng.randrange(2**24))
        print(f"{calls} {case}", flush=True)
        problem = wrong(case, backend)
        if problem is not None:
            faults += 1
            print(f"WRONG: {problem}", flush=True)
        calls += 1
    print(f"{calls} random calls in {given.seconds:g} s, {faults} wrong", flush=True)
    faulthandler.cancel_dump_traceback_later()
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
