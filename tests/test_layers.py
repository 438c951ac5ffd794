# SPDX-License-Identifier: Apache-2.0
"""The order of the modules, and that Python and C++ agree on struct Params."""

from __future__ import annotations

import ast
import ctypes
import re
from pathlib import Path

import numpy as np
import pytest

from cuflash import arrays, dtypes, host, layout, params, plan, problem, source

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "cuflash"

#: Imports only point down this list. Leaves import each other where it is said.
ORDER = [
    "__main__",
    "firstaid",
    "testing",
    "__init__",
    "api",
    "ahead",
    "calls",
    "launch",
    "launch_merge",
    "context",
    "describe",
    "slow",
    "realign",
    "params",
    "compile",
    "select",
    "arch",
    "plan",
]
ORDER += ["merge", "packed", "options", "problem", "destinations", "layout", "checks"]
LEAVES = {"gradients", "reference", "dropout", "arrays", "dtypes", "device", "source", "cache"}
LEAVES |= {"host", "reference_arguments", "tensormap", "environment", "disk", "notice"}
AMONG_LEAVES = {("reference", leaf) for leaf in ("gradients", "dropout", "reference_arguments")}
AMONG_LEAVES |= {(leaf, "environment") for leaf in ("arrays", "device")}
AMONG_LEAVES |= {("cache", "disk"), ("cache", "notice"), ("host", "disk")}

#: The same within the package plan.
ORDER_OF_PLANS = ["__init__", "simt", "sm90", "mma", "small", "base"]


def imports(path: Path, within: str = "cuflash") -> set[str]:
    """The modules of a package that a module of it imports, at any place in the module."""
    package = path.relative_to(ROOT).parent.parts
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{start}.{alias.name}" for alias in node.names]
        else:
            continue
        start = f"{within}."
        found |= {name[len(start) :].split(".")[0] for name in names if name.startswith(start)}
    return found


def module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


MODULES = sorted(PACKAGE.rglob("*.py"))


def test_every_module_has_its_place() -> None:
    assert {module_of(path) for path in MODULES} == {*ORDER, *LEAVES}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    me = module_of(path)
    if me in LEAVES:
        allowed = {other for leaf, other in AMONG_LEAVES if leaf == me}
    else:
        allowed = {*ORDER[ORDER.index(me) + 1 :], *LEAVES}
    if me in ("arch", "plan", "testing"):  # packages
        allowed.add(me)
    assert imports(path) <= allowed


def test_imports_within_plan_point_down() -> None:
    paths = {path.stem: path for path in (PACKAGE / "plan").glob("*.py")}
    assert paths.keys() == {*ORDER_OF_PLANS}
    for i, name in enumerate(ORDER_OF_PLANS):
        assert imports(paths[name], "cuflash.plan") <= {*ORDER_OF_PLANS[i + 1 :]}, name


def sources(*folders: str) -> list[Path]:
    suffixes = {".py", ".cu", ".cuh", ".cpp", ".h"}
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return sorted(path for path in paths if path.suffix in suffixes)


def test_sources_name_their_licence() -> None:
    licence = re.compile(r"(#|//) SPDX-License-Identifier: Apache-2\.0\n")
    for path in sources("cuflash", "kernels", "tests", "bench", "examples"):
        assert licence.match(path.read_text(encoding="utf-8")), path


def test_instructions_are_written_in_hw_alone() -> None:
    for path in sources("kernels"):
        if re.search(r"\basm\b", path.read_text(encoding="utf-8")):
            assert path.relative_to(ROOT / "kernels").parts[0] in ("hw", "host"), path


def test_kernels_include_no_system_header() -> None:
    """So that NVRTC needs no header of the CUDA toolkit."""
    for path in sources("kernels"):
        if path.relative_to(ROOT / "kernels").parts[0] != "host":
            assert not re.search(r"#\s*include\s*<", path.read_text(encoding="utf-8")), path


# --- struct Params -------------------------------------------------------------------------------

#: The fields of each kind of array, as members and with what they are made of.
_TENSOR = ("data", "stride_batch", "stride_seq", "stride_head", "stride_dim", "aligned")
_ROWS = ("data", "stride_batch", "stride_head", "stride_seq")
_PAIRS = (
    *("data", "stride_batch", "stride_head", "stride_query", "stride_key"),
    *("batch", "heads", "queries", "keys", "wide"),
)
_HEADS = ("data", "stride_batch", "stride_head")
_OFFSETS = ("at", "stride", "wide")
_KINDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), _TENSOR),
    **dict.fromkeys(("lse", "dlse", "delta"), _ROWS),
    **dict.fromkeys(("bias", "dbias", "mask"), _PAIRS),
    **dict.fromkeys(("slopes", "sinks", "dsinks"), _HEADS),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), _OFFSETS),
}
_SCALARS = {
    **{"dbias_parts": 8192, "row_stats": 8208, "dq_sums": 8224, "dq_turns": 8240},
    **{"tickets": 8256},
    **{"seed_at": 0, "seed": 77},
    **{"scale": 0.375, "softcap": 2.5, "kept": 1 / (1 - 0.25), "batch": 3, "dropped": 2**30},
    **{"heads_q": 14, "heads_kv": 7, "seqlen_q": 5, "seqlen_kv": 6, "head_dim": 8},
    **{"head_dim_v": 12, "window_left": 9, "window_right": 10, "unused": 0},
}
_FLOATS = ("scale", "softcap", "kept")
_PLACES = ("row_stats", "dq_sums", "dq_turns", "tickets")


