"""A slow checker of timelines: is what they say possible, and is it what the rules ask for?

It shares no code with the simulators and works the other way round: they decide what happens; it takes the spans as
given, reads off them what every step uses and frees (``steps.py``), replays them round by round (``replay.py``) and
names the first rule that they break. RULES, below, says which there are, by the numbers of simulator/RULES.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from simulator.job import Job, JobsTimeline, JobTimeline
from simulator.machine import Machine
from simulator.plan import Plan, Swap
from simulator.program import Program
from simulator.timeline import Span, Timeline
from tests.oracle.ledger import curve, wrong_events
from tests.oracle.machine import Violation
from tests.oracle.one_job import FAR, Part, parts_of
from tests.oracle.replay import Replay

__all__ = ["RULES", "Violation", "jobs_violations", "violations"]

RULES = {
    "spans": "well formed, in order of start",
    "overlap": "one piece of work of a job at a time on a stream",
    "order": "kernels in program order, every iteration complete (1)",
    "content": "what a kernel or a step uses has the content that program order gives it (7)",
    "recompute": "what the plan runs again, no other: in order, before the kernel that it names, each time (7)",
    "resident": "what a kernel or a step uses is in device memory when it starts (2, 6)",
    "sync": "no step starts before the memory of a synchronous swap-out is free (4)",
    "limit": "never more in use than the limit (2)",
    "duration": "a step and a copy end when their work is done, beside all else (4, g, j, k, J2, J11)",
    "swap-out": "one for every copy that the plan issues, in order of issue; none if the host copy is valid (4, b, J3)",
    "swap-in": "of a tensor whose turn it is, where it fits until its use (5, b, J3, J4)",
    "idle": "no stream waits while its next piece of work could start",
    "switch": "what a change of jobs costs; plans change in time (J2, J7)",
    "admission": "jobs begin as soon as they fit (J5)",
    "leave": "they go when they should (J10)",
    "demand": "a tensor is evicted only in a deadlock, and the right one (J6, J9)",
    "memory": "the block events are the ledger, change by change; a block is one copy of one tensor (3 to 5, 9)",
    "host": "never more planned to be on the host than it holds (h)",
    "figures": "all figures follow from the spans (10, i)",
}
STREAMS = {"kernel": "compute", "recompute": "compute", "switch": "compute", "swap_out": "d2h", "swap_in": "h2d"}


def violations(
    timeline: Timeline, program: Program, plan: Plan, machine: Machine, limit: int | None
) -> list[Violation]:
    """Rules that the timeline of one program breaks; [] for a right one. A replay ends at the first that it finds.

    Args:
        plan: fits the program.
        limit: bytes; None where the timeline was simulated with the limit not enforced.
    """
    if not (timeline.spans and timeline.boundaries):
        return [Violation("spans", 0, "there are no spans or no boundaries")]
    job = Job(program.name, program, plan, iterations=len(timeline.boundaries))
    ran = JobTimeline(
        program.name, program.name, timeline.ideal_ns, 0, 0, None, timeline.boundaries, timeline.spans,
        timeline.events, timeline.events_until, (), (),
    )  # fmt: skip
    if found := list(_well_formed(job, ran)):
        return found
    (part,) = parts = parts_of(job, ran)
    on_host = max(part.steps.planned_host_bytes())
    found = part.steps.found
    if on_host > machine.host_bytes:
        found.append(Violation("host", 0, f"{on_host} bytes on the host of {machine.host_bytes}"))
    if found:
        return found
    alone = JobsTimeline(timeline.limit, "fifo", 0, 0, (ran,), (0,) * len(ran.events), ())
    room = FAR if limit is None else limit
    replay = Replay(alone, [job], [parts], machine, room, None, alone=True)
    if replay.found:
        return replay.found
    persistent = (block.owner for block in part.steps.persistent)
    found += wrong_events(replay.all[0].ledger, timeline.events, persistent)
    found += _figures(timeline, program, plan, machine, part, replay)
    return found


def _figures(
    timeline: Timeline, program: Program, plan: Plan, machine: Machine, part: Part, replay: Replay
) -> Iterator[Violation]:
    job, ends = replay.all[0], timeline.boundaries
    begin, end = (0, *ends)[-2:]

    def inside(pairs: Iterator[tuple[int, int]]) -> int:
        return sum(max(0, min(b, end) - max(a, begin)) for a, b in pairs)

    busy = {kind: inside((s.start_ns, s.end_ns) for s in timeline.spans if s.kind == kind) for kind in STREAMS}
    stalls = {why: inside((a, b) for a, b, cause in job.stalls if cause == why) for why in ("memory", "data")}
    *before, present = replay.states
    since = [i for i, state in enumerate(before) if state == present][-1:]  # when the state was this one before
    lasts = [b - a for a, b in pairwise([0, *ends])]
    period = next((len(lasts) - i for i in since if lasts[-1] == max(lasts[i:])), 0)
    n, kernels = part.steps.n, part.steps.program.kernels
    ran = [s.span for s in part.steps.steps if s.position < n and kernels[s.span.index].duration_ns]
    swaps = plan.of_kind(Swap)
    lasts_ns = max(end - begin, machine.issue_ns * (len(ran) + 2 * len(swaps)))  # the machine, the host (i)
    parts = timeline.breakdown
    yield from _differing(
        end, "",
        ("iteration_ns", timeline.iteration_ns, lasts_ns),
        ("ideal_ns", timeline.ideal_ns, sum(k.duration_ns for k in program.kernels)),
        ("peak_bytes", timeline.peak_bytes, max((used for _, used in curve(timeline.events)), default=0)),
        ("required_bytes", timeline.required_bytes, max(part.residency)),
        ("events_until", timeline.events_until, tuple(job.changes)),
        ("period", timeline.period, period),
        ("compute_ns", parts.compute_ns, busy["kernel"]),
        ("recompute_ns", parts.recompute_ns, busy["recompute"]),
        ("stall_memory_ns", parts.stall_memory_ns, stalls["memory"]),
        ("stall_data_ns", parts.stall_data_ns, stalls["data"]),
        ("overlapped_transfer_ns", parts.overlapped_transfer_ns,
         busy["swap_out"] + busy["swap_in"] - stalls["memory"] - stalls["data"]),
        ("stall_issue_ns", parts.stall_issue_ns, lasts_ns - (end - begin)),
    )  # fmt: skip


def _differing(time_ns: int, whose: str, *figures: tuple[str, object, object]) -> Iterator[Violation]:
    """Rule ``figures``: (name, what the timeline says, what is right)."""
    for name, says, right in figures:
        if says != right:
            yield Violation("figures", time_ns, f"{name}{whose} is {says}, the spans give {right}")


def jobs_violations(
    timeline: JobsTimeline, jobs: Sequence[Job], machine: Machine, limit: int, until_ns: int | None = None
) -> list[Violation]:
    """Rules that a timeline of several jobs breaks, as ``violations``.

    Args:
        jobs, machine, limit, until_ns: those of the simulation, which can run.
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
    replay = Replay(timeline, jobs, parts, machine, limit, until_ns)
    if replay.found:
        return replay.found
    for run, ran in zip(replay.all, timeline.jobs, strict=True):
        found += _events(run.ledger, run.changes, ran, parts[run.index])
        found += _differing(
            0, f" of job {ran.name!r}", ("events_until", ran.events_until, tuple(run.changes)),
            ("stalls", [*map(tuple, ran.stalls)], _joined(run.stalls)),
        )  # fmt: skip
        if list(ran.switches) != run.switches:
            detail = f"job {ran.name!r} changes its plan at {list(ran.switches)}; it should at {run.switches}"
            found.append(Violation("switch", 0, detail))
    peak = max((used for _, used in replay.curve), default=0)
    end = max((t.left_ns for t in timeline.jobs if t.left_ns is not None), default=replay.now)
    found += _differing(
        end, "",
        ("peak_bytes", timeline.peak_bytes, peak), ("limit", timeline.limit, limit), ("end_ns", timeline.end_ns, end),
        ("the curve", _last(timeline.memory), _last(replay.curve)),
    )  # fmt: skip
    return found


