# SPDX-License-Identifier: Apache-2.0
"""What a type checker knows of the package: never run, but checked against an installed wheel.

``.ci/package`` runs pyright in strict mode, in which a comment that ignores no error is an error.
Arrays are of type Any: they may come from any library.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

import cuflash

if TYPE_CHECKING:
    from typing_extensions import assert_type


def forward(q: Any, k: Any, v: Any) -> None:
    assert_type(cuflash.__version__, str)
    assert_type(cuflash.attention(q, k, v), Any)
    out, lse = cuflash.attention(q, k, v, causal=True, window=(128, -1), return_lse=True)
    cuflash.attention(q, k, v, scale=None, softcap=30, layout="bhsd", out=(out, lse))
    cuflash.attention(q, k, v, bias=q, mask=k, alibi_slopes=v, sinks=v, dropout_p=0.1, seed=5)
    assert_type(cuflash.merge_states([out, out], [lse, lse]), tuple[Any, Any])


def gradients(q: Any, k: Any, v: Any, dout: Any) -> None:
    out, vjp = cuflash.attention_vjp(q, k, v, causal=True)
    dq, dk, dv = vjp(dout)
    out, lse, vjp = cuflash.attention_vjp(q, k, v, return_lse=True)
    grads = cuflash.attention_backward(dout, q, k, v, out, lse, wrt=("q", "bias"), out=(dq, dk, dv))
    assert_type(grads, cuflash.Gradients)
    assert_type(grads.dbias, Any)
    dq, dk, dv = grads
    grads.dq = dq  # pyright: ignore[reportAttributeAccessIssue]


def packed(q: Any, k: Any, v: Any, dout: Any, offsets: Any) -> None:
    out, lse = cuflash.attention_varlen(q, k, v, offsets, offsets, return_lse=True)
    grads = cuflash.attention_varlen_backward(
        dout, q, k, v, out, lse, offsets, offsets, deterministic=False
    )
    assert_type(grads, cuflash.Gradients)


def in_numpy() -> None:
    q = np.zeros((3, 2, 8), np.float32)
    difference = cuflash.attention(q, q, q) - cuflash.reference.attention(q, q, q)
    assert_type(abs(difference).max(), Any)
    assert_type(cuflash.reference.attention_backward(q, q, q, q), cuflash.Gradients)
    out, lse = cuflash.reference.attention(q, q, q, return_lse=True)
    merged, _ = cuflash.reference.merge_states([out], [lse])
    assert_type(merged.shape, tuple[Any, ...])


def mistakes(q: Any, k: Any, v: Any) -> None:
    cuflash.attention(q, k)  # pyright: ignore[reportCallIssue]
    cuflash.attention(q, k, v, True)  # pyright: ignore[reportCallIssue]
    cuflash.attention(q, k, v, casual=True)  # pyright: ignore[reportCallIssue]
    cuflash.attention(q, k, v, causal="yes")  # pyright: ignore[reportArgumentType]
    cuflash.attention(q, k, v, window=128)  # pyright: ignore[reportArgumentType]
    cuflash.attention_vjp(q, k, v, out=q)  # pyright: ignore[reportCallIssue]
    cuflash.flash(q, k, v)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
