# SPDX-License-Identifier: Apache-2.0
"""The record of a run on a GPU: what it is about, when it counts, how tools' outputs are read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench import baselines, gpu_check, host_time, jobs, memory, pytest_report  # noqa: E402
from cuflash import reference  # noqa: E402

SOURCES = (
    "kernels/attention/a.cu",
    "kernels/parts/b.cuh",
    "cuflash/arch/simt.py",
    "cuflash/plan/base.py",
)
OTHERS = (
    "kernels/README.md",
    "kernels/host/cuda.h",
    "kernels/host/hw/memory.cuh",
    "cuflash/reference.py",
    "tests/test_a.py",
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small checkout."""
    root = tmp_path / "checkout"
    modules = [f"cuflash/{name}.py" for name in gpu_check._MODULES]
    for name in (*SOURCES, *OTHERS, *modules):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def digest(root: Path) -> str:
    return gpu_check.digest_of(gpu_check.sources(root))


@pytest.mark.parametrize("name", [*SOURCES, "cuflash/launch.py", "cuflash/api.py"])
def test_an_edit_of_what_runs_changes_the_digest(tree: Path, name: str) -> None:
    before = digest(tree)
    (tree / name).write_text("edited")
    assert digest(tree) != before
    (tree / name).write_text(name)
    assert digest(tree) == before
    (tree / name).rename(tree / "kernels" / "moved.cu")
    assert digest(tree) != before


@pytest.mark.parametrize("name", OTHERS)
def test_other_edits_do_not(tree: Path, name: str) -> None:
    before = digest(tree)
    (tree / name).write_text("edited")
    assert digest(tree) == before


def test_the_digest_covers_the_kernels_of_this_checkout() -> None:
    names = set(gpu_check.sources())
    assert "kernels/attention/forward_simt.cu" in names
    assert {f"cuflash/{name}.py" for name in gpu_check._MODULES} <= names
    assert {"cuflash/arch/sm90.py", "cuflash/plan/base.py", "cuflash/plan/sm90.py"} <= names
    assert not any("/host/" in name for name in names)


# --- verdicts ------------------------------------------------------------------------------------


def clean_record(root: Path) -> dict[str, Any]:
    files = gpu_check.sources(root)
    about = {"digest": gpu_check.digest_of(files), "verdict": "finished, exit 0"}
    tool = {
        "verdict": "finished, exit 0",
        "reports": 0,
        "cases": 48,
        "failed": [],
        "plans": dict.fromkeys(gpu_check.KERNELS, 4),
    }
    return {
        "clean": True,
        "digest": about["digest"],
        "sources": files,
        "parts": {
            "tests": {**about, "passed": 9, "failed": 0, "unfinished": []},
            "sanitize": {
                **about,
                "tools": {name: dict(tool) for name in gpu_check.TOOLS},
                "planted_overrun_reported": True,
            },
            **{
                name: {**about, "rows": [{"kind": kind}]}
                for name, (_, kind) in gpu_check.MEASURES.items()
            },
        },
    }


def verify(root: Path, record: Any) -> list[str]:
    path = root.parent / "record.json"
    path.write_text(json.dumps(record))
    return gpu_check.verify(path, root)


def test_a_clean_record_vouches_for_its_sources(tree: Path) -> None:
    assert verify(tree, clean_record(tree)) == []


def test_a_record_of_other_sources_does_not_count(tree: Path) -> None:
    record = clean_record(tree)
    (tree / "kernels/attention/a.cu").write_text("edited")
    (tree / "kernels/attention/new.cu").write_text("new")
    (tree / "kernels/parts/b.cuh").unlink()
    found = "\n".join(verify(tree, record))
    for words in ("digest", "changed: kernels/attention/a.cu", "added: kernels/attention/new.cu"):
        assert words in found
    assert "removed: kernels/parts/b.cuh" in found


