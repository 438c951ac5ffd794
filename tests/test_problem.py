# SPDX-License-Identifier: Apache-2.0
"""Ring 1: what a call's arguments mean, and each error: its type and what the message says.

The tables hold what differs from a call that is right, the error, and parts of its message: the
argument's name, what was expected, what came. Nothing is launched in this file, and a call that
raises an error has launched nothing.
"""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from conftest import Backend
from numpy.lib.stride_tricks import as_strided

import cuflash
from cuflash import arrays, dtypes, launch, problem
from cuflash.options import read_options
from cuflash.packed import read_packed


class A(NamedTuple):
    """An array of zeros; a huge one is a broadcast view."""

    shape: tuple[int, ...]
    dtype: Any = np.float32

    def on(self, backend: Backend) -> Any:
        huge = np.prod([float(n) for n in self.shape]) > 1e6
        x = backend.array(np.zeros((1,) * len(self.shape) if huge else self.shape, self.dtype))
        return backend.xp.broadcast_to(x, self.shape) if huge else x


class Same(NamedTuple):
    """The very array that another argument is."""

    name: str


BATCH, SQ, SK, HQ, HKV, D, DV = 2, 3, 5, 4, 2, 8, 6
FORWARD = dict(q=A((BATCH, SQ, HQ, D)), k=A((BATCH, SK, HKV, D)), v=A((BATCH, SK, HKV, DV)))
OUT, LSE = A((BATCH, SQ, HQ, DV)), A((BATCH, HQ, SQ))
BACKWARD = dict(dout=OUT, **FORWARD, output=OUT, lse=LSE)
WORKSPACE = 4 * BATCH * HQ * SQ  # bytes

TOTAL_Q, TOTAL_K = 10, 12
CU_Q, CU_K = np.array([0, 3, 10]), np.array([0, 5, 12])  # the longest entries have 7 rows
PACKED = dict(
    q=A((TOTAL_Q, HQ, D)),
    k=A((TOTAL_K, HKV, D)),
    v=A((TOTAL_K, HKV, DV)),
    cu_seqlens_q=CU_Q,
    cu_seqlens_k=CU_K,
)
PACKED_OUT, PACKED_LSE = A((TOTAL_Q, HQ, DV)), A((HQ, TOTAL_Q))
PACKED_BACKWARD = dict(dout=PACKED_OUT, **PACKED, output=PACKED_OUT, lse=PACKED_LSE)

