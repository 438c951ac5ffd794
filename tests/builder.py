# SPDX-License-Identifier: Apache-2.0
"""The kernels of tests/host_kernels/ for the CPU back end: each is compiled once a session."""

from __future__ import annotations

import struct
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from cuflash import host
from cuflash.tensormap import MAP_BYTES, TensorMap

ROOT = Path(__file__).parent.parent
KERNELS = Path(__file__).parent / "host_kernels"
INCLUDES = (ROOT / "kernels" / "host", ROOT / "kernels", KERNELS)

#: The package is the extra `cpu`, which CI installs: none of these is skipped there.
needs_zig = pytest.mark.skipif(not find_spec("ziglang"), reason="the package ziglang is missing")


def kernel_text(name: str, plan: str = "", params: str = "Params") -> str:
    return f"""\
#include "host/cuda.h"
#include "hw/convert.cuh"
namespace plan {{ {plan} }}
#include "{name}.cu"
#define CUFLASH_KERNEL {name}
#define CUFLASH_PARAMS {params}
#include "host/entry.h"
"""


class Builder:
    """Compiles each library once, when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.libraries: dict[tuple, Path] = {}

    def library(
        self, compiler: host.Compiler, text: str, kernel: bool, instrumented: bool = False
    ) -> Path:
        key = (compiler, text, kernel, instrumented)
        if key not in self.libraries:
            path = self.folder / f"library{len(self.libraries)}.so"
            more = {"instrumented": True} if instrumented else {}
            host.compile_library(compiler, text, INCLUDES, path, kernel=kernel, **more)
            self.libraries[key] = path
        return self.libraries[key]

    def runtime(self, compiler: host.Compiler | None = None, text: str = "") -> host.Runtime:
        text += '#include "host/executor.cpp"\n'
        return host.Runtime(self.library(compiler or host.find_compiler(), text, False))

    def kernel(
        self,
        name: str,
        plan: str = "",
        compiler: host.Compiler | None = None,
        runtime: host.Runtime | None = None,
        instrumented: bool = False,
    ) -> host.HostKernel:
        text = kernel_text(name, plan)
        library = self.library(compiler or host.find_compiler(), text, True, instrumented)
        return host.HostKernel(runtime or self.runtime(compiler), library, name)


def buffers(*, writable: str = "out", **arrays: np.ndarray) -> list[tuple[str, int, int, bool]]:
    def row(name: str, array: np.ndarray) -> tuple[str, int, int, bool]:
        low = array.ctypes.data
        return name, low, low + array.nbytes, name in writable.split()

    return [row(*item) for item in arrays.items()]


def aligned(x: np.ndarray) -> np.ndarray:
    """Return a copy that begins at a multiple of 128 bytes, as an array of a GPU would."""
    x = np.ascontiguousarray(x)
    space = np.zeros(x.nbytes + 128, np.uint8)
    copy = space[-space.ctypes.data % 128 :][: x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def tensor_map(
    x: np.ndarray, box: tuple[int, ...], swizzle: int = 0, dtype: str | None = None
) -> TensorMap:
    """Return the map of an array without gaps; `box` has the innermost axis first, as maps do."""
    return TensorMap(
        x.ctypes.data, dtype or x.dtype.name, x.shape[::-1], x.strides[:-1][::-1], box, swizzle
    )


def pack(*fields: TensorMap | np.ndarray | int) -> bytes:
    """Return a struct of parameters: maps, pointers to arrays, then ints, padded as C++ does."""
    parts, alignment = [], 4
    for field in fields:
        if isinstance(field, TensorMap):
            parts.append(field.encode_cpu())
            alignment = max(alignment, MAP_BYTES // 2)
        elif isinstance(field, np.ndarray):
            parts.append(struct.pack("P", field.ctypes.data))
            alignment = max(alignment, 8)
        else:
            parts.append(struct.pack("=I", field & 0xFFFFFFFF))
    text = b"".join(parts)
    return text + bytes(-len(text) % alignment)
