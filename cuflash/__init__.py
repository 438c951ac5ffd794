# SPDX-License-Identifier: Apache-2.0
"""Exact attention (FlashAttention), forward and backward, for CuPy and NumPy arrays."""

from . import reference
from .ahead import Compiled, precompile
from .api import (
    attention,
    attention_backward,
    attention_varlen,
    attention_varlen_backward,
    attention_vjp,
    merge_states,
)
from .gradients import Gradients

__version__ = "0.1.0"

__all__ = [
    "Compiled",
    "Gradients",
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_vjp",
    "merge_states",
    "precompile",
    "reference",
]
