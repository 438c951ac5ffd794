# SPDX-License-Identifier: Apache-2.0
"""Kernels on the CPU: compile them with the machine's C++ compiler, load them and launch them.

The executor (``kernels/host/executor.cpp``) and each kernel are shared libraries. This module finds
a compiler, makes the libraries and calls them; what a translation unit holds and where libraries
are kept is the caller's business.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from . import disk

__all__ = [
    "Compiler",
    "HostKernel",
    "KernelFault",
    "Runtime",
    "compile_library",
    "find_compiler",
    "flags",
    "probe",
]

_TRIVIAL = 'extern "C" __attribute__((visibility("default"))) int f(int* p) { return *p; }\n'
_INSTRUMENT = "-fsanitize=thread"
_REPORT_BYTES = 4096
_HOST_FOLDER = re.compile(r"/kernels/host/")
_MAX_BLOCK = 1024
_MAX_GRID = 2**31 - 1
_MAX_RESIDENT = 4  # kMaxResident of executor/state.h


class KernelFault(RuntimeError):
    """A kernel did on the CPU what it must not do on a GPU; the text says what and where."""


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler.

    Attributes
    ----------
    command : tuple of str
        The program and its leading arguments.
    version : str
        What it says about itself; tells its brand, and belongs in the key of a cache.
    """

    command: tuple[str, ...]
    version: str

    @property
    def is_zig(self) -> bool:
        """Whether this is clang in the shape of ``zig c++``, which has defaults of its own."""
        return "c++" in self.command and any("zig" in Path(part).name for part in self.command)


def flags(compiler: Compiler, kernel: bool, instrumented: bool = False) -> tuple[str, ...]:
    """Return the options that a library is compiled with.

    Parameters
    ----------
    compiler : Compiler
        From `find_compiler`.
    kernel : bool
        Whether the library is a kernel's: quick to compile, with its array indices checked.
    instrumented : bool
        Whether a kernel tells each of its accesses to memory, so that races are found.

    Returns
    -------
    tuple of str
        To be part of a cache's key.
    """
    clang = "clang" in compiler.version
    # Only libc is used. No contraction, no excess speed: the results are those of the source.
    options = ["-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-Wno-psabi"]
    # Line numbers; addr2line of Debian 12 misreads those of DWARF 5.
    options += ["-g1", "-gdwarf-4"]
    options += ["-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics", "-fno-strict-aliasing"]
    options += ["-ffp-contract=off", "-fno-math-errno", "-U_FORTIFY_SOURCE"]
    if clang:
        options += ["-nostdlib++", "-Wno-unused-command-line-argument"]
    else:
        options += ["-fno-gnu-unique"]  # or two variants of a kernel would share their statics
    if compiler.is_zig:
        # Code for any CPU of this kind, as from the others; none of the checks it adds by itself.
        options += ["-mcpu=baseline", "-fno-sanitize=all", "-fno-stack-protector"]
    if not kernel:
        return (*options, "-O2")
    # Probing each page of a large frame makes a stack overflow hit the guard page.
    options += ["-O1", "-fstack-clash-protection"]
    if clang:
        checks = "bounds,alignment"
        options += [f"-fsanitize={checks}", f"-fsanitize-trap={checks}", "-fstrict-flex-arrays=3"]
        release = re.search(r"clang version (\d+)", compiler.version)
        if release and int(release[1]) >= 20:
            options += ["-fno-sanitize-merge"]  # one trap a check, so that each has its line
    else:
        options += ["-fsanitize=bounds-strict,alignment", "-fsanitize-undefined-trap-on-error"]
    if instrumented:
        # Past clang's driver, so that zig, which has a library for it, does not undo it.
        options += ["-DCUFLASH_INSTRUMENTED", *(["-Xclang"] if clang else []), _INSTRUMENT]
    return tuple(options)


