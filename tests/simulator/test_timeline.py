"""Tests timeline/2 and the Chrome trace."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from simulator import Plan, Timeline, simulate
from tests.tiny import LIMIT, MACHINE, PROGRAM, SWAP_PLAN

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny_swap.json"


@pytest.fixture
def timeline() -> Timeline:
    return simulate(PROGRAM, SWAP_PLAN, MACHINE, LIMIT)


def test_file_and_back(tmp_path, timeline):
    timeline.save(tmp_path / "timeline.json")
    assert Timeline.load(tmp_path / "timeline.json") == timeline and os.listdir(tmp_path) == ["timeline.json"]
    assert (tmp_path / "timeline.json").read_bytes() == GOLDEN.read_bytes()  # the format stays


def test_optional_keys_are_written_if_needed(timeline):
    assert "period" not in timeline.to_dict() and "stall_issue_ns" not in timeline.to_dict()["breakdown"]
    slow = replace(timeline, period=2, breakdown=replace(timeline.breakdown, stall_issue_ns=1))
    assert Timeline.from_dict(slow.to_dict()) == slow and not slow.steady


def test_when_the_peak_is_and_what_runs_then(timeline):
    """The first instant with 150 bytes is 90: a4 is freed, b3 (kernel 5) and a1's swap-in allocate their memory."""
    time_ns, held = timeline.peak
    assert time_ns == 90 and held == {0: 10, 1: 40, 2: 40, 3: 40, 5: 10, 6: 10}
    assert [timeline.span_at(t).index for t in (0, 39, 60, 69, 90, 120)] == [0, 2, 3, 3, 5, 5]
    assert timeline.span_at(-1).index == 0


def test_overhead(timeline):
    assert timeline.overhead == pytest.approx(50 / 120)
    assert simulate(PROGRAM.with_durations([0] * 8), Plan(), MACHINE, 180).overhead == 0


def test_the_chrome_trace(timeline):
    trace = timeline.perfetto(PROGRAM)
    assert json.loads(json.dumps(trace)) == trace
    events = trace["traceEvents"]
    assert {e["pid"] for e in events} == {1}
    assert events[0] == {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "tiny"}}
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["compute", "d2h", "h2d"]
    bars = [e for e in events if e["ph"] == "X"]
    assert len(bars) == len(timeline.spans)
    swap_out = next(e for e in bars if e["cat"] == "swap_out")
    assert (swap_out["tid"], swap_out["name"], swap_out["ts"], swap_out["dur"]) == (2, "swap_out a1", 0.02, 0.04)
    assert swap_out["args"] == {"index": 1, "nbytes": 40}
    counter = [(e["ts"], e["args"]["bytes"]) for e in events if e["ph"] == "C"]
    assert counter == [(t / 1000, used) for t, used in timeline.memory]
