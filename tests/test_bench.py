# SPDX-License-Identifier: Apache-2.0
"""The benchmark harness on a fake GPU, whose time passes as the test says."""

from __future__ import annotations

import io
import json
import os
import random
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import cuflash  # noqa: E402
from bench import __main__ as command  # noqa: E402
from bench import cases, data, harness, machine, published, report, startup, timing, verify  # noqa: E402
from bench.cases import CASES, Case  # noqa: E402
from bench.gpu import peak  # noqa: E402
from bench.peers import OURS, PEERS, Call, Peer  # noqa: E402
from bench.timing import Contestant, Pace  # noqa: E402
from cuflash import device, launch, reference, select  # noqa: E402
from cuflash.dtypes import DTYPES  # noqa: E402
from cuflash.problem import Traits  # noqa: E402


class FakeGpu:
    """A queue of work, and two clocks that advance only by what is done."""

    name, sms, capability, xp = "NVIDIA H200", 132, (9, 0), np

    def __init__(self, host_ms: float = 0.01) -> None:
        self.host = 0.0  # the host's time
        self.busy_until = 0.0  # when the GPU has done what is queued
        self.host_ms = host_ms  # what queueing a call takes
        self.readings = 0
        self.log: list[str] = []

    def work(self, ms: float, name: str) -> None:
        self.host += self.host_ms
        self.busy_until = max(self.busy_until, self.host) + ms
        self.log.append(name)

    def now(self) -> float:
        return self.host

    def pause(self, ms: float) -> None:
        self.host += max(0.0, ms)

    def synchronize(self) -> None:
        self.host = max(self.host, self.busy_until)

    def hold(self, ms: float) -> None:
        self.busy_until = max(self.busy_until, self.host) + ms

    def mark(self) -> float:
        return max(self.busy_until, self.host)

    def between(self, start: float, stop: float) -> float:
        return stop - start

    def flush(self) -> None:
        self.busy_until += 0.1

    def probe_clock(self) -> None:
        self.readings += 1

    def clocks(self) -> list[float]:
        found, self.readings = [1500.0] * self.readings, 0
        return found

    def nvml_mhz(self) -> int:
        return 1980

    def free(self) -> None:
        self.synchronize()


class FakePeer(Peer):
    """Computes with the reference, and takes the time that it is told."""

    def __init__(self, gpu: FakeGpu, name: str, ms: float, fault: Callable | None = None) -> None:
        self.gpu, self.name, self.ms, self.fault = gpu, name, ms, fault
        self.absent: str | None = None

    def available(self) -> str | None:
        return self.absent

    def prepare(self, case: Case, direction: str, inputs: data.Inputs) -> Call:
        if self.fault is not None and self.fault is _raise:
            raise MemoryError("no\nmemory")
        arrays = (inputs.q, inputs.k, inputs.v)
        if direction == "forward":
            found: Any = (reference.attention(*arrays, **inputs.options),)
        else:
            found = tuple(reference.attention_backward(inputs.dout, *arrays, **inputs.options))
        found = tuple(x.astype(inputs.q.dtype) for x in found)
        if self.fault is not None:
            self.fault(found)
        factor = 2.5 if direction == "backward" else 1.0

        def run() -> Any:
            self.gpu.work(factor * self.ms, f"{self.name} {direction} {case.name}")
            return found

        return Call(run, lambda result: result)


def _raise(found: Any) -> None:
    raise AssertionError


SMALL = Case("small", 2, 4, 2, 70, 70, 8, 8, causal=True)


def plan(peers: list[Peer], **changes: Any) -> harness.Plan:
    return harness.Plan(peers, ["float32"], ["forward", "backward"], **changes)


def run(gpu: FakeGpu, peers: list[Peer], some: list[Case] | None = None, **changes: Any) -> list:
    return list(harness.measure(gpu, some or [SMALL], "float32", plan(peers, **changes)))


# --- the table of cases --------------------------------------------------------------------------


def test_names_are_unique_and_cases_make_sense() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    known = {*names}
    assert not known & {*cases.groups(), *command.OTHERS, "startup"}
    for case in CASES:
        assert case.heads % case.kv_heads == 0 and case.groups
        assert 1 <= case.head_dim <= 512 and 1 <= case.head_dim_v <= 512
        assert not case.beside or case.beside in known
        assert not case.packed or case.seqlen_q == case.seqlen_kv
    grid = cases.groups()["grid"]
    assert len(grid) == 36
    assert all(c.batch * c.seqlen_q == 16384 and c.heads * c.head_dim == 2048 for c in grid)


