"""The host issues what the machine runs (RULES.md, choice i): by hand, everywhere the same, and against a host
that is simulated."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from simulator import Engine, Job, Kernel, Machine, Plan, Program, Tensor, Timeline, rules, simulate, simulate_jobs
from simulator.compiled.engine import rows_of
from simulator.schedule import lower
from simulator.timeline import Breakdown
from tests import tiny
from tests.oracle import violations
from tests.strategies import machines, plans, programs

SLOW = replace(tiny.MACHINE, issue_ns=20)


@pytest.mark.parametrize("run", [rules.simulate, simulate])
def test_by_hand(run):
    """tests/tiny.py: eight kernels, 120 ns; with the swap 170 ns and two copies; with the recomputation nine, 130."""
    assert run(tiny.PROGRAM, Plan(), SLOW, 180).iteration_ns == 8 * 20
    swapped = run(tiny.PROGRAM, tiny.SWAP_PLAN, SLOW, tiny.LIMIT)
    assert swapped.iteration_ns == 10 * 20 and swapped.breakdown == Breakdown(120, 0, 30, 20, 30, 30)
    assert swapped.boundaries == (170, 340) and swapped.ideal_ns == 120 and swapped.overhead == 200 / 120 - 1
    again = run(tiny.PROGRAM, tiny.RECOMPUTE_PLAN, SLOW, tiny.LIMIT)
    assert again.iteration_ns == 9 * 20 and again.breakdown.stall_issue_ns == 9 * 20 - 130
    fast = run(tiny.PROGRAM, tiny.SWAP_PLAN, replace(SLOW, issue_ns=17), tiny.LIMIT)  # 170 ns, as the machine
    assert fast == run(tiny.PROGRAM, tiny.SWAP_PLAN, tiny.MACHINE, tiny.LIMIT)


def test_what_takes_no_time_is_not_issued():
    marker = Kernel("marker", "other", "forward", (0,), (), 0)
    program = Program("two", (Tensor("x", 1),), (Kernel("k", "other", "forward", (), (0,), 5), marker))
    assert simulate(program, Plan(), replace(SLOW, issue_ns=7), 10).iteration_ns == 7


def test_in_a_file_it_stands_where_there_is_such_a_stall(tmp_path):
    for machine in (SLOW, tiny.MACHINE):
        timeline = simulate(tiny.PROGRAM, tiny.SWAP_PLAN, machine, tiny.LIMIT)
        timeline.save(tmp_path / "t.json")
        assert Timeline.load(tmp_path / "t.json") == timeline
        assert ("stall_issue_ns" in timeline.to_dict()["breakdown"]) == (machine is SLOW)


@given(st.data())
def test_it_changes_nothing_but_the_length_of_the_iteration(data):
    program = data.draw(programs())
    plan = data.draw(plans(program, reruns=True))
    machine = replace(data.draw(machines()), issue_ns=data.draw(st.integers(0, 40)))
    limit = lower(program, plan).required_bytes + data.draw(st.integers(0, 60))
    timeline = simulate(program, plan, machine, limit)
    device = simulate(program, plan, replace(machine, issue_ns=0), limit)
    assert (timeline.spans, timeline.events, timeline.peak_bytes) == (device.spans, device.events, device.peak_bytes)
    assert timeline.iteration_ns == max(device.iteration_ns, lower(program, plan).issued * machine.issue_ns)


@pytest.mark.parametrize(("cost", "most"), [("issue_ns", 40), ("wait_ns", 20)])
@given(st.data())
def test_a_cutoff_gives_up_nothing_that_is_faster(cost, most, data):
    program = data.draw(programs())
    plan = data.draw(plans(program))
    machine = replace(data.draw(machines()), **{cost: data.draw(st.integers(0, most))})
    engine = Engine(program, machine, lower(program, plan).required_bytes)
    rows = rows_of(plan.decisions)
    score = engine.score(rows)
    if score.feasible:
        assert engine.score(rows, cutoff_ns=score.iteration_ns + 1) == score
        cut = engine.score(rows, cutoff_ns=score.iteration_ns)
        assert not cut.feasible or cut == score


@pytest.mark.parametrize("lie", ["iteration_ns", "stall_issue_ns"])
def test_a_lie_about_it_is_found(lie):
    right = simulate(tiny.PROGRAM, tiny.SWAP_PLAN, SLOW, tiny.LIMIT)
    if lie == "iteration_ns":
        wrong = replace(right, iteration_ns=170)
    else:
        wrong = replace(right, breakdown=replace(right.breakdown, stall_issue_ns=0))
    assert {v.rule for v in violations(wrong, tiny.PROGRAM, tiny.SWAP_PLAN, SLOW, tiny.LIMIT)} == {"figures"}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 60))
def test_a_host_that_runs_ahead_sets_the_pace_or_does_not_matter(durations, issue_ns):
    """A host and a machine, thing by thing: what 100 iterations take, once thousands have settled the start."""
    kernels = tuple(Kernel(f"k{i}", "other", "forward", (), (), ns) for i, ns in enumerate(durations))
    program = Program("straight", (), kernels)
    machine = Machine("m", 1, 1, 1, issue_ns=issue_ns)
    issued = ended = 0
    ends = []
    for _ in range(3000):
        for ns in durations:
            issued += issue_ns
            ended = max(ended, issued) + ns
        ends.append(ended)
    assert ends[-1] - ends[-101] == 100 * simulate(program, Plan(), machine, 1).iteration_ns


def test_several_jobs_refuse_it():
    with pytest.raises(
        ValueError, match=r"^machine\.issue_ns is 20: with several jobs hosts are never too slow \(0\)$"
    ):
        simulate_jobs([Job("a", tiny.PROGRAM, Plan(), iterations=1)], SLOW, 200)
