# SPDX-License-Identifier: Apache-2.0
"""The public functions: signatures, documentation, and a few lines each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import calls, checks
from .gradients import Gradients
from .merge import read_merge
from .options import read_options
from .packed import read_packed
from .problem import read, read_backward

__all__ = [
    "attention",
    "attention_backward",
    "attention_varlen",
    "attention_varlen_backward",
    "attention_vjp",
    "merge_states",
]


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    layout: str = "bshd",
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """Exact attention, ``softmax(scale * q @ k.T) @ v`` for each batch entry and head.

    The matrix of scores is never stored: memory grows with the length, not with its square. All
    options go together, in both passes.

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
    softcap : float
        If positive, scores become ``softcap * tanh(score / softcap)``, before all that follows.
    bias : array, shape (seqlen_q, seqlen_kv) or (batch, heads_q, seqlen_q, seqlen_kv), optional
        Added to the scores, whatever the layout; any axis may have length 1, for all. Of q's dtype
        or float32 (float64 for float64). A bias of -inf hides the key.
    mask : array of bool, of the shapes of `bias`, optional
        True where the query sees the key. Joins `causal` and `window` by "and". One of padding,
        (batch, seqlen_kv), goes in as ``mask[:, None, None]``.
    alibi_slopes : array, shape (heads_q,) or (batch, heads_q), optional
        ``slope * abs(p - j)`` is subtracted from the scores. float32 (float64 for float64).
    sinks : array, shape (heads_q,), optional
        A score of each head that takes part in the softmax, and in lse, but has no value:
        ``exp(sink)`` joins the denominator. float32 (float64 for float64).
    dropout_p : float
        Probabilities are set to 0 with this probability after the softmax, and the others
        multiplied by ``1 / (1 - dropout_p)``; lse does not change.
    seed : int, or array of one int64 or uint64
        Decides what `dropout_p` drops: a pure function of (seed, batch, head, i, j), the same on
        every device (`cuflash.reference.dropout_keep`). An array on the GPU is read there, so that
        a replayed CUDA graph can draw anew.
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
        Only with `return_lse`. Natural logarithm, float32 (float64 for float64 inputs); in rows
        that see no key -inf, or the sink.

    Raises
    ------
    TypeError, ValueError
        An argument does not fit; the message names it. Raised before anything runs.
    RuntimeError
        No usable GPU, NVRTC or C++ compiler; the message says what to install.

    Notes
    -----
    Sums, exponentials and products are computed in float32 (float64 for float64), and results are
    rounded once. On tensor cores probabilities are factors, and as such rounded to the dtype. Keys
    that no query of their head group can see never matter, not even as NaN or infinity. The
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
    options = (softcap, bias, mask, alibi_slopes, sinks, dropout_p, seed)
    problem, inputs = read_options(*read(q, k, v, scale, causal, window, layout), *options)
    want_lse = checks.flag("return_lse", return_lse)
    return calls.results(*calls.forward(problem, inputs, want_lse, out), out)


