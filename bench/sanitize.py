# SPDX-License-Identifier: Apache-2.0
"""Every kernel over a small set of calls, compared with the reference: food for compute-sanitizer.

``python -m bench.gpu_check --only sanitize`` runs this under memcheck, racecheck, synccheck and
initcheck. CuPy's pool is off, so that each array is an allocation of its own and nothing can be
overrun unseen; inputs come from the host and no kernel of CuPy's is launched. Strided results are
views into buffers of a known value, which must be intact around them. The last line is a count in
JSON. ``--planted NAME`` runs a kernel of ``planted.cu`` instead, which a tool must report.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.families import NAMES, fastest
from bench.machine import ROOT, emit

sys.path.insert(0, str(ROOT / "tests"))

#: The kernel of planted.cu that each tool must report.
PLANTED = {
    "memcheck": "overrun",
    "racecheck": "race",
    "synccheck": "barrier",
    "initcheck": "unwritten",
}
DTYPES = ("float32", "float64", "float16", "bfloat16")


@dataclass(frozen=True)
class Case:
    """One call of both passes, for every dtype."""

    name: str
    lengths: tuple[int, int]  # of q, of k and v
    heads: tuple[int, int]
    head_dims: tuple[int, int]
    options: dict[str, Any] = field(default_factory=dict)
    batch: int | None = 1  # None: no such axis
    strided: bool = False  # inputs and results are views
    with_dlse: bool = True


CAUSAL = {"causal": True}
CASES = (
    Case("tails", (70, 133), (2, 1), (8, 8), batch=2),
    Case("rows without keys", (130, 70), (2, 2), (40, 40), CAUSAL),
    Case("window", (97, 129), (4, 2), (64, 64), {"window": (20, 5)}),
    Case("causal", (129, 129), (1, 1), (100, 100), CAUSAL, with_dlse=False),
    Case("two head sizes", (66, 100), (2, 1), (192, 128)),
    Case("largest head size", (35, 67), (2, 1), (512, 512), CAUSAL),
    Case("odd head sizes", (65, 65), (3, 1), (7, 5), {"window": (9, 0), "layout": "bhsd"}),
    Case("odd head sizes, copied", (257, 258), (2, 1), (41, 35)),
    Case("strided", (70, 90), (2, 2), (64, 40), CAUSAL, batch=2, strided=True),
    Case("no batch axis", (33, 65), (2, 1), (64, 64), batch=None),
    Case("no queries", (0, 5), (1, 1), (16, 16)),
    Case("no keys", (5, 0), (1, 1), (16, 16), CAUSAL),
    Case("no batch", (5, 5), (1, 1), (16, 16), batch=0),
)


#: Options; the arrays are drawn as the tests draw them.
OPTIONS = {
    "all options": ("softcap", "bias", "mask", "alibi", "sinks", "dropout"),
    "packed": ("packed",),
    "bias": ("bias",),
    "all options, packed": ("softcap", "bias", "mask", "alibi", "sinks", "dropout", "packed"),
}


def numpy_dtype(name: str) -> np.dtype:
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def accumulator(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def views(arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Return equal arrays as awkward views: reversed, inside NaNs, broadcast, at an odd address."""
    q, k, v, dout = arrays
    reverse = (slice(None), slice(None, None, -1), slice(None, None, -1), slice(None))
    batch, seq, heads, dim = k.shape
    around = np.full((batch, seq + 3, heads + 1, dim + 5), np.nan, k.dtype)
    inside = around[:, 2 : 2 + seq, :heads, 3 : 3 + dim]
    inside[...] = k
    shared = np.broadcast_to(v[:, :, :1], v.shape)
    flat = np.empty(dout.size + 1, dout.dtype)
    flat[1:] = dout.ravel()
    return [np.ascontiguousarray(q[reverse])[reverse], inside, shared, flat[1:].reshape(dout.shape)]


def inputs_of(case: Case, dtype: str) -> Any:
    """Return check.Inputs with NumPy arrays."""
    import check

    rng = np.random.default_rng(0)
    (sq, sk), (hq, hk), (d, dv) = case.lengths, case.heads, case.head_dims
    bhsd = case.options.get("layout") == "bhsd"
    batch = () if case.batch is None else (case.batch,)

    def draw(seq: int, heads: int, dim: int) -> np.ndarray:
        shape = (heads, seq, dim) if bhsd else (seq, heads, dim)
        return (rng.standard_normal((*batch, *shape)) + 0.25).astype(numpy_dtype(dtype))

    arrays = [draw(sq, hq, d), draw(sk, hk, d), draw(sk, hk, dv), draw(sq, hq, dv)]
    arrays = views(arrays) if case.strided else arrays
    dlse = rng.standard_normal((*batch, hq, sq)).astype(accumulator(dtype))
    return check.Inputs(*arrays, dlse if case.with_dlse else None, **case.options)


