# SPDX-License-Identifier: Apache-2.0
"""Arrays of other libraries: how they come in, where they lie, and whether they overlap.

NumPy and CuPy arrays are taken as they are. Anything else comes in without a copy through DLPack,
or through ``__cuda_array_interface__`` where that is all it has. CuPy is imported only when an
array that lives on a GPU shows up.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
import threading
from typing import Any, NamedTuple

import numpy as np

from . import environment

__all__ = [
    "Form",
    "View",
    "adopt",
    "empty",
    "extent",
    "on",
    "overlap",
    "scratch",
    "self_overlap",
    "upload",
    "view",
]

_DLPACK_CPU, _DLPACK_CUDA, _DLPACK_CUDA_HOST, _DLPACK_CUDA_MANAGED = 1, 2, 3, 13


class View(NamedTuple):
    """A NumPy or CuPy array with what calls ask of it, looked up once.

    CuPy makes a new tuple at each look at a shape, and calls look often.
    """

    array: Any
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    address: int  # of the first element
    device: int | None  # index of the GPU; None: host memory
    itemsize: int
    form: tuple[tuple[int, ...], tuple[int, ...], int, int]  # see Form

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)


class Form(NamedTuple):
    """What kernels are told of an array besides its address."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    itemsize: int
    address: int  # modulo 16


def view(x: Any) -> View:
    """Look at a NumPy or CuPy array."""
    if not isinstance(x, np.ndarray):
        return _aligned("array", x)
    shape, strides, size = x.shape, x.strides, x.itemsize
    address = x.__array_interface__["data"][0]
    form = shape, strides, size, address & 15
    return _new(View, (x, x.dtype, shape, strides, address, None, size, form))


_new = tuple.__new__  # a third of the time of View(...)


def adopt(name: str, x: Any) -> View:
    """Look at any array as a NumPy or CuPy array that shares its memory; a View is one already.

    Raises
    ------
    TypeError
        `x` is no array of a kind that can be used; the message says what was expected.
    """
    if type(x) is _gpu_array[0]:  # mostly
        return _aligned(name, x)
    if isinstance(x, np.ndarray):
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError(
                f"{name}: a masked array, whose mask would be ignored; pass its .data, or fill it"
            )
        # Strided views of packed records may have elements at odd addresses.
        return view(x if x.flags.aligned else x.copy())
    if type(x) is View:
        return x
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(x, cupy.ndarray):
        _gpu_array[0] = cupy.ndarray
        return _aligned(name, x)
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _from_dlpack(name, x)
    if hasattr(x, "__cuda_array_interface__"):
        return _aligned(name, _from_cuda_interface(name, x))
    raise TypeError(
        f"{name}: expected a CuPy or NumPy array (or one that offers DLPack or "
        f"__cuda_array_interface__), got {type(x).__name__}"
    )


_gpu_array: list[type | None] = [None]  # CuPy's, once there was one


def _aligned(name: str, x: Any) -> View:
    shape, strides, size, data = x.shape, x.strides, x.itemsize, x.data
    address = data.ptr
    if (address | _bits(strides)) & (size - 1):
        raise ValueError(
            f"{name}: its elements are not aligned to their size of {size} bytes; "
            "expected an aligned array: copy the bytes into a fresh one"
        )
    form = shape, strides, size, address & 15
    return _new(View, (x, x.dtype, shape, strides, address, data.device_id, size, form))


@functools.lru_cache(maxsize=1024)  # calls come with the same shapes over and over
def _bits(strides: tuple[int, ...]) -> int:
    return functools.reduce(operator.or_, strides, 0)


def _from_dlpack(name: str, x: Any) -> View:
    kind = x.__dlpack_device__()[0]
    cupy = _cupy(name) if kind in (_DLPACK_CUDA, _DLPACK_CUDA_MANAGED) else None
    try:
        if kind in (_DLPACK_CPU, _DLPACK_CUDA_HOST):
            return adopt(name, np.from_dlpack(x))
        if cupy is not None:
            # CuPy hands its current stream over, and the exporter orders its work before it.
            return _aligned(name, cupy.from_dlpack(x))
    except (BufferError, RuntimeError, TypeError) as error:
        raise TypeError(
            f"{name}: {type(x).__name__} does not come in through DLPack: {error}"
            f"{environment.advice_on_dtype(x)}"
        ) from error
    raise TypeError(f"{name}: expected an array on a CUDA GPU or the CPU, got DLPack device {kind}")


def _cupy(name: str) -> Any:
    """Return CuPy, for an array that lies on a GPU; RuntimeError where there is none."""
    try:
        environment.gpu_count()
    except RuntimeError as error:
        raise RuntimeError(f"{name}: {error}") from error
    return sys.modules["cupy"]


def _from_cuda_interface(name: str, x: Any) -> Any:
    cupy = _cupy(name)
    interface = x.__cuda_array_interface__
    typestr = interface["typestr"]
    if typestr[1] == "V":
        raise TypeError(
            f"{name}: {type(x).__name__} shows raw bytes ({typestr}) through "
            "__cuda_array_interface__, from which bfloat16 cannot be told; expected DLPack, or a "
            "CuPy array: cupy.asarray(x).view(ml_dtypes.bfloat16)"
        )
    if interface.get("mask") is not None:
        raise TypeError(f"{name}: a masked array, whose mask would be ignored; pass its data")
    dtype = np.dtype(typestr)
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    address = interface["data"][0]
    if strides is None:
        strides = tuple(
            dtype.itemsize * int(np.prod(shape[axis + 1 :], dtype=np.int64))
            for axis in range(len(shape))
        )
    low, high = (address + reach for reach in _reach(shape, tuple(strides), dtype.itemsize))
    # An empty array may have address 0, from which CuPy cannot tell its device.
    device = -1 if high > low else cupy.cuda.runtime.getDevice()
    memory = cupy.cuda.UnownedMemory(low, high - low, x, device)
    start = cupy.cuda.MemoryPointer(memory, address - low)
    array = cupy.ndarray(shape, dtype, start, strides)
    stream = interface.get("stream")
    if stream is not None:
        # The producer's stream: 1 and 2 are the default streams. Ours waits for what is on it.
        with on(array.data.device_id):
            event = cupy.cuda.Event(disable_timing=True)
            cupy.cuda.runtime.eventRecord(event.ptr, stream)
            cupy.cuda.get_current_stream().wait_event(event)
    return array


