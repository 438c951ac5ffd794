# SPDX-License-Identifier: Apache-2.0
"""Host time of a warm call: how long Python is busy before the GPU has its work.

Calls are small, take turns, and the GPU is idle when each begins, so that nothing waits for it. An
empty ``cupy.RawKernel`` launch, which no library can be faster than, is measured beside them and
subtracted. Prints lines of JSON, in microseconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.machine import emit, facts

BARE = "bare launch"


def calls() -> dict[str, Callable[[], Any]]:
    import cupy

    import cuflash

    q, k, v, dout = (cupy.random.standard_normal((1, 16, 2, 64), dtype="float32") for _ in range(4))
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    to = cupy.empty_like(out)
    grads = tuple(cupy.empty_like(x) for x in (q, k, v))
    empty = cupy.RawKernel('extern "C" __global__ void empty() {}', "empty")
    backward = cuflash.attention_backward
    return {
        BARE: lambda: empty((1,), (1,), ()),
        "attention": lambda: cuflash.attention(q, k, v),
        "attention, out=": lambda: cuflash.attention(q, k, v, out=to),
        "attention, return_lse": lambda: cuflash.attention(q, k, v, return_lse=True),
        "attention_backward": lambda: backward(dout, q, k, v, out, lse),
        "attention_backward, out=": lambda: backward(dout, q, k, v, out, lse, out=grads),
    }


def measure(
    calls: dict[str, Callable[[], Any]], repetitions: int, wait: Callable[[], None]
) -> dict[str, np.ndarray]:
    """Return the microseconds of each repetition of each call."""
    times = {name: np.empty(repetitions) for name in calls}
    for name in calls:
        for _ in range(50):
            calls[name]()
        wait()
    for i in range(repetitions):
        for name, call in calls.items():
            begin = time.perf_counter_ns()
            result = call()
            times[name][i] = (time.perf_counter_ns() - begin) / 1000
            wait()
            del result
    return times


def rows(times: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return medians, what they are beyond a bare launch, and percentiles."""
    bare = float(np.median(times[BARE]))
    found = []
    for name, us in times.items():
        p10, median, p90, p99 = np.percentile(us, [10, 50, 90, 99])
        row = {"median": median, "beyond_launch": median - bare, "p10": p10, "p90": p90, "p99": p99}
        found.append({"call": name, **{key: round(float(x), 2) for key, x in row.items()}})
    return found


def measured(repetitions: int) -> list[dict[str, Any]]:
    """Measure all calls."""
    import cupy

    times = measure(calls(), repetitions, cupy.cuda.Device().synchronize)
    return [{"kind": "host", "repetitions": repetitions, **row} for row in rows(times)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.host_time", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=1000)
    arguments = parser.parse_args()
    emit("machine", **facts())
    for row in measured(arguments.repetitions):
        emit(**row)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