def test_patterns_choose_cases_and_what_they_are_compared_with() -> None:
    assert [case.name for case in cases.select(["packed-d64-full"])] == [
        *("batched-d64-full", "packed-d64-full"),
    ]
    assert len(cases.select(["d128-s*-full"])) == 6
    assert len(cases.select(["published"])) == 6
    assert len(cases.contests(cases.select(["published"]))) == 6
    together = cases.contests(cases.select(["softcap", "bias*", "quick"]))
    assert sorted(len(one) for one in together) == [1, 1, 1, 4]
    assert next(one for one in together if len(one) == 4)[0].name == "plain"
    with pytest.raises(ValueError, match="'d129'"):
        cases.select(["d128", "d129"])


def test_operations_follow_the_custom() -> None:
    full = Case("", 2, 4, 1, 10, 30, 8, 16)
    assert full.flop("forward") == 2 * 2 * 4 * 10 * 30 * (8 + 16)
    square = Case("", 2, 4, 4, 100, 100, 8, 8)
    causal = Case("", 2, 4, 4, 100, 100, 8, 8, causal=True)
    assert square.flop("forward") == 4 * 2 * 4 * 100 * 100 * 8
    assert causal.flop("forward") == square.flop("forward") / 2
    assert causal.flop("backward") == 2.5 * causal.flop("forward")


@pytest.mark.parametrize("window", [(-1, -1), (3, 0), (3, -1), (-1, 2), (2, 5)])
@pytest.mark.parametrize("lengths", [(5, 20), (20, 5), (9, 9)])
@pytest.mark.parametrize("causal", [False, True])
def test_visible_pairs_are_counted(
    causal: bool, lengths: tuple[int, int], window: tuple[int, int]
) -> None:
    sq, sk = lengths
    case = Case("", 1, 1, 1, sq, sk, 8, 8, causal=causal, window=window)
    p, j = np.arange(sq)[:, None] + sk - sq, np.arange(sk)
    seen = np.ones((sq, sk), bool)
    seen &= (j <= p) | (not causal)
    seen &= (window[0] < 0) | (j >= p - window[0])
    seen &= (window[1] < 0) | (j <= p + window[1])
    custom = causal and window == (-1, -1) and sq == sk
    assert case.pairs() == (sq * sk / 2 if custom else seen.sum())


def test_peaks_are_those_of_the_clock_that_ran() -> None:
    assert peak((9, 0), 132, "bfloat16", 1830) == pytest.approx(989.4, abs=0.1)
    assert peak((9, 0), 132, "float32", 1980) == pytest.approx(66.9, abs=0.1)
    assert peak((7, 5), 68, "float16", 1500) is None
    assert peak((9, 0), 132, "float16", None) is None


# --- inputs and the check of results -------------------------------------------------------------


def test_inputs_are_rotated_past_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    assert data.L2_BYTES >= 60 * 2**20
    monkeypatch.setattr(data, "L2_BYTES", 100_000)
    few = data.sets_of(SMALL, "float16", np)
    size = sum(x.nbytes for x in (few[0].q, few[0].k, few[0].v, few[0].dout))
    assert len(few) * size >= 2 * data.L2_BYTES > (len(few) - 2) * size
    assert not np.array_equal(few[0].q, few[1].q)
    large = Case("", 1, 1, 1, 4096, 4096, 8, 8)
    assert len(data.sets_of(large, "float32", np)) == 1


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (5, 2)},
    "softcap": {"softcap": 2.0},
    "bias": {"bias": "heads"},
    "bias-shared": {"bias": "shared"},
    "mask": {"mask": True},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "dropout": {"dropout": 0.2},
}
TOGETHER = [one for name, one in OPTIONS.items() if name != "bias-shared"]
OPTIONS["everything"] = {key: value for one in TOGETHER for key, value in one.items()}


