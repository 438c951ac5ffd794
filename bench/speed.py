# SPDX-License-Identifier: Apache-2.0
"""Speed of both passes beside the naive formula, in one run.

Within a case the four calls (ours and the naive formula, forward and backward) take turns in
shuffled rounds with a short pause: a GPU's power limit makes whoever comes second slower. Times are
CUDA events around enough calls to fill 20 ms; where inputs would fit in the L2 cache, several sets
take turns. FLOP count: 4 * batch * heads * seqlen_q * seqlen_kv * head_dim for the forward, half of
it if causal, 2.5 times that for the backward, for both: the naive formula, which computes hidden
scores too, gets no credit for them. The SM clock is read while the work runs. Before any timing the
results are compared, and a wrong one gets no speed. Prints lines of JSON.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from bench import baselines
from bench.machine import emit, facts, sm_clock

L2_BYTES = 60 * 2**20
TIMED_MS = 20.0

#: Largest error, relative to the largest and to the root mean square of the expected values.
#: 16-bit results are compared with the naive formula in float32.
TOLERANCE = {"float64": 1e-11, "float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}

Call = Callable[[int], Any]


def array(shape: tuple[int, ...], dtype: str) -> Any:
    """Return random values of mean 0 and variance 1."""
    import cupy

    if dtype == "float64":
        return cupy.random.standard_normal(shape, dtype=cupy.float64)
    x = cupy.random.standard_normal(shape, dtype=cupy.float32)
    if dtype != "bfloat16":
        return x.astype(dtype, copy=False)
    import ml_dtypes

    # By its bits (the upper half of a float32), whatever CuPy can do with bfloat16.
    return (x.view(cupy.uint32) >> 16).astype(cupy.uint16).view(ml_dtypes.bfloat16)


def widened(x: Any) -> Any:
    """Return 16-bit values as float32, others as they are."""
    import cupy

    if x.dtype.name != "bfloat16":
        return x.astype(cupy.float32) if x.itemsize == 2 else x
    return (x.view(cupy.uint16).astype(cupy.uint32) << 16).view(cupy.float32)


def error(got: Any, want: Any) -> float:
    """Return the larger of two relative errors: of the largest element, and in the norm."""
    import cupy

    got, want = (widened(x).astype(cupy.float64) for x in (got, want))
    difference = cupy.abs(got - want)
    largest = float(difference.max()) / float(cupy.abs(want).max())
    norm = float(cupy.sqrt((difference**2).mean() / (want**2).mean()))
    # NaN is larger than anything.
    return next((x for x in (largest, norm) if math.isnan(x)), max(largest, norm))


def inputs_of(batch: int, heads: int, seqlen: int, head_dim: int, dtype: str) -> list[tuple]:
    """Return sets of q, k, v, dout: one, or so many that a cache cannot hold them."""
    import cupy

    shape = (batch, heads, seqlen, head_dim)
    size = 4 * math.prod(shape) * {"float64": 8, "float32": 4}.get(dtype, 2)
    count = 1 if size > L2_BYTES else math.ceil(2 * L2_BYTES / size)
    cupy.random.seed(0)
    return [tuple(array(shape, dtype) for _ in range(4)) for _ in range(count)]


def calls_of(sets: list[tuple], causal: bool) -> tuple[dict[str, Call], dict[str, float], str]:
    """Return the calls to time, the errors of their results, and why there is no naive one."""
    import cuflash

    options = {"causal": causal, "layout": "bhsd"}
    dtype = sets[0][0].dtype.name
    seqlen = sets[0][0].shape[2]

    def ours(i: int) -> tuple:
        q, k, v, dout = sets[i]
        out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
        return out, lse, *cuflash.attention_backward(dout, q, k, v, out, lse, **options)

    def naive(q: Any, k: Any, v: Any, dout: Any) -> tuple:
        out, p = baselines.forward(q, k, v, mask_of(q))
        return out, p, *baselines.backward(dout, q, k, v, p)

    def mask_of(q: Any) -> Any:
        return baselines.causal_mask(seqlen, seqlen, q) if causal else None

    kept = [ours(i) for i in range(len(sets))]
    expected = naive(*(widened(x) for x in sets[0]))
    # The second result, lse or P, is not comparable.
    errors = {
        name: error(kept[0][i], expected[i])
        for name, i in (("out", 0), ("dq", 2), ("dk", 3), ("dv", 4))
    }
    calls: dict[str, Call] = {}

    def our_forward(i: int) -> Any:
        q, k, v, _ = sets[i]
        return cuflash.attention(q, k, v, **options)

    def our_backward(i: int) -> Any:
        q, k, v, dout = sets[i]
        out, lse = kept[i][:2]
        return cuflash.attention_backward(dout, q, k, v, out, lse, **options)

    calls["ours forward"], calls["ours backward"] = our_forward, our_backward

    missing = ""
    if dtype in ("float32", "float64"):
        probabilities = [expected[1]]
    else:
        del expected
        try:
            results = naive(*sets[0])
            probabilities = [results[1]]
            float(widened(results[0]).sum())
        except Exception as reason:  # a dtype that this CuPy cannot multiply
            return calls, errors, f"{type(reason).__name__}: {reason}"[:300]
    mask = mask_of(sets[0][0])
    for q, k, v, _ in sets[1:]:
        probabilities.append(baselines.forward(q, k, v, mask)[1])

    def naive_forward(i: int) -> Any:
        q, k, v, _ = sets[i]
        return baselines.forward(q, k, v, mask)

    def naive_backward(i: int) -> Any:
        q, k, v, dout = sets[i]
        return baselines.backward(dout, q, k, v, probabilities[i])

    calls["naive forward"], calls["naive backward"] = naive_forward, naive_backward
    return calls, errors, missing


def measure(
    calls: dict[str, Call], sets: int, rounds: int, pause: float, clock: Callable[[], int | None]
) -> dict[str, list[tuple[float, int | None]]]:
    """Return milliseconds and SM clock of each call in each round."""
    from cupy import cuda

    def timed(call: Call, count: int, expected: float) -> tuple[float, int | None]:
        start, stop = cuda.Event(), cuda.Event()
        start.record()
        for i in range(count):
            call(i % sets)
        stop.record()
        time.sleep(count * expected / 2000)  # until the middle of the work
        mhz = clock()
        stop.synchronize()
        return cuda.get_elapsed_time(start, stop) / count, mhz

    counts, expected = {}, {}
    for name, call in calls.items():
        for i in range(sets):
            call(i)
        expected[name] = timed(call, sets, 0.0)[0]
        counts[name] = max(1, math.ceil(TIMED_MS / expected[name]))
    times: dict[str, list[tuple[float, int | None]]] = {name: [] for name in calls}
    shuffled = random.Random(0)
    for _ in range(rounds):
        for name in shuffled.sample(list(calls), len(calls)):
            time.sleep(pause)
            times[name].append(timed(calls[name], counts[name], expected[name]))
    return times


def summary(times: list[tuple[float, int | None]], flop: float) -> dict[str, Any]:
    """Return the median with its spread and the clock."""
    ms = [row[0] for row in times]
    clocks = [row[1] for row in times if row[1] is not None]
    median = statistics.median(ms)
    return {
        "ms": round(median, 4),
        "fastest_ms": round(min(ms), 4),
        "slowest_ms": round(max(ms), 4),
        "tflops": round(flop / median / 1e9, 2),
        "sm_mhz": round(statistics.median(clocks)) if clocks else None,
    }


def batch_that_fits(batch: int, heads: int, seqlen: int, itemsize: int) -> int:
    """Halve the batch until the naive formula's P, and what its backward adds, fit."""
    import cupy

    free = cupy.cuda.runtime.memGetInfo()[0]
    # P, dS and their product; to check a 16-bit dtype, P and dS are float32.
    while batch > 1 and 3.5 * batch * heads * seqlen**2 * max(itemsize, 4) > 0.9 * free:
        batch //= 2
    return batch


