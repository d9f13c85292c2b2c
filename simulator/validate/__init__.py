"""A slow, obvious checker of a Timeline: is what it says possible, and is it what the rules ask for?

It shares no code with ``schedule``, ``reference`` and ``compiled`` and works the other way round: they decide what
happens; it takes the spans as given, replays them against a ledger of its own, and names every rule that they break.
Content is tracked by **version**, the kernel executions that wrote it, so that a stale copy or a pass that ran other
kernels is found out. The rules (numbers: the docstring of ``reference.py``):

- ``spans``      well formed, in order of start
- ``overlap``    one piece of work at a time on a stream; on both copy streams with one copy engine (4)
- ``order``      the kernels run in program order and every iteration is complete (1)
- ``duration``   a kernel lasts as long as its algorithm does beside copies (k), a copy until its work is done on the
  shared link (4, g)
- ``resident``   what a kernel or a step uses is in device memory when it starts (2, 6)
- ``content``    … and has the content that program order gives it (7)
- ``recompute``  what the plan runs again, no other: in program order, before the kernel that it names, each time (7)
- ``swap-out``   one for every copy that the plan issues, in order of issue; none if the host copy is valid (4, b)
- ``sync``       no kernel or step starts before the memory of a synchronous swap-out is free (4)
- ``swap-in``    of a tensor on the host, after ``prefetch``, in order of next use, where it fits until then (5, b)
- ``idle``       no stream waits while its next piece of work could start (2, 4, 5, 6)
- ``memory``     the block events are the ledger, change by change; a block is one copy of one tensor (3, 4, 5, 9)
- ``limit``      never more in use than the limit
- ``host``       never more planned to be on the host than it holds (h)
- ``figures``    ideal, iteration, period, peak, required bytes, boundaries and breakdown follow from the spans (10, i)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from simulator.machine import Machine
from simulator.plan import Plan, Swap
from simulator.program import Program
from simulator.timeline import Timeline
from simulator.validate.ledger import curve, wrong_events
from simulator.validate.replay import Replay
from simulator.validate.spans import Link, Violation, duration, order, overlap, well_formed
from simulator.validate.steps import Steps

__all__ = ["Violation", "violations"]


def violations(
    timeline: Timeline, program: Program, plan: Plan, machine: Machine, limit: int | None
) -> list[Violation]:
    """Every rule that a timeline breaks; [] for a right one.

    Args:
        plan: fits the program (``Plan.check``, ``schedule.lower``).
        limit: bytes; None where the timeline was simulated with the limit not enforced.
    """
    found = list(well_formed(timeline, program)) or [*overlap(timeline, machine), *order(timeline, program)]
    if found:  # a replay needs one thing at a time, in order
        return found
    runs = program.with_variants(plan.variants)
    steps = Steps(timeline, runs, plan)
    link = Link(timeline, runs, machine)
    replay = Replay(timeline, steps, link, machine.copy_engines == 1, limit)
    ends = Counter(back % len(program.kernels) for *_, back in steps.gaps([0]))
    found = [
        *duration(timeline, runs, link, {k: machine.wait_ns * count for k, count in ends.items()}, machine),
        *steps.found,
        *replay.found,
    ]
    found += wrong_events(replay.ledger, timeline.events, (block.owner for block in steps.persistent))
    found += _figures(timeline, program, plan, machine, replay)
    if limit is not None:
        found += [Violation("limit", t, f"{b} bytes of {limit}") for t, b in curve(timeline.events) if b > limit]
    on_host = steps.planned_host_bytes()
    found += [
        Violation("host", 0, f"{b} bytes on the host at kernel {k} of {machine.host_bytes}")
        for k, b in enumerate(on_host) if b == max(on_host) > machine.host_bytes
    ]  # fmt: skip
    return sorted(found, key=lambda v: v.time_ns)


def _figures(timeline: Timeline, program: Program, plan: Plan, machine: Machine, replay: Replay) -> Iterator[Violation]:
    n = len(program.kernels)
    ends = [s.end_ns for s in timeline.spans if s.kind == "kernel"][n - 1 :: n]
    begin, end = ([0] + ends)[-2:]

    def busy(kind: str) -> int:
        return sum(max(0, min(s.end_ns, end) - max(s.start_ns, begin)) for s in timeline.spans if s.kind == kind)

    *before, present = replay.states
    since = [i for i, state in enumerate(before) if state == present][-1:]  # when the state was this one before
    lasts = [b - a for a, b in pairwise([0, *ends])]
    period = next((len(lasts) - i for i in since if lasts[-1] == max(lasts[i:])), 0)
    waits = replay.stalls["memory"] + replay.stalls["data"]
    parts = timeline.breakdown
    kernels = program.with_variants(plan.variants).kernels
    ran = [s for s in timeline.spans if s.stream == "compute" and kernels[s.index].duration_ns]
    ran = ran[-len(ran) // len(ends) :] if ends else []
    swaps = [d for d in plan.decisions if isinstance(d, Swap)]
    lasts_ns = max(end - begin, machine.issue_ns * (len(ran) + 2 * len(swaps)))  # the machine, the host (i)
    for name, says, right in (
        ("boundaries", timeline.boundaries, tuple(ends)),
        ("iteration_ns", timeline.iteration_ns, lasts_ns),
        ("ideal_ns", timeline.ideal_ns, sum(k.duration_ns for k in program.kernels)),
        ("peak_bytes", timeline.peak_bytes, max((used for _, used in curve(timeline.events)), default=0)),
        ("required_bytes", timeline.required_bytes, max(replay.residency)),
        ("events_until", timeline.events_until, tuple(replay.changes)),
        ("period", timeline.period, period),
        ("compute_ns", parts.compute_ns, busy("kernel")),
        ("recompute_ns", parts.recompute_ns, busy("recompute")),
        ("stall_memory_ns", parts.stall_memory_ns, replay.stalls["memory"]),
        ("stall_data_ns", parts.stall_data_ns, replay.stalls["data"]),
        ("overlapped_transfer_ns", parts.overlapped_transfer_ns, busy("swap_out") + busy("swap_in") - waits),
        ("stall_issue_ns", parts.stall_issue_ns, lasts_ns - (end - begin)),
        ("the sum of the breakdown", parts.compute_ns + parts.recompute_ns + parts.stall_memory_ns
         + parts.stall_data_ns + parts.stall_issue_ns, lasts_ns),
    ):  # fmt: skip
        if says != right:
            yield Violation("figures", end, f"{name} is {says}, the spans give {right}")
