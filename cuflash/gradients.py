# SPDX-License-Identifier: Apache-2.0
"""The record of gradients that the backward functions return."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["Gradients"]


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients of an attention call.

    Iterating gives ``dq, dk, dv`` and nothing else, so ``dq, dk, dv = grads`` works whatever the
    call's options, and keeps working when later versions add fields. Where the call's ``wrt``
    leaves out an argument, its gradient is None.

    Attributes
    ----------
    dq, dk, dv : array
        Gradients of the loss with respect to ``q``, ``k`` and ``v``, each with the shape and the
        dtype of its argument.
    dbias, dsinks : array or None
        The same for ``bias`` and ``sinks``; None in a call that has no such argument.
    """

    dq: Any
    dk: Any
    dv: Any
    dbias: Any = None
    dsinks: Any = None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.dq, self.dk, self.dv))
