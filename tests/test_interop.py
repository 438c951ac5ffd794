# SPDX-License-Identifier: Apache-2.0
"""Arrays of other libraries, in and out without a copy, and in the right order on streams.

The libraries are not needed for anything else, so a test whose library is absent is skipped, and
the skip names it. With ``--backend gpu`` the same tests run on device arrays.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from check import Inputs, check_backward, check_forward
from conftest import Backend
from libraries import LIBRARIES, Jax, Library, Numba, Torch
from run import both

import cuflash
from cuflash import arrays

pytestmark = pytest.mark.library

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
DTYPES["float64"] = np.float64
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest, backend: Backend) -> Library:
    return LIBRARIES[request.param](backend.name == "gpu")


@pytest.fixture
def torch(backend: Backend) -> Any:
    return Torch(backend.name == "gpu").torch


def normal(seed: int, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def example(dtype: Any = np.float32, **options: Any) -> Inputs:
    """Two batch entries, grouped heads, more keys than queries."""
    return Inputs(
        q=normal(0, (2, 21, 4, 24), dtype),
        k=normal(1, (2, 69, 2, 24), dtype),
        v=normal(2, (2, 69, 2, 24), dtype),
        dout=normal(3, (2, 21, 4, 24), dtype),
        dlse=normal(4, (2, 4, 21), np.float64 if dtype == np.float64 else np.float32),
        **options,
    )


def flat(results: tuple[Any, Any, cuflash.Gradients]) -> list[Any]:
    out, lse, grads = results
    return [x for x in (out, lse, *grads, grads.dbias, grads.dsinks) if x is not None]


def same(backend: Backend, xs: Any, ys: Any) -> None:
    """Assert equality of every bit."""
    for x, y in zip(xs, ys, strict=True):
        x, y = backend.host(x), backend.host(y)
        assert x.dtype == y.dtype and x.shape == y.shape
        assert x.tobytes() == y.tobytes()


def needs(library: Library, dtype: str) -> None:
    """Skip what the library or the CPU has no way for; the ways around have tests of their own."""
    if dtype not in library.dtypes:
        pytest.skip(f"{library.name} has no {dtype}")
    if dtype == "bfloat16" and not library.gpu:
        pytest.skip("NumPy takes no bfloat16 through DLPack: test_bfloat16_on_the_cpu")


# --- in ------------------------------------------------------------------------------------------


@every_dtype
def test_arrays_come_in(backend: Backend, library: Library, dtype: str) -> None:
    """Without a copy, and the results are those of CuPy's and NumPy's own arrays."""
    needs(library, dtype)
    plain = example(DTYPES[dtype], causal=True)
    foreign = plain.moved(library.array)
    for x in (foreign.q, foreign.k, foreign.v, foreign.dout, foreign.dlse):
        assert arrays.adopt("x", x).address == library.address(x)
    got = both(foreign)
    assert all(type(x) is backend.xp.ndarray for x in flat(got))
    same(backend, flat(got), flat(both(plain.moved(backend.array))))


def test_options_come_in(backend: Backend, library: Library) -> None:
    seed = np.array([2**40 + 3])
    plain = example(
        causal=True,
        softcap=8.0,
        bias=normal(5, (1, 4, 21, 69)),
        mask=np.random.default_rng(6).random((2, 1, 21, 69)) < 0.8,
        alibi_slopes=np.array([0.5, 0.1, 0.02, 0.004], np.float32),
        sinks=normal(7, (4,)),
        dropout_p=0.2,
    )
    foreign = dataclasses.replace(plain.moved(library.array), seed=library.array(seed))
    want = dataclasses.replace(plain.moved(backend.array), seed=backend.array(seed))
    same(backend, flat(both(foreign)), flat(both(want)))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_packed_sequences_come_in(backend: Backend, library: Library, dtype: Any) -> None:
    plain = Inputs(
        q=normal(0, (50, 4, 24)),
        k=normal(1, (80, 2, 24)),
        v=normal(2, (80, 2, 24)),
        dout=normal(3, (50, 4, 24)),
        causal=True,
        cu_seqlens_q=np.array([0, 7, 7, 48], dtype),
        cu_seqlens_k=np.array([2, 30, 41, 80], dtype),
    )
    got = both(plain.moved(library.array))
    same(backend, flat(got), flat(both(plain.moved(backend.array))))


@pytest.mark.parametrize("view", ["some heads", "every other key", "heads first"])
def test_strides_come_in(backend: Backend, library: Library, view: str) -> None:
    if isinstance(library, Jax):
        pytest.skip("JAX has no strided views")
    if view == "heads first" and isinstance(library, Numba):
        pytest.skip("Numba swaps no axes of such arrays")
    look: Callable[[Any], Any] = {
        "some heads": lambda x: x[:, :, 1:3],
        "every other key": lambda x: x[:, ::2],
        "heads first": lambda x: x.swapaxes(1, 2),
    }[view]
    x = normal(0, (2, 21, 4, 24))
    foreign, plain = look(library.array(x)), look(backend.array(x))
    seen = arrays.adopt("x", foreign)
    assert seen.address == library.address(foreign) and seen.strides == plain.strides
    got = cuflash.attention(foreign, foreign, foreign, causal=True)
    same(backend, [got], [cuflash.attention(plain, plain, plain, causal=True)])


@pytest.mark.parametrize("name", ["torch", "JAX"])
def test_bfloat16_on_the_cpu(backend: Backend, name: str) -> None:
    """NumPy takes none through DLPack; both libraries have another way without a copy."""
    if backend.name == "gpu":
        pytest.skip("device arrays of bfloat16 come in as they are")
    library = LIBRARIES[name](False)
    plain = example(ml_dtypes.bfloat16)
    foreign = plain.moved(library.array)
    with pytest.raises(TypeError, match=r"^q: \w+ does not come in through DLPack: "):
        cuflash.attention(foreign.q, foreign.k, foreign.v)

    seen = foreign.moved(library.shown)
    for x, y in ((seen.q, foreign.q), (seen.dout, foreign.dout)):
        assert x.dtype == ml_dtypes.bfloat16 and x.ctypes.data == library.address(y)
    same(backend, flat(both(seen)), flat(both(plain)))


def test_a_tensor_that_has_a_gradient_does_not_come_in(backend: Backend, torch: Any) -> None:
    x = torch.zeros((3, 2, 8), device="cuda" if backend.name == "gpu" else "cpu")
    with pytest.raises(TypeError, match=r"^k: Tensor does not come in through DLPack: .*detach"):
        cuflash.attention(x, x.clone().requires_grad_(), x)


# --- out -----------------------------------------------------------------------------------------


def aligned(backend: Backend, x: np.ndarray) -> Any:
    """Return uninitialised memory for an array like `x` that begins at a multiple of 64 bytes."""
    memory = backend.xp.empty(x.nbytes + 64, np.uint8)
    address = memory.ctypes.data if backend.name == "cpu" else memory.data.ptr
    start = -address % 64
    return memory[start : start + x.nbytes].view(x.dtype).reshape(x.shape)


@every_dtype
def test_results_go_out(backend: Backend, library: Library, dtype: str) -> None:
    """The library's array begins where the result does."""
    if dtype not in library.taken_dtypes:
        pytest.skip(f"{library.name} takes no {dtype} without a copy")
    i = example(DTYPES[dtype], causal=True).moved(backend.array)
    results = flat(both(i))
    if isinstance(library, Jax):
        # JAX takes no memory of the CPU that is not aligned to 64 bytes; NumPy aligns to 16.
        to = [aligned(backend, backend.host(x)) for x in results]
        cuflash.attention(i.q, i.k, i.v, causal=True, return_lse=True, out=tuple(to[:2]))
        cuflash.attention_backward(
            *(i.dout, i.q, i.k, i.v, *to[:2]), dlse=i.dlse, causal=True, out=tuple(to[2:])
        )
        same(backend, to, results)
        results = to
    for x in results:
        y = library.taken(x)
        address = x.ctypes.data if backend.name == "cpu" else x.data.ptr
        assert library.address(y) == address
        same(backend, [library.host(y)], [x])


