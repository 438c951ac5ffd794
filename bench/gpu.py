# SPDX-License-Identifier: Apache-2.0
"""The little that measuring needs of a GPU, in one place, so that tests can put a fake there."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import sm_clock

__all__ = ["Gpu", "peak"]

FLUSH_BYTES = 256 * 2**20
PROBE_NS = 50_000
PROBES = 1024  # readings of the clock between two synchronisations

#: FLOP that an SM does in a cycle, at most: in 16-bit types on tensor cores (dense, with float32
#: sums), in float32 and float64 on the vector units. From NVIDIA's white papers of each GPU.
_PEAK = {
    (9, 0): {"float16": 4096, "bfloat16": 4096, "float32": 256, "float64": 128},
    (8, 0): {"float16": 2048, "bfloat16": 2048, "float32": 128, "float64": 64},
}


def peak(capability: tuple[int, int], sms: int, dtype: str, mhz: float | None) -> float | None:
    """Return the TFLOP/s that a GPU could do at this clock, if its peak is known."""
    rate = _PEAK.get(capability, {}).get(dtype)
    return None if rate is None or not mhz else sms * rate * mhz / 1e6


class Gpu:
    """The current GPU through CuPy, on CuPy's current stream."""

    def __init__(self) -> None:
        import cupy

        from cuflash import device

        self.xp: Any = cupy
        facts = device.gpu(cupy.cuda.Device().id)
        self.name, self.sms, self.capability = facts.name, facts.sms, facts.capability
        source = Path(__file__).with_name("clock.cu").read_text(encoding="utf-8")
        module = cupy.RawModule(code=source)
        self._hold, self._probe = module.get_function("hold"), module.get_function("sm_clock")
        self._mhz = cupy.zeros(PROBES, cupy.float32)
        self._probes = 0
        self._trash: Any = None
        how, read = sm_clock()
        # nvidia-smi answers when the work is over.
        self._nvml: Callable[[], int | None] | None = read if how == "nvml" else None
        # Loads both kernels, which would take time later.
        self.hold(0.01)
        self.probe_clock()
        self.synchronize()
        self.clocks()

    def now(self) -> float:
        """Return the host's time, in milliseconds."""
        return time.perf_counter() * 1000

    def pause(self, ms: float) -> None:
        """Let the host sleep."""
        time.sleep(max(0.0, ms) / 1000)

    def synchronize(self) -> None:
        """Wait for all that was queued, by whatever library."""
        self.xp.cuda.Device().synchronize()

    def hold(self, ms: float) -> None:
        """Keep the stream busy, so that calls queue up behind."""
        self._hold((1,), (1,), (np.uint64(ms * 1e6),))

    def mark(self) -> Any:
        """Queue an event."""
        event = self.xp.cuda.Event()
        event.record()
        return event

    def between(self, start: Any, stop: Any) -> float:
        """Return the milliseconds between two events."""
        return self.xp.cuda.get_elapsed_time(start, stop)

    def flush(self) -> None:
        """Queue a write that leaves nothing of use in the caches."""
        if self._trash is None:
            self._trash = self.xp.empty(FLUSH_BYTES, self.xp.uint8)
        self._trash.data.memset_async(0, FLUSH_BYTES, self.xp.cuda.get_current_stream())

    def probe_clock(self) -> None:
        """Queue a reading of the SM clock, by a kernel that counts cycles for 50 µs."""
        if self._probes < PROBES:
            at = self._mhz[self._probes : self._probes + 1]
            self._probe((1,), (1,), (np.uint64(PROBE_NS), at))
            self._probes += 1

    def clocks(self) -> list[float]:
        """Return the readings since the last call, in MHz; what was queued must be done."""
        found = self._mhz[: self._probes].get().tolist()
        self._probes = 0
        return found

    def nvml_mhz(self) -> int | None:
        """Return the SM clock that the driver reports now, if it can be asked quickly."""
        return self._nvml() if self._nvml is not None else None

    def free(self) -> None:
        """Give memory that nobody uses back to the device."""
        self.synchronize()
        self.xp.get_default_memory_pool().free_all_blocks()
