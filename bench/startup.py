# SPDX-License-Identifier: Apache-2.0
"""Time to first result: a fresh process with an empty cache of kernels, and one that finds it full.

Each process is started anew, imports CuPy and cuflash, copies small arrays to the GPU, and waits
for the result of a first call and of a second one. `total_s` is what a user waits for, from the
start of the process to its first result, Python's own start included.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from bench.machine import ROOT

__all__ = ["rows"]

CACHES = ("empty", "warm")
DIRECTIONS = ("forward", "backward")
TIMEOUT = 120

Child = Callable[[str, dict[str, str]], dict[str, Any]]


def child(direction: str) -> dict[str, float]:
    """Be the fresh process; returns the seconds of each step."""
    steps = [time.time()]
    import cupy
    import numpy as np

    import cuflash

    steps.append(time.time())
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 1, 256, 4, 128)).astype(np.float16)
    q, k, v, dout = (cupy.asarray(one) for one in x)
    cupy.cuda.Device().synchronize()
    steps.append(time.time())

    def call() -> None:
        if direction == "forward":
            cuflash.attention(q, k, v, causal=True)
        else:
            out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
            cuflash.attention_backward(dout, q, k, v, out, lse, causal=True)
        cupy.cuda.Device().synchronize()

    for _ in range(2):
        call()
        steps.append(time.time())
    names = ("import_s", "gpu_s", "first_call_s", "second_call_s")
    found = {name: steps[i + 1] - steps[i] for i, name in enumerate(names)}
    return {**found, "at": steps[3]}


def run_child(direction: str, environment: dict[str, str]) -> dict[str, Any]:
    """Run `child` in a process of its own."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "bench.startup", direction],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-500:])
    return json.loads(done.stdout.splitlines()[-1])


def rows(run: Child = run_child) -> list[dict[str, Any]]:
    """Measure both directions (a backward comes after its forward) with both caches."""
    found = []
    for direction in DIRECTIONS:
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o700)
            for cache in CACHES:
                begin = time.time()
                seconds = run(direction, {"CUFLASH_CACHE_DIR": folder})
                total = seconds.pop("at") - begin
                row = {name: round(value, 3) for name, value in seconds.items()}
                about = {"direction": direction, "dtype": "float16", "head_dim": 128}
                about["cache"] = cache
                found.append({"kind": "startup", **about, "total_s": round(total, 3), **row})
    return found


if __name__ == "__main__":
    print(json.dumps(child(sys.argv[1])))
