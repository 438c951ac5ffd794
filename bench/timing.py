# SPDX-License-Identifier: Apache-2.0
"""How long a call takes: bursts of calls, contestants in shuffled rounds, medians.

A GPU at its power limit lowers its clock, so whoever follows a hungry contestant is slower: order
alone moves results by 8 %. Hence every contestant runs once in each round, in an order that is
drawn anew, after a pause, for about the same time.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["TIMERS", "Burst", "Contestant", "Pace", "rounds", "summary", "warm_up"]

CHUNKS = 4  # clock readings in a burst
MOST_CALLS = 400
MOST_HOLD_MS = 40.0


@dataclass(frozen=True)
class Burst:
    """One timing of a contestant."""

    ms: float  # of a call
    host_ms: float  # the host's share: until a call is queued
    mhz: float | None  # SM clock while it ran, by counting cycles
    nvml_mhz: int | None  # SM clock, as the driver reports it
    host_bound: bool  # the GPU may have waited for the host


@dataclass
class Contestant:
    """A call with its inputs: `call(i)` runs it on the inputs i."""

    call: Callable[[int], Any]
    sets: int
    wait: Callable[[Any], None] = lambda result: None  # for what Gpu.synchronize does not know
    ms: float = 0.0  # of a call, roughly
    host_ms: float = 0.0
    count: int = 1  # calls in a burst
    bursts: list[Burst] = field(default_factory=list)


@dataclass(frozen=True)
class Pace:
    """How long bursts last, and the pauses before them, in milliseconds."""

    burst_ms: float = 20.0
    pause_ms: float = 20.0


def warm_up(gpu: Any, one: Contestant, pace: Pace) -> None:
    """Find out how many calls make a burst."""
    for _ in range(2):
        gpu.synchronize()
        begin = gpu.now()
        result = None
        for i in range(one.sets):
            result = one.call(i)
        queued = gpu.now()
        one.wait(result)
        gpu.synchronize()
        one.ms = (gpu.now() - begin) / one.sets
        one.host_ms = (queued - begin) / one.sets
    one.count = min(MOST_CALLS, max(1, math.ceil(pace.burst_ms / max(one.ms, 1e-6))))


@dataclass
class _Queue:
    """Calls that are queued while the stream is held, and what their events say in the end."""

    gpu: Any
    one: Contestant
    spans: list[tuple[Any, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin = self.gpu.now()
        self.held = min(MOST_HOLD_MS, 0.1 + 1.3 * self.one.count * self.one.host_ms)
        self.gpu.hold(self.held)

    def add(self, calls: Iterable[int]) -> None:
        """Queue some calls between two events."""
        start = self.gpu.mark()
        for i in calls:
            self.one.call(i % self.one.sets)
        self.spans.append((start, self.gpu.mark()))

    def burst(self, mean: Callable[[list[float]], float]) -> Burst:
        """Wait, and read everything; `mean` makes one time of the times of all spans."""
        gpu, one = self.gpu, self.one
        host = gpu.now() - self.begin
        # The driver's clock is read in the middle of the work.
        gpu.pause(self.begin + self.held + one.count * one.ms / 2 - gpu.now())
        nvml = gpu.nvml_mhz()
        gpu.synchronize()
        ms = mean([gpu.between(*span) for span in self.spans])
        host_ms = host / one.count
        late = host > self.held and host_ms > 0.9 * ms
        return Burst(ms, host_ms, statistics.fmean(gpu.clocks()), nvml, late)


def by_events(gpu: Any, one: Contestant) -> Burst:
    """Time calls that are queued back to back, by events on the stream.

    The stream is held until all are queued, so no time of the host's is in the result, however
    short the calls are. The clock is read four times, between calls.
    """
    queue = _Queue(gpu, one)
    size = math.ceil(one.count / CHUNKS)
    for first in range(0, one.count, size):
        queue.add(range(first, min(first + size, one.count)))
        gpu.probe_clock()
    return queue.burst(lambda times: sum(times) / one.count)


def by_flush(gpu: Any, one: Contestant) -> Burst:
    """Time each call by events of its own, behind a write that empties the L2 cache; the median.

    This is how many published speeds were measured. The write lets the GPU cool between calls.
    """
    queue = _Queue(gpu, one)
    for i in range(one.count):
        gpu.flush()
        queue.add([i])
        if i % math.ceil(one.count / CHUNKS) == 0:
            gpu.probe_clock()
    return queue.burst(statistics.median)


def by_wall(gpu: Any, one: Contestant) -> Burst:
    """Time calls that are queued back to back by the host's clock, until all are done.

    For libraries with streams of their own, where our events see nothing.
    """
    gpu.synchronize()
    begin = gpu.now()
    result = None
    for i in range(one.count):
        result = one.call(i % one.sets)
    host = gpu.now() - begin
    one.wait(result)
    gpu.synchronize()
    ms = (gpu.now() - begin) / one.count
    host_ms = host / one.count
    gpu.probe_clock()
    gpu.synchronize()
    return Burst(ms, host_ms, statistics.fmean(gpu.clocks()), None, host_ms > 0.9 * ms)


TIMERS: dict[str, Callable[[Any, Contestant], Burst]] = {
    "events": by_events,
    "flush": by_flush,
    "wall": by_wall,
}


def rounds(
    gpu: Any,
    contestants: list[Contestant],
    count: int,
    pace: Pace,
    timer: str,
    draw: random.Random,
) -> Iterator[int]:
    """Time all contestants, warmed up before, once a round; yields the number of rounds done."""
    for done in range(1, count + 1):
        for one in draw.sample(contestants, len(contestants)):
            gpu.pause(pace.pause_ms)
            one.bursts.append(TIMERS[timer](gpu, one))
        yield done


def summary(bursts: list[Burst]) -> dict[str, Any]:
    """Return medians over the rounds, and the spread of the times."""
    p10, median, p90 = np.percentile([burst.ms for burst in bursts], [10, 50, 90])

    def middle(values: list[Any]) -> float | None:
        known = [value for value in values if value is not None]
        return round(float(statistics.median(known)), 1) if known else None

    return {
        "ms": round(float(median), 5),
        "p10": round(float(p10), 5),
        "p90": round(float(p90), 5),
        "rounds": len(bursts),
        "sm_mhz": middle([burst.mhz for burst in bursts]),
        "nvml_mhz": middle([burst.nvml_mhz for burst in bursts]),
        "host_ms": round(statistics.median(burst.host_ms for burst in bursts), 4),
        "host_bound": sum(burst.host_bound for burst in bursts) * 2 > len(bursts),
    }
