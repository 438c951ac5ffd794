# SPDX-License-Identifier: Apache-2.0
"""Time to first result, for a table of plans: with an empty cache of kernels, and a full one.

Each process is started anew, imports CuPy and cuflash, copies small arrays to the GPU, and waits
for the results of a first forward, a first backward, and one more of each. `forward_s` and
`backward_s` are the first calls: with an empty cache they compile the kernels of one plan each.
`total_s` is what a user waits for the first forward, from the start of the process, Python's own
start included; `slow` names what is beyond `LIMITS`.

``python -m bench startup`` runs all of it, and ``python -m bench 'startup:bfloat16-128*'`` what a
pattern names, one process after the other. Rows come as they are measured. When the time that
``--seconds`` gives is over, no further case begins, and each that is left gets a row of kind
"skipped"; one that fails, or takes longer than `TIMEOUT` seconds, gets one of kind "failed".
"""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from bench.machine import ROOT

__all__ = ["CASES", "LIMITS", "PREFIX", "Case", "rows", "select"]

#: Seconds that a first call may take, by what the cache holds.
LIMITS = {"empty": 2.0, "warm": 0.1}
TIMEOUT = 60  # for a process
PREFIX = "startup:"  # of the names of cases on the command line
_LENGTH = 256  # so that arrays of odd head sizes are copied first

ALL = ("softcap", "bias", "mask", "alibi_slopes", "sinks", "dropout_p", "packed")


class Case(NamedTuple):
    """Calls of both passes."""

    dtype: str
    head_dim: int
    options: tuple[str, ...] = ()  # as precompile takes them

    @property
    def name(self) -> str:
        """Its name on the command line."""
        options = ("all",) if self.options == ALL else self.options
        return PREFIX + "-".join([self.dtype, str(self.head_dim), *options])


CASES = (
    Case("float16", 64),
    Case("float16", 128),
    Case("float16", 192),
    Case("float16", 256),
    Case("float16", 41),
    Case("bfloat16", 128, ("packed",)),
    Case("bfloat16", 128, ("bias",)),
    Case("bfloat16", 64, ALL),
    Case("bfloat16", 128, ALL),
    Case("bfloat16", 256, ALL),
    Case("float32", 64),
    Case("float32", 128),
    Case("float32", 512, ALL),
    Case("float64", 128),
    Case("float64", 512, ALL),
)

Child = Callable[[Case, dict[str, str]], dict[str, Any]]


def child(case: Case) -> dict[str, float]:
    """Be the fresh process; returns the seconds of each step."""
    steps = [time.time()]
    import cupy
    import numpy as np

    import cuflash

    steps.append(time.time())
    rng = np.random.default_rng(0)
    dtype: Any = case.dtype
    if dtype == "bfloat16":
        import ml_dtypes

        dtype = ml_dtypes.bfloat16
    heads, accum = 4, "f8" if case.dtype == "float64" else "f4"
    x = rng.standard_normal((4, _LENGTH, heads, case.head_dim)).astype(dtype)
    every = {
        "softcap": 30.0,
        "bias": rng.standard_normal((_LENGTH, _LENGTH)).astype(accum),
        "mask": rng.random((_LENGTH, _LENGTH)) < 0.9,
        "alibi_slopes": np.full(heads, 0.1, accum),
        "sinks": np.zeros(heads, accum),
        "dropout_p": 0.1,
    }
    given: dict[str, Any] = {name: one for name, one in every.items() if name in case.options}
    given = {n: cupy.asarray(one) if hasattr(one, "shape") else one for n, one in given.items()}
    if "dropout_p" in given:
        given["seed"] = 1
    q, k, v, dout = (cupy.asarray(one) for one in x)
    offsets, forward, backward = (), cuflash.attention, cuflash.attention_backward
    if "packed" in case.options:
        offsets = (cupy.asarray([0, _LENGTH // 3, _LENGTH]),) * 2
        forward, backward = cuflash.attention_varlen, cuflash.attention_varlen_backward
    cupy.cuda.Device().synchronize()
    steps.append(time.time())
    for _ in range(2):
        out, lse = forward(q, k, v, *offsets, **given, causal=True, return_lse=True)
        cupy.cuda.Device().synchronize()
        steps.append(time.time())
        backward(dout, q, k, v, out, lse, *offsets, **given, causal=True)
        cupy.cuda.Device().synchronize()
        steps.append(time.time())
    names = ("import_s", "gpu_s", "forward_s", "backward_s", "next_forward_s", "next_backward_s")
    found = {name: steps[i + 1] - steps[i] for i, name in enumerate(names)}
    return {**found, "at": steps[3]}


def run_child(case: Case, environment: dict[str, str]) -> dict[str, Any]:
    """Run `child` in a process of its own."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "bench.startup", json.dumps(case)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it said nothing"])[-1][:500])
    return json.loads(done.stdout.splitlines()[-1])


def select(patterns: Sequence[str]) -> list[Case]:
    """Return the cases that patterns name, in the order of the table; "startup" names all.

    Raises
    ------
    ValueError
        A pattern names nothing.
    """
    wanted: set[Case] = set()
    for pattern in patterns:
        every = pattern + ":" == PREFIX
        found = {one for one in CASES if every or fnmatch.fnmatchcase(one.name, pattern)}
        if not found:
            known = ", ".join(case.name for case in CASES)
            raise ValueError(f"no first call is called {pattern!r}; there are {known}")
        wanted |= found
    return [case for case in CASES if case in wanted]


def rows(
    chosen: Sequence[Case], seconds: float, run: Child = run_child
) -> Iterator[dict[str, Any]]:
    """Yield what is measured of cases with both caches, and begin none after so many seconds."""
    end = time.monotonic() + seconds
    for case in chosen:
        about = {"case": case.name, "dtype": case.dtype}
        unmeasured = {**about, "direction": "both", "variant": "-"}
        if time.monotonic() >= end:
            yield {"kind": "skipped", **unmeasured, "reason": f"{seconds:g} seconds are over"}
            continue
        about |= {"head_dim": case.head_dim}
        about |= {"options": "all" if case.options == ALL else " ".join(case.options)}
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o700)
            for cache in LIMITS:
                try:
                    found = _measured(case, cache, {"CUFLASH_CACHE_DIR": folder}, run)
                except (RuntimeError, subprocess.TimeoutExpired) as error:
                    reason = str(error)
                    yield {"kind": "failed", **unmeasured, "variant": cache, "reason": reason}
                    break  # the cache is not full
                yield {"kind": "startup", **about, "cache": cache, **found}


def _measured(case: Case, cache: str, environment: dict[str, str], run: Child) -> dict[str, Any]:
    begin = time.time()
    found = run(case, environment)
    total = found.pop("at") - begin
    limit = LIMITS[cache]
    slow = [way for way in ("forward", "backward") if found[f"{way}_s"] > limit]
    rounded = {name: round(value, 3) for name, value in found.items()}
    return {"slow": " ".join(slow), "total_s": round(total, 3), **rounded}


if __name__ == "__main__":
    dtype, head_dim, options = json.loads(sys.argv[1])
    print(json.dumps(child(Case(dtype, head_dim, tuple(options)))))
