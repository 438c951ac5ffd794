# SPDX-License-Identifier: Apache-2.0
"""How results are shown and kept: a table that grows line by line, and lines of JSON."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from typing import Any, TextIO

__all__ = ["FIELDS", "Output", "Table", "problems"]

#: What every row of kind "speed" with a time holds.
FIELDS: dict[str, tuple[type, ...]] = {
    "kind": (str,),
    "case": (str,),
    "variant": (str,),
    "direction": (str,),
    "dtype": (str,),
    "batch": (int,),
    "heads": (int,),
    "kv_heads": (int,),
    "seqlen_q": (int,),
    "seqlen_kv": (int,),
    "head_dim": (int,),
    "head_dim_v": (int,),
    "causal": (bool,),
    "errors": (dict,),
    "ms": (float,),  # median over the rounds
    "p10": (float,),
    "p90": (float,),
    "rounds": (int,),
    "calls": (int,),  # in a burst
    "timer": (str,),
    "host_ms": (float,),
    "host_bound": (bool,),
    "tflops": (float,),
    "utilisation": (float, type(None)),  # of the peak at the clock that ran
    "sm_mhz": (float, type(None)),
    "nvml_mhz": (float, type(None)),
    "ratio": (float, type(None)),  # ms over ours
    "ratio_beside": (float, type(None)),  # ms over that of the case `beside`
    "machine": (dict,),
    "date": (str,),
}
BAR = 24  # characters
MACHINE = ("gpu", "sms", "driver", "cupy", "nvrtc", "numpy", "python", "commit", "dirty")

_COLUMNS = (
    f"{'case':26}{'pass':10}{'dtype':10}{'variant':13}{'ms':>10}{'p10':>10}{'p90':>10}"
    f"{'TFLOP/s':>9}{'util':>6}{'MHz':>6}{'ratio':>7}"
)


def problems(row: dict[str, Any]) -> list[str]:
    """Return what a row of kind "speed" with a time lacks."""
    found = [f"{name} is missing" for name in FIELDS if name not in row]
    found += [
        f"{name} is {type(row[name]).__name__}"
        for name, types in FIELDS.items()
        if name in row and not isinstance(row[name], types)
    ]
    return found + [f"machine.{name} is missing" for name in MACHINE if name not in row["machine"]]


def line(row: dict[str, Any]) -> str:
    """Return a row as a line of the table."""
    if row["kind"] not in ("speed", "skipped", "failed"):
        fields = (f"{key} {value}" for key, value in row.items() if key != "machine")
        return ", ".join(fields).removeprefix("kind ")
    start = f"{row['case']:26}{row['direction']:10}{row['dtype']:10}{row['variant']:13}"
    if "wrong" in row:
        wrong = ", ".join(f"{name} {row['errors'][name]:.1e}" for name in row["wrong"])
        return f"{start} WRONG: relative error of {wrong}"
    if row["kind"] == "failed":
        return f"{start} FAILED: {row['reason']}"
    if row["kind"] == "skipped":
        return f"{start} - {row['reason']}"
    ratio = row["ratio_beside"] if row["ratio_beside"] is not None else row["ratio"]
    util = "-" if row["utilisation"] is None else f"{row['utilisation']:.0%}"
    mhz = "-" if row["sm_mhz"] is None else f"{row['sm_mhz']:.0f}"
    times = "".join(f"{row[name]:10.4f}" for name in ("ms", "p10", "p90"))
    end = f"{'-' if ratio is None else format(ratio, '.2f'):>7}"
    if row["host_bound"]:
        end += "  the GPU waited for the host"
    return f"{start}{times}{row['tflops']:9.1f}{util:>6}{mhz:>6}{end}"


class Table:
    """Lines on a terminal or in a log.

    On a terminal, a few lines below the last one are written anew whenever there is news: how far
    it is, and the rows of what is being timed. A log has every row once, and a line for each
    contest.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._live = stream.isatty()
        self._title = False
        self._below = 0  # lines that will be written anew

    def _write(self, lines: list[str]) -> None:
        """Write lines in place of those below the last one."""
        up = f"\033[{self._below}A" if self._below else ""
        clear = f"\r{up}\033[J" if self._live else ""
        self.stream.write(clear + "".join(f"{text}\n" for text in lines))
        self.stream.flush()
        self._below = 0

    def say(self, text: str) -> None:
        """Print a line."""
        self._write([text])

    def add(self, row: dict[str, Any]) -> None:
        """Print a row."""
        lines = [line(row)]
        if not self._title and row["kind"] in ("speed", "skipped", "failed"):
            self._title = True
            lines.insert(0, _COLUMNS)
        self._write(lines)

    def progress(self, done: float, text: str, rows: Iterable[dict[str, Any]] = ()) -> None:
        """Show on a terminal which part of all is done, and the rows so far of what is timed."""
        if not self._live:
            return
        size = shutil.get_terminal_size()
        full = round(done * BAR)
        lines = [f"[{'#' * full}{'.' * (BAR - full)}] {done:4.0%}  {text}"]
        lines += [] if self._title else [_COLUMNS]
        lines += [line(row) for row in rows]
        # A line that wraps would not be overwritten.
        lines = [text[: size.columns - 1] for text in lines[: size.lines - 2]]
        self._write(lines)
        self._below = len(lines)

    def begin(self, done: float, text: str) -> None:
        """Say what begins: a line in a log, the progress on a terminal."""
        if self._live:
            self.progress(done, text)
        else:
            self.say(f"... {text}")


class Output:
    """A file of JSON lines that grows, "-" for standard output, or nothing."""

    def __init__(self, path: str | None) -> None:
        self._file: TextIO | None = None
        if path is not None:
            self._file = sys.stdout if path == "-" else open(path, "a", encoding="utf-8")  # noqa: SIM115

    def add(self, row: dict[str, Any]) -> None:
        """Write a row."""
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file not in (None, sys.stdout):
            self._file.close()
