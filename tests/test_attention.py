# SPDX-License-Identifier: Apache-2.0
"""Ring 3: kernels against the reference, both passes, for drawn calls and the matrix's plans."""

from __future__ import annotations

import pytest
import tally
from check import check_backward, check_forward
from conftest import Backend
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix import FEW_ROWS, OPTION_ROWS, ROWS, Row
from run import both, on, schedule, using
from strategies import arrays_of, cases

EXAMPLES = 24


def examine(backend: Backend, row: Row, data: st.DataObject) -> None:
    case = data.draw(cases(row))
    inputs = arrays_of(case)
    with using(row.forward, row.backward), schedule(case.schedule, case.blocks):
        out, lse, grads = both(on(backend, inputs))
    check_forward(out, lse, inputs)
    check_backward(grads, inputs)
    for direction in ("forward", "backward"):
        tiles = case.tiles(*row.tile)
        tally.example(backend.name, row.dtype, direction, row.family(direction), tiles, repr(case))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_kernels_agree_with_the_reference(backend: Backend, row: Row, data: st.DataObject) -> None:
    examine(backend, row, data)


@pytest.mark.parametrize("row", OPTION_ROWS, ids=lambda row: row.name)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_any_set_of_options_agrees(backend: Backend, row: Row, data: st.DataObject) -> None:
    examine(backend, row, data)


@pytest.mark.parametrize("row", FEW_ROWS, ids=lambda row: row.name)
@settings(max_examples=6)
@given(data=st.data())
def test_plans_of_other_sizes_and_gpus_agree(
    backend: Backend, row: Row, data: st.DataObject
) -> None:
    examine(backend, row, data)
