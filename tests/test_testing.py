# SPDX-License-Identifier: Apache-2.0
"""cuflash.testing as users have it: what it draws, that wrong results are found, and its page."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import testing
from cuflash.options import read_options
from cuflash.packed import read_packed
from cuflash.problem import Problem, read
from cuflash.reference_arguments import DEFAULTS, Options

ROOT = Path(__file__).parent.parent
DTYPES = ("float16", "bfloat16", "float32", "float64")
OPTIONS = ("softcap", "bias", "mask", "alibi_slopes", "sinks", "dropout_p", "packed")


def run(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, *(arguments or ("-c", code))],
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def problem_of(x: testing.Inputs) -> Problem:
    """Read a call as the library reads it, errors and all."""
    names = ("softcap", "bias", "mask", "alibi_slopes", "sinks", "dropout_p", "seed")
    plain = x.scale, x.causal, x.window, x.layout
    values = [getattr(x, name) for name in names]
    if x.cu_seqlens:
        return read_packed(x.q, x.k, x.v, *x.cu_seqlens, None, None, *plain, *values)[0]
    return read_options(*read(x.q, x.k, x.v, *plain), *values)[0]


def test_any_call_is_drawn() -> None:
    seen: dict[str, set[Any]] = {}

    def note(**facts: Any) -> None:
        for name, fact in facts.items():
            seen.setdefault(name, set()).add(fact)

    @settings(max_examples=400)
    @given(x=testing.problems(dtypes=DTYPES, head_dims=(5, 16), options=OPTIONS))
    def draw(x: testing.Inputs) -> None:
        p = problem_of(x)  # which raises errors about wrong arguments
        arrays = [x.q, x.k, x.v, x.dout]
        note(
            dtype=p.dtype.name,
            head_dims=(p.head_dim, p.head_dim_v),
            layout=x.layout,
            batch=x.q.ndim == 4,
            causal=x.causal,
            grouped=p.heads_q > p.heads_kv,
            no_queries=p.seqlen_q == 0,
            no_keys=p.seqlen_kv == 0,
            long=p.seqlen_q > 64 and p.seqlen_kv > 64,
            left=x.window[0] >= 0,
            right=x.window[1] >= 0,
            contiguous=all(a.flags.c_contiguous for a in arrays),
            reversed=any(stride < 0 for a in arrays for stride in a.strides),
            broadcast=any(stride == 0 for a in arrays if a.size for stride in a.strides),
            nan=any(np.isnan(a.astype("f8")).any() for a in arrays),
            dlse=x.dlse is None,
            **{name: name in p.features for name in cuflash.problem.FEATURES},
            together=len(p.features) > 3,
        )

    draw()
    both = {True, False}
    assert seen.pop("dtype") == set(DTYPES)
    assert seen.pop("head_dims") == {(5, 5), (5, 16), (16, 5), (16, 16)}
    assert seen.pop("layout") == {"bshd", "bhsd"}
    assert all(facts == both for facts in seen.values()), seen


def test_what_is_left_out_is_not_drawn() -> None:
    some = testing.problems(
        dtypes=("float64",),
        max_length=9,
        options=("bias",),
        causal=False,
        same_lengths=True,
        layouts=("bhsd",),
        strides=False,
        values=("normal",),
    )

    @settings(max_examples=100)
    @given(x=some)
    def draw(x: testing.Inputs) -> None:
        p = problem_of(x)
        assert p.dtype.name == "float64" and p.seqlen_q == p.seqlen_kv <= 9
        assert not x.causal and x.layout == "bhsd" and set(p.features) <= {"bias"}
        assert np.isfinite(x.q).all()
        # A layout is a transposed view of the other.
        assert all(a.swapaxes(-2, -3).flags.c_contiguous for a in (x.q, x.k, x.v, x.dout))

    draw()


@settings(max_examples=25)
@given(x=testing.problems(dtypes=("float32",), head_dims=(8,), options=OPTIONS))
def test_the_library_passes(x: testing.Inputs) -> None:
    if x.cu_seqlens:
        out, lse = cuflash.attention_varlen(
            x.q, x.k, x.v, *x.cu_seqlens, **x.options, return_lse=True
        )
        given = x.dout, x.q, x.k, x.v, out, lse, *x.cu_seqlens
        grads = cuflash.attention_varlen_backward(*given, dlse=x.dlse, **x.options)
    else:
        out, lse, vjp = cuflash.attention_vjp(x.q, x.k, x.v, **x.options, return_lse=True)
        grads = vjp(x.dout, dlse=x.dlse)
    testing.check_forward(out, lse, x)
    testing.check_backward(grads, x)


CALL = testing.Case(
    "float32", None, 1, 2, 7, 9, 16, 16, True, (-1, -1), None, "bshd", ("contiguous",) * 4,
    "normal", False, 0, 0, ("sinks",),
)  # fmt: skip


def test_a_call_has_the_options_of_the_reference() -> None:
    ours = {field.name: field for field in dataclasses.fields(testing.Inputs)}
    theirs = {field.name: field for field in dataclasses.fields(Options)}
    assert theirs.keys() - ours.keys() == {"first"}
    call = {*("q", "k", "v", "dout", "dlse"), *("layout", "cu_seqlens_q", "cu_seqlens_k")}
    assert ours.keys() - theirs.keys() == call
    for name, default in DEFAULTS.items():
        assert (ours[name].default, ours[name].type) == (default, theirs[name].type), name


def test_a_call_names_the_options_it_uses() -> None:
    x = np.zeros((3, 2, 8), np.float32)
    plain = {"scale": None, "causal": False, "window": (-1, -1), "layout": "bshd"}
    assert testing.Inputs(x, x, x, x).options == plain
    used = {"softcap": 2.0, "bias": x, "mask": x, "sinks": x, "dropout_p": 0.5, "seed": 0}
    options = testing.Inputs(x, x, x, alibi_slopes=x, **used).options
    assert options == plain | used | {"alibi_slopes": x}


def test_a_case_makes_the_same_arrays_again() -> None:
    x, y = testing.arrays_of(CALL), testing.arrays_of(eval(repr(CALL), {"Case": testing.Case}))
    for name in ("q", "k", "v", "dout", "sinks"):
        np.testing.assert_array_equal(getattr(x, name), getattr(y, name))


def test_faults_are_found() -> None:
    x = testing.arrays_of(CALL)
    want = testing.exact(x, backward=True)
    assert set(want) == {"out", "lse", "dq", "dk", "dv", "dsinks"}
    right = {name: value.astype("f4") for name, value in want.items()}
    out, lse, *grads = (right[name] for name in ("out", "lse", "dq", "dk", "dv"))
    gradients = cuflash.Gradients(*grads, dsinks=right["dsinks"])
    testing.check_forward(out, lse, x)
    testing.check_backward(gradients, x)
    bound = testing.bounds(x, {"out": want["out"]})["out"]
    assert 0 < bound < 1e-5
    for wrong, message in (
        (out + np.float32(3 * bound), r"out: \d+ of 224 elements are off, worst at"),
        (out[:-1], r"out: shape \(6, 2, 16\), expected \(7, 2, 16\)"),
        (out.astype("f8"), r"out: dtype float64, expected float32"),
        (np.where(out == out[3, 1, 5], np.nan, out), r"out: NaN in the wrong place .* \(3, 1, 5\)"),
    ):
        with pytest.raises(AssertionError, match=message):
            testing.check_forward(wrong, None, x)
    with pytest.raises(AssertionError, match="lse: "):
        testing.check_forward(out, lse + np.float32(1e-3), x)
    with pytest.raises(AssertionError, match="dsinks: missing"):
        testing.check_backward(cuflash.Gradients(*grads), x)
    with pytest.raises(AssertionError, match="dbias: unexpected"):
        testing.check_backward(cuflash.Gradients(*grads, out, right["dsinks"]), x)


# --- arguments and packages ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(dtypes=("int8",)), "dtypes: expected some of float16, .* got .'int8',."),
        (dict(dtypes="float32"), "dtypes: expected some of float16, .* got 'float32'"),
        (dict(dtypes=()), "dtypes: expected some of"),
        (dict(layouts=("sbhd",)), "layouts: expected some of bshd, bhsd, got"),
        (dict(values=("far",)), "values: expected some of normal, .* got"),
        (dict(max_length=-1), "max_length: expected 0 or more, got -1"),
        (dict(head_dims=(0,)), r"head_dims: expected sizes from 1 to 512, got \(0,\)"),
        (dict(options=("causal",)), "options: causal changes no kernel"),
    ],
    ids=str,
)
def test_errors_name_the_argument(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        testing.problems(**given)


def test_the_rule_needs_neither_hypothesis_nor_ml_dtypes() -> None:
    code = f"""
