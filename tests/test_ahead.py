# SPDX-License-Identifier: Apache-2.0
"""precompile: that it compiles what calls need, no more, and no less."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash import ahead, cache, compile, device, environment, host, launch
from cuflash.options import read_options
from cuflash.packed import read_packed
from cuflash.plan import UnitPlan
from cuflash.problem import read, read_backward

ROOT = Path(__file__).parent.parent
SM90 = device.architecture(9, 0)
OPTIONS = ("softcap", "bias", "mask", "alibi_slopes", "sinks", "dropout_p", "packed")


def forget() -> None:
    launch.forget()
    compile._kernels.clear()
    compile._runtime.cache_clear()
    cache._readable.cache_clear()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache"
    forget()


def arrays(
    dtype: str, length: int, dim: int, dim_v: int, strides: str = "contiguous"
) -> list[np.ndarray]:
    """q, k, v and dout without a batch axis."""
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    rng, found = np.random.default_rng(0), []
    for size, keys in ((dim, False), (dim, True), (dim_v, True), (dim_v, False)):
        wide = {"contiguous": 0, "sliced": 8, "8 bytes": -size * kind.itemsize % 16 // 2 + 4}
        x = rng.standard_normal((length, 2, size + wide.get(strides, 0))).astype(kind)
        x = x[..., :size]
        if strides == "reversed":
            x = x[::-1, :, ::-1]
        if strides == "shared" and keys:
            x = np.broadcast_to(x[:, :1], x.shape)
        found.append(x)
    return found


def arguments(
    dtype: str, length: int, options: tuple[str, ...], narrow: bool = False
) -> dict[str, Any]:
    rng, accum = np.random.default_rng(1), "f8" if dtype == "float64" else "f4"
    every = {
        "softcap": 5.0,
        "bias": rng.standard_normal((length, length)).astype(dtype if narrow else accum),
        "mask": rng.random((length, length)) < 0.9,
        "alibi_slopes": np.full(2, 0.1, accum),
        "sinks": np.zeros(2, accum),
        "dropout_p": 0.1,
    }
    given = {name: x for name, x in every.items() if name in options}
    return given | ({"seed": 1} if "dropout_p" in options else {})


def call(dtype: str, length: int, dim: int, dim_v: int, options: tuple[str, ...]) -> None:
    """Run both passes, on the CPU."""
    q, k, v, dout = arrays(dtype, length, dim, dim_v)
    given, at = arguments(dtype, length, options), (np.array([0, length]),) * 2
    if "packed" in options:
        out, lse = cuflash.attention_varlen(q, k, v, *at, **given, return_lse=True)
        cuflash.attention_varlen_backward(dout, q, k, v, out, lse, *at, **given)
    else:
        _, vjp = cuflash.attention_vjp(q, k, v, **given)
        vjp(dout)


# --- on the CPU back end --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "dim", "dim_v", "options"),
    [
        ("float32", 16, 16, ()),
        ("float64", 8, 3, ("bias",)),
        ("bfloat16", 16, 32, ()),
        ("float16", 8, 8, ("sinks", "packed")),
    ],
)
def test_calls_find_all_that_they_need_and_nothing_else_is_made(
    folder: Path, dtype: str, dim: int, dim_v: int, options: tuple[str, ...]
) -> None:
    found = cuflash.precompile(dtype, dim, head_dim_v=dim_v, options=options, arch="cpu")
    files = set(folder.iterdir())
    assert {x.path for x in found} == files and not any(x.cached for x in found)
    assert all(x.arch == "cpu" and x.seconds > 0 for x in found)
    with mock.patch.object(host, "compile_library", side_effect=AssertionError("compiled")):
        again = cuflash.precompile(dtype, dim, head_dim_v=dim_v, options=options, arch="cpu")
        assert all(x.cached for x in again)
        assert [x[:3] for x in again] == [x[:3] for x in found]
        call(dtype, 20, dim, dim_v, options)
    shutil.rmtree(folder)
    forget()
    call(dtype, 20, dim, dim_v, options)
    assert set(folder.iterdir()) == files


def test_directions(folder: Path) -> None:
    names = {
        direction: [
            x.kernel for x in cuflash.precompile("float32", 8, direction=direction, arch="cpu")
        ]
        for direction in ("forward", "backward", "both")
    }
    assert names["forward"] == ["executor", "forward_simt"]
    assert names["backward"] == ["executor", "delta", "backward_dq_simt", "backward_dkdv_simt"]
    assert names["both"] == [*names["forward"], *names["backward"][1:]]


# --- on a Hopper GPU, which need not be there -----------------------------------------------------


def wanted(
    dtype: str, dim: int, dim_v: int, options: tuple[str, ...], **more: Any
) -> set[UnitPlan]:
    """The plans that precompile compiles for Hopper."""
    plans: set[UnitPlan] = set()

    def cubin(plan: UnitPlan, where: device.Device) -> Path:
        assert where == SM90
        plans.add(plan)
        return cache.wanted() / plan.kernel

    with mock.patch.object(compile, "cubin", cubin):
        ahead.precompile(dtype, dim, head_dim_v=dim_v, options=options, arch="sm_90", **more)
    return plans


def needed(
    dtype: str,
    length: int,
    dim: int,
    dim_v: int,
    options: tuple[str, ...],
    strides: str,
    narrow: bool = False,
    asked: list[tuple[str, ...]] | None = None,
) -> set[UnitPlan]:
    """The plans that calls have compiled for Hopper, as far as the launch.

    Each time they ask for kernels, `asked` gets the names.
    """
    plans: set[UnitPlan] = set()

    def kernels(
        some: tuple[UnitPlan, ...], where: device.Device, index: int | None
    ) -> tuple[UnitPlan, ...]:
        plans.update(some)
        if asked is not None:
            asked.append(tuple(plan.kernel for plan in some))
        return some

    q, k, v, dout = arrays(dtype, length, dim, dim_v, strides)
    given, names = (
        arguments(dtype, length, options, narrow),
        ("softcap", "bias", "mask", "alibi_slopes", "sinks"),
    )
    defaults = {"softcap": 0.0, "dropout_p": 0.0}
    values = [given.get(n, defaults.get(n)) for n in (*names, "dropout_p", "seed")]
    plain = None, True, (-1, -1), "bshd"
    if "packed" in options:
        at = (np.array([0, length]),) * 2
        problem, inputs = read_packed(q, k, v, *at, None, None, *plain, *values)
    else:
        problem, inputs = read_options(*read(q, k, v, *plain), *values)
    out, lse = np.zeros(dout.shape, dout.dtype), np.zeros((2, length), problem.dtype.accum)
    both = read_backward(problem, inputs, dout, out, lse, None)
    gradients = {"dq": both.q, "dk": both.k, "dv": both.v, "dbias": both.bias, "dsinks": both.sinks}
    gradients = {name: x for name, x in gradients.items() if x is not None}
    with (
        mock.patch.object(compile, "kernels", kernels),
        mock.patch.object(launch, "facts", lambda index: SM90),
    ):
        for direction, i, results in (
            ("forward", inputs, {"out": both.out, "lse": both.lse}),
            ("backward", both, gradients),
        ):
            operands = launch._operands(i, results, launch._options(problem, i))
            launch.forget()
            launch._recipe_of(direction, problem, i, results, operands)
    return plans


CALLS = [
    (dtype, dim, dim_v, options)
    for dtype in ("bfloat16", "float32")
    for dim, dim_v in ((64, 64), (128, 64), (41, 41), (44, 64), (256, 256), (300, 300))
    for options in ((), ("softcap",), ("bias",), ("sinks", "packed"), OPTIONS)
]


@pytest.mark.parametrize("case", CALLS, ids=str)
def test_what_calls_need_on_hopper_is_compiled(folder: Path, case: tuple[Any, ...]) -> None:
    dtype, dim, _, options = case
    some, most = wanted(*case), wanted(*case, any_strides=True)
    usual = ("contiguous", "sliced") if dim % 8 == 0 else ("contiguous",)
    every = ("contiguous", "sliced", "8 bytes", "reversed", "shared")
    if dtype == "float32":
        usual, every = every, every
    pairs = "bias" in options
    lengths, kinds = (
        ((32, 240, 256, 304), (False, True)) if pairs else ((20, 255, 256, 300), (False,))
    )
    calls = {
        strides: set().union(
            *(needed(*case[:1], n, *case[1:], strides, kind) for n in lengths for kind in kinds)
        )
        for strides in every
    }
    assert set().union(*(calls[strides] for strides in usual)) == some
    assert set().union(*calls.values()) <= most
    if pairs:  # rows of other lengths are not aligned
        odd = (
            needed(*case[:1], n, *case[1:], "contiguous", kind) for n in (36, 41) for kind in kinds
        )
        assert set().union(*odd) <= most
    assert some <= most and (dtype != "float32" or some == most)


def test_hopper_has_kernels_of_its_own(folder: Path) -> None:
    kernels = {plan.kernel for plan in wanted("bfloat16", 64, 64, ())}
    assert "forward_sm90" in kernels and "backward_sm90" in kernels and "realign" not in kernels
    assert "realign" in {plan.kernel for plan in wanted("bfloat16", 41, 41, ())}


def test_cubins_are_made_without_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arch = ("sm_75", "sm_90")
    found = cuflash.precompile("float16", 16, direction="forward", arch=arch)
    assert [(x.kernel, x.arch) for x in found] == [
        *(("forward_simt", "sm_75"), ("forward_sm90", "sm_90"))
    ]
    assert all(x.path.read_bytes()[:4] == b"\x7fELF" and not x.cached for x in found)
    monkeypatch.setattr(compile, "compile_cubin", None)
    again = cuflash.precompile(np.float16, 16, direction="forward", arch=iter(arch))
    assert all(x.cached for x in again) and [x.path for x in again] == [x.path for x in found]


def test_kernels_are_compiled_at_the_same_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In threads, of which none is the first to load NVRTC: CuPy lets others in before it is."""
    monkeypatch.setattr(cache, "_processors", lambda: 4)
    barrier, loaders = threading.Barrier(4), []
    version = compile.nvrtc_version()

    def nvrtc_version() -> tuple[int, int]:
        loaders.append(threading.current_thread())
        return version

    def compile_cubin(*_: Any) -> tuple[bytes, str]:
        barrier.wait(timeout=60)
        return b"code", ""

    monkeypatch.setattr(compile, "nvrtc_version", nvrtc_version)
    monkeypatch.setattr(compile, "compile_cubin", compile_cubin)
    found = cuflash.precompile("float32", 8, arch="sm_90")
    kernels = ["forward_simt", "delta", "backward_dq_simt", "backward_dkdv_simt"]
    assert [x.kernel for x in found] == kernels and not any(x.cached for x in found)
    assert loaders[0] is threading.current_thread()


