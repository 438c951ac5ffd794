# SPDX-License-Identifier: Apache-2.0
"""How results are shown and kept: a table that grows line by line, and lines of JSON."""

from __future__ import annotations

import json
import sys
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
    """Lines on a terminal or in a log. On a terminal the last line shows the progress."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self._live = stream.isatty()
        self._title = False

    def say(self, text: str) -> None:
        """Print a line."""
        self.stream.write(("\r\033[K" if self._live else "") + text + "\n")
        self.stream.flush()

    def add(self, row: dict[str, Any]) -> None:
        """Print a row."""
        if not self._title and row["kind"] in ("speed", "skipped", "failed"):
            self._title = True
            self.say(_COLUMNS)
        self.say(line(row))

    def progress(self, text: str, *, log: bool = False) -> None:
        """Show how far it is; in a log only what says `log`."""
        if self._live:
            self.stream.write("\r\033[K" + text)
            self.stream.flush()
        elif log:
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
