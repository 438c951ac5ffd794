# SPDX-License-Identifier: Apache-2.0
"""cuDNN's attention on CuPy arrays, through its Python front end and without any framework.

The package nvidia-cudnn-frontend builds graphs; the kernels are in cuDNN's library, which comes
with PyTorch's wheels or as the package nvidia-cudnn-cu13. A graph describes tensors by sizes and
strides and takes their addresses, so CuPy's arrays are used where they lie.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from bench.cases import Case
from bench.data import Inputs
from bench.peer import Call, Peer, only_plain

__all__ = ["CudnnFrontend"]

LIBRARY = "libcudnn.so.9"


def _library() -> Path | None:
    """Return cuDNN's library as pip installs it, wherever on ``sys.path`` that is."""
    if importlib.util.find_spec("nvidia") is None:
        return None
    package = importlib.util.find_spec("nvidia.cudnn")
    folders = (package.submodule_search_locations if package else None) or []
    files = [Path(folder, "lib", LIBRARY) for folder in folders]
    return next((file for file in files if file.is_file()), None)


def _load() -> ModuleType:
    """Import the front end, with the library in the process: it looks in few places itself."""
    path = _library()
    if path is not None:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    import cudnn

    return cudnn


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


class _Graph(NamedTuple):
    """A graph with its plan, and its tensors by name."""

    graph: Any
    tensors: dict[str, Any]
    workspace: Any