@pytest.fixture
def one_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small inputs once: no cache is to be overrun here."""
    monkeypatch.setattr(data, "L2_BYTES", 1)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_the_check_expects_what_the_reference_says(
    name: str, dtype: str, one_set: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "CHUNK", 50)
    case = Case(name, 2, 4, 2, 70, 90, 8, 12, **OPTIONS[name])
    inputs = data.sets_of(case, dtype, np)[0]
    want = verify.expected(case, inputs, np)
    arrays = (inputs.q, inputs.k, inputs.v)
    out = reference.attention(*arrays, **inputs.options)
    grads = reference.attention_backward(inputs.dout, *arrays, **inputs.options)
    found = verify.errors(case, "forward", (out,), want, np)
    found |= verify.errors(case, "backward", tuple(grads), want, np)
    assert max(found.values()) < 1e-11, found


@pytest.mark.parametrize("fault", ["a late row", "infinite elsewhere", "nan", "one head", "shift"])
def test_wrong_results_are_wrong(fault: str, one_set: None) -> None:
    case = Case("", 2, 2, 2, 1000, 1000, 8, 8, causal=True)
    inputs = data.sets_of(case, "bfloat16", np)[0]
    want = verify.expected(case, inputs, np)
    exact = reference.attention(inputs.q, inputs.k, inputs.v, causal=True)
    out = exact.astype(inputs.q.dtype)
    good = verify.errors(case, "forward", (out,), want, np)
    assert not verify.wrong(good, "bfloat16"), good
    assert 5e-4 < good["out"] < 4e-3  # rounding alone
    if fault == "a late row":
        out[-1, -1, -1] = 0
    elif fault == "infinite elsewhere":
        out[0, 500, 1, 3] = np.inf
    elif fault == "nan":
        out[0, 500, 0, 3] = np.nan
    elif fault == "one head":
        out[:, :, 1] = out[:, :, 0]
    else:
        out[:, 1:] = out[:, :-1].copy()
    found = verify.errors(case, "forward", (out,), want, np)
    assert verify.wrong(found, "bfloat16") == ["out"], found


def test_a_peer_may_be_allowed_more() -> None:
    assert verify.wrong({"out": 5e-3}, "float16") == ["out"]
    assert verify.wrong({"out": 5e-3}, "float16", 10.0) == []
    assert verify.wrong({"out": float("nan")}, "float16", 10.0) == ["out"]


# --- timing --------------------------------------------------------------------------------------


def contestant(gpu: FakeGpu, ms: float, name: str = "a", sets: int = 3) -> Contestant:
    return Contestant(lambda i: gpu.work(ms, f"{name}{i}"), sets)


@pytest.mark.parametrize("timer", ["events", "flush"])
@pytest.mark.parametrize("ms", [0.004, 0.3, 70.0])
def test_events_see_no_time_of_the_host(timer: str, ms: float) -> None:
    gpu = FakeGpu(host_ms=0.05)  # longer than the shortest call
    one = contestant(gpu, ms)
    timing.warm_up(gpu, one, Pace())
    burst = timing.TIMERS[timer](gpu, one)
    assert burst.ms == pytest.approx(ms)
    assert burst.mhz == 1500 and burst.nvml_mhz == 1980
    assert burst.host_ms == pytest.approx(0.05) and not burst.host_bound


def test_wall_clock_needs_calls_that_keep_the_host_ahead() -> None:
    gpu = FakeGpu(host_ms=0.05)
    long, short = contestant(gpu, 0.3), contestant(gpu, 0.004)
    for one in (long, short):
        timing.warm_up(gpu, one, Pace())
    burst = timing.by_wall(gpu, long)
    assert burst.ms == pytest.approx(0.3, rel=0.01) and not burst.host_bound
    burst = timing.by_wall(gpu, short)
    assert burst.ms == pytest.approx(0.05, rel=0.01) and burst.host_bound


def test_bursts_last_as_long_as_asked_and_take_inputs_in_turn() -> None:
    gpu = FakeGpu()
    one = contestant(gpu, 1.0)
    timing.warm_up(gpu, one, Pace(burst_ms=12))
    assert 9 <= one.count <= 13
    gpu.log.clear()
    timing.by_events(gpu, one)
    assert set(gpu.log) == {"a0", "a1", "a2"} and len(gpu.log) == one.count


def test_every_round_has_all_contestants_in_an_order_of_its_own() -> None:
    gpu = FakeGpu()
    many = [contestant(gpu, 1.0, name, sets=1) for name in "abcd"]
    orders = []
    for one in many:
        timing.warm_up(gpu, one, Pace(burst_ms=1))
        one.count = 1
    gpu.log.clear()
    for done in timing.rounds(gpu, many, 12, Pace(), "events", random.Random(0)):
        assert [len(one.bursts) for one in many] == [done] * 4
        orders.append(tuple(gpu.log))
        gpu.log.clear()
    assert all(sorted(order) == ["a0", "b0", "c0", "d0"] for order in orders)
    assert len(set(orders)) > 6
    assert {order[0] for order in orders} == {"a0", "b0", "c0", "d0"}


def test_medians_and_spread() -> None:
    times = [5.0, 1.0, 2.0, 3.0, 4.0]
    mhz = [1400.0, None, 1500.0, 1600.0, None]
    clocks = [timing.Burst(ms, 0.1, f, None, ms > 2) for ms, f in zip(times, mhz, strict=True)]
    found = timing.summary(clocks)
    assert (found["ms"], found["p10"], found["p90"], found["rounds"]) == (3.0, 1.4, 4.6, 5)
    assert (found["sm_mhz"], found["nvml_mhz"], found["host_bound"]) == (1500.0, None, True)


# --- rows ----------------------------------------------------------------------------------------


def test_rows_say_time_speed_utilisation_and_ratio(one_set: None) -> None:
    gpu = FakeGpu()
    rows = run(gpu, [FakePeer(gpu, OURS, 0.5), FakePeer(gpu, "other", 1.0)])
    assert [(row["variant"], row["direction"]) for row in rows] == [
        *((OURS, "forward"), ("other", "forward"), (OURS, "backward"), ("other", "backward")),
    ]
    assert [row["ms"] for row in rows] == pytest.approx([0.5, 1.0, 1.25, 2.5])
    assert [row["ratio"] for row in rows] == [1, 2, 1, 2]
    tflops = 4 * 2 * 4 * 70 * 70 * 8 / 2 / 0.5e9
    # tiny numbers are rounded to a hundredth
    assert rows[0]["tflops"] == pytest.approx(tflops, abs=0.006)
    assert rows[0]["utilisation"] == pytest.approx(tflops / (132 * 256 * 1500e-6), abs=1e-4)


@pytest.mark.parametrize("way", ["up", "down"])
def test_growing_scores_are_of_the_forward_only(way: str, one_set: None) -> None:
    """What most keys get back is below what the dtype can hold: exact results count as wrong."""
    case = Case("growing", 1, 1, 1, 64, 4096, 8, 8, growing=way)
    inputs = data.sets_of(case, "float32", np)[0]
    exact = reference.attention_backward(inputs.dout, inputs.q, inputs.k, inputs.v)
    rounded = tuple(x.astype("f4") for x in exact)
    found = verify.errors(case, "backward", rounded, verify.expected(case, inputs, np), np)
    assert verify.wrong(found, "float32") == ["dk", "dv"]

    def fault(found: Any) -> None:
        found[0][0, -1] *= 0.5  # one row of the last block

    gpu = FakeGpu()
    rows = run(gpu, [FakePeer(gpu, OURS, 0.5), FakePeer(gpu, "other", 1.0, fault)], [case])
    kinds = {(row["variant"], row["direction"]): row["kind"] for row in rows}
    assert kinds == {
        **{(name, "forward"): "speed" for name in (OURS, "other")},
        **{(name, "backward"): "skipped" for name in (OURS, "other")},
    }
    assert {row["reason"] for row in rows if row["kind"] == "skipped"} == {"of a forward only"}
    assert [row["variant"] for row in rows if row.get("wrong") == ["out"]] == ["other"]
    assert not any("backward" in what for what in gpu.log)
    growing = {one.name for one in CASES if one.rejects("backward")}
    assert growing == {"d128-growing-up", "d128-growing-down"}
    assert not any(one.rejects("forward") for one in CASES)


def test_a_wrong_result_has_no_speed_and_is_not_timed(one_set: None) -> None:
    def fault(found: Any) -> None:
        found[-1][-1, -6:] *= 0.5

    gpu = FakeGpu()
    rows = run(gpu, [FakePeer(gpu, OURS, 0.5), FakePeer(gpu, "other", 1.0, fault)])
    wrong = [row for row in rows if "wrong" in row]
    assert [row["variant"] for row in wrong] == ["other", "other"]
    assert all("ms" not in row and "tflops" not in row for row in wrong)
    assert wrong[1]["wrong"] == ["dv"]
    assert "WRONG: relative error of dv" in report.line(wrong[1])


def test_errors_of_others_are_said_and_ours_count_as_failures(one_set: None) -> None:
    gpu = FakeGpu()
    rows = run(gpu, [FakePeer(gpu, OURS, 0.5, _raise), FakePeer(gpu, "other", 1.0, _raise)])
    assert [row["kind"] for row in rows] == ["failed", "skipped"] * 2
    assert rows[1]["reason"] == "MemoryError: no memory"


def test_cases_that_are_compared_share_their_rounds(one_set: None) -> None:
    gpu = FakeGpu()
    plain = Case("plain", 1, 2, 2, 40, 40, 8, 8)
    other = Case("other", 1, 2, 2, 40, 40, 8, 8, softcap=3.0, beside="plain")
    rows = run(gpu, [FakePeer(gpu, OURS, 0.5)], [plain, other], rounds=3)
    assert [row["case"] for row in rows] == ["plain", "plain", "other", "other"]
    assert [row["ratio_beside"] for row in rows] == [None, None, 1.0, 1.0]
    assert rows[2]["softcap"] == 3.0 and rows[2]["beside"] == "plain"


def test_a_peer_with_streams_of_its_own_puts_all_on_the_wall_clock(one_set: None) -> None:
    gpu = FakeGpu()
    other = FakePeer(gpu, "other", 1.0)
    other.on_stream = False
    rows = run(gpu, [FakePeer(gpu, OURS, 0.5), other])
    assert {row["timer"] for row in rows} == {"wall"}


def test_no_round_begins_after_the_budget(one_set: None) -> None:
    gpu = FakeGpu()
    peers: list[Peer] = [FakePeer(gpu, OURS, 0.5)]
    rows = list(harness.measure(gpu, [SMALL], "float32", plan(peers), late=lambda: True))
    assert [row["rounds"] for row in rows] == [1, 1]


# --- peers ---------------------------------------------------------------------------------------


def test_absent_peers_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("FLASH_ATTENTION_3", raising=False)
    for name in ("torch-flash", "torch-cudnn", "cudnn", "fa3"):
        reason = PEERS[name].available()
        assert reason and "install" in reason
    monkeypatch.setenv("FLASH_ATTENTION_3", str(tmp_path / "none.so"))
    assert "no file" in (PEERS["fa3"].available() or "")


def test_peers_reject_what_they_cannot_do() -> None:
    flash, fa3, naive = (PEERS[name] for name in ("torch-flash", "fa3", "naive"))
    good = Case("", 1, 4, 4, 64, 64, 64, 64, causal=True)
    for peer in PEERS.values():
        assert peer.rejects(good, "bfloat16", "backward") is None
    grouped = Case("", 1, 4, 2, 64, 64, 64, 64)
    assert flash.rejects(grouped, "float16", "backward") is None
    assert fa3.rejects(grouped, "float16", "forward") is None
    assert fa3.rejects(grouped, "float16", "backward") and naive.rejects(grouped, "float16", "")
    assert flash.rejects(good, "float32", "forward")
    for changes in ({"softcap": 1.0}, {"packed": True}, {"window": (1, 1)}, {"head_dim": 60}):
        case = Case(**{**vars(good), **changes})
        assert flash.rejects(case, "float16", "forward") and fa3.rejects(case, "float16", "forward")
    assert flash.rejects(Case("", 1, 4, 4, 32, 64, 64, 64, causal=True), "float16", "forward")


def test_ours_is_also_timed_without_an_order(
    one_set: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("", 2, 2, 2, 30, 40, 8, 8)
    inputs = data.sets_of(case, "float32", np)[0]
    unordered = PEERS["unordered"]
    assert unordered.rejects(case, "float32", "forward") == "of a backward only"
    asked = []
    backward = cuflash.attention_backward

    def noted(*arrays: Any, **options: Any) -> Any:
        asked.append(options["deterministic"])
        return backward(*arrays, **options)

    monkeypatch.setattr(cuflash, "attention_backward", noted)
    want = verify.expected(case, inputs, np)
    for peer in (PEERS[OURS], unordered):
        call = peer.prepare(case, "backward", inputs)
        found = verify.errors(case, "backward", call.read(call.run()), want, np)
        assert not verify.wrong(found, "float32")
    assert asked == [True, False]


def test_our_peer_and_the_naive_one_are_right_on_numpy(one_set: None) -> None:
    case = Case("", 2, 2, 2, 30, 40, 8, 8, causal=True)
    inputs = data.sets_of(case, "float64", np)[0]
    want = verify.expected(case, inputs, np)
    for direction in ("forward", "backward"):
        call = PEERS["naive"].prepare(case, direction, inputs)
        found = verify.errors(case, direction, call.read(call.run()), want, np)
        assert max(found.values()) < 1e-11


# --- the command ---------------------------------------------------------------------------------

HERE = {name: "?" for name in report.MACHINE}


def fake_peers(gpu: FakeGpu, fault: Callable | None = None) -> dict[str, Peer]:
    found = {name: FakePeer(gpu, name, 0.5) for name in (OURS, "torch-flash", "fa3")}
    found["fa3"].absent = "not here"
    found["torch-flash"].fault = fault
    return {**found}


@pytest.fixture
def small_table(monkeypatch: pytest.MonkeyPatch, one_set: None) -> None:
    tiny = Case("d128-s1024-full", 1, 2, 2, 40, 40, 8, 8, groups=("quick",))
    monkeypatch.setattr(cases, "CASES", (tiny,))


def main(*arguments: str, fault: Callable | None = None) -> int:
    gpu = FakeGpu()
    peers = fake_peers(gpu, fault)
    words = [*arguments, "--peers=torch-flash,fa3", "--rounds=3"]
    return command.main(words, make_gpu=lambda: gpu, peers=peers, about=lambda: HERE)


def test_a_run_prints_a_table_and_appends_rows(
    small_table: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    for _ in range(2):
        assert main("--dtype=bfloat16,float16", f"--output={path}", "--published") == 0
    text = capsys.readouterr().out
    assert "without fa3: not here" in text
    assert "[2/2] d128-s1024-full float16: check" in text
    assert "\r" not in text  # no terminal
    assert "published" in text and "ratio" in text and "differs by more than 10%" in text
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 2 * 2 * 2 * 2
    assert [problem for row in rows for problem in report.problems(row)] == []
    assert report.problems({**rows[0], "ms": "1"}) == ["ms is str"]


def test_a_wrong_result_makes_the_command_fail(
    small_table: None, capsys: pytest.CaptureFixture[str]
) -> None:
    def fault(found: Any) -> None:
        found[0][:] = 0

    assert main(fault=fault) == 1
    assert "2 WRONG or failed" in capsys.readouterr().out


def test_peers_can_be_measured_alone(small_table: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("--only-peers", "--output=-", "--direction=forward") == 0
    printed = capsys.readouterr()
    rows = [json.loads(line) for line in printed.out.splitlines()]
    assert [(row["variant"], row["ratio"]) for row in rows] == [("torch-flash", None)]
    assert "TFLOP/s" in printed.err


def test_cases_after_the_budget_are_said(
    small_table: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("--dtype=float16,bfloat16", "--seconds=0.01") == 0
    assert "0.01 seconds are over" in capsys.readouterr().out


def test_the_list_needs_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    text = capsys.readouterr().out
    assert all(case.name in text for case in CASES)
    assert "startup" in text and "torch-cudnn" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "'nothing'"),
        (["startup:nothing"], "'startup:nothing'"),
        (["--peers=flash"], "--peers: expected"),
        (["--dtype=float8"], "--dtype: expected"),
        (["--family=none"], "--family: invalid choice: 'none'"),
    ],
)
def test_wrong_arguments_are_said(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert words in capsys.readouterr().err


def test_without_a_gpu_one_sentence_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def none() -> Any:
        raise RuntimeError("no driver")

    assert command.main(["quick"], make_gpu=none) == 2
    assert capsys.readouterr().err == "python -m bench needs an NVIDIA GPU and CuPy: no driver\n"


def test_a_family_is_left_out_while_cases_run(
    small_table: None, capsys: pytest.CaptureFixture[str]
) -> None:
    traits = Traits(DTYPES["float16"], 64, 64)
    hopper = device.architecture(9, 0)

    def chosen() -> set[str]:
        return {kernel.family for kernel in select.choose("forward", traits, hopper)}

    during = []

    def fault(found: Any) -> None:
        during.append(chosen())

    before = chosen()
    assert before != {"simt"}
    assert main("--family=simt", "--output=-", fault=fault) == 0
    assert during == [{"simt"}] * 2 and chosen() == before
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["machine"]["family"] for row in rows} == {"simt"}


class Terminal(io.StringIO):
    """What a terminal shows, of the control sequences that a table uses."""

    def isatty(self) -> bool:
        return True

    def shown(self) -> list[str]:
        lines, at = [""], 0
        for part in re.split(r"(\n|\r|\033\[\d*[AJ])", self.getvalue()):
            if part == "\n":
                at += 1
                lines += [""] * (at == len(lines))
            elif part.endswith("A") and part.startswith("\033"):
                at -= int(part[2:-1])
            elif part == "\033[J":
                lines[at:] = [""]
            elif part not in ("", "\r"):
                assert not lines[at]
                lines[at] = part
        return lines


def test_a_terminal_shows_what_is_timed_below_what_is_done(
    one_set: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((80, 24)))
    gpu = FakeGpu()
    rows = run(gpu, [FakePeer(gpu, OURS, 0.5)])
    terminal, log = Terminal(), io.StringIO()
    for stream in (terminal, log):
        table = report.Table(stream)
        table.begin(0, "check")
        table.progress(0.25, "round 1/4", rows)
        if stream is terminal:
            assert terminal.shown()[0] == f"[{'#' * 6}{'.' * 18}]  25%  round 1/4"
            assert all(len(text) < 80 for text in terminal.shown())
            assert [text[:15] for text in terminal.shown()[2:]] == ["small          "] * 2 + [""]
        table.progress(0.5, "round 2/4", rows[:1])
        for row in rows:
            table.add(row)
        table.progress(1.0, "done")
        table.say("over")
    whole = [report.line(row) for row in rows]
    assert terminal.shown()[1:] == [*whole, "over", ""]
    assert log.getvalue().splitlines() == ["... check", terminal.shown()[0], *whole, "over"]


def test_a_run_on_a_terminal_ends_with_the_table(
    small_table: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    assert main("--dtype=bfloat16") == 0
    assert "round 3/3" in terminal.getvalue()
    shown = terminal.shown()
    assert "round" not in "".join(shown)
    assert sum("d128-s1024-full" in text for text in shown) == 4


def test_the_time_that_is_left_is_guessed() -> None:
    gpu = FakeGpu()
    clock = command.Clock(gpu, contests=4, rounds=10, budget=100)
    assert clock.left(0, 0) == "at most 100 s left"
    gpu.host = 10_000
    assert clock.left(1, 0) == "30 s left"
    assert clock.left(0, 1) == "90 s left"
    assert not clock.late()
    gpu.host = 101_000
    assert clock.late()


# --- what is published, and the rest -------------------------------------------------------------


def test_published_cells_are_of_cases_in_the_table() -> None:
    known = published.cells()
    names = {case.name for case in CASES}
    for cell in known["cells"]:
        assert cell["case"] in names and cell["direction"] in ("forward", "backward")
        speeds = {key: cell[key] for key in cell if key not in ("case", "direction")}
        assert speeds and all(50 < speed < 800 for speed in speeds.values())
    ways = ("forward", "backward")
    wanted = {(case.name, way) for case in cases.groups()["published"] for way in ways}
    both = [c for c in known["cells"] if {"torch-flash", "torch-cudnn"} <= set(c)]
    have = {(cell["case"], cell["direction"]) for cell in both}
    assert wanted <= have
    assert "not compared" in published.compare([], "NVIDIA A100")[0]


def test_time_to_the_first_result_is_measured_in_two_processes() -> None:
    calls = []

    def child(case: startup.Case, environment: dict[str, str]) -> dict[str, Any]:
        calls.append((case, environment["CUFLASH_CACHE_DIR"]))
        import time

        seconds = {"import_s": 0.5, "forward_s": 0.2, "backward_s": 2.5}
        return {**seconds, "at": time.time() + 4}

    rows = list(startup.rows(startup.CASES, 60, child))
    assert [row["cache"] for row in rows] == ["empty", "warm"] * len(startup.CASES)
    assert [case for case, _ in calls[::2]] == [*startup.CASES]
    assert calls[0] == calls[1] != calls[2] and calls[0][1] != calls[2][1]
    assert rows[0]["total_s"] == pytest.approx(4, abs=0.5) and rows[0]["backward_s"] == 2.5
    assert rows[0]["slow"] == "backward" and rows[1]["slow"] == "forward backward"
    assert len({(row["dtype"], row["head_dim"], row["options"]) for row in rows}) == len(rows) / 2


def test_first_calls_are_chosen_by_name() -> None:
    names = [case.name for case in startup.CASES]
    assert len(set(names)) == len(names) and "startup:bfloat16-128-all" in names
    assert [x.name for x in startup.select(["startup:float32-64", "startup:float16-64"])] == [
        *("startup:float16-64", "startup:float32-64")
    ]
    assert startup.select(["startup"]) == startup.select(["startup:*"]) == [*startup.CASES]
    assert startup.select([]) == []
    with pytest.raises(ValueError, match=r"'startup:float8-64'; there are startup:float16-64, "):
        startup.select(["startup:float8-64"])


def test_first_calls_after_the_limit_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0], time=lambda: 0.0)
    monkeypatch.setattr(startup, "time", clock)

    def child(case: startup.Case, environment: dict[str, str]) -> dict[str, Any]:
        now[0] += 20  # seconds
        if case.head_dim == 128:
            raise RuntimeError("no room")
        return {"forward_s": 0.2, "backward_s": 2.5, "at": 4.0}

    rows = list(startup.rows(startup.CASES[:4], 50, child))
    kinds = [
        "startup",
        "startup",
        "failed",
        "skipped",
        "skipped",
    ]  # a full cache needs an empty one
    assert [row["kind"] for row in rows] == kinds
    assert rows[2]["variant"] == "empty" and "no room" in report.line(rows[2])
    assert "50 seconds are over" in report.line(rows[3])
    assert report.line(rows[3]).startswith("startup:float16-192 ")


def test_first_calls_come_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each is in the file before the next is measured."""
    path = tmp_path / "rows.jsonl"
    seen = []

    def rows(chosen: list[startup.Case], seconds: float) -> Any:
        for case in chosen:
            seen.append(path.read_text(encoding="utf-8").count("\n"))
            yield {"kind": "startup", "case": case.name, "seconds": seconds}

    monkeypatch.setattr(startup, "rows", rows)
    arguments = ["startup:*-all", "--seconds=9", f"--output={path}"]
    assert command.main(arguments, make_gpu=lambda: None, about=dict) == 0
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert seen == [*range(len(found))] and {row["seconds"] for row in found} == {9}
    assert [row["case"] for row in found] == [
        case.name for case in startup.CASES if case.options == startup.ALL
    ]


