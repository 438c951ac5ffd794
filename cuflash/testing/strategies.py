# SPDX-License-Identifier: Apache-2.0
"""The hypothesis strategy that draws whole calls, field by field, so that failures shrink."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..ahead import read_features
from ..dtypes import DTYPES
from .cases import VALUES, VIEWS, Case, arrays_of, numpy_dtype
from .inputs import Inputs

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["problems"]

_VALUES = tuple(name for name in VALUES if name != "far")  # which asks for other fields to fit
_LAYOUTS = ("bshd", "bhsd")


def problems(
    *,
    dtypes: Sequence[str] = ("float32", "float16"),
    head_dims: Sequence[int] = (16,),
    max_length: int = 80,
    options: Iterable[str] = (),
    causal: bool | None = None,
    same_lengths: bool = False,
    layouts: Sequence[str] = _LAYOUTS,
    strides: bool = True,
    values: Sequence[str] = _VALUES,
) -> SearchStrategy[Inputs]:
    """Return a hypothesis strategy that draws problems: the arguments of whole attention calls.

    Drawn are dtype, batch (also none), heads and how many of them share a key head, lengths, head
    sizes, scale, window, layout, strides, any set of the options named, and values. The arrays are
    NumPy arrays, for the CPU back end; ``inputs.moved(cupy.asarray)`` takes them to a GPU. A
    problem that fails shrinks to a small one, which hypothesis prints as ``arrays_of(Case(...))``.

    Parameters
    ----------
    dtypes : sequence of {"float16", "bfloat16", "float32", "float64"}
        bfloat16 needs the package ml_dtypes.
    head_dims : sequence of int
        Sizes that q and k have, and v by itself. Each size may need kernels of its own, which take
        some seconds to compile the first time.
    max_length : int
        Queries and keys are 0 to so many; those of packed entries, in all.
    options : iterable of str
        The options that may be drawn, by the names of `cuflash.attention`'s arguments: "softcap",
        "bias", "mask", "alibi_slopes", "sinks", "dropout_p"; "packed" draws ``cu_seqlens_q`` and
        ``cu_seqlens_k``. A problem has any set of them.
    causal : bool, optional
        Draw only calls that are causal, or only ones that are not.
    same_lengths : bool
        As many keys as queries, as in self-attention; of packed arrays, as many in all.
    layouts : sequence of {"bshd", "bhsd"}
        The layouts to draw from.
    strides : bool
        Whether q, k, v and dout may be views: transposed, reversed, inside of larger arrays that
        are NaN around them, with heads that share memory, and so on.
    values : sequence of str
        What elements are like: "normal", "positive mean", "peaked" (few keys get all the weight),
        "large", "growing" (maxima grow from key to key), and "poison": NaN and infinity where
        nobody looks, and where some queries do.

    Returns
    -------
    SearchStrategy of Inputs
        See `Inputs`.

    Raises
    ------
    ImportError
        hypothesis is not installed.
    ValueError
        An argument does not fit; the message names it.

    Examples
    --------
    >>> import cuflash
    >>> from hypothesis import given, settings
    >>> from cuflash import testing
    >>> @settings(deadline=None)  # the first call of a kind compiles
    ... @given(testing.problems(options=("sinks", "alibi_slopes")))
    ... def test_forward(x):
    ...     out, lse = cuflash.attention(x.q, x.k, x.v, **x.options, return_lse=True)
    ...     testing.check_forward(out, lse, x)
    """
    st = _hypothesis()
    for name, given, known in (
        ("dtypes", dtypes, DTYPES),
        ("layouts", layouts, _LAYOUTS),
        ("values", values, _VALUES),
    ):
        if isinstance(given, str) or not given or not set(given) <= set(known):
            raise ValueError(f"{name}: expected some of {', '.join(known)}, got {given!r}")
    if max_length < 0:
        raise ValueError(f"max_length: expected 0 or more, got {max_length}")
    if not head_dims or not all(1 <= size <= 512 for size in head_dims):
        raise ValueError(f"head_dims: expected sizes from 1 to 512, got {head_dims!r}")
    features = read_features(options)
    for name in dtypes:
        numpy_dtype(name)
    lengths, sides = st.integers(0, max_length), st.integers(-1, max_length)
    views = st.sampled_from(VIEWS if strides else VIEWS[:1])

    @st.composite
    def cases(draw: Any) -> Case:
        used = tuple(name for name in features if draw(st.booleans()))
        packed = "packed" in used
        seqlen_q = draw(lengths)
        return Case(
            dtype=draw(st.sampled_from(dtypes)),
            batch=None if packed else draw(st.sampled_from([None, 1, 2])),
            heads_kv=draw(st.integers(1, 2)),
            group=draw(st.integers(1, 3)),
            seqlen_q=seqlen_q,
            seqlen_kv=seqlen_q if same_lengths else draw(lengths),
            head_dim=draw(st.sampled_from(head_dims)),
            head_dim_v=draw(st.sampled_from(head_dims)),
            causal=draw(st.booleans()) if causal is None else causal,
            window=draw(st.just((-1, -1)) | st.tuples(sides, sides)),
            scale=draw(st.sampled_from([None, 1.0, 0.3, -0.2])),
            layout=draw(st.sampled_from(layouts)),
            views=draw(st.tuples(views, views, views, views)),
            values=draw(st.sampled_from(values)),
            with_dlse=draw(st.booleans()),
            seed=draw(st.integers(0, 10**6)),
            schedule=0,
            options=used,
            entries=draw(st.integers(0, 4)) if packed else 1,
        )

    return cases().map(arrays_of)


def _hypothesis() -> Any:
    try:
        from hypothesis import strategies
    except ImportError as error:
        raise ImportError(
            "cuflash.testing.problems draws with hypothesis, which is not installed: "
            "`pip install hypothesis`"
        ) from error
    return strategies