@functools.lru_cache(maxsize=1)
def find_compiler() -> Compiler:
    """Find a C++ compiler that works.

    Returns
    -------
    Compiler
        ``$CXX``, ``g++``, ``clang++`` or the package ziglang: the first that makes a library.

    Raises
    ------
    RuntimeError
        If there is none, or if ``$CXX`` does not work, or if this is not Linux, or if the folder of
        temporary files is full or mounted noexec, or ziglang's cache is full.
    """
    if not sys.platform.startswith("linux"):
        raise RuntimeError("running kernels on the CPU needs Linux for now")
    chosen = os.environ.get("CXX", "").strip()
    if chosen:
        try:
            return probe(tuple(shlex.split(chosen)))
        except disk.Unusable:  # no compiler's fault
            raise
        except (OSError, ValueError, RuntimeError) as error:
            raise RuntimeError(
                f"the C++ compiler that $CXX names does not work: {error}; name another one in "
                "CXX, or unset it"
            ) from None
    candidates: list[tuple[str, ...]] = [
        (program,) for program in ("g++", "clang++") if shutil.which(program)
    ]
    if find_spec("ziglang"):
        candidates.append((sys.executable, "-m", "ziglang", "c++"))
    failures = ""
    for command in candidates:
        try:
            return probe(command)
        except disk.Unusable:
            raise
        except (OSError, RuntimeError) as error:
            failures += f"; {shlex.join(command)} is there, but: {str(error).splitlines()[-1]}"
    raise RuntimeError(
        "running kernels on the CPU needs a C++ compiler: install one (`pip install ziglang`, or "
        f"g++ or clang++ from the system), or name one in the environment variable CXX{failures}"
    )


def probe(command: tuple[str, ...]) -> Compiler:
    """Return the compiler that a command runs; RuntimeError or OSError if it does not work."""
    compiler = Compiler(command, _run([*command, "--version"]).strip())
    try:
        with tempfile.TemporaryDirectory(prefix="cuflash-") as folder:
            # A kernel's flags contain nearly all of the executor's.
            compile_library(compiler, _TRIVIAL, (), Path(folder, "probe.so"), kernel=True)
            disk.load(Path(folder, "probe.so"), "TMPDIR")
    except (OSError, RuntimeError) as error:
        full = disk.explain(error)
        if full is None:
            raise
        raise full from error
    return compiler


