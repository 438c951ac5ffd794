# SPDX-License-Identifier: Apache-2.0
"""Facts about a GPU, or about the CPU back end, that plans are chosen by."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from . import environment

__all__ = ["CPU", "Device", "architecture", "architectures", "current", "gpu"]


@dataclass(frozen=True)
class Device:
    """What a plan may depend on. Frozen and without an index, so that equal GPUs share plans."""

    name: str
    capability: tuple[int, int]  # (0, 0) is the CPU back end
    sms: int
    smem_per_block: int  # the most dynamic shared memory a block can opt in to, bytes
    smem_per_sm: int

    @property
    def is_cpu(self) -> bool:
        """Whether kernels are executed by the CPU back end."""
        return self.capability == (0, 0)


#: The CPU back end takes what a Hopper GPU takes, so that it can run every plan.
CPU = Device("cpu", (0, 0), sms=2, smem_per_block=232448, smem_per_sm=233472)

#: Shared memory by architecture (CUDA C++ Programming Guide, "Compute Capabilities"): block, SM.
_SMEM = {
    (7, 5): (65536, 65536),
    (8, 0): (166912, 167936),
    (8, 6): (101376, 102400),
    (8, 7): (166912, 167936),
    (8, 9): (101376, 102400),
    (9, 0): (232448, 233472),
    (10, 0): (232448, 233472),
    (12, 0): (101376, 102400),
}


def architecture(major: int, minor: int, sms: int = 100) -> Device:
    """Describe an architecture without having such a GPU: plans and compilation need no more."""
    block, sm = _SMEM[major, minor]
    return Device(f"sm_{major}{minor}", (major, minor), sms, block, sm)


def architectures() -> list[Device]:
    """Describe all architectures that are known without a GPU."""
    return [architecture(*capability) for capability in _SMEM]


def current() -> Device:
    """Describe the current GPU; RuntimeError if there is none that can be used."""
    return gpu(environment.current_gpu())


@functools.cache
def gpu(index: int) -> Device:
    """Describe the GPU with this index.

    Raises
    ------
    RuntimeError
        The GPU is older than compute capability 7.5.
    """
    facts = environment.import_cupy().cuda.runtime.getDeviceProperties(index)
    capability = facts["major"], facts["minor"]
    name = facts["name"].decode()
    if capability < (7, 5):
        raise RuntimeError(
            f"{name} has compute capability {capability[0]}.{capability[1]}, and cuflash needs 7.5 "
            "(Turing) or later; NumPy arrays run on the CPU back end instead"
        )
    return Device(
        name,
        capability,
        facts["multiProcessorCount"],
        facts["sharedMemPerBlockOptin"],
        facts["sharedMemPerMultiprocessor"],
    )
