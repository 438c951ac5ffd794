# SPDX-License-Identifier: Apache-2.0
"""Plans: the compile-time constants of kernels, and nothing else.

A call runs the kernels of its plan one after the other, all with the same Params. Each record here
belongs to one file of ``kernels/attention/``; its fields become ``plan::kTileQ`` and so on there.
`MergeStates` is the kernel of a call of its own, and `Realign` runs around the others; these two
have parameters of their own.
"""

from .base import MAPS_AT, PARAMS_BYTES, TMA_PARAMS_BYTES, Box, KernelPlan, Plan, UnitPlan
from .mma import BackwardDqMma, BackwardMma, BackwardRowsMma, ForwardMma
from .simt import BackwardDbiasSimt, BackwardDkdvSimt, BackwardDqSimt, ForwardSimt
from .sm90 import (
    BackwardApartSm90,
    BackwardDkSm90,
    BackwardDqSm90,
    BackwardDvSm90,
    BackwardRowsSm90,
    BackwardSm90,
    ForwardSm90,
)
from .small import Delta, Dsinks, MergeStates, Realign, SumParts, dbias_split

__all__ = [
    "MAPS_AT",
    "PARAMS_BYTES",
    "TMA_PARAMS_BYTES",
    "BackwardApartSm90",
    "BackwardDbiasSimt",
    "BackwardDkSm90",
    "BackwardDkdvSimt",
    "BackwardDqMma",
    "BackwardDqSimt",
    "BackwardDqSm90",
    "BackwardDvSm90",
    "BackwardMma",
    "BackwardRowsMma",
    "BackwardRowsSm90",
    "BackwardSm90",
    "Box",
    "Delta",
    "Dsinks",
    "ForwardMma",
    "ForwardSimt",
    "ForwardSm90",
    "KernelPlan",
    "MergeStates",
    "Plan",
    "Realign",
    "SumParts",
    "UnitPlan",
    "dbias_split",
]