def _drop(*keys: str) -> Callable[[dict[str, Any]], None]:
    def doctor(record: dict[str, Any]) -> None:
        for key in keys[:-1]:
            record = record[key]
        del record[keys[-1]]

    return doctor


def _set(*keys: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def doctor(record: dict[str, Any]) -> None:
        for key in keys[:-1]:
            record = record[key]
        record[keys[-1]] = to

    return doctor


DOCTORED = {
    "not clean": (_set("clean", to=False), "not clean"),
    "clean is no word": (_set("clean", to="yes"), "not clean"),
    "no parts": (_drop("parts"), "tests: has not run"),
    "no speed": (_drop("parts", "speed"), "speed: has not run"),
    "a failure": (_set("parts", "tests", "failed", to=1), "1 failed"),
    "nothing passed": (_set("parts", "tests", "passed", to=0), "none passed"),
    "timed out": (_set("parts", "tests", "verdict", to="timed out"), "timed out"),
    "unfinished": (_set("parts", "tests", "unfinished", to=["test_a"]), "test_a"),
    "old part": (_set("parts", "host", "digest", to="0"), "host: ran with other sources"),
    "no tool": (_drop("parts", "sanitize", "tools", "racecheck"), "racecheck: has not run"),
    "a report": (_set("parts", "sanitize", "tools", "memcheck", "reports", to=2), "2 reports"),
    "no summary": (
        _set("parts", "sanitize", "tools", "initcheck", "reports", to=None),
        "initcheck: printed no summary",
    ),
    "no kernel": (_set("parts", "sanitize", "tools", "memcheck", "plans", to={}), "forward_simt"),
    "wrong": (_set("parts", "sanitize", "tools", "memcheck", "failed", to=["a"]), "wrong results"),
    "silent": (_set("parts", "sanitize", "planted_overrun_reported", to=False), "planted overrun"),
    "empty": (_set("parts", "memory", "rows", to=[]), "memory: no results"),
    "wrong speed": (
        _set("parts", "speed", "rows", to=[{"kind": "speed", "wrong": ["dq"]}]),
        "wrong result",
    ),
    "other list": (_set("sources", to={}), "not that of the sources"),
}


@pytest.mark.parametrize("name", DOCTORED)
def test_verify_sees_what_is_wrong(tree: Path, name: str) -> None:
    doctor, words = DOCTORED[name]
    record = clean_record(tree)
    doctor(record)
    assert words in "\n".join(verify(tree, record))


def test_a_record_that_is_missing_or_damaged_does_not_count(tree: Path, tmp_path: Path) -> None:
    assert "cannot be read" in gpu_check.verify(tmp_path / "none.json", tree)[0]
    (tmp_path / "half.json").write_text('{"clean": tr')
    assert "cannot be read" in gpu_check.verify(tmp_path / "half.json", tree)[0]


def test_verify_needs_neither_cupy_nor_numpy(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules.update(cupy=None, numpy=None, pytest=None)\n"
        "from bench import gpu_check; sys.exit(gpu_check.main())"
    )
    arguments = ["--verify", f"--results={tmp_path / 'none.json'}"]
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "cannot be read" in done.stdout, done.stderr


def test_parts_are_kept_if_they_ran_with_these_sources(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    check = gpu_check.Check(path, list(gpu_check.PARTS))
    check.put("host", verdict="finished, exit 0", rows=[{"kind": "host"}])
    check.put("speed", verdict="finished, exit 0", rows=[{"kind": "speed"}])
    record = json.loads(path.read_text())
    record["parts"]["speed"]["digest"] = "of other sources"
    path.write_text(json.dumps(record))
    assert set(gpu_check.Check(path, ["tests"]).record["parts"]) == {"host"}
    assert set(gpu_check.Check(path, ["host"]).record["parts"]) == set()
    assert set(gpu_check.Check(path, list(gpu_check.PARTS)).record["parts"]) == set()


# --- outputs of tools ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reports"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", 0),
        ("========= ERROR SUMMARY: 1 error\n", 1),
        (
            "========= ERROR SUMMARY: 130 errors\n"
            "========= ERROR SUMMARY: 30 errors were not printed. Use --print-limit option\n",
            130,
        ),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0),
        ("========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n", 3),
        ("========= Error: Target application terminated before first instrumented API call", None),
        ("", None),
    ],
)
def test_reports_are_counted(text: str, reports: int | None) -> None:
    assert gpu_check.reports_of(text) == reports


