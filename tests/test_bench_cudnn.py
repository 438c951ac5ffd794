# SPDX-License-Identifier: Apache-2.0
"""The peer "cudnn" on a front end that computes in NumPy what its graphs describe."""

from __future__ import annotations

import ctypes
import importlib.machinery
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import data, verify  # noqa: E402
from bench.cases import Case  # noqa: E402
from bench.cudnn_frontend import CudnnFrontend  # noqa: E402

KINDS = {"HALF": np.float16, "BFLOAT16": ml_dtypes.bfloat16, "FLOAT": np.float32}


class Tensor:
    """A tensor of a graph: where and how its numbers lie, and which come out."""

    def __init__(self, uid: int, kind: str, dim: Any = None, stride: Any = None) -> None:
        self.uid, self.kind, self.dim, self.stride, self.output = uid, kind, dim, stride, False

    def get_uid(self) -> int:
        return self.uid

    def set_output(self, output: bool) -> Tensor:
        self.output = output
        return self

    def set_dim(self, dim: list[int]) -> Tensor:
        self.dim = dim
        return self

    def set_stride(self, stride: list[int]) -> Tensor:
        self.stride = stride
        return self

    def set_data_type(self, kind: str) -> Tensor:
        self.kind = kind
        return self

    def at(self, address: int) -> np.ndarray:
        dtype = np.dtype(KINDS[self.kind])
        assert self.dim and self.stride
        count = 1 + sum((n - 1) * step for n, step in zip(self.dim, self.stride, strict=True))
        memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
        strides = [step * dtype.itemsize for step in self.stride]
        flat = np.frombuffer(memory, dtype)
        return np.lib.stride_tricks.as_strided(flat, self.dim, strides)


class Graph:
    """One node of attention, in either direction."""

    def __init__(self, **given: Any) -> None:
        assert given["compute_data_type"] == given["intermediate_data_type"] == "FLOAT"
        self.io, self.handle = given["io_data_type"], given["handle"]
        self.tensors: list[Tensor] = []
        self.steps: list[str] = []

    def tensor(self, dim: Any, stride: Any, name: str, data_type: str = "") -> Tensor:
        self.tensors.append(Tensor(len(self.tensors) + 10, data_type or self.io, dim, stride))
        return self.tensors[-1]

    def _node(self, options: dict[str, Any], results: int, *given: Tensor) -> list[Tensor]:
        self.scale = options.pop("attn_scale")
        self.causal = options.pop("diagonal_band_right_bound", None) == 0
        assert options.pop("diagonal_alignment", "TOP_LEFT") == "TOP_LEFT" and not options
        self.given = given
        self.results = [self.tensor(None, None, "") for _ in range(results)]
        return self.results

    def sdpa(self, q: Tensor, k: Tensor, v: Tensor, generate_stats: bool, **options: Any) -> Any:
        found = self._node(options, 1 + generate_stats, q, k, v)
        return found if generate_stats else [*found, None]

    def sdpa_backward(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, dO: Tensor, stats: Tensor, **options: Any
    ) -> Any:
        return self._node(options, 3, q, k, v, o, dO, stats)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_: self.steps.append(name)

    def get_workspace_size(self) -> int:
        assert self.steps == [
            *("validate", "build_operation_graph", "create_execution_plans", "check_support"),
            "build_plans",
        ]
        return 0

    def execute(self, at: dict[int, int], workspace: int, handle: Any) -> None:
        assert workspace and handle is self.handle
        assert all(one.output for one in self.results)
        assert set(at) == {one.uid for one in (*self.given, *self.results)}
        arrays = [one.at(at[one.uid]) for one in self.given]
        out = [one.at(at[one.uid]) for one in self.results]
        q, k, v, *more = (x.astype(np.float64) for x in arrays)
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat(group, axis=1) for x in (k, v))
        s = self.scale * q @ k.swapaxes(2, 3)
        if self.causal:
            s = np.where(np.tri(*s.shape[2:], dtype=bool), s, -np.inf)
        if not more:
            lse = np.log(np.exp(s).sum(axis=3, keepdims=True))
            out[0][...] = (np.exp(s - lse) @ v).astype(out[0].dtype)
            if len(out) == 2:
                out[1][...] = lse
            return
        o, do, lse = more
        p = np.exp(s - lse)
        ds = p * (do @ v.swapaxes(2, 3) - (do * o).sum(axis=3, keepdims=True)) * self.scale
        for x, y in zip(out, (ds @ k, ds.swapaxes(2, 3) @ q, p.swapaxes(2, 3) @ do), strict=True):
            summed = y.reshape(y.shape[0], x.shape[1], -1, *y.shape[2:]).sum(axis=2)
            x[...] = summed.astype(x.dtype)


@pytest.fixture
def frontend(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = ModuleType("cudnn")
    module.__spec__ = importlib.machinery.ModuleSpec("cudnn", None)
    module.data_type = SimpleNamespace(**{name: name for name in KINDS})
    module.diagonal_alignment = SimpleNamespace(TOP_LEFT="TOP_LEFT")
    module.heur_mode = SimpleNamespace(A="A", FALLBACK="FALLBACK")
    module.pygraph = Graph
    module.backend_version = lambda: 91900
    module.create_handle = object
    module.streams = []
    module.set_stream = lambda handle, stream: module.streams.append(stream)
    monkeypatch.setitem(sys.modules, "cudnn", module)
    return module


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_results_are_where_they_should_be(
    frontend: Any, causal: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "L2_BYTES", 60_000)  # of 54 kB a set
    peer = CudnnFrontend()
    assert peer.available() is None
    case = Case("", 2, 4, 2, 70, 70, 16, 16, causal=causal)
    assert peer.rejects(case, dtype, "backward") is None
    sets = data.sets_of(case, dtype, np)
    assert len(sets) > 1
    calls = [
        (direction, inputs, peer.prepare(case, direction, inputs))
        for inputs in sets
        for direction in ("forward", "backward")
    ]
    for direction, inputs, call in calls:  # later sets of inputs have not moved earlier ones
        want = verify.expected(case, inputs, np)
        for _ in range(2):
            found = verify.errors(case, direction, call.read(call.run()), want, np)
            assert not verify.wrong(found, dtype), found
    assert frontend.streams


def test_one_length_and_one_dtype_of_head_sizes_by_8(frontend: Any) -> None:
    peer = CudnnFrontend()
    good = Case("", 1, 4, 4, 64, 64, 64, 64, causal=True)
    assert peer.rejects(good, "float16", "forward") is None
    for changes in ({"head_dim": 60}, {"head_dim": 264}, {"softcap": 1.0}, {"seqlen_q": 32}):
        assert peer.rejects(Case(**{**vars(good), **changes}), "float16", "forward")
    assert peer.rejects(good, "float32", "forward") == "no float32"


def test_what_is_missing_is_said(frontend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise RuntimeError("Unable to find symbol cudnnGetVersion")

    def no_gpu() -> Any:
        raise RuntimeError("no\nGPU")

    frontend.create_handle = no_gpu
    assert CudnnFrontend().available() == "RuntimeError: no GPU"
    frontend.backend_version = missing
    reason = CudnnFrontend().available()
    assert reason == "no libcudnn.so.9: install torch or nvidia-cudnn-cu13"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert CudnnFrontend().available() == "nvidia-cudnn-frontend is not installed"