def run_case(
    dtype: str, head_dim: int, causal: bool, arguments: argparse.Namespace, clock: Any
) -> bool:
    """Measure a case and print it; returns whether the results were right."""
    import cupy

    itemsize = {"float64": 8, "float32": 4}.get(dtype, 2)
    seqlen = arguments.seqlen
    heads = max(1, 2048 // head_dim)
    wanted = max(1, arguments.tokens // seqlen)
    batch = batch_that_fits(wanted, heads, seqlen, itemsize)
    case: dict[str, Any] = {
        "dtype": dtype,
        "batch": batch,
        "heads": heads,
        "seqlen": seqlen,
        "head_dim": head_dim,
        "causal": causal,
    }
    if batch != wanted:
        case["note"] = f"batch {wanted} does not fit into memory"
    sets = inputs_of(batch, heads, seqlen, head_dim, dtype)
    calls, errors, missing = calls_of(sets, causal)
    case["errors"] = {name: float(f"{x:.2e}") for name, x in errors.items()}
    wrong = [name for name, x in errors.items() if not x <= TOLERANCE[dtype]]
    if wrong:
        emit("speed", **case, wrong=wrong)
        return False
    times = measure(calls, len(sets), arguments.rounds, arguments.pause, clock)
    flop = 4 * batch * heads * seqlen**2 * head_dim * (0.5 if causal else 1.0)
    for direction, factor in (("forward", 1.0), ("backward", 2.5)):
        ours = summary(times[f"ours {direction}"], factor * flop)
        row: dict[str, Any] = {"direction": direction, **case, "rounds": arguments.rounds}
        row |= {"ours": ours, "naive": None, "ratio": None}
        if missing:
            row["no_naive"] = missing
        else:
            row["naive"] = summary(times[f"naive {direction}"], factor * flop)
            row["ratio"] = round(row["naive"]["ms"] / ours["ms"], 3)
        emit("speed", **row)
    del sets, calls
    cupy.get_default_memory_pool().free_all_blocks()
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.speed", description=__doc__)
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "float64", "float16", "bfloat16"]
    )
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--seqlen", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=16384, help="batch times seqlen")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds before each timing")
    parser.add_argument(
        "--budget", type=float, default=90, help="begin no case after so many seconds"
    )
    arguments = parser.parse_args()
    begin = time.monotonic()
    how, clock = sm_clock()
    emit("machine", **facts(), clock_read_by=how)
    right = True
    for case in itertools.product(arguments.dtypes, arguments.head_dims, (False, True)):
        if time.monotonic() - begin > arguments.budget:
            emit("not measured", case=case, reason=f"{arguments.budget:g} seconds are over")
            continue
        right &= run_case(*case, arguments, clock)
    emit("done", seconds=round(time.monotonic() - begin, 1))
    return 0 if right else 1


if __name__ == "__main__":
    raise SystemExit(main())
