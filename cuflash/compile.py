# SPDX-License-Identifier: Apache-2.0
"""Plan -> translation unit -> kernel.

For a GPU, NVRTC makes a cubin, which ``cupy.RawModule(path=...)`` loads. ``RawModule(code=...)``
would compile by itself, but always for ``sm_90`` and never ``sm_90a`` (which Hopper's own
instructions need), with numerics flags of its own, and its cache does not see included headers.
For the CPU, the machine's C++ compiler makes a shared library of the same sources.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import environment, host, source
from .cache import all_cached, cached
from .device import Device
from .dtypes import DTYPES
from .plan import UnitPlan

__all__ = [
    "CpuKernel",
    "GpuKernel",
    "Usage",
    "cubin",
    "executor_library",
    "host_library",
    "kernel",
    "kernels",
    "nvrtc_version",
]

_lock = threading.RLock()
if hasattr(os, "register_at_fork"):
    # A child forked while another thread was compiling would inherit a lock that nobody opens.
    def _new_lock() -> None:
        global _lock
        _lock = threading.RLock()

    os.register_at_fork(after_in_child=_new_lock)


def translation_unit(plan: UnitPlan, *, cpu: bool) -> str:
    """Return the source text of a kernel: the plan's constants, then the kernel's file."""
    lines = ['#include "host/cuda.h"'] if cpu else []
    lines += ['#include "parts/types.cuh"', "namespace plan {"]
    lines += [f"using Element = {DTYPES[plan.dtype].cxx};"]
    lines += [f"constexpr {kind} {name} = {value};" for kind, name, value in plan.constants()]
    lines += ["}  // namespace plan", f'#include "attention/{plan.kernel}.cu"']
    if cpu:
        lines += [f"#define CUFLASH_KERNEL {plan.kernel}", f"#define CUFLASH_PARAMS {plan.params}"]
        lines += ['#include "host/entry.h"']
    return "\n".join(lines) + "\n"


#: A file of the disk cache: its name, and what makes it at a path.
_File = tuple[str, Callable[[Path], None]]


def _file(
    name: str, suffix: str, text: str, includes: tuple[str, ...], rest: object, build: Callable
) -> _File:
    """Return the file that ``build(path)`` makes of a translation unit.

    Its key is a digest of the text, of all files it includes, and of `rest` (options, compiler).
    """
    sources = source.digest(text, includes)
    key = hashlib.sha256(repr((sources, rest)).encode()).hexdigest()[:24]

    def build_unchanged(path: Path) -> None:
        build(path)
        if source.digest(text, includes) != sources:
            raise RuntimeError(f"the sources of {name} changed while it was compiled; call again")

    return f"{name}-{key}{suffix}", build_unchanged


# --- GPU -----------------------------------------------------------------------------------------


class Usage(NamedTuple):
    """What ptxas says of a kernel."""

    registers: int
    spill_bytes: int  # loads and stores of spilled registers
    stack_bytes: int
    warnings: tuple[str, ...]


def nvrtc_version() -> tuple[int, int]:
    """Return the version of the NVRTC library that CuPy loads."""
    return _nvrtc().getVersion()


def _nvrtc() -> Any:
    cupy = environment.import_cupy()
    try:
        nvrtc = cupy.cuda.nvrtc
        nvrtc.getVersion()
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise RuntimeError(
            f"NVRTC, CUDA's run-time compiler, cannot be loaded ({reason[0]}); install it with "
            "`pip install nvidia-cuda-nvrtc` for CUDA 13 or `nvidia-cuda-nvrtc-cu12` for CUDA 12"
        ) from error
    return nvrtc


def _target(device: Device) -> str:
    return f"sm_{device.capability[0]}{device.capability[1]}"


def _nvrtc_options(target: str) -> tuple[str, ...]:
    return (
        f"--gpu-architecture={target}",
        "--std=c++17",
        "--generate-line-info",
        "--diag-suppress=177",  # a constant that this kernel does not use
        "--ptxas-options=-v",
    )


def compile_cubin(text: str, plan: UnitPlan, device: Device) -> tuple[bytes, str]:
    """Compile a translation unit; returns the cubin and the compiler's log. Needs no GPU."""
    name, target = plan.kernel, _target(device) + plan.target_suffix
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(text, f"{name}.plan.cu", (), ())
    options = (*_nvrtc_options(target), f"-I{source.KERNEL_ROOT}")
    if nvrtc.getVersion() >= (13, 0):
        options += ("--no-cache",)  # its own cache: on a hit it forgets to report registers
    try:
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            if "gpu-architecture" in log:
                version = ".".join(map(str, nvrtc.getVersion()))
                suffix = "" if nvrtc.getVersion() >= (13, 0) else "-cu12"
                raise RuntimeError(
                    f"NVRTC {version} does not know {device.name}, of compute capability "
                    f"{'.'.join(map(str, device.capability))}; install a version that does "
                    f"(`pip install -U nvidia-cuda-nvrtc{suffix}`)"
                ) from error
            raise RuntimeError(f"{name} does not compile for {target}:\n{log}") from error
        log = nvrtc.getProgramLog(program)
        # CuPy's getCUBIN drops the last byte, which is zero.
        return nvrtc.getCUBIN(program) + b"\0", log
    finally:
        nvrtc.destroyProgram(program)


