# SPDX-License-Identifier: Apache-2.0
"""The arguments of a call, in one record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..reference_arguments import ARRAYS, DEFAULTS

__all__ = ["Inputs", "host"]


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arguments of one call, NumPy or CuPy arrays.

    With ``cu_seqlens_q`` and ``cu_seqlens_k`` it is a call on packed sequences.

    Attributes
    ----------
    q, k, v : array
        As `cuflash.attention` takes them.
    dout, dlse : array or None
        Gradients of the loss with respect to out and lse. Without ``dout`` there is no backward,
        and without ``dlse`` the loss does not use lse.
    scale, causal, window, layout, softcap, bias, mask, alibi_slopes, sinks, dropout_p, seed
        As `cuflash.attention` takes them; ``options`` has those that are used, by name.
    cu_seqlens_q, cu_seqlens_k : array or None
        As `cuflash.attention_varlen` takes them; ``cu_seqlens`` is both, or empty.
    """

    q: Any
    k: Any
    v: Any
    dout: Any = None
    dlse: Any = None
    scale: float | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    layout: str = "bshd"
    softcap: float = 0.0
    bias: Any = None
    mask: Any = None
    alibi_slopes: Any = None
    sinks: Any = None
    dropout_p: float = 0.0
    seed: int | None = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that both passes take; of those from softcap on, the given ones."""
        found = {name: getattr(self, name) for name in ("scale", "causal", "window", "layout")}
        for name, default in DEFAULTS.items():
            x = getattr(self, name)
            is_used = x is not None if default is None else bool(x)
            if is_used:
                found[name] = x
        return found

    @property
    def cu_seqlens(self) -> tuple[Any, ...]:
        """Both arrays of offsets, which follow v in a call; nothing if it is not a packed one."""
        return () if self.cu_seqlens_q is None else (self.cu_seqlens_q, self.cu_seqlens_k)

    @property
    def dtype(self) -> np.dtype:
        """That of q, k and v."""
        return host(self.q).dtype

    def moved(self, move: Callable[[Any], Any]) -> Inputs:
        """Return the same call with each of its arrays replaced by what a function makes of it.

        ``inputs.moved(cupy.asarray)`` is the call on a GPU.
        """
        names = ("q", "k", "v", "dout", "dlse", *ARRAYS, "cu_seqlens_q", "cu_seqlens_k")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return replace(self, **{name: move(x) for name, x in given.items()})


def host(x: Any) -> np.ndarray:
    """Return a NumPy or CuPy array as a NumPy array."""
    return np.asarray(x.get() if hasattr(x, "get") else x)
