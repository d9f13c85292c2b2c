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


def test_a_period_other_than_one_is_written(timeline):
    assert "period" not in timeline.to_dict() and Timeline.from_dict(timeline.to_dict()).steady
    cycle = replace(timeline, period=2)
    assert cycle.to_dict()["period"] == 2 and Timeline.from_dict(cycle.to_dict()) == cycle and not cycle.steady


def test_a_timeline_is_steady_by_default(timeline):
    values = {name: getattr(timeline, name) for name in timeline.__dataclass_fields__ if name != "period"}
    assert Timeline(**values) == timeline
    record = (timeline.boundaries, timeline.spans, timeline.events, timeline.events_until, [])
    assert Timeline.assemble(PROGRAM, LIMIT, 140, *record).period == 1


def test_the_peak_by_kind(timeline):
    """At 90: w (10), a1, a2, a3, g4 and g3: 150 bytes, evicted tensors aside (tests/tiny.py)."""
    kinds = timeline.peak_by(lambda owner: PROGRAM.tensors[owner].kind if owner >= 0 else "workspace")
    assert sum(kinds.values()) == timeline.peak_bytes == 150 and kinds["parameter"] == 10
    assert {kind for kind, nbytes in kinds.items() if nbytes} <= {"parameter", "activation", "gradient"}


def test_when_the_peak_is_and_what_runs_then(timeline):
    """The first instant with 150 bytes is 90: a4 is freed, b3 (kernel 5) and a1's swap-in allocate their memory."""
    time_ns, held = timeline.peak
    assert time_ns == 90 and held == {0: 10, 1: 40, 2: 40, 3: 40, 5: 10, 6: 10}
    assert [timeline.running(t).index for t in (0, 39, 60, 69, 90, 120)] == [0, 2, 3, 3, 5, 5]
    assert timeline.running(-1).index == 0


def test_overhead(timeline):
    assert timeline.overhead == pytest.approx(50 / 120)
    assert simulate(PROGRAM.with_durations([0] * 8), Plan(), MACHINE, 180).overhead == 0


def test_the_breakdown_is_of_the_last_iteration(timeline):
    """A swap-in in flight at the boundary is split between the iterations."""
    parts = timeline.breakdown
    assert parts.compute_ns + parts.recompute_ns + parts.stall_memory_ns + parts.stall_data_ns == 170
    assert timeline.boundaries == (170, 340)


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
