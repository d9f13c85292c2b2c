"""Tests that the validator accepts all simulated timelines and detects every kind of error in them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from simulator import Kernel, Machine, Plan, Program, Recompute, Rerun, Swap, Tensor, Timeline, simulate
from simulator.schedule import lower
from simulator.timeline import BlockEvent, Span
from tests import oracle, tiny
from tests.oracle import violations
from tests.strategies import machines, networks, plans, programs


@given(st.data())
def test_no_span_can_be_moved_or_left_out_unnoticed(data):
    program = data.draw(programs() | networks())
    plan = data.draw(plans(program, reruns=True))
    machine = data.draw(machines())
    limit = lower(program, plan).required_bytes + data.draw(st.integers(0, 60))
    timeline = simulate(program, plan, machine, limit)
    i = data.draw(st.integers(0, len(timeline.spans) - 1))
    shift = data.draw(st.integers(-5, 5))
    span = timeline.spans[i]
    moved = [span._replace(start_ns=span.start_ns + shift, end_ns=span.end_ns + shift)] if shift else []
    assert violations(with_span(timeline, i, *moved), program, plan, machine, limit)


# For every rule, a valid timeline changed to break it.

SWAPPED = simulate(tiny.PROGRAM, tiny.SWAP_PLAN, tiny.MACHINE, tiny.LIMIT)
RECOMPUTED = simulate(tiny.PROGRAM, tiny.RECOMPUTE_PLAN, tiny.MACHINE, tiny.LIMIT)


def with_span(timeline: Timeline, i: int, *spans: Span) -> Timeline:
    """Replaces span i by ``spans``, in order of start."""
    changed = [*timeline.spans[:i], *spans, *timeline.spans[i + 1 :]]
    return replace(timeline, spans=tuple(sorted(changed, key=lambda s: s.start_ns)))


def find(timeline: Timeline, kind: str, index: int, occurrence: int = 0) -> int:
    """Returns the index of a span in the timeline."""
    return [i for i, s in enumerate(timeline.spans) if (s.kind, s.index) == (kind, index)][occurrence]


def altered(timeline: Timeline, which: str, what: int, /, **changes: object) -> Timeline:
    i = find(timeline, which, what)
    return with_span(timeline, i, timeline.spans[i]._replace(**changes))


def rules(timeline: Timeline, plan: Plan, program: Program = tiny.PROGRAM, machine: Machine = tiny.MACHINE,
          limit: int = tiny.LIMIT) -> set[str]:  # fmt: skip
    return {v.rule for v in violations(timeline, program, plan, machine, limit)}


def event(timeline: Timeline, owner: int, sign: int, occurrence: int = 0) -> int:
    """Returns the index of an event in the timeline."""
    return [i for i, e in enumerate(timeline.events) if e.owner == owner and e.nbytes * sign > 0][occurrence]


def moved(timeline: Timeline, i: int, time_ns: int) -> Timeline:
    """Changes the time of event i and sorts it in."""
    events = [*timeline.events[:i], *timeline.events[i + 1 :], timeline.events[i]._replace(time_ns=time_ns)]
    return replace(timeline, events=tuple(sorted(events, key=lambda e: (e.time_ns, e.nbytes > 0))))


def reordered(timeline: Timeline) -> Timeline:
    first, second, *rest = timeline.spans
    return replace(timeline, spans=(second, first, *rest))


def late(timeline: Timeline) -> Timeline:
    """Delays the last kernel by 5 ns, with consistent figures."""
    last = timeline.spans[-1]
    timeline = with_span(timeline, len(timeline.spans) - 1, last._replace(start_ns=325, end_ns=345))
    events = tuple(e._replace(time_ns=345) if e.time_ns == 340 else e for e in timeline.events)
    parts = replace(timeline.breakdown, stall_memory_ns=timeline.breakdown.stall_memory_ns + 5,
                    overlapped_transfer_ns=timeline.breakdown.overlapped_transfer_ns - 5)  # fmt: skip
    return replace(timeline, boundaries=(170, 345), iteration_ns=175, events=events, breakdown=parts)


def with_event(timeline: Timeline, i: int, *events: BlockEvent) -> Timeline:
    """Replaces event i by ``events``."""
    return replace(timeline, events=(*timeline.events[:i], *events, *timeline.events[i + 1 :]))


A2_BORN, A1_LEAVES = SWAPPED.events[2], SWAPPED.events[4]
LATE = Span(341, 381, "d2h", "swap_out", tiny.A1)
LIES: list[tuple[str, str, Callable[[], Timeline]]] = [
    ("spans", "an unknown kernel", lambda: altered(SWAPPED, "kernel", 2, index=8)),
    ("spans", "an unknown tensor", lambda: altered(SWAPPED, "swap_out", tiny.A1, index=-1)),
    ("spans", "a swap-out on h2d", lambda: altered(SWAPPED, "swap_out", tiny.A1, stream="h2d")),
    ("spans", "negative duration", lambda: altered(SWAPPED, "kernel", 2, end_ns=19)),
    ("spans", "not in order of start", lambda: reordered(SWAPPED)),
    ("spans", "no iteration", lambda: replace(SWAPPED, boundaries=())),
    ("overlap", "two kernels", lambda: altered(SWAPPED, "kernel", 2, start_ns=15, end_ns=25)),
    ("order", "a kernel twice", lambda: altered(SWAPPED, "kernel", 2, index=1)),
    ("order", "the last kernel is missing", lambda: replace(SWAPPED, spans=SWAPPED.spans[:-1])),
    ("order", "a copy after the end", lambda: replace(SWAPPED, spans=(*SWAPPED.spans, LATE))),
    ("order", "a copy at the end", lambda: replace(SWAPPED, spans=(*SWAPPED.spans, LATE._replace(start_ns=340)))),
    ("duration", "a short kernel", lambda: altered(SWAPPED, "kernel", 2, end_ns=29)),
    ("duration", "a fast swap-out", lambda: altered(SWAPPED, "swap_out", tiny.A1, end_ns=59)),
    ("duration", "a slow swap-in", lambda: altered(SWAPPED, "swap_in", tiny.A1, end_ns=131)),
    ("resident", "b2 before a1 is back", lambda: altered(SWAPPED, "kernel", 6, start_ns=129, end_ns=149)),
    ("idle", "a1 does not return", lambda: with_span(SWAPPED, find(SWAPPED, "swap_in", tiny.A1))),
    ("swap-out", "before f2 has ended", lambda: altered(SWAPPED, "swap_out", tiny.A1, start_ns=19, end_ns=59)),
    ("swap-out", "another tensor", lambda: altered(SWAPPED, "swap_out", tiny.A1, index=tiny.A2)),
    ("idle", "a1 leaves twice", lambda: altered(SWAPPED, "swap_in", tiny.A1, stream="d2h", kind="swap_out")),
    ("swap-in", "before the swap-out has ended", lambda: altered(SWAPPED, "swap_in", tiny.A1, start_ns=59, end_ns=99)),
    ("idle", "a1 does not leave", lambda: with_span(SWAPPED, find(SWAPPED, "swap_out", tiny.A1))),
    ("idle", "b1 starts late", lambda: late(SWAPPED)),
    ("idle", "a1 leaves late", lambda: altered(SWAPPED, "swap_out", tiny.A1, start_ns=21, end_ns=61)),
    ("idle", "a1 returns late", lambda: altered(SWAPPED, "swap_in", tiny.A1, start_ns=111, end_ns=151)),
    ("memory", "no events", lambda: replace(SWAPPED, events=())),
    ("memory", "one byte more", lambda: with_event(SWAPPED, 2, A2_BORN._replace(nbytes=41))),
    ("memory", "one ns later", lambda: with_event(SWAPPED, 2, A2_BORN._replace(time_ns=11))),
    ("memory", "another tensor", lambda: with_event(SWAPPED, 2, A2_BORN._replace(owner=tiny.A3))),
    ("memory", "another block", lambda: with_event(SWAPPED, 2, A2_BORN._replace(block=3))),
    ("memory", "another block for a persistent tensor", lambda: with_event(SWAPPED, 0, BlockEvent(0, tiny.W, 8, 10))),
    ("memory", "a block of 0 bytes", lambda: with_event(SWAPPED, 2, A2_BORN, A2_BORN._replace(nbytes=0))),
    ("memory", "a change is missing", lambda: with_event(SWAPPED, len(SWAPPED.events) - 1)),
    ("memory", "a change too many", lambda: with_event(SWAPPED, 4, A1_LEAVES, A1_LEAVES)),
    ("memory", "taken before it is given back", lambda: with_event(
        with_event(SWAPPED, 5), 4, SWAPPED.events[5], A1_LEAVES)),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "lie", "make"), LIES, ids=[f"{rule}: {lie}" for rule, lie, _ in LIES])
def test_every_violation_is_named(rule, lie, make):
    assert rule in rules(make(), tiny.SWAP_PLAN)


def test_a_violation_says_when_and_what():
    """The replay stops at the first violation."""
    late = replace(SWAPPED, spans=(*SWAPPED.spans, LATE))
    found = violations(late, tiny.PROGRAM, tiny.SWAP_PLAN, tiny.MACHINE, tiny.LIMIT)
    assert [tuple(v) for v in found] == [("order", 340, "something is recorded after the last iteration")]


def test_every_rule_has_a_test_violation():
    others = {"content", "recompute", "limit", "host", "figures", "sync", "issued"}  # issued: test_costs
    assert set(oracle.RULES) == {rule for rule, _, _ in LIES} | others
    assert rules(SWAPPED, tiny.SWAP_PLAN) == set()


FIGURES = ["iteration_ns", "ideal_ns", "peak_bytes", "required_bytes", "period"]
PARTS = list(SWAPPED.breakdown.__dataclass_fields__)


@pytest.mark.parametrize("name", [*FIGURES, *PARTS])
def test_a_wrong_figure(name):
    of = SWAPPED if name in FIGURES else SWAPPED.breakdown
    wrong = replace(of, **{name: getattr(of, name) + 1})
    wrong = wrong if name in FIGURES else replace(SWAPPED, breakdown=wrong)
    found = violations(wrong, tiny.PROGRAM, tiny.SWAP_PLAN, tiny.MACHINE, tiny.LIMIT)
    assert {v.rule for v in found} == {"figures"} and any(v.detail.startswith(name) for v in found)


def test_wrong_boundaries():
    assert rules(replace(SWAPPED, boundaries=(169, 340)), tiny.SWAP_PLAN) == {"figures"}
    assert rules(replace(SWAPPED, events_until=(1, 18, 33)), tiny.SWAP_PLAN) == {"figures"}


def test_over_the_limit():
    assert rules(SWAPPED, tiny.SWAP_PLAN, limit=149) == {"swap-in"}  # 150 bytes with a1 resident beside b3
    assert rules(simulate(tiny.PROGRAM, Plan(), tiny.MACHINE, 180), Plan(), limit=179) == {"limit"}


# Without a shared link: out a1 [20, 60), a2 [60, 100); in a1 [60, 100), a2 [100, 140) for b3.
A1, A2 = tiny.A1, tiny.A2
BOTH = Plan((Swap(A1, 1, 6, prefetch=3), Swap(A2, 2, 5)))
ALONE, SHARED = tiny.MACHINE, tiny.MACHINE.with_shared_link(10**9)  # shared: half of what both do alone
UNEQUAL, ONE_ENGINE = replace(ALONE, duplex_h2d_bytes_per_s=250_000_000), replace(ALONE, copy_engines=1)
PINNED, FREE = (Plan((Swap(A1, 1, 6, prefetch=p), Swap(A2, 3, 5))) for p in (2, None))
AGAIN = Plan((Rerun(0, 6), Rerun(1, 6)))


def one(decision: Swap | Recompute | Rerun) -> Plan:
    return Plan((decision,))


# Simulated plan, claimed plan, simulated machine, claimed machine, and the rule that is broken.
TOLD = [
    (one(Swap(A1, 5, 6)), one(Swap(A1, 5, 6, copy=1)), ALONE, ALONE, "idle"),  # copied when b3 ends
    (one(Swap(A1, 5, 6, copy=1)), one(Swap(A1, 5, 6)), ALONE, ALONE, "swap-out"),
    (one(Swap(A1, 2, 6, copy=1)), one(Swap(A1, 2, 6, None, True, 1)), ALONE, ALONE, "sync"),
    (one(Swap(A1, 2, 6, None, True, 1)), one(Swap(A1, 2, 6, copy=1)), ALONE, ALONE, "idle"),
    (one(Swap(A1, 1, 6)), one(Swap(A1, 1, 6, sync=True)), ALONE, ALONE, "sync"),
    (one(Swap(A1, 1, 6, sync=True)), one(Swap(A1, 1, 6)), ALONE, ALONE, "idle"),
    (one(Swap(A1, 1, 6)), one(Swap(A1, 1, 6, prefetch=5)), ALONE, ALONE, "swap-in"),  # before its prefetch kernel
    (one(Recompute(A1, 1, 6)), one(Recompute(A1, 1, 6, at=5)), ALONE, ALONE, "recompute"),
    (one(Recompute(A1, 1, 6, at=5)), one(Recompute(A1, 1, 6)), ALONE, ALONE, "recompute"),
    (AGAIN, one(Rerun(0, 6)), ALONE, ALONE, "recompute"),
    (AGAIN, Plan((Rerun(0, 5), Rerun(1, 6))), ALONE, ALONE, "recompute"),
    (AGAIN, Plan((*AGAIN.decisions, Rerun(2, 6))), ALONE, ALONE, "recompute"),
    (AGAIN, Plan(), ALONE, ALONE, "recompute"),
    (BOTH, BOTH, SHARED, ALONE, "duration"),
    (BOTH, BOTH, ALONE, SHARED, "duration"),
    (BOTH, BOTH, UNEQUAL, SHARED, "duration"),
    (BOTH, BOTH, SHARED, UNEQUAL, "duration"),
    (PINNED, FREE, ONE_ENGINE, ONE_ENGINE, "idle"),  # a2's swap-out could start; a1's swap-in was issued first
    (FREE, PINNED, ONE_ENGINE, ONE_ENGINE, "idle"),
]


@pytest.mark.parametrize(("ran", "told", "machine", "other", "rule"), TOLD)
def test_another_plan_or_machine_is_found(ran, told, machine, other, rule):
    timeline = simulate(tiny.PROGRAM, ran, machine, 1000)
    assert rules(timeline, ran, machine=machine, limit=1000) == set()
    assert rule in rules(timeline, told, machine=other, limit=1000)


# Plan, tensor, allocation (1) or free (-1), its occurrence, its time, and its claimed time.
MOVED = [
    (one(Swap(A1, 5, 6, copy=1)), A1, -1, 0, 80, 60),  # when the copy is complete, before the gap opens
    (one(Swap(A1, 2, 6, copy=1)), A1, -1, 0, 60, 30),  # when the gap opens, before the copy is complete
    (one(Recompute(A1, 1, 6, at=5)), A1, 1, 1, 60, 90),  # when b2 starts
    (one(Rerun(0, 6)), A1, -1, 0, 20, 30),  # one kernel too long
    (one(Rerun(0, 6)), A1, 1, 1, 80, 70),
]


@pytest.mark.parametrize(("plan", "tensor", "sign", "occurrence", "right_ns", "wrong_ns"), MOVED)
def test_memory_at_another_time_is_found(plan, tensor, sign, occurrence, right_ns, wrong_ns):
    timeline = simulate(tiny.PROGRAM, plan, ALONE, 1000)
    i = event(timeline, tensor, sign, occurrence)
    assert timeline.events[i].time_ns == right_ns
    assert "memory" in rules(moved(timeline, i, wrong_ns), plan, limit=1000)


def program_of(*lines: tuple[tuple[int, ...], tuple[int, ...]], persistent: int = 0) -> Program:
    """Returns kernels of 10 ns that use tensors of 8 bytes, of which the first ``persistent`` are persistent."""
    tensors = tuple(Tensor(f"t{t}", 8, persistent=t < persistent) for t in range(2))
    kernels = tuple(Kernel(f"k{i}", "other", "forward", *line, 10) for i, line in enumerate(lines))
    return Program("by hand", tensors, kernels)


# Program, plan, kernel whose recomputation is left out, the plan without it, and the rule.
LEFT_OUT = [
    # x is born in k0 and written again in k1; k3 must not read the x that k1 alone writes.
    (program_of(((), (0,)), ((), (0,)), ((), (1,)), ((0, 1), ())), (Recompute(0, 1, 3),), 0, None, "content"),
    # k2 makes y from the x of k0 and k1; without k1 the chain of k4 makes another y.
    (program_of(((), (0,)), ((), (0,)), ((0,), (1,)), ((), ()), ((1,), ())), (Recompute(1, 2, 4),), 1, None, "content"),
    # k1 updates t0 in place. Recomputed without k0, it would apply its update twice.
    (program_of(((), (0,)), ((0,), (0,)), ((), ()), ((0,), ())), (Rerun(0, 3), Rerun(1, 3)), 0, (Rerun(1, 3),),
     "resident"),
    (program_of(((), (0,)), ((0,), (0,)), ((0,), (1,)), ((), (0,)), ((1, 0), ())),
     (Rerun(0, 4), Rerun(1, 4), Rerun(2, 4)), 1, (Rerun(0, 4), Rerun(2, 4)), "content"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "decisions", "kernel", "told", "rule"), LEFT_OUT)
def test_another_content_is_found(program, decisions, kernel, told, rule):
    plan = Plan(decisions)
    timeline = simulate(program, plan, ALONE, 100)
    assert rules(timeline, plan, program, limit=100) == set()
    without = tuple(s for s in timeline.spans if (s.kind, s.index) != ("recompute", kernel))
    assert rule in rules(replace(timeline, spans=without), Plan(told or decisions), program, limit=100)


def test_wrong_chains():
    plan = tiny.RECOMPUTE_PLAN
    assert rules(RECOMPUTED, plan) == set()
    assert "recompute" in rules(altered(RECOMPUTED, "recompute", 0, index=6), plan)  # not before b2
    i = find(RECOMPUTED, "recompute", 0, 1)
    assert {"resident", "recompute"} <= rules(with_span(RECOMPUTED, i), plan)  # in the first iteration only


def test_a_copy_of_the_iteration_before():
    """The copy is made when k3 ends, for the gap of the next iteration; the first iteration starts with the copy."""
    program = program_of(((0,), ()), ((), (1,)), ((0,), (0,)), ((), ()), persistent=1)
    plan = Plan((Swap(0, 0, 2, copy=3),))
    timeline = simulate(program, plan, ALONE, 1000)
    assert rules(timeline, plan, program, limit=1000) == set()
    assert [s.start_ns for s in timeline.spans if s.kind == "swap_out"] == [timeline.boundaries[0]]
    assert "idle" in rules(with_span(timeline, find(timeline, "swap_out", 0)), plan, program, limit=1000)
    assert rules(timeline, Plan((Swap(0, 0, 2),)), program, limit=1000) == {"idle"}  # nothing is resident at the start


@pytest.mark.parametrize(
    ("decisions", "needed"),
    [
        ((Swap(A1, 1, 6),), 40),
        ((Swap(A1, 1, 6), Swap(A2, 2, 5)), 80),
        ((Swap(A1, 1, 6), Swap(tiny.W, 7, 0)), 40),  # w is swapped out when b1 ends, a1 is resident before
        ((Swap(tiny.A3, 3, 4), Swap(A2, 4, 5)), 40),  # one after the other
        ((Swap(tiny.A3, 3, 4), Swap(A2, 4, 5, copy=2)), 80),  # a2 is copied before a3 is swapped in
    ],
)
def test_what_the_host_holds(decisions, needed):
    plan = Plan(decisions)
    machine = replace(ALONE, host_bytes=needed)
    timeline = simulate(tiny.PROGRAM, plan, machine, 1000)
    assert rules(timeline, plan, machine=machine, limit=1000) == set()
    assert rules(timeline, plan, machine=replace(ALONE, host_bytes=needed - 1), limit=1000) == {"host"}
