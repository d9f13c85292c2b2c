"""A slow checker of a JobsTimeline: is what it says what the rules of simulator.jobs.reference ask for?

It shares no code with ``reference`` and ``engine``: it takes the spans as given, reads off them what every step uses
and frees (``simulator.validate.steps``), and replays them round by round. From ``schedule`` it takes only what plans
that never took effect would have needed. The rules (numbers: the docstring of ``reference.py``):

- ``spans``      well formed, in order; ``order``: kernels in program order, every iteration complete (1)
- ``content``, ``recompute``, ``resident``   as in ``simulator.validate``, plan by plan (1, 7)
- ``duration``   a kernel and a copy end when their work is done, beside what else is under way (2, 11, 12)
- ``overlap``, ``switch``   one step at a time, and what a change of jobs costs; plans change in time (2, 7)
- ``swap-out``, ``swap-in``, ``idle``   each copy and step is that whose turn it is, as soon as it can start (2 to 4)
- ``admission``, ``leave``   jobs begin as soon as they fit, and go when they should (5, 10)
- ``demand``     a tensor is evicted only in a deadlock, and the right one (6, 9)
- ``limit``, ``memory``   never more in use than the limit; the block events are the ledger, change by change
- ``figures``    boundaries, stalls, peak and end follow from the spans
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from simulator.jobs.nouns import Job, JobsTimeline, JobTimeline, Tenant
from simulator.jobs.validate.one_job import Part, parts_of, program_of
from simulator.jobs.validate.replay import Replay
from simulator.machine import Machine
from simulator.timeline import Span
from simulator.validate.ledger import wrong_events
from simulator.validate.spans import Violation

__all__ = ["violations"]

STREAMS = {"kernel": "compute", "recompute": "compute", "switch": "compute", "swap_out": "d2h", "swap_in": "h2d"}


def violations(
    timeline: JobsTimeline, jobs: Sequence[Job], machine: Machine, limit: int, until_ns: int | None = None,
    tenant: Tenant = (),
) -> list[Violation]:  # fmt: skip
    """Rules that a timeline breaks; [] for a right one. A replay ends at the first that it finds.

    Args:
        jobs, machine, limit, until_ns, tenant: those of the simulation, which can run (``lowered.check``).
    """
    found = [v for job, ran in zip(jobs, timeline.jobs, strict=True) for v in _well_formed(job, ran)]
    if any(timeline.order.count(j) != len(ran.events) for j, ran in enumerate(timeline.jobs)):
        found.append(Violation("memory", 0, "the order of the events is not theirs"))
    if found:
        return found
    parts = [parts_of(job, ran) if ran.boundaries else [] for job, ran in zip(jobs, timeline.jobs, strict=True)]
    found = [v for each in parts for part in each for v in part.steps.found]
    if found:
        return found
    replay = Replay(timeline, jobs, parts, machine, limit, until_ns, tenant)
    if replay.found:
        return replay.found
    for run, ran in zip(replay.all, timeline.jobs, strict=True):
        found += _events(run.ledger, run.changes, ran, parts[run.index])
        found += _figures(run.changes, run.stalls, ran)
        if list(ran.switches) != run.switches:
            detail = f"job {ran.name!r} changes its plan at {list(ran.switches)}; it should at {run.switches}"
            found.append(Violation("switch", 0, detail))
    peak = max((used for _, used in replay.curve), default=0)
    end = max((t.left_ns for t in timeline.jobs if t.left_ns is not None), default=replay.now)
    for name, says, right in (
        ("peak_bytes", timeline.peak_bytes, peak), ("limit", timeline.limit, limit), ("end_ns", timeline.end_ns, end),
        ("the curve", _last(timeline.memory), _last(replay.curve)),
    ):  # fmt: skip
        if says != right:
            found.append(Violation("figures", end, f"{name} is {says}, the spans give {right}"))
    return found


def _well_formed(job: Job, ran: JobTimeline) -> Iterator[Violation]:
    """Rules ``spans`` and ``order`` for one job."""
    iteration = 0
    for s in ran.spans:
        program = program_of(job, iteration)
        count = len(program.kernels)
        iteration += s.kind == "kernel" and s.index == count - 1
        if s.stream != "compute":
            count = max(len(program.tensors) for program, _ in job.entries)
        if STREAMS[s.kind] != s.stream or not 0 <= s.index < count or not 0 <= s.start_ns <= s.end_ns:
            yield Violation("spans", s.start_ns, f"{s} of job {ran.name!r} is none")
    compute = [s for s in ran.spans if s.stream == "compute"]
    for stream in ("compute", "d2h", "h2d"):
        for a, b in pairwise(s for s in ran.spans if s.stream == stream):
            if b.start_ns < a.end_ns:
                yield Violation("overlap", b.start_ns, f"{b} of job {ran.name!r} starts before {a} has ended")
    kernels = [s.index for s in compute if s.kind == "kernel"]
    wanted = [k for i in range(len(ran.boundaries)) for k in range(len(program_of(job, i).kernels))]
    if kernels != wanted or (compute and compute[-1].kind != "kernel"):
        yield Violation("order", 0, f"the kernels of job {ran.name!r} are not whole iterations in order")
    if any(a.kind == "switch" and not _follows(a, b) for a, b in pairwise(compute)):
        yield Violation("switch", 0, f"a switch to job {ran.name!r} is not followed by its step")
    if any(not 0 <= plan < len(job.entries) for _, plan in ran.switches) or bool(ran.boundaries) != (
        ran.admitted_ns is not None
    ):
        yield Violation("switch", 0, f"job {ran.name!r} changes to a plan that it has not, or does not run")
    times = {ran.admitted_ns, *ran.boundaries}
    if any(time not in times for time, _ in ran.switches):
        yield Violation("switch", 0, f"job {ran.name!r} changes its plan within an iteration")


def _follows(switch: Span, step: Span) -> bool:
    return step.kind != "switch" and step.start_ns == switch.end_ns and step.index == switch.index


def _events(ledger: list, changes: list[int], ran: JobTimeline, parts: list[Part]) -> Iterator[Violation]:  # type: ignore[type-arg]
    """Rule ``memory``: plan by plan, as blocks are numbered anew."""
    begin = (0, 0)
    for part in parts:
        last = part is parts[-1]
        end = (len(ledger), len(ran.events)) if last else (changes[part.ended], ran.events_until[part.ended])
        persistent = [block.owner for block in part.steps.persistent]
        yield from wrong_events(ledger[begin[0] : end[0]], ran.events[begin[1] : end[1]], persistent)
        begin = end


def _figures(changes: list[int], stalls: list[tuple[int, int, str]], ran: JobTimeline) -> Iterator[Violation]:
    joined: list[tuple[int, int, str]] = []
    for start, end, cause in stalls:
        if joined and joined[-1][1:] == (start, cause):
            start = joined.pop()[0]
        joined.append((start, end, cause))
    for name, says, right in (
        ("events_until", ran.events_until, tuple(changes)),
        ("stalls", tuple(map(tuple, ran.stalls)), tuple(joined)),
    ):
        if says != right:
            yield Violation("figures", 0, f"{name} of job {ran.name!r} are {says}, the spans give {right}")


def _last(curve: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is in use at the end of each instant."""
    return sorted(dict(curve).items())
