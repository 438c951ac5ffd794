# SPDX-License-Identifier: Apache-2.0
"""All that is checked and measured on a GPU, in one run of a few minutes, and its record.

``python -m bench.gpu_check`` compiles the kernels, then runs

- ``tests``: pytest --backend gpu, the tests that touch a GPU,
- ``sanitize``: bench.sanitize under the four tools of compute-sanitizer, and a planted fault for
  each tool, which it must report,
- ``speed`` and ``options``: two groups of cases of ``python -m bench``,
- ``memory`` and ``host``: bench.memory and bench.host_time,

each in a process of its own with a time limit, and writes ``bench/results/gpu-check.json`` anew
whenever one has ended. The first two run side by side; measurements have the GPU to themselves.

The record holds a digest of the sources that decide what happens on the device. Continuous
integration, which has no GPU, runs ``python -m bench.gpu_check --verify``: it fails unless the
record is clean and its digest is that of the sources.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import jobs, machine, report
from bench.jobs import Job, Outcome
from bench.machine import ROOT

RESULTS = ROOT / "bench" / "results" / "gpu-check.json"
PARTS = ("tests", "sanitize", "speed", "options", "memory", "host")
TIMEOUTS = {  # seconds
    "machine": 60,
    "compile": 150,
    "tests": 430,
    "sanitize": 240,
    "planted": 90,
    "speed": 120,
    "options": 60,
    "memory": 110,
    "host": 40,
}

_ALL = "--dtype=float32,float64,float16,bfloat16"

#: What measures each part, and the kind of its rows of JSON.
MEASURES = {
    "speed": (f"bench record {_ALL} --peers=naive --rounds=7 --seconds=90 --output=-", "speed"),
    "options": (
        "bench options --dtype=float32 --peers=none --rounds=5 --seconds=45 --output=-",
        "speed",
    ),
    "memory": ("bench.memory", "memory"),
    "host": ("bench.host_time", "host"),
}

#: The tools: the kernel of planted.cu that each must report, its own options, and the fastest
#: family that it watches. Errors of API calls are not looked for: CuPy checks every call, and
#: probes for what a driver lacks. What Hopper's copy engine writes, initcheck knows of since CUDA
#: 13.1; racecheck and synccheck would have to follow barriers that one lane arrives at for a warp.
TOOLS = {
    "memcheck": ("overrun", ["--padding=1024", "--report-api-errors=no"], "sm90"),
    "racecheck": ("race", [], "mma"),
    "synccheck": ("barrier", [], "mma"),
    "initcheck": ("unwritten", [], "mma"),
}
HOPPER_KERNELS = {
    *("forward_sm90", "backward_rows_sm90", "backward_sm90"),
    *("backward_dq_sm90", "backward_dk_sm90", "backward_dv_sm90"),
}
KERNELS = HOPPER_KERNELS | {
    *("forward_simt", "delta", "backward_dq_simt", "backward_dkdv_simt"),
    *("backward_dbias_simt", "sum_parts", "dsinks", "merge_states", "realign"),
    *("forward_mma", "backward_rows_mma", "backward_mma", "backward_dq_mma"),
}

_MODULES = (
    "select",
    "launch",
    "launch_merge",
    "context",
    "realign",
    "params",
    "merge",
    "compile",
    "packed",
    "options",
    "problem",
    "destinations",
    "layout",
    "checks",
    "dtypes",
    "device",
    "arrays",
    "source",
    "calls",
    "api",
)
_PACKAGES = ("arch", "plan")


# --- what the record is about --------------------------------------------------------------------


def sources(root: Path = ROOT) -> dict[str, str]:
    """Return the files that decide what happens on the device, each with a digest."""
    kernels = root / "kernels"
    found = [
        path
        for pattern in ("*.cu", "*.cuh")
        for path in kernels.rglob(pattern)
        if path.relative_to(kernels).parts[0] != "host"
    ]
    found += [root / "cuflash" / f"{name}.py" for name in _MODULES]
    for package in _PACKAGES:
        found += (root / "cuflash" / package).glob("*.py")
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        for path in sorted(found)
        if path.is_file()
    }


def digest_of(files: dict[str, str]) -> str:
    """Return one digest for all."""
    text = "".join(f"{name} {digest}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(text.encode()).hexdigest()


def problems(record: dict[str, Any]) -> list[str]:
    """Return what keeps a record from being clean."""
    parts = record.get("parts", {})
    found = [f"{name}: has not run" for name in PARTS if name not in parts]
    for name, part in parts.items():
        if part.get("digest") != record.get("digest"):
            found.append(f"{name}: ran with other sources")
    if "tests" in parts:
        found += _problems_of_tests(parts["tests"])
    if "sanitize" in parts:
        found += _problems_of_sanitize(parts["sanitize"])
    for name, (_, kind) in MEASURES.items():
        if name in parts:
            part = parts[name]
            rows = [row for row in part.get("rows", []) if row["kind"] == kind]
            if part.get("verdict") != "finished, exit 0":
                found.append(f"{name}: {part.get('verdict')}")
            if not rows:
                found.append(f"{name}: no results")
            found += [f"{name}: wrong result: {row}" for row in rows if "wrong" in row]
    return found


def _problems_of_tests(part: dict[str, Any]) -> list[str]:
    found = []
    if part.get("verdict") != "finished, exit 0":
        found.append(f"tests: {part.get('verdict')}")
    if part.get("failed"):
        names = ", ".join(row["test"] for row in part.get("failures", [])[:5])
        found.append(f"tests: {part['failed']} failed: {names}")
    if part.get("unfinished"):
        found.append(f"tests: not finished: {', '.join(part['unfinished'][:5])}")
    if not part.get("passed"):
        found.append("tests: none passed")
    return found


def _problems_of_sanitize(part: dict[str, Any]) -> list[str]:
    found = []
    for tool in TOOLS:
        row = part.get("tools", {}).get(tool)
        if row is None:
            found.append(f"{tool}: has not run")
            continue
        if row["verdict"] != "finished, exit 0":
            found.append(f"{tool}: {row['verdict']}")
        if row["reports"] is None:
            found.append(f"{tool}: printed no summary")
        elif row["reports"]:
            found.append(f"{tool}: {row['reports']} reports")
        if row["failed"]:
            found.append(f"{tool}: wrong results: {', '.join(row['failed'])}")
        watched = KERNELS if TOOLS[tool][2] == "sm90" else KERNELS - HOPPER_KERNELS
        missing = watched - set(row["plans"])
        if missing or not row["cases"]:
            found.append(f"{tool}: did not run {', '.join(sorted(missing)) or 'any case'}")
    if not part.get("planted_overrun_reported"):
        found.append("memcheck: did not report the planted overrun")
    return found


def verify(path: Path = RESULTS, root: Path = ROOT) -> list[str]:
    """Return why a committed record does not vouch for the sources; nothing if it does."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [f"{path} cannot be read: {error}"]
    found = problems(record)
    if record.get("clean") is not True:
        found.append("the record says that it is not clean")
    now, then = sources(root), record.get("sources", {})
    if digest_of(then) != record.get("digest"):
        found.append("the record's digest is not that of the sources that it lists")
    if record.get("digest") != digest_of(now):
        found.append(f"digest: {record.get('digest')} in the record, {digest_of(now)} here")
        for name in sorted({*now, *then}):
            if now.get(name) != then.get(name):
                what = "changed" if name in now and name in then else None
                found.append(f"  {what or ('added' if name in now else 'removed')}: {name}")
    return found


