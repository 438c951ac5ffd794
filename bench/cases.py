# SPDX-License-Identifier: Apache-2.0
"""The calls that are timed: one table, with names and groups."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

__all__ = ["CASES", "Case", "contests", "groups", "select"]


@dataclass(frozen=True)
class Case:
    """One call of attention, for any dtype and both passes."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    bias: str = ""  # "heads": one for each head, "shared": one for all
    mask: bool = False  # random, seven of ten keys are seen
    alibi: bool = False
    sinks: bool = False
    dropout: float = 0.0
    packed: bool = False  # the batch as one packed sequence
    growing: str = ""  # "up", "down": every tile has larger scores than the one before, or behind
    beside: str = ""  # the case that this one is timed together with and compared with
    groups: tuple[str, ...] = ()

    def options(self) -> list[str]:
        """Return the options, `causal` aside, that the call has."""
        names = ("softcap", "bias", "mask", "alibi", "sinks", "dropout", "packed", "growing")
        found = [name for name in names if getattr(self, name)]
        return (["window"] if self.window != (-1, -1) else []) + found

    def rejects(self, direction: str) -> str | None:
        """Return why a pass of this call is not measured, or None.

        Where scores grow, most keys have gradients below what float32 can hold, and the zeros that
        a right result has there are wrong relative to them. Those cases are about the forward's
        maxima.
        """
        return "of a forward only" if self.growing and direction != "forward" else None

    def about(self) -> dict[str, Any]:
        """Return what a reader of a result needs: the sizes, and every option that is in use."""
        sizes = {
            *("batch", "heads", "kv_heads", "seqlen_q", "seqlen_kv", "head_dim", "head_dim_v"),
            "causal",
        }
        row: dict[str, Any] = {"case": self.name}
        for one in dataclass_fields(self):
            value = getattr(self, one.name)
            if one.name in sizes or (one.name in (*self.options(), "beside") and value):
                row[one.name] = value
        return row

    def pairs(self) -> float:
        """Return how many pairs of query and key count, for each head.

        Half of all if causal, as is the custom. Where that would be far off (a window, or two
        lengths), the pairs that are visible are counted. Masks and biases hide none here.
        """
        sq, sk = self.seqlen_q, self.seqlen_kv
        plain = self.window == (-1, -1)
        if plain and not self.causal:
            return float(sq * sk)
        if plain and sq == sk:
            return sq * sk / 2
        left, right = self.window
        right = 0 if self.causal and right != 0 else right
        total = 0
        for p in range(sk - sq, sk):
            last = sk - 1 if right < 0 else min(sk - 1, p + right)
            first = 0 if left < 0 else max(0, p - left)
            total += max(0, last - first + 1)
        return float(total)

    def flop(self, direction: str) -> float:
        """Return the floating-point operations that count: 2.5 times as many for a backward."""
        forward = 2.0 * self.batch * self.heads * self.pairs() * (self.head_dim + self.head_dim_v)
        return forward * {"forward": 1.0, "backward": 2.5}[direction]


def _square(name: str, batch: int, heads: int, seqlen: int, dim: int, **more: Any) -> Case:
    """Return a case with one length, one number of heads and one head size."""
    more = {"kv_heads": heads, "seqlen_kv": seqlen, "head_dim_v": dim, **more}
    return Case(name, batch, heads, seqlen_q=seqlen, head_dim=dim, **more)


def _grid() -> list[Case]:
    """Return 16384 tokens of 2048 numbers: the sizes that libraries publish speeds of."""
    found = []
    for dim in (64, 128, 256):
        for seqlen in (512, 1024, 2048, 4096, 8192, 16384):
            for causal in (False, True):
                mask = "causal" if causal else "full"
                name = f"d{dim}-s{seqlen}-{mask}"
                more = ["grid", f"d{dim}"]
                if dim == 128 and seqlen in (1024, 4096, 16384):
                    more.append("published")
                if dim in (64, 128) and seqlen == 4096:
                    more.append("record")
                if name in ("d64-s4096-full", "d128-s1024-full", "d128-s4096-causal"):
                    more.append("quick")
                found.append(
                    _square(
                        name,
                        16384 // seqlen,
                        2048 // dim,
                        seqlen,
                        dim,
                        causal=causal,
                        groups=tuple(more),
                    )
                )
    return found


