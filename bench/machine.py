# SPDX-License-Identifier: Apache-2.0
"""What a measurement was made on: GPU, versions, commit; its SM clock; where CUDA's tools are.

``python -m bench.machine`` prints it as a line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["ROOT", "commit", "emit", "facts", "find_tool", "now", "sm_clock"]

ROOT = Path(__file__).resolve().parent.parent


def emit(kind: str, **fields: Any) -> None:
    """Print a result as one line of JSON."""
    print(json.dumps({"kind": kind, **fields}), flush=True)


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def commit(root: Path = ROOT) -> tuple[str, bool | None]:
    """Return the commit, and whether the tree differs from it (None: unknown).

    A copy without its repository says it through ``$CUFLASH_COMMIT``, which holds what
    ``git describe --always --abbrev=40 --dirty`` prints in the original.
    """

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(root), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    top = git("rev-parse", "--show-toplevel")
    head = git("rev-parse", "HEAD")
    if top and head and Path(top).resolve() == root.resolve():
        changes = git("status", "--porcelain", "--", ".", ":(exclude)bench/results")
        return head, None if changes is None else bool(changes)
    given = os.environ.get("CUFLASH_COMMIT", "")
    return (given.removesuffix("-dirty"), given.endswith("-dirty")) if given else ("unknown", None)


def find_tool(name: str) -> str | None:
    """Return the path of a tool of the CUDA toolkit, such as ncu."""
    found = shutil.which(name)
    if found:
        return found
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [Path(home, "bin", name) for home in homes if home]
    places += sorted(Path("/opt/nvidia/nsight-compute").glob(f"*/{name}"), reverse=True)
    return next((str(place) for place in places if place.is_file()), None)


def _nvidia_smi(query: str, *more: str) -> str | None:
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", *more]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None


def _nvml(bus: str) -> Callable[[], int]:
    """Return a function that asks the driver's library for the SM clock.

    Through ctypes: four functions whose signatures have not changed in ten years need no package.

    Raises
    ------
    OSError
        There is no such library, or it knows no such GPU.
    """
    library = ctypes.CDLL("libnvidia-ml.so.1")
    handle, mhz = ctypes.c_void_p(), ctypes.c_uint()
    sm = ctypes.c_int(1)  # NVML_CLOCK_SM

    def read() -> int:
        if library.nvmlDeviceGetClockInfo(handle, sm, ctypes.byref(mhz)):
            raise OSError("NVML does not say the SM clock")
        return mhz.value

    name = ctypes.c_char_p(bus.encode())
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByPciBusId_v2(
        name, ctypes.byref(handle)
    ):
        raise OSError(f"NVML does not know the GPU {bus}")
    read()
    return read


def sm_clock() -> tuple[str, Callable[[], int | None]]:
    """Return how the SM clock of the current GPU is read, and a function that reads it, in MHz.

    NVML answers within a millisecond, while the work that was queued still runs; nvidia-smi takes
    longer, and may see the clock after it.
    """
    import cupy

    bus = cupy.cuda.Device().pci_bus_id
    try:
        return "nvml", _nvml(bus)
    except (OSError, AttributeError):
        pass

    def slowly() -> int | None:
        answer = _nvidia_smi("clocks.sm", "-i", bus)
        return int(answer) if answer and answer.isdigit() else None

    return "nvidia-smi", slowly


def facts() -> dict[str, Any]:
    """Return GPU, driver and versions."""
    import cupy
    import numpy

    from cuflash import compile, device

    gpu = device.gpu(cupy.cuda.Device().id)
    bus = cupy.cuda.Device().pci_bus_id
    return {
        "gpu": gpu.name,
        "capability": ".".join(map(str, gpu.capability)),
        "sms": gpu.sms,
        "driver": _nvidia_smi("driver_version", "-i", bus),
        "power_limit_w": _nvidia_smi("power.limit", "-i", bus),
        "max_sm_mhz": _nvidia_smi("clocks.max.sm", "-i", bus),
        "cupy": cupy.__version__,
        "nvrtc": ".".join(map(str, compile.nvrtc_version())),
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    emit("machine", **facts())