def _example() -> tuple[problem.Problem, params.Operands, dict[str, float]]:
    """A call in which no two numbers of Params are the same by chance, and what they shall be."""
    call = problem.Problem(
        dtypes.DTYPES["float32"], 3, 14, 7, 5, 6, 8, 12, 0.375, 9, 10,
        softcap=2.5, dropout_p=0.25, seed=77, bias_shape=(3, 1, 5, 6), features=("bias",),
    )  # fmt: skip
    want: dict[str, float] = dict(_SCALARS)
    want["dbias_splits"], want["dbias_strides"] = plan.dbias_split(call)
    given: dict[str, arrays.View] = {}
    for i, (name, fields) in enumerate(_KINDS.items()):
        if name == "delta":
            want |= {"delta.data": 4096, "delta.stride_batch": 14 * 5}
            want |= {"delta.stride_head": 5, "delta.stride_seq": 1}
            continue
        # Every array has strides of its own; every second one can be moved in vectors.
        space = np.zeros((3, 5 + i, 7 + i, 8 if i % 2 else 7), np.float32)
        if fields is _ROWS:
            space = space[..., 0]
        elif fields is _HEADS:
            space = space[..., 0, 0]
        elif fields is _OFFSETS:
            space = np.zeros(40 + i, np.int64 if i % 2 else np.int32)[:: i + 2]
        given[name] = x = arrays.view(space)
        strides = [stride // x.itemsize for stride in x.strides]
        numbers: list[float] = [x.address, *strides]
        if fields is _TENSOR:
            numbers += [16 if x.shape[-1] == 8 else 0]
        elif fields is _PAIRS:
            numbers += [*x.shape, 1]
        elif fields is _OFFSETS:
            numbers += [int(x.itemsize == 8)]
        want |= {f"{name}.{field}": n for field, n in zip(fields, numbers, strict=True)}
    places = {"delta": 4096} | {name: want[name] for name in ("dbias_parts", *_PLACES)}
    return call, params.Operands(**given, **places), want  # type: ignore[arg-type]


def test_params_are_packed_where_kernels_read_them(tmp_path: Path) -> None:
    """The compiler says where each field lies; there must be the value that belongs to it."""
    call, operands, want = _example()
    text = '#include "host/cuda.h"\n#include "parts/types.cuh"\n'
    text += f"namespace plan {{ constexpr int kCallBytes = {plan.PARAMS_BYTES}; }}\n"
    text += '#include "attention/params.cuh"\n'
    for name, code in [
        ("offset", "offsetof(Params, {})"),
        ("bytes", "sizeof(static_cast<Params*>(nullptr)->{})"),
    ]:
        values = ", ".join(code.format(path) for path in want)
        text += f'extern "C" __attribute__((visibility("default"))) const size_t {name}[]'
        text += f" = {{{values}}};\n"
    library = tmp_path / "params.so"
    includes = [source.KERNEL_ROOT / folder for folder in source.HOST_INCLUDES]
    host.compile_library(host.find_compiler(), text, includes, library, kernel=True)
    table = ctypes.c_size_t * len(want)
    offsets, sizes = (table.in_dll(ctypes.CDLL(str(library)), n) for n in ("offset", "bytes"))

    packed = bytearray(plan.PARAMS_BYTES)
    params.pack(packed, call, layout.Layout(0, 1, 2, 3), operands)
    for (path, number), offset, size in zip(want.items(), offsets, sizes, strict=True):
        kind = "f8" if path in _FLOATS else f"{'u' if path == 'dropped' else 'i'}{size}"
        assert np.frombuffer(packed, kind, 1, offset)[0] == number, path
    assert sum(sizes) == plan.PARAMS_BYTES  # no field is left out


def test_packed_calls_have_no_batch_stride() -> None:
    call, operands, _ = _example()
    call = call._replace(features=("packed",))
    packed = bytearray(plan.PARAMS_BYTES)
    params.pack(packed, call, layout.Layout(None, 0, 1, 2), operands)
    delta = packed.index((4096).to_bytes(8, "little"))
    assert np.frombuffer(packed, "i8", 3, delta + 8).tolist() == [0, 5, 1]


def test_constants_agree() -> None:
    text = (source.KERNEL_ROOT / "attention" / "params.cuh").read_text(encoding="utf-8")
    value = re.search(r"kOpen = (0x[0-9a-f]+);", text)
    assert value and int(value[1], 16) == problem.OPEN
    for dtype in dtypes.DTYPES.values():
        expected = {"float": 4, "double": 8}.get(dtype.cxx, 2)
        assert dtype.itemsize == expected