def _grid_more() -> list[Case]:
    """Return the same of head sizes that are no powers of two, and of grouped heads."""
    found = []
    for seqlen in (1024, 4096, 16384):
        for causal in (False, True):
            name = f"s{seqlen}-{'causal' if causal else 'full'}"
            more: Any = {"causal": causal, "groups": ("grid-more",)}
            for dim in (96, 192):
                sizes = (16384 // seqlen, 2048 // dim, seqlen, dim)
                found.append(_square(f"grid-d{dim}-{name}", *sizes, **more))
            sizes = (16384 // seqlen, 32, seqlen, 128)
            found.append(_square(f"grid-d128-kv8-{name}", *sizes, kv_heads=8, **more))
    return found


def _shapes() -> list[Case]:
    """Return cases of other head sizes, grouped heads, and two lengths."""
    causal: Any = {"causal": True}
    gqa: Any = {**causal, "groups": ("gqa",)}
    shapes: Any = {**causal, "groups": ("shapes",)}
    return [
        _square("d128-s8192-causal-kv8", 2, 32, 8192, 128, kv_heads=8, **gqa),
        _square("d128-s4096-causal-kv1", 4, 16, 4096, 128, kv_heads=1, **gqa),
        _square("d64-s4096-causal-kv4", 4, 32, 4096, 64, kv_heads=4, **gqa),
        _square("d128-s32768-causal", 1, 16, 32768, 128, **shapes),
        _square("d80-s4096-causal", 4, 16, 4096, 80, **shapes),
        _square("d96-s4096-causal", 4, 16, 4096, 96, **shapes),
        _square("d192-s4096-causal", 4, 16, 4096, 192, **shapes),
        _square("d192-dv128-s4096-causal", 4, 16, 4096, 192, head_dim_v=128, **shapes),
        _square("d128-q512-s8192-causal", 4, 16, 512, 128, seqlen_kv=8192, **shapes),
        _square("d128-q1-s8192", 16, 32, 1, 128, kv_heads=8, seqlen_kv=8192, groups=("decode",)),
        _square("d128-q1-s65536", 1, 32, 1, 128, kv_heads=8, seqlen_kv=65536, groups=("decode",)),
    ]


def _options() -> list[Case]:
    """Return a case for each option, to be timed beside the call without it."""
    found = []
    both: Any = {"groups": ("options",)}
    found.append(_square("triangle", 1, 4, 32768, 64, causal=True, **both))
    found.append(
        _square("window", 1, 4, 32768, 64, window=(1024, 0), beside="triangle", **both),
    )
    for dim in (64, 128):
        for causal in (False, True):
            name = f"d{dim}-{'causal' if causal else 'full'}"
            sizes = (4, 1024 // dim, 4096, dim)
            found.append(_square(f"batched-{name}", *sizes, causal=causal, **both))
            more = {"causal": causal, "packed": True, "beside": f"batched-{name}", **both}
            found.append(_square(f"packed-{name}", *sizes, **more))
    given: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": 30.0},
        "bias": {"bias": "heads"},
        "bias-shared": {"bias": "shared"},
        "mask": {"mask": True},
        "alibi": {"alibi": True},
        "sinks": {"sinks": True},
        "dropout": {"dropout": 0.1},
    }
    together = [one for name, one in given.items() if name != "bias-shared"]
    given["everything"] = {key: value for one in together for key, value in one.items()}
    found.append(_square("plain", 1, 16, 4096, 64, **both))
    for name, options in given.items():
        found.append(_square(name, 1, 16, 4096, 64, beside="plain", **options, **both))
    wide: Any = {"beside": "d128-s4096-full", "groups": ("options-d128",)}
    given |= {"window": {"window": (512, 512)}, "packed": {"packed": True}}
    given |= {f"growing-{way}": {"growing": way} for way in ("up", "down")}
    for name, options in given.items():
        found.append(_square(f"d128-{name}", 4, 16, 4096, 128, **options, **wide))
    return found


def _sizes() -> list[Case]:
    """Return a case for head sizes that kernels are made for, and some between them."""
    sizes: Any = {"beside": "d128-s4096-full", "groups": ("sizes",)}
    dims = (40, 41, 48, 64, 72, 80, 96, 100, 104, 112)
    return [_square(f"size-{dim}", 4, 16, 4096, dim, **sizes) for dim in dims]


CASES: tuple[Case, ...] = (*_grid(), *_grid_more(), *_shapes(), *_options(), *_sizes())


def groups() -> dict[str, list[Case]]:
    """Return the cases of each group."""
    found: dict[str, list[Case]] = {}
    for case in CASES:
        for name in case.groups:
            found.setdefault(name, []).append(case)
    return found


def select(patterns: list[str]) -> list[Case]:
    """Return the cases that patterns name, as cases or as groups, in the order of the table.

    Raises
    ------
    ValueError
        A pattern names nothing.
    """
    wanted = set()
    for pattern in patterns:
        found = {
            case.name
            for case in CASES
            if any(fnmatch.fnmatchcase(name, pattern) for name in (case.name, *case.groups))
        }
        if not found:
            known = ", ".join(groups())
            raise ValueError(f"no case or group is called {pattern!r}; groups: {known}; see --list")
        wanted |= found
    # What a case is compared with is timed, too.
    wanted |= {case.beside for case in CASES if case.name in wanted and case.beside}
    return [case for case in CASES if case.name in wanted]


def contests(cases: list[Case]) -> list[list[Case]]:
    """Return the cases in sets that are timed together: mostly sets of one."""
    found: dict[str, list[Case]] = {}
    for case in cases:
        found.setdefault(case.beside or case.name, []).append(case)
    return list(found.values())