@every_dtype
def test_results_are_written_in_place(backend: Backend, library: Library, dtype: str) -> None:
    needs(library, dtype)
    if not library.is_mutable:
        pytest.skip(f"arrays of {library.name} never change")
    plain = example(DTYPES[dtype], causal=True)
    i = plain.moved(library.array)
    want = flat(both(plain.moved(backend.array)))
    to = [library.array(np.full_like(backend.host(x), 7)) for x in want]
    got = cuflash.attention(i.q, i.k, i.v, causal=True, return_lse=True, out=tuple(to[:2]))
    assert got[0] is to[0] and got[1] is to[1]
    grads = cuflash.attention_backward(
        *(i.dout, i.q, i.k, i.v, *to[:2]), dlse=i.dlse, causal=True, out=tuple(to[2:])
    )
    assert all(x is y for x, y in zip(grads, to[2:], strict=True))
    same(backend, map(library.host, to), want)
    with pytest.raises(ValueError, match=r"^out: shares memory with q"):
        cuflash.attention(i.q, i.k, i.v, out=i.q)


def test_a_jax_array_on_the_cpu_is_not_written(backend: Backend) -> None:
    if backend.name == "gpu":
        pytest.skip("a device array of JAX does not say that it must not change")
    x = Jax(False).array(normal(0, (3, 2, 8)))
    with pytest.raises(ValueError, match=r"^out: expected a writable array, got a read-only one"):
        cuflash.attention(x, x, x, out=x + 1)