_NO_CHANGE = contextlib.nullcontext()


class _Ready(threading.local):
    """The GPUs on which this thread has a context: launches by the driver make none."""

    devices: frozenset[int] = frozenset()


_ready = _Ready()


def on(device: int | None) -> contextlib.AbstractContextManager[Any]:
    """Make a GPU the current one, if it is not; its current stream and pool are then in use."""
    if device is None:
        return _NO_CHANGE
    cuda = sys.modules["cupy"].cuda
    runtime = cuda.runtime
    if runtime.getDevice() != device:
        return cuda.Device(device)  # makes a context, too
    if device not in _ready.devices:
        runtime.memGetInfo()  # as any call of the runtime that needs a context
        _ready.devices |= {device}
    return _NO_CHANGE


def empty(like: View, shape: tuple[int, ...], dtype: np.dtype) -> View:
    """Return an uninitialised array of the library of `like`, on the current GPU."""
    if like.device is None:
        return view(np.empty(shape, dtype))
    cupy, size = sys.modules["cupy"], dtype.itemsize
    strides, nbytes = _contiguous(shape, size)
    memory = cupy.cuda.alloc(nbytes)
    x = cupy.ndarray(shape, dtype, memory)  # half of the time of cupy.empty()
    address = memory.ptr
    form = shape, strides, size, address & 15
    return _new(View, (x, dtype, shape, strides, address, like.device, size, form))


def scratch(like: View, size: int) -> tuple[int, Any]:
    """Return the address of so many uninitialised bytes where `like` lies, and what owns them."""
    if like.device is None:
        owner = np.full(size, 255, np.uint8)  # NaN: what a kernel reads before it writes shows
        return owner.ctypes.data, owner
    owner = sys.modules["cupy"].cuda.alloc(size)
    return owner.ptr, owner


def upload(x: View) -> tuple[View, Any]:
    """Return a copy of a host array on the current GPU, and what must stay for a captured graph."""
    cupy = sys.modules["cupy"]
    stream = cupy.cuda.get_current_stream()
    if not stream.is_capturing():
        return view(cupy.asarray(x.array)), None
    # A replay copies again, so the source must stay as it is.
    source = cupy.cuda.alloc_pinned_memory(max(x.array.nbytes, 1))
    pinned = np.frombuffer(source, x.dtype, x.array.size)
    pinned[:] = x.array
    copy = cupy.ndarray(x.shape, x.dtype)
    # CuPy's own copy refuses while a stream is capturing, since it could not keep the source.
    runtime = cupy.cuda.runtime
    kind = runtime.memcpyHostToDevice
    runtime.memcpyAsync(copy.data.ptr, source.ptr, pinned.nbytes, kind, stream.ptr)
    return view(copy), (source, copy)


@functools.lru_cache(maxsize=1024)  # calls come with the same shapes over and over
def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[tuple[int, ...], int]:
    """Return the strides of a C-contiguous array, and its size, in bytes."""
    strides = [itemsize]
    for length in shape[::-1]:
        strides.append(strides[-1] * length)
    return tuple(strides[-2::-1]), strides[-1]


@functools.lru_cache(maxsize=1024)
def _reach(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Return where the elements begin and end, in bytes from the first one."""
    if 0 in shape:
        return 0, 0
    low = high = 0
    for length, stride in zip(shape, strides, strict=True):
        step = (length - 1) * stride
        low, high = (low + step, high) if step < 0 else (low, high + step)
    return low, high + itemsize


def extent(x: View) -> tuple[int, int]:
    """Return the addresses [low, high) that the elements of `x` lie within."""
    low, high = _reach(x.shape, x.strides, x.itemsize)
    return x.address + low, x.address + high


class _Shape:
    """A stand-in for an array, for NumPy's solver of overlaps; its memory is never touched."""

    def __init__(self, x: View) -> None:
        self.owner = x.array
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{x.itemsize}",
            "data": (x.address, False),
            "shape": x.shape,
            "strides": x.strides,
        }


def overlap(x: View, y: View) -> bool:
    """Whether two arrays share an element, exactly (interleaved views do not)."""
    (low_x, high_x), (low_y, high_y) = extent(x), extent(y)
    if high_x <= low_y or high_y <= low_x or x.device != y.device:
        return False
    try:
        work: Any = 10**6  # NumPy's stubs know only two special values
        return bool(np.shares_memory(np.asarray(_Shape(x)), np.asarray(_Shape(y)), max_work=work))
    except np.exceptions.TooHardError:
        return True


def self_overlap(x: View) -> bool:
    """Whether two elements of `x` may lie at one place, as in a broadcast view."""
    if x.array.flags.c_contiguous or 0 in x.shape:
        return False
    reach = x.itemsize
    for stride, length in sorted((abs(s), n) for s, n in zip(x.strides, x.shape, strict=True)):
        if length > 1:
            if stride < reach:
                return True
            reach += (length - 1) * stride
    return False
