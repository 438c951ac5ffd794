# SPDX-License-Identifier: Apache-2.0
"""Options together: every pair in both passes, and none of them in the code of a call without."""

from __future__ import annotations

import itertools
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tally
from check import check_backward, check_forward
from conftest import Backend
from matrix import ARCHITECTURES, shipped
from run import both, on
from strategies import Case, arrays_of

import cuflash
from cuflash import compile, source
from cuflash.dtypes import DTYPES
from cuflash.plan import ForwardSimt, KernelPlan
from cuflash.problem import FEATURES

#: All that a call can ask for, as it is written in a Case.
SETTINGS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (25, 9)},
    "scale": {"scale": -0.2},
    "grouped heads": {"group": 3},
    "Sq != Sk": {"seqlen_q": 50},
    "Dv != D": {"head_dim_v": 12},
    "bhsd": {"layout": "bhsd"},
    "strides": {"views": ("every other", "inside", "reversed", "offset")},
    "dlse": {"with_dlse": True},
    "no batch": {"batch": None},
    **{name: {"options": (name,)} for name in FEATURES},
}
SETTINGS["packed"] |= {"batch": None, "entries": 3}
PAIRS = list(itertools.combinations_with_replacement(SETTINGS, 2))


def case_of(names: tuple[str, ...], dtype: str) -> Case:
    fields: dict[str, Any] = dict(
        dtype=dtype, batch=2, heads_kv=2, group=1, seqlen_q=70, seqlen_kv=70, head_dim=16,
        head_dim_v=16, causal=False, window=(-1, -1), scale=None, layout="bshd",
        views=("contiguous",) * 4, values="normal", with_dlse=False, seed=1, schedule=0,
    )  # fmt: skip
    options: tuple[str, ...] = ()
    for name in names:
        options += SETTINGS[name].get("options", ())
        fields |= SETTINGS[name]
    fields["options"] = tuple(name for name in FEATURES if name in options)
    return Case(**fields)


@pytest.mark.parametrize("number", range(len(PAIRS)), ids=[" and ".join(pair) for pair in PAIRS])
def test_every_pair_of_options_agrees(backend: Backend, number: int) -> None:
    """In one dtype each; every option meets every dtype. The summary prints the table of pairs."""
    pair = PAIRS[number]
    dtype = list(DTYPES)[(number + number // len(SETTINGS)) % len(DTYPES)]
    inputs = arrays_of(case_of(pair, dtype))
    column, row = pair
    out, lse, grads = both(on(backend, inputs))
    check_forward(out, lse, inputs)
    tally.pair(backend.name, row, column, "forward")
    check_backward(grads, inputs)
    tally.pair(backend.name, row, column, "backward")


@pytest.mark.parametrize("dtype", DTYPES)
def test_everything_at_once(backend: Backend, dtype: str) -> None:
    for packed in (False, True):
        inputs = arrays_of(
            case_of(tuple(n for n in SETTINGS if packed or n not in ("packed", "no batch")), dtype)
        )
        out, lse, grads = both(on(backend, inputs))
        check_forward(out, lse, inputs)
        check_backward(grads, inputs)


# --- what an option costs where it is off --------------------------------------------------------


def without(text: str, constant: str) -> str:
    """Return a source without the code of an option: `if constexpr (plan::kIt) a` is gone."""
    opening = re.compile(rf"if constexpr \(plan::{constant}\) ")
    while found := opening.search(text):
        start = end = found.end()
        depth = 0
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0 and text[end] in ";}":
                break
        text = text[: found.start()] + text[end + 1 :]
    # Asked together with something else.
    return re.sub(rf"plan::{constant}(?= \|\|| &&|[;),])", "false", text)


def machine_code(image: bytes) -> dict[str, bytes]:
    """Return the sections of a cubin that hold instructions and constants."""
    (start,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<3H", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, start + i * size) for i in range(count)]
    at = headers[names][4]
    found = {}
    for name, _, _, _, offset, length in headers:
        label = image[at + name : image.index(b"\0", at + name)].decode()
        if label.startswith((".text.", ".nv.constant")):
            found[label] = image[offset : offset + length]
    return found


def plain_kernels() -> list[KernelPlan]:
    row = shipped("float32", 64, 64, ARCHITECTURES["sm_90"])
    return [plan for plan in (*row.forward, *row.backward) if plan.kernel != "delta"]


@pytest.mark.parametrize("plan", plain_kernels(), ids=lambda plan: plan.kernel)
def test_an_option_that_is_off_leaves_no_trace(
    plan: KernelPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of each option is cut out of the sources: the machine code stays the same."""
    where = ARCHITECTURES["sm_90"]
    text = compile.translation_unit(plan, cpu=False)
    want = machine_code(compile.compile_cubin(text, plan, where)[0])
    assert any(name == f".text.{plan.kernel}" and code for name, code in want.items())
    root = tmp_path / "kernels"
    shutil.copytree(source.KERNEL_ROOT, root)
    monkeypatch.setattr(source, "KERNEL_ROOT", root)
    for feature in FEATURES:
        constant, cut = f"k{feature.title()}", 0
        for path in [*root.rglob("*.cuh"), *root.rglob("*.cu")]:
            before = path.read_text("utf-8")
            after = without(before, constant)
            cut += before != after
            path.write_text(after, "utf-8")
            assert constant not in re.sub(r"//.*", "", after), f"{path.name} asks in another way"
        assert cut, f"no code of {feature} was found"
        assert machine_code(compile.compile_cubin(text, plan, where)[0]) == want, feature


def test_an_option_that_is_on_changes_the_code() -> None:
    """Or the comparison above would compare nothing."""
    where = ARCHITECTURES["sm_90"]
    plain, other = (
        shipped("float32", 64, 64, where, options).forward[0] for options in ((), ("bias",))
    )
    assert isinstance(plain, ForwardSimt) and plain != other
    codes = [
        machine_code(compile.compile_cubin(compile.translation_unit(p, cpu=False), p, where)[0])
        for p in (plain, other)
    ]
    assert codes[0] != codes[1]


def test_gradients_of_scores_are_those_of_finite_differences(backend: Backend) -> None:
    """dbias, dsinks and dlse, with softcap, mask and dropout, along a random direction."""
    case = case_of(("dlse", *FEATURES[:-1], "causal"), "float64")
    inputs = arrays_of(case)
    rng = np.random.default_rng(3)
    hidden = np.isneginf(inputs.bias)

    def loss(**changed: np.ndarray) -> float:
        arrays = {"bias": inputs.bias, "sinks": inputs.sinks, **changed}
        i = on(backend, inputs)
        options = {**i.options, **{name: backend.array(x) for name, x in arrays.items()}}
        out, lse = cuflash.attention(i.q, i.k, i.v, return_lse=True, **options)
        seen = np.isfinite(backend.host(lse))
        total = np.sum(backend.host(out) * inputs.dout)
        return float(total + np.sum(np.where(seen, backend.host(lse), 0) * inputs.dlse))

    grads = both(on(backend, inputs))[2]
    for name in ("bias", "sinks"):
        x = getattr(inputs, name)
        direction = rng.standard_normal(x.shape)
        if name == "bias":
            direction[hidden] = 0
        step = 1e-5
        there, back = (loss(**{name: x + sign * step * direction}) for sign in (1, -1))
        slope = np.sum(backend.host(getattr(grads, f"d{name}")) * direction)
        assert (there - back) / (2 * step) == pytest.approx(slope, rel=1e-6, abs=1e-6)