def usage(log: str) -> Usage:
    """Read ptxas' report."""

    def total(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, log))

    return Usage(
        registers=max((int(n) for n in re.findall(r"Used (\d+) registers", log)), default=0),
        spill_bytes=total(r"(\d+) bytes spill (?:stores|loads)"),
        stack_bytes=total(r"(\d+) bytes stack frame"),
        warnings=tuple(line for line in log.splitlines() if "warning" in line or "C75" in line),
    )


def cubin(plan: UnitPlan, device: Device) -> Path:
    """Return the compiled kernel of a plan, from the disk cache where it is there."""
    return cached(*_cubin(plan, device))


def _cubin(plan: UnitPlan, device: Device) -> _File:
    text = translation_unit(plan, cpu=False)
    target = _target(device) + plan.target_suffix

    def build(path: Path) -> None:
        image, log = compile_cubin(text, plan, device)
        path.write_bytes(image)
        if os.environ.get("CUFLASH_DEBUG"):
            used = usage(log)
            sys.stderr.write(  # in one piece, since other threads may write too
                f"cuflash: compiled {plan.kernel} for {target}: {used.registers} registers, "
                f"{used.spill_bytes} bytes spilled\n"
            )

    rest = _nvrtc_options(target), nvrtc_version()
    return _file(f"{plan.kernel}-{target}", ".cubin", text, (".",), rest, build)


#: What a driver says of a kernel that a newer compiler made.
_UNLOADABLE = ("INVALID_IMAGE", "INVALID_SOURCE", "NO_BINARY_FOR_GPU", "UNSUPPORTED_PTX_VERSION")


class GpuKernel:
    """A kernel on one GPU, which must be the current one when it is made and launched."""

    def __init__(self, plan: UnitPlan, path: Path, device: Device) -> None:
        import cupy

        raw = cupy.RawModule(path=str(path)).get_function(plan.kernel)
        try:
            # RawModule is lazy: this loads it, and without it 48 KiB are the limit.
            raw.max_dynamic_shared_size_bytes = plan.smem_bytes
        except Exception as error:
            if not any(name in str(error) for name in _UNLOADABLE):
                raise
            version = ".".join(map(str, nvrtc_version()))
            raise RuntimeError(
                f"the driver does not load what NVRTC {version} compiles for {device.name} "
                f"({error}); update the driver, or install NVRTC for the driver's CUDA version, "
                "which `nvidia-smi` prints: `pip install nvidia-cuda-nvrtc` for CUDA 13 or "
                "`nvidia-cuda-nvrtc-cu12` for CUDA 12"
            ) from error
        self._module = raw  # keeps the code loaded
        self._threads = plan.threads
        self._smem = plan.smem_bytes
        self._function = raw.kernel.ptr  # of this device
        # As RawKernel does when called, in a quarter of its time.
        self._launch = cupy.cuda.driver.launchKernel

    def launch(self, blocks: int, params: int, stream: int) -> None:
        """Start the kernel on a stream; `params` is the address of a list with Params' address."""
        self._launch(
            self._function, blocks, 1, 1, self._threads, 1, 1, self._smem, stream, params, 0
        )