def upload(x: np.ndarray) -> Any:
    """Return the same view of a copy, in an allocation of exactly the size of what it looks at."""
    import cupy

    base = x
    while isinstance(base.base, np.ndarray):
        base = base.base
    offset = x.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    copy = cupy.asarray(np.ascontiguousarray(base).reshape(-1).view(np.uint8))
    return cupy.ndarray(x.shape, x.dtype, copy.data + offset, x.strides)


class Destination:
    """A strided array for a result, in a buffer that holds sevens."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype) -> None:
        batch, seq, heads, dim = shape
        self.buffer = np.full((batch, seq + 2, heads, 2 * dim + 3), 7, dtype)
        self.where = np.s_[:, 1 : 1 + seq, :, 1 : 1 + 2 * dim : 2]
        self.view = upload(self.buffer[self.where])

    def result(self) -> np.ndarray:
        """Return what was written, after a look at what must not have been."""
        import cupy

        base = self.view.data.mem  # the whole allocation
        data = cupy.ndarray(self.buffer.shape, self.buffer.dtype, cupy.cuda.MemoryPointer(base, 0))
        got = data.get()
        result = got[self.where].copy()
        got[self.where] = 7
        assert (got == 7).all(), f"{(got != 7).sum()} elements beside a strided result are written"
        return result


def run_options(options: tuple[str, ...], dtype: str) -> None:
    """Run calls with options, of several shapes of bias and mask, and compare."""
    import check
    import strategies
    from run import both

    for seed in range(3):
        case = strategies.Case(
            dtype, None if "packed" in options else 2, 2, 2, 70 + seed, 133, 64, 40,
            causal=seed == 1, window=(-1, -1), scale=None, layout="bshd",
            views=("contiguous",) * 4, values="normal", with_dlse=True, seed=seed, schedule=0,
            options=options, entries=3,
        )  # fmt: skip
        inputs = strategies.arrays_of(case)
        out, lse, grads = both(inputs.moved(upload))
        check.check_forward(out, lse, inputs)
        check.check_backward(grads, inputs)


def run_merge(dtype: str) -> None:
    """Merge few parts and more than one launch takes, some of them ignored, and compare."""
    import cuflash

    rng = np.random.default_rng(0)
    for count, dim in ((3, 64), (18, 5)):
        shape = (2, 33, 3, dim)
        outs = [rng.standard_normal(shape).astype(numpy_dtype(dtype)) for _ in range(count)]
        lses = [rng.standard_normal((2, 3, 33)).astype(accumulator(dtype)) for _ in range(count)]
        lses[1][..., :9] = -np.inf
        outs[1][:, :9] = np.nan
        outs[2] = outs[2][:, ::-1]
        to = Destination(shape, numpy_dtype(dtype))
        given = [[upload(x) for x in parts] for parts in (outs, lses)]
        got = cuflash.merge_states(*given, out=(to.view, None))
        want = cuflash.reference.merge_states(outs, lses)
        error = {"float64": 1e-13, "float32": 1e-5}.get(dtype, 2e-2)
        np.testing.assert_allclose(to.result().astype("f8"), want[0], atol=error)
        np.testing.assert_allclose(got[1].get(), want[1], atol=1e-5)


def run(case: Case, dtype: str) -> None:
    """Run both passes and compare."""
    import check

    import cuflash

    inputs = inputs_of(case, dtype)
    q, k, v, dout = (upload(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    dlse = None if inputs.dlse is None else upload(inputs.dlse)
    options = inputs.options
    if not case.strided:
        out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
        plain = cuflash.attention(q, k, v, **options)
        grads = cuflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **options)
        assert check.host(plain).tobytes() == check.host(out).tobytes(), (
            "the same call gave other bits"
        )
        check.check_forward(out, lse, inputs)
        check.check_backward(grads, inputs)
        return
    to = Destination(inputs.dout.shape, inputs.q.dtype)
    out, lse = cuflash.attention(q, k, v, return_lse=True, out=(to.view, None), **options)
    shapes = [x.shape for x in (inputs.q, inputs.k, inputs.v)]
    to_grads = [Destination(shape, inputs.q.dtype) for shape in shapes]
    given = tuple(x.view for x in to_grads)
    cuflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, out=given, **options)
    check.check_forward(to.result(), lse, inputs)
    check.check_backward(cuflash.Gradients(*(x.result() for x in to_grads)), inputs)


def check_all(wanted: str) -> int:
    """Run all cases whose name has `wanted` in it; returns the exit code."""
    import cupy

    from cuflash import compile

    cupy.cuda.set_allocator(None)
    begin = time.monotonic()
    count, failed = 0, []
    todo: list[tuple[str, Callable[[str], None]]]
    todo = [(case.name, functools.partial(run, case)) for case in CASES]
    todo += [(name, functools.partial(run_options, x)) for name, x in OPTIONS.items()]
    todo += [("merge", run_merge)]
    for case_name, action in todo:
        for dtype in DTYPES:
            name = f"{dtype} {case_name}"
            if wanted not in name:
                continue
            count += 1
            start = time.monotonic()
            try:
                action(dtype)
                verdict = "ok"
            except Exception as error:
                failed.append(name)
                verdict = f"FAILED {type(error).__name__}: {error}"
                if not isinstance(error, AssertionError):
                    traceback.print_exc()
            print(f"{verdict} {name} ({time.monotonic() - start:.1f} s)", flush=True)
    kernels = Counter(plan.kernel for plan, _ in compile._kernels)
    seconds = round(time.monotonic() - begin, 1)
    emit("sanitize", cases=count, failed=failed, plans=dict(kernels), seconds=seconds)
    return 1 if failed or not count else 0


def planted(name: str) -> int:
    """Run a faulty kernel."""
    import cupy

    cupy.cuda.set_allocator(None)
    source = Path(__file__).with_name("planted.cu").read_text(encoding="utf-8")
    kernel = cupy.RawModule(code=source).get_function(name)
    n = 40
    x = cupy.empty(n, np.int32)
    kernel((1,), (64,), (x, np.int32(n)))
    cupy.cuda.Device().synchronize()
    print(f"{name} ran", flush=True)
    return 0


def plans(where: Any) -> Iterator[Any]:
    """Yield the plans of all cases on a device, and those that the tests run."""
    from cuflash import select
    from cuflash.dtypes import DTYPES as ROWS
    from cuflash.problem import FEATURES, Traits

    kinds = [(case.head_dims, ()) for case in CASES]
    kinds += [((64, 40), tuple(n for n in FEATURES if n in some)) for some in OPTIONS.values()]
    for head_dims, options in kinds:
        for dtype, boxes in itertools.product(DTYPES, (True, False)):
            traits = Traits(ROWS[dtype], *head_dims, options, boxes=boxes)
            for direction in ("forward", "backward"):
                yield from select.choose(direction, traits, where)
    try:
        import matrix

        for row in matrix.ROWS + matrix.OPTION_ROWS + matrix.FEW_ROWS:
            yield from (*row.forward, *row.backward)
    except (ImportError, AttributeError) as reason:  # they compile their own, then
        print(f"plans of the tests are left out: {reason}", flush=True)


def compile_all(arch: str | None, workers: int) -> int:
    """Fill the cache of compiled kernels; needs no GPU if `arch` is given."""
    from cuflash import compile, device

    where = device.gpu(0) if arch is None else device.architecture(int(arch[:-1]), int(arch[-1]))
    wanted = list(dict.fromkeys(plans(where)))
    begin = time.monotonic()
    # Processes: two threads that make NVRTC 13.0 load its built-ins at once both fail.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        paths = list(pool.map(compile.cubin, wanted, itertools.repeat(where)))
    size = sum(path.stat().st_size for path in paths)
    seconds = round(time.monotonic() - begin, 1)
    emit("compile", plans=len(wanted), seconds=seconds, bytes=size, folder=str(paths[0].parent))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.sanitize", description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name, as printed, holds this")
    parser.add_argument(
        "--family", choices=NAMES, help="the fastest family of kernels to run (default: any)"
    )
    parser.add_argument("--planted", choices=PLANTED.values())
    parser.add_argument("--compile", action="store_true", help="only compile, into the cache")
    parser.add_argument("--arch", help="with --compile: for this one, such as 90, without a GPU")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    with fastest(arguments.family):
        if arguments.planted:
            return planted(arguments.planted)
        if arguments.compile:
            return compile_all(arguments.arch, arguments.workers)
        return check_all(arguments.only)


if __name__ == "__main__":
    raise SystemExit(main())
