"""Job and JobsTimeline: input and result of a simulation of several programs on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from simulator.plan import Plan
from simulator.program import Program
from simulator.timeline import STREAMS, BlockEvent, Span, memory_curve, trace_memory, trace_piece, trace_span

Cause = Literal["admission", "compute", "data", "memory", "issue"]
Sharing = Literal["fifo", "shared"]


class JobsDeadlock(RuntimeError):
    """Raised if no job can proceed and the host is too full to evict a tensor; names the jobs and their requests."""


@dataclass(frozen=True)
class Job:
    """A program and its plans on a shared machine: arrives, runs iterations, and leaves.

    Attributes:
        name: Name in results and messages.
        program: Program of one iteration.
        plan: Plan from the first iteration on.
        arrives_ns: Earliest start; the job is admitted when its initial memory fits (RULES_JOBS.md, J5).
        iterations: Number of iterations after which the job leaves; None: unlimited.
        leaves_ns: Time from which on the job leaves at its next boundary; None: it does not.
        switches: Pairs (at_ns, plan), ascending; each takes effect at the next boundary.
        within_limit: Whether swap-ins keep the job's own memory within the limit of its plan (J4).
        durations: Kernel times in ns, a row per iteration; iteration i uses row i mod len (J11). (): those of the
            program.

    Raises:
        ValueError: A time or a count is out of range, or a row does not fit the program.
    """

    name: str
    program: Program
    plan: Plan
    arrives_ns: int = 0
    iterations: int | None = None
    leaves_ns: int | None = None
    switches: tuple[tuple[int, Plan], ...] = ()
    within_limit: bool = False
    durations: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.arrives_ns < 0:
            raise ValueError(f"job {self.name!r}: arrives_ns must be at least 0, got {self.arrives_ns}")
        if self.iterations is not None and self.iterations < 1:
            raise ValueError(f"job {self.name!r}: iterations must be at least 1, got {self.iterations}")
        if any(a >= b for (a, _), (b, _) in pairwise(self.switches)):
            raise ValueError(f"job {self.name!r}: the times in switches must be ascending")
        for i, row in enumerate(self.durations):
            if len(row) != len(self.program.kernels) or not all(0 <= ns <= 2**43 for ns in row):
                raise ValueError(
                    f"job {self.name!r}: durations[{i}]: expected {len(self.program.kernels)} integers from 0 to 2**43"
                )

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """The initial plan, followed by the plans that the job switches to."""
        return (self.plan, *(plan for _, plan in self.switches))

    @cached_property
    def equivalent_plans(self) -> tuple[int, ...]:
        """Per plan, the index of the first plan with equal decisions and variants."""
        first: dict[object, int] = {}
        keys = [(frozenset(plan.decisions), plan.variants) for plan in self.plans]
        return tuple(first.setdefault(key, i) for i, key in enumerate(keys))

    def share(self, plan: int) -> int | None:
        """Returns the bytes that the job's swap-ins keep within under a plan; None if unrestricted."""
        return (self.plans[plan].limit or None) if self.within_limit else None


class Stall(NamedTuple):
    """Wait of a job over [start_ns, end_ns)."""

    start_ns: int
    end_ns: int
    cause: Cause


class Eviction(NamedTuple):
    """Eviction of a tensor on demand (J6)."""

    time_ns: int
    job: int  # owner of the tensor
    tensor: int
    block: int  # in the schedule of the job's plan at that time
    nbytes: int
    wanted_by: int  # the job that gets the memory


@dataclass(frozen=True)
class JobTimeline:
    """Timeline of one job; times are ns from the start of the simulation, None for events that did not occur."""

    name: str
    program: str
    ideal_ns: int  # of the program, regardless of Job.durations
    arrived_ns: int
    admitted_ns: int | None
    left_ns: int | None
    boundaries: tuple[int, ...]  # end time of each iteration
    spans: tuple[Span, ...]  # in order of start
    events: tuple[BlockEvent, ...]  # in order; blocks are those of the plan in force
    events_until: tuple[int, ...]  # number of events after admission, then at the end of each iteration
    stalls: tuple[Stall, ...]  # in order
    switches: tuple[tuple[int, int], ...]  # changes of plan: time, index into Job.plans

    @property
    def iterations_ns(self) -> tuple[int, ...]:
        """Duration of each iteration."""
        return tuple(b - a for a, b in pairwise((self.admitted_ns or 0, *self.boundaries)))

    @property
    def mean_ns(self) -> float:
        """Mean duration of an iteration; NaN if none ended."""
        durations_ns = self.iterations_ns
        return sum(durations_ns) / len(durations_ns) if durations_ns else float("nan")

    def stall_ns(self, cause: Cause) -> int:
        """Returns the total stall for one cause."""
        return sum(s.end_ns - s.start_ns for s in self.stalls if s.cause == cause)

    @cached_property
    def memory(self) -> tuple[tuple[int, int], ...]:
        """(time_ns, bytes that the job holds) after each change, in order."""
        return memory_curve(self.events, 0)


@dataclass(frozen=True)
class JobsTimeline:
    """Timeline of several jobs on one machine, until the last has left."""

    limit: int  # bytes of all jobs together
    sharing: Sharing
    end_ns: int  # when the last job left
    peak_bytes: int
    jobs: tuple[JobTimeline, ...]
    order: tuple[int, ...]  # job of each block event, in order
    evictions: tuple[Eviction, ...]  # in order

    @cached_property
    def memory(self) -> tuple[tuple[int, int], ...]:
        """(time_ns, bytes in use) after each change, in order; simultaneous allocations, or frees, are merged."""
        return merged_curve(self.jobs, self.order)

    def copies_ns(self, stream: Literal["d2h", "h2d"]) -> int:
        """Returns the total duration of the copies in one direction."""
        return sum(s.end_ns - s.start_ns for job in self.jobs for s in job.spans if s.stream == stream)

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as lists and numbers."""
        out = asdict(self)
        for job, entry in zip(self.jobs, out["jobs"], strict=True):
            entry |= {name: [list(x) for x in getattr(job, name)] for name in ("spans", "events", "stalls", "switches")}
        out["evictions"] = [e._asdict() for e in self.evictions]
        return out

    def perfetto(self, jobs: Sequence[Job]) -> dict[str, Any]:
        """Returns Chrome trace JSON (opens in Perfetto).

        Each job is a process with its streams, stalls, memory and changes of plan; one more process shows the total
        memory.
        """
        events: list[dict[str, Any]] = []
        for pid, (job, result) in enumerate(zip(jobs, self.jobs, strict=True), 1):
            events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": result.name}})
            for tid, track in enumerate((*STREAMS, "waits"), 1):
                events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": track}})
            events += [trace_span(pid, span, job.program) for span in result.spans]
            events += [trace_piece(pid, len(STREAMS) + 1, "wait", s.cause, s.start_ns, s.end_ns) for s in result.stalls]
            for time, plan in result.switches:
                label = f"plan {plan}"
                events.append({"ph": "i", "s": "p", "pid": pid, "tid": 1, "name": label, "ts": time / 1000})
            events += trace_memory(pid, result.memory)
        total_pid = len(jobs) + 1
        events.append({"ph": "M", "pid": total_pid, "name": "process_name", "args": {"name": "all jobs"}})
        return {"traceEvents": events + trace_memory(total_pid, self.memory), "displayTimeUnit": "ns"}


def merged_curve(jobs: Sequence[JobTimeline], order: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Returns the ``memory_curve`` of all jobs; ``order``: the job of each block event, in order."""
    events = [iter(job.events) for job in jobs]
    return memory_curve([next(events[j]) for j in order], 0)
