# SPDX-License-Identifier: Apache-2.0
"""Ring 1: what a call's arguments mean, and each error: its type and what the message says.

The tables hold what differs from a call that is right, the error, and parts of its message: the
argument's name, what was expected, what came. Nothing is launched in this file, and a call that
raises an error has launched nothing.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from conftest import Backend

import cuflash
from cuflash import arrays, dtypes, launch, problem


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


def test_the_calls_that_the_tables_change_are_right(backend: Backend, launches: list[str]) -> None:
    forward(backend, {})
    forward(backend, {"out": (OUT, LSE), "return_lse": True})
    backward(backend, {})
    backward(backend, {"dlse": LSE, "workspace": A((WORKSPACE,), "uint8")})
    backward(backend, {"out": tuple(FORWARD.values())})
    assert launches == ["forward"] * 2 + ["backward"] * 3


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


def read(backend: Backend, **changes: Any) -> problem.Problem:
    options = dict(scale=None, causal=False, window=(-1, -1), layout="bshd")
    return problem.read(**resolve(backend, {**FORWARD, **options, **changes}))[0]


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
        assert read(backend, window=window, causal=causal)[-2:] == (left, 0)
    assert read(backend, window=window, causal=np.False_)[-2:] == (left, right)


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