@pytest.mark.parametrize("options", [(), ("bias", "dropout_p"), startup.ALL], ids=str)
def test_first_calls_are_of_both_passes(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NumPy arrays, which a module in the place of CuPy makes."""
    gpu = types.SimpleNamespace(synchronize=lambda: None)
    cuda = types.SimpleNamespace(Device=lambda: gpu)
    stand_in = types.SimpleNamespace(asarray=np.asarray, cuda=cuda, ndarray=())
    monkeypatch.setitem(sys.modules, "cupy", stand_in)
    monkeypatch.setattr(startup, "_LENGTH", 24)
    used, find = set(), select.choose

    def choose(direction: Any, traits: Traits, where: device.Device) -> Any:
        used.update(traits.features)
        return find(direction, traits, where)

    monkeypatch.setattr(select, "choose", choose)
    launch.forget()
    seconds = startup.child(startup.Case("bfloat16", 8, options))
    launch.forget()
    assert {"forward_s", "backward_s", "next_forward_s", "next_backward_s"} < set(seconds)
    assert used == {name.split("_")[0] for name in options}


def test_the_kernels_of_the_clock_compile() -> None:
    from cupy.cuda import nvrtc

    source = (ROOT / "bench" / "clock.cu").read_text(encoding="utf-8")
    program = nvrtc.createProgram(source, "clock.cu", [], [])
    nvrtc.compileProgram(program, ["-arch=sm_75"])
    nvrtc.destroyProgram(program)


def test_nvml_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", missing)
    with pytest.raises(OSError, match="libnvidia-ml"):
        machine._nvml("0000:00:00.0")
