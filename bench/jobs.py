# SPDX-License-Identifier: Apache-2.0
"""Run commands side by side, each with a time limit, and show what they print as they print it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from bench.machine import ROOT

__all__ = ["Job", "Outcome", "run"]

_HEARTBEAT = 20.0  # seconds without a line after which those that still run are named


@dataclass(frozen=True)
class Job:
    """A command, run in the checkout. `timeout` is in seconds."""

    name: str
    command: list[str]
    timeout: float
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    job: Job
    state: str  # "finished", "timed out", "interrupted" or "not started"
    code: int | None
    output: str
    seconds: float

    @property
    def good(self) -> bool:
        """Whether it ended by itself and said that all is well."""
        return self.state == "finished" and self.code == 0

    @property
    def verdict(self) -> str:
        """State and exit code, in words."""
        return f"finished, exit {self.code}" if self.state == "finished" else self.state


class _Running:
    def __init__(self, job: Job, limit: float) -> None:
        self.job, self.limit = job, limit
        self.begin = time.monotonic()
        self.file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.shown = 0
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT), **job.env}
        if os.environ.get("PYTHONPATH"):
            environment["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
        try:
            self.process: subprocess.Popen[Any] = subprocess.Popen(
                job.command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self.file,
                stderr=subprocess.STDOUT,
                preexec_fn=os.setpgrp,  # its children die with it
            )
        except OSError:
            self.file.close()
            raise

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    def output(self) -> str:
        size = os.fstat(self.file.fileno()).st_size
        return os.pread(self.file.fileno(), size, 0).decode(errors="replace")

    def show(self, *, rest: bool = False) -> bool:
        """Print the lines that are new; returns whether there were any."""
        size = os.fstat(self.file.fileno()).st_size
        data = os.pread(self.file.fileno(), size - self.shown, self.shown)
        if not rest:
            data = data[: data.rfind(b"\n") + 1]
        self.shown += len(data)
        for line in data.decode(errors="replace").splitlines():
            print(f"[{self.job.name} {self.seconds:.0f} s] {line}", flush=True)
        return bool(data)

    def kill(self) -> None:
        for number, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)

    def end(self, state: str) -> Outcome:
        if state != "finished":
            self.kill()
        self.show(rest=True)
        outcome = Outcome(self.job, state, self.process.poll(), self.output(), self.seconds)
        self.file.close()
        print(f"[{self.job.name} {self.seconds:.0f} s] {outcome.verdict}", flush=True)
        return outcome


def run(jobs: list[Job], deadline: float) -> Iterator[Outcome]:
    """Start all jobs at once and yield each outcome as it comes.

    At the `deadline` (of ``time.monotonic``) the rest is stopped. A KeyboardInterrupt stops all and
    is raised again once the outcomes of what ran have been yielded.
    """
    running: list[_Running] = []
    interrupt: BaseException | None = None
    try:
        for job in jobs:
            limit = min(job.timeout, deadline - time.monotonic())
            try:
                if limit <= 1:
                    raise TimeoutError("no time is left")
                running.append(_Running(job, limit))
            except (OSError, TimeoutError) as reason:
                print(f"[{job.name}] not started: {reason}", flush=True)
                yield Outcome(job, "not started", None, str(reason), 0.0)
        spoke = time.monotonic()
        while running:
            try:
                time.sleep(0.1)
                for one in list(running):
                    if one.show():
                        spoke = time.monotonic()
                    if one.process.poll() is not None or one.seconds > one.limit:
                        state = "timed out" if one.process.poll() is None else "finished"
                        running.remove(one)
                        yield one.end(state)
                if running and time.monotonic() - spoke > _HEARTBEAT:
                    spoke = time.monotonic()
                    names = ", ".join(f"{one.job.name} {one.seconds:.0f} s" for one in running)
                    print(f"[still running] {names}", flush=True)
            except KeyboardInterrupt as error:
                interrupt = error
                for one in running:
                    one.limit = 0.0
                while running:
                    yield running.pop().end("interrupted")
    finally:
        for one in running:
            one.kill()
    if interrupt is not None:
        raise interrupt
