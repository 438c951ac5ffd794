# SPDX-License-Identifier: Apache-2.0
"""First aid: what is installed, whether calls work here, and what to do where they do not.

Each line is found by itself, so that one that fails hides no other. Nothing here repairs; problems
are what calls would raise, or say, in the same words. A package that only some arrays need is
absent where it is not installed, which is no problem.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import platform
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cuflash

from . import cache, compile, device, environment, host, reference, select
from .device import Device
from .dtypes import DTYPES
from .problem import Traits

__all__ = ["main"]

#: Sizes of the self-test: more than one tile of queries and keys for the smallest kernels.
_LENGTH, _HEADS, _HEAD_DIM = 80, 2, 16
_ALLOWED = {"float32": 1e-5, "float16": 1e-2}  # of the largest element


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns 0 if calls work on some device, else 1."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,  # --clear deletes files
        prog="python -m cuflash",
        description="Say what is installed, whether it works, and what to do where it does not.",
    )
    parser.add_argument("--clear", action="store_true", help="empty the cache, and do nothing else")
    if parser.parse_args(arguments).clear:
        return _clear()
    report = _Report()
    with _quiet():
        versions = _versions()
    print(*versions, sep="\n")
    print(f"cache: {_attempt(report, lambda: _cache(report)) or 'none'}")
    compiler = _attempt(report, _compiler)
    print(f"C++ compiler: {compiler or 'none'}")
    with _quiet():
        has_cupy = _attempt(report, lambda: environment.import_cupy().__version__) is not None
    if has_cupy:
        print(f"NVRTC: {_attempt(report, _nvrtc) or 'none'}")
    count = _attempt(report, environment.gpu_count) if has_cupy else None
    if count:
        print(f"driver: CUDA {_attempt(report, _driver) or 'of unknown version'}")
    gpus = [
        index
        for index in range(count or 0)
        if _attempt(report, lambda i=index: _gpu(i)) is not None
    ]
    with _quiet():
        _attempt(report, environment.import_ml_dtypes)
    usable = [_works(report, "NumPy arrays", _test_cpu if compiler else None)]
    usable += [_works(report, f"CuPy arrays on GPU {i}", lambda i=i: _test_gpu(i)) for i in gpus]
    for index in gpus:
        _attempt(report, lambda i=index: _test_cupy(i))
    report.show()
    return 0 if any(usable) else 1


def _quiet() -> contextlib.AbstractContextManager[object]:
    """Let imports print nothing: what they raise is said, and NumPy shows it on a page besides."""
    return contextlib.redirect_stderr(io.StringIO())


class _Report:
    """What is absent and what is a problem, each once."""

    def __init__(self) -> None:
        self._absent: dict[str, None] = {}
        self._problems: dict[str, None] = {}

    def note(self, problem: str | None, absent: bool = False) -> None:
        """Add a problem, if it is one, or something that is absent."""
        if problem:
            (self._absent if absent else self._problems)[problem] = None

    def show(self) -> None:
        """Print all of it."""
        for text in self._absent:
            print(f"absent: {text}")
        for text in self._problems:
            print(f"problem: {text}")
        if not self._problems:
            print("no problems")


def _attempt(report: _Report, find: Callable[[], Any]) -> Any:
    """Return what `find` returns; None if it raises, which is then a problem, or absent."""
    try:
        with warnings.catch_warnings(record=True):  # that of the cache is a problem already
            warnings.simplefilter("always")
            return find()
    except environment.Absent as error:
        report.note(str(error), absent=True)
        return None
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        report.note(text if isinstance(error, RuntimeError) else f"{type(error).__name__}: {text}")
        return None


def _works(report: _Report, what: str, test: Callable[[], None] | None) -> bool:
    """Run a self-test, if there is what it needs, and print a line about it."""
    if test is None:  # what lacks is a problem already, and the test would say it in other words
        print(f"{what}: do not work")
        return False
    start, made = time.perf_counter(), len(cache.made)

    def run() -> bool:
        test()
        return True

    works = _attempt(report, run) is not None
    seconds = f"{time.perf_counter() - start:.1f} s"
    if len(cache.made) > made:
        seconds += f", with the compilation of {len(cache.made) - made} files"
    print(f"{what}: {f'work ({seconds})' if works else 'do not work'}")
    return works


# --- what is there --------------------------------------------------------------------------------


def _versions() -> list[str]:
    packages = (_version(name) for name in ("numpy", "cupy", "ml_dtypes"))
    return [
        f"cuflash {cuflash.__version__} in {Path(cuflash.__file__).parent}",
        f"Python {platform.python_version()}, {platform.platform()}",
        ", ".join(packages),
    ]


def _version(name: str) -> str:
    title = {"numpy": "NumPy", "cupy": "CuPy"}.get(name, name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return f"{title} {importlib.import_module(name).__version__}"
    except Exception as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == name
        return f"no {title}" if absent else f"{title} that does not load"


def _compiler() -> str:
    found = host.find_compiler()
    return f"{' '.join(found.command)}, {found.version.splitlines()[0]}"


def _nvrtc() -> str:
    return ".".join(map(str, compile.nvrtc_version()))


def _driver() -> str:
    version = environment.import_cupy().cuda.runtime.driverGetVersion()
    major, minor = divmod(version, 10**3)
    return f"{major}.{minor // 10}"


def _gpu(index: int) -> str:
    """Print which kernels serve a GPU."""
    facts = device.gpu(index)
    families = ", ".join(f"{name} by {_families(name, facts)}" for name in DTYPES)
    capability = ".".join(map(str, facts.capability))
    print(f"GPU {index}: {facts.name}, compute capability {capability}; {families}")
    return facts.name


def _families(dtype: str, facts: Device) -> str:
    plan = select.choose("forward", Traits(DTYPES[dtype], 64, 64), facts)
    return plan[-1].family


def _cache(report: _Report) -> str:
    report.note(cache.problem())
    return f"{cache.wanted()}, {_amount(cache.contents())}"


def _amount(files: Sequence[Path]) -> str:
    size = 0
    for path in files:
        try:
            size += path.stat().st_size
        except OSError:  # another process has cleared it
            continue
    return f"{len(files)} files, {size / 1e6:.1f} MB"


def _clear() -> int:
    try:
        amount = _amount(cache.contents())
        cache.clear()
    except RuntimeError as error:  # there is no such place, or it is somebody else's
        print(f"problem: {error}")
        return 1
    except OSError as error:
        print(f"problem: {cache.wanted()} cannot be emptied ({error.strerror})")
        return 1
    print(f"removed from {cache.wanted()}: {amount}")
    if others := _others():
        print(f"left there: {others} that cuflash has not made, or is making")
    return 0


def _others() -> str:
    """Say how many things the folder holds that are not removed."""
    try:
        count = len([*cache.wanted().iterdir()])
    except OSError:  # there is no folder
        return ""
    return f"{count} {'entry' if count == 1 else 'entries'}" if count else ""


# --- whether it works -----------------------------------------------------------------------------


def _test_cpu() -> None:
    _test("float32", np.asarray, np.asarray)


def _test_gpu(index: int) -> None:
    cupy = environment.import_cupy()
    with cupy.cuda.Device(index):
        for dtype in _ALLOWED:
            _test(dtype, cupy.asarray, cupy.asnumpy)


def _test_cupy(index: int) -> None:
    """Whether CuPy compiles kernels of its own, for which it needs headers."""
    cupy = environment.import_cupy()
    try:
        with cupy.cuda.Device(index):
            total = int((cupy.asarray(np.arange(3)) + 1).sum())
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RuntimeError(
            f"CuPy cannot compile kernels of its own ({reason}); it needs the headers of the CUDA "
            "runtime: `pip install nvidia-cuda-runtime` for CUDA 13 or "
            "`nvidia-cuda-runtime-cu12` for CUDA 12"
        ) from error
    if total != 6:
        raise RuntimeError(f"GPU {index} adds 1, 2 and 3 to {total}; update the driver and CuPy")


def _test(dtype: str, to_device: Callable[..., Any], to_host: Callable[..., Any]) -> None:
    """Compare both passes with the reference."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, _LENGTH, _HEADS, _HEAD_DIM)).astype(dtype)
    q, k, v, dout = x
    out, vjp = cuflash.attention_vjp(*map(to_device, (q, k, v)), causal=True)
    got = out, *vjp(to_device(dout))
    want = (
        reference.attention(q, k, v, causal=True),
        *reference.attention_backward(dout, q, k, v, causal=True),
    )
    for name, ours, right in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        error = np.abs(to_host(ours).astype(float) - right).max() / np.abs(right).max()
        if not error <= _ALLOWED[dtype]:
            raise RuntimeError(
                f"{name} in {dtype} is wrong (relative error {error:.1e}); empty the cache with "
                "`python -m cuflash --clear`, and if that does not help, report it with this page"
            )
