# SPDX-License-Identifier: Apache-2.0
"""Counts of what the tests really did: tests by back end, distinct examples by kind."""

from __future__ import annotations

import json
from collections import Counter

_tests: Counter[str] = Counter()
_examples: set[tuple[str, str, str, str, str, str]] = set()
_pairs: set[tuple[str, str, str, str]] = set()
_planted: set[tuple[str, ...]] = set()


def ran(backend: str) -> None:
    """Count a test."""
    _tests[backend] += 1


def example(backend: str, dtype: str, direction: str, family: str, tiles: str, key: str) -> None:
    """Count an example that was compared with the reference. `key` tells examples apart.

    `tiles` is "1x1", "1xn", "nx1" or "nxn": whether rows and keys span more than one tile.
    """
    _examples.add((backend, dtype, direction, family, tiles, key))


def pair(backend: str, row: str, column: str, direction: str) -> None:
    """Count two options that were compared with the reference in one call."""
    _pairs.add((backend, row, column, direction))


def planted(source: str, fault: str, what: str, shows: str, *found: int) -> None:
    """Count in how many of seven schedules the CPU back end found a fault: in each of its builds.

    They are the plain one and, where it is there, the instrumented one.
    """
    _planted.add((source, fault, what, shows, *(f"{count}/7" for count in found)))


def dump() -> str:
    """Return all counts as text."""
    return json.dumps([_tests, sorted(_examples), sorted(_pairs), sorted(_planted)])


def load(text: str) -> None:
    """Add counts from another process."""
    if text:
        tests, examples, pairs, faults = json.loads(text)
        _tests.update(tests)
        _examples.update(tuple(row) for row in examples)
        _pairs.update(tuple(row) for row in pairs)
        _planted.update(tuple(row) for row in faults)


def report() -> list[str]:
    """Return the lines of the summary."""
    lines = ["tests by back end: " + ", ".join(f"{n} {name}" for name, n in sorted(_tests.items()))]
    lines += _table_of_pairs() + _table_of_faults()
    if not _examples:
        return lines
    total = len(_examples)
    both = sum(row[4] == "nxn" for row in _examples)
    lines.append(
        f"{total} distinct examples against the reference; {100 * both // total} % span two tiles "
        "on both axes"
    )
    counts = Counter(row[:5] for row in _examples)
    kinds = ("1x1", "1xn", "nx1", "nxn")
    header = "".join(f"{kind:>7}" for kind in kinds)
    lines.append(f"  {'back end':9}{'dtype':9}{'pass':9}{'family':8}{header}  (query x key tiles)")
    for backend, dtype, direction, family in sorted({row[:4] for row in counts}):
        cells = "".join(f"{counts[backend, dtype, direction, family, k]:7}" for k in kinds)
        lines.append(f"  {backend:9}{dtype:9}{direction:9}{family:8}{cells}")
    return lines


def _table_of_faults() -> list[str]:
    """Return what was planted, how it shows, and in how many schedules it was found."""
    if not _planted:
        return []
    full = sum(row[4] == "7/7" for row in _planted)
    lines = [
        f"{len(_planted)} planted faults, found in so many of seven schedules by the plain and the "
        f"instrumented build; in all by the plain one: {full}",
        f"  {'fault':36}{'what':64}{'shows as':26}{'plain':>6}{'instrumented':>14}",
    ]
    for _, fault, what, shows, plain, *rest in sorted(_planted):
        lines.append(f"  {fault:36}{what:64}{shows:26}{plain:>6}{rest[0] if rest else '-':>14}")
    return lines


def _table_of_pairs() -> list[str]:
    """Return option x option: f and b where the forward and the backward were compared."""
    lines = []
    for backend in sorted({row[0] for row in _pairs}):
        mine = {row[1:] for row in _pairs if row[0] == backend}
        # The longest row is that of the last option, and so on.
        width = {name: sum(row == name for row, _, _ in mine) for name, _, _ in mine}
        names = sorted(width, key=lambda name: (width[name], name))
        full = len(mine) == len(names) * (len(names) + 1)
        lines.append(
            f"option x option on {backend}: f forward, b backward compared with the reference; "
            f"{'full' if full else 'not full'}"
        )
        lines.append(" " * 14 + "".join(f"{name[:7]:8}" for name in names))
        for row in names:
            cells = (
                "".join(d[0] for d in ("forward", "backward") if (row, column, d) in mine)
                for column in names
            )
            lines.append(f"{row:14}" + "".join(f"{cell:8}" for cell in cells).rstrip())
    return lines