def _well_formed(job: Job, ran: JobTimeline) -> Iterator[Violation]:
    """Rules ``spans`` and ``order`` for one job."""
    for s in ran.spans:
        count = len(job.program.kernels if s.stream == "compute" else job.program.tensors)
        if STREAMS[s.kind] != s.stream or not 0 <= s.index < count or not 0 <= s.start_ns <= s.end_ns:
            yield Violation("spans", s.start_ns, f"{s} of job {ran.name!r} is none")
    for a, b in pairwise(ran.spans):
        if b.start_ns < a.start_ns:
            yield Violation("spans", b.start_ns, f"{b} of job {ran.name!r} is recorded after {a}")
    compute = [s for s in ran.spans if s.stream == "compute"]
    for stream in ("compute", "d2h", "h2d"):
        for a, b in pairwise(s for s in ran.spans if s.stream == stream):
            if b.start_ns < a.end_ns:
                yield Violation("overlap", b.start_ns, f"{b} of job {ran.name!r} starts before {a} has ended")
    kernels = [s.index for s in compute if s.kind == "kernel"]
    wanted = [k for _ in ran.boundaries for k in range(len(job.program.kernels))]
    if kernels != wanted or (compute and compute[-1].kind != "kernel"):
        yield Violation("order", 0, f"the kernels of job {ran.name!r} are not whole iterations in order")
    if any(a.kind == "switch" and not _follows(a, b) for a, b in pairwise(compute)):
        yield Violation("switch", 0, f"a switch to job {ran.name!r} is not followed by its step")
    if any(not 0 <= plan < len(job.plans) for _, plan in ran.switches) or bool(ran.boundaries) != (
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


def _joined(stalls: list[tuple[int, int, str]]) -> list[tuple[int, int, str]]:
    """A stall that goes on from the one before is one with it."""
    joined: list[tuple[int, int, str]] = []
    for start, end, cause in stalls:
        if joined and joined[-1][1:] == (start, cause):
            start = joined.pop()[0]
        joined.append((start, end, cause))
    return joined


def _last(curve: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is in use at the end of each instant."""
    return sorted(dict(curve).items())