def compile_library(
    compiler: Compiler,
    source_text: str,
    include_dirs: Iterable[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    kernel: bool,
    instrumented: bool = False,
) -> None:
    """Compile a translation unit to a shared library.

    Parameters
    ----------
    compiler : Compiler
        From `find_compiler`.
    source_text : str
        The translation unit.
    include_dirs : iterable of path
        Folders to look for included files in, in this order.
    output : path
        The library. It appears complete or not at all, and replaces an older one.
    kernel, instrumented : bool
        See `flags`.

    Raises
    ------
    RuntimeError
        With the compiler's messages, if it fails.
    """
    output = Path(output)
    # In the output's folder, so that the library can be renamed into place.
    with tempfile.TemporaryDirectory(prefix=".compile-", dir=output.parent) as folder:
        source, library = Path(folder, f"{output.stem}.cpp"), Path(folder, output.name)
        source.write_text(source_text, encoding="utf-8")
        includes = [f"-I{os.fspath(directory)}" for directory in include_dirs]
        options = flags(compiler, kernel, instrumented)
        inputs = [*includes, str(source)]
        if instrumented:
            # The linker must not hear of the option: the library that belongs to it would take over
            # the process. What the compiler calls is defined in kernels/host/instrument.h.
            inputs = [str(Path(folder, f"{output.stem}.o"))]
            compiled = [*options, "-c", *includes, str(source), "-o", inputs[0]]
            _run([*compiler.command, *compiled])
            options = tuple(x for x in options if x not in ("-Xclang", _INSTRUMENT))
        _run([*compiler.command, *options, *inputs, "-o", str(library), "-lm"])
        os.replace(library, output)


def _run(command: Sequence[str]) -> str:
    """Run a program and return its output; RuntimeError with what it said if it fails."""
    environment = {**os.environ, "LC_ALL": "C"}
    is_zig = any("zig" in part for part in command)
    if is_zig:
        environment = {**_zig_caches(), **environment}
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if result.returncode:
        error = RuntimeError(f"{shlex.join(command)} failed:\n{result.stdout.strip()}")
        raise (disk.explain(error, _zig_place()) if is_zig else None) or error
    return result.stdout


def _zig_place() -> dict[str, Path]:
    """Return where zig caches, by the variable that names the place; empty if it has none."""
    own, base, home = map(os.environ.get, ("ZIG_GLOBAL_CACHE_DIR", "XDG_CACHE_HOME", "HOME"))
    if own:
        return {"ZIG_GLOBAL_CACHE_DIR": Path(own).absolute()}
    if base or home:  # else zig looks no further
        return {"XDG_CACHE_HOME": Path(base or Path(home or "/", ".cache"), "zig").absolute()}
    return {}


@functools.lru_cache(maxsize=1)
def _zig_caches() -> dict[str, str]:
    """Return where zig shall cache, if it cannot do so in its own place: it would not run."""
    for folder in _zig_place().values():
        while not folder.exists():
            folder = folder.parent
        if folder.is_dir() and os.access(folder, os.W_OK):
            return {}
    private = tempfile.mkdtemp(prefix="cuflash-zig-")
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    return {"ZIG_GLOBAL_CACHE_DIR": private, "ZIG_LOCAL_CACHE_DIR": private}


class _Range(ctypes.Structure):
    _fields_ = (
        ("low", ctypes.c_size_t),
        ("high", ctypes.c_size_t),
        ("name", ctypes.c_char_p),
        ("writable", ctypes.c_int),
    )


class _Launch(ctypes.Structure):
    """host::Launch of executor.h."""

    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("instrumented", ctypes.c_int),
        ("in_order", ctypes.c_int),
        ("resident", ctypes.c_uint),
        ("shared_alignment", ctypes.c_size_t),
        ("kernel", ctypes.c_char_p),
        ("params", ctypes.c_char_p),
        ("params_bytes", ctypes.c_size_t),
        ("ranges", ctypes.POINTER(_Range)),
        ("range_count", ctypes.c_size_t),
        ("shared_bytes", ctypes.c_size_t),
        ("seed", ctypes.c_uint64),
        ("grid", ctypes.c_uint),
        ("block", ctypes.c_uint),
        ("report", ctypes.c_void_p),
        ("report_bytes", ctypes.c_size_t),
        ("fault_library", ctypes.c_void_p),
        ("fault_library_bytes", ctypes.c_size_t),
        ("fault_offset", ctypes.c_uint64),
    )


class Runtime:
    """The executor, loaded.

    Parameters
    ----------
    library : path
        Made by `compile_library` from ``#include "host/executor.cpp"``.
    """

    def __init__(self, library: str | os.PathLike[str]) -> None:
        self._library = disk.load(Path(library), "CUFLASH_CACHE_DIR")
        self.launch = self._library.cuflash_launch
        self.launch.argtypes = (ctypes.POINTER(_Launch),)
        self.launch.restype = ctypes.c_int


