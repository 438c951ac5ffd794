# SPDX-License-Identifier: Apache-2.0
"""What only a GPU has: streams, graphs, the memory pool, other libraries' device arrays."""

from __future__ import annotations

from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from check import Inputs, check_backward, check_forward
from conftest import Backend
from run import workspace_bytes

import cuflash

pytestmark = pytest.mark.gpu

SHAPES = dict(q=(2, 100, 4, 40), k=(2, 150, 2, 40), v=(2, 150, 2, 40), dout=(2, 100, 4, 40))
NAMES = tuple(SHAPES)
PACKED_SHAPES = dict(q=(100, 4, 40), k=(150, 2, 40), v=(150, 2, 40), dout=(100, 4, 40))


class Call:
    """A call whose inputs stay where they are while their values change."""

    shapes = SHAPES

    def __init__(self, backend: Backend, dtype: Any = np.float32, **options: Any) -> None:
        self.backend, self.dtype, self.options = backend, np.dtype(dtype), options
        self.arrays = {name: backend.xp.empty(s, dtype) for name, s in self.shapes.items()}
        self.fill(np.nan)

    def fill(self, value: float) -> None:
        self.set({name: np.full(s, value, self.dtype) for name, s in self.shapes.items()})

    def set(self, values: dict[str, np.ndarray]) -> None:
        """Change the values; they are there when this returns."""
        for name, x in values.items():
            self.arrays[name].data.copy_from_host(x.ctypes.data, x.nbytes)

    def random(self, seed: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        return {name: rng.normal(size=s).astype(self.dtype) for name, s in self.shapes.items()}

    def run(self, **workspace: Any) -> SimpleNamespace:
        q, k, v, dout = self.arrays.values()
        out, lse, vjp = cuflash.attention_vjp(q, k, v, causal=True, return_lse=True, **self.options)
        return SimpleNamespace(out=out, lse=lse, grads=vjp(dout, **workspace))

    @property
    def workspace_bytes(self) -> int:
        q, k, v, dout = self.arrays.values()
        *_, vjp = cuflash.attention_vjp(q, k, v, causal=True, return_lse=True, **self.options)
        size = workspace_bytes(partial(vjp, dout), self.backend.xp)
        batch, seq, heads, dim = SHAPES["q"]
        if self.dtype == np.float16:  # dq in float32 and two numbers a row, of whole tiles
            rows = batch * heads * -(-seq // 128) * 128
            assert size <= rows * (4 * -(-dim // 16) * 16 + 8) + 4096
        else:  # a number a row
            assert size - batch * seq * heads * (8 if self.dtype == np.float64 else 4) in range(16)
        return size


class PackedCall(Call):
    """The same with packed entries, whose offsets lie on the host or on the GPU."""

    shapes = PACKED_SHAPES

    def __init__(self, backend: Backend, offsets: Any, **options: Any) -> None:
        super().__init__(backend, **options)
        self.offsets = tuple(offsets)

    def run(self, **more: Any) -> SimpleNamespace:
        q, k, v, dout = self.arrays.values()
        options = dict(causal=True, **self.options)
        out, lse = cuflash.attention_varlen(q, k, v, *self.offsets, return_lse=True, **options)
        grads = cuflash.attention_varlen_backward(
            *(dout, q, k, v, out, lse, *self.offsets), **options, **more
        )
        return SimpleNamespace(out=out, lse=lse, grads=grads)


def check(got: SimpleNamespace, values: dict[str, np.ndarray], **options: Any) -> None:
    inputs = Inputs(**values, causal=True, **options)
    check_forward(got.out, got.lse, inputs)
    check_backward(got.grads, inputs)


def same(got: SimpleNamespace, want: SimpleNamespace) -> None:
    """Assert that two calls have equal results."""
    for x, y in zip((got.out, got.lse, *got.grads), (want.out, want.lse, *want.grads), strict=True):
        np.testing.assert_array_equal(x.get(), y.get(), strict=True)


def forget(got: SimpleNamespace) -> None:
    """Overwrite results, so that only what runs from here on can be seen in them."""
    for x in (got.out, got.lse, *got.grads):
        x.fill(np.nan)


class Spin:
    """A kernel that keeps a stream busy."""

    def __init__(self, backend: Backend) -> None:
        self.xp = backend.xp

    @cached_property
    def _kernel(self) -> Any:
        return self.xp.RawKernel(
            r"""extern "C" __global__ void spin(long long cycles) {
                const long long start = clock64();
                while (clock64() - start < cycles) {}
            }""",
            "spin",
        )

    def __call__(self, milliseconds: int) -> None:
        self._kernel((1,), (1,), (np.int64(milliseconds * 2_000_000),))  # at about 2 GHz


# --- streams -------------------------------------------------------------------------------------


def test_the_current_stream_is_used_and_nobody_waits(backend: Backend) -> None:
    call, spin = Call(backend), Spin(backend)
    values = call.random(0)
    source = {name: backend.array(x) for name, x in values.items()}
    stream = backend.xp.cuda.Stream(non_blocking=True)

    def go(milliseconds: int) -> tuple[SimpleNamespace, bool]:
        backend.xp.cuda.Device().synchronize()
        with stream:
            spin(milliseconds)
            for name, x in source.items():
                backend.xp.copyto(call.arrays[name], x)
            got = call.run()
            return got, stream.done

    go(0)  # compiles everything
    call.fill(np.nan)
    got, done = go(300)
    assert not done, "the call waited for the stream"
    stream.synchronize()
    check(got, values)


def test_the_null_stream_is_not_involved(backend: Backend) -> None:
    """A busy default stream does not hold a non-blocking stream up."""
    call, spin = Call(backend), Spin(backend)
    values = call.random(0)
    call.set(values)
    stream = backend.xp.cuda.Stream(non_blocking=True)
    with stream:
        call.run()
    spin(0)
    backend.xp.cuda.Device().synchronize()
    spin(300)
    with stream:
        got = call.run()
    stream.synchronize()
    assert not backend.xp.cuda.Stream.null.done, "the stream waited for the default stream"
    backend.xp.cuda.Device().synchronize()
    check(got, values)


# --- graphs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("own_workspace", [False, True], ids=["scratch", "workspace"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_a_captured_call_can_be_replayed(backend: Backend, dtype: Any, own_workspace: bool) -> None:
    xp = backend.xp
    call = Call(backend, dtype)
    call.set(call.random(0))
    options, scratch = {}, call.workspace_bytes
    if own_workspace:
        options["workspace"] = xp.full(scratch, 255, np.uint8)
    pool = xp.cuda.MemoryPool()
    stream = xp.cuda.Stream(non_blocking=True)
    xp.cuda.Device().synchronize()
    with xp.cuda.using_allocator(pool.malloc), stream:
        call.run(**options)  # compiles; what it took goes back to the pool
        stream.synchronize()
        stream.begin_capture()
        got = call.run(**options)
        graph = stream.end_capture()
        # Whatever the pool gives away now is not the graph's. Blocks of all sizes that it used.
        sizes = [x.nbytes for x in (got.out, got.lse, *got.grads)] + [scratch]
        others = [xp.full(size // 4, np.nan, np.float32) for size in sizes for _ in range(4)]
        stream.synchronize()
    for seed in (1, 2):
        values = call.random(seed)
        call.set(values)
        for x in (got.out, got.lse, *got.grads):
            x.fill(np.nan)
        xp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        check(got, values)
        for x in others:
            assert np.isnan(x.get()).all(), "the graph wrote to memory that is no longer its own"


def test_results_of_a_captured_call_can_be_given(backend: Backend) -> None:
    """With out= and workspace= a captured call takes no memory at all."""
    xp = backend.xp
    call = Call(backend)
    call.set(call.random(0))
    q, k, v, dout = call.arrays.values()
    to = SimpleNamespace(
        out=xp.empty_like(dout),
        lse=xp.empty((2, 4, 100), np.float32),
        grads=cuflash.Gradients(*map(xp.empty_like, (q, k, v))),
    )
    workspace = xp.empty(call.workspace_bytes, np.uint8)

    def run() -> None:
        cuflash.attention(q, k, v, causal=True, return_lse=True, out=(to.out, to.lse))
        cuflash.attention_backward(
            *(dout, q, k, v, to.out, to.lse),
            **dict(causal=True, out=tuple(to.grads), workspace=workspace),
        )

    pool = xp.cuda.MemoryPool()
    stream = xp.cuda.Stream(non_blocking=True)
    xp.cuda.Device().synchronize()
    with xp.cuda.using_allocator(pool.malloc), stream:
        run()
        stream.synchronize()
        stream.begin_capture()
        run()
        graph = stream.end_capture()
    assert pool.total_bytes() == 0
    for seed in (1, 2):
        values = call.random(seed)
        call.set(values)
        graph.launch(stream)
        stream.synchronize()
        check(to, values)


def captured(call: Call, stream: Any) -> tuple[Any, SimpleNamespace]:
    """Return a graph of a call, and the results that a replay writes."""
    call.run()  # compiles; what it took goes back to the pool
    stream.synchronize()
    stream.begin_capture()
    got = call.run()
    return stream.end_capture(), got


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_a_replay_drops_by_the_seed_that_is_there(backend: Backend, dtype: Any) -> None:
    xp = backend.xp
    seed = xp.zeros(1, dtype)
    call = Call(backend, dropout_p=0.4, seed=seed)
    values = call.random(0)
    call.set(values)
    stream = xp.cuda.Stream(non_blocking=True)
    xp.cuda.Device().synchronize()
    with stream:
        graph, got = captured(call, stream)
    outs, lses = [], []
    low = -(2**63) if dtype == np.int64 else 2**63
    for number in (1, 2, low, low + 2**63 - 1, 2**32 + 1, 1):
        seed[...] = np.array([number], dtype)[0]
        forget(got)
        xp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        check(got, values, dropout_p=0.4, seed=number)
        # The host's number and the device's array are the same seed.
        fresh = Call(backend, dropout_p=0.4, seed=number)
        fresh.arrays = call.arrays
        same(got, fresh.run())
        outs.append(got.out.get())
        lses.append(got.lse.get())
    for n, out in enumerate(outs[:-1]):
        np.testing.assert_array_equal(lses[n], lses[0])  # which does not depend on dropout
        for other in outs[:n]:
            assert (out != other).mean() > 0.9, "two seeds drop the same"
    np.testing.assert_array_equal(outs[-1], outs[0])


def test_a_seed_of_no_axes_and_one_in_a_larger_array(backend: Backend) -> None:
    numbers = backend.array(np.array([[3, 4], [5, 6]]))
    call = Call(backend, dropout_p=0.4)
    call.set(call.random(0))
    for seed, number in (
        (numbers[1, 0], 5),
        (numbers[:1, 1:], 4),
        (numbers[::-1, ::-1][:1, :1], 6),
    ):
        call.options["seed"] = number
        want = call.run()
        call.options["seed"] = seed
        same(call.run(), want)


# Of three entries each, of the 100 queries and 150 keys of PackedCall.
OFFSETS = [
    ([0, 40, 40, 97], [5, 65, 80, 150]),
    ([0, 1, 99, 100], [0, 0, 75, 149]),
    ([100, 100, 100, 100], [0, 50, 100, 150]),
    ([10, 20, 30, 90], [10, 20, 30, 150]),
    ([0, 1, 2, 3], [0, 40, 90, 150]),  # one new token for each, as in decoding
]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_replay_keeps_the_offsets_that_came_from_the_host(backend: Backend, dtype: Any) -> None:
    xp = backend.xp
    cu_q, cu_k = OFFSETS[0]
    want = dict(cu_seqlens_q=np.array(cu_q), cu_seqlens_k=np.array(cu_k))
    # One is strided.
    offsets = np.array(cu_q, dtype), np.repeat(np.array(cu_k, dtype), 2)[::2]
    call = PackedCall(backend, offsets)
    call.set(call.random(0))
    pool = xp.cuda.MemoryPool()
    stream = xp.cuda.Stream(non_blocking=True)
    xp.cuda.Device().synchronize()
    with xp.cuda.using_allocator(pool.malloc), stream:
        graph, got = captured(call, stream)
        # The caller's arrays, and all that the pools give away from now on.
        for x in offsets:
            x[...] = -1
        call.offsets = ()
        results = (got.out, got.lse, *got.grads)
        sizes = [x.nbytes for x in (*results, *offsets)]
        others = [xp.full(size, 255, np.uint8) for size in sizes for _ in range(4)]
        pinned = [xp.cuda.alloc_pinned_memory(x.nbytes) for x in offsets for _ in range(8)]
        for x in pinned:
            np.frombuffer(x, np.uint8)[...] = 255
        stream.synchronize()
    for seed in (1, 2):
        values = call.random(seed)
        call.set(values)
        forget(got)
        xp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        check(got, values, **want)
        for x in others:
            assert (x == 255).all(), "the graph wrote to memory that is no longer its own"


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_replay_reads_the_offsets_that_are_there(backend: Backend, dtype: Any) -> None:
    xp = backend.xp
    # Nobody reads them while the call is captured: what they hold then does not matter.
    offsets = tuple(xp.full(4, -1, dtype) for _ in range(2))
    call = PackedCall(backend, offsets)
    values = call.random(0)
    call.set(values)
    stream = xp.cuda.Stream(non_blocking=True)
    xp.cuda.Device().synchronize()
    with stream:
        graph, got = captured(call, stream)
    for numbers in (*OFFSETS, OFFSETS[0]):
        host = [np.array(x, dtype) for x in numbers]
        for x, y in zip(offsets, host, strict=True):
            x.data.copy_from_host(y.ctypes.data, y.nbytes)
        forget(got)
        xp.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        check(got, values, cu_seqlens_q=host[0], cu_seqlens_k=host[1])
        fresh = PackedCall(backend, host)
        fresh.arrays = call.arrays
        same(got, fresh.run())


# --- offsets on the GPU, which nobody checks -----------------------------------------------------

GARBAGE = {
    "huge": [0, 2**40, 2**62, 2**63 - 1],
    "beyond 32 bits": [0, 2**31 + 10, 2**32 + 20, 2**33 + 30],
    "just beyond": [0, 50, 151, 152],
    "negative": [-5, -(2**63), -1, 10],
    "all negative": [-(2**63), -(2**32) - 5, -(2**31), -1],
    "shrinking": [90, 60, 30, 0],
    "up and down": [0, 100, 0, 100],
    "overlapping": [0, 80, 40, 100],
    "huge of 32 bits": [0, 2**31 - 1, 2**31 - 2, 2**31 - 1],
    "negative of 32 bits": [-1, -(2**31), 2**31 - 1, -(2**31)],
}


@pytest.mark.parametrize("side", ["queries", "keys", "both"])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_offsets_that_are_garbage(backend: Backend, garbage: str, side: str) -> None:
    """Wrong results, but neither an error nor a write outside of the arrays."""
    xp = backend.xp
    dtype = np.int32 if "of 32 bits" in garbage else np.int64
    right = [np.array(x, dtype) for x in OFFSETS[0]]
    bad = [np.array(GARBAGE[garbage], dtype)] * 2
    use = {"queries": (bad[0], right[1]), "keys": (right[0], bad[1]), "both": bad}[side]
    options = dict(  # as long as the entries should be, and no longer
        bias=xp.zeros((3, 1, 57, 70), np.float32),
        mask=xp.ones((57, 70), bool),
        alibi_slopes=xp.zeros((3, 4), np.float32),
        sinks=xp.zeros(4, np.float32),
        dropout_p=0.1,
        seed=1,
    )
    call = PackedCall(backend, map(backend.array, use), **options)
    values = call.random(0)
    call.set(values)
    q, k, v, dout = call.arrays.values()
    likes = [dout, xp.empty((4, 100), np.float32), q, k, v, options["bias"], options["sinks"]]
    guarded = [xp.full((len(x) + 2, *x.shape[1:]), 7, x.dtype) for x in likes]
    to_out, to_lse, *to = (x[1:-1] for x in guarded)
    out, lse = cuflash.attention_varlen(
        *(q, k, v, *call.offsets),
        **dict(causal=True, return_lse=True, out=(to_out, to_lse), **options),
    )
    grads = cuflash.attention_varlen_backward(
        *(dout, q, k, v, out, lse, *call.offsets), **dict(causal=True, out=tuple(to), **options)
    )
    xp.cuda.Device().synchronize()  # raises what the kernels did wrong
    got = call.run()
    xp.cuda.Device().synchronize()
    for x, like in zip((got.out, got.lse, *got.grads), likes, strict=False):
        assert x.shape == like.shape and x.dtype == like.dtype
    assert got.grads.dbias.shape == (3, 1, 57, 70) and got.grads.dsinks.shape == (4,)
    assert grads.dbias is to[3] and grads.dsinks is to[4]
    for x in guarded:
        assert (x[0] == 7).all() and (x[-1] == 7).all()
    for name, x in values.items():
        np.testing.assert_array_equal(call.arrays[name].get(), x)

    call.offsets = tuple(map(backend.array, right))
    after, there = call.run(), dict(zip(("cu_seqlens_q", "cu_seqlens_k"), right, strict=True))
    check(after, values, **options, **there)


# --- memory --------------------------------------------------------------------------------------


def taken(backend: Backend, run: Any) -> int:
    """The most bytes that a function had from the pool at a time."""
    pool = backend.xp.cuda.MemoryPool()
    with backend.xp.cuda.using_allocator(pool.malloc):
        kept = run()
        backend.xp.cuda.Device().synchronize()
    del kept
    return pool.total_bytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_memory_is_the_results_and_the_documented_scratch(backend: Backend, dtype: Any) -> None:
    call = Call(backend, dtype)
    call.set(call.random(0))
    q, k, v, dout = call.arrays.values()
    out, lse = cuflash.attention(q, k, v, return_lse=True)

    def blocks(*sizes: int) -> int:
        return sum(-(-size // 512) * 512 for size in sizes)

    def backward(**options: Any) -> Any:
        return cuflash.attention_backward(dout, q, k, v, out, lse, **options)

    assert taken(backend, lambda: cuflash.attention(q, k, v)) == blocks(out.nbytes)
    both = taken(backend, lambda: cuflash.attention(q, k, v, return_lse=True))
    assert both == blocks(out.nbytes, lse.nbytes)
    assert taken(backend, lambda: cuflash.attention(q, k, v, out=out)) == 0
    gradients = q.nbytes, k.nbytes, v.nbytes
    assert taken(backend, backward) == blocks(*gradients, call.workspace_bytes)
    workspace = backend.xp.empty(call.workspace_bytes, np.uint8)
    assert taken(backend, lambda: backward(workspace=workspace)) == blocks(*gradients)
    to = tuple(map(backend.xp.empty_like, (q, k, v)))
    assert taken(backend, lambda: backward(out=to, workspace=workspace)) == 0


# --- arrays that offer __cuda_array_interface__ and nothing else ---------------------------------


class Interface:
    """A device array of some other library."""

    def __init__(self, x: Any, **changes: Any) -> None:
        self.x = x
        shown = {**x.__cuda_array_interface__, **changes}
        self.__cuda_array_interface__ = {k: v for k, v in shown.items() if v is not ...}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize(
    "changes",
    [
        {"stream": ..., "version": 2},
        {"stream": None},
        {"stream": 1},  # the legacy default stream
        {"stream": 2},  # the per-thread default stream
        {"strides": None},
    ],
    ids=str,
)
def test_interfaces_come_in(backend: Backend, changes: dict[str, Any], dtype: Any) -> None:
    call = Call(backend, dtype)
    values = call.random(0)
    call.set(values)
    backend.xp.cuda.Device().synchronize()
    plain = dict(call.arrays)
    call.arrays = {name: Interface(x, **changes) for name, x in plain.items()}
    got = call.run()
    assert type(got.out) is backend.xp.ndarray
    check(got, values)
    to = Interface(backend.xp.empty_like(got.out), **changes)
    q, k, v, _ = call.arrays.values()
    assert cuflash.attention(q, k, v, causal=True, out=to) is to
    check_forward(to.x, None, Inputs(**values, causal=True))
    with pytest.raises(ValueError, match=r"^out: shares memory with q"):
        cuflash.attention(q, k, v, out=Interface(plain["q"]))


def test_interfaces_of_strided_and_empty_arrays(backend: Backend) -> None:
    x = backend.array(np.random.default_rng(0).normal(size=(9, 4, 16)).astype("f4"))
    for view in (x[::-1, ::2], x[::2, ::-1, ::-2], x.transpose(1, 0, 2)):
        plain = cuflash.attention(view, view, view)
        wrapped = Interface(view)
        got = cuflash.attention(wrapped, wrapped, wrapped)
        np.testing.assert_array_equal(got.get(), plain.get())
    for view in (x[:0], x[:, :0]):
        wrapped = Interface(view, data=(0, False))
        assert cuflash.attention(wrapped, wrapped, wrapped).shape == view.shape


def test_the_stream_of_an_interface_is_awaited(backend: Backend) -> None:
    xp = backend.xp
    call, spin = Call(backend), Spin(backend)
    values = call.random(0)
    source = {name: backend.array(x) for name, x in values.items()}
    plain = dict(call.arrays)
    producer, consumer = (xp.cuda.Stream(non_blocking=True) for _ in range(2))
    call.arrays = {name: Interface(x, stream=producer.ptr) for name, x in plain.items()}

    def go(milliseconds: int) -> tuple[SimpleNamespace, bool]:
        xp.cuda.Device().synchronize()
        with producer:
            spin(milliseconds)
            for name, x in source.items():
                xp.copyto(plain[name], x)
        with consumer:
            got = call.run()
            return got, consumer.done

    go(0)
    for x in plain.values():
        x.fill(np.nan)
    got, done = go(300)
    assert not done, "the host waited for the producer"
    consumer.synchronize()
    check(got, values)


def test_interfaces_that_do_not_come_in(backend: Backend) -> None:
    x = backend.xp.zeros((3, 2, 8), np.float16)
    for typestr in ("|V2", "<V2"):
        with pytest.raises(TypeError, match=r"^q: Interface shows raw bytes .* bfloat16 cannot be"):
            cuflash.attention(Interface(x, typestr=typestr), x, x)
    with pytest.raises(TypeError, match=r"^k: a masked array"):
        cuflash.attention(x, Interface(x, mask=Interface(x)), x)
    start = x.__cuda_array_interface__["data"][0]
    with pytest.raises(ValueError, match=r"^v: its elements are not aligned to their size of 2"):
        cuflash.attention(x, x, Interface(x[:-1], data=(start + 1, False)))
    with pytest.raises(TypeError, match=r"^q: expected dtype float16, .*, got int16"):
        cuflash.attention(Interface(x, typestr="<i2"), x, x)


# --- CuPy arrays that do not come in -------------------------------------------------------------


def test_unaligned_arrays_are_errors(backend: Backend) -> None:
    xp = backend.xp
    x = xp.zeros((3, 2, 8), np.float32)
    memory = xp.zeros(x.nbytes + 1, np.uint8)
    odd = xp.ndarray(x.shape, x.dtype, memory.data + 1)
    message = r": its elements are not aligned to their size of 4 bytes; expected an aligned array"
    with pytest.raises(ValueError, match="^q" + message):
        cuflash.attention(odd, x, x)
    with pytest.raises(ValueError, match="^out" + message):
        cuflash.attention(x, x, x, out=odd)
    records = xp.ndarray((2, 2, 8), x.dtype, memory.data, (33, 16, 2))
    with pytest.raises(ValueError, match="^k" + message):
        cuflash.attention(x, records, x)


def test_places_do_not_mix(backend: Backend) -> None:
    there = backend.xp.zeros((3, 2, 8), np.float32)
    here = there.get()
    place = r": expected an array in the same place as q "
    with pytest.raises(TypeError, match=f"^k{place}\\(GPU 0\\), got one in host memory"):
        cuflash.attention(there, here, here)
    with pytest.raises(TypeError, match=f"^v{place}\\(host memory\\), got one in GPU 0"):
        cuflash.attention(here, here, there)
    with pytest.raises(TypeError, match=f"^out{place}\\(GPU 0\\), got one in host memory"):
        cuflash.attention(there, there, there, out=here)
    out, lse = cuflash.attention(there, there, there, return_lse=True)
    with pytest.raises(TypeError, match=f"^lse{place}"):
        cuflash.attention_backward(out, there, there, there, out, lse.get())
    with pytest.raises(TypeError, match=f"^workspace{place}"):
        workspace = np.empty(1000, np.uint8)
        cuflash.attention_backward(out, there, there, there, out, lse, workspace=workspace)
    with pytest.raises(TypeError, match=r"^scale: expected a real number on the host"):
        cuflash.attention(there, there, there, scale=backend.xp.ones((), np.float32))


def test_places_of_options_and_offsets(backend: Backend) -> None:
    there = backend.xp.zeros((3, 2, 8), np.float32)
    here = there.get()
    place = r": expected an array in the same place as q "
    arrays = {
        "bias": np.zeros((3, 3), np.float32),
        "mask": np.zeros((3, 3), bool),
        "alibi_slopes": np.zeros(2, np.float32),
        "sinks": np.zeros(2, np.float32),
    }
    for name, x in arrays.items():
        with pytest.raises(TypeError, match=f"^{name}{place}\\(GPU 0\\), got one in host memory"):
            cuflash.attention(there, there, there, **{name: x})
        with pytest.raises(TypeError, match=f"^{name}{place}\\(host memory\\), got one in GPU 0"):
            cuflash.attention(here, here, here, **{name: backend.array(x)})
    seed, cu = np.array([5]), np.array([0, 3])
    with pytest.raises(TypeError, match=f"^seed{place}\\(host memory\\), got one in GPU 0"):
        cuflash.attention(here, here, here, dropout_p=0.5, seed=backend.array(seed))
    for offsets, name in (
        ((backend.array(cu), cu), "cu_seqlens_q"),
        ((cu, backend.array(cu)), "cu_seqlens_k"),
    ):
        with pytest.raises(TypeError, match=f"^{name}{place}\\(host memory\\), got one in GPU 0"):
            cuflash.attention_varlen(here, here, here, *offsets)
        # With arrays on the GPU the offsets may lie anywhere, each by itself.
        assert cuflash.attention_varlen(there, there, there, *offsets).shape == there.shape
    cuflash.attention(there, there, there, dropout_p=0.5, seed=seed)
    short = backend.xp.zeros((0, 3), np.float32)
    with pytest.raises(ValueError, match=r"^bias: expected an axis of queries of length 1 or of"):
        cuflash.attention_varlen(there, there, there, *[backend.array(cu)] * 2, bias=short)


def test_another_gpu(backend: Backend) -> None:
    """The arrays' GPU is used, whichever is the current one."""
    xp = backend.xp
    if xp.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("this machine has one GPU")
    here = Call(backend)
    with xp.cuda.Device(1):
        there = Call(backend)
        values = there.random(0)
        there.set(values)
        xp.cuda.Device().synchronize()
    with xp.cuda.Device(0):
        got = there.run()
        for x in (got.out, got.lse, *got.grads):
            assert x.device.id == 1
        assert xp.cuda.Device().id == 0
    xp.cuda.Device(1).synchronize()
    check(got, values)
    with pytest.raises(ValueError, match=r"^k: expected an array in the same place as q \(GPU 1\)"):
        cuflash.attention(there.arrays["q"], here.arrays["k"], here.arrays["v"])
    assert xp.cuda.Device().id == 0
