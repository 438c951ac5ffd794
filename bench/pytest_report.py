# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that writes what happened as it happens, for a run that may be cut short.

``-p bench.pytest_report --report-to PATH``: lines of JSON, written by the process that reports.
``--gpu-only``: leaves out the tests that touch no GPU, and counts them.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import pytest

__all__ = ["read"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--report-to", help="write lines of JSON to this file")
    parser.addoption("--gpu-only", action="store_true", help="leave out what needs no GPU")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--report-to")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Reporter(path))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--gpu-only"):
        return
    kept = [item for item in items if _needs_gpu(item)]
    left_out = len(items) - len(kept)
    items[:] = kept
    output = getattr(config, "workeroutput", None)
    if output is not None:  # a process of pytest-xdist
        output["left_out"] = left_out
        return
    for plugin in config.pluginmanager.get_plugins():
        if isinstance(plugin, _Reporter):
            plugin.write(left_out=left_out)


def _needs_gpu(item: pytest.Item) -> bool:
    return "backend" in getattr(item, "fixturenames", ()) or bool(item.get_closest_marker("gpu"))


class _Reporter:
    def __init__(self, path: str) -> None:
        self.file = open(path, "w", buffering=1, encoding="utf-8")  # noqa: SIM115

    def write(self, **record: Any) -> None:
        self.file.write(json.dumps(record) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(started=nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.write(ended=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reason = ""
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
        elif hasattr(report, "wasxfail"):
            reason = f"xfail: {report.wasxfail}"
        elif report.failed:
            reason = report.longreprtext[-3000:]
        self.write(
            test=report.nodeid,
            when=report.when,
            outcome=report.outcome,
            reason=reason,
            seconds=round(report.duration, 2),
        )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(
                test=report.nodeid,
                when="collect",
                outcome="failed",
                reason=report.longreprtext[-3000:],
                seconds=0.0,
            )

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.write(left_out=getattr(node, "workeroutput", {}).get("left_out", 0))

    def pytest_terminal_summary(self, exitstatus: int) -> None:
        tally = sys.modules.get("tally")
        self.write(tally=tally.report() if tally else [], exit=int(exitstatus))


def read(text: str) -> dict[str, Any]:
    """Return counts, reasons and the tally from what the plugin wrote, complete or not."""
    outcomes: dict[str, str] = {}
    seconds: Counter[str] = Counter()
    skips: Counter[str] = Counter()
    failures, tally, left_out = [], None, 0
    unfinished: dict[str, None] = {}
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # the process was killed while it wrote
        if "started" in row:
            unfinished[row["started"]] = None
        elif "ended" in row:
            unfinished.pop(row["ended"], None)
        elif "left_out" in row:
            left_out = max(left_out, row["left_out"])
        elif "tally" in row:
            tally = row["tally"]
        else:
            test, outcome = row["test"], row["outcome"]
            seconds[test] += row["seconds"]
            if outcome == "failed":
                outcomes[test] = "failed"
                failures.append({"test": test, "when": row["when"], "reason": row["reason"]})
            elif outcome == "skipped":
                outcomes[test] = "skipped"
                skips[row["reason"]] += 1
            elif row["when"] == "call":
                outcomes.setdefault(test, "passed")
    counts = Counter(outcomes.values())
    return {
        "run": len(outcomes),
        "passed": counts["passed"],
        "failed": counts["failed"],
        "skipped": counts["skipped"],
        "skip_reasons": dict(skips),
        "need_no_gpu": left_out,
        "unfinished": list(unfinished),
        "failures": failures[:20],
        "slowest": {test: round(s, 1) for test, s in seconds.most_common(10)},
        "tally": tally,
    }