def test_calls_ask_for_their_kernels_together(folder: Path) -> None:
    asked: list[tuple[str, ...]] = []
    needed("bfloat16", 256, 41, 41, (), "contiguous", asked=asked)
    forward, backward = (set(x) for x in asked if len(x) > 1)
    assert forward == {"forward_sm90", "realign"}
    assert backward == {"backward_rows_sm90", "backward_sm90", "backward_dq_mma", "realign"}


def test_the_current_gpu_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "current_gpu", lambda: 3)
    monkeypatch.setattr(
        device, "gpu", lambda index: device.architecture(8, 0) if index == 3 else None
    )
    (found,) = cuflash.precompile("float32", 8, direction="forward")
    assert found.arch == "sm_80"


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (dict(dtype="int8"), TypeError, r"^dtype: expected one of float16, .*, got 'int8'"),
        (dict(dtype=3.5), TypeError, r"^dtype: .* got 3\.5"),
        (dict(head_dim=0), ValueError, r"^head_dim: expected 1 to 512, got 0"),
        (dict(head_dim=64.0), TypeError, r"^head_dim: expected an int, got float"),
        (dict(head_dim_v=513), ValueError, r"^head_dim_v: expected 1 to 512, got 513"),
        (dict(options="causal"), ValueError, r"^options: causal changes no kernel; leave it out"),
        (dict(options=("bias", "x")), ValueError, r"^options: expected some of softcap, .* 'x'"),
        (dict(options=1), TypeError, r"^options: expected names out of softcap, .* got int"),
        (dict(direction="back"), ValueError, r"^direction: expected 'forward', .* 'back'"),
        (dict(any_strides=1), TypeError, r"^any_strides: expected True or False, got 1"),
        (dict(arch="sm_70"), ValueError, r"^arch: expected some of sm_75, .*, cpu, got 'sm_70'"),
        (dict(arch=90), TypeError, r"^arch: expected a name such as 'sm_90', .* got int"),
    ],
    ids=str,
)
def test_errors_name_the_argument(given: dict[str, Any], kind: type, message: str) -> None:
    arguments = {"dtype": "float32", "head_dim": 64, "arch": "cpu"} | given
    with pytest.raises(kind, match=message):
        cuflash.precompile(**arguments)