def outcome(output: str, code: int = 0) -> jobs.Outcome:
    job = jobs.Job("memcheck", ["/opt/bin/tool", "--port=1", sys.executable, "-m", "x"], 1)
    return jobs.Outcome(job, "finished", code, output, 1.0)


def test_a_planted_overrun_must_be_the_one_reported() -> None:
    other = outcome("========= Program hit an error\n========= ERROR SUMMARY: 1 error\n", 99)
    assert gpu_check.read_planted("memcheck", other)["reported"] is False
    real = outcome(
        "========= Invalid __global__ write of size 4 bytes\n========= ERROR SUMMARY: 1 error\n", 99
    )
    assert gpu_check.read_planted("memcheck", real)["reported"] is True
    assert gpu_check.read_planted("racecheck", outcome("no GPU", 1))["reported"] is False


def test_a_tool_is_read_with_its_command_and_count() -> None:
    text = (
        "ok float32 tails (0.1 s)\n"
        '{"kind": "sanitize", "cases": 48, "failed": [], "plans": {"delta": 4}, "seconds": 9}\n'
        "========= ERROR SUMMARY: 0 errors\n"
    )
    row = gpu_check.read_tool(outcome(text))
    assert (row["reports"], row["cases"], row["plans"]) == (0, 48, {"delta": 4})
    assert row["command"] == "tool python -m x"


def test_lines_of_json_are_found_among_others() -> None:
    text = 'warning\n{"kind": "speed", "a": 1}\n{not json}\n{"other": 1}\n'
    assert gpu_check.rows_of(text) == [{"kind": "speed", "a": 1}]


NCU = """\
==PROF== Connected to process 77 (/usr/bin/python3.12)
==PROF== Profiling "forward_simt" - 0: 0%....50%....100% - 1 pass
==PROF== Disconnected from process 77
"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","77","gemm(int, float)","Command line profiler metrics","dram__bytes_read.sum","byte","1,000"
"0","77","gemm(int, float)","Command line profiler metrics","dram__bytes_write.sum","Kbyte","2.5"
"1","77","exp","Command line profiler metrics","dram__bytes_read.sum","byte","30"
"1","77","exp","Command line profiler metrics","dram__bytes_write.sum","byte","4"
"""


def test_dram_bytes_are_summed_over_kernels() -> None:
    want = {"read": 1030, "written": 2504, "bytes": 3534, "kernels": ["gemm", "exp"]}
    assert memory.read_ncu(NCU) == want
    for text in ("==ERROR== no permission\n", NCU.splitlines()[3]):
        with pytest.raises(ValueError, match=r"no table|no kernel"):
            memory.read_ncu(text)


def test_units_of_the_pool_are_not_counted_against_a_call() -> None:
    assert memory.beyond(512 + 1024 + 2048, [1, 1024]) == 2048


