# SPDX-License-Identifier: Apache-2.0
"""Benchmarks on an NVIDIA GPU, one command for all: ``python -m bench --help``."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench import cases, data, harness, host_time, machine, memory, published, startup
from bench.cases import Case
from bench.families import NAMES, fastest
from bench.peers import OURS, PEERS, Peer
from bench.report import Output, Table
from bench.timing import TIMERS, Pace

Row = dict[str, Any]

#: What is measured besides the speed of cases, by name.
OTHERS: dict[str, Callable[[], Iterable[Row]]] = {
    "host": lambda: host_time.measured(1000),
    "memory": memory.rows,
}
DIRECTIONS = {"forward": ["forward"], "backward": ["backward"], "both": ["forward", "backward"]}
DEFAULT_PEERS = ",".join(name for name in PEERS if name != OURS)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    names = ", ".join([*cases.groups(), *OTHERS, "startup"])
    found.add_argument(
        "names",
        nargs="*",
        default=["quick"],
        help=f"cases, groups or patterns of them (default: quick). Groups: {names}",
    )
    found.add_argument("--list", action="store_true", help="print the cases, and measure nothing")
    found.add_argument("--direction", choices=DIRECTIONS, default="both")
    found.add_argument("--dtype", default="bfloat16", help="with commas (default: bfloat16)")
    found.add_argument(
        "--peers",
        default=DEFAULT_PEERS,
        help=f"default: {DEFAULT_PEERS}. unordered: our backward with deterministic=False",
    )
    found.add_argument("--only-peers", action="store_true", help="leave cuflash out")
    found.add_argument(
        "--family",
        choices=NAMES,
        help="the fastest family of kernels that may run our side of the cases (default: any)",
    )
    found.add_argument("--rounds", type=int, default=9)
    found.add_argument(
        "--timer",
        choices=TIMERS,
        default="events",
        help="events: calls back to back (default); flush: each behind an empty L2 cache; wall: "
        "the host's clock, which fa3 makes necessary for all beside it",
    )
    found.add_argument("--burst", type=float, default=20, help="ms that a timing lasts")
    found.add_argument("--pause", type=float, default=20, help="ms before each timing")
    found.add_argument("--seconds", type=float, default=600, help="begin nothing after that")
    found.add_argument("--output", help="append JSON lines to this file; -: print them")
    found.add_argument(
        "--published", action="store_true", help="compare the peers with published speeds"
    )
    return found


def listing() -> list[str]:
    """Return the table of cases."""
    lines = []
    for case in cases.CASES:
        sizes = (
            f"batch {case.batch}, heads {case.heads}/{case.kv_heads}, "
            f"lengths {case.seqlen_q} x {case.seqlen_kv}, dims {case.head_dim}/{case.head_dim_v}"
        )
        words = (["causal"] if case.causal else []) + case.options()
        more = ", ".join([sizes, *words])
        lines.append(f"{case.name:26}{more}  [{' '.join(case.groups)}]")
    lines += [case.name for case in startup.CASES]
    lines.append("also: " + ", ".join([*OTHERS, "startup"]) + "; peers: " + ", ".join(PEERS))
    return lines


def facts() -> Row:
    """Return what every row says of the machine."""
    found = machine.facts()
    packages = ("torch", "jax", "nvidia-cudnn-cu13", "nvidia-cudnn-frontend", "dew-flash-attn-cu13")
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["commit"], found["dirty"] = machine.commit()
    return found


def present(names: Sequence[str], peers: dict[str, Peer], table: Table) -> list[Peer]:
    """Return the peers that can be used, and say of the others why not."""
    found = []
    for name in names:
        reason = peers[name].available()
        if reason:
            table.say(f"without {name}: {reason}")
        else:
            found.append(peers[name])
    return found


class Clock:
    """How much of a run is done, in rounds, and how long the rest may take."""

    def __init__(self, gpu: Any, contests: int, rounds: int, budget: float) -> None:
        self._gpu, self._begin, self._budget = gpu, gpu.now(), budget
        self._rounds, self._all = rounds, contests * rounds

    def seconds(self) -> float:
        """Return the seconds since the beginning."""
        return (self._gpu.now() - self._begin) / 1000

    def late(self) -> bool:
        """Whether the budget is used up."""
        return self.seconds() > self._budget

    def part(self, contest: int, done: int) -> float:
        """Return which part of all rounds is done."""
        return (contest * self._rounds + done) / self._all

    def left(self, contest: int, done: int) -> str:
        """Return a guess of the time that is left, in words."""
        part = self.part(contest, done)
        if not part:
            return f"at most {self._budget:.0f} s left"
        rest = self.seconds() * (1 - part) / part
        return f"{min(rest, max(0.0, self._budget - self.seconds())):.0f} s left"


def measure(gpu: Any, wanted: list[Case], plan: harness.Plan, budget: float, table: Table) -> Any:
    """Yield the rows of all cases, timed together where they are compared."""
    contests = [(dtype, one) for dtype in plan.dtypes for one in cases.contests(wanted)]
    clock = Clock(gpu, len(contests), plan.rounds, budget)
    for i, (dtype, some) in enumerate(contests):
        title = f"[{i + 1}/{len(contests)}] {some[0].name} {dtype}"
        if clock.late():
            for case in some:
                about = {**case.about(), "dtype": dtype, "direction": "-", "variant": "-"}
                yield {"kind": "skipped", **about, "reason": f"{budget:g} seconds are over"}
            continue
        table.begin(clock.part(i, 0), f"{title}: check, {clock.left(i, 0)}")

        def progress(done: int, rows: list[Row], i: int = i, title: str = title) -> None:
            text = f"{title}: round {done}/{plan.rounds}, {clock.left(i, done)}"
            table.progress(clock.part(i, done), text, rows)

        yield from harness.measure(gpu, some, dtype, plan, progress, clock.late)
        for peer in plan.peers:
            peer.free()
        gpu.free()


def main(
    arguments: Sequence[str] | None = None,
    *,
    make_gpu: Callable[[], Any] | None = None,
    peers: dict[str, Peer] = PEERS,
    about: Callable[[], Row] = facts,
) -> int:
    """Run the command; tests pass a GPU, peers and facts of their own."""
    parse = parser()
    given = parse.parse_args(arguments)
    if given.list:
        print("\n".join(listing()))
        return 0
    others = [name for name in given.names if name in OTHERS]
    first = [x for x in given.names if x == "startup" or x.startswith(startup.PREFIX)]
    patterns = [name for name in given.names if name not in (*others, *first)]
    names = [name for name in given.peers.split(",") if name and name != "none"]
    dtypes = given.dtype.split(",")
    try:
        wanted = cases.select(patterns) if patterns else []
        first_calls = startup.select(first)
    except ValueError as error:
        parse.error(str(error))
    for kind, words, known in (("peers", names, peers), ("dtype", dtypes, data.ITEMSIZE)):
        if not set(words) <= set(known):
            parse.error(f"--{kind}: expected some of {', '.join(known)}, got {','.join(words)}")
    if make_gpu is None:
        from bench.gpu import Gpu as make_gpu
    try:
        gpu = make_gpu()
    except Exception as error:
        print(f"python -m bench needs an NVIDIA GPU and CuPy: {error}", file=sys.stderr)
        return 2

    table = Table(sys.stderr if given.output == "-" else sys.stdout)
    output = Output(given.output)
    here = about()
    if given.family:
        here = {**here, "family": given.family}
    table.say(", ".join(f"{key} {value}" for key, value in here.items()))
    if not given.only_peers:
        names = [OURS, *(name for name in names if name != OURS)]
    plan = harness.Plan(
        present(names, peers, table) if wanted else [],
        dtypes,
        DIRECTIONS[given.direction],
        max(1, given.rounds),
        Pace(given.burst, given.pause),
        given.timer,
    )
    if wanted and any(not peer.on_stream for peer in plan.peers) and plan.timer != "wall":
        table.say("cases with fa3 are timed by wall clock, all variants alike")
    found: list[Row] = []

    def keep(row: Row) -> None:
        found.append(row)
        table.add(row)
        output.add({**row, "machine": here, "date": time.strftime("%Y-%m-%d")})

    if wanted and plan.peers:
        with fastest(given.family):
            for row in measure(gpu, wanted, plan, given.seconds, table):
                keep(row)
    for name in others:
        for row in OTHERS[name]():
            keep(row)
    for row in startup.rows(first_calls, given.seconds):
        keep(row)
    if given.published:
        for text in ["", *published.compare(found, gpu.name)]:
            table.say(text)
    output.close()
    bad = [row for row in found if "wrong" in row or row["kind"] == "failed"]
    bad += [row for row in found if row.get("right") is False]
    if bad:
        table.say(f"{len(bad)} WRONG or failed")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