BIAS, FULL_BIAS, SINKS = A((SQ, SK)), A((BATCH, HQ, SQ, SK)), A((HQ,))


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels do not run; the calls that got as far are listed."""
    calls: list[str] = []
    monkeypatch.setattr(launch, "_run", lambda direction, *_, **__: calls.append(direction))
    return calls


def resolve(backend: Backend, values: dict[str, Any]) -> dict[str, Any]:
    def one(x: Any) -> Any:
        if isinstance(x, A):
            return x.on(backend)
        return tuple(map(one, x)) if type(x) is tuple else x

    made = {name: one(x) for name, x in values.items()}

    def look_up(x: Any) -> Any:
        if isinstance(x, Same):
            return made[x.name]
        return tuple(map(look_up, x)) if type(x) is tuple else x

    return {name: look_up(x) for name, x in made.items()}


def forward(backend: Backend, changes: dict[str, Any]) -> Any:
    return cuflash.attention(**resolve(backend, {**FORWARD, **changes}))


def backward(backend: Backend, changes: dict[str, Any]) -> Any:
    return cuflash.attention_backward(**resolve(backend, {**BACKWARD, **changes}))


def varlen(backend: Backend, changes: dict[str, Any]) -> Any:
    return cuflash.attention_varlen(**resolve(backend, {**PACKED, **changes}))


def varlen_backward(backend: Backend, changes: dict[str, Any]) -> Any:
    return cuflash.attention_varlen_backward(**resolve(backend, {**PACKED_BACKWARD, **changes}))


def raises(error: type[Exception], parts: tuple[str, ...], call: Any, *args: Any) -> None:
    with pytest.raises(error) as caught:
        call(*args)
    assert type(caught.value) is error
    message = str(caught.value)
    assert message.startswith(parts[0])
    for part in parts:
        assert part in message, message


# --- the tables ----------------------------------------------------------------------------------

KINDS = "expected a CuPy or NumPy array"
DTYPES = "expected dtype float16, bfloat16, float32, float64 in native byte order"
BSHD = "(batch, seq, heads, dim) or (seq, heads, dim)"
BHSD = "(batch, heads, seq, dim) or (heads, seq, dim)"
FLAG = "expected True or False"
WINDOW = "expected a pair (left, right) of int"

FORWARD_ERRORS = [
    # no arrays
    ({"q": [[1.0]]}, TypeError, "q: ", KINDS, "got list"),
    ({"q": 1.0}, TypeError, "q: ", KINDS, "got float"),
    ({"q": np.float32(1)}, TypeError, "q: ", KINDS, "got float32"),
    ({"k": None}, TypeError, "k: ", KINDS, "got NoneType"),
    ({"v": "abc"}, TypeError, "v: ", KINDS, "got str"),
    ({"v": memoryview(b"abc")}, TypeError, "v: ", KINDS, "got memoryview"),
    # dtypes
    *(
        ({"q": A((2, 3, 4, 8), dtype)}, TypeError, "q: ", DTYPES, f"got {dtype}", ".astype(")
        for dtype in ("int32", "uint8", "bool", "complex64")
    ),
    ({"k": A((2, 5, 2, 8), "float64")}, TypeError, "k: ", "dtype float32, as q", "got float64"),
    ({"v": A((2, 5, 2, 6), "float16")}, TypeError, "v: ", "dtype float32, as q", "got float16"),
    ({"v": A((2, 5, 2, 6), "int64")}, TypeError, "v: ", "dtype float32, as q", "got int64"),
    # axes
    ({"q": A(())}, ValueError, "q: ", f"expected {BSHD}", "got shape ()"),
    ({"q": A((3, 8))}, ValueError, "q: ", f"expected {BSHD}", "got shape (3, 8)"),
    ({"q": A((1, 2, 3, 4, 8))}, ValueError, "q: ", f"expected {BSHD}", "got shape (1, 2, 3, 4, 8)"),
    ({"q": A((3, 8)), "layout": "bhsd"}, ValueError, "q: ", f"expected {BHSD}", "got shape (3, 8)"),
    ({"q": A((3, 4, 8))}, ValueError, "k: ", f"3 dimensions {BSHD}, as q", "got shape (2, 5, 2"),
    ({"k": A((5, 2, 8))}, ValueError, "k: ", f"4 dimensions {BSHD}, as q", "got shape (5, 2, 8)"),
    ({"v": A(())}, ValueError, "v: ", "expected 4 dimensions", "got shape ()"),
    # sizes that do not fit
    ({"k": A((3, 5, 2, 8))}, ValueError, "k: ", "shape (2, 5, 2, 8) (batch", "got (3, 5, 2, 8)"),
    ({"k": A((2, 5, 2, 7))}, ValueError, "k: ", "shape (2, 5, 2, 8)", "of q)", "got (2, 5, 2, 7)"),
    ({"v": A((1, 5, 2, 6))}, ValueError, "v: ", "shape (2, 5, 2, 6)", "of k)", "got (1, 5, 2, 6)"),
    ({"v": A((2, 4, 2, 6))}, ValueError, "v: ", "shape (2, 5, 2, 6)", "of k)", "got (2, 4, 2, 6)"),
    ({"v": A((2, 5, 4, 6))}, ValueError, "v: ", "shape (2, 5, 2, 6)", "of k)", "got (2, 5, 4, 6)"),
    ({"layout": "bhsd"}, ValueError, "k: ", "the 3 heads of q must be", "got 5", BHSD, "layout="),
    # head sizes
    *(
        (
            {"q": A((2, 3, 4, size)), "k": A((2, 5, 2, size))},
            *(ValueError, "q: head size", "must be 1 to 512", f"got {size}", BSHD),
        )
        for size in (0, 513)
    ),
    *(
        ({"v": A((2, 5, 2, size))}, ValueError, "v: head size", "must be 1 to 512", f"got {size}")
        for size in (0, 513)
    ),
    # heads
    *(
        (
            {"k": A((2, 5, heads, 8)), "v": A((2, 5, heads, 6))},
            *(ValueError, "k: ", "the 4 heads of q must be a multiple", f"got {heads}", "layout="),
        )
        for heads in (3, 8, 0)
    ),
    # sizes that no machine holds, as broadcast views
    ({"q": A((2, 2**30, 4, 8))}, ValueError, "q: ", "below 2**30", "got 1073741824"),
    (
        {"k": A((2, 2**30, 2, 8)), "v": A((2, 2**30, 2, 6))},
        *(ValueError, "k: ", "below 2**30", "got 1073741824"),
    ),
    ({"q": A((2, 3, 2**30, 8))}, ValueError, "q: ", "below 2**30", "got 1073741824"),
    # options
    *(
        ({"window": window}, TypeError, "window: ", WINDOW, f"got {window!r}")
        for window in (None, 5, "ab", (1,), (1, 2, 3), (1.0, 2), (2, np.float32(1)), (None, 0))
    ),
    ({"window": (True, 1)}, TypeError, "window: ", WINDOW, "got (True, 1)"),
    ({"window": (1, np.False_)}, TypeError, "window: ", WINDOW, "got (1, "),
    ({"window": np.zeros((2, 2), int)}, TypeError, "window: ", WINDOW, "got array("),
    ({"window": (-2, 0)}, ValueError, "window: ", "-1 for no limit", "got (-2, 0)"),
    ({"window": (0, -(2**70))}, ValueError, "window: ", "0 or more", f"got (0, -{2**70})"),
    *(
        ({"scale": scale}, TypeError, "scale: ", "expected a real number", f"got {kind}")
        for scale, kind in [
            (True, "bool"),
            (np.True_, "bool"),
            ("0.5", "str"),
            (1j, "complex"),
            (np.complex64(1), "complex64"),
            ([1.0], "list"),
            (A((1,)), "ndarray"),
        ]
    ),
    *(
        ({"scale": scale}, ValueError, "scale: ", "expected a finite number", f"got {shown}")
        for scale, shown in [
            (float("nan"), "nan"),
            (np.float32("-inf"), "-inf"),
            (np.array(np.inf), "inf"),
            (10**400, "inf"),
            (Fraction(10**400), "inf"),
        ]
    ),
    *(
        ({name: value}, TypeError, f"{name}: ", FLAG, f"got {value!r}")
        for name in ("causal", "return_lse")
        for value in (1, 0, None, "no", np.array(True))
    ),
    *(
        ({"layout": layout}, ValueError, "layout: ", "'bshd' or 'bhsd'", f"got {layout!r}")
        for layout in ("bsdh", "BSHD", "", None, 0, ["bshd"])
    ),
    # out
    ({"out": 1.0}, TypeError, "out: ", KINDS, "got float"),
    ({"out": [OUT]}, TypeError, "out: ", KINDS, "got list"),
    ({"out": A((2, 3, 4, 8))}, ValueError, "out: ", "shape (2, 3, 4, 6)", "got (2, 3, 4, 8)"),
    ({"out": A((3, 4, 6))}, ValueError, "out: ", "shape (2, 3, 4, 6)", "got (3, 4, 6)"),
    ({"out": OUT._replace(dtype="float64")}, TypeError, "out: ", "dtype float32", "got float64"),
    ({"out": OUT._replace(dtype="int32")}, TypeError, "out: ", "dtype float32", "got int32"),
    ({"out": (OUT, LSE)}, TypeError, "out: ", "return_lse=True", "got a tuple of 2"),
    ({"out": (OUT,)}, TypeError, "out: ", "a pair (out, lse)", "got a tuple of 1"),
    ({"out": (), "return_lse": True}, TypeError, "out: ", "a pair (out, lse)", "got a tuple of 0"),
    (
        {"out": (OUT, LSE, None), "return_lse": True},
        *(TypeError, "out: ", "a pair (out, lse)", "got a tuple of 3"),
    ),
    (
        {"out": (OUT, LSE._replace(dtype="float64")), "return_lse": True},
        *(TypeError, "lse of out: ", "dtype float32", "got float64"),
    ),
    (
        {"out": (None, A((2, 3, 4))), "return_lse": True},
        *(ValueError, "lse of out: ", "shape (2, 4, 3)", "got (2, 3, 4)"),
    ),
    ({"out": (OUT, 0.0), "return_lse": True}, TypeError, "lse of out: ", KINDS, "got float"),
    (
        {"v": A((2, 5, 2, 8)), "out": Same("q")},
        *(ValueError, "out: ", "shares memory with q", "another array"),
    ),
    (
        {"q": A((2, 5, 2, 8)), "v": A((2, 5, 2, 8)), "out": Same("k")},
        *(ValueError, "out: ", "shares memory with k"),
    ),
    ({"q": A((2, 5, 2, 8)), "out": Same("v")}, ValueError, "out: ", "shares memory with v"),
]

BACKWARD_ERRORS = [
    ({"dout": None}, TypeError, "dout: ", KINDS, "got NoneType"),
    ({"output": [0.0]}, TypeError, "output: ", KINDS, "got list"),
    ({"lse": 0.0}, TypeError, "lse: ", KINDS, "got float"),
    ({"dlse": 0.0}, TypeError, "dlse: ", KINDS, "got float"),
    *(
        ({name: OUT._replace(dtype="float64")}, TypeError, f"{name}: ", "float32", "got float64")
        for name in ("dout", "output")
    ),
    *(
        ({name: A(shape)}, ValueError, f"{name}: ", "shape (2, 3, 4, 6)", f"got {shape}")
        for name in ("dout", "output")
        for shape in [(2, 3, 4, 8), (2, 4, 3, 6), (3, 4, 6), ()]
    ),
    *(
        ({name: LSE._replace(dtype=dtype)}, TypeError, f"{name}: ", "for float32", f"got {dtype}")
        for name in ("lse", "dlse")
        for dtype in ("float64", "float16")
    ),
    *(
        ({name: A(shape)}, ValueError, f"{name}: ", "shape (2, 4, 3)", f"got {shape}")
        for name in ("lse", "dlse")
        for shape in [(2, 3, 4), (4, 3), (2, 4, 3, 1)]
    ),
    ({"layout": "no"}, ValueError, "layout: ", "'bshd' or 'bhsd'", "got 'no'"),
    ({"causal": 1}, TypeError, "causal: ", FLAG, "got 1"),
    # out
    ({"out": OUT}, TypeError, "out: ", "expected (dq, dk, dv[, dbias[, dsinks]])", "got ndarray"),
    (
        {"out": (None, None)},
        TypeError,
        "out: ",
        "expected (dq, dk, dv[, dbias[, dsinks]])",
        "got tuple",
    ),
    ({"out": "qkv"}, TypeError, "out: ", "expected (dq, dk, dv[, dbias[, dsinks]])", "got str"),
    ({"out": (1.0, None, None)}, TypeError, "dq of out: ", KINDS, "got float"),
    (
        {"out": (None, A((2, 5, 2, 8), "float16"), None)},
        *(TypeError, "dk of out: ", "dtype float32", "got float16"),
    ),
    (
        {"out": (None, None, A((2, 5, 2, 8)))},
        *(ValueError, "dv of out: ", "shape (2, 5, 2, 6)", "got (2, 5, 2, 8)"),
    ),
    ({"out": (Same("q"), None, None)}, ValueError, "dq of out: ", "shares memory with q"),
    ({"out": (None, Same("k"), None)}, ValueError, "dk of out: ", "shares memory with k"),
    ({"out": (None, None, Same("v"))}, ValueError, "dv of out: ", "shares memory with v"),
    *(
        (
            {"v": A((2, 5, 2, 8)), "dout": FORWARD["q"], "output": FORWARD["q"]}
            | {"out": (Same(name), None, None)},
            *(ValueError, "dq of out: ", f"shares memory with {field}"),
        )
        for name, field in [("dout", "dout"), ("output", "out")]
    ),
    # workspace
    ({"workspace": 48}, TypeError, "workspace: ", KINDS, "got int"),
    ({"workspace": [0] * 96}, TypeError, "workspace: ", KINDS, "got list"),
    (
        {"workspace": A((WORKSPACE,), "float32")},
        *(TypeError, "workspace: ", "dtype uint8", "got float32"),
    ),
    (
        {"workspace": A((WORKSPACE - 1,), "uint8")},
        *(ValueError, "workspace: ", f"at least {WORKSPACE} uint8", f"({WORKSPACE - 1},)"),
    ),
    (
        {"workspace": A((2, WORKSPACE), "uint8")},
        *(ValueError, "workspace: ", "one-dimensional", f"(2, {WORKSPACE})"),
    ),
]


NUMBER = "expected a real number on the host"
SEED = "expected an int or an array of one int64"
PAIRS = "expected shape (3, 5) or (2, 4, 3, 5) (batch, heads, queries, keys)"
SLOPES = "expected shape (4,) or (2, 4) (heads of q, or batch and heads)"

#: Errors of the options of both passes, as changes of a forward call.
OPTION_ERRORS = [
    # numbers
    *(
        ({name: value}, TypeError, f"{name}: ", NUMBER, f"got {kind}")
        for name in ("softcap", "dropout_p")
        for value, kind in [
            (None, "NoneType"),
            (True, "bool"),
            (np.True_, "bool"),
            (np.array(True), "bool"),
            ("0.5", "str"),
            (0.5j, "complex"),
            ([0.5], "list"),
            (A((1,)), "ndarray"),
            (np.timedelta64(1, "s"), "timedelta64"),
            (np.ma.masked, "MaskedConstant"),
            (Decimal(0), "Decimal"),
        ]
    ),
    *(
        ({name: value}, ValueError, f"{name}: ", "expected a finite number (of float32)", got)
        for name in ("softcap", "dropout_p")
        for value, got in [
            (float("nan"), "got nan"),
            (float("inf"), "got inf"),
            (np.float32("-inf"), "got -inf"),
            (10**400, "got inf"),
            (1e39, "got 1e+39"),
        ]
    ),
    *(
        ({"softcap": value}, ValueError, "softcap: ", "0 (none) or a positive", f"got {value!r}")
        for value in (-1, -0.5, -1e-300, 1e-40, np.float16(-2))
    ),
    *(
        ({"dropout_p": value}, ValueError, "dropout_p: ", "probability from 0 to 1", f"{value!r}")
        for value in (-0.1, -1, 1.0000001, 2, -5e-324, np.float32(1.5))
    ),
    # pairs of a query and a key
    *(
        ({name: value}, TypeError, f"{name}: ", KINDS, f"got {kind}")
        for name in ("bias", "mask")
        for value, kind in [
            (1.0, "float"),
            (np.float32(1), "float32"),
            ([[0.0]], "list"),
            (True, "bool"),
            ("causal", "str"),
        ]
    ),
    *(
        ({"bias": A((3, 5), dtype)}, TypeError, "bias: ", "dtype float32 for", f"got {dtype}")
        for dtype in ("float16", "float64", "int32", "uint8", "bool", "complex64")
    ),
    (
        {name: x._replace(dtype="float16") for name, x in FORWARD.items()}
        | {"bias": A((3, 5), "float64")},
        *(TypeError, "bias: ", "float16 or float32 for float16 inputs", "got float64"),
    ),
    *(
        ({"mask": A((3, 5), dtype)}, TypeError, "mask: ", "dtype bool", "as bias", f"got {dtype}")
        for dtype in ("uint8", "int8", "int64", "float32", "float16")
    ),
    *(
        ({name: A(shape, dtype)}, ValueError, f"{name}: ", PAIRS, "length 1", f"got {shape}")
        for name, dtype in [("bias", "float32"), ("mask", "bool")]
        for shape in [
            *((), (5,), (2, 3, 5), (1, 3, 5), (1, 1, 1, 1, 1)),  # numbers of axes
            *((5, 3), (3, 4), (2, 5), (0, 5), (3, 0), (0, 0)),
            *((3, 4, 3, 5), (2, 2, 3, 5), (4, 2, 3, 5), (0, 4, 3, 5), (2, 0, 3, 5), (2, 4, 0, 5)),
        ]
    ),
    # heads
    *(
        ({name: value}, TypeError, f"{name}: ", KINDS, f"got {kind}")
        for name in ("alibi_slopes", "sinks")
        for value, kind in [(0.5, "float"), ([0.5] * 4, "list"), (np.float32(1), "float32")]
    ),
    *(
        ({name: A((4,), dtype)}, TypeError, f"{name}: ", "dtype float32 for", f"got {dtype}")
        for name in ("alibi_slopes", "sinks")
        for dtype in ("float16", "float64", "int32", "bool")
    ),
    *(
        ({"alibi_slopes": A(shape)}, ValueError, "alibi_slopes: ", SLOPES, f"got {shape}")
        for shape in [(), (2,), (3,), (0,), (1, 4), (4, 2), (3, 4), (2, 2), (2, 4, 1)]
    ),
    *(
        ({"sinks": A(shape)}, ValueError, "sinks: ", "(4,) (the heads of q)", f"got {shape}")
        for shape in [(), (2,), (0,), (1, 4), (2, 4), (4, 1)]
    ),
    # seeds
    ({"dropout_p": 0.5}, ValueError, "seed: ", "int, or an array of one int64", "dropout_p > 0"),
    ({"dropout_p": 1e-320}, ValueError, "seed: ", "int, or an array of one int64"),
    *(
        ({"dropout_p": 0.5, "seed": seed}, TypeError, "seed: ", SEED, f"got {kind}")
        for seed, kind in [
            (1.0, "float"),
            (np.float64(1), "float64"),
            (True, "bool"),
            (np.True_, "bool"),
            ("1", "str"),
            (b"1", "bytes"),
            ([1], "list"),
            ((1,), "tuple"),
            (np.ma.array([1]), "MaskedArray"),
        ]
    ),
    *(
        ({"dropout_p": 0.5, "seed": A(shape, dtype)}, TypeError, "seed: ", SEED, dtype, f"{shape}")
        for shape, dtype in [
            ((1,), "int32"),
            ((), "float64"),
            ((1,), "bool"),
            ((0,), "int64"),
            ((2,), "int64"),
            ((1, 2), "uint64"),
        ]
    ),
    *(
        ({"dropout_p": 0.5, "seed": seed}, ValueError, "seed: ", "64 bits", f"got {seed}")
        for seed in (2**64, -(2**63) - 1, 10**400 // 10**370, -(10**30))
    ),
]

OFFSETS = "cu_seqlens_q: "
RANGE = "expected offsets from 0 to 10, the rows there are, each at least the one before"
PACKED_PAIRS = "expected shape (queries, keys) or (2 entries, 4 heads, queries, keys)"

PACKED_ERRORS = [
    # q, k, v
    *(
        ({"q": A(shape)}, ValueError, "q: ", "expected packed (total, heads, dim)", f"{shape}")
        for shape in [(2, 10, 4, 8), (1, 10, 4, 8), (10, 8), ()]
    ),
    (
        {"q": A((2, 5, 4, 8)), "k": A((2, 6, 2, 8)), "v": A((2, 6, 2, 6))},
        *(ValueError, "q: ", "expected packed (total, heads, dim)", "(2, 5, 4, 8)"),
    ),
    ({"k": A((2, 6, 2, 8))}, ValueError, "k: ", "expected 3 dimensions", "got shape (2, 6, 2, 8)"),
    ({"v": A((11, 2, 6))}, ValueError, "v: ", "expected shape (12, 2, 6)", "got (11, 2, 6)"),
    ({"q": [0]}, TypeError, "q: ", KINDS, "got list"),
    ({"causal": 1}, TypeError, "causal: ", FLAG, "got 1"),
    ({"out": PACKED_LSE}, ValueError, "out: ", "shape (10, 4, 6)", "got (4, 10)"),
    (
        {"out": (None, A((1, 4, 10))), "return_lse": True},
        *(ValueError, "lse of out: ", "shape (4, 10)", "got (1, 4, 10)"),
    ),
    # offsets
    *(
        ({name: value}, TypeError, f"{name}: ", KINDS, f"got {kind}")
        for name in ("cu_seqlens_q", "cu_seqlens_k")
        for value, kind in [(None, "NoneType"), ([0, 3, 10], "list"), ((0, 3), "tuple"), (3, "int")]
    ),
    *(
        ({OFFSETS[:-2]: CU_Q.astype(dtype)}, TypeError, OFFSETS, "int32 or int64", f"got {got}")
        for dtype, got in [
            *((name, name) for name in ("float64", "float32", "uint32", "uint64", "int16", "bool")),
            ("object", "object"),
            (np.dtype(np.int64).newbyteorder(), ">i8"),
        ]
    ),
    *(
        ({OFFSETS[:-2]: np.zeros(shape, int)}, ValueError, OFFSETS, "expected one axis", f"{shape}")
        for shape in [(), (0,), (1, 3), (3, 1)]
    ),
    *(
        ({OFFSETS[:-2]: np.array(x, dtype)}, ValueError, OFFSETS, RANGE, f"got [{start}")
        for dtype in (np.int32, np.int64)
        for x, start in [
            ([0, 3, 2], "0 3 2]"),
            ([5, 0, 10], " 5  0 10]"),
            ([10, 3, 0], "10  3  0]"),
            ([0, 3, 11], " 0  3 11]"),
            ([11, 11, 11], "11 11 11]"),
            ([-1, 3, 10], "-1  3 10]"),
            ([-3, -2, -1], "-3 -2 -1]"),
            ([0, 2**31 - 1, 10], " "),
            ([5, -(2**31), -1, 10], " "),  # differences of 32 bits are all positive
        ]
    ),
    ({OFFSETS[:-2]: np.array([5, -(2**63), -1, 10])}, ValueError, OFFSETS, RANGE, "got ["),
    ({OFFSETS[:-2]: np.array([0, 2**63 - 1, 10])}, ValueError, OFFSETS, RANGE, "got ["),
    ({OFFSETS[:-2]: np.arange(20)}, ValueError, OFFSETS, RANGE, "got [ 0  1  2 ... 17 18 19]"),
    ({OFFSETS[:-2]: np.ma.array(CU_Q)}, TypeError, OFFSETS, "a masked array"),
    (
        {"cu_seqlens_k": np.array([0, 5, 13])},
        *(ValueError, "cu_seqlens_k: ", "expected offsets from 0 to 12", "got [ 0  5 13]"),
    ),
    *(
        ({"cu_seqlens_k": np.array(x)}, ValueError, "cu_seqlens_k: ", "3 offsets, as", f"got {n}")
        for x, n in [([0], 1), ([0, 12], 2), ([0, 1, 2, 3], 4)]
    ),
    # hints
    *(
        ({name: hint}, TypeError, f"{name}: ", "expected an int or None", f"got {got}")
        for name in ("max_seqlen_q", "max_seqlen_k")
        for hint, got in [
            (7.0, "float"),
            (True, "bool"),
            (np.True_, "bool"),
            ("7", "str"),
            ([7], "list"),
            (np.array([7]), "array([7])"),
            (np.array(7.0), "array(7.)"),
            (np.array(True), "array(True)"),
        ]
    ),
    *(
        ({name: hint}, ValueError, f"{name}: ", "expected a length", f"got {hint}")
        for name in ("max_seqlen_q", "max_seqlen_k")
        for hint in (-1, -(2**70))
    ),
    # bias and mask
    *(
        ({name: A(shape, dtype)}, ValueError, f"{name}: ", PACKED_PAIRS, f"got {shape}")
        for name, dtype in [("bias", "float32"), ("mask", "bool")]
        for shape in [(), (7,), (4, 7, 7), (3, 4, 7, 7), (2, 2, 7, 7), (0, 4, 7, 7), (2, 0, 7, 7)]
    ),
    *(
        ({name: A(shape, dtype)}, ValueError, f"{name}: ", f"an axis of {what}", f"shape {shape}")
        for name, dtype in [("bias", "float32"), ("mask", "bool")]
        for shape, what in [
            ((6, 7), "queries of length 1 or of at least the longest entry's 7"),
            ((2, 4, 6, 7), "queries"),
            ((0, 7), "queries"),
            ((7, 6), "keys of length 1 or of at least the longest entry's 7"),
            ((1, 1, 1, 2), "keys"),
            ((7, 0), "keys"),
        ]
    ),
    # heads, of entries
    *(
        ({"alibi_slopes": A(shape)}, ValueError, "alibi_slopes: ", SLOPES, f"got {shape}")
        for shape in [(1, 4), (10, 4), (2,), (4, 10)]
    ),
    ({"sinks": A((2, 4))}, ValueError, "sinks: ", "(4,) (the heads of q)", "got (2, 4)"),
    ({"dropout_p": 0.5}, ValueError, "seed: ", "int, or an array of one int64"),
]

NAMES = "expected some of ['q', 'k', 'v'], the call's arrays"
ALL_NAMES = "expected some of ['q', 'k', 'v', 'bias', 'sinks'], the call's arrays"
WITH_BOTH = {"bias": BIAS, "sinks": SINKS}
FIVE = "expected (dq, dk, dv[, dbias[, dsinks]])"

OPTION_BACKWARD_ERRORS = [
    # wrt
    *(
        ({"wrt": wrt}, ValueError, "wrt: ", NAMES, f"got {got}")
        for wrt, got in [
            ("bias", "'bias'"),
            (("q", "sinks"), "'sinks'"),
            ("dq", "'dq'"),
            ("qkv", "'qkv'"),
            ("", "''"),
            (["x"], "'x'"),
            ([None], "None"),
            ([["q"]], "['q']"),
            (b"q", "113"),
            (np.zeros((1, 2)), "array([0., 0.])"),
        ]
    ),
    ({"wrt": ("q", "mask"), **WITH_BOTH}, ValueError, "wrt: ", ALL_NAMES, "got 'mask'"),
    *(
        ({"wrt": wrt}, TypeError, "wrt: ", "expected names out of ['q', 'k', 'v']", f"got {kind}")
        for wrt, kind in [(0, "int"), (True, "bool"), (np.array("q"), "ndarray")]
    ),
    # out
    *(
        ({"out": (None,) * n, **WITH_BOTH}, TypeError, "out: ", FIVE, f"got tuple of {n}")
        for n in (0, 2, 6)
    ),
    ({"out": [None] * 6}, TypeError, "out: ", FIVE, "got list of 6"),
    ({"out": {}}, TypeError, "out: ", FIVE, "got dict"),
    *(
        (
            {"out": tuple(x if n == at else None for n in range(5)), **changes},
            *(ValueError, "out: ", f"{name} is not computed by this call", "pass None"),
        )
        for at, name, x, changes in [
            (3, "dbias", BIAS, {}),
            (3, "dbias", BIAS, {"sinks": SINKS}),
            (3, "dbias", BIAS, {"wrt": "q", **WITH_BOTH}),
            (4, "dsinks", SINKS, {}),
            (4, "dsinks", SINKS, {"bias": BIAS}),
            (4, "dsinks", SINKS, {"wrt": ("q", "bias"), **WITH_BOTH}),
            (0, "dq", FORWARD["q"], {"wrt": ("k", "v")}),
            (1, "dk", FORWARD["k"], {"wrt": ("v",)}),
            (2, "dv", FORWARD["v"], {"wrt": ("k",)}),
            (2, "dv", FORWARD["v"], {"wrt": ()}),
        ]
    ),
    *(
        ({"out": (None, None, None, x), **WITH_BOTH}, error, "dbias of out: ", expected, got)
        for x, error, expected, got in [
            (0.0, TypeError, KINDS, "got float"),
            (A((3, 5), "float64"), TypeError, "dtype float32", "got float64"),
            (A((3, 5), "float16"), TypeError, "dtype float32", "got float16"),
            (A((5, 3)), ValueError, "shape (3, 5)", "got (5, 3)"),
            (A((1, 1, 3, 5)), ValueError, "shape (3, 5)", "got (1, 1, 3, 5)"),
            (FULL_BIAS, ValueError, "shape (3, 5)", "got (2, 4, 3, 5)"),
            (Same("bias"), ValueError, "shares memory with bias", "another array"),
        ]
    ),
    *(
        ({"out": (*(None,) * 4, x), **WITH_BOTH}, error, "dsinks of out: ", expected, got)
        for x, error, expected, got in [
            (0.0, TypeError, KINDS, "got float"),
            (A((4,), "float16"), TypeError, "dtype float32", "got float16"),
            (A((1, 4)), ValueError, "shape (4,)", "got (1, 4)"),
            (Same("sinks"), ValueError, "shares memory with sinks", "another array"),
        ]
    ),
    (
        {"bias": FULL_BIAS, "mask": A((3, 5), "bool"), "workspace": A((10,), "uint8")},
        *(ValueError, "workspace: ", f"at least {WORKSPACE} uint8", "got shape (10,)"),
    ),
]

PACKED_BACKWARD_ERRORS = [
    *(
        ({name: A(shape)}, ValueError, f"{name}: ", "shape (10, 4, 6)", f"got {shape}")
        for name in ("dout", "output")
        for shape in [(10, 4, 8), (1, 10, 4, 6), (4, 10, 6)]
    ),
    *(
        ({name: A(shape)}, ValueError, f"{name}: ", "shape (4, 10)", f"got {shape}")
        for name in ("lse", "dlse")
        for shape in [(10, 4), (1, 4, 10), (2, 4, 7)]
    ),
    ({"wrt": "cu_seqlens_q"}, ValueError, "wrt: ", NAMES, "got 'cu_seqlens_q'"),
    (
        {"bias": A((7, 9)), "out": (None, None, None, A((7, 7)))},
        *(ValueError, "dbias of out: ", "shape (7, 9)", "got (7, 7)"),
    ),
    (
        {"workspace": A((159,), "uint8")},
        *(ValueError, "workspace: ", "at least 160 uint8", "got shape (159,)"),
    ),
    ({"cu_seqlens_q": np.array([0, 3, 11])}, ValueError, OFFSETS, RANGE, "got [ 0  3 11]"),
    ({"max_seqlen_k": 0.5}, TypeError, "max_seqlen_k: ", "expected an int", "got float"),
]


@pytest.mark.parametrize("row", FORWARD_ERRORS, ids=lambda row: f"{row[2]}{row[-1]}")
def test_errors_of_attention(backend: Backend, launches: list[str], row: tuple) -> None:
    changes, error, *parts = row
    raises(error, tuple(parts), forward, backend, changes)
    assert not launches


@pytest.mark.parametrize("row", BACKWARD_ERRORS, ids=lambda row: f"{row[2]}{row[-1]}")
def test_errors_of_attention_backward(backend: Backend, launches: list[str], row: tuple) -> None:
    changes, error, *parts = row
    raises(error, tuple(parts), backward, backend, changes)
    assert not launches


@pytest.mark.parametrize("row", OPTION_ERRORS, ids=lambda row: f"{row[2]}{row[-1]}")
def test_errors_of_options(backend: Backend, launches: list[str], row: tuple) -> None:
    changes, error, *parts = row
    raises(error, tuple(parts), forward, backend, changes)
    raises(error, tuple(parts), backward, backend, half(BACKWARD, changes) | changes)
    assert not launches


def half(call: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """What else of a backward call must change if q is changed to float16."""
    if changes.get("q", FORWARD["q"]).dtype != "float16":
        return {}
    return {name: call[name]._replace(dtype="float16") for name in ("dout", "output")}


@pytest.mark.parametrize("row", PACKED_ERRORS, ids=lambda row: f"{row[2]}{row[-1]}")
def test_errors_of_attention_varlen(backend: Backend, launches: list[str], row: tuple) -> None:
    changes, error, *parts = row
    raises(error, tuple(parts), varlen, backend, changes)
    if not {"out", "return_lse"} & changes.keys():
        raises(error, tuple(parts), varlen_backward, backend, changes)
    assert not launches


@pytest.mark.parametrize("row", OPTION_BACKWARD_ERRORS, ids=lambda row: f"{row[2]}{row[-1]}")
def test_errors_of_gradients_of_options(backend: Backend, launches: list[str], row: tuple) -> None:
    changes, error, *parts = row
    raises(error, tuple(parts), backward, backend, changes)
    assert not launches


@pytest.mark.parametrize("row", PACKED_BACKWARD_ERRORS, ids=lambda row: f"{row[2]}{row[-1]}")
def test_errors_of_attention_varlen_backward(
    backend: Backend, launches: list[str], row: tuple
) -> None:
    changes, error, *parts = row
    raises(error, tuple(parts), varlen_backward, backend, changes)
    assert not launches


def test_the_calls_that_the_tables_change_are_right(backend: Backend, launches: list[str]) -> None:
    forward(backend, {})
    forward(backend, {"out": (OUT, LSE), "return_lse": True})
    backward(backend, {})
    backward(backend, {"dlse": LSE, "workspace": A((WORKSPACE,), "uint8")})
    backward(backend, {"out": tuple(FORWARD.values())})
    assert launches == ["forward"] * 2 + ["backward"] * 3
    launches.clear()
    varlen(backend, {})
    varlen(backend, {"out": (PACKED_OUT, PACKED_LSE), "return_lse": True})
    varlen_backward(backend, {"dlse": PACKED_LSE, "workspace": A((160,), "uint8")})
    backward(backend, {**WITH_BOTH, "out": (None, None, None, BIAS, SINKS)})
    assert launches == ["forward"] * 2 + ["backward"] * 2


# --- errors that take more than a change of shape, dtype or value --------------------------------


def test_errors_of_attention_vjp(backend: Backend, launches: list[str]) -> None:
    arguments = resolve(backend, FORWARD)
    with pytest.raises(TypeError, match=r"^causal: expected True or False, got 1"):
        cuflash.attention_vjp(**arguments, causal=1)
    with pytest.raises(TypeError, match=r"^return_lse: expected True or False, got 'yes'"):
        cuflash.attention_vjp(**arguments, return_lse="yes")
    assert not launches
    out, vjp = cuflash.attention_vjp(**arguments)
    assert launches == ["forward"]
    with pytest.raises(ValueError, match=r"^dout: expected shape \(2, 3, 4, 6\)"):
        vjp(out[0])
    with pytest.raises(ValueError, match=r"^dlse: expected shape \(2, 4, 3\)"):
        vjp(out, dlse=LSE._replace(shape=(2, 3, 4)).on(backend))
    with pytest.raises(ValueError, match=r"^dk of out: expected shape"):
        vjp(out, out=(None, arguments["v"], None))
    with pytest.raises(TypeError, match=r"^workspace: expected dtype uint8"):
        vjp(out, workspace=arguments["q"])
    assert launches == ["forward"]


UNFIT_FOR_NUMPY = [
    (np.ma.zeros((2, 3, 4, 8), "f4"), "q: a masked array, whose mask would be ignored; pass its"),
    (np.zeros((2, 3, 4, 8), np.dtype("f4").newbyteorder()), f"q: {DTYPES}, got >f4"),
    (np.zeros((2, 3, 4, 8), np.dtype("f8").newbyteorder()), f"q: {DTYPES}, got >f8"),
    (
        np.zeros((2, 3, 4, 8), ml_dtypes.bfloat16).view(
            np.dtype(ml_dtypes.bfloat16).newbyteorder()
        ),
        f"q: {DTYPES}, got >V2",
    ),
    (np.zeros((2, 3, 4, 8), object), f"q: {DTYPES}, got object"),
    (np.zeros((2, 3, 4, 8), np.longdouble), f"q: {DTYPES}, got float128"),
    (np.zeros((2, 3, 4, 8), "U1"), f"q: {DTYPES}, got <U1"),
    (np.zeros((2, 3, 4, 8), "V2"), f"q: {DTYPES}, got |V2"),
    (np.zeros((2, 3, 4, 8), "f4,f4"), f"q: {DTYPES}, got [("),
    (np.zeros((2, 3, 4, 8), ml_dtypes.float8_e4m3fn), f"q: {DTYPES}, got float8_e4m3fn"),
]


@pytest.mark.parametrize("row", UNFIT_FOR_NUMPY, ids=lambda row: row[1][-10:])
def test_numpy_arrays_of_other_kinds(launches: list[str], row: tuple[np.ndarray, str]) -> None:
    q, message = row
    raises(TypeError, (message,), lambda: cuflash.attention(q, q, q))
    assert not launches


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_a_matrix_has_too_few_axes() -> None:
    q = np.asmatrix(np.zeros((3, 8), "f4"))
    raises(ValueError, ("q: expected", "got shape (3, 8)"), lambda: cuflash.attention(q, q, q))


def packed(shape: tuple[int, ...]) -> np.ndarray:
    """Unaligned: the floats of records with a byte before each."""
    return np.zeros(shape, np.dtype([("tag", "u1"), ("x", "f4")]))["x"]


class Dlpack:
    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


def test_numpy_destinations_that_cannot_be_written(launches: list[str]) -> None:
    inputs = {name: x.on(Backend("cpu", np)) for name, x in FORWARD.items()}
    readonly = np.zeros(OUT.shape, "f4")
    readonly.flags.writeable = False
    unaligned = np.zeros(4 * np.prod(OUT.shape) + 1, "u1")[1:].view("f4").reshape(OUT.shape)
    for out, error, message in [
        (readonly, ValueError, "out: expected a writable array, got a read-only one"),
        (np.broadcast_to(np.float32(0), OUT.shape), ValueError, "out: expected a writable array"),
        (packed(OUT.shape), ValueError, "out: expected an aligned array"),
        (Dlpack(unaligned), ValueError, "out: expected an aligned array"),
        (np.ma.zeros(OUT.shape, "f4"), TypeError, "out: a masked array"),
        (np.zeros(OUT.shape, np.dtype("f4").newbyteorder()), TypeError, "out: expected dtype floa"),
    ]:
        raises(error, (message,), lambda out=out: cuflash.attention(**inputs, out=out))
    lse = np.zeros(LSE.shape, "f4")
    lse.flags.writeable = False
    with pytest.raises(ValueError, match=r"^lse of out: expected a writable array"):
        cuflash.attention(**inputs, return_lse=True, out=(None, lse))
    workspace = np.zeros(WORKSPACE, "u1")
    workspace.flags.writeable = False
    rest = {name: x.on(Backend("cpu", np)) for name, x in BACKWARD.items()}
    with pytest.raises(ValueError, match=r"^workspace: expected a writable array"):
        cuflash.attention_backward(**rest, workspace=workspace)
    assert not launches


def test_unaligned_numpy_arrays_come_in_as_copies() -> None:
    x = packed((2, 3))
    x[:] = [[1, 2, 3], [4, 5, 6]]
    y = arrays.adopt("x", x).array
    assert not x.flags.aligned and y.flags.aligned
    np.testing.assert_array_equal(x, y)
    aligned = np.zeros((2, 3))[::-1, ::2]
    assert arrays.adopt("x", aligned).array is aligned


def test_destinations_that_overlap(backend: Backend, launches: list[str]) -> None:
    xp = backend.xp
    q, k, v = (FORWARD[name].on(backend) for name in "qkv")
    v8 = A((BATCH, SK, HKV, D)).on(backend)
    parts = xp.zeros((BATCH + 1, SQ, HQ, D), "f4")
    stack = xp.zeros((BATCH, SQ, HQ, 2, D), "f4")

    with pytest.raises(ValueError, match=r"^out: shares memory with q, which this call"):
        cuflash.attention(parts[1:], k, v8, out=parts[:-1])
    with pytest.raises(ValueError, match=r"^out: shares memory with q, which this call"):
        cuflash.attention(q[:1, ::-1], k[:1], v8[:1], out=q[:1])
    flat = xp.zeros(1000, "f4")
    out, lse = flat[: np.prod(OUT.shape)].reshape(OUT.shape), flat[140:164].reshape(LSE.shape)
    with pytest.raises(ValueError, match=r"^lse of out: shares memory with out"):
        cuflash.attention(q, k, v, return_lse=True, out=(out, lse))
    for destination in (
        xp.lib.stride_tricks.as_strided(flat, OUT.shape, (0, 96, 24, 4)),
        xp.lib.stride_tricks.as_strided(flat, OUT.shape, (288, 96, 20, 4)),
    ):
        with pytest.raises(ValueError, match=r"^out: expected an array whose elements lie apart"):
            cuflash.attention(q, k, v, out=destination)
    assert not launches
    cuflash.attention(stack[..., 0, :], k, v8, out=stack[..., 1, :])  # neighbours do not overlap
    assert launches == ["forward"]


def test_gradients_that_overlap(backend: Backend, launches: list[str]) -> None:
    rest = {name: x.on(backend) for name, x in BACKWARD.items()}
    flat = backend.xp.zeros(1000, "f4")
    dq = flat[:192].reshape(rest["q"].shape)
    dk = flat[190:350].reshape(rest["k"].shape)
    rows = flat[100:124].reshape(LSE.shape)
    scratch = flat[:192].view("u1")

    def backward(**changes: Any) -> None:
        cuflash.attention_backward(**{**rest, **changes})

    for message, changes in [
        ("dk of out: shares memory with dq", {"out": (dq, dk, None)}),
        ("dq of out: shares memory with lse", {"out": (dq, None, None), "lse": rows}),
        ("dq of out: shares memory with dlse", {"out": (dq, None, None), "dlse": rows}),
        ("workspace: shares memory with dq", {"out": (dq, None, None), "workspace": scratch}),
        ("workspace: shares memory with lse", {"lse": rows, "workspace": scratch}),
        ("workspace: shares memory with q", {"workspace": rest["q"].view("u1").reshape(-1)}),
        ("workspace: expected a contiguous array", {"workspace": scratch[::2]}),
        ("workspace: expected a contiguous array", {"workspace": scratch[::-1]}),
        ("workspace: expected a contiguous array aligned to 16", {"workspace": scratch[1:]}),
    ]:
        raises(ValueError, (message,), lambda changes=changes: backward(**changes))
    assert not launches


# --- what arguments mean -------------------------------------------------------------------------


def accepted(call: Any, backend: Backend, launches: list[str], **changes: Any) -> Any:
    """Return what a call returns that no table has, and that reaches the kernels."""
    launches.clear()
    result = call(backend, changes)
    assert len(launches) == 1
    return result


def test_numbers_that_options_may_be(backend: Backend) -> None:
    for value in (0, 0.0, -0.0, np.float32(0), Fraction(0), np.array(0.0)):
        got = read(backend, softcap=value, dropout_p=value)
        assert got.softcap == got.dropout_p == 0 and got.features == ()
        assert type(got.softcap) is type(got.dropout_p) is float
    for kind in (float, np.float16, np.longdouble, ml_dtypes.bfloat16, Fraction, np.array):
        got = read(backend, softcap=kind(0.5), dropout_p=kind(0.25), seed=1)
        assert (got.softcap, got.dropout_p) == (0.5, 0.25)
        assert got.features == ("softcap", "dropout")
    for value in (3e-39, 3e38, 30, np.uint8(30)):
        assert read(backend, softcap=value).softcap == float(value)
    for value in (1, 1.0, 5e-324, np.nextafter(1, 0), np.int8(1)):
        assert read(backend, dropout_p=value, seed=0).dropout_p == float(value)
    wide = {name: x._replace(dtype="float64") for name, x in FORWARD.items()}
    assert read(backend, **wide, softcap=1e-40).softcap == 1e-40
    assert read(backend, **wide, softcap=1e300).softcap == 1e300


@pytest.mark.parametrize(
    ("seed", "want"),
    [
        (0, 0),
        (-1, 2**64 - 1),
        (-(2**63), 2**63),
        (2**64 - 1, 2**64 - 1),
        (np.int8(-3), 2**64 - 3),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.int64(-(2**63)), 2**63),
        (np.array(5), 5),
        (np.array([-5]), 2**64 - 5),
        (np.array([[[7]]]), 7),
        (np.array([2**64 - 1], np.uint64), 2**64 - 1),
        (np.arange(10)[7:8], 7),
        (np.broadcast_to(np.int64(3), (1, 1)), 3),  # read-only
    ],
    ids=repr,
)
def test_seeds(backend: Backend, seed: Any, want: int) -> None:
    """An array of the host is read at once, whatever place q is in."""
    got = read(backend, dropout_p=0.5, seed=seed)
    assert got.seed == want and type(got.seed) is int
    assert read(backend, seed=seed).seed == 0  # without dropout there is nothing to decide


def strided(x: np.ndarray) -> np.ndarray:
    """The same values, in reverse order in every other place."""
    buffer = np.zeros([2 * n for n in x.shape], x.dtype)
    view = buffer[(slice(None, None, -2),) * x.ndim]
    view[...] = x
    return view


PAIR_SHAPES = [
    *((3, 5), (1, 5), (3, 1), (1, 1), (1, 1, 3, 5), (2, 1, 3, 5), (1, 4, 3, 5), (2, 4, 3, 5)),
    *((2, 4, 1, 1), (1, 1, 1, 1), (2, 1, 1, 5)),
]


@pytest.mark.parametrize("shape", PAIR_SHAPES)
def test_bias_and_mask_may_be(backend: Backend, launches: list[str], shape: tuple) -> None:
    for dtype in (np.float16, np.float32):
        inputs = {name: x._replace(dtype="float16") for name, x in FORWARD.items()}
        bias, mask = np.zeros(shape, dtype), np.zeros(shape, bool)
        wide = np.broadcast_to(np.zeros((1,) * len(shape), dtype), shape)  # also read-only
        for x in (bias, strided(bias), wide, np.asfortranarray(bias)):
            x, m = backend.array(x), backend.array(strided(mask))
            got = read(backend, **inputs, bias=x, mask=m)
            assert got.bias_shape == (1, 1, *shape)[-4:] and got.features == ("bias", "mask")
            half_out = OUT._replace(dtype="float16")
            more = dict(inputs, dout=half_out, output=half_out, bias=x, mask=m)
            dbias = accepted(backward, backend, launches, **more).dbias
            assert dbias.shape == shape and dbias.dtype == dtype


def test_arrays_of_heads_may_be(backend: Backend, launches: list[str]) -> None:
    wide = np.broadcast_to(np.float32(1), (2, 4))
    for slopes in (np.zeros(4, "f4"), np.zeros((2, 4), "f4"), wide):
        for x in (slopes, strided(slopes)):
            x = backend.array(x)
            assert read(backend, alibi_slopes=x).features == ("alibi",)
    for sinks in (np.zeros(4, "f4"), np.broadcast_to(np.float32(1), (4,))):
        for x in (sinks, strided(sinks)):
            grads = accepted(backward, backend, launches, sinks=backend.array(x))
            assert grads.dsinks.shape == (4,) and grads.dbias is None
    single = dict(q=A((3, 4, 8)), k=A((5, 2, 8)), v=A((5, 2, 6)))  # no batch: a batch of one
    read(backend, **single, alibi_slopes=A((1, 4)), bias=A((1, 4, 3, 5)), sinks=A((4,)))


@pytest.mark.parametrize("size", [(0, 3, 5, 4), (2, 0, 5, 4), (2, 3, 0, 4), (2, 3, 5, 0)])
def test_options_of_zero_sizes(
    backend: Backend, launches: list[str], size: tuple[int, ...]
) -> None:
    batch, sq, sk, heads = size
    shapes = (batch, sq, heads, 8), (batch, sk, heads, 8), (batch, sk, heads, 6)
    inputs = dict(zip("qkv", map(A, shapes), strict=True))
    out, lse = A((batch, sq, heads, 6)), A((batch, heads, sq))
    for shape in [(batch, heads, sq, sk), (sq, sk), (1, 1)]:
        changes = dict(inputs, bias=A(shape), mask=A(shape, "bool"), sinks=A((heads,)))
        changes |= dict(alibi_slopes=A((batch, heads)), dropout_p=0.5, seed=1, softcap=1)
        accepted(forward, backend, launches, **changes)
        changes |= dict(dout=out, output=out, lse=lse)
        grads = accepted(backward, backend, launches, **changes)
        assert grads.dbias.shape == shape and grads.dsinks.shape == (heads,)


@pytest.mark.parametrize(
    "cu_q",
    [
        CU_Q,
        [0, 0, 0],
        [10, 10, 10],
        [0, 0, 10],
        [0, 10, 10],
        [4, 4, 9],  # rows before and behind
        [9, 9, 10],
    ],
)
def test_offsets_may_be(backend: Backend, launches: list[str], cu_q: Any) -> None:
    for dtype in (np.int32, np.int64):
        x = np.array(cu_q, dtype)
        readonly = x.copy()
        readonly.flags.writeable = False
        for y in (x, strided(x), readonly, Dlpack(x)):
            assert accepted(varlen, backend, launches, cu_seqlens_q=y).shape == PACKED_OUT.shape
            result = accepted(
                varlen, backend, launches, cu_seqlens_q=y, cu_seqlens_k=CU_K.astype(np.int32)
            )
            assert result.shape == PACKED_OUT.shape
            accepted(varlen_backward, backend, launches, cu_seqlens_q=y)


def test_offsets_of_nothing(backend: Backend, launches: list[str]) -> None:
    none = dict(cu_seqlens_q=np.array([0]), cu_seqlens_k=np.array([3]))
    more = dict(bias=A((0, 0)), mask=A((0, 4, 1, 1), "bool"), alibi_slopes=A((0, 4)))
    assert accepted(varlen, backend, launches, **none, **more).shape == PACKED_OUT.shape
    assert accepted(varlen_backward, backend, launches, **none, **more).dbias.shape == (0, 0)
    nothing = dict(q=A((0, 4, 8)), k=A((0, 2, 8)), v=A((0, 2, 6)))
    for cu in ([0], [0, 0, 0]):
        cu = dict(cu_seqlens_q=np.array(cu), cu_seqlens_k=np.array(cu))
        assert accepted(varlen, backend, launches, **nothing, **cu).shape == (0, 4, 6)


@pytest.mark.parametrize(
    "shape", [(7, 7), (7, 9), (1, 7), (7, 1), (1, 1), (2, 4, 8, 7), (1, 1, 7, 7)]
)
def test_bias_of_packed_entries(backend: Backend, launches: list[str], shape: tuple) -> None:
    grads = accepted(
        varlen_backward, backend, launches, bias=A(shape), mask=A(shape, "bool"), sinks=SINKS
    )
    assert grads.dbias.shape == shape


def test_hints_may_be_any_length(backend: Backend, launches: list[str]) -> None:
    for hint in (0, 1, 7, 2**70, np.int8(3), np.uint64(3), np.array(3), None):
        accepted(varlen, backend, launches, max_seqlen_q=hint, max_seqlen_k=hint)
        accepted(varlen_backward, backend, launches, max_seqlen_q=hint, max_seqlen_k=hint)


def test_packed_problem(backend: Backend) -> None:

    def read(layout: str = "bshd", **changes: Any) -> Any:
        arguments = resolve(backend, {**PACKED, **changes}).values()
        none = (0.0, None, None, None, None, 0.0, None)
        return read_packed(*arguments, None, None, None, False, (-1, -1), layout, *none)

    got, inputs = read()
    assert got.is_packed and got.features == ("packed",)
    assert (got.batch, got.seqlen_q, got.seqlen_kv) == (2, TOTAL_Q, TOTAL_K)
    assert got.rows == HQ * TOTAL_Q
    assert inputs.cu_seqlens_q.shape == inputs.cu_seqlens_kv.shape == (3,)
    turned = dict(q=A((4, 10, 8)), k=A((2, 12, 8)), v=A((2, 12, 6)), layout="bhsd")
    assert read(**turned)[0] == got


WANTED = [
    (None, {"q", "k", "v", "bias", "sinks"}),
    ((), set()),
    ([], set()),
    ("q", {"q"}),
    ("bias", {"bias"}),
    (("q", "q"), {"q"}),
    (["sinks", "v"], {"v", "sinks"}),
    ({"k": 1}, {"k"}),
    ({"k", "v"}, {"k", "v"}),
    (np.array(["q", "bias"]), {"q", "bias"}),
]


@pytest.mark.parametrize(("wrt", "want"), WANTED, ids=range(len(WANTED)))
def test_wrt_may_be(backend: Backend, launches: list[str], wrt: Any, want: set[str]) -> None:
    grads = accepted(backward, backend, launches, **WITH_BOTH, wrt=wrt)
    for name in ("q", "k", "v", "bias", "sinks"):
        assert (getattr(grads, f"d{name}") is not None) == (name in want)


def test_out_of_three_to_five(backend: Backend, launches: list[str]) -> None:
    arrays = resolve(backend, dict(q=FORWARD["q"], **WITH_BOTH))
    for out in (
        (None,) * 3,
        [None] * 4,
        (None,) * 5,
        (arrays["q"], None, None),
        (None, None, None, arrays["bias"]),
        [arrays["q"], None, None, arrays["bias"], arrays["sinks"]],
    ):
        grads = accepted(backward, backend, launches, **WITH_BOTH, out=out)
        got = (*grads, grads.dbias, grads.dsinks)
        assert all(x is y for x, y in zip(got, out, strict=False) if y is not None)
    accepted(backward, backend, launches, out=(None,) * 5)  # None is no destination


def elsewhere(x: np.ndarray) -> arrays.View:
    """An array that claims to lie on a GPU."""
    return arrays.view(x)._replace(device=0)


ELSEWHERE = {
    "bias": np.zeros((3, 5), "f4"),
    "mask": np.zeros((3, 5), bool),
    "alibi_slopes": np.zeros(4, "f4"),
    "sinks": np.zeros(4, "f4"),
    "seed": np.zeros(1, np.int64),
}
PLACE = "expected an array in the same place as q"


@pytest.mark.parametrize("name", ELSEWHERE)
def test_arrays_of_options_lie_where_q_lies(launches: list[str], name: str) -> None:
    changes = {name: elsewhere(ELSEWHERE[name]), "dropout_p": 0.5 * (name == "seed")}
    parts = f"{name}: ", PLACE, "(host memory)", "got one in GPU 0"
    for call in (forward, backward):
        raises(TypeError, parts, call, Backend("cpu", np), changes)
    assert not launches


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_offsets_of_numpy_arrays_lie_on_the_host(launches: list[str], name: str) -> None:
    parts = f"{name}: ", PLACE, "(host memory)", "got one in GPU 0"
    for call in (varlen, varlen_backward):
        raises(TypeError, parts, call, Backend("cpu", np), {name: elsewhere(CU_Q)})
    assert not launches


def test_destinations_that_share_memory_with_options(launches: list[str]) -> None:
    backend = Backend("cpu", np)
    flat = np.zeros(1000, "f4")
    dq = flat[: np.prod((BATCH, SQ, HQ, D))].reshape(BATCH, SQ, HQ, D)
    bias, sinks, slopes = flat[100:115].reshape(3, 5), flat[10:14], flat[20:28].reshape(2, 4)
    mask, seed = flat.view(bool)[:15].reshape(3, 5), flat.view(np.int64)[30:31]
    for name, x in {"bias": bias, "mask": mask, "alibi_slopes": slopes, "sinks": sinks}.items():
        changes = {name: x, "out": (dq, None, None)}
        message = f"dq of out: shares memory with {name}, which this call also uses"
        raises(ValueError, (message,), backward, backend, changes)
        if name != "mask":
            message = f"out: shares memory with {name}"
            out = flat[:144].reshape(OUT.shape)
            raises(ValueError, (message,), forward, backend, {name: x, "out": out})
    other = flat[500:504]
    for out, message in [
        ((None, None, None, flat[105:120].reshape(3, 5)), "dbias of out: shares memory with bias"),
        ((None, None, None, None, flat[12:16]), "dsinks of out: shares memory with sinks"),
        ((None, None, None, flat[490:505].reshape(3, 5), other), "dsinks of out: shares memory wi"),
        ((None, None, None, np.broadcast_to(flat[:5], (3, 5))), "dbias of out: expected a writab"),
        ((None, None, None, as_strided(flat, (3, 5), (0, 4))), "dbias of out: expected an array w"),
        ((None, None, None, None, as_strided(flat, (4,), (0,))), "dsinks of out: expected an arr"),
    ]:
        raises(ValueError, (message,), backward, backend, dict(bias=bias, sinks=sinks, out=out))
    cu = np.frombuffer(flat[:6], np.int64)
    packed_out = flat[:240].reshape(PACKED_OUT.shape)
    message = "out: shares memory with cu_seqlens_q"
    raises(ValueError, (message,), varlen, backend, {"cu_seqlens_q": cu, "out": packed_out})
    assert not launches
    # The number was taken out of the array, so that may be written to.
    accepted(backward, backend, launches, dropout_p=0.5, seed=seed, out=(dq, None, None))
    interleaved = np.zeros((3, 10), "f4")  # neighbours do not overlap
    out = (None, None, None, interleaved[:, 1::2])
    accepted(backward, backend, launches, bias=interleaved[:, ::2], out=out)


def test_options_of_other_kinds(tmp_path: Any, launches: list[str]) -> None:
    """Subclasses, files and unaligned arrays are arrays; masked arrays are not."""
    backend = Backend("cpu", np)
    np.zeros((3, 5), "f4").tofile(tmp_path / "bias")
    mapped = np.memmap(tmp_path / "bias", "f4", mode="r", shape=(3, 5))
    for bias in (mapped, packed((3, 5)), Dlpack(np.zeros((3, 5), "f4"))):
        assert accepted(backward, backend, launches, bias=bias).dbias.shape == (3, 5)
    records = np.zeros(3, np.dtype([("tag", "u1"), ("x", np.int64)]))
    records["x"] = CU_Q
    accepted(varlen, backend, launches, cu_seqlens_q=records["x"])
    launches.clear()
    for name in ("bias", "mask", "alibi_slopes", "sinks"):
        x = np.ma.zeros((3, 5), bool if name == "mask" else "f4")
        raises(TypeError, (f"{name}: a masked array",), forward, backend, {name: x})
    swapped = np.dtype("f4").newbyteorder()
    for name in ("bias", "alibi_slopes", "sinks"):
        x = np.zeros((3, 5), swapped)
        raises(TypeError, (f"{name}: expected dtype", "got >f4"), forward, backend, {name: x})
    assert not launches


def read(backend: Backend, **changes: Any) -> problem.Problem:
    plain = dict(**FORWARD, scale=None, causal=False, window=(-1, -1), layout="bshd")
    given = resolve(backend, {**plain, **changes})
    call = problem.read(**{name: given.pop(name) for name in plain})
    return read_options(*call, **given)[0]


def test_sizes_are_those_of_the_arrays(backend: Backend) -> None:
    want = read(backend)
    assert want[1:8] == (BATCH, HQ, HKV, SQ, SK, D, DV)
    turned = dict(q=A((2, 4, 3, 8)), k=A((2, 2, 5, 8)), v=A((2, 2, 5, 6)))
    assert read(backend, **turned, layout="bhsd") == want
    single = dict(q=A((3, 4, 8)), k=A((5, 2, 8)), v=A((5, 2, 6)))
    assert read(backend, **single) == want._replace(batch=1)
    turned = dict(q=A((4, 3, 8)), k=A((2, 5, 8)), v=A((2, 5, 6)))
    assert read(backend, **turned, layout="bhsd") == want._replace(batch=1)


@pytest.mark.parametrize(
    ("layout", "shape", "want"),
    [
        ("bshd", (2, 3, 4, 8), (2, 4, 3)),
        ("bhsd", (2, 4, 3, 8), (2, 4, 3)),
        ("bshd", (3, 4, 8), (4, 3)),
        ("bhsd", (4, 3, 8), (4, 3)),
    ],
)
def test_results_have_the_layout_of_the_inputs(
    backend: Backend, layout: str, shape: tuple[int, ...], want: tuple[int, ...]
) -> None:
    q = A(shape).on(backend)
    out, lse = cuflash.attention(q, q, q[..., :6], layout=layout, return_lse=True)
    assert out.shape == (*shape[:-1], 6) and lse.shape == want
    grads = cuflash.attention_backward(out, q, q, q[..., :6], out, lse, layout=layout)
    assert [x.shape for x in grads] == [shape, shape, out.shape]


@pytest.mark.parametrize("dtype", dtypes.DTYPES)
def test_dtypes_of_results(backend: Backend, dtype: str) -> None:
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    q = A((3, 4, 8), dtype).on(backend)
    out, lse = cuflash.attention(q, q, q, return_lse=True)
    assert out.dtype == dtype and lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    for x in cuflash.attention_backward(out, q, q, q, out, lse):
        assert x.dtype == dtype


def test_sizes_up_to_the_limits(backend: Backend) -> None:
    long = read(
        backend, q=A((1, 2**30 - 1, 1, 512)), k=A((1, 2**30 - 1, 1, 512)), v=A((1, 2**30 - 1, 1, 1))
    )
    assert long.seqlen_q == long.seqlen_kv == 2**30 - 1 and long.head_dim == 512
    many = read(backend, q=A((2**35, 1, 2, 1)), k=A((2**35, 1, 2, 1)), v=A((2**35, 1, 2, 512)))
    assert many.batch == 2**35 and many.head_dim_v == 512


@pytest.mark.parametrize("empty", range(3))
def test_zero_sizes_are_sizes(backend: Backend, empty: int) -> None:
    size = [2, 3, 4]
    size[empty] = 0
    q = A((*size, 8))
    assert read(backend, q=q, k=q, v=q).head_dim == 8
    none = A((2, 3, 0, 8))
    assert read(backend, q=none).heads_q == 0  # no query heads over some key heads


@pytest.mark.parametrize(
    ("window", "want"),
    [
        ((-1, -1), (problem.OPEN, problem.OPEN)),
        ((0, 0), (0, 0)),
        ((3, 4), (3, 4)),
        ([3, -1], (3, problem.OPEN)),
        (np.array([3, 4]), (3, 4)),
        ((np.int8(3), np.uint64(4)), (3, 4)),
        ((2**31 - 2, 2**31 - 1), (2**31 - 2, problem.OPEN)),
        ((2**31, 10**30), (problem.OPEN, problem.OPEN)),
    ],
)
def test_windows(backend: Backend, window: Any, want: tuple[int, int]) -> None:
    left, right = want
    got = read(backend, window=window)
    assert (got.window_left, got.window_right) == want
    for causal in (True, np.True_):
        got = read(backend, window=window, causal=causal)
        assert (got.window_left, got.window_right) == (left, 0)
    got = read(backend, window=window, causal=np.False_)
    assert (got.window_left, got.window_right) == (left, right)


@pytest.mark.parametrize("kind", [
    *(float, np.float16, np.float32, np.float64, np.longdouble, ml_dtypes.bfloat16, Fraction),
    *(np.array, lambda x: np.array(x, ml_dtypes.bfloat16), lambda x: np.array(x, object)),
])  # fmt: skip
def test_scale_is_any_real_number(backend: Backend, kind: Any) -> None:
    for value in (0.5, -0.25, 0.0):
        got = read(backend, scale=kind(value)).scale
        assert type(got) is float and got == value


def test_scale_may_be_an_integer(backend: Backend) -> None:
    for kind in (int, np.int8, np.uint64):
        assert read(backend, scale=kind(3)).scale == 3.0
    assert read(backend).scale == 8**-0.5
    assert read(backend, scale=5e-324).scale == 5e-324


# --- where arrays lie ----------------------------------------------------------------------------


def overlap(x: Any, y: Any) -> bool:
    return arrays.overlap(arrays.view(x), arrays.view(y))


def test_overlap_is_exact(backend: Backend) -> None:
    x = backend.xp.zeros((4, 6, 8), "f4")
    assert overlap(x, x) and overlap(x, x[3:, 5:, 7:])
    assert overlap(x[::-1], x[:1]) and overlap(x.transpose(2, 0, 1), x[1])
    assert not overlap(x[:2], x[2:])
    assert not overlap(x[:, ::2], x[:, 1::2])
    assert not overlap(x[..., :3], x[..., 3:])
    assert not overlap(x[::-2, 1::2].transpose(2, 1, 0), x[::2])
    assert not overlap(x[:0], x) and not overlap(x, x.copy())
    assert overlap(x.view("u1")[..., 1:2], x)


def test_self_overlap(backend: Backend) -> None:
    x = backend.xp.zeros((4, 6, 8), "f4")
    wide = backend.xp.broadcast_to
    for apart in (x, x[::-1, ::2], x.T, x[:1], x[:, :0], wide(x[:, :0], (3, 4, 0, 8))):
        assert not arrays.self_overlap(arrays.view(apart))
    for together in (wide(x[:1], (2, 6, 8)), wide(x[..., :1], (4, 6, 2)).T):
        assert arrays.self_overlap(arrays.view(together))
