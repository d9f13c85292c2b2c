"""The validator finds nothing in what the simulator says, and finds every kind of lie."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from simulator import Kernel, Machine, Plan, Program, Recompute, Swap, Tensor, Timeline, simulate
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


# A lie for every rule, told about a right timeline.

SWAPPED = simulate(tiny.PROGRAM, tiny.SWAP_PLAN, tiny.MACHINE, tiny.LIMIT)
RECOMPUTED = simulate(tiny.PROGRAM, tiny.RECOMPUTE_PLAN, tiny.MACHINE, tiny.LIMIT)


def with_span(timeline: Timeline, i: int, *spans: Span) -> Timeline:
    """The timeline with span i replaced by ``spans``, in order of start."""
    changed = [*timeline.spans[:i], *spans, *timeline.spans[i + 1 :]]
    return replace(timeline, spans=tuple(sorted(changed, key=lambda s: s.start_ns)))


def find(timeline: Timeline, kind: str, index: int, occurrence: int = 0) -> int:
    """Position of a span in the timeline."""
    return [i for i, s in enumerate(timeline.spans) if (s.kind, s.index) == (kind, index)][occurrence]


def altered(timeline: Timeline, which: str, what: int, /, **changes: object) -> Timeline:
    i = find(timeline, which, what)
    return with_span(timeline, i, timeline.spans[i]._replace(**changes))


def rules(timeline: Timeline, plan: Plan, program: Program = tiny.PROGRAM, machine: Machine = tiny.MACHINE,
          limit: int = tiny.LIMIT) -> set[str]:  # fmt: skip
    return {v.rule for v in violations(timeline, program, plan, machine, limit)}


def reordered(timeline: Timeline) -> Timeline:
    first, second, *rest = timeline.spans
    return replace(timeline, spans=(second, first, *rest))


def late(timeline: Timeline) -> Timeline:
    """The last kernel starts 5 ns late, and everything that follows from that is told truly."""
    last = timeline.spans[-1]
    timeline = with_span(timeline, len(timeline.spans) - 1, last._replace(start_ns=325, end_ns=345))
    events = tuple(e._replace(time_ns=345) if e.time_ns == 340 else e for e in timeline.events)
    parts = replace(timeline.breakdown, stall_memory_ns=timeline.breakdown.stall_memory_ns + 5,
                    overlapped_transfer_ns=timeline.breakdown.overlapped_transfer_ns - 5)  # fmt: skip
    return replace(timeline, boundaries=(170, 345), iteration_ns=175, events=events, breakdown=parts)


def with_event(timeline: Timeline, i: int, *events: BlockEvent) -> Timeline:
    """The timeline with event i replaced by ``events``."""
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
def test_every_lie_is_named(rule, lie, make):
    assert rule in rules(make(), tiny.SWAP_PLAN)


def test_a_violation_says_when_and_what():
    """The first that is found in a replay, which ends there."""

    def found(timeline: Timeline, plan: Plan = tiny.SWAP_PLAN, limit: int = tiny.LIMIT) -> list[tuple[str, int, str]]:
        return [tuple(v) for v in violations(timeline, tiny.PROGRAM, plan, tiny.MACHINE, limit)]

    part = [("order", 0, "the kernels are not whole iterations in order")]
    assert found(replace(SWAPPED, spans=SWAPPED.spans[:-1])) == part
    assert found(replace(SWAPPED, spans=tuple(s for s in SWAPPED.spans if s.stream != "compute"))) == part
    late = replace(SWAPPED, spans=(*SWAPPED.spans, LATE))
    assert found(late) == [("order", 340, "something is recorded after the last iteration")]
    ((rule, at, detail),) = found(altered(SWAPPED, "swap_in", tiny.A1, index=tiny.A2))
    assert (rule, at) == ("swap-in", 90) and detail.endswith("it is the turn of tensor 1")
    for plan, limit in ((Plan((Swap(tiny.A1, 1, 6, prefetch=5),)), tiny.LIMIT), (tiny.SWAP_PLAN, 149)):
        ((rule, _, detail),) = found(SWAPPED, plan, limit)  # before its prefetch kernel; and where it does not fit
        assert rule == "swap-in" and detail.startswith("Span(start_ns=90, end_ns=130, stream='h2d'")
    wrong = ("figures", 340, "peak_bytes is 151, the spans give 150")
    assert found(replace(SWAPPED, peak_bytes=151)) == [wrong]


def test_there_is_a_lie_for_every_rule():
    others = {"content", "recompute", "limit", "host", "figures", "sync"}
    assert set(oracle.RULES) == {rule for rule, _, _ in LIES} | others
    assert rules(SWAPPED, tiny.SWAP_PLAN) == set()


@pytest.mark.parametrize("name", ["iteration_ns", "ideal_ns", "peak_bytes", "required_bytes", "period"])
def test_a_wrong_figure(name):
    wrong = replace(SWAPPED, **{name: getattr(SWAPPED, name) - 1})
    found = violations(wrong, tiny.PROGRAM, tiny.SWAP_PLAN, tiny.MACHINE, tiny.LIMIT)
    assert [v.rule for v in found] == ["figures"] and found[0].detail.startswith(name)


def test_wrong_boundaries():
    assert rules(replace(SWAPPED, boundaries=(169, 340)), tiny.SWAP_PLAN) == {"figures"}
    assert SWAPPED.events_until == (1, 17, 33)  # w; 16 changes an iteration
    assert rules(replace(SWAPPED, events_until=(1, 18, 33)), tiny.SWAP_PLAN) == {"figures"}


@pytest.mark.parametrize("name", list(SWAPPED.breakdown.__dataclass_fields__))
def test_a_wrong_part_of_the_breakdown(name):
    parts = replace(SWAPPED.breakdown, **{name: getattr(SWAPPED.breakdown, name) + 1})
    found = violations(replace(SWAPPED, breakdown=parts), tiny.PROGRAM, tiny.SWAP_PLAN, tiny.MACHINE, tiny.LIMIT)
    assert {v.rule for v in found} == {"figures"} and any(v.detail.startswith(name) for v in found)


def test_over_the_limit():
    assert rules(SWAPPED, tiny.SWAP_PLAN, limit=149) == {"swap-in"}  # 150 bytes with a1 back beside b3
    assert rules(simulate(tiny.PROGRAM, Plan(), tiny.MACHINE, 180), Plan(), limit=179) == {"limit"}


def test_copies_at_once_on_one_engine():
    """a1 [10, 50) and a2 [30, 70) leave one after the other, but a1 comes back while a2 leaves."""
    plan = Plan((Swap(tiny.A1, 1, 6), Swap(tiny.A2, 2, 5)))
    timeline = simulate(tiny.PROGRAM, plan, tiny.MACHINE, 1000)
    assert rules(timeline, plan, limit=1000) == set()
    one_engine = replace(tiny.MACHINE, copy_engines=1)
    early = altered(timeline, "swap_in", tiny.A2, start_ns=99, end_ns=139)
    assert "overlap" in rules(early, plan, machine=one_engine, limit=1000)


def test_a_kernel_beside_a_synchronous_swap_out():
    """f3 starts at 60, when a1 has left."""
    plan = Plan((Swap(tiny.A1, 1, 6, sync=True),))
    timeline = simulate(tiny.PROGRAM, plan, tiny.MACHINE, 1000)
    assert rules(timeline, plan, limit=1000) == set()
    assert "sync" in rules(altered(timeline, "kernel", 2, start_ns=59, end_ns=69), plan, limit=1000)
    # Nobody waited, and nobody should have: the same timeline for a plan that is not synchronous, and the reverse.
    loose = Plan((Swap(tiny.A1, 1, 6),))
    assert "idle" in rules(timeline, loose, limit=1000)
    assert "sync" in rules(simulate(tiny.PROGRAM, loose, tiny.MACHINE, 1000), plan, limit=1000)


def test_a_step_beside_a_synchronous_swap_out():
    """c leaves [15, 23); k1 runs again for k3 [23, 28)."""
    program = Program(
        "a step",
        (Tensor("a", 8), Tensor("b", 8), Tensor("c", 8)),
        (
            Kernel("k0", "other", "forward", (), (0, 2), 5),
            Kernel("k1", "other", "forward", (0,), (1,), 5),
            Kernel("k2", "other", "forward", (), (), 5),
            Kernel("k3", "other", "forward", (1,), (), 5),
            Kernel("k4", "other", "forward", (0, 2), (), 5),
        ),
    )
    plan = Plan((Recompute(1, 1, 3), Swap(2, 2, 4, sync=True)))
    timeline = simulate(program, plan, tiny.MACHINE, 100)
    assert rules(timeline, plan, program, limit=100) == set()
    early = altered(timeline, "recompute", 1, start_ns=22, end_ns=27)
    assert "sync" in rules(early, plan, program, limit=100)


def test_a_swap_in_before_its_prefetch_kernel():
    """a1 returns at 90, when b4 ends; the plan pins it to the end of b3."""
    assert "swap-in" in rules(SWAPPED, Plan((Swap(tiny.A1, 1, 6, prefetch=5),)))


def test_swap_ins_out_of_order():
    """Under 130 bytes a2 is back for b3 [120, 160), then a1 for b2 [180, 220)."""
    plan = Plan((Swap(tiny.A1, 1, 6), Swap(tiny.A2, 2, 5)))
    timeline = simulate(tiny.PROGRAM, plan, tiny.MACHINE, 130)
    first, second = find(timeline, "swap_in", tiny.A2), find(timeline, "swap_in", tiny.A1)
    assert first < second and rules(timeline, plan, limit=130) == set()
    spans = list(timeline.spans)
    spans[first], spans[second] = spans[first]._replace(index=tiny.A1), spans[second]._replace(index=tiny.A2)
    assert "swap-in" in rules(replace(timeline, spans=tuple(spans)), plan, limit=130)


def test_wrong_chains():
    plan = tiny.RECOMPUTE_PLAN
    assert rules(RECOMPUTED, plan) == set()
    assert "recompute" in rules(altered(RECOMPUTED, "recompute", 0, index=6), plan)  # not before b2
    assert "recompute" in rules(altered(RECOMPUTED, "recompute", 0, index=1), plan)  # in vain
    i = find(RECOMPUTED, "recompute", 0, 1)
    assert {"resident", "recompute"} <= rules(with_span(RECOMPUTED, i), plan)  # in the first iteration only
    assert "recompute" in rules(RECOMPUTED, Plan())  # nothing was dropped


def test_a_chain_that_leaves_out_a_writer():
    """x is born in k0 and written again in k1; k3 must not see what k1 alone makes of it."""
    program = Program(
        "two writers",
        (Tensor("x", 8), Tensor("y", 8)),
        (
            Kernel("k0", "other", "forward", (), (0,), 5),
            Kernel("k1", "other", "forward", (), (0,), 5),
            Kernel("k2", "other", "forward", (), (1,), 5),
            Kernel("k3", "other", "forward", (0, 1), (), 5),
        ),
    )
    plan = Plan((Recompute(0, 1, 3),))
    timeline = simulate(program, plan, tiny.MACHINE, 100)
    assert [s.index for s in timeline.spans[:6]] == [0, 1, 2, 0, 1, 3]
    assert rules(timeline, plan, program) == set()
    spans = tuple(s for s in timeline.spans if (s.kind, s.index) != ("recompute", 0))
    assert "content" in rules(replace(timeline, spans=spans), plan, program)


def test_a_chain_on_another_content():
    """k2 makes y from what k0 and k1 wrote to x; without k1 the chain of k4 runs k2 on what k0 alone makes of x."""
    lines = [((), (0,)), ((), (0,)), ((0,), (1,)), ((), ()), ((1,), ())]
    kernels = tuple(Kernel(f"k{i}", "other", "forward", *line, 5) for i, line in enumerate(lines))
    program = Program("another content", (Tensor("x", 8), Tensor("y", 8)), kernels)
    plan = Plan((Recompute(1, 2, 4),))
    timeline = simulate(program, plan, tiny.MACHINE, 100)
    assert [s.index for s in timeline.spans[:8]] == [0, 1, 2, 3, 0, 1, 2, 4]
    assert rules(timeline, plan, program) == set()
    spans = tuple(s for s in timeline.spans if (s.kind, s.index) != ("recompute", 1))
    found = violations(replace(timeline, spans=spans), program, plan, tiny.MACHINE, 100)
    assert ("content", "kernel 2 is run again for 4 on another content of tensor 0") in {(v[0], v[2]) for v in found}