# --- CPU -----------------------------------------------------------------------------------------


def _library(name: str, text: str, *, is_kernel: bool, instrumented: bool = False) -> _File:
    compiler = host.find_compiler()
    includes = [source.KERNEL_ROOT / folder for folder in source.HOST_INCLUDES]

    def build(path: Path) -> None:
        host.compile_library(
            compiler, text, includes, path, kernel=is_kernel, instrumented=instrumented
        )

    # A home folder may be shared by machines of several kinds.
    rest = compiler, host.flags(compiler, is_kernel, instrumented), platform.machine()
    return _file(f"{name}-cpu", ".so", text, source.HOST_INCLUDES, rest, build)


def executor_library() -> Path:
    """Return what runs kernels on the CPU, as a shared library."""
    return cached(*_executor())


def _executor() -> _File:
    return _library("executor", '#include "host/executor.cpp"\n', is_kernel=False)


@functools.cache
def _runtime() -> host.Runtime:
    return host.Runtime(executor_library())


def host_races() -> bool:
    """Return whether the CPU back end looks for races: $CUFLASH_HOST_RACES is set, and not 0."""
    return os.environ.get("CUFLASH_HOST_RACES", "0") not in ("", "0")


def host_library(plan: UnitPlan, instrumented: bool = False) -> Path:
    """Return the kernel of a plan as a shared library for the CPU back end."""
    return cached(*_host_library(plan, instrumented))


def _host_library(plan: UnitPlan, instrumented: bool) -> _File:
    text = translation_unit(plan, cpu=True)
    return _library(plan.kernel, text, is_kernel=True, instrumented=instrumented)


class CpuKernel:
    """A kernel for the CPU back end; one that looks for races is compiled when it is wanted."""

    def __init__(self, plan: UnitPlan) -> None:
        self.plan = plan
        self._kernels: dict[bool, host.HostKernel] = {}
        self._kernel(host_races())

    def _kernel(self, instrumented: bool) -> host.HostKernel:
        if instrumented not in self._kernels:
            with _lock:
                if instrumented not in self._kernels:
                    library = host_library(self.plan, instrumented)
                    kernel = host.HostKernel(_runtime(), library, self.plan.kernel)
                    self._kernels[instrumented] = kernel
        return self._kernels[instrumented]

    def launch(
        self,
        blocks: int,
        params: bytes,
        buffers: Sequence[tuple[str, int, int, bool]],
        seed: int,
    ) -> None:
        """Run the kernel to its end."""
        plan = self.plan
        self._kernel(host_races()).launch(
            blocks,
            plan.threads,
            plan.smem_bytes,
            params[: plan.params_bytes],
            buffers,
            seed,
            smem_alignment=plan.smem_alignment,
            in_order=plan.waits_for_blocks,
        )


_kernels: dict[tuple[UnitPlan, int | None], Any] = {}


def kernels(plans: Sequence[UnitPlan], device: Device, index: int | None) -> tuple[Any, ...]:
    """Return the kernels of plans on the GPU with this index (None: on the CPU).

    Each is compiled at most once, also when several threads ask at once, and beside the others
    that are missing.
    """
    if any((plan, index) not in _kernels for plan in plans):
        with _lock:
            missing = [plan for plan in dict.fromkeys(plans) if (plan, index) not in _kernels]
            for plan, made in zip(missing, _make(missing, device), strict=True):
                _kernels[plan, index] = made
    return tuple(_kernels[plan, index] for plan in plans)


def _make(plans: Sequence[UnitPlan], device: Device) -> list[Any]:
    if not device.is_cpu:
        paths = all_cached([_cubin(plan, device) for plan in plans])
        return [GpuKernel(plan, path, device) for plan, path in zip(plans, paths, strict=True)]
    files = [_host_library(plan, host_races()) for plan in plans]
    if not _runtime.cache_info().currsize:
        files.append(_executor())
    if len(files) > 1:
        all_cached(files)  # where CpuKernel finds them
    return [CpuKernel(plan) for plan in plans]


def kernel(plan: UnitPlan, device: Device, index: int | None) -> Any:
    """Return the kernel of one plan."""
    return kernels((plan,), device, index)[0]