def test_a_function_of_torch(backend: Backend, torch: Any) -> None:
    """Between two layers of torch the gradients are those of torch's own formula."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, q: Any, k: Any, v: Any) -> Any:
            out, context.vjp = cuflash.attention_vjp(q.detach(), k.detach(), v.detach())
            return torch.from_dlpack(out)

        @staticmethod
        def backward(context: Any, dout: Any) -> tuple[Any, ...]:
            return tuple(map(torch.from_dlpack, context.vjp(dout)))

    def plain(q: Any, k: Any, v: Any) -> Any:
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)

    place = "cuda" if backend.name == "gpu" else "cpu"
    x = torch.tensor(normal(0, (2, 30, 4, 24), np.float64), device=place)
    weights = [
        torch.tensor(normal(1 + n, (24, 24), np.float64) / 5, device=place, requires_grad=True)
        for n in range(4)
    ]
    found = []
    for attention in (Attention.apply, plain):
        *projections, last = weights
        out = attention(*(x @ w for w in projections)) @ last
        loss = (out**2).sum()
        found.append([loss, *torch.autograd.grad(loss, weights)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


# --- streams -------------------------------------------------------------------------------------

SHAPES = dict(q=(2, 100, 4, 40), k=(2, 150, 2, 40), v=(2, 150, 2, 40), dout=(2, 100, 4, 40))


class Streams:
    """Work on two streams, the first of which is kept busy before a call."""

    def __init__(self, backend: Backend) -> None:
        self.xp = backend.xp
        self.cuda = backend.xp.cuda
        self.values = {name: normal(n, shape) for n, (name, shape) in enumerate(SHAPES.items())}
        self.inputs = Inputs(**self.values, causal=True)
        self._spin = self.xp.RawKernel(
            r"""extern "C" __global__ void spin(long long cycles) {
                const long long start = clock64();
                while (clock64() - start < cycles) {}
            }""",
            "spin",
        )
        self.milliseconds = 0

    def stream(self) -> Any:
        return self.cuda.Stream(non_blocking=True)

    def spin(self) -> None:
        """Keep CuPy's current stream busy."""
        cycles = np.int64(self.milliseconds * 2_000_000)  # at about 2 GHz
        self._spin((1,), (1,), (cycles,))

    def twice(self, go: Callable[[], Any]) -> Any:
        """Run something once to compile and allocate, and again behind a busy stream."""
        for milliseconds in (0, 300):
            self.cuda.Device().synchronize()
            self.milliseconds = milliseconds
            result = go()
        return result

    def call(self, q: Any, k: Any, v: Any, dout: Any) -> list[Any]:
        out, lse, vjp = cuflash.attention_vjp(q, k, v, causal=True, return_lse=True)
        return [out, lse, *vjp(dout)]

    def check(self, results: list[np.ndarray]) -> None:
        out, lse, *grads = results
        check_forward(out, lse, self.inputs)
        check_backward(cuflash.Gradients(*grads), self.inputs)


@pytest.fixture
def streams(backend: Backend) -> Streams:
    return Streams(backend)


@pytest.fixture
def gpu_torch(backend: Backend) -> Torch:
    return Torch(gpu=True)


@pytest.fixture
def numba(backend: Backend) -> Numba:
    return Numba(gpu=True)


@pytest.mark.gpu
def test_torch_is_awaited_and_waits(streams: Streams, gpu_torch: Torch) -> None:
    """Torch's current stream before the call, CuPy's current stream after it; the host never."""
    torch = gpu_torch.torch
    source = [gpu_torch.array(x) for x in streams.values.values()]
    ours, theirs = streams.stream(), torch.cuda.Stream()
    also_theirs = streams.cuda.Stream.from_external(theirs)

    def go() -> tuple[list[Any], bool]:
        with torch.cuda.stream(theirs):
            tensors = [torch.full_like(x, np.nan) for x in source]
            with also_theirs:
                streams.spin()
            for x, y in zip(tensors, source, strict=True):
                x.copy_(y)
            with ours:
                results = streams.call(*tensors)
                streams.spin()
                for x in results:
                    x *= 2
                taken = [torch.from_dlpack(x) for x in results]
            copies = [x / 2 for x in taken]
            # All is kept until the work is done: each allocator knows its own streams alone.
            return [copies, results, tensors], theirs.query()

    (copies, *_), done = streams.twice(go)
    assert not done, "the host waited for a stream"
    torch.cuda.synchronize()
    streams.check([x.cpu().numpy() for x in copies])


