# SPDX-License-Identifier: Apache-2.0
"""What cuflash is tested with, for tests of programs that use it.

`problems` draws whole attention calls with hypothesis (an optional dependency), and `check_forward`
and `check_backward` hold the library's one rule of tolerance. All of it runs on NumPy arrays,
without a GPU. ``import cuflash`` alone does not import this module.
"""

from .cases import Case, arrays_of
from .inputs import Inputs
from .strategies import problems
from .tolerance import assert_close, bounds, check_backward, check_forward, exact

__all__ = [
    "Case",
    "Inputs",
    "arrays_of",
    "assert_close",
    "bounds",
    "check_backward",
    "check_forward",
    "exact",
    "problems",
]
