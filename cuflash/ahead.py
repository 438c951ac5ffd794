# SPDX-License-Identifier: Apache-2.0
"""precompile: fill the disk cache with the kernels of calls that are to come.

A call compiles what it finds missing. Here the same steps (Problem, traits, plan, kernel) are taken
for arrays that only have a form, on a device that need not be there.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from . import cache, checks, compile, device, host, launch, realign, select
from .arrays import Form
from .device import Device
from .dtypes import DTYPES, DType, lookup
from .layout import Layout
from .plan import Realign, UnitPlan
from .problem import FEATURES, MAX_HEAD_DIM, OPEN, Problem, Traits

__all__ = ["OPTIONS", "Compiled", "precompile", "read_features"]

Direction = Literal["forward", "backward"]

#: Options that have code in kernels: what signatures call them, and what a Problem does.
OPTIONS = {{"alibi": "alibi_slopes", "dropout": "dropout_p"}.get(x, x): x for x in FEATURES}
_FREE = ("scale", "causal", "window", "seed", "layout", "return_lse", "dlse", "wrt", "out")

_LAYOUT = Layout(0, 1, 2, 3)
_ENTRY = 2  # batch entries, and heads: so many that their strides count

#: Whether rows of q, k, v and dout have gaps of so many bytes behind them, or between elements.
_STRIDES = ("contiguous", "8 bytes apart", "every other element", "shared heads")


class Compiled(NamedTuple):
    """A kernel in the disk cache.

    Attributes
    ----------
    kernel : str
        Its name, which is that of its file in ``kernels/attention``.
    arch : str
        What it is compiled for: "sm_90", say, or "cpu".
    path : pathlib.Path
        The file.
    seconds : float
        How long it took to compile, or to find.
    cached : bool
        Whether it was there already.
    """

    kernel: str
    arch: str
    path: Path
    seconds: float
    cached: bool


def precompile(
    dtype: Any,
    head_dim: int,
    *,
    head_dim_v: int | None = None,
    options: Iterable[str] = (),
    direction: Literal["forward", "backward", "both"] = "both",
    any_strides: bool = False,
    deterministic: bool = True,
    arch: str | Iterable[str] | None = None,
) -> list[Compiled]:
    """Compile the kernels of calls that are to come, so that the first of them need not.

    They go to the disk cache, also for a GPU that this machine does not have, so that the folder
    can be filled elsewhere, as part of a container image, say. It must belong to the user who makes
    the calls. What is there already is left as it is.

    Parameters
    ----------
    dtype : str or dtype
        Of q, k and v: "float16", "bfloat16", "float32" or "float64".
    head_dim : int
        Of q and k, 1 to 512.
    head_dim_v : int, optional
        Of v; `head_dim` by default.
    options : iterable of str
        The options that the calls use together, by the names of `attention`'s arguments: "softcap",
        "bias", "mask", "alibi_slopes", "sinks", "dropout_p", and "packed" for `attention_varlen`.
        The others (causal, window, scale, lengths, heads) change no kernel.
    direction : {"forward", "backward", "both"}
        Which pass.
    any_strides : bool
        Also compile what calls need whose rows cannot be moved by 16 bytes, or that share heads by
        a stride of 0, or whose bias or mask has rows that do not begin at multiples of 16 bytes (as
        those of lengths that are no multiple of 16). Without it arrays are taken to be contiguous,
        or slices along axes other than the last. Only float16 and bfloat16 have such kernels.
    deterministic : bool
        What the backward calls say. False compiles what they need then, and not what others need.
    arch : str or iterable of str, optional
        "sm_90" for GPUs of compute capability 9.0, and so on; "cpu" for the CPU back end; or
        several of them. By default that of the current GPU.

    Returns
    -------
    list of Compiled
        One entry a kernel: its name, where it is, how long that took, and whether it was there.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it.
    RuntimeError
        There is nothing to compile with, no GPU to ask for its architecture, or no folder to write
        to; the message says what to do.

    Notes
    -----
    A GPU finds what another machine has compiled if cuflash and NVRTC have the same versions on
    both; a CPU, if the C++ compiler has. The kernel of `merge_states`, which is small, is not
    compiled ahead.

    Examples
    --------
    >>> import cuflash
    >>> for kernel in cuflash.precompile("bfloat16", 128, options=("bias",), arch="sm_90"):
    ...     print(kernel.kernel, kernel.seconds, kernel.cached)
    """
    element = _read_dtype(dtype)
    dim = _read_size("head_dim", head_dim)
    dim_v = dim if head_dim_v is None else _read_size("head_dim_v", head_dim_v)
    features = read_features(options)
    if direction not in ("forward", "backward", "both"):
        raise ValueError(f"direction: expected 'forward', 'backward' or 'both', got {direction!r}")
    directions: tuple[Direction, ...] = (
        ("forward", "backward") if direction == "both" else (direction,)
    )
    ordered = checks.flag("deterministic", deterministic)
    strides = _STRIDES if checks.flag("any_strides", any_strides) else _STRIDES[:1]
    found: list[Compiled] = []
    for where in _read_arch(arch):
        plans = {
            plan: None
            for one in directions
            for problem, forms in _calls(one, element, dim, dim_v, features, strides, ordered)
            for plan in _plans(one, problem, forms, where)
        }
        found += _compile(list(plans), where)
    return found


def _compile(plans: list[UnitPlan], where: Device) -> list[Compiled]:
    def one(plan: UnitPlan | None) -> Compiled:
        name = "executor" if plan is None else plan.kernel
        start, before = time.perf_counter(), len(cache.made)
        if not where.is_cpu:
            assert plan is not None
            path = compile.cubin(plan, where)
        elif plan is None:
            path = compile.executor_library()
        else:
            path = compile.host_library(plan, compile.host_races())
        seconds = time.perf_counter() - start
        if path.parent != cache.wanted():
            raise RuntimeError(
                f"precompile: {cache.wanted()} cannot be used as the cache, so what is compiled "
                "would be lost; make it a folder that is yours alone and that can be written to, "
                "or name another one in CUFLASH_CACHE_DIR"
            )
        return Compiled(name, where.name, path, seconds, path not in cache.made[before:])

    if where.is_cpu:
        host.find_compiler()
    else:
        compile.nvrtc_version()  # loads it, which CuPy must not do in several threads
    units: list[UnitPlan | None] = [None, *plans] if where.is_cpu else [*plans]
    if cache.problem() is None:
        return cache.at_once(one, units)
    return [one(unit) for unit in units]  # all may be there already; ends at the first that is not


def _plans(
    direction: Direction, problem: Problem, forms: dict[str, Form], where: Device
) -> Iterator[UnitPlan]:
    """Yield the plans of the kernels that a call compiles."""

    def find(traits: Traits) -> Any:
        return select.choose(direction, traits, where)

    results = ("out",) if direction == "forward" else ("dq", "dk", "dv", "dbias", "dsinks")
    traits, places = launch.selection(direction, problem, _LAYOUT, results, forms, find)
    yield from find(traits)
    if places:
        yield Realign(problem.dtype.name)


def _calls(
    direction: Direction,
    dtype: DType,
    dim: int,
    dim_v: int,
    features: tuple[str, ...],
    strides: tuple[str, ...],
    deterministic: bool,
) -> Iterator[tuple[Problem, dict[str, Form]]]:
    """Yield calls that need different kernels, if any do: short and long ones, by strides."""
    for length in (realign.MIN_LENGTH - 1, realign.MIN_LENGTH):
        sizes = _ENTRY, _ENTRY, _ENTRY, length, length, dim, dim_v
        problem = Problem(
            dtype, *sizes, 1.0, OPEN, OPEN, features=features, deterministic=deterministic
        )
        if "packed" in features:
            problem = problem._replace(batch=1)
        for kind, pairs in itertools.product(strides, _pairs(dtype, features, len(strides) > 1)):
            forms = {
                "q": _form(dtype, length, dim, kind),
                "k": _form(dtype, length, dim, kind, shared=True),
                "v": _form(dtype, length, dim_v, kind, shared=True),
                "out": _form(dtype, length, dim_v, "contiguous"),
                **pairs,
            }
            if direction == "backward":
                forms["dout"] = _form(dtype, length, dim_v, kind)
            yield problem, forms


def _pairs(dtype: DType, features: tuple[str, ...], every: bool) -> list[dict[str, Form]]:
    """Return forms of bias and mask: of either dtype, and of `every` alignment of their rows."""
    sizes = {"bias": sorted({dtype.itemsize, dtype.accum.itemsize}), "mask": [1]}
    of = [[(name, size) for size in sizes[name]] for name in ("bias", "mask") if name in features]
    alignments = (16, 4, 0) if every else (16,)
    return [
        {
            name: _pair_form(size, at_once)
            for (name, size), at_once in zip(arrays, of_rows, strict=True)
        }
        for arrays in itertools.product(*of)
        for of_rows in itertools.product(alignments, repeat=len(of))
    ]


def _pair_form(size: int, at_once: int) -> Form:
    """Return the form of a bias or mask, of whose rows so many bytes are copied at once."""
    keys, step = 256, size if at_once else 2 * size
    return Form((1, 1, keys, keys), (0, 0, keys * step + at_once % 16, step), size, 0)


def _form(dtype: DType, length: int, dim: int, kind: str, shared: bool = False) -> Form:
    """Return the form of an array (batch, seq, heads, dim); `shared` are those of keys."""
    size = dtype.itemsize
    step = 2 * size if kind == "every other element" else size
    row = dim * step
    if kind == "8 bytes apart":
        row = -(-row // 16) * 16 + 8
    heads = 0 if shared and kind == "shared heads" else row
    strides = length * _ENTRY * row, _ENTRY * row, heads, step
    return Form((_ENTRY, length, _ENTRY, dim), strides, size, 0)


def _read_dtype(dtype: Any) -> DType:
    row = DTYPES.get(dtype) if isinstance(dtype, str) else None
    if row is None:
        try:
            row = lookup(np.dtype(dtype))
        except TypeError:  # not a dtype at all
            row = None
    if row is None:
        raise TypeError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    return row


def _read_size(name: str, value: Any) -> int:
    try:
        size = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}") from None
    if not 1 <= size <= MAX_HEAD_DIM:
        raise ValueError(f"{name}: expected 1 to {MAX_HEAD_DIM}, got {size}")
    return size


def read_features(options: Any) -> tuple[str, ...]:
    """Return the features that options, by their names in signatures, stand for."""
    try:
        names = (options,) if isinstance(options, str) else tuple(options)
    except TypeError:
        raise TypeError(
            f"options: expected names out of {', '.join(OPTIONS)}, got {type(options).__name__}"
        ) from None
    for name in names:
        if name in _FREE:
            raise ValueError(f"options: {name} changes no kernel; leave it out")
        if name not in OPTIONS:
            raise ValueError(f"options: expected some of {', '.join(OPTIONS)}, got {name!r}")
    return tuple(feature for name, feature in OPTIONS.items() if name in names)


def _read_arch(arch: Any) -> list[Device]:
    if arch is None:
        try:
            return [device.current()]
        except RuntimeError as error:
            raise RuntimeError(f"{error}; or name what is meant, as arch='sm_90'") from error
    try:
        names = (arch,) if isinstance(arch, str) else tuple(arch)
    except TypeError:
        raise TypeError(
            f"arch: expected a name such as 'sm_90', or several, got {type(arch).__name__}"
        ) from None
    return [_read_one_arch(name) for name in names]


def _read_one_arch(name: Any) -> Device:
    known = {where.name: where for where in (*device.architectures(), device.CPU)}
    if name not in known:
        raise ValueError(f"arch: expected some of {', '.join(known)}, got {name!r}")
    return known[name]
