# SPDX-License-Identifier: Apache-2.0
"""The public functions: signatures, documentation, and a few lines each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import arrays, launch
from .arrays import View
from .gradients import Gradients
from .problem import Arrays, Destinations, Problem, read, read_backward, read_flag

__all__ = ["attention", "attention_backward", "attention_vjp"]


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    layout: str = "bshd",
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """Exact attention, ``softmax(scale * q @ k.T) @ v`` for each batch entry and head.

    The matrix of scores is never stored: memory grows with the length, not with its square.

    Parameters
    ----------
    q : array, shape (batch, seqlen_q, heads_q, head_dim) or (seqlen_q, heads_q, head_dim)
        Queries: a CuPy array, which runs on its GPU, or a NumPy array, which runs on the CPU
        back end; any array with DLPack or ``__cuda_array_interface__`` comes in without a copy.
        float16, bfloat16 (of ``ml_dtypes``), float32 or float64; any strides, also zero and
        negative. Three axes mean *no batch*: (batch, seqlen, head_dim) of a single head must be
        passed as ``q[:, :, None]``.
    k : array, shape (batch, seqlen_kv, heads_kv, head_dim) or without batch
        Keys, of q's dtype. `heads_q` must be a multiple of `heads_kv`: query head ``h`` reads key
        head ``h // (heads_q // heads_kv)``.
    v : array, shape (batch, seqlen_kv, heads_kv, head_dim_v) or without batch
        Values, of q's dtype. `head_dim` and `head_dim_v` may be anything from 1 to 512.
    scale : float, optional
        Factor of the scores; ``1 / sqrt(head_dim)`` by default.
    causal : bool
        Hide later keys. Query ``i`` stands at position ``p = i + seqlen_kv - seqlen_q`` and sees
        the keys ``j <= p``: the last query sees all keys, whatever the lengths.
    window : (int, int)
        Query ``i`` sees keys ``p - left <= j <= p + right``, both ends included; -1 is no limit.
        Joins `causal` by "and".
    layout : {"bshd", "bhsd"}
        "bhsd" if arrays are (batch, heads, seqlen, dim) or (heads, seqlen, dim).
    return_lse : bool
        Also return the logarithm of the sum of exponentials of each row of scores.
    out : array, or (array or None, array or None) with `return_lse`, optional
        Where to write the result(s): the result's shape and dtype, no memory shared with an input.

    Returns
    -------
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v) or without batch
        Of q's dtype, in q's layout. 0 in rows that see no key.
    lse : array, shape (batch, heads_q, seqlen_q) or (heads_q, seqlen_q)
        Only with `return_lse`. Natural logarithm, float32 (float64 for float64 inputs); -inf in
        rows that see no key.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it. Raised before anything runs.
    RuntimeError
        No usable GPU, NVRTC or C++ compiler; the message says what to install.

    Notes
    -----
    Sums, exponentials and products are computed in float32 (float64 for float64) and rounded once.
    Keys that no query of their head group can see never matter, not even as NaN or infinity. The
    same call gives the same bits.

    The algorithm is FlashAttention-2 (Dao, 2023, arXiv:2307.08691) over the online softmax of
    Milakov and Gimelshein (2018, arXiv:1805.02867).

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 100, 8, 64), np.float32)
    >>> cuflash.attention(q, k, v, causal=True).shape
    (1, 100, 8, 64)
    """
    problem, inputs = read(q, k, v, scale, causal, window, layout)
    want_lse = read_flag("return_lse", return_lse)
    result, lse = _forward(problem, inputs, want_lse, out)
    if lse is None:
        return _given(out, result)
    to_out, to_lse = out if isinstance(out, tuple) else (out, None)
    return _given(to_out, result), _given(to_lse, lse)


def attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    layout: str = "bshd",
    return_lse: bool = False,
) -> tuple[Any, ...]:
    """Attention, and the function that pulls gradients back through it.

    Parameters are those of `attention`.

    Returns
    -------
    out : array
        As from `attention`.
    lse : array
        Only with `return_lse`, as from `attention`.
    vjp : callable
        ``vjp(dout, *, dlse=None, out=None, workspace=None)`` returns the `Gradients` of
        ``sum(out * dout)`` (plus ``sum(lse * dlse)``), as `attention_backward` does. It keeps q, k,
        v, out and lse, not copies of them, and may be called any number of times: what is written
        into those arrays before (``out += x``) changes the gradients.

    Examples
    --------
    >>> out, vjp = cuflash.attention_vjp(q, k, v, causal=True)
    >>> dq, dk, dv = vjp(dout)
    """
    problem, inputs = read(q, k, v, scale, causal, window, layout)
    want_lse = read_flag("return_lse", return_lse)
    result, lse = _forward(problem, inputs, True, None)
    assert lse is not None

    def vjp(dout: Any, *, dlse: Any = None, out: Any = None, workspace: Any = None) -> Gradients:
        all_inputs = read_backward(problem, inputs, dout, result, lse, dlse)
        return _backward(problem, all_inputs, out, workspace)

    function: Callable[..., Gradients] = vjp
    if want_lse:
        return result.array, lse.array, function
    return result.array, function


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    output: Any,
    lse: Any,
    *,
    dlse: Any = None,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    layout: str = "bshd",
    out: tuple[Any, Any, Any] | None = None,
    workspace: Any = None,
) -> Gradients:
    """Gradients of attention with respect to q, k and v.

    Probabilities are recomputed from `lse`, so nothing else need be kept from the forward.

    Parameters
    ----------
    dout : array, of the shape and dtype of `output`
        Gradient of the loss with respect to the output.
    q, k, v : array
        The arguments of the forward call.
    output, lse : array
        What ``attention(..., return_lse=True)`` returned for these very q, k, v and options. The
        gradients of anything else are wrong, and nothing can tell: shapes are all that is checked.
    dlse : array, of the shape and dtype of `lse`, optional
        Gradient of the loss with respect to lse. Ignored in rows that see no key.
    scale, causal, window, layout
        As in the forward call.
    out : (array or None, array or None, array or None), optional
        Where to write dq, dk and dv: arrays of the shapes and dtypes of q, k and v that share no
        memory with an input nor with each other.
    workspace : array, one-dimensional and contiguous, of dtype uint8, optional
        Scratch memory that the caller owns, for CUDA graphs that are captured in numbers: scratch
        that a call takes while it is captured is otherwise never given back. An array that is too
        small raises an error that says how many bytes are needed.

    Returns
    -------
    Gradients
        ``dq``, ``dk`` and ``dv``; ``dq, dk, dv = ...`` unpacks them.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `attention`.

    Notes
    -----
    With ``P = exp(score - lse)`` and ``delta[i] = sum_d dout[i, d] * output[i, d]``::

        dv = P.T @ dout    dP = dout @ v.T    dscore = P * (dP - delta[:, None] + dlse[:, None])
        dq = scale * dscore @ k               dk = scale * dscore.T @ q

    (Dao et al., 2022, arXiv:2205.14135, section B.2). All sums have a fixed order: the same call
    gives the same bits. Grouped heads are summed in float32 (float64 for float64), rounded once.
    """
    problem, inputs = read(q, k, v, scale, causal, window, layout)
    inputs = read_backward(problem, inputs, dout, output, lse, dlse)
    return _backward(problem, inputs, out, workspace)


def _forward(
    problem: Problem, inputs: Arrays, want_lse: bool, out: Any
) -> tuple[View, View | None]:
    p, layout = problem, inputs.layout
    to_out, to_lse = out if want_lse and isinstance(out, tuple) and len(out) == 2 else (out, None)
    if isinstance(to_out, tuple):
        raise TypeError(
            "out: expected one array, or a pair (out, lse) together with return_lse=True, "
            f"got a tuple of {len(to_out)}"
        )
    to = Destinations(inputs)
    with arrays.on(inputs.device):
        shape = layout.shape(p.batch, p.seqlen_q, p.heads_q, p.head_dim_v)
        result = to.result("out", to_out, shape, inputs.q.dtype)
        lse = None
        if want_lse:
            rows = layout.row_shape(p.batch, p.heads_q, p.seqlen_q)
            lse = to.result("lse of out", to_lse, rows, p.dtype.accum)
        launch.forward(problem, inputs, result, lse)
    return result, lse


def _backward(problem: Problem, inputs: Arrays, out: Any, workspace: Any) -> Gradients:
    if out is None:
        out = (None, None, None)
    if not isinstance(out, (tuple, list)) or len(out) != 3:
        raise TypeError(f"out: expected (dq, dk, dv), got {type(out).__name__}")
    to = Destinations(inputs)
    with arrays.on(inputs.device):
        dq, dk, dv = (
            to.result(name, given, x.shape, x.dtype)
            for name, given, x in zip(_GRADIENTS, out, inputs[2:5], strict=True)
        )
        if workspace is not None:
            workspace = to.workspace(workspace, launch.workspace_bytes(problem))
        launch.backward(problem, inputs, dq, dk, dv, workspace)
    return Gradients(*(_given(given, x) for given, x in zip(out, (dq, dk, dv), strict=True)))


_GRADIENTS = ("dq of out", "dk of out", "dv of out")


def _given(given: Any, result: View) -> Any:
    """Return the very object that the caller gave, as NumPy does, or the new array."""
    return result.array if given is None else given