class CudnnFrontend(Peer):
    """cuDNN, asked directly. Its backward is not deterministic unless one asks for it."""

    name = "cudnn"

    def __init__(self) -> None:
        self._cudnn: Any = None
        self._handle: Any = None
        self._graphs: dict[tuple[Case, str, str], _Graph] = {}

    def available(self) -> str | None:
        """See the base class."""
        if importlib.util.find_spec("cudnn") is None:
            return "nvidia-cudnn-frontend is not installed"
        try:
            self._cudnn = _load()
        except (ImportError, OSError) as error:
            return _message(error)
        try:
            self._cudnn.backend_version()
        except Exception:  # that a symbol is missing
            return f"no {LIBRARY}: install torch or nvidia-cudnn-cu13"
        try:
            self._handle = self._cudnn.create_handle()
        except Exception as error:
            return _message(error)
        return None

    def rejects(self, case: Case, dtype: str, direction: str) -> str | None:
        """See the base class."""
        if case.head_dim % 8 or case.head_dim > 256:
            return "head sizes are multiples of 8 up to 256"
        return only_plain(case, dtype)

    def prepare(self, case: Case, direction: str, inputs: Inputs) -> Call:
        """See the base class."""
        xp: Any = np if isinstance(inputs.q, np.ndarray) else sys.modules["cupy"]
        q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
        dtype = q.dtype.name
        self._cudnn.set_stream(handle=self._handle, stream=_stream(xp))
        out = xp.empty_like(dout)
        arrays = {"q": q, "k": k, "v": v, "o": out}
        if direction == "forward":
            run = self._runs(self._graph(case, "forward", dtype, xp), arrays)
            return Call(run, lambda _: (out,))
        arrays["stats"] = xp.empty((case.batch, case.heads, case.seqlen_q, 1), xp.float32)
        self._runs(self._graph(case, "forward with stats", dtype, xp), arrays)()
        grads = {name: xp.empty_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}
        arrays |= {"do": dout, **grads}
        run = self._runs(self._graph(case, "backward", dtype, xp), arrays)
        return Call(run, lambda _: tuple(grads.values()))

    def free(self) -> None:
        """See the base class."""
        self._graphs.clear()

    def _runs(self, found: _Graph, arrays: dict[str, Any]) -> Any:
        """Return a function that runs a graph on arrays, and keeps both alive."""
        at = {tensor.get_uid(): _address(arrays[name]) for name, tensor in found.tensors.items()}
        scratch = _address(found.workspace)

        def run(kept: Any = (found, arrays)) -> None:
            found.graph.execute(at, scratch, handle=self._handle)

        return run

    def _graph(self, case: Case, what: str, dtype: str, xp: Any) -> _Graph:
        """Build the graph of a call and choose its kernel, once."""
        key = (case, what, dtype)
        if key not in self._graphs:
            cudnn = self._cudnn
            kinds = cudnn.data_type
            graph = cudnn.pygraph(
                io_data_type={"float16": kinds.HALF, "bfloat16": kinds.BFLOAT16}[dtype],
                intermediate_data_type=kinds.FLOAT,
                compute_data_type=kinds.FLOAT,
                handle=self._handle,
            )
            if what == "backward":
                tensors = self._backward(graph, case)
            else:
                tensors = self._forward(graph, case, stats=what != "forward")
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            graph.check_support()
            graph.build_plans()
            workspace = xp.empty(max(1, graph.get_workspace_size()), xp.uint8)
            self._graphs[key] = _Graph(graph, tensors, workspace)
        return self._graphs[key]

    def _options(self, case: Case) -> dict[str, Any]:
        """Return scale and mask as the front end takes them."""
        found: dict[str, Any] = {"attn_scale": case.head_dim**-0.5}
        if case.causal:
            found["diagonal_alignment"] = self._cudnn.diagonal_alignment.TOP_LEFT
            found["diagonal_band_right_bound"] = 0
        return found

    def _forward(self, graph: Any, case: Case, *, stats: bool) -> dict[str, Any]:
        tensors = {name: graph.tensor(name=name, **_layout(case, name)) for name in ("q", "k", "v")}
        o, lse = graph.sdpa(**tensors, generate_stats=stats, **self._options(case))
        _output(o, case, "o")
        tensors["o"] = o
        if stats:
            _output(lse, case, "stats").set_data_type(self._cudnn.data_type.FLOAT)
            tensors["stats"] = lse
        return tensors

    def _backward(self, graph: Any, case: Case) -> dict[str, Any]:
        names = ("q", "k", "v", "o", "do")
        tensors = {name: graph.tensor(name=name, **_layout(case, name)) for name in names}
        kind = self._cudnn.data_type.FLOAT
        tensors["stats"] = graph.tensor(name="stats", data_type=kind, **_layout(case, "stats"))
        given = {("dO" if name == "do" else name): tensor for name, tensor in tensors.items()}
        found = graph.sdpa_backward(**given, **self._options(case))
        for name, tensor in zip(("dq", "dk", "dv"), found, strict=True):
            tensors[name] = tensor
            _output(tensor, case, name)
        return tensors


def _layout(case: Case, name: str) -> dict[str, list[int]]:
    """Return (batch, heads, seqlen, dim) and strides, in elements, of arrays that we have.

    They lie as (batch, seqlen, heads, dim); stats as (batch, heads, seqlen, 1).
    """
    of_keys = name.lstrip("d") in ("k", "v")
    heads = case.kv_heads if of_keys else case.heads
    seqlen = case.seqlen_kv if of_keys else case.seqlen_q
    dims = [case.batch, heads, seqlen]
    if name == "stats":
        return {"dim": [*dims, 1], "stride": [heads * seqlen, seqlen, 1, 1]}
    size = case.head_dim_v if name in ("v", "dv", "o", "do") else case.head_dim
    return {"dim": [*dims, size], "stride": [seqlen * heads * size, size, heads * size, 1]}


def _output(tensor: Any, case: Case, name: str) -> Any:
    """Declare a result, where our array will be."""
    layout = _layout(case, name)
    return tensor.set_output(True).set_dim(layout["dim"]).set_stride(layout["stride"])


def _address(x: Any) -> int:
    return x.ctypes.data if isinstance(x, np.ndarray) else x.data.ptr


def _stream(xp: Any) -> int:
    return 0 if xp is np else xp.cuda.get_current_stream().ptr