# --- reading what the parts print ----------------------------------------------------------------


def reports_of(text: str) -> int | None:
    """Return how many errors compute-sanitizer reports, warnings of races included.

    None if it printed no summary, that is, if it did not check to the end.
    """
    counts = [int(n) for n in re.findall(r"ERROR SUMMARY: (\d+) errors?\s*$", text, re.MULTILINE)]
    races = r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)"
    counts += [int(e) + int(w) for e, w in re.findall(races, text)]
    return sum(counts) if counts else None


def rows_of(text: str) -> list[dict[str, Any]]:
    """Return the lines of JSON in an output."""
    rows = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and "kind" in row:
                rows.append(row)
    return rows


def read_tool(outcome: Outcome) -> dict[str, Any]:
    """Return the result of bench.sanitize under one tool."""
    count = next((row for row in rows_of(outcome.output) if row["kind"] == "sanitize"), {})
    row: dict[str, Any] = {
        "command": command_text(outcome.job),
        "verdict": outcome.verdict,
        "reports": reports_of(outcome.output),
        "cases": count.get("cases", 0),
        "failed": count.get("failed", []),
        "plans": count.get("plans", {}),
        "seconds": round(outcome.seconds, 1),
    }
    if not outcome.good or row["reports"] != 0:
        row["output"] = outcome.output[-6000:]
    return row


