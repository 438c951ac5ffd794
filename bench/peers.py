# SPDX-License-Identifier: Apache-2.0
"""Who is timed: cuflash, the naive formula, and other libraries where they are installed.

A peer is imported when it is first asked for, and being absent is fine. Arrays cross by DLPack,
bfloat16 as integers of its bits, which every library takes. Nobody copies an input in a timed call.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench import baselines
from bench.cases import Case
from bench.cudnn_frontend import CudnnFrontend
from bench.data import Inputs
from bench.peer import OURS, UNORDERED, Call, Peer, only_plain

__all__ = ["OURS", "PEERS", "Call", "Peer"]


class Cuflash(Peer):
    """Ours."""

    name = OURS
    deterministic = True

    def prepare(self, case: Case, direction: str, inputs: Inputs) -> Call:
        """See the base class."""
        import cuflash

        if case.packed:
            forward, backward = cuflash.attention_varlen, cuflash.attention_varlen_backward
            arrays = (inputs.q, inputs.k, inputs.v, inputs.dout)
            q, k, v, dout = (x.reshape(-1, *x.shape[2:]) for x in arrays)
            offsets = (inputs.offsets, inputs.offsets)
        else:
            forward, backward = cuflash.attention, cuflash.attention_backward
            q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
            offsets = ()
        options = inputs.options

        def batched(*results: Any) -> tuple[Any, ...]:
            return tuple(x.reshape(case.batch, -1, *x.shape[-2:]) for x in results)

        if direction == "forward":
            return Call(lambda: forward(q, k, v, *offsets, **options), batched)
        out, lse = forward(q, k, v, *offsets, return_lse=True, **options)
        return Call(
            lambda: backward(
                dout, q, k, v, out, lse, *offsets, **options, deterministic=self.deterministic
            ),
            lambda grads: batched(grads.dq, grads.dk, grads.dv),
        )


class Unordered(Cuflash):
    """Ours, where bits may differ from call to call."""

    name = UNORDERED
    deterministic = False

    def rejects(self, case: Case, dtype: str, direction: str) -> str | None:
        """See the base class."""
        return "of a backward only" if direction == "forward" else None


class Naive(Peer):
    """The formula as it is usually written in CuPy."""

    name = "naive"
    allowance = 10.0  # in 16-bit types it rounds the scores

    def rejects(self, case: Case, dtype: str, direction: str) -> str | None:
        """See the base class."""
        if case.options() or case.heads != case.kv_heads:
            return "no options and no grouped heads"
        return None

    def prepare(self, case: Case, direction: str, inputs: Inputs) -> Call:
        """See the base class."""
        arrays = (inputs.q, inputs.k, inputs.v, inputs.dout)
        q, k, v, dout = (x.swapaxes(1, 2).copy() for x in arrays)
        mask = None
        if case.causal:
            mask = baselines.causal_mask(case.seqlen_q, case.seqlen_kv, q)

        def heads_third(results: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(x.swapaxes(1, 2) for x in results)

        if direction == "forward":
            return Call(
                lambda: baselines.forward(q, k, v, mask), lambda result: heads_third(result[:1])
            )
        p = baselines.forward(q, k, v, mask)[1]
        return Call(lambda: baselines.backward(dout, q, k, v, p), heads_third)


class TorchSdpa(Peer):
    """A back end of PyTorch's scaled_dot_product_attention."""

    def __init__(self, name: str, backend: str, largest: int) -> None:
        self.name, self._backend, self._largest = name, backend, largest

    def available(self) -> str | None:
        """See the base class."""
        if importlib.util.find_spec("torch") is None:
            return "torch is not installed"
        import torch

        if not torch.cuda.is_available():
            return "torch finds no GPU"
        try:
            from torch.nn.attention import SDPBackend

            getattr(SDPBackend, self._backend)
        except (ImportError, AttributeError):
            return f"torch {torch.__version__} has no such back end"
        return None

    def rejects(self, case: Case, dtype: str, direction: str) -> str | None:
        """See the base class."""
        if max(case.head_dim, case.head_dim_v) > self._largest or case.head_dim % 8:
            return f"head sizes are multiples of 8 up to {self._largest}"
        return only_plain(case, dtype)

    def prepare(self, case: Case, direction: str, inputs: Inputs) -> Call:
        """See the base class."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        backend = getattr(SDPBackend, self._backend)
        options = {"is_causal": case.causal, "enable_gqa": case.heads != case.kv_heads}
        arrays = (inputs.q, inputs.k, inputs.v, inputs.dout)
        leaves = [_to_torch(torch, x) for x in arrays]
        q, k, v, dout = (x.transpose(1, 2) for x in leaves)
        if direction == "forward":

            def forward() -> Any:
                with torch.no_grad(), sdpa_kernel(backend):
                    return scaled_dot_product_attention(q, k, v, **options)

            return Call(forward, lambda out: (_from_torch(torch, out.transpose(1, 2)),))
        leaves = [x.requires_grad_() for x in leaves[:3]]
        with sdpa_kernel(backend):
            q, k, v = (x.transpose(1, 2) for x in leaves)
            out = scaled_dot_product_attention(q, k, v, **options)
        return Call(
            lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
            lambda grads: tuple(_from_torch(torch, x) for x in grads),
        )

    def free(self) -> None:
        """See the base class."""
        import torch

        torch.cuda.empty_cache()


def _to_torch(torch: Any, x: Any) -> Any:
    if x.dtype.name != "bfloat16":
        return torch.from_dlpack(x)
    return torch.from_dlpack(x.view(np.int16)).view(torch.bfloat16)


def _from_torch(torch: Any, x: Any) -> Any:
    import cupy

    x = x.detach().contiguous()
    if x.dtype != torch.bfloat16:
        return cupy.from_dlpack(x)
    import ml_dtypes

    return cupy.from_dlpack(x.view(torch.int16)).view(ml_dtypes.bfloat16)


class FlashAttention3(Peer):
    """FlashAttention-3 through JAX: the library inside the PyPI wheel dew-flash-attn-cu13.

    Its file is found in that package or at ``$FLASH_ATTENTION_3``. JAX has streams of its own.
    """

    name = "fa3"
    on_stream = False
    _calls: tuple[Callable[..., Any], Callable[..., Any]] | None = None

    @staticmethod
    def library() -> Path | None:
        """Return the shared library, if there is one."""
        given = os.environ.get("FLASH_ATTENTION_3")
        if given:
            return Path(given)
        package = importlib.util.find_spec("dew_flash_attn")
        folders = (package.submodule_search_locations if package else None) or []
        files = [Path(folder, "libdew_flash_attn3.so") for folder in folders]
        return next((file for file in files if file.is_file()), None)

    def available(self) -> str | None:
        """See the base class."""
        library = self.library()
        if library is None:
            return "neither dew-flash-attn-cu13 is installed nor FLASH_ATTENTION_3 set"
        if not library.is_file():
            return f"FLASH_ATTENTION_3: no file {library}"
        if importlib.util.find_spec("jax") is None:
            return "jax is not installed"
        try:
            self._load(library)
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:200]
        return None

    def rejects(self, case: Case, dtype: str, direction: str) -> str | None:
        """See the base class."""
        if case.head_dim not in (64, 128, 192, 256):
            return "head sizes are 64, 128, 192 and 256"
        if direction == "backward" and case.heads != case.kv_heads:
            return "no backward of grouped heads"
        if case.seqlen_q != case.seqlen_kv:
            return "one length"
        return only_plain(case, dtype)

    def _load(self, path: Path) -> None:
        """Register the library with JAX and make both passes callable."""
        if FlashAttention3._calls is not None:
            return
        import ctypes
        import functools

        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import jax
        import jax.numpy as jnp

        library = ctypes.cdll.LoadLibrary(str(path))
        for end in ("_fwd", "_bwd"):
            function = jax.ffi.pycapsule(getattr(library, f"dew_flash3_mha{end}"))
            jax.ffi.register_ffi_target(f"dew_flash3_mha{end}", function, platform="CUDA")

        def call(end: str, shapes: list[Any], d: int, causal: bool) -> Callable[..., Any]:
            results = tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)
            attributes = {
                "softmax_scale": np.float64(d**-0.5),
                "is_causal": causal,
                "window_size_left": np.int64(-1),
                "window_size_right": np.int64(-1),
            }
            function = jax.ffi.ffi_call(f"dew_flash3_mha{end}", results)
            return lambda *arrays: function(*arrays, **attributes)

        @functools.partial(jax.jit, static_argnames="causal")
        def forward(q: Any, k: Any, v: Any, causal: bool) -> Any:
            b, s, h, d = q.shape
            f32 = jnp.float32
            shapes = [(q.shape, q.dtype), ((b, h, s), f32), ((1, 1, 1, 1), f32), ((1, 1, 1), f32)]
            return call("_fwd", shapes, d, causal)(q, k, v)[:2]

        @functools.partial(jax.jit, static_argnames="causal")
        def backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool) -> Any:
            b, s, h, d = q.shape
            scratch = ((h * (b * s + 128 * (b + 1)),), jnp.float32)
            shapes = [(x.shape, x.dtype) for x in (q, k, v)] + [scratch] * 2
            return call("_bwd", shapes, d, causal)(dout, q, k, v, out, lse)[:3]

        FlashAttention3._calls = forward, backward

    def prepare(self, case: Case, direction: str, inputs: Inputs) -> Call:
        """See the base class."""
        assert self._calls is not None
        forward, backward = self._calls
        q, k, v, dout = (_to_jax(x) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
        if direction == "forward":
            return Call(
                lambda: forward(q, k, v, causal=case.causal),
                lambda result: (_from_jax(result[0]),),
            )
        out, lse = forward(q, k, v, causal=case.causal)
        return Call(
            lambda: backward(dout, q, k, v, out, lse, causal=case.causal),
            lambda grads: tuple(_from_jax(x) for x in grads),
        )

    def wait(self, result: Any) -> None:
        """See the base class."""
        import jax

        jax.block_until_ready(result)


def _to_jax(x: Any) -> Any:
    import jax

    if x.dtype.name != "bfloat16":
        y = jax.numpy.from_dlpack(x)
    else:
        y = jax.numpy.from_dlpack(x.view(np.uint16))
        y = jax.lax.bitcast_convert_type(y, jax.numpy.bfloat16)
    return jax.block_until_ready(y)


def _from_jax(x: Any) -> Any:
    import cupy
    import jax

    if x.dtype != jax.numpy.bfloat16:
        return cupy.from_dlpack(jax.block_until_ready(x))
    import ml_dtypes

    bits = jax.lax.bitcast_convert_type(x, jax.numpy.uint16)
    return cupy.from_dlpack(jax.block_until_ready(bits)).view(ml_dtypes.bfloat16)


#: All peers by name; the order is that of the table.
PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Cuflash(),
        Unordered(),
        Naive(),
        TorchSdpa("torch-flash", "FLASH_ATTENTION", 256),
        TorchSdpa("torch-cudnn", "CUDNN_ATTENTION", 256),
        CudnnFrontend(),
        FlashAttention3(),
    )
}
