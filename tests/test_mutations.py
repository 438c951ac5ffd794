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
from matrix import OPTION_ROWS, ROWS, Row
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
    options: bool = False  # it takes a call with options to find it


_FORWARD = "attention/forward_simt.cu"
_DQ = "attention/backward_dq_simt.cu"
_DKDV = "attention/backward_dkdv_simt.cu"
_DBIAS = "attention/backward_dbias_simt.cu"
_SCORE = "parts/score.cuh"
_WORK = "parts/work.cuh"

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
    Mutant("top-left-alignment", "parts/mask.cuh", "entry.seqlen_kv - entry.seqlen_q;", "0;"),
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
    Mutant("dk-not-scaled", _DKDV, "scale[i] = any.scale", "scale[i] = 1"),
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
        "batch * t.stride_batch + head * t.stride_head +\n                first * t.stride_seq,",
        "head * t.stride_head + first * t.stride_seq,",
    ),
    *(
        Mutant(name, file, old, new, options=True)
        for name, file, old, new in [
            ("softcap-without-slope", _DQ, "dscore * x.slope", "dscore"),
            ("slope-in-dbias", _DBIAS, "sum[i][j] += dscore", "sum[i][j] += dscore * x.slope"),
            ("bias-of-another-row", _SCORE, "return query * stride_query", "return stride_query"),
            ("bias-hides-nothing", _SCORE, "!(added == -softmax::infinity<Accum>())", "true"),
            ("bias-always-narrow", _SCORE, "if (bias_wide) return", "if (false) return"),
            ("mask-upside-down", _SCORE, "mask.at(query, key)) != 0", "mask.at(query, key)) == 0"),
            ("mask-not-looked-at", _SCORE, "pairs = pairs || mask.data;", ""),
            ("alibi-from-the-top", _SCORE, "= query + offset - key", "= query - key"),
            ("alibi-one-sided", _SCORE, "max(distance, -distance)", "distance"),
            (
                "sink-in-every-lane",
                _FORWARD,
                "with_sink(sink, lane.x == 0)",
                "with_sink(sink, true)",
            ),
            ("sink-in-slack-rows", _FORWARD, "p.sinks.data && !entry.slack", "p.sinks.data"),
            (
                "dsinks-without-dlse",
                "attention/dsinks.cu",
                "if (p.dlse.data) gradient",
                "if (false) gradient",
            ),
            ("kept-not-scaled-in-dv", _DKDV, "kept[i] = any.kept_factor()", "kept[i] = 1"),
            (
                "dropout-by-tile",
                _DKDV,
                "score.survives(probability, row_scores, key)",
                "score.survives(probability, row_scores, row)",
            ),
            (
                "dropout-in-the-sum",
                _FORWARD,
                "rows[i].sum += probability;",
                "rows[i].sum += score.survives(probability, row_scores[i], first_key + col);",
            ),
            ("same-fate-in-all-heads", "parts/dropout.cuh", "c1 = head,", "c1 = 0,"),
            ("entries-begin-one-late", _WORK, "(i - 1) * cu.stride", "i * cu.stride"),
            ("slot-without-entry", _WORK, "slot - (first / kTile + span)", "slot - first / kTile"),
            (
                "slack-meets-its-neighbours",
                _WORK,
                "return {0, first, 0, rows, 0, true};",
                "return {0, first, 0, rows, 1, true};",
            ),
            (
                "dbias-part-lost",
                _DBIAS,
                "turn = target.split;",
                "turn = target.split + p.dbias_splits;",
            ),
            ("dbias-rows-not-summed", _DBIAS, "i < plan::kTileQ; i += rows", "i < rows; i += rows"),
            ("dbias-first-tile-only", _DBIAS, "tile_q += step_q)", "tile_q += 100)"),
        ]
    ),
]


def _row(name: str) -> Row:
    return next(row for row in ROWS + OPTION_ROWS if row.name == name)


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

OPTION_PLANS = [
    _row(name)
    for name in (
        "float32-square-2x1-resident-options",
        "float64-tall-1x2-resident-options",
        "float16-wide-1x2-resident-options",
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
        for row in OPTION_PLANS if mutant.options else PLANS:
            examine(row)


def test_the_unchanged_copy_passes(kernels: Path) -> None:
    for row in PLANS + OPTION_PLANS:
        examine(row)
