"""The checker on early copies, early recomputation, kernels that run again, the shared link, one engine, the host.

A right timeline, worked out by hand, has no violation, and a lie about it is found.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator import Kernel, Machine, Plan, Program, Recompute, Rerun, Swap, Tensor, Timeline, simulate
from simulator.timeline import Span
from tests import tiny
from tests.simulator.test_validate import altered, find, rules, with_event, with_span

ROOM = 1000
ONE_ENGINE = replace(tiny.MACHINE, copy_engines=1)


def right(plan: Plan, program: Program = tiny.PROGRAM, machine: Machine = tiny.MACHINE, limit: int = ROOM) -> Timeline:
    """Two iterations, in which the checker finds nothing."""
    timeline = simulate(program, plan, machine, limit)
    assert rules(timeline, plan, program, machine, limit) == set()
    return timeline


def lies(timeline: Timeline, plan: Plan, program: Program = tiny.PROGRAM, machine: Machine = tiny.MACHINE) -> set[str]:
    return rules(timeline, plan, program, machine, ROOM)


def copies(timeline: Timeline) -> list[tuple[str, int, int, int]]:
    """(kind, tensor, start, end) of the copies in the first iteration."""
    return [(s.kind, s.index, s.start_ns, s.end_ns) for s in timeline.spans
            if s.stream != "compute" and s.start_ns < timeline.boundaries[0]]  # fmt: skip


def event(timeline: Timeline, owner: int, sign: int, occurrence: int = 0) -> int:
    """Position of an event in the timeline."""
    found = [i for i, e in enumerate(timeline.events) if e.owner == owner and (e.nbytes > 0) == (sign > 0)]
    return found[occurrence]


def moved(timeline: Timeline, i: int, time_ns: int) -> Timeline:
    """Event i happens at another time, in its place among the others."""
    events = [*timeline.events[:i], *timeline.events[i + 1 :], timeline.events[i]._replace(time_ns=time_ns)]
    return replace(timeline, events=tuple(sorted(events, key=lambda e: (e.time_ns, e.nbytes > 0))))


def program_of(*lines: tuple[tuple[int, ...], tuple[int, ...]], persistent: int = 0, lasts: int = 10) -> Program:
    """Tensors of 8 bytes, the first so many persistent, and kernels of 10 ns that read and write them."""
    tensors = 1 + max(t for line in lines for side in line for t in side)
    return Program(
        "by hand",
        tuple(Tensor(f"t{t}", 8, persistent=t < persistent) for t in range(tensors)),
        tuple(Kernel(f"k{i}", "other", "forward", *line, lasts) for i, line in enumerate(lines)),
    )


# --------------------------------------------------------------------------------------- early copies


def test_an_early_copy():
    """a1 is copied from the end of f2 on [20, 60) and leaves when b3 ends at 80; back [80, 120) for b2."""
    plan, late = Plan((Swap(tiny.A1, 5, 6, copy=1),)), Plan((Swap(tiny.A1, 5, 6),))
    timeline = right(plan)
    assert copies(timeline) == [("swap_out", tiny.A1, 20, 60), ("swap_in", tiny.A1, 80, 120)]
    assert timeline.events[event(timeline, tiny.A1, -1)].time_ns == 80
    assert "memory" in lies(moved(timeline, event(timeline, tiny.A1, -1), 60), plan)  # when the copy is complete
    assert "swap-out" in lies(altered(timeline, "swap_out", tiny.A1, start_ns=19, end_ns=59), plan)  # f2 still runs
    assert "idle" in lies(altered(timeline, "swap_out", tiny.A1, start_ns=21, end_ns=61), plan)
    assert "idle" in lies(simulate(tiny.PROGRAM, late, tiny.MACHINE, ROOM), plan)  # copied when b3 ends
    assert "swap-out" in lies(timeline, late)
    again = Span(100, 140, "d2h", "swap_out", tiny.A1)
    assert "swap-out" in lies(with_span(timeline, 0, timeline.spans[0], again), plan)  # the copy is valid


def test_an_early_copy_that_is_not_complete_when_the_gap_opens():
    """Copied [20, 60), but f3 ends at 30: f4 waits for the memory under 150 bytes."""
    plan = Plan((Swap(tiny.A1, 2, 6, copy=1),))
    timeline = right(plan, limit=tiny.LIMIT)
    i = event(timeline, tiny.A1, -1)
    assert timeline.events[i].time_ns == 60
    assert "memory" in rules(moved(timeline, i, 30), plan, limit=tiny.LIMIT)
    assert "memory" in rules(moved(timeline, i, 61), plan, limit=tiny.LIMIT)


def test_sync_with_an_early_copy():
    """Compute waits from the end of ``after`` for the memory, not for the copy from its issue on."""
    complete, open_ = Plan((Swap(tiny.A1, 5, 6, sync=True, copy=1),)), Plan((Swap(tiny.A1, 2, 6, copy=1),))
    assert right(complete).spans == right(replace(complete, decisions=(Swap(tiny.A1, 5, 6, copy=1),))).spans
    waits = replace(open_, decisions=(Swap(tiny.A1, 2, 6, sync=True, copy=1),))
    timeline = right(waits)
    assert [s.start_ns for s in timeline.spans if s.kind == "kernel"][:4] == [0, 10, 20, 60]  # f4 after the copy
    assert "sync" in lies(simulate(tiny.PROGRAM, open_, tiny.MACHINE, ROOM), waits)
    assert "idle" in lies(timeline, open_)


# k0 and k2 read the persistent tensor 0, k2 writes it; it is away while k1 runs.
PERSISTENT = program_of(((0,), ()), ((), (1,)), ((0,), (0,)), ((), ()), persistent=1)


def test_a_copy_of_the_iteration_before():
    """Copied when k3 ends, for the gap of the next iteration: before the first, that has been done."""
    plan = Plan((Swap(0, 0, 2, copy=3),))
    timeline = right(plan, PERSISTENT)
    assert copies(timeline) == [("swap_in", 0, 10, 18)]
    assert [s.start_ns for s in timeline.spans if s.kind == "swap_out"] == [timeline.boundaries[0]]
    first = Span(10, 18, "d2h", "swap_out", 0)
    assert "swap-out" in lies(with_span(timeline, 0, timeline.spans[0], first), plan, PERSISTENT)
    without = with_span(timeline, find(timeline, "swap_out", 0))
    assert "idle" in lies(without, plan, PERSISTENT)
    # A plan that copies when k0 ends has nothing on the host at the start.
    assert lies(timeline, Plan((Swap(0, 0, 2),)), PERSISTENT) == {"idle"}


# -------------------------------------------------------------------------------- early recomputation


def test_an_early_recomputation():
    """f1 runs again for b3, one kernel before b2 needs a1."""
    early, late = Plan((Recompute(tiny.A1, 1, 6, at=5),)), Plan((Recompute(tiny.A1, 1, 6),))
    timeline = right(early)
    assert timeline.spans[find(timeline, "recompute", 0)][:2] == (60, 70)
    assert {"recompute", "resident"} <= lies(simulate(tiny.PROGRAM, late, tiny.MACHINE, ROOM), early)
    assert "recompute" in lies(timeline, late)
    never = tuple(s for s in timeline.spans if s.kind != "recompute")
    assert {"recompute", "resident"} <= lies(replace(timeline, spans=never), early)
    assert "memory" in lies(moved(timeline, event(timeline, tiny.A1, 1, 1), 90), early)  # taken when b2 starts
    assert "memory" in lies(moved(timeline, event(timeline, tiny.A1, -1, 1), 90), early)  # given back before b2


def test_a_recomputation_that_keeps_what_is_to_come_back_later_is_not_enough_in_its_place():
    """The pass of k4 keeps t0, too; but t0 was to be back for k3."""
    program = program_of(((), (0,)), ((0,), (1,)), ((), ()), ((), ()), ((0, 1), ()))
    early = Plan((Recompute(0, 1, 4, keep=True, at=3), Recompute(1, 1, 4, keep=True)))
    late = Plan((Recompute(0, 1, 4, keep=True), Recompute(1, 1, 4, keep=True)))
    right(early, program)
    assert "recompute" in lies(right(late, program), early, program)


# ------------------------------------------------------------------------------ kernels that run again


def test_reruns_are_those_of_the_plan():
    plan = Plan((Rerun(0, 6), Rerun(1, 6)))
    timeline = right(plan)
    first, second = find(timeline, "recompute", 0), find(timeline, "recompute", 1)
    assert [timeline.spans[i][:2] for i in (first, second)] == [(80, 90), (90, 100)]
    for other in (
        Plan((Rerun(0, 6),)),
        Plan((Rerun(0, 5), Rerun(1, 6))),
        Plan((Rerun(0, 6), Rerun(1, 6), Rerun(2, 6))),
    ):
        assert "recompute" in lies(timeline, other), other
    spans = list(timeline.spans)
    spans[first], spans[second] = spans[first]._replace(index=1), spans[second]._replace(index=0)
    assert "recompute" in lies(replace(timeline, spans=tuple(spans)), plan)
    assert "recompute" in lies(timeline, Plan())


def test_a_block_lives_until_the_last_read_before_its_writer_runs_again():
    """f1 runs again for b2: the first a1 lives until f2 ends at 20, the second from 80 to the end of b1."""
    plan = Plan((Rerun(0, 6),))
    timeline = right(plan)
    took, gave = event(timeline, tiny.A1, 1, 1), event(timeline, tiny.A1, -1)
    assert (timeline.events[gave].time_ns, timeline.events[took].time_ns) == (20, 80)
    assert "memory" in lies(moved(timeline, gave, 30), plan)  # one kernel too long
    assert "memory" in lies(moved(timeline, gave, 10), plan)
    assert "memory" in lies(moved(timeline, took, 70), plan)
    one_block = with_event(timeline, took, timeline.events[took]._replace(block=timeline.events[gave].block))
    assert "memory" in lies(one_block, plan)


def test_what_a_rerun_reads_is_kept_for_it():
    """k1 runs again for k3 and reads t0, of which k1 was the last use: it is kept until the pass ends at 40."""
    program = program_of(((), (0,)), ((0,), (1,)), ((), ()), ((1,), ()))
    plan = Plan((Rerun(1, 3),))
    timeline = right(plan, program)
    i = event(timeline, 0, -1)
    assert timeline.events[i].time_ns == 40
    assert "memory" in lies(moved(timeline, i, 20), plan, program)


def test_a_rerun_on_what_the_pass_has_not_written():
    """k1 updates t0 in place. Run again without k0, it would update what it has updated before."""
    program = program_of(((), (0,)), ((0,), (0,)), ((), ()), ((0,), ()))
    timeline = right(Plan((Rerun(0, 3), Rerun(1, 3))), program)
    without = tuple(s for s in timeline.spans if (s.kind, s.index) != ("recompute", 0))
    assert "resident" in lies(replace(timeline, spans=without), Plan((Rerun(1, 3),)), program)


def test_a_rerun_on_another_content():
    """k2 makes t1 from t0 as k0 and k1 have left it; run again after k0 alone it would make another."""
    program = program_of(((), (0,)), ((0,), (0,)), ((0,), (1,)), ((), (0,)), ((1, 0), ()))
    timeline = right(Plan((Rerun(0, 4), Rerun(1, 4), Rerun(2, 4))), program)
    without = tuple(s for s in timeline.spans if (s.kind, s.index) != ("recompute", 1))
    assert "content" in lies(replace(timeline, spans=without), Plan((Rerun(0, 4), Rerun(2, 4))), program)


def test_a_rerun_does_not_replace_a_persistent_tensor():
    """k1 writes t0 anew and t1; run again for k3, its t0 goes to a block that is free again when it ends at 40."""
    program = program_of(((0,), ()), ((), (0, 1)), ((), ()), ((1, 0), ()), persistent=1)
    plan = Plan((Rerun(1, 3),))
    timeline = right(plan, program)
    took, gave = event(timeline, 0, 1, 1), event(timeline, 0, -1)
    assert (timeline.events[took].time_ns, timeline.events[gave].time_ns) == (30, 40)
    bare = replace(timeline, events=tuple(e for i, e in enumerate(timeline.events) if i not in (took, gave)))
    assert "memory" in lies(bare, plan, program)
    assert "memory" in lies(moved(timeline, gave, 50), plan, program)


def test_a_rerun_does_not_replace_a_tensor_on_the_host():
    """k0 runs again for k2 while t0 is on the host: its t0 is gone when it ends, and k4 waits for the tensor itself."""
    program = program_of(((), (0, 1)), ((0, 1), ()), ((1,), ()), ((), ()), ((0,), ()))
    plan = Plan((Swap(0, 1, 4), Rerun(0, 2)))
    timeline = right(plan, program)
    assert copies(timeline) == [("swap_out", 0, 20, 28), ("swap_in", 0, 28, 36)]
    no_copies = replace(timeline, spans=tuple(s for s in timeline.spans if s.kind != "swap_in"))
    assert "idle" in lies(no_copies, plan, program)
    assert [e.time_ns for e in timeline.events if e.owner == 0][:6] == [0, 20, 28, 28, 30, 60]
    assert "memory" in lies(moved(timeline, event(timeline, 0, -1, 1), 50), plan, program)


# ------------------------------------------------------------------------------------------- the link

# Without a common limit: out a1 [20, 60), a2 [60, 100); back a1 [60, 100), a2 [100, 140) for b3.
BOTH = Plan((Swap(tiny.A1, 1, 6, prefetch=3), Swap(tiny.A2, 2, 5)))
SHARED = tiny.MACHINE.with_shared_link(10**9)  # half of what both do alone
UNEQUAL = replace(tiny.MACHINE, duplex_h2d_bytes_per_s=250_000_000)


def test_a_shared_link():
    """a2 leaves and a1 returns at half the rate, both [60, 140)."""
    timeline = right(BOTH, machine=SHARED)
    assert copies(timeline)[1:3] == [("swap_out", tiny.A2, 60, 140), ("swap_in", tiny.A1, 60, 140)]
    assert lies(timeline, BOTH) >= {"duration"}
    assert "duration" in lies(right(BOTH), BOTH, machine=SHARED)
    for kind, tensor, end in (("swap_out", tiny.A2, 139), ("swap_out", tiny.A2, 141), ("swap_in", tiny.A1, 139)):
        assert "duration" in lies(altered(timeline, kind, tensor, end_ns=end), BOTH, machine=SHARED)
    # In at a quarter of the rate, out as alone: a1 has 10 bytes when a2 has left at 100, and the others by 130.
    timeline = right(BOTH, machine=UNEQUAL)
    assert copies(timeline)[1:3] == [("swap_out", tiny.A2, 60, 100), ("swap_in", tiny.A1, 60, 130)]
    assert "duration" in lies(timeline, BOTH, machine=SHARED)
    assert "duration" in lies(right(BOTH, machine=SHARED), BOTH, machine=UNEQUAL)
    # With one engine there is never anything beside a copy.
    one = replace(SHARED, copy_engines=1)
    assert all(s.end_ns - s.start_ns == 40 for s in right(BOTH, machine=one).spans if s.stream != "compute")


def test_one_engine_serves_in_order_of_issue():
    """a1's return is issued when f3 ends at 30, a2's copy when f4 ends at 40; the engine is free at 60."""
    pinned, free = (Plan((Swap(tiny.A1, 1, 6, prefetch=p), Swap(tiny.A2, 3, 5))) for p in (2, None))
    first, last = right(pinned, machine=ONE_ENGINE), right(free, machine=ONE_ENGINE)
    assert copies(first)[1:3] == [("swap_in", tiny.A1, 60, 100), ("swap_out", tiny.A2, 100, 140)]
    assert copies(last)[1:3] == [("swap_out", tiny.A2, 60, 100), ("swap_in", tiny.A2, 100, 140)]
    assert "idle" in lies(first, free, machine=ONE_ENGINE)  # the copy could leave
    assert "idle" in lies(last, pinned, machine=ONE_ENGINE)
    at_once = Plan((Swap(tiny.A1, 1, 6, prefetch=3), Swap(tiny.A2, 3, 5)))  # both when f4 ends: a2 leaves first
    assert copies(right(at_once, machine=ONE_ENGINE)) == copies(last)
    assert "idle" in lies(first, at_once, machine=ONE_ENGINE)


# ---------------------------------------------------------------------------------- room, the host, rule 5


def test_a_return_that_leaves_no_room():
    """t0 is away from 10 to k4. At 18 it would fit, but k2 needs 30 bytes more: it returns when that ends at 30."""
    kernels = list(program_of(((), (0,)), ((), ()), ((), ()), ((), ()), ((0,), ())).kernels)
    kernels[2] = replace(kernels[2], workspace=30)
    program = Program("a peak", (Tensor("t0", 8),), tuple(kernels))
    plan = Plan((Swap(0, 0, 4),))
    timeline = right(plan, program, limit=35)
    assert copies(timeline) == [("swap_out", 0, 10, 18), ("swap_in", 0, 30, 38)]
    for start, rule in ((18, "swap-in"), (29, "swap-in"), (31, "idle")):
        changed = altered(timeline, "swap_in", 0, start_ns=start, end_ns=start + 8)
        assert rule in rules(changed, plan, program, limit=35), start
    assert "idle" in rules(timeline, plan, program, limit=38)  # it fits beside k2


@pytest.mark.parametrize(
    ("decisions", "needed"),
    [
        ((Swap(tiny.A1, 1, 6),), 40),
        ((Swap(tiny.A1, 1, 6), Swap(tiny.A2, 2, 5)), 80),
        ((Swap(tiny.A1, 1, 6), Swap(tiny.W, 7, 0)), 40),  # w leaves when b1 ends, a1 is back before
        ((Swap(tiny.A1, 1, 6), Swap(tiny.W, 0, 7)), 50),
        ((Swap(tiny.A3, 3, 4), Swap(tiny.A2, 4, 5)), 40),  # one after the other
        ((Swap(tiny.A3, 3, 4), Swap(tiny.A2, 4, 5, copy=2)), 80),  # a2 is copied before a3 is back
    ],
)
def test_what_the_host_holds(decisions, needed):
    plan = Plan(decisions)
    timeline = right(plan, machine=replace(tiny.MACHINE, host_bytes=needed))
    assert lies(timeline, plan, machine=replace(tiny.MACHINE, host_bytes=needed - 1)) == {"host"}


@pytest.mark.parametrize(("writers", "needed"), [((), 16), ((2,), 8), ((8,), 16), ((2, 8), 8)])
def test_what_the_host_holds_between_gaps(writers, needed):
    """t0 is away for k1 and for k7, t1 for k4: then the copy of t0 is there where the second gap finds it valid."""
    reads = [(0,), (), (0,), (1,), (), (1,), (0,), (), (0,)]
    writes = [(0,) * (k in writers) + (1,) * (k == 1) for k in range(9)]
    program = program_of(*zip(reads, writes, strict=True), persistent=1)
    plan = Plan((Swap(0, 0, 2), Swap(0, 6, 8), Swap(1, 3, 5)))
    timeline = right(plan, program, replace(tiny.MACHINE, host_bytes=needed))
    assert lies(timeline, plan, program, replace(tiny.MACHINE, host_bytes=needed - 1)) == {"host"}
