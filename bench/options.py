# SPDX-License-Identifier: Apache-2.0
"""What options cost: each beside the call without it, in shuffled rounds of one run.

Prints a line of JSON for each comparison: a window beside the whole causal triangle, packed
sequences of equal length beside the same as a batch, and each score option beside the plain call.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.machine import emit, facts, sm_clock
from bench.speed import array, measure, summary


def both_passes(arrays: list[Any], options: dict[str, Any], cu: tuple = ()) -> dict[str, Callable]:
    """Return the forward and the backward of a call, to be timed."""
    import cuflash

    q, k, v, dout = arrays
    forward = cuflash.attention_varlen if cu else cuflash.attention
    backward = cuflash.attention_varlen_backward if cu else cuflash.attention_backward
    out, lse = forward(q, k, v, *cu, return_lse=True, **options)
    return {
        "forward": lambda _: forward(q, k, v, *cu, **options),
        "backward": lambda _: backward(dout, q, k, v, out, lse, *cu, **options),
    }


def compare(name: str, variants: dict[str, dict[str, Callable]], about: dict, how: Any) -> None:
    """Time all variants; the first is what the others are compared with."""
    rounds, pause, clock = how
    for direction in ("forward", "backward"):
        calls = {variant: passes[direction] for variant, passes in variants.items()}
        times = {key: summary(x, 1.0) for key, x in measure(calls, 1, rounds, pause, clock).items()}
        first = next(iter(times))
        for variant, row in times.items():
            row.pop("tflops")
            ratio = round(row["ms"] / times[first]["ms"], 3)
            emit("options", case=name, variant=variant, direction=direction, ratio=ratio,
                 beside=first, **about, **row)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.options", description=__doc__)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds before each timing")
    arguments = parser.parse_args()
    import cupy

    clock_name, clock = sm_clock()
    emit("machine", **facts(), clock_read_by=clock_name)
    how = arguments.rounds, arguments.pause, clock
    cupy.random.seed(0)
    dtype = arguments.dtype

    def tensors(*shape: int) -> list[Any]:
        return [array(shape, dtype) for _ in range(4)]

    x = tensors(1, 32768, 4, 64)
    about = {"dtype": dtype, "batch": 1, "heads": 4, "seqlen": 32768, "head_dim": 64}
    compare(
        "window",
        {
            "causal": both_passes(x, {"causal": True}),
            "window (1024, 0)": both_passes(x, {"window": (1024, 0)}),
        },
        about,
        how,
    )
    for head_dim in (64, 128):
        heads = 1024 // head_dim
        x = tensors(4, 4096, heads, head_dim)
        flat = [y.reshape(4 * 4096, heads, head_dim) for y in x]
        at = cupy.asarray(np.arange(5, dtype=np.int32) * 4096)
        about |= {"batch": 4, "heads": heads, "seqlen": 4096, "head_dim": head_dim}
        for causal in (False, True):
            options = {"causal": causal}
            variants = {
                "batched": both_passes(x, options),
                "packed": both_passes(flat, options, (at, at)),
            }
            compare("packed", variants, {**about, "causal": causal}, how)
    heads = 16
    x = tensors(1, 4096, heads, 64)
    about |= {"batch": 1, "heads": heads, "seqlen": 4096, "head_dim": 64}
    accum = "float64" if dtype == "float64" else "float32"
    given: dict[str, dict[str, Any]] = {
        "plain": {},
        "softcap": {"softcap": 30.0},
        "bias": {"bias": array((1, heads, 4096, 4096), dtype)},
        "bias of one head": {"bias": array((1, 1, 4096, 4096), dtype)},
        "mask": {"mask": cupy.random.random((1, 1, 4096, 4096)) < 0.7},
        "alibi": {"alibi_slopes": array((heads,), accum)},
        "sinks": {"sinks": array((heads,), accum)},
        "dropout": {"dropout_p": 0.1, "seed": 1},
    }
    given["everything"] = {key: value for one in given.values() for key, value in one.items()}
    compare("options", {name: both_passes(x, one) for name, one in given.items()}, about, how)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