@pytest.mark.gpu
def test_one_stream_for_torch_and_us(streams: Streams, gpu_torch: Torch) -> None:
    """Then nobody waits, results may go to tensors, and tensors may go as soon as they were used.

    Torch's allocator gives the memory of what goes to the next tensor of the stream.
    """
    torch = gpu_torch.torch
    source = [gpu_torch.array(x) for x in streams.values.values()]
    stream = torch.cuda.Stream()

    def go() -> tuple[list[Any], bool]:
        with torch.cuda.stream(stream), streams.cuda.Stream.from_external(stream):
            streams.spin()
            tensors = [x.clone() for x in source]
            q, k, v, dout = tensors
            out = torch.full_like(dout, np.nan)
            lse = torch.empty((2, 4, 100), device="cuda")
            cuflash.attention(q, k, v, causal=True, return_lse=True, out=(out, lse))
            to = tuple(torch.full_like(x, np.nan) for x in (q, k, v))
            cuflash.attention_backward(dout, q, k, v, out, lse, causal=True, out=to)
            copies = [x.clone() for x in (out, lse, *to)]
            addresses = {x.data_ptr() for x in tensors}
            del tensors, q, k, v, dout
            others = [torch.full_like(x, np.nan) for x in source]
            assert {x.data_ptr() for x in others} & addresses, "no memory was used again"
            return copies, stream.query()

    copies, done = streams.twice(go)
    assert not done, "the host waited for the stream"
    torch.cuda.synchronize()
    streams.check([x.cpu().numpy() for x in copies])


@pytest.mark.gpu
def test_threads_with_streams_of_their_own(streams: Streams, gpu_torch: Torch) -> None:
    """The current streams of both libraries belong to a thread."""
    torch = gpu_torch.torch
    source = [gpu_torch.array(x) for x in streams.values.values()]
    torch.cuda.synchronize()
    streams.call(*source)  # compiles
    start, found = threading.Barrier(4), []

    def work(number: int) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), streams.cuda.Stream.from_external(stream):
            start.wait()
            for _ in range(20):
                # The values of each thread are its own, and exact in float32.
                tensors = [x * 2.0**number for x in source]
                out = torch.from_dlpack(cuflash.attention(*tensors[:3], scale=0.25**number))
                result = out / 2.0**number
            found.append(result)
        stream.synchronize()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    want = cuflash.attention(*source[:3], scale=1.0).get()
    for x in found:
        np.testing.assert_array_equal(x.cpu().numpy(), want)


@pytest.mark.gpu
def test_the_stream_of_a_numba_array_is_awaited(streams: Streams, numba: Numba) -> None:
    """Numba, which takes a result, waits on the host for the stream that it was made on."""
    cuda = numba.cuda
    ours, theirs = streams.stream(), streams.stream()
    stream = cuda.external_stream(theirs.ptr)
    source = [numba.array(x) for x in streams.values.values()]
    nothing = [numba.array(np.full_like(x, np.nan)) for x in streams.values.values()]

    def go() -> tuple[list[Any], bool]:
        made = [cuda.device_array(x.shape, x.dtype, stream=stream) for x in source]
        for x, y in zip(made, nothing, strict=True):
            x.copy_to_device(y)
        cuda.synchronize()
        with theirs:
            streams.spin()
        for x, y in zip(made, source, strict=True):
            x.copy_to_device(y, stream=stream)
        with ours:
            results = streams.call(*made)
            done = ours.done
            streams.spin()
            for x in results:
                x *= 2
            taken = [numba.taken(x) for x in results]
            assert ours.done, "Numba did not wait"
        return [numba.host(x) / 2 for x in taken], done

    results, done = streams.twice(go)
    assert not done, "the host waited for the stream"
    streams.check(results)


@pytest.mark.gpu
def test_jax_is_awaited_and_waits(streams: Streams, backend: Backend) -> None:
    """JAX has streams that nobody sees; DLPack orders them in both directions."""
    library = Jax(gpu=True)
    jax = library.jax
    ours = streams.stream()
    source = [library.array(x) for x in streams.values.values()]
    square = library.array(normal(9, (3000, 3000)) / 60)

    @jax.jit
    def slowly(x: Any) -> Any:
        y = jax.lax.fori_loop(0, 50, lambda _, y: jax.numpy.tanh(y @ square), square)
        return x + 0 * y.sum()

    def go() -> list[Any]:
        made = [slowly(x) for x in source]
        with ours:
            results = streams.call(*made)
            streams.spin()
            for x in results:
                x *= 2
            return [library.taken(x) / 2 for x in results]

    streams.check([library.host(x) for x in streams.twice(go)])