def test_a_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "file"))
    forget()
    message = r"file cannot be used as the cache.* CUFLASH_CACHE_DIR"
    compiled = []
    cubin = compile.cubin
    monkeypatch.setattr(compile, "cubin", lambda *args: compiled.append(args) or cubin(*args))
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match=message):
        cuflash.precompile("float32", 8, arch="sm_75")
    assert len(compiled) == 1  # of several
    forget()


def test_a_full_cache_that_cannot_be_written_to(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cuflash.precompile("float32", 8, arch="sm_75")
    monkeypatch.setattr(cache, "_can_write", lambda place: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = cuflash.precompile("float32", 8, arch="sm_75")
    assert [kernel.path for kernel in again] == [kernel.path for kernel in first]
    assert all(kernel.cached for kernel in again)


def test_every_option_of_kernels_has_a_name() -> None:
    assert set(ahead.OPTIONS) == set(OPTIONS)
    both = itertools.chain(ahead.OPTIONS, ahead._FREE)
    signature = cuflash.attention_backward.__kwdefaults__ or {}
    assert {"packed", "return_lse", *signature} - {"workspace", "deterministic"} == set(both)


def test_the_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls, as far as the compiler, and the shell's line with a size that is quick."""
    page = (ROOT / "docs" / "howto" / "precompiling.md").read_text(encoding="utf-8")
    plans: list[UnitPlan] = []

    def cubin(plan: UnitPlan, where: device.Device) -> Path:
        plans.append(plan)
        return cache.wanted() / plan.kernel

    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 2
    with monkeypatch.context() as patch:
        patch.setattr(compile, "cubin", cubin)
        for code in blocks:
            exec(code, {"cuflash": cuflash})
    assert {"forward_sm90", "backward_sm90"} <= {plan.kernel for plan in plans}
    (line,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    line = line.replace("64 128 256", "16 32").replace("'bfloat16'", "'float32'")
    line = line.replace("python -c", f"'{sys.executable}' -c")
    done = subprocess.run(
        ["sh", "-c", line],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = {path.name.rsplit("-", 2)[0] for path in folder.iterdir()}
    assert {"forward_simt", "delta", "backward_dq_simt", "backward_dkdv_simt"} == names
    assert len(list(folder.iterdir())) == 7  # delta is the same for both sizes


def test_without_a_gpu_its_architecture_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def current() -> device.Device:
        raise RuntimeError("there is no GPU")

    monkeypatch.setattr(device, "current", current)
    with pytest.raises(RuntimeError, match=r"^there is no GPU; .* arch='sm_90'$"):
        cuflash.precompile("float32", 8)
