"""Slow validator of timelines of one program: is a timeline possible, and does it follow the rules?

It shares no code with the simulators and works in the opposite direction: it takes the recorded spans as given, derives
what every step uses and frees (``steps.py``), replays the spans (``replay.py``) and reports the first broken rule.
RULES lists the rules, with the numbers of simulator/RULES.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program
from simulator.timeline import Span, Timeline
from tests.oracle.ledger import curve, wrong_events
from tests.oracle.machine import Violation
from tests.oracle.replay import Replay
from tests.oracle.steps import Steps

__all__ = ["RULES", "Violation", "violations"]

FAR = 2**62
RULES = {
    "spans": "well formed, in order of start",
    "overlap": "one kernel or copy at a time on a stream",
    "order": "kernels in program order, every iteration complete (1)",
    "content": "tensors that a step uses have the content of program order (7)",
    "recompute": "exactly the planned kernels are recomputed, in order, before the planned kernel (7)",
    "resident": "tensors that a step uses are in device memory when it starts (2, 6)",
    "sync": "no step starts before the memory of a synchronous swap-out is free (4)",
    "issued": "no step starts before the host has issued it (i)",
    "limit": "bytes in use never exceed the limit (2)",
    "duration": "steps and copies end when their work is done, slowed down by others (4, g, j, k)",
    "swap-out": "one per copy that the plan issues, in order of issue; none if the host copy is valid (4, b)",
    "swap-in": "in order of next use, if it fits until its use (5, b)",
    "idle": "no stream waits while its next step or copy could start",
    "memory": "the block events equal the ledger; a block is one copy of one tensor (3 to 5, 9)",
    "host": "planned host bytes never exceed the host's capacity (h)",
    "figures": "all figures follow from the spans (10)",
}
STREAMS = {"kernel": "compute", "recompute": "compute", "swap_out": "d2h", "swap_in": "h2d"}


def violations(
    timeline: Timeline, program: Program, plan: Plan, machine: Machine, limit: int | None
) -> list[Violation]:
    """Returns the rules that a timeline breaks, [] if none. A replay stops at the first violation.

    Args:
        plan: Fits the program.
        limit: Limit in bytes; None if the timeline was simulated without a limit.
    """
    if not (timeline.spans and timeline.boundaries):
        return [Violation("spans", 0, "there are no spans or no boundaries")]
    if found := list(_well_formed(timeline, program)):
        return found
    compute = [s for s in timeline.spans if s.stream == "compute"]
    steps = Steps(compute, program.with_variants(plan.variants), plan)
    on_host = max(steps.planned_host_bytes())
    if on_host > machine.host_bytes:
        steps.found.append(Violation("host", 0, f"{on_host} bytes on the host of {machine.host_bytes}"))
    if steps.found:
        return steps.found
    replay = Replay(timeline, steps, machine, FAR if limit is None else limit)
    if replay.found:
        return replay.found
    persistent = (block.owner for block in steps.persistent)
    return [
        *wrong_events(replay.ledger, timeline.events, persistent),
        *_figures(timeline, program, plan, machine, replay),
    ]


def _well_formed(timeline: Timeline, program: Program) -> Iterator[Violation]:
    """Checks the rules ``spans``, ``overlap`` and ``order``."""
    for s in timeline.spans:
        count = len(program.kernels if s.stream == "compute" else program.tensors)
        if STREAMS[s.kind] != s.stream or not 0 <= s.index < count or not 0 <= s.start_ns <= s.end_ns:
            yield Violation("spans", s.start_ns, f"{s} is none")
    for a, b in pairwise(timeline.spans):
        if b.start_ns < a.start_ns:
            yield Violation("spans", b.start_ns, f"{b} is recorded after {a}")
    for stream in ("compute", "d2h", "h2d"):
        for a, b in pairwise(s for s in timeline.spans if s.stream == stream):
            if b.start_ns < a.end_ns:
                yield Violation("overlap", b.start_ns, f"{b} starts before {a} has ended")
    compute: list[Span] = [s for s in timeline.spans if s.stream == "compute"]
    kernels = [s.index for s in compute if s.kind == "kernel"]
    wanted = [k for _ in timeline.boundaries for k in range(len(program.kernels))]
    if kernels != wanted or (compute and compute[-1].kind != "kernel"):
        yield Violation("order", 0, "the kernels are not whole iterations in order")


def _figures(timeline: Timeline, program: Program, plan: Plan, machine: Machine, replay: Replay) -> Iterator[Violation]:
    """Checks the rule ``figures``."""
    ends = timeline.boundaries
    begin, end = (0, *ends)[-2:]

    def inside(pairs: Iterator[tuple[int, int]]) -> int:
        return sum(max(0, min(b, end) - max(a, begin)) for a, b in pairs)

    busy = {kind: inside((s.start_ns, s.end_ns) for s in timeline.spans if s.kind == kind) for kind in STREAMS}
    stalls = {
        why: inside((a, b) for a, b, cause in replay.stalls if cause == why) for why in ("memory", "data", "issue")
    }
    *before, present = replay.states
    since = [i for i, state in enumerate(before) if state == present][-1:]  # the last time that the state was equal
    lasts = [b - a for a, b in pairwise([0, *ends])]
    period = next((len(lasts) - i for i in since if lasts[-1] == max(lasts[i:])), 0)
    parts = timeline.breakdown
    for name, says, right in (
        ("iteration_ns", timeline.iteration_ns, end - begin),
        ("ideal_ns", timeline.ideal_ns, sum(k.duration_ns for k in program.kernels)),
        ("peak_bytes", timeline.peak_bytes, max((used for _, used in curve(timeline.events)), default=0)),
        ("required_bytes", timeline.required_bytes, max(replay.residency)),
        ("events_until", timeline.events_until, tuple(replay.changes)),
        ("period", timeline.period, period),
        ("compute_ns", parts.compute_ns, busy["kernel"]),
        ("recompute_ns", parts.recompute_ns, busy["recompute"]),
        ("stall_memory_ns", parts.stall_memory_ns, stalls["memory"]),
        ("stall_data_ns", parts.stall_data_ns, stalls["data"]),
        (
            "overlapped_transfer_ns",
            parts.overlapped_transfer_ns,
            busy["swap_out"] + busy["swap_in"] - stalls["memory"] - stalls["data"],
        ),
        ("stall_issue_ns", parts.stall_issue_ns, stalls["issue"]),
    ):
        if says != right:
            yield Violation("figures", end, f"{name} is {says}, the spans give {right}")
