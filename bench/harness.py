# SPDX-License-Identifier: Apache-2.0
"""From cases and peers to rows: prepare, check, time, summarise."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bench import data, timing, verify
from bench.cases import Case
from bench.gpu import peak
from bench.peer import OURS, UNORDERED, Peer
from bench.timing import Contestant, Pace

__all__ = ["Plan", "Progress", "measure"]

Row = dict[str, Any]
Progress = Callable[[int, list[Row]], None]  # rounds done, and what they say so far


@dataclass(frozen=True)
class Plan:
    """What a run measures, and how."""

    peers: list[Peer]
    dtypes: list[str]
    directions: list[str]
    rounds: int = 9
    pace: Pace = field(default_factory=Pace)
    timer: str = "events"


@dataclass
class _Entry:
    """A contestant with what its row says."""

    case: Case
    peer: Peer
    direction: str
    row: Row
    contestant: Contestant


def _message(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300]


def measure(
    gpu: Any,
    cases: list[Case],
    dtype: str,
    plan: Plan,
    progress: Progress = lambda done, rows: None,
    late: Callable[[], bool] = lambda: False,
) -> Iterator[Row]:
    """Time the calls of some cases together and yield a row for each, in the order of the table.

    Rows are of kind "speed" (with `wrong` in place of a speed if the result is wrong), "skipped"
    (a peer cannot do the call, or the case is not of this pass) or "failed" (ours raised an error).
    After the first round, no round begins once `late` says so.
    """
    entries: list[_Entry] = []
    for case in cases:
        sets = data.sets_of(case, dtype, gpu.xp)
        want = None
        for direction in plan.directions:
            for peer in plan.peers:
                about = {**case.about(), "direction": direction, "dtype": dtype}
                about["variant"] = peer.name
                reason = case.rejects(direction) or peer.rejects(case, dtype, direction)
                if reason:
                    yield {"kind": "skipped", **about, "reason": reason}
                    continue
                if want is None:
                    want = verify.expected(case, sets[0], gpu.xp)
                    gpu.free()
                try:
                    calls = [peer.prepare(case, direction, one) for one in sets]
                    gpu.synchronize()
                    result = calls[0].run()
                    peer.wait(result)
                    gpu.synchronize()
                    got = calls[0].read(result)
                    errors = verify.errors(case, direction, got, want, gpu.xp)
                    contestant = Contestant(
                        lambda i, calls=calls: calls[i].run(), len(sets), peer.wait
                    )
                except Exception as error:  # whatever another library raises
                    kind = "failed" if peer.name in (OURS, UNORDERED) else "skipped"
                    yield {"kind": kind, **about, "reason": _message(error)}
                    continue
                finally:
                    result = got = None
                about["errors"] = {name: float(f"{x:.2e}") for name, x in errors.items()}
                names = verify.wrong(errors, dtype, peer.allowance)
                if names:
                    yield {"kind": "speed", **about, "wrong": names}
                    continue
                entries.append(_Entry(case, peer, direction, about, contestant))
        del sets, want
    gpu.free()
    for entry in list(entries):
        try:
            timing.warm_up(gpu, entry.contestant, plan.pace)
        except Exception as error:  # out of memory, by now
            entries.remove(entry)
            kind = "failed" if entry.peer.name in (OURS, UNORDERED) else "skipped"
            yield {"kind": kind, **entry.row, "reason": _message(error)}
    timer = plan.timer
    if not all(entry.peer.on_stream for entry in entries):
        timer = "wall"
    contestants = [entry.contestant for entry in entries]
    draw = random.Random(0)
    for done in timing.rounds(gpu, contestants, plan.rounds, plan.pace, timer, draw):
        progress(done, list(_rows(gpu, entries, timer)))
        if late():
            break
    yield from _rows(gpu, entries, timer)


def _rows(gpu: Any, entries: list[_Entry], timer: str) -> Iterator[Row]:
    """Make the rows of what was timed."""
    times = {}
    for entry in entries:
        if entry.contestant.bursts:
            found = timing.summary(entry.contestant.bursts)
            times[entry.case.name, entry.peer.name, entry.direction] = found
    for entry in entries:
        key = (entry.case.name, entry.peer.name, entry.direction)
        if key not in times:
            yield {"kind": "skipped", **entry.row, "reason": "no time was left"}
            continue
        found = times[key]
        tflops = entry.case.flop(entry.direction) / found["ms"] / 1e9
        most = peak(gpu.capability, gpu.sms, entry.row["dtype"], found["sm_mhz"])
        ours = times.get((entry.case.name, OURS, entry.direction))
        beside = times.get((entry.case.beside, entry.peer.name, entry.direction))
        yield {
            "kind": "speed",
            **entry.row,
            **found,
            "calls": entry.contestant.count,
            "timer": timer,
            "tflops": round(tflops, 2),
            "utilisation": None if most is None else round(tflops / most, 4),
            "ratio": None if ours is None else round(found["ms"] / ours["ms"], 3),
            "ratio_beside": None if beside is None else round(found["ms"] / beside["ms"], 3),
        }