def read_planted(tool: str, outcome: Outcome) -> dict[str, Any]:
    """Return whether a tool reported the fault that was planted for it."""
    reports = reports_of(outcome.output)
    reported = bool(reports)
    if tool == "memcheck":  # not some other error
        reported &= "Invalid __global__ write" in outcome.output
    row: dict[str, Any] = {
        "fault": TOOLS[tool][0],
        "command": command_text(outcome.job),
        "reports": reports,
        "reported": reported,
    }
    if not reported:
        row["output"] = outcome.output[-3000:]
    return row


def command_text(job: Job) -> str:
    """Return a command as one would type it."""
    words = [word for word in job.command if not word.startswith("--port=")]
    return " ".join(Path(word).name if word.startswith("/") else word for word in words)


# --- running -------------------------------------------------------------------------------------


def python(*arguments: str) -> list[str]:
    return [sys.executable, "-m", *arguments]


def threads(count: int) -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return dict.fromkeys(names, str(count))


def tests_job(report: Path, workers: int, everything: bool) -> Job:
    command = python("pytest", "-q", "--backend", "gpu", "-p", "bench.pytest_report")
    command += [f"--report-to={report}", "-o", "faulthandler_timeout=120"]
    if not everything:
        command.append("--gpu-only")
    if importlib.util.find_spec("xdist") and workers > 1:
        command += ["-n", str(workers), "--dist", "loadgroup"]
    # JAX, whose arrays are tested too, takes three quarters of the GPU's memory otherwise.
    env = {**threads(1), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return Job("tests", [*command, "tests"], TIMEOUTS["tests"], env)


def sanitize_jobs(sanitizer: str) -> list[Job]:
    """Return, for each tool, bench.sanitize and the planted fault."""
    found = []
    for tool, (fault, options, family) in TOOLS.items():
        own = ["--family", family]
        for name, more in ((tool, own), (f"planted {tool}", ["--planted", fault])):
            command = [sanitizer, f"--tool={tool}", "--print-limit=20", "--error-exitcode=99"]
            # Each has ports of its own to talk to its program.
            command += [f"--port={49200 + 20 * len(found)}", "--launch-timeout=60", *options]
            command += [*python("bench.sanitize"), *more]
            found.append(
                Job(name, command, TIMEOUTS["sanitize" if more is own else "planted"], threads(2))
            )
    return found


class Check:
    """The record, written anew after each part."""

    def __init__(self, path: Path, wanted: list[str]) -> None:
        self.path, self.wanted = path, wanted
        files = sources()
        self.digest = digest_of(files)
        self.commit, self.dirty = machine.commit()
        kept: dict[str, Any] = {}
        if set(wanted) != set(PARTS) and path.is_file():
            before = json.loads(path.read_text(encoding="utf-8")).get("parts", {})
            for name, part in before.items():
                if name in PARTS and name not in wanted and part.get("digest") == self.digest:
                    kept[name] = part
        self.record: dict[str, Any] = {
            "clean": False,
            "problems": [],
            "digest": self.digest,
            "commit": self.commit,
            "dirty": self.dirty,
            "date": machine.now(),
            "machine": {},
            "sources": files,
            "parts": kept,
        }

    def put(self, name: str, **result: Any) -> None:
        """Store a part, or what there is of it so far."""
        about = {"digest": self.digest, "commit": self.commit, "date": machine.now()}
        gpu = self.record["machine"].get("gpu")
        self.record["parts"][name] = {**about, "gpu": gpu, **result}
        self.write()

    def write(self) -> None:
        """Judge the record and replace the file."""
        self.record["problems"] = problems(self.record)
        self.record["clean"] = not self.record["problems"]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.record, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, self.path)

    def prepare(self, deadline: float) -> None:
        """Read what the machine is, and compile what the parts have in common."""
        facts = Job("machine", python("bench.machine"), TIMEOUTS["machine"])
        compilation = Job("compile", python("bench.sanitize", "--compile"), TIMEOUTS["compile"])
        first = [facts, compilation] if {"tests", "sanitize"} & set(self.wanted) else [facts]
        for outcome in jobs.run(first, deadline):
            for row in rows_of(outcome.output):
                if row.pop("kind") == "machine":
                    self.record["machine"] = row
                else:
                    self.record["compile"] = row
        self.write()

    def run_checks(self, deadline: float, workers: int, everything: bool) -> None:
        """Run tests and sanitizers side by side."""
        from bench import pytest_report  # needs pytest, which --verify does not

        started: list[Job] = []
        sanitizer = machine.find_tool("compute-sanitizer")
        tools: dict[str, Any] = {}
        planted: dict[str, Any] = {}
        if "sanitize" in self.wanted:
            if sanitizer is None:
                self.put("sanitize", error="compute-sanitizer is not installed")
            else:
                started += sanitize_jobs(sanitizer)
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report"
            if "tests" in self.wanted:
                started.append(tests_job(report, workers, everything))
            for outcome in jobs.run(started, deadline):
                name = outcome.job.name
                if name == "tests":
                    text = report.read_text(encoding="utf-8") if report.is_file() else ""
                    result = pytest_report.read(text)
                    if not outcome.good:
                        result["output"] = outcome.output[-6000:]
                    command = command_text(outcome.job).replace(str(report), "REPORT")
                    seconds = round(outcome.seconds, 1)
                    result = {"verdict": outcome.verdict, "seconds": seconds, **result}
                    self.put("tests", command=command, **result)
                    continue
                if name in TOOLS:
                    tools[name] = read_tool(outcome)
                else:
                    tool = name.removeprefix("planted ")
                    planted[tool] = read_planted(tool, outcome)
                reported = planted.get("memcheck", {}).get("reported", False)
                self.put(
                    "sanitize", tools=tools, planted=planted, planted_overrun_reported=reported
                )

    def measure(self, name: str, deadline: float) -> None:
        """Run a benchmark alone."""
        command = python(*MEASURES[name][0].split())
        for outcome in jobs.run([Job(name, command, TIMEOUTS[name])], deadline):
            result: dict[str, Any] = {
                "command": command_text(outcome.job),
                "verdict": outcome.verdict,
                "seconds": round(outcome.seconds, 1),
                "rows": [row for row in rows_of(outcome.output) if row["kind"] != "machine"],
            }
            for row in result["rows"]:
                row.pop("machine", None)  # the record says it once
            if not outcome.good:
                result["output"] = outcome.output[-3000:]
            self.put(name, **result)

    def run(self, deadline: float, workers: int, everything: bool) -> None:
        """Run all the parts that are wanted."""
        self.write()
        self.prepare(deadline)
        self.run_checks(deadline, workers, everything)
        for name in MEASURES:
            if name in self.wanted:
                self.measure(name, deadline)


