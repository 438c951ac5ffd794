# SPDX-License-Identifier: Apache-2.0
"""Maps of tensors, which tell the TMA unit of Hopper GPUs what to move."""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["ELEMENT_BYTES", "MAP_BYTES", "TensorMap"]

#: The size of a map, for either back end. A GPU wants it at a multiple of 64 bytes.
MAP_BYTES = 128

#: The element types that maps know.
ELEMENT_BYTES = {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

# enum CUtensorMapDataType
_TYPES = {"uint8": 0, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # enum CUtensorMapSwizzle, by bytes
_PROMOTIONS = {0: 0, 64: 1, 128: 2, 256: 3}  # enum CUtensorMapL2promotion, by bytes

_MAX_RANK = 5
_MAX_BOX = 256

#: host::TensorMap of kernels/host/executor/boxes.h.
_HOST = struct.Struct("=QQ5Q4Q5I4I4x")
_MAGIC = 0x50414D464C554331
assert _HOST.size == MAP_BYTES


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory, and the box of it that one instruction moves.

    Axes are in the order of the hardware: the contiguous one comes first. All rules of
    ``cuTensorMapEncodeTiled`` are checked here, so that the CPU refuses what a GPU would refuse.

    Parameters
    ----------
    address : int
        Of the first element; a multiple of 16.
    dtype : str
        A key of `ELEMENT_BYTES`. Matters to reductions; loads and stores move bytes.
    dims : sequence of int
        The shape: 1 to 5 numbers from 1 to 2**32.
    strides : sequence of int
        In bytes, of all axes but the first: multiples of 16 below 2**40.
    box : sequence of int
        The shape of the box: as many numbers as `dims`, from 1 to 256. A row of it is a multiple
        of 16 bytes.
    swizzle : {0, 32, 64, 128}
        The bytes of shared memory within which 16-byte pieces of a row change their places; 0 for
        none. The rows of a swizzled box are so far apart, and not longer.

    Raises
    ------
    ValueError
        If a rule is broken; the message begins with the name of the parameter.
    """

    address: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int = 0

    def __post_init__(self) -> None:
        for name in ("dims", "strides", "box"):
            object.__setattr__(self, name, tuple(map(operator.index, getattr(self, name))))
        rank = len(self.dims)
        if self.dtype not in ELEMENT_BYTES:
            raise ValueError(f"dtype: expected {', '.join(ELEMENT_BYTES)}, got {self.dtype!r}")
        if self.swizzle not in _SWIZZLES:
            raise ValueError(f"swizzle: expected 0, 32, 64 or 128, got {self.swizzle!r}")
        if not 0 < self.address < 2**64 or self.address % 16:
            raise ValueError(f"address: expected a multiple of 16, got {self.address:#x}")
        if not 1 <= rank <= _MAX_RANK:
            raise ValueError(f"dims: expected 1 to {_MAX_RANK} axes, got {rank}")
        if not all(1 <= dim <= 2**32 for dim in self.dims):
            raise ValueError(f"dims: expected numbers from 1 to 2**32, got {self.dims}")
        if len(self.strides) != rank - 1:
            raise ValueError(
                f"strides: expected {rank - 1}, one less than dims, got {len(self.strides)}"
            )
        if not all(0 <= stride < 2**40 and stride % 16 == 0 for stride in self.strides):
            raise ValueError(
                f"strides: expected multiples of 16 from 0 to below 2**40, got {self.strides}"
            )
        if len(self.box) != rank:
            raise ValueError(f"box: expected {rank} numbers, as dims has, got {len(self.box)}")
        if not all(1 <= size <= _MAX_BOX for size in self.box):
            raise ValueError(f"box: expected numbers from 1 to {_MAX_BOX}, got {self.box}")
        row = self.box[0] * self.itemsize
        if row % 16:
            raise ValueError(f"box: expected rows of a multiple of 16 bytes, got {row}")
        if self.swizzle and row > self.swizzle:
            raise ValueError(
                f"box: expected rows of at most {self.swizzle} bytes, as they are swizzled, "
                f"got {row}"
            )

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ELEMENT_BYTES[self.dtype]

    def encode_cpu(self) -> bytes:
        """Return the map for the CPU back end.

        Returns
        -------
        bytes
            `MAP_BYTES` of them.
        """
        rest = _MAX_RANK - len(self.dims)
        return _HOST.pack(
            _MAGIC,
            self.address,
            *self.dims,
            *[1] * rest,
            *self.strides,
            *[0] * (_MAX_RANK - 1 - len(self.strides)),
            *self.box,
            *[1] * rest,
            len(self.dims),
            _TYPES[self.dtype],
            self.itemsize,
            self.swizzle,
        )

    def encode_gpu(self, l2_promotion: int = 128) -> bytes:
        """Return the map for a GPU, from its driver. What lies outside of the tensor loads as zero.

        Parameters
        ----------
        l2_promotion : {0, 64, 128, 256}
            The bytes that a miss in the L2 cache fetches at least; 0 for what is asked for.

        Returns
        -------
        bytes
            `MAP_BYTES` of them.

        Raises
        ------
        OSError
            If there is no driver.
        RuntimeError
            If the driver refuses the map, or nobody has initialized it.
        """
        return self.gpu_encoder(l2_promotion)(self.address)

    def gpu_encoder(self, l2_promotion: int = 128) -> Callable[[int], bytes]:
        """Return `encode_gpu` as a function of the address, where only that changes.

        Addresses are to be multiples of 16, which is not checked again.
        """
        rank = len(self.dims)
        if l2_promotion not in _PROMOTIONS:
            raise ValueError(f"l2_promotion: expected 0, 64, 128 or 256, got {l2_promotion!r}")
        encode = _encode_tiled()
        kind = _TYPES[self.dtype], rank
        rest = (
            (ctypes.c_uint64 * rank)(*self.dims),
            (ctypes.c_uint64 * rank)(*self.strides),  # one more than is read: none is no array
            (ctypes.c_uint32 * rank)(*self.box),
            (ctypes.c_uint32 * rank)(*[1] * rank),  # steps between elements
            0,  # CU_TENSOR_MAP_INTERLEAVE_NONE
            _SWIZZLES[self.swizzle],
            _PROMOTIONS[l2_promotion],
            0,  # CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE: zeros
        )

        def of(address: int) -> bytes:
            # The driver writes to a multiple of 64 bytes.
            space = ctypes.create_string_buffer(MAP_BYTES + 64)
            start = -ctypes.addressof(space) % 64
            result = encode(ctypes.addressof(space) + start, *kind, address, *rest)
            if result:
                raise RuntimeError(
                    f"cuTensorMapEncodeTiled returned error {result} for {self}, at {address:#x}"
                )
            return space.raw[start : start + MAP_BYTES]

        return of


@functools.cache
def _encode_tiled() -> Any:
    """Return cuTensorMapEncodeTiled of the driver."""
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    integer, address = ctypes.c_int, ctypes.c_void_p
    function.restype = integer
    function.argtypes = (
        address,  # CUtensorMap* tensorMap
        integer,  # CUtensorMapDataType tensorDataType
        ctypes.c_uint32,  # tensorRank
        address,  # void* globalAddress
        ctypes.POINTER(ctypes.c_uint64),  # globalDim
        ctypes.POINTER(ctypes.c_uint64),  # globalStrides
        ctypes.POINTER(ctypes.c_uint32),  # boxDim
        ctypes.POINTER(ctypes.c_uint32),  # elementStrides
        integer,  # CUtensorMapInterleave interleave
        integer,  # CUtensorMapSwizzle swizzle
        integer,  # CUtensorMapL2promotion l2Promotion
        integer,  # CUtensorMapFloatOOBfill oobFill
    )
    return function
