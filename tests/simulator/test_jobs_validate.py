"""The checker of several jobs finds nothing in what the simulator says, and finds what was changed."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from simulator import Job, JobsTimeline, Kernel, Machine, Plan, Program, Swap, Tensor, simulate_jobs
from simulator.job import Stall
from simulator.timeline import BlockEvent, Span
from tests.oracle import jobs_violations as violations
from tests.strategies import jobs_cases


@given(jobs_cases(), st.data())
def test_no_span_can_be_moved_or_left_out_unnoticed(case, data):
    timeline = simulate_jobs(*case)
    ran = [j for j, job in enumerate(timeline.jobs) if job.spans]
    if not ran:
        return
    j = data.draw(st.sampled_from(ran))
    i = data.draw(st.integers(0, len(timeline.jobs[j].spans) - 1))
    shift = data.draw(st.integers(-5, 5))
    span = timeline.jobs[j].spans[i]
    moved = [span._replace(start_ns=span.start_ns + shift, end_ns=span.end_ns + shift)] if shift else []
    lie = with_spans(timeline, j, i, *moved)
    assert violations(lie, case.jobs, case.machine, case.limit, case.until_ns)


# A lie for every rule, told about a right timeline: a and b deadlock, c comes late and changes its plan.

MACHINE = Machine("a byte per ns", 1000, 10**9, 10**9, copy_latency_ns=0, switch_ns=5)
GROWS = Program(
    "grows",
    (Tensor("x", 40), Tensor("y", 30)),
    (Kernel("k0", "other", "forward", (), (0,), 10), Kernel("k1", "other", "backward", (0,), (1,), 10)),
)
READER = Program(
    "reader",
    (Tensor("w", 30, "parameter", True),),
    (Kernel("k0", "other", "forward", (0,), (), 10), Kernel("k1", "other", "forward", (), (), 40)),
)
JOBS = (
    Job("a", GROWS, Plan(), iterations=1),
    Job("b", GROWS, Plan(), iterations=1),
    Job("c", READER, Plan(), 150, 4, switches=((160, Plan((Swap(0, 0, 0),))),)),
)
RIGHT = simulate_jobs(JOBS, MACHINE, 100)
A, B, C = range(3)


def with_job(timeline: JobsTimeline, j: int, **changes: object) -> JobsTimeline:
    jobs = list(timeline.jobs)
    jobs[j] = replace(jobs[j], **changes)
    return replace(timeline, jobs=tuple(jobs))


def with_spans(timeline: JobsTimeline, j: int, i: int, *spans: Span) -> JobsTimeline:
    """Span i of job j replaced by these, in order of start."""
    old = timeline.jobs[j].spans
    return with_job(timeline, j, spans=tuple(sorted([*old[:i], *spans, *old[i + 1 :]], key=lambda s: s.start_ns)))


def altered(j: int, kind: str, of: int, occurrence: int = 0, /, **changes: object) -> JobsTimeline:
    spans = RIGHT.jobs[j].spans
    i = [i for i, s in enumerate(spans) if (s.kind, s.index) == (kind, of)][occurrence]
    return with_spans(RIGHT, j, i, spans[i]._replace(**changes))


def with_event(j: int, i: int, *events: BlockEvent) -> JobsTimeline:
    old = RIGHT.jobs[j].events
    return with_job(RIGHT, j, events=(*old[:i], *events, *old[i + 1 :]))


def hurried() -> JobsTimeline:
    """a's second kernel starts in the deadlock."""
    first, _, _ = RIGHT.jobs[A].spans
    hurry = (first, Span(25, 30, "compute", "switch", 1), Span(30, 40, "compute", "kernel", 1))
    return with_job(RIGHT, A, spans=hurry)


def evicted(**changes: object) -> JobsTimeline:
    return replace(RIGHT, evictions=(RIGHT.evictions[0]._replace(**changes),))


def test_the_right_one():
    """Times by hand: as in test_reference, but b's kernel comes after a switch; c comes when both are gone."""
    assert violations(RIGHT, JOBS, MACHINE, 100) == []
    assert [job.boundaries for job in RIGHT.jobs] == [(80,), (135,), (205, 315, 365, 415)]
    assert RIGHT.jobs[C].switches == ((205, 1),)