def attention_vjp(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
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
        ``vjp(dout, *, dlse=None, wrt=None, out=None, workspace=None, deterministic=True)`` returns
        the `Gradients` of ``sum(out * dout)`` (plus ``sum(lse * dlse)``), as `attention_backward`
        does. It keeps q, k, v, the options' arrays, out and lse, not copies of them, and may be
        called any number of times: what is written into those arrays before (``out += x``) changes
        the gradients.

    Examples
    --------
    >>> out, vjp = cuflash.attention_vjp(q, k, v, causal=True)
    >>> dq, dk, dv = vjp(dout)
    """
    options = (softcap, bias, mask, alibi_slopes, sinks, dropout_p, seed)
    problem, inputs = read_options(*read(q, k, v, scale, causal, window, layout), *options)
    want_lse = checks.flag("return_lse", return_lse)
    result, lse = calls.forward(problem, inputs, True, None)
    assert lse is not None

    def vjp(
        dout: Any,
        *,
        dlse: Any = None,
        wrt: Any = None,
        out: Any = None,
        workspace: Any = None,
        deterministic: bool = True,
    ) -> Gradients:
        all_inputs = read_backward(problem, inputs, dout, result, lse, dlse)
        return calls.backward(problem, all_inputs, wrt, out, workspace, deterministic)

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
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    layout: str = "bshd",
    wrt: Any = None,
    out: tuple[Any, ...] | None = None,
    workspace: Any = None,
    deterministic: bool = True,
) -> Gradients:
    """Gradients of attention with respect to q, k, v, bias and sinks.

    Probabilities are recomputed from `lse`, so nothing else need be kept from the forward.

    Parameters
    ----------
    dout : array, of the shape and dtype of `output`
        Gradient of the loss with respect to the output.
    q, k, v : array
        The arguments of the forward call.
    output, lse : array
        What ``attention(..., return_lse=True)`` returned for these very q, k, v and options, or
        `merge_states` for these and further keys. The gradients of anything else are wrong, and
        nothing can tell: shapes are all that is checked.
    dlse : array, of the shape and dtype of `lse`, optional
        Gradient of the loss with respect to lse. In rows that see no key it reaches `sinks` alone.
    scale, causal, window, softcap, bias, mask, alibi_slopes, sinks, dropout_p, seed, layout
        As in the forward call.
    wrt : sequence of {"q", "k", "v", "bias", "sinks"}, optional
        The gradients that are wanted; by default those of all arrays that the call has. What is not
        wanted is None. The gradient of a bias of full shape is as large as the matrix of scores,
        and a backward with it was measured to take about twice as long as a plain one.
    out : tuple of (array or None), optional
        Where to write dq, dk, dv and, if it goes on, dbias and dsinks: arrays of the shapes and
        dtypes of q, k, v, bias and sinks that share no memory with an input nor with each other.
    workspace : array, one-dimensional and contiguous, of dtype uint8, optional
        Scratch memory that the caller owns, for CUDA graphs that are captured in numbers: scratch
        that a call takes while it is captured is otherwise never given back. An array that is too
        small raises an error that says how many bytes are needed.
    deterministic : bool
        If True, the same call gives the same bits. If False, parts of dq may be added up in any
        order, so that its last bits may differ from call to call, where kernels can save time that
        way: on tensor cores. Those for float32, float64 and head sizes over 256, and Hopper's for
        head sizes over 128 without options other than sinks and packing, compute as ever.

    Returns
    -------
    Gradients
        ``dq``, ``dk``, ``dv``, ``dbias`` and ``dsinks``; ``dq, dk, dv = ...`` unpacks the first.
        ``dbias`` has the shape and dtype of `bias`: it is summed over the axes that `bias` has
        once, which is a reason to keep a bias of many terms in float32.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `attention`.

    Notes
    -----
    With ``P = exp(score - lse)``, ``D = kept / (1 - dropout_p)`` (1 without dropout), ``delta[i] =
    sum_d dout[i, d] * output[i, d]`` and ``slope = 1 - tanh(...)**2`` of `softcap` (or 1)::

        dP = D * (dout @ v.T)             dscore = P * (dP - delta[:, None] + dlse[:, None])
        dv = (D * P).T @ dout             dbias = dscore
        dq = scale * slope * dscore @ k   dk = scale * (slope * dscore).T @ q
        dsinks = sum over b and i of exp(sink - lse) * (dlse - delta)

    (Dao et al., 2022, arXiv:2205.14135, section B.2). All sums have a fixed order, unless
    `deterministic` is False: the same call gives the same bits. Grouped heads are summed in float32
    (float64 for float64), rounded once.
    """
    options = (softcap, bias, mask, alibi_slopes, sinks, dropout_p, seed)
    problem, inputs = read_options(*read(q, k, v, scale, causal, window, layout), *options)
    inputs = read_backward(problem, inputs, dout, output, lse, dlse)
    return calls.backward(problem, inputs, wrt, out, workspace, deterministic)


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    layout: str = "bshd",
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """Attention of sequences that lie packed one behind the other, each within itself.

    No padding is computed, and nothing need know the longest sequence.

    Parameters
    ----------
    q : array, shape (total_q, heads_q, head_dim), or (heads_q, total_q, head_dim) for "bhsd"
        Queries of all entries.
    k, v : array, shape (total_kv, heads_kv, head_dim) and (total_kv, heads_kv, head_dim_v)
        Keys and values of all entries.
    cu_seqlens_q, cu_seqlens_k : array of int32 or int64, shape (entries + 1,)
        Entry ``b`` is the rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1] - 1`` of q, and
        likewise of k and v; entries may be empty. NumPy arrays are checked. Arrays on the GPU are
        not read by the host: numbers that do not grow, or that lie outside the arrays, give wrong
        results, but no access outside of the arrays.
    max_seqlen_q, max_seqlen_k : int, optional
        Hints about the longest entry. They never change a result.
    scale, causal, window, softcap, sinks, dropout_p, seed, return_lse, out
        As for `attention`, in each entry by itself: query ``i`` of an entry stands at position
        ``p = i + seqlen_kv - seqlen_q`` of its own lengths, and `batch` is the entry.
    bias, mask : array, shape (queries, keys) or (entries, heads_q, queries, keys), optional
        Positions count within the entry. An axis has length 1, or at least that of the longest
        entry; what is beyond an entry is not used.
    alibi_slopes : array, shape (heads_q,) or (entries, heads_q), optional
        As for `attention`.
    layout : {"bshd", "bhsd"}
        "bhsd" if arrays are (heads, total, dim).

    Returns
    -------
    out : array, shape (total_q, heads_q, head_dim_v), or as `layout` says
        Rows before the first and behind the last entry are 0.
    lse : array, shape (heads_q, total_q)
        Only with `return_lse`; -inf in rows that belong to no entry.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `attention`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 100, 8, 64), np.float32)
    >>> cuflash.attention_varlen(q, k, v, *[np.array([0, 30, 100])] * 2, causal=True).shape
    (100, 8, 64)
    """
    options = (softcap, bias, mask, alibi_slopes, sinks, dropout_p, seed)
    offsets = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    problem, inputs = read_packed(q, k, v, *offsets, scale, causal, window, layout, *options)
    want_lse = checks.flag("return_lse", return_lse)
    return calls.results(*calls.forward(problem, inputs, want_lse, out), out)


def attention_varlen_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    output: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dlse: Any = None,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    bias: Any = None,
    mask: Any = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout_p: float = 0.0,
    seed: Any = None,
    layout: str = "bshd",
    wrt: Any = None,
    out: tuple[Any, ...] | None = None,
    workspace: Any = None,
    deterministic: bool = True,
) -> Gradients:
    """Gradients of `attention_varlen`.

    Parameters
    ----------
    dout, output, lse, dlse, wrt, out, workspace, deterministic
        As for `attention_backward`, in the shapes of `attention_varlen`.
    q, k, v, cu_seqlens_q, cu_seqlens_k, ...
        As in the forward call.

    Returns
    -------
    Gradients
        Those of `attention_backward`; 0 in rows that belong to no entry, and in elements of dbias
        that no entry uses.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `attention`.
    """
    options = (softcap, bias, mask, alibi_slopes, sinks, dropout_p, seed)
    offsets = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    problem, inputs = read_packed(q, k, v, *offsets, scale, causal, window, layout, *options)
    inputs = read_backward(problem, inputs, dout, output, lse, dlse)
    return calls.backward(problem, inputs, wrt, out, workspace, deterministic)


def merge_states(outs: Any, lses: Any, *, layout: str = "bshd", out: Any = None) -> tuple[Any, Any]:
    """Merge results over disjoint sets of keys into the result over all of them, exactly.

    For keys and values that lie in pieces: on several devices, in pages, or partly in a cache.

    Parameters
    ----------
    outs : list or tuple of arrays, shape (batch, seqlen_q, heads, dim) or (seqlen_q, heads, dim)
        The output of each part, all of one dtype, shape and place; any strides. Results of
        `attention_varlen` have three axes as well.
    lses : list or tuple of arrays, shape (batch, heads, seqlen_q) or (heads, seqlen_q)
        The logarithms of the sums of exponentials, float32 (float64 for float64), as
        ``attention(..., return_lse=True)`` returns them. If `sinks` were given, then to one part
        only: a sink must be counted once.
    layout : {"bshd", "bhsd"}
        "bhsd" if outs are (batch, heads, seqlen_q, dim) or (heads, seqlen_q, dim).
    out : (array or None, array or None), optional
        Where to write the results: their shapes and dtypes, no memory shared with an input.

    Returns
    -------
    out : array, of the shape and dtype of the outs
        ``sum_n exp(lses[n] - lse) * outs[n]``; 0 in rows where no part saw a key.
    lse : array, of the shape and dtype of the lses
        ``log(sum_n exp(lses[n]))``; -inf in rows where no part saw a key.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `attention`.

    Notes
    -----
    Sums are computed in float32 (float64 for float64), in the order of the parts, and rounded once,
    however many parts there are. A part whose weight is 0, since its lse is -inf or far below that
    of another, counts for nothing, whatever its out holds. Where an lse is NaN or +inf, out is NaN
    and lse is that.

    The gradient of a merge with respect to its lses is what the backward functions take as `dlse`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 100, 8, 64), np.float32)
    >>> parts = [slice(0, 30), slice(30, 100)]
    >>> results = [cuflash.attention(q, k[:, s], v[:, s], return_lse=True) for s in parts]
    >>> out, lse = cuflash.merge_states(*zip(*results))
    """
    problem, parts = read_merge(outs, lses, layout)
    return calls.merge(problem, parts, out)
