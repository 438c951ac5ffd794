# SPDX-License-Identifier: Apache-2.0
"""The order of the modules, and that Python and C++ agree on struct Params."""

from __future__ import annotations

import ast
import ctypes
import re
from pathlib import Path

import numpy as np
import pytest

from cuflash import arrays, dtypes, host, params, plan, problem, source

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "cuflash"

#: Imports only point down this list. Leaves import each other where it is said.
ORDER = ["__init__", "api", "launch", "params", "compile", "select", "arch", "plan", "problem"]
LEAVES = {"gradients", "reference", "arrays", "dtypes", "device", "source", "cache", "host"}
AMONG_LEAVES = {("reference", "gradients")}


def imports(path: Path) -> set[str]:
    """The modules of the package that one of its modules imports, at any place in it."""
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
        found |= {name.split(".")[1] for name in names if name.startswith("cuflash.")}
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
    if me == "arch":
        allowed.add("arch")
    assert imports(path) <= allowed


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


def test_params_are_packed_where_kernels_read_them(tmp_path: Path) -> None:
    """The compiler says where each field lies; there must be the value that belongs to it."""
    names = params.Operands._fields
    tensors, rows = names[:8], names[8:]
    scalars = problem.Problem._fields[1:]
    tensor_fields = ["data", "stride_batch", "stride_seq", "stride_head", "stride_dim", "vectors"]
    row_fields = ["data", "stride_batch", "stride_head", "stride_seq"]
    paths = [f"{name}.{field}" for name in tensors for field in tensor_fields]
    paths += [f"{name}.{field}" for name in rows for field in row_fields]
    paths += scalars

    text = '#include "host/cuda.h"\n#include "parts/types.cuh"\n'
    text += f"namespace plan {{ constexpr int kParamsBytes = {plan.PARAMS_BYTES}; }}\n"
    text += '#include "attention/params.cuh"\n'
    for name, code in [
        ("offset", "offsetof(Params, {})"),
        ("bytes", "sizeof(static_cast<Params*>(nullptr)->{})"),
    ]:
        values = ", ".join(code.format(path) for path in paths)
        text += f'extern "C" __attribute__((visibility("default"))) const size_t {name}[]'
        text += f" = {{{values}}};\n"
    library = tmp_path / "params.so"
    includes = [source.KERNEL_ROOT / folder for folder in source.HOST_INCLUDES]
    host.compile_library(host.find_compiler(), text, includes, library, kernel=True)
    table = ctypes.c_size_t * len(paths)
    offsets, sizes = (table.in_dll(ctypes.CDLL(str(library)), n) for n in ("offset", "bytes"))

    call = problem.Problem(dtypes.DTYPES["float32"], 3, 14, 7, 5, 6, 8, 12, 0.375, 9, 10)
    layout = problem.Layout(0, 1, 2, 3)
    # Every array has strides of its own; every second one can be moved in vectors.
    given: dict[str, arrays.View] = {}
    for i, name in enumerate(names[:-1]):
        last = 8 if i % 2 else 7
        space = np.zeros((3, 5 + i, 7 + i, last), np.float32)
        given[name] = arrays.view(space if name in tensors else space[..., 0])
    packed = bytearray(plan.PARAMS_BYTES)
    params.pack(packed, call, layout, params.Operands(**given, delta=4096))  # type: ignore[arg-type]

    want: dict[str, float] = dict(zip(scalars, call[1:], strict=True))
    want |= {"delta.data": 4096, "delta.stride_batch": 14 * 5}
    want |= {"delta.stride_head": 5, "delta.stride_seq": 1}
    for name, x in given.items():
        want[f"{name}.data"] = x.address
        order = ["batch", "seq", "head", "dim"] if name in tensors else ["batch", "head", "seq"]
        for axis, stride in zip(order, x.strides, strict=True):
            want[f"{name}.stride_{axis}"] = stride // 4
        if name in tensors:
            want[f"{name}.vectors"] = int(x.shape[-1] == 8)
    for path, offset, size in zip(paths, offsets, sizes, strict=True):
        kind = "f8" if path == "scale" else f"i{size}"
        assert np.frombuffer(packed, kind, 1, offset)[0] == want[path], path
    assert sum(sizes) == plan.PARAMS_BYTES  # no field is left out


def test_constants_agree() -> None:
    text = (source.KERNEL_ROOT / "attention" / "params.cuh").read_text(encoding="utf-8")
    value = re.search(r"kOpen = (0x[0-9a-f]+);", text)
    assert value and int(value[1], 16) == problem.OPEN
    for dtype in dtypes.DTYPES.values():
        expected = {"float": 4, "double": 8}.get(dtype.cxx, 2)
        assert dtype.itemsize == expected
