# SPDX-License-Identifier: Apache-2.0
"""Launch: Params, scratch memory and grids, on the current stream of the current GPU.

The caller (api.py) makes the arrays' GPU the current one.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from . import arrays, compile, device, host, realign, select
from .arrays import Form, View
from .layout import Layout
from .merge import Merge, Parts
from .params import (
    ADDRESSES,
    COPY_ADDRESSES,
    SEED,
    Operands,
    pack,
    pack_copies,
    pack_merge,
    tensor_map,
)
from .plan import MAPS_AT, TMA_PARAMS_BYTES, Box, KernelPlan, MergeStates, Plan, Realign
from .problem import FEATURES, Arrays, Problem, Traits
from .tensormap import MAP_BYTES

__all__ = ["backward", "forward", "host_seed", "merge", "selection", "workspace_bytes"]

_MAX_BLOCKS = 2**31 - 1
_MAX_STREAMS = 64  # whose counters are kept

#: Scratch that a captured graph will use again whenever it is replayed, kept for good.
_captured: list[Any] = []

_CPU_PATIENCE = 30.0  # seconds


def host_seed() -> int:
    """Return the seed of the CPU back end's schedule: $CUFLASH_HOST_SEED, 0 is first in first out.

    Results do not depend on it, unless a kernel lacks a barrier; tests vary it for that reason.
    """
    text = os.environ.get("CUFLASH_HOST_SEED") or "0"
    if not text.isascii() or not text.isdigit() or int(text) >= 2**64:
        raise ValueError(
            f"CUFLASH_HOST_SEED: expected an integer from 0 to 2**64 - 1, got {text!r}"
        )
    return int(text)


def forward(problem: Problem, inputs: Arrays, out: View, lse: View | None) -> None:
    """Fill `out`, and `lse` if it is not None."""
    _run(
        "forward", problem, inputs, {"out": out} if lse is None else {"out": out, "lse": lse}, None
    )


def backward(
    problem: Problem, inputs: Arrays, results: dict[str, View], workspace: View | None = None
) -> None:
    """Fill `results`: of dq, dk, dv, dbias and dsinks those that are wanted, dk and dv together.

    `workspace` is None, or an array of `workspace_bytes` bytes.
    """
    _run("backward", problem, inputs, results, workspace)


def workspace_bytes(problem: Problem, inputs: Arrays, results: dict[str, View]) -> int:
    """Return how much scratch memory a backward call takes."""
    operands = _operands(inputs, results, _options(problem, inputs))
    return _recipe_of("backward", problem, inputs, results, operands).scratch_bytes


def _runs(plan: KernelPlan, results: Container[str]) -> bool:
    return not plan.results or any(name in results for name in plan.results)


def selection(
    direction: Literal["forward", "backward"],
    problem: Problem,
    layout: Layout,
    results: Container[str],
    given: Mapping[str, Form],
    find: Callable[[Traits], Plan],
) -> tuple[Traits, dict[str, Form]]:
    """Return what the kernels of a call are selected by, and which copies of arrays they take.

    `given` has the forms of the call's arrays by name, and `find` returns the plan for traits.
    """

    def chosen(traits: Traits) -> Plan:
        return tuple(kernel for kernel in find(traits) if kernel.results and _runs(kernel, results))

    places = realign.places(direction, problem, layout, given, chosen)
    return realign.traits(direction, problem, layout, {**given, **places}), places


def _scratch(needs: Iterable[Mapping[str, int]]) -> tuple[dict[str, int], int]:
    """Return where each array of the workspace begins, and the bytes of them all."""
    offsets, size = {}, 0
    for need in needs:
        for name, nbytes in need.items():
            offsets[name] = size
            size += -(-nbytes // 16) * 16
    return offsets, size


class _Words(NamedTuple):
    """The bytes of a struct of parameters, and the words of it that are addresses."""

    params: bytes
    addresses: tuple[tuple[int, str], ...]  # the word, and which operand it points to
    scratch: tuple[tuple[int, int], ...]  # the word, and where in the workspace it points

    def write(self, room: _Params, operands: Mapping[str, View], start: int) -> None:
        """Write the struct of a call whose workspace begins at `start`."""
        words = room.words
        room.view[:] = self.params
        for word, name in self.addresses:
            words[word] = operands[name].address
        for word, offset in self.scratch:
            words[word] = start + offset


class _Map(NamedTuple):
    """A map of a tensor that a kernel of the call takes."""

    place: int  # in TmaParams
    word: int  # of Params, where the tensor's address is
    encode: Callable[[int], bytes]  # for an address; remembers the latest


class _Copies(NamedTuple):
    """A launch of `Realign`."""

    kernel: Any
    blocks: int
    words: _Words


class _Recipe(NamedTuple):
    """All that calls of one kind share: everything but addresses and the seed."""

    kernels: tuple[tuple[Any, int], ...]  # with their blocks, in order
    words: _Words
    scratch_bytes: int
    maps: tuple[_Map, ...]
    takes_tickets: bool
    before: _Copies | None  # of what kernels load
    after: _Copies | None  # of results


@functools.lru_cache(maxsize=1024)
def _recipe(
    direction: Literal["forward", "backward"],
    problem: Problem,
    layout: Layout,
    index: int | None,
    results: tuple[str, ...],
    names: tuple[str, ...],
    *forms: tuple[Any, ...],
) -> _Recipe:
    """Work out a kind of call; `names` and `forms` are those of its arrays."""
    given = {name: Form(*x) for name, x in zip(names, forms, strict=True)}
    find = functools.partial(_plan, direction, index=index)
    traits, places = selection(direction, problem, layout, results, given, find)
    if places and os.environ.get("CUFLASH_DEBUG"):
        print(f"cuflash: {direction}, on copies of {', '.join(places)}", file=sys.stderr)
    used = {**given, **places}
    steps = [step for step in _steps(direction, traits, index) if _runs(step[0], results)]
    sizes = {name: realign.nbytes(place) for name, place in places.items()}
    offsets, size = _scratch([*(plan.scratch(problem) for plan, _ in steps), sizes])
    room = bytearray(TMA_PARAMS_BYTES)
    pack(room, problem, layout, Operands(**{**offsets, **used}))  # type: ignore[arg-type]
    facts = _facts(index)
    blocks = [
        min(plan.parts(problem), facts.sms if plan.persistent else _MAX_BLOCKS) for plan, _ in steps
    ]
    # Kernels of a call share their maps.
    loads = {load: None for plan, _ in steps for load in enumerate(plan.boxes().items())}
    maps = [
        _Map(
            MAPS_AT + n * MAP_BYTES,
            ADDRESSES[name],
            _encoder(used[name], problem.dtype.name, layout, box, index is None),
        )
        for n, (name, box) in loads
    ]
    kind = problem.dtype.name, layout, index, given, places, offsets
    return _Recipe(
        tuple((kernel, n) for (_, kernel), n in zip(steps, blocks, strict=True) if n),
        _Words(
            bytes(room),
            tuple((ADDRESSES[name], name) for name in given if name not in places),
            tuple((ADDRESSES[name], offset) for name, offset in offsets.items()),
        ),
        size,
        tuple(maps),
        any(plan.persistent for plan, _ in steps),
        _copies([name for name in places if name not in results], False, *kind),
        _copies([name for name in places if name in results], True, *kind),
    )


def _copies(
    names: list[str],
    back: bool,
    dtype: str,
    layout: Layout,
    index: int | None,
    given: Mapping[str, Form],
    places: Mapping[str, Form],
    offsets: Mapping[str, int],
) -> _Copies | None:
    """Return the launch that copies arrays to their places in workspace, or back from there."""
    if not names:
        return None
    plan = Realign(dtype)
    room = bytearray(plan.params_bytes)
    pairs, addresses, scratch = [], [], []
    for name, (source, to) in zip(names, COPY_ADDRESSES, strict=False):
        array, place = (to, source) if back else (source, to)
        pairs.append((places[name], given[name]) if back else (given[name], places[name]))
        addresses.append((array, name))
        scratch.append((place, offsets[name]))
    parts = pack_copies(room, plan, pairs, layout)
    struct = _Words(bytes(room), tuple(addresses), tuple(scratch))
    return _Copies(compile.kernel(plan, _facts(index), index), min(parts, _MAX_BLOCKS), struct)


def _encoder(
    form: Form, dtype: str, layout: Layout, box: Box, on_cpu: bool
) -> Callable[[int], bytes]:
    """Return what makes the map of an array of this form from its address."""
    if on_cpu:
        return lambda at: tensor_map(form._replace(address=at), dtype, layout, box).encode_cpu()
    encode = tensor_map(form._replace(address=16), dtype, layout, box).gpu_encoder()
    return functools.lru_cache(maxsize=256)(encode)


class _Tickets(threading.local):
    """Counters that kernels leave at 0, one for each stream: launches on a stream never overlap."""

    def __init__(self) -> None:
        self._of: dict[tuple[int, int], Any] = {}

    def of(self, index: int, stream: Any) -> int:
        """Return the address of the counter of a stream of the current GPU."""
        if stream.is_capturing():  # a graph may run beside anything
            counter = sys.modules["cupy"].zeros(1, np.uint64)
            _captured.append(counter)
            return counter.data.ptr
        key = index, stream.ptr
        counter = self._of.get(key)
        if counter is None:
            if len(self._of) > _MAX_STREAMS:
                self._of.clear()
            counter = self._of[key] = sys.modules["cupy"].zeros(1, np.uint64)
        return counter.data.ptr


_tickets = _Tickets()


class _Params(threading.local):
    """Room for the bytes of Params, and what a launch takes: a list of the parameters' addresses.

    The driver copies the parameters when a kernel is launched, so one room a thread is enough.
    """

    def __init__(self, size: int) -> None:
        self.bytes = ctypes.create_string_buffer(size)
        self.view = memoryview(self.bytes).cast("B")
        self.words = self.view.cast("Q")
        self._list = (ctypes.c_void_p * 1)(ctypes.addressof(self.bytes))
        self.list = ctypes.addressof(self._list)

    def given(self, on_cpu: bool) -> Any:
        """Return what a launch takes."""
        return self.bytes.raw if on_cpu else self.list


_params, _merge_params = _Params(TMA_PARAMS_BYTES), _Params(MergeStates.params_bytes)
_copy_params = _Params(Realign.params_bytes)


def _stream() -> Any:
    return sys.modules["cupy"].cuda.get_current_stream()


def _options(problem: Problem, i: Arrays) -> dict[str, View]:
    """Return the arrays that options have, by their names in Params."""
    if not problem.features:
        return {}
    found = {
        "bias": i.bias,
        "mask": i.mask,
        "slopes": i.slopes,
        "sinks": i.sinks,
        "seed": i.seed,
        "cu_seqlens_q": i.cu_seqlens_q,
        "cu_seqlens_kv": i.cu_seqlens_kv,
    }
    return {name: x for name, x in found.items() if x is not None}


def _operands(
    i: Arrays, results: Mapping[str, View], options: Mapping[str, View]
) -> dict[str, View]:
    """Return the arrays of a call by their names in Params, without those in workspace."""
    found = {"q": i.q, "k": i.k, "v": i.v, **results, **options}
    if i.out is not None and i.lse is not None and i.dout is not None:
        found |= {"out": i.out, "lse": i.lse, "dout": i.dout}
        if i.dlse is not None:
            found["dlse"] = i.dlse
    return found


def _recipe_of(
    direction: Literal["forward", "backward"],
    problem: Problem,
    inputs: Arrays,
    results: Mapping[str, View],
    operands: Mapping[str, View],
) -> _Recipe:
    kind = problem._replace(seed=0) if problem.seed else problem
    return _recipe(
        direction,
        kind,
        inputs.layout,
        inputs.device,
        tuple(results),
        tuple(operands),
        *[x.form for x in operands.values()],
    )


def _run(
    direction: Literal["forward", "backward"],
    problem: Problem,
    inputs: Arrays,
    results: Mapping[str, View],
    workspace: View | None,
) -> None:
    i = inputs
    options = _options(problem, i)
    if i.device is not None and problem.is_packed:
        for name in ("cu_seqlens_q", "cu_seqlens_kv"):
            options[name] = _on_device(options[name])
    operands = _operands(i, results, options)
    recipe = _recipe_of(direction, problem, i, results, operands)
    stream = None if i.device is None else _stream()
    owner, start, size = workspace, 0, recipe.scratch_bytes
    if workspace is not None:
        start = workspace.address
    elif size:
        start, owner = arrays.scratch(i.q, size)
        if stream is not None and stream.is_capturing():
            _captured.append(owner)
    room = _params
    words = room.words
    recipe.words.write(room, operands, start)
    words[SEED] = problem.seed
    for place, word, encode in recipe.maps:
        room.view[place : place + MAP_BYTES] = encode(words[word])
    counter = None
    if recipe.takes_tickets:
        if stream is None or i.device is None:
            counter = np.zeros(1, np.uint64)
            words[ADDRESSES["tickets"]] = counter.ctypes.data
        else:
            words[ADDRESSES["tickets"]] = _tickets.of(i.device, stream)
    if stream is None:
        _warn_if_slow(direction, problem, inputs)
        buffers = [(name, *arrays.extent(x), name in results) for name, x in operands.items()]
        if workspace is not None:
            buffers.append(("workspace", *arrays.extent(workspace), True))
        elif size:
            buffers.append(("workspace", start, start + size, True))
        if counter is not None:
            at = counter.ctypes.data
            buffers.append(("tickets", at, at + counter.nbytes, True))
        rest: tuple[Any, ...] = buffers, host_seed()
    else:
        rest = (stream.ptr,)
    if recipe.before:
        _copy(recipe.before, operands, start, rest)
    given = room.given(stream is None)
    for kernel, blocks in recipe.kernels:
        kernel.launch(blocks, given, *rest)
    if recipe.after:
        _copy(recipe.after, operands, start, rest)
    del owner, operands, options  # not before here: their memory may be given away


def _copy(copies: _Copies, operands: Mapping[str, View], start: int, rest: tuple[Any, ...]) -> None:
    copies.words.write(_copy_params, operands, start)
    on_cpu = len(rest) > 1
    copies.kernel.launch(copies.blocks, _copy_params.given(on_cpu), *rest)


def forget() -> None:
    """Choose and compile anew from now on; for tests."""
    _recipe.cache_clear()
    _steps.cache_clear()


def merge(problem: Merge, parts: Parts, out: View, lse: View) -> None:
    """Fill `out` and `lse` with what the parts are together."""
    plan, kernel = _merge_kernel(problem.dtype.name, parts.device)
    firsts = range(0, len(parts.outs), plan.max_parts)
    states, sums, size, owner = 0, 0, 0, None
    if len(firsts) > 1:
        states_bytes, sums_bytes = plan.scratch_bytes(problem)
        size = states_bytes + sums_bytes
        states, owner = arrays.scratch(out, size)
        sums = states + states_bytes
        if parts.device is not None and _stream().is_capturing():
            _captured.append(owner)
    buffers = []
    if parts.device is None:
        for name, views in (("outs", parts.outs), ("lses", parts.lses)):
            buffers += [(f"{name}[{n}]", *arrays.extent(x), False) for n, x in enumerate(views)]
        buffers += [(name, *arrays.extent(x), True) for name, x in (("out", out), ("lse", lse))]
        if size:
            buffers.append(("workspace", states, states + size, True))
    room = _merge_params
    for scan in (True, False) if size else (False,):
        blocks = min(plan.parts(problem, scan), _MAX_BLOCKS)
        for first in firsts if blocks else ():
            to, scratch = (out, lse), (states, sums)
            pack_merge(room.bytes, plan, problem, parts, to, scratch, first, scan)
            if parts.device is None:
                kernel.launch(blocks, room.bytes.raw, buffers, host_seed())
            else:
                kernel.launch(blocks, room.list, _stream().ptr)
    del owner  # not before here: its memory may be given away


@functools.cache
def _merge_kernel(dtype: str, index: int | None) -> tuple[MergeStates, Any]:
    """Return the plan of a merge with its kernel, ready to launch on one device."""
    plan = MergeStates(dtype)
    return plan, compile.kernel(plan, _facts(index), index)


def _facts(index: int | None) -> device.Device:
    return device.CPU if index is None else device.gpu(index)


def _on_device(x: View) -> View:
    if x.device is not None:
        return x
    copy, kept = arrays.upload(x)
    if kept is not None:
        _captured.append(kept)
    return copy


def _plan(direction: Literal["forward", "backward"], traits: Traits, index: int | None) -> Plan:
    return select.choose(direction, traits, _facts(index))


@functools.cache
def _steps(
    direction: Literal["forward", "backward"], traits: Traits, index: int | None
) -> tuple[tuple[KernelPlan, Any], ...]:
    """Return the plans of a call with their kernels, ready to launch on one device."""
    facts = _facts(index)
    plan = _plan(direction, traits, index)
    if os.environ.get("CUFLASH_DEBUG"):
        print(_describe(direction, traits, facts, plan), file=sys.stderr)
    return tuple((kernel, compile.kernel(kernel, facts, index)) for kernel in plan)


def _describe(direction: str, traits: Traits, facts: device.Device, plan: Plan) -> str:
    """Return what CUFLASH_DEBUG prints of a plan: a line, and one for each kernel."""
    t = traits
    options = " ".join(t.features) or "none"
    lines = [
        f"cuflash: {direction} on {facts.name}: {t.dtype}, head sizes {t.head_dim} and "
        f"{t.head_dim_v}, options {options}, rows moved by {t.aligned or t.dtype.itemsize} bytes"
        f"{' or TMA' if t.boxes else ''}"
    ]
    for kernel in plan:
        fields = dataclasses.asdict(kernel)
        flags = " ".join(name for name in FEATURES if fields.get(name))
        sizes = ", ".join(f"{x} {y}" for x, y in fields.items() if type(y) is int)
        lines.append(
            f"cuflash:   {kernel.kernel} ({kernel.family}): {kernel.threads} threads, "
            f"{kernel.smem_bytes} bytes of shared memory; {sizes and sizes + '; '}"
            f"code for {flags or 'no options'}"
            f"{'' if fields.get('ordered', True) else '; dq is added up in any order'}"
        )
    return "\n".join(lines)


_warned = False


def _warn_if_slow(direction: str, problem: Problem, inputs: Arrays) -> None:
    """Say once how long a large call takes on the CPU back end."""
    global _warned
    if _warned:
        return
    p = problem
    products = 7 if direction == "backward" else 2
    keys = min(p.seqlen_kv, p.window_left + p.window_right + 1)  # that a query sees, at most
    pairs = p.rows * keys
    if inputs.cu_seqlens_q is not None and inputs.cu_seqlens_kv is not None:
        lengths = (np.diff(x.array) for x in (inputs.cu_seqlens_q, inputs.cu_seqlens_kv))
        seen = sum(int(a) * min(int(b), keys) for a, b in zip(*lengths, strict=True))
        pairs = min(pairs, p.heads_q * seen)
    rate = 2e9 if "clang" in host.find_compiler().version else 4e8  # multiply-adds in a second
    seconds = pairs * products * max(p.head_dim, p.head_dim_v) / rate
    if seconds > _CPU_PATIENCE:
        _warned = True
        until = time.strftime("%H:%M", time.localtime(time.time() + seconds))
        warnings.warn(
            f"cuflash: this {direction} on NumPy arrays will take about {seconds:.0f} seconds "
            f"(until {until}): the CPU back end verifies kernels and is not fast. "
            "Use CuPy arrays for speed",
            RuntimeWarning,
            stacklevel=6,  # where the public function was called
        )