def summarise(record: dict[str, Any]) -> list[str]:
    """Return the lines that a run ends with."""
    lines = ["", "gpu-check: " + ", ".join(f"{k} {v}" for k, v in record["machine"].items())]
    parts = record["parts"]
    if "tests" in parts:
        part = parts["tests"]
        keys = ("run", "passed", "failed", "skipped", "need_no_gpu")
        lines.append("tests: " + ", ".join(f"{key} {part.get(key)}" for key in keys))
        lines += [f"  skipped {n}: {why}" for why, n in part.get("skip_reasons", {}).items()]
        lines += [f"  {line}" for line in part.get("tally") or []]
    if "sanitize" in parts:
        for tool, row in parts["sanitize"].get("tools", {}).items():
            silent = parts["sanitize"]["planted"].get(tool, {}).get("reported")
            lines.append(
                f"{tool}: {row['reports']} reports in {row['cases']} cases, {row['seconds']} s; "
                f"planted fault reported: {silent}"
            )
    for name in ("speed", "options"):
        lines += [report.line(row) for row in parts.get(name, {}).get("rows", [])]
    lines += [
        str(row) for name in ("memory", "host") for row in parts.get(name, {}).get("rows", [])
    ]
    if record["problems"]:
        lines += ["NOT CLEAN"] + [f"  {problem}" for problem in record["problems"]]
    else:
        lines.append("clean")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.gpu_check", description=__doc__)
    parser.add_argument("--verify", action="store_true", help="only look whether the record holds")
    parser.add_argument(
        "--only",
        default=",".join(PARTS),
        help="parts to run, with commas; others are kept if they ran with these sources",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="the record's file")
    parser.add_argument("--budget", type=float, default=480, help="seconds for everything")
    parser.add_argument("--workers", type=int, default=8, help="processes for the tests")
    parser.add_argument("--all-tests", action="store_true", help="also those that need no GPU")
    arguments = parser.parse_args()
    if arguments.verify:
        found = verify(arguments.results)
        print("\n".join(found) if found else "the record is clean and vouches for these sources")
        return 1 if found else 0
    wanted = [name for name in arguments.only.split(",") if name]
    if not set(wanted) <= set(PARTS):
        parser.error(f"--only: expected some of {', '.join(PARTS)}, got {arguments.only}")
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    check = Check(arguments.results, wanted)
    try:
        deadline = time.monotonic() + arguments.budget
        check.run(deadline, arguments.workers, arguments.all_tests)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    check.write()
    print("\n".join(summarise(check.record)), flush=True)
    return 0 if check.record["clean"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