class HostKernel:
    """A kernel, loaded.

    Parameters
    ----------
    runtime : Runtime
        What runs it.
    library : path
        Made by `compile_library` from a translation unit that ends with ``host/entry.h``.
    name : str
        For reports.
    """

    def __init__(self, runtime: Runtime, library: str | os.PathLike[str], name: str) -> None:
        self._runtime = runtime
        self._name = name
        self._path = os.fspath(library)
        self._library = disk.load(Path(library), "CUFLASH_CACHE_DIR")
        self.instrumented = hasattr(self._library, "cuflash_instrumented")
        self._library.cuflash_params_bytes.restype = ctypes.c_size_t
        self._params_bytes = self._library.cuflash_params_bytes()
        self._entry = ctypes.cast(self._library.cuflash_entry, ctypes.c_void_p).value

    def launch(
        self,
        grid: int,
        block: int,
        smem_bytes: int,
        params: bytes,
        buffers: Sequence[tuple[str, int, int, bool]],
        seed: int = 0,
        *,
        smem_alignment: int = 128,
        in_order: bool = False,
        resident: int = 0,
    ) -> None:
        """Run the kernel and wait for its end. Several Python threads may do so at once.

        Parameters
        ----------
        grid, block : int
            Number of blocks, and of threads in each.
        smem_bytes : int
            Dynamic shared memory of a block.
        params : bytes
            The kernel's one parameter.
        buffers : sequence of (name, low, high, writable)
            Global memory that it may access: the bytes at addresses ``low`` to ``high - 1``.
        seed : int
            Chooses the order in which threads and blocks run; 0 is the plain one.
        smem_alignment : int
            Alignment of the shared memory: 128, or 1024 for swizzled tiles.
        in_order : bool
            Start blocks in the order of their indices whatever the seed, for kernels whose blocks
            wait for earlier ones.
        resident : int
            So many blocks are alive at once; 0 is one in the plain order and two in the others.

        Raises
        ------
        ValueError
            If a number is out of its range or `params` has not the size that the kernel expects.
        KernelFault
            If the kernel does what it must not do. Buffers then hold what was written so far.
        """
        if not 0 < grid <= _MAX_GRID:
            raise ValueError(f"grid must be from 1 to {_MAX_GRID}, got {grid}")
        if not 0 < block <= _MAX_BLOCK:
            raise ValueError(f"block must be from 1 to {_MAX_BLOCK}, got {block}")
        if smem_bytes < 0:
            raise ValueError(f"smem_bytes must not be negative, got {smem_bytes}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must be from 0 to 2**64 - 1, got {seed}")
        if len(params) != self._params_bytes:
            raise ValueError(
                f"params of {self._name} must have {self._params_bytes} bytes, got {len(params)}"
            )
        ranges = (_Range * len(buffers))(
            *((low, high, name.encode(), writable) for name, low, high, writable in buffers)
        )
        report = ctypes.create_string_buffer(_REPORT_BYTES)
        library = ctypes.create_string_buffer(_REPORT_BYTES)
        if smem_alignment not in (128, 256, 512, 1024):
            raise ValueError(f"smem_alignment must be 128 to 1024, got {smem_alignment}")
        if not 0 <= resident <= _MAX_RESIDENT:
            raise ValueError(f"resident must be from 0 to {_MAX_RESIDENT}, got {resident}")
        launch = _Launch(
            entry=self._entry,
            instrumented=self.instrumented,
            in_order=in_order,
            resident=resident,
            shared_alignment=smem_alignment,
            kernel=self._name.encode(),
            params=params,
            params_bytes=len(params),
            ranges=ranges,
            range_count=len(buffers),
            shared_bytes=smem_bytes,
            seed=seed,
            grid=grid,
            block=block,
            report=ctypes.addressof(report),
            report_bytes=_REPORT_BYTES,
            fault_library=ctypes.addressof(library),
            fault_library_bytes=_REPORT_BYTES,
        )
        if self._runtime.launch(launch):
            text = report.value.decode("utf-8", "replace")
            # The places of plain accesses, as offsets into the library: see Text::add_place.
            text = re.sub(
                r"\{\+0x([0-9a-f]+)\}", lambda at: _source_line(self._path, int(at[1], 16)), text
            )
            if launch.fault_offset:
                text += f", {_source_line(os.fsdecode(library.value), launch.fault_offset)}"
            if ".so+0x" in text and not shutil.which("addr2line"):
                text += " (addr2line, of the package binutils, finds lines for these offsets)"
            raise KernelFault(text)


def _source_line(library: str, offset: int) -> str:
    """Return file and line of an instruction, where binutils are there to find them."""
    place = f"{Path(library).name}+{offset:#x}"
    try:
        # With the calls that were inlined, innermost first: clang's traps seem to lie in a function
        # without lines.
        frames = _run(["addr2line", "-i", "-e", library, f"{offset:#x}"]).splitlines()
    except (OSError, RuntimeError):
        return place
    matches = (re.fullmatch(r"((?:.*/)?)([^/]+:[1-9]\d*)(?: .*)?", frame) for frame in frames)
    lines = [(match[1], match[2]) for match in matches if match]
    # Who called a function of kernels/host/ rather than where in there.
    callers = [line for folder, line in lines if not _HOST_FOLDER.search(folder)]
    return next(iter(callers or [line for _, line in lines]), place)