def test_a_report_of_tests_that_was_cut_short_is_read() -> None:
    def row(test: str, when: str, result: str, reason: str = "") -> dict[str, Any]:
        return {"test": test, "when": when, "outcome": result, "reason": reason, "seconds": 0.5}

    rows = [
        {"left_out": 7},
        {"started": "a"},
        row("a", "setup", "passed"),
        row("a", "call", "passed"),
        row("a", "teardown", "passed"),
        {"ended": "a"},
        row("b", "setup", "skipped", "no torch"),
        row("c", "setup", "passed"),
        row("c", "call", "failed", "assert 0"),
        row("d", "call", "passed"),
        row("d", "teardown", "failed", "left a file"),
        {"started": "e"},
        row("e", "setup", "passed"),
    ]
    text = "\n".join(json.dumps(row) for row in rows) + '\n{"test": "e", "wh'
    result = pytest_report.read(text)
    counts = {key: result[key] for key in ("run", "passed", "failed", "skipped", "need_no_gpu")}
    assert counts == {"run": 4, "passed": 1, "failed": 2, "skipped": 1, "need_no_gpu": 7}
    assert result["skip_reasons"] == {"no torch": 1}
    assert result["unfinished"] == ["e"]
    assert [row["test"] for row in result["failures"]] == ["c", "d"]
    assert pytest_report.read("")["passed"] == 0


# --- jobs ----------------------------------------------------------------------------------------


def python(code: str, timeout: float = 60, name: str = "job") -> jobs.Job:
    return jobs.Job(name, [sys.executable, "-c", code], timeout)


def run(*todo: jobs.Job, seconds: float = 60) -> dict[str, jobs.Outcome]:
    return {x.job.name: x for x in jobs.run(list(todo), time.monotonic() + seconds)}


def test_jobs_end_on_their_own_or_at_their_limit(capsys: pytest.CaptureFixture[str]) -> None:
    done = run(
        python("print('hello'); raise SystemExit(3)", name="quick"),
        python("import time; print('begun', flush=True); time.sleep(60)", 2, name="slow"),
        jobs.Job("missing", ["/no/such/program"], 5),
    )
    assert (done["quick"].verdict, done["quick"].output) == ("finished, exit 3", "hello\n")
    assert (done["slow"].state, done["slow"].output) == ("timed out", "begun\n")
    assert done["slow"].seconds < 30
    assert done["missing"].state == "not started" and not done["missing"].good
    assert "hello" in capsys.readouterr().out


def test_children_of_a_job_die_with_it(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(note)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    )
    assert run(python(code, 3))["job"].state == "timed out"
    status = Path(f"/proc/{note.read_text()}/stat")
    for _ in range(50):
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] in "ZX":
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child still runs")


def test_after_the_deadline_nothing_starts() -> None:
    assert run(python("pass"), seconds=0)["job"].state == "not started"


def test_a_terminated_run_leaves_a_record(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    command = [sys.executable, "-m", "bench.gpu_check", f"--results={path}", "--only=host"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for _ in range(300):
        if path.is_file():
            break
        time.sleep(0.1)
    os.kill(process.pid, signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert json.loads(path.read_text())["clean"] is False, text


# --- measurements --------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_the_naive_formula_is_attention(causal: bool) -> None:
    rng = np.random.default_rng(0)
    q, dout = rng.standard_normal((2, 2, 3, 9, 8))
    k, v = rng.standard_normal((2, 2, 3, 13, 8))
    mask = baselines.causal_mask(9, 13, q) if causal else None
    out, p = baselines.forward(q, k, v, mask)
    grads = baselines.backward(dout, q, k, v, p)
    options = {"causal": causal, "layout": "bhsd"}
    np.testing.assert_allclose(out, reference.attention(q, k, v, **options), atol=1e-12)
    wanted = reference.attention_backward(dout, q, k, v, **options)
    for got, want in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-12)


def test_host_times_are_beyond_a_bare_launch() -> None:
    times = {host_time.BARE: np.array([9.0, 10, 11]), "attention": np.array([30.0, 40, 90])}
    bare, ours = host_time.rows(times)
    assert (bare["beyond_launch"], ours["median"], ours["beyond_launch"]) == (0, 40, 30)
    assert ours["p99"] > 80
    calls = {name: (lambda: None) for name in times}
    assert host_time.measure(calls, 5, lambda: None)["attention"].shape == (5,)
