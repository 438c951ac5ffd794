# SPDX-License-Identifier: Apache-2.0
"""A test of the tests: faults planted in the shipped kernels must all be found.

Each mutant is a copy of ``kernels/`` with one text replaced. The property test of
test_attention.py, with the examples that CI gives it and a plan or two, must fail on it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from check import check_backward, check_forward
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from matrix import ROWS, Row
from run import both, schedule, using
from strategies import arrays_of, cases
from test_attention import EXAMPLES

from cuflash import compile, source
from cuflash.host import KernelFault


class Mutant(NamedTuple):
    """A fault: in `file`, the `occurrence`-th `old` becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    occurrence: int = 0


_FORWARD = "attention/forward_simt.cu"
_DQ = "attention/backward_dq_simt.cu"
_DKDV = "attention/backward_dkdv_simt.cu"

MUTANTS = [
    Mutant(
        "no-barrier-before-store",
        "parts/tile.cuh",
        "    __syncthreads();\n    transfer",
        "    transfer",
    ),
    Mutant(
        "no-barrier-after-store",
        "parts/tile.cuh",
        "return __syncthreads_or(look && transfer.nonfinite());",
        "return look && transfer.nonfinite();",
    ),
    Mutant("no-warp-barrier-for-ds", _DQ, "        __syncwarp();", ""),
    Mutant("no-warp-barrier-for-p", _DKDV, "        __syncwarp();", ""),
    Mutant("no-warp-barrier-between-p-and-ds", _DKDV, "        __syncwarp();", "", 1),
    Mutant(
        "band-one-key-too-wide",
        "parts/mask.cuh",
        "diagonal <= last_diagonal",
        "diagonal <= last_diagonal + 1",
    ),
    Mutant(
        "window-one-key-too-narrow",
        "parts/mask.cuh",
        "diagonal >= first_diagonal",
        "diagonal > first_diagonal",
    ),
    Mutant("keys-past-the-end-count", "parts/mask.cuh", "key < seqlen_kv;", "true;"),
    Mutant("full-ignores-the-end", "parts/mask.cuh", "key + keys <= seqlen_kv &&", "true &&"),
    Mutant("top-left-alignment", "parts/mask.cuh", "p.seqlen_kv - p.seqlen_q;", "0;"),
    Mutant("last-key-tile-lost", "parts/mask.cuh", "last / tile + 1}", "(last + tile - 1) / tile}"),
    Mutant(
        "tail-rows-not-zeroed",
        "parts/tile.cuh",
        "row < end_row && col",
        "row < first_row + kRows && col",
    ),
    Mutant("tail-columns-not-cut", "parts/tile.cuh", "if (col + e < m.cols) held", "held"),
    Mutant("no-rescaling", _FORWARD, "result[c][i][j] *= factor[i];", ";"),
    Mutant("sum-not-rescaled", "parts/softmax.cuh", "sum *= factor;", ""),
    Mutant(
        "fused-scale",
        "parts/softmax.cuh",
        "return __fmul_rn(scale, product);",
        "return scale * product * 1.0001f;",
    ),
    Mutant("lse-without-maximum", "parts/softmax.cuh", ": reference() + logarithm", ": logarithm"),
    Mutant("no-careful-product", "parts/tile.cuh", "if (!visible(row, k)) continue;", ""),
    Mutant(
        "wrong-key-head", _FORWARD, "work.head / (p.heads_q / p.heads_kv)", "work.head % p.heads_kv"
    ),
    Mutant(
        "one-head-of-the-group",
        _DKDV,
        "start.head + group : start.head",
        "start.head + 1 : start.head",
    ),
    Mutant("dk-not-scaled", _DKDV, "scaling[i] = scale", "scaling[i] = 1"),
    Mutant(
        "dq-without-dlse",
        "parts/gradient.cuh",
        "((dprobability - delta) + dlse)",
        "(dprobability - delta)",
    ),
    Mutant(
        "delta-of-another-row",
        "attention/delta.cu",
        "dot(dout, out, row));",
        "dot(dout, out, row / 2 * 2));",
    ),
    Mutant(
        "last-chunk-lost",
        _DQ,
        "if (c >= k_chunks) continue;",
        "if (c >= k_chunks || c == 2) continue;",
    ),
    Mutant(
        "strides-of-another-array",
        "parts/operand.cuh",
        "            t.stride_dim,\n",
        "            1,\n",
    ),
    Mutant(
        "batch-stride-ignored",
        "parts/operand.cuh",
        "batch * t.stride_batch + head * t.stride_head,",
        "head * t.stride_head,",
    ),
]


def _row(name: str) -> Row:
    return next(row for row in ROWS if row.name == name)


#: Several chunks, small tiles, and an element type for which no rounding hides a fault.
PLANS = [
    _row(name)
    for name in (
        "float32-tall-3x3-resident",
        "float64-square-3x3-passing",
        "float32-wide-1x1-passing",
        "float64-wide-2x1-passing",
        "float32-square-1x2-passing",
    )
]


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the kernel sources that is compiled from while the test runs."""
    root = tmp_path / "kernels"
    shutil.copytree(source.KERNEL_ROOT, root)
    monkeypatch.setattr(source, "KERNEL_ROOT", root)
    monkeypatch.setattr(compile, "_kernels", {})
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))
    yield root


def examine(row: Row) -> None:
    """Run the property test on a row until it fails or its examples are used up."""

    # No shrinking: that there is a failure is all we want to know.
    @settings(max_examples=EXAMPLES, phases=[Phase.generate], database=None)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        case = data.draw(cases(row))
        inputs = arrays_of(case)
        with using(row.forward, row.backward), schedule(case.schedule):
            out, lse, grads = both(inputs)
        check_forward(out, lse, inputs)
        check_backward(grads, inputs)

    run()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_found(kernels: Path, mutant: Mutant) -> None:
    path = kernels / mutant.file
    text = path.read_text(encoding="utf-8")
    parts = text.split(mutant.old)
    assert len(parts) > mutant.occurrence + 1, "the text to replace is gone: renew the mutant"
    n = mutant.occurrence + 1
    path.write_text(
        mutant.old.join(parts[:n]) + mutant.new + mutant.old.join(parts[n:]), encoding="utf-8"
    )
    with pytest.raises((AssertionError, KernelFault)):
        for row in PLANS:
            examine(row)


def test_the_unchanged_copy_passes(kernels: Path) -> None:
    for row in PLANS:
        examine(row)