LIES = [
    ("spans", "an unknown kernel", lambda: altered(A, "kernel", 1, index=2)),
    ("spans", "an unknown tensor", lambda: altered(B, "swap_out", 0, index=-1)),
    ("spans", "a swap-out on h2d", lambda: altered(B, "swap_out", 0, stream="h2d")),
    ("spans", "a negative duration", lambda: altered(A, "kernel", 1, end_ns=60)),
    ("order", "a kernel twice", lambda: altered(A, "kernel", 1, index=0)),
    ("order", "a boundary more", lambda: with_job(RIGHT, A, boundaries=(80, 90))),
    ("duration", "a short kernel", lambda: altered(A, "kernel", 1, end_ns=79)),
    ("duration", "a slow swap-in", lambda: altered(B, "swap_in", 0, end_ns=121)),
    ("switch", "a switch for another kernel", lambda: altered(B, "switch", 0, index=1)),
    ("overlap", "a long switch", lambda: altered(B, "switch", 0, start_ns=9)),
    ("switch", "a plan that it has not", lambda: with_job(RIGHT, C, switches=((205, 2),))),
    ("switch", "within an iteration", lambda: with_job(RIGHT, C, switches=((210, 1),))),
    ("switch", "too late", lambda: with_job(RIGHT, C, switches=((315, 1),))),
    ("swap-out", "another tensor", lambda: altered(B, "swap_out", 0, index=1)),
    ("idle", "a swap-out is late", lambda: altered(B, "swap_out", 0, start_ns=26, end_ns=66)),
    ("swap-in", "too early", lambda: altered(B, "swap_in", 0, start_ns=79, end_ns=119)),
    ("idle", "too late", lambda: altered(B, "swap_in", 0, start_ns=81, end_ns=121)),
    ("limit", "a kernel does not wait for memory", lambda: hurried()),
    ("demand", "another tensor is evicted", lambda: evicted(job=A)),
    ("demand", "for another job", lambda: evicted(wanted_by=B)),
    ("demand", "at another time", lambda: evicted(time_ns=24)),
    ("demand", "none", lambda: replace(RIGHT, evictions=())),
    ("demand", "one more", lambda: replace(RIGHT, evictions=RIGHT.evictions * 2)),
    ("admission", "too late", lambda: with_job(RIGHT, C, admitted_ns=151)),
    ("leave", "too late", lambda: with_job(RIGHT, A, left_ns=81)),
    ("figures", "a boundary", lambda: with_job(RIGHT, A, boundaries=(79,))),
    ("figures", "a stall", lambda: with_job(RIGHT, A, stalls=(Stall(10, 65, "data"),))),
    ("figures", "the peak", lambda: replace(RIGHT, peak_bytes=81)),
    ("figures", "the end", lambda: replace(RIGHT, end_ns=416)),
    ("figures", "events until", lambda: with_job(RIGHT, A, events_until=(0, 3))),
    ("memory", "an event is missing", lambda: with_event(B, 1)),
    ("memory", "an event of another size", lambda: with_event(B, 1, RIGHT.jobs[B].events[1]._replace(nbytes=-39))),
    ("memory", "another block", lambda: with_event(B, 2, RIGHT.jobs[B].events[2]._replace(block=1))),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "what", "lie"), LIES, ids=[f"{rule}: {what}" for rule, what, _ in LIES])
def test_a_lie_is_found(rule, what, lie):
    found = violations(lie(), JOBS, MACHINE, 100)
    assert rule in {v.rule for v in found}, found


def test_it_names_turns():
    """b takes the kernel's turn that is a's, and shifts nothing else."""
    program = Program("one", (Tensor("x", 10),), (Kernel("k", "other", "forward", (), (0,), 10),))
    jobs = (Job("a", program, Plan(), iterations=1), Job("b", program, Plan(), iterations=1))
    right = simulate_jobs(jobs, replace(MACHINE, switch_ns=0), 100)
    a, b = right.jobs
    swapped = replace(right, jobs=(replace(b, name="a"), replace(a, name="b")))
    assert {v.rule for v in violations(swapped, jobs, replace(MACHINE, switch_ns=0), 100)} == {"idle"}