import sys
sys.modules["hypothesis"] = sys.modules["ml_dtypes"] = None  # an import of them fails
import cuflash, cuflash.testing as testing
x = testing.arrays_of(testing.{CALL!r})
testing.check_forward(cuflash.attention(x.q, x.k, x.v, **x.options), None, x)
try:
    testing.problems()
except ImportError as error:
    print(error)
"""
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "draws with hypothesis, which is not installed: `pip install hypothesis`" in done.stdout
    code = """
import sys
sys.modules["ml_dtypes"] = None
import cuflash.testing
cuflash.testing.problems(dtypes=("bfloat16",))
"""
    assert "ImportError: bfloat16 arrays need the package ml_dtypes" in run(code).stderr


def test_cuflash_alone_imports_neither() -> None:
    code = "import sys, cuflash; print([x for x in sys.modules if x in ('hypothesis', 'pytest')])"
    assert run(code).stdout == "[]\n"
    code = "import sys, cuflash; print('cuflash.testing' in sys.modules)"
    assert run(code).stdout == "False\n"


def test_every_public_name_is_documented() -> None:
    for name in testing.__all__:
        assert getattr(testing, name).__doc__, name


def test_the_page(tmp_path: Path) -> None:
    """Its examples, as one file of tests."""
    page = (ROOT / "docs" / "howto" / "fuzzing.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    (tmp_path / "test_page.py").write_text("\n\n".join(blocks), encoding="utf-8")
    done = run("", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path))
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout + done.stderr


def test_draws_are_the_same_for_the_same_choices() -> None:
    """So that a failure in one run is one in the next."""
    strategy = testing.problems(options=OPTIONS)
    found: list[bytes] = []

    @settings(max_examples=5, derandomize=True, database=None)
    @given(x=strategy, data=st.data())
    def draw(x: testing.Inputs, data: st.DataObject) -> None:
        found.append(np.ascontiguousarray(x.q).tobytes())

    draw()
    first, found[:] = list(found), []
    draw()
    assert found == first
