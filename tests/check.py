# SPDX-License-Identifier: Apache-2.0
"""How far from the float64 reference a correct result may be: one rule for every test.

It is public, in cuflash/testing/tolerance.py, which explains it.
"""

from cuflash.testing.inputs import Inputs, host
from cuflash.testing.tolerance import (
    GRADIENTS,
    SUMS,
    assert_close,
    bounds,
    check_backward,
    check_forward,
    exact,
)

__all__ = [
    "GRADIENTS",
    "SUMS",
    "Inputs",
    "assert_close",
    "bounds",
    "check_backward",
    "check_forward",
    "exact",
    "host",
]
