# SPDX-License-Identifier: Apache-2.0
"""Memory: what both passes take beyond inputs and outputs, and the DRAM traffic of the forward.

Memory must be linear in the length: four times the length may take at most 4.2 times as much. It is
what a fresh memory pool obtained from the device during one forward and one backward, less the
results. The pool hands out multiples of 512 bytes, which are not counted against the call, and
never shrinks by itself, so its size is its peak. Inputs lie in another pool.

DRAM bytes are counted by Nsight Compute (ncu), summed over all kernels of one forward call, ours
and the naive formula's, with the caches left as they are. Prints lines of JSON.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench import baselines
from bench.data import normal
from bench.machine import ROOT, emit, facts, find_tool

BATCH, HEADS, HEAD_DIM, DTYPE = 1, 8, 64, "float16"
LENGTHS = (4096, 16384, 65536, 262144)  # each four times the one before
GROWTH_LIMIT = 4.2
NCU_LENGTH = 8192
NCU_METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
NCU_TIMEOUT = 40
_POOL_UNIT = 512
_UNITS = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}


def inputs_of(seqlen: int) -> list[Any]:
    return [normal((BATCH, seqlen, HEADS, HEAD_DIM), DTYPE) for _ in range(4)]


def both_passes(q: Any, k: Any, v: Any, dout: Any) -> tuple[Any, ...]:
    import cuflash

    out, lse = cuflash.attention(q, k, v, return_lse=True)
    return out, lse, *cuflash.attention_backward(dout, q, k, v, out, lse)


def beyond(pool_bytes: int, results: list[int]) -> int:
    """Return what a pool holds beside results of these sizes in bytes."""
    return pool_bytes - sum(-(-size // _POOL_UNIT) * _POOL_UNIT for size in results)


def pool_row(seqlen: int) -> dict[str, Any]:
    """Measure one length."""
    import cupy

    inputs = inputs_of(seqlen)
    pool = cupy.cuda.MemoryPool()
    begin = time.monotonic()
    with cupy.cuda.using_allocator(pool.malloc):
        results = both_passes(*inputs)
    cupy.cuda.Device().synchronize()
    seconds = time.monotonic() - begin
    peak = pool.total_bytes()
    finite = all(bool(cupy.isfinite(x).all()) for x in results)
    return {
        "seqlen": seqlen,
        "inputs_bytes": sum(x.nbytes for x in inputs),
        "results_bytes": sum(x.nbytes for x in results),
        "pool_bytes": peak,
        "beyond_bytes": beyond(peak, [x.nbytes for x in results]),
        "naive_p_bytes": BATCH * HEADS * seqlen**2 * results[0].itemsize,
        "seconds": round(seconds, 3),
        "finite": finite,
    }


def ncu_target(which: str) -> None:
    """Make one forward call inside the profiled range."""
    import cupy

    import cuflash

    shape = (BATCH, HEADS, NCU_LENGTH, HEAD_DIM)
    q, k, v = (normal(shape, DTYPE) for _ in range(3))
    call = {
        "ours": lambda: cuflash.attention(q, k, v, layout="bhsd"),
        "naive": lambda: baselines.forward(q, k, v)[0],
    }[which]
    call()  # compiles, loads cuBLAS, fills the pool
    cupy.cuda.Device().synchronize()
    cupy.cuda.runtime.profilerStart()
    call()
    cupy.cuda.Device().synchronize()
    cupy.cuda.runtime.profilerStop()


def ncu_command(ncu: str, which: str) -> list[str]:
    return [
        ncu,
        "--clock-control=none",
        "--cache-control=none",
        "--profile-from-start=off",
        f"--metrics={','.join(NCU_METRICS)}",
        "--csv",
        "--print-units=base",
        sys.executable,
        "-m",
        "bench.memory",
        "--ncu-target",
        which,
    ]


def read_ncu(text: str) -> dict[str, Any]:
    """Return DRAM bytes and kernels from ncu's CSV output.

    Raises
    ------
    ValueError
        There are no metrics in it.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError("no table of metrics")
    totals: dict[str, float] = dict.fromkeys(NCU_METRICS, 0.0)
    kernels = {}
    for row in csv.DictReader(lines[start:]):
        if row.get("Metric Name") in totals:
            number = float(row["Metric Value"].replace(",", ""))
            totals[row["Metric Name"]] += number * _UNITS[row["Metric Unit"]]
            kernels[row["ID"]] = row["Kernel Name"].split("(")[0]
    if not kernels:
        raise ValueError("no kernel was profiled")
    read, written = (round(totals[name]) for name in NCU_METRICS)
    total = read + written
    return {"read": read, "written": written, "bytes": total, "kernels": list(kernels.values())}


def dram_rows() -> None:
    """Print the DRAM traffic of both forwards, or why it is not known."""
    ncu = find_tool("ncu")
    if ncu is None:
        emit("dram", skipped="ncu is not installed")
        return
    rows = {}
    for which in ("ours", "naive"):
        command = ncu_command(ncu, which)
        typed = " ".join(Path(word).name if word.startswith("/") else word for word in command)
        try:
            done = subprocess.run(
                command, cwd=ROOT, capture_output=True, text=True, timeout=NCU_TIMEOUT
            )
        except subprocess.TimeoutExpired:
            emit("dram", which=which, skipped=f"ncu took more than {NCU_TIMEOUT} seconds")
            continue
        try:
            rows[which] = read_ncu(done.stdout)
        except ValueError as reason:
            tail = (done.stdout + done.stderr)[-500:]
            emit("dram", which=which, skipped=f"ncu, exit {done.returncode}: {reason}: {tail}")
            continue
        emit("dram", which=which, seqlen=NCU_LENGTH, command=typed, **rows[which])
    if len(rows) == 2:
        ratio = rows["naive"]["bytes"] / max(rows["ours"]["bytes"], 1)
        emit("dram ratio", naive_over_ours=round(ratio, 1))


def rows() -> list[dict[str, Any]]:
    """Measure all lengths; the last row says whether memory grows as it should."""
    both_passes(*inputs_of(256))  # compiles
    about = {"batch": BATCH, "heads": HEADS, "head_dim": HEAD_DIM, "dtype": DTYPE}
    measured = [pool_row(seqlen) for seqlen in LENGTHS]
    ratio = max(
        long["beyond_bytes"] / max(1, short["beyond_bytes"])
        for short, long in itertools.pairwise(measured)
    )
    right = ratio <= GROWTH_LIMIT and all(row["finite"] for row in measured)
    last = {"lengths": LENGTHS, "ratio": round(ratio, 3), "limit": GROWTH_LIMIT, "right": right}
    found: list[dict[str, Any]] = [{"kind": "memory", **about, **row} for row in measured]
    return [*found, {"kind": "memory ratio", **last}]


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.memory", description=__doc__)
    parser.add_argument("--no-ncu", action="store_true", help="leave the DRAM traffic out")
    parser.add_argument("--ncu-target", choices=("ours", "naive"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ncu_target:
        ncu_target(arguments.ncu_target)
        return 0
    emit("machine", **facts())
    found = rows()
    for row in found:
        emit(**row)
    if not arguments.no_ncu:
        dram_rows()
    return 0 if found[-1]["right"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
