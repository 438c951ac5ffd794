# SPDX-License-Identifier: Apache-2.0
"""What launches take besides a kernel: room for its parameters, the stream, the device's facts."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from typing import Any

from . import device

__all__ = ["MAX_BLOCKS", "Room", "captured", "current_stream", "facts", "host_seed"]

MAX_BLOCKS = 2**31 - 1  # of a launch

#: Scratch that a captured graph will use again whenever it is replayed, kept for good.
captured: list[Any] = []


def host_seed() -> int:
    """Return the seed of the CPU back end's schedule: $CUFLASH_HOST_SEED, 0 is first in first out.

    Results do not depend on it, unless a kernel lacks a barrier; tests vary it for that reason.
    """
    text = os.environ.get("CUFLASH_HOST_SEED") or "0"
    if not text.isascii() or not text.isdigit() or int(text) >= 2**64:
        raise ValueError(
            f"CUFLASH_HOST_SEED: expected an integer from 0 to 2**64 - 1, got {text!r}"
        )
    return int(text)


class Room(threading.local):
    """Room for the bytes of a struct of parameters, and what a launch takes: its address in a list.

    The driver copies the parameters when a kernel is launched, so one room a thread is enough.
    """

    def __init__(self, size: int) -> None:
        self.bytes = ctypes.create_string_buffer(size)
        self.view = memoryview(self.bytes).cast("B")
        self.words = self.view.cast("Q")
        self._list = (ctypes.c_void_p * 1)(ctypes.addressof(self.bytes))
        self.list = ctypes.addressof(self._list)

    def given(self, on_cpu: bool) -> Any:
        """Return what a launch takes."""
        return self.bytes.raw if on_cpu else self.list


def current_stream() -> Any:
    """Return the current stream of the current GPU."""
    return sys.modules["cupy"].cuda.get_current_stream()


def facts(index: int | None) -> device.Device:
    """Return what is known of a device: a GPU, by its index, or the CPU."""
    return device.CPU if index is None else device.gpu(index)
