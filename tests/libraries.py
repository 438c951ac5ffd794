# SPDX-License-Identifier: Apache-2.0
"""Array libraries other than NumPy and CuPy, each as the few things that tests ask of it."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

__all__ = ["LIBRARIES", "Jax", "Library", "Numba", "Torch"]


def imported(module: str, name: str) -> Any:
    """Import a library; a test is skipped that finds none, or one that this NumPy does not suit."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        pytest.skip(f"{name} is not installed: {error}")
    except Exception as error:
        pytest.skip(f"{name} cannot be imported: {error}")


class Library:
    """A library, and the place where its arrays lie; missing ones skip the test."""

    name: str
    dtypes = ("float16", "bfloat16", "float32", "float64")  # that come in
    #: Of those, the ones whose results the library takes without a copy.
    taken_dtypes = dtypes
    has_cpu = True  # arrays of its own on the CPU, not NumPy's
    is_mutable = True

    def __init__(self, gpu: bool) -> None:
        if not gpu and not self.has_cpu:
            pytest.skip(f"{self.name} on the CPU works on NumPy arrays")
        self.gpu = gpu

    def array(self, x: np.ndarray) -> Any:
        """Copy a NumPy array."""
        raise NotImplementedError

    def taken(self, x: Any) -> Any:
        """Return one of our results as the library's array, without a copy."""
        raise NotImplementedError

    def shown(self, x: Any) -> np.ndarray:
        """Return the library's array on the CPU as a NumPy array, without a copy."""
        raise NotImplementedError

    def address(self, x: Any) -> int:
        """Return where the elements of the library's array begin."""
        raise NotImplementedError

    def host(self, x: Any) -> np.ndarray:
        """Copy the library's array to NumPy, when all that was queued for it is done."""
        raise NotImplementedError


class Torch(Library):
    """PyTorch."""

    name = "torch"

    def __init__(self, gpu: bool) -> None:
        super().__init__(gpu)
        self.torch = imported("torch", self.name)
        if gpu and not self.torch.cuda.is_available():
            pytest.skip("this torch has no CUDA")

    def array(self, x: np.ndarray) -> Any:
        place = "cuda" if self.gpu else "cpu"
        if x.dtype == ml_dtypes.bfloat16:
            return self.torch.tensor(x.view(np.int16), device=place).view(self.torch.bfloat16)
        return self.torch.tensor(x, device=place)

    def taken(self, x: Any) -> Any:
        if x.dtype == ml_dtypes.bfloat16:  # which NumPy and CuPy do not export
            return self.torch.from_dlpack(x.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_dlpack(x)

    def shown(self, x: Any) -> np.ndarray:
        if x.dtype == self.torch.bfloat16:
            return x.view(self.torch.int16).numpy().view(ml_dtypes.bfloat16)
        return x.numpy()

    def address(self, x: Any) -> int:
        return x.data_ptr()

    def host(self, x: Any) -> np.ndarray:
        return self.shown(x.cpu())


class Jax(Library):
    """JAX, whose arrays never change."""

    name = "JAX"
    taken_dtypes = ("float16", "float32", "float64")
    is_mutable = False

    def __init__(self, gpu: bool) -> None:
        super().__init__(gpu)
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or it takes the GPU
        self.jax = imported("jax", self.name)
        if gpu and self.jax.default_backend() != "gpu":
            pytest.skip("this JAX has no CUDA")
        self.jax.config.update("jax_enable_x64", True)
        self.device = self.jax.devices("gpu" if gpu else "cpu")[0]

    def array(self, x: np.ndarray) -> Any:
        with self.jax.default_device(self.device):
            return self.jax.numpy.array(x)

    def taken(self, x: Any) -> Any:
        return self.jax.dlpack.from_dlpack(x, copy=False)

    def shown(self, x: Any) -> np.ndarray:
        return np.asarray(x)

    def address(self, x: Any) -> int:
        return x.unsafe_buffer_pointer()

    def host(self, x: Any) -> np.ndarray:
        return np.array(x)


class Numba(Library):
    """Device arrays of Numba, which have ``__cuda_array_interface__`` and no DLPack."""

    name = "Numba"
    dtypes = taken_dtypes = ("float16", "float32", "float64")
    has_cpu = False

    def __init__(self, gpu: bool) -> None:
        super().__init__(gpu)
        self.cuda = imported("numba.cuda", self.name)
        try:
            self.cuda.current_context()
        except Exception as error:
            pytest.skip(f"this Numba finds no CUDA: {error}")

    def array(self, x: np.ndarray) -> Any:
        return self.cuda.to_device(x)

    def taken(self, x: Any) -> Any:
        return self.cuda.as_cuda_array(x)

    def address(self, x: Any) -> int:
        return x.__cuda_array_interface__["data"][0]

    def host(self, x: Any) -> np.ndarray:
        y = x.copy_to_host()  # which does not wait where x has a stream
        self.cuda.synchronize()
        return y


LIBRARIES = {library.name: library for library in (Torch, Jax, Numba)}
