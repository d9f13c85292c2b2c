"""What a JobsTimeline can be turned into."""

import json
import math

from simulator import Job, Kernel, Plan, Program, Swap, Tensor
from simulator.rules import simulate_jobs
from tests import tiny

JOBS = (
    Job("a", tiny.PROGRAM, tiny.SWAP_PLAN, iterations=2),
    Job("b", tiny.PROGRAM, Plan(), 50, leaves_ns=300),
    Job("late", tiny.PROGRAM, Plan(), 10**6, leaves_ns=20),
)
TIMELINE = simulate_jobs(JOBS, tiny.MACHINE, 200)


def test_json():
    out = json.loads(json.dumps(TIMELINE.to_dict()))
    assert (out["limit"], out["sharing"], len(out["order"])) == (
        200,
        "fifo",
        sum(len(j["events"]) for j in out["jobs"]),
    )
    assert out["jobs"][0]["spans"] == [list(s) for s in TIMELINE.jobs[0].spans]
    assert out["evictions"][0].keys() == {"time_ns", "job", "tensor", "block", "nbytes", "wanted_by"}


def test_perfetto_has_a_process_a_job():
    trace = TIMELINE.perfetto(JOBS)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert names == {1: "a", 2: "b", 3: "late", 4: "all jobs"}
    pieces = [e for e in trace if e["ph"] == "X"]
    assert len(pieces) == sum(len(j.spans) + len(j.stalls) for j in TIMELINE.jobs)
    first = next(e for e in pieces if e["cat"] == "swap_out" and e["pid"] == 1)
    assert first["name"] == "swap_out a1" and first["dur"] == 0.04
    memory = [e["args"]["bytes"] for e in trace if e["ph"] == "C" and e["pid"] == 4]
    assert max(memory) == TIMELINE.peak_bytes <= 200 and memory[-1] == 0


def test_perfetto_marks_the_switches_of_plans():
    job = Job("a", tiny.PROGRAM, Plan(), iterations=3, switches=((1, tiny.RECOMPUTE_PLAN),))
    timeline = simulate_jobs((job,), tiny.MACHINE, 200)
    marks = [e for e in timeline.perfetto((job,))["traceEvents"] if e["ph"] == "i"]
    assert [(e["pid"], e["name"], e["ts"]) for e in marks] == [(1, "plan 1", timeline.jobs[0].boundaries[0] / 1000)]


def test_perfetto_has_the_names_of_the_step_that_runs():
    first = Program("one", (Tensor("x", 10),), (Kernel("make x", "other", "forward", (), (0,), 10),))
    second = Program(
        "two", (Tensor("y", 10), Tensor("w", 10, "parameter", True)),
        (Kernel("make y", "other", "forward", (), (0, 1), 10), Kernel("read y", "other", "forward", (0,), (), 10)),
    )  # fmt: skip
    away = Plan((Swap(1, 0, 0),))
    job = Job("a", first, Plan(), iterations=4, steps=((first, Plan()), (second, away)))
    ran = simulate_jobs((job,), tiny.MACHINE, 30)
    names = [e["name"] for e in ran.perfetto((job,))["traceEvents"] if e["ph"] == "X" and e["cat"] != "wait"]
    second = ["swap_in w", "make y", "swap_out w", "read y"]
    assert names == ["make x", "swap_out w", *second, "make x", *second]


def test_what_each_holds_adds_up():
    for time, used in dict(TIMELINE.memory).items():  # after all that this instant changes
        assert sum([0, *(b for t, b in job.held if t <= time)][-1] for job in TIMELINE.jobs) == used


def test_a_job_that_never_ran_has_no_mean():
    assert math.isnan(TIMELINE.jobs[2].mean_ns) and TIMELINE.jobs[2].iterations_ns == ()
