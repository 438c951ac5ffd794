# SPDX-License-Identifier: Apache-2.0
"""Warnings that name the line of the caller's program, however deep in the package they arise."""

from __future__ import annotations

import os
import sys
import warnings

__all__ = ["warn"]

_PACKAGE = os.path.dirname(__file__) + os.sep


def warn(message: str) -> None:
    """Warn, at the innermost line that is not in this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"cuflash: {message}", RuntimeWarning, stacklevel=level)
