# SPDX-License-Identifier: Apache-2.0
"""What must be installed: CuPy, a driver, a GPU. Each that lacks gives a sentence with the cure."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

__all__ = [
    "Absent",
    "advice_on_dtype",
    "current_gpu",
    "gpu_count",
    "import_cupy",
    "import_ml_dtypes",
    "ml_dtypes_problem",
]

_INSTALL_CUPY = (
    "install the packages for the CUDA version of the driver, which `nvidia-smi` prints: `pip "
    "install cupy-cuda13x nvidia-cuda-nvrtc nvidia-cuda-runtime`, or `pip install cupy-cuda12x "
    "nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12`"
)

_DLPACK_CPU = 1  # kDLCPU of DLPack


class Absent(RuntimeError):
    """A package is not installed, and is needed for some arrays only; the text says for which."""


def import_cupy() -> Any:
    """Return the module cupy.

    Raises
    ------
    Absent
        It is not there.
    RuntimeError
        It does not load.
    """
    return _import(
        "cupy",
        f"arrays on a GPU need CuPy, which is not installed; {_INSTALL_CUPY}",
        lambda reason: f"CuPy does not load ({reason}); {_INSTALL_CUPY}",
    )


def _import(name: str, absent: str, broken: Callable[[str], str]) -> Any:
    """Return a module; `absent` and `broken`, of the reason, say what lacks otherwise."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # a library that lacks, or one of another version of Python or NumPy
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise Absent(absent) from error
        first = error.__cause__ or error  # CuPy wraps it in a page of text
        reason = (str(first).strip() or type(first).__name__).splitlines()[0]
        raise RuntimeError(broken(reason)) from error


def gpu_count() -> int:
    """Return how many GPUs there are, at least one; RuntimeError if there is none."""
    runtime = import_cupy().cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except Exception as error:
        raise _no_gpu(str(error)) from error
    if not count:
        raise _no_gpu("there are 0 devices")
    return count


def current_gpu() -> int:
    """Return the index of the current GPU; RuntimeError if there is none."""
    gpu_count()
    return sys.modules["cupy"].cuda.runtime.getDevice()


def _no_gpu(reason: str) -> RuntimeError:
    if "InsufficientDriver" in reason:
        return RuntimeError(
            f"there is no driver for NVIDIA GPUs, or it is older than CuPy's CUDA ({reason}); "
            "install or update the driver, or take CuPy for an older CUDA; in a "
            "container, start it with access to the GPUs (`--gpus all`); NumPy arrays run on the "
            "CPU back end instead"
        )
    return RuntimeError(
        f"CUDA finds no GPU ({reason}); look whether `nvidia-smi` lists one and "
        "CUDA_VISIBLE_DEVICES does not hide it; NumPy arrays run on the CPU back end instead"
    )


def import_ml_dtypes() -> Any:
    """Return the module ml_dtypes.

    Raises
    ------
    Absent
        It is not there.
    RuntimeError
        It does not load.
    """
    needed = "bfloat16 arrays need the package ml_dtypes, which"
    return _import(
        "ml_dtypes",
        f"{needed} is not installed: `pip install ml_dtypes`",
        lambda reason: (
            f"{needed} does not load ({reason}); install it anew, for this Python and NumPy: "
            "`pip install -U --force-reinstall --no-deps ml_dtypes`"
        ),
    )


def ml_dtypes_problem() -> str | None:
    """Return what keeps bfloat16 arrays from being used, or None."""
    try:
        import_ml_dtypes()
    except RuntimeError as error:
        return str(error)
    return None


def advice_on_dtype(x: Any) -> str:
    """Return what to add to an error about an array of another library, if that may help."""
    if "bfloat16" not in str(getattr(x, "dtype", "")):
        return ""
    if problem := ml_dtypes_problem():
        return f"; {problem}"
    if x.__dlpack_device__()[0] == _DLPACK_CPU:
        return (
            "; NumPy takes no bfloat16 that way: pass a NumPy array, from PyTorch "
            "x.view(torch.int16).numpy().view(ml_dtypes.bfloat16), from JAX numpy.asarray(x)"
        )
    return ""
