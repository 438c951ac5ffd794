# SPDX-License-Identifier: Apache-2.0
"""Back ends, hypothesis profiles, and the summary that counts what was really tested."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis
import numpy as np
import pytest
import tally
from builder import Builder

hypothesis.settings.register_profile(
    "ci",
    deadline=None,  # the first example of a plan compiles it
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
    print_blob=True,
)
hypothesis.settings.register_profile(
    "explore", hypothesis.settings.get_profile("ci"), derandomize=False, max_examples=2000
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@dataclass(frozen=True)
class Backend:
    """NumPy arrays on the CPU back end, or CuPy arrays on a GPU."""

    name: str
    xp: Any

    @property
    def is_hopper(self) -> bool:
        """Whether tensor cores are those of a GPU of compute capability 9.0."""
        return self.name == "gpu" and self.xp.cuda.Device().compute_capability == "90"

    def array(self, x: np.ndarray) -> Any:
        """Return a host array as an array of this back end, strides and all."""
        if self.name == "cpu":
            return x
        # Views keep their strides: copy the memory they look at, then look at it the same way.
        base = x
        while isinstance(base.base, np.ndarray):
            base = base.base
        offset = x.__array_interface__["data"][0] - base.__array_interface__["data"][0]
        copy = self.xp.asarray(np.ascontiguousarray(base).reshape(-1).view(np.uint8))
        memory = copy.data + offset
        return self.xp.ndarray(x.shape, x.dtype, memory, x.strides)

    def host(self, x: Any) -> np.ndarray:
        """Return an array of this back end as a NumPy array."""
        return x.get() if hasattr(x, "get") else np.asarray(x)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--backend",
        choices=("cpu", "gpu"),
        default="cpu",
        help="run on NumPy arrays (the default) or, the same tests, on CuPy arrays",
    )


@pytest.fixture(scope="session")
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.config.getoption("--backend") == "cpu":
        return Backend("cpu", np)
    import cupy

    return Backend("gpu", cupy)


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    return Builder(tmp_path_factory.mktemp("host"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--backend") == "gpu":
        return
    skip = pytest.mark.skip(reason="needs a GPU: pytest --backend gpu")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _count_backend(request: pytest.FixtureRequest) -> Iterator[None]:
    name = "no kernel"
    if "backend" in request.fixturenames:
        name = request.config.getoption("--backend")
    elif request.node.get_closest_marker("gpu"):
        name = "gpu"
    tally.ran(name)
    yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # In continuous integration all packages are there, and only a GPU may be missing, or one of the
    # libraries of test_interop.py.
    may_miss = item.get_closest_marker("gpu") or item.get_closest_marker("library")
    excused = may_miss or hasattr(report, "wasxfail")
    if report.skipped and not excused and os.environ.get("CI"):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"not allowed in CI: {reason}"
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # a process of pytest-xdist: hand the counts to the one that reports
        output["tally"] = tally.dump()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    tally.load(getattr(node, "workeroutput", {}).get("tally", ""))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.section("what was tested")
    for line in tally.report():
        terminalreporter.write_line(line)
