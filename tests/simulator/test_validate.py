"""Tests that the validator accepts all simulated timelines and detects every kind of error in them."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, strategies as st

from simulator import Machine, OutOfMemory, Plan, PlanError, Program, Recompute, Rerun, Swap, Timeline, simulate
from simulator.schedule import lower
from simulator.timeline import Span
from tests import oracle, random_cases, tiny
from tests.oracle import violations
from tests.programs import activations, straight
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

A1 = tiny.A1
A2 = tiny.A2
SWAPPED = simulate(tiny.PROGRAM, tiny.SWAP_PLAN, tiny.MACHINE, tiny.LIMIT)
LATE = Span(341, 381, "d2h", "swap_out", A1)


def with_span(timeline: Timeline, i: int, *spans: Span) -> Timeline:
    """Replaces span i by ``spans``, in order of start."""
    changed = [*timeline.spans[:i], *spans, *timeline.spans[i + 1 :]]
    return replace(timeline, spans=tuple(sorted(changed, key=lambda s: s.start_ns)))


def altered(kind: str, index: int, /, **changes: object) -> Timeline:
    """Returns SWAPPED with another first span of this kind and index."""
    i = next(i for i, s in enumerate(SWAPPED.spans) if (s.kind, s.index) == (kind, index))
    return with_span(SWAPPED, i, SWAPPED.spans[i]._replace(**changes))


def rules(
    timeline: Timeline,
    plan: Plan = tiny.SWAP_PLAN,
    program: Program = tiny.PROGRAM,
    machine: Machine = tiny.MACHINE,
    limit: int = tiny.LIMIT,
) -> set[str]:
    return {v.rule for v in violations(timeline, program, plan, machine, limit)}


LIES: list[tuple[str, str, Timeline]] = [
    ("spans", "a swap-out on h2d", altered("swap_out", A1, stream="h2d")),
    ("spans", "not in order of start", replace(SWAPPED, spans=SWAPPED.spans[1::-1] + SWAPPED.spans[2:])),
    ("spans", "no iteration", replace(SWAPPED, boundaries=())),
    ("overlap", "two kernels", altered("kernel", 2, start_ns=15, end_ns=25)),
    ("order", "a kernel twice", altered("kernel", 2, index=1)),
    ("order", "a copy after the end", replace(SWAPPED, spans=(*SWAPPED.spans, LATE))),
    ("duration", "a slow swap-in", altered("swap_in", A1, end_ns=131)),
    ("resident", "b2 before a1 is back", altered("kernel", 6, start_ns=129, end_ns=149)),
    ("swap-out", "before f2 has ended", altered("swap_out", A1, start_ns=19, end_ns=59)),
    ("swap-in", "before the swap-out has ended", altered("swap_in", A1, start_ns=59, end_ns=99)),
    (
        "idle",
        "b1 starts late",
        with_span(SWAPPED, len(SWAPPED.spans) - 1, SWAPPED.spans[-1]._replace(start_ns=325, end_ns=345)),
    ),
    ("memory", "no events", replace(SWAPPED, events=())),
    ("figures", "other boundaries", replace(SWAPPED, boundaries=(169, 340))),
    ("figures", "events of other iterations", replace(SWAPPED, events_until=(1, 18, 33))),
]


@pytest.mark.parametrize(("rule", "lie", "timeline"), LIES, ids=[f"{rule}: {lie}" for rule, lie, _ in LIES])
def test_every_violation_is_named(rule, lie, timeline):
    assert rule in rules(timeline)


def test_every_rule_has_a_test_violation():
    others = {"content", "recompute", "limit", "host", "sync", "issued"}
    assert set(oracle.RULES) == {rule for rule, _, _ in LIES} | others
    assert rules(SWAPPED) == set()


FIGURES = ["iteration_ns", "ideal_ns", "peak_bytes", "required_bytes", "period"]
PARTS = list(SWAPPED.breakdown.__dataclass_fields__)


@pytest.mark.parametrize("name", [*FIGURES, *PARTS])
def test_a_wrong_figure(name):
    of = SWAPPED if name in FIGURES else SWAPPED.breakdown
    wrong = replace(of, **{name: getattr(of, name) + 1})
    wrong = wrong if name in FIGURES else replace(SWAPPED, breakdown=wrong)
    found = violations(wrong, tiny.PROGRAM, tiny.SWAP_PLAN, tiny.MACHINE, tiny.LIMIT)
    assert {v.rule for v in found} == {"figures"} and any(v.detail.startswith(name) for v in found)


def test_over_the_limit():
    assert rules(SWAPPED, limit=149) == {"swap-in"}  # 150 bytes with a1 resident beside b3
    assert rules(simulate(tiny.PROGRAM, Plan(), tiny.MACHINE, 180), Plan(), limit=179) == {"limit"}


def test_the_rules_of_other_decisions_and_machines():
    for ran, told, rule in (
        (Swap(A1, 1, 6), Swap(A1, 1, 6, sync=True), "sync"),
        (Recompute(A1, 1, 6), Recompute(A1, 1, 6, at=5), "recompute"),
        (Rerun(0, 6), Rerun(0, 5), "recompute"),
    ):
        timeline = simulate(tiny.PROGRAM, Plan((ran,)), tiny.MACHINE, 1000)
        assert rules(timeline, Plan((ran,)), limit=1000) == set()
        assert rule in rules(timeline, Plan((told,)), limit=1000)
    for cost, rule in (({"wait_ns": 7}, "duration"), ({"issue_ns": 20}, "issued")):
        assert rules(SWAPPED, machine=replace(tiny.MACHINE, **cost)) == {rule}
    moving = replace(tiny.PROGRAM, kernels=tuple(replace(k, bytes=100) for k in tiny.PROGRAM.kernels))
    slow = replace(tiny.MACHINE, memory_bytes_per_s=10**10, copy_contention=0.25)
    plan = Plan(tiny.SWAP_PLAN.decisions)
    assert rules(simulate(moving, plan, tiny.MACHINE, tiny.LIMIT), plan, moving, slow) == {"duration"}


def test_another_content_is_found():
    """Tensor x is born in k0 and written again in k1; k3 must not read the x that k1 alone writes."""
    program = straight(activations(8, 8), ((), (0,), 10), ((), (0,), 10), ((), (1,), 10), ((0, 1), (), 10))
    plan = Plan((Recompute(0, 1, 3),))
    timeline = simulate(program, plan, tiny.MACHINE, 100)
    without = tuple(s for s in timeline.spans if (s.kind, s.index) != ("recompute", 0))
    assert "content" in rules(replace(timeline, spans=without), plan, program, limit=100)


def test_another_plan_machine_or_ledger_is_found():
    """Every difference is a violation, because a plan and a machine determine the timeline."""
    differ = 0
    for seed in range(120):
        program, plan, machine, limit = random_cases.any_case(seed)[:4]
        rng = Random(seed)
        bare = replace(plan, decisions=())
        fewer = replace(plan, decisions=plan.decisions[1:])
        drawn = replace(bare, decisions=random_cases.plan_of(rng, program).decisions)
        rates = ("h2d_bytes_per_s", "d2h_bytes_per_s", "copy_engines", "duplex_h2d_bytes_per_s", "h2d_latency_ns")
        other = random_cases.machine_of(rng)
        slower = replace(machine, **{rate: getattr(other, rate) for rate in rng.sample(rates, 2)})
        try:
            timeline = simulate(program, plan, machine, limit)
        except (OutOfMemory, PlanError):
            continue
        for told in ((bare, machine), (fewer, machine), (drawn, machine), (plan, slower)):
            try:
                right = simulate(program, *told, limit)
            except (OutOfMemory, PlanError):
                right = None
            if right is None or (right.spans, right.events) != (timeline.spans, timeline.events):
                differ += 1
                assert violations(timeline, program, *told, limit), f"seed {seed}"
        i = rng.randrange(len(timeline.events)) if timeline.events else 0
        for event in timeline.events[i : i + 1]:
            for changed in (
                event._replace(time_ns=event.time_ns + rng.choice([-3, -1, 1, 4])),
                event._replace(nbytes=event.nbytes + 1),
                event._replace(owner=event.owner + 1),
                event._replace(block=event.block + 1),
            ):
                events = sorted((*timeline.events[:i], changed, *timeline.events[i + 1 :]), key=lambda e: e.time_ns)
                wrong = replace(timeline, events=tuple(events))
                assert violations(wrong, program, plan, machine, limit), f"seed {seed}"
            wrong = replace(timeline, events=timeline.events[:i] + timeline.events[i + 1 :])
            assert violations(wrong, program, plan, machine, limit), f"seed {seed}"
    assert differ > 200


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
    machine = replace(tiny.MACHINE, host_bytes=needed)
    timeline = simulate(tiny.PROGRAM, plan, machine, 1000)
    assert rules(timeline, plan, machine=machine, limit=1000) == set()
    assert rules(timeline, plan, machine=replace(tiny.MACHINE, host_bytes=needed - 1), limit=1000) == {"host"}
