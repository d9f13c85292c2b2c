"""The nouns of several programs on one machine: a Job goes in, a JobsTimeline comes out. Both are frozen."""

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
    """No job can go on, and no tensor can be evicted: the host is full. It names the jobs and what each asks for."""


@dataclass(frozen=True)
class Job:
    """A program under a plan that comes to a machine, runs one iteration after the other, and leaves.

    Attributes:
        arrives_ns: it begins then, or later, when its start fits (RULES.md, J5).
        iterations: it leaves after so many; None: it does not count them.
        leaves_ns: it leaves at the first end of an iteration from this time on.
        switches: (at_ns, plan), ascending: the plan takes effect at the job's first boundary from that time on.
        within: its swap-ins do not bring its own memory above the limit that the plan was made for (J4).
        durations: iteration i takes row i mod len for the ns of its kernels (J11); empty: the program's and plan's.

    Raises:
        ValueError: a time or a number is out of range, or a row is not one of the program.
    """

    name: str
    program: Program
    plan: Plan
    arrives_ns: int = 0
    iterations: int | None = None
    leaves_ns: int | None = None
    switches: tuple[tuple[int, Plan], ...] = ()
    within: bool = False
    durations: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.arrives_ns < 0:
            raise ValueError(f"job {self.name!r}: arrives_ns is at least 0, not {self.arrives_ns}")
        if self.iterations is not None and self.iterations < 1:
            raise ValueError(f"job {self.name!r}: iterations are at least 1, not {self.iterations}")
        if any(a >= b for (a, _), (b, _) in pairwise(self.switches)):
            raise ValueError(f"job {self.name!r}: the times of its switches are not ascending")
        for i, row in enumerate(self.durations):
            if len(row) != len(self.program.kernels) or not all(0 <= ns <= 2**43 for ns in row):
                raise ValueError(
                    f"job {self.name!r}: durations[{i}]: expected {len(self.program.kernels)} integers from 0 to 2**43"
                )

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of the start, and those that are switched to."""
        return (self.plan, *(plan for _, plan in self.switches))

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """Per plan: the first with the same decisions and variants."""
        first: dict[object, int] = {}
        keys = [(frozenset(plan.decisions), plan.variants) for plan in self.plans]
        return tuple(first.setdefault(key, i) for i, key in enumerate(keys))

    def share(self, plan: int) -> int | None:
        """Bytes that its swap-ins keep within under this one of its plans; None: all may be used."""
        return (self.plans[plan].limit or None) if self.within else None


class Stall(NamedTuple):
    """A job waits over [start_ns, end_ns)."""

    start_ns: int
    end_ns: int
    cause: Cause


class Eviction(NamedTuple):
    """A tensor is sent away on demand (J6)."""

    time_ns: int
    job: int  # whose tensor it is
    tensor: int
    block: int  # in the schedule of the job's plan at that time
    nbytes: int
    wanted_by: int  # the job that gets the memory


@dataclass(frozen=True)
class JobTimeline:
    """What one job did. Times are ns from the start of the simulation, None where it did not come to that."""

    name: str
    program: str
    ideal_ns: int  # the program's, whatever its kernels took
    arrived_ns: int
    admitted_ns: int | None
    left_ns: int | None
    boundaries: tuple[int, ...]  # end time of each iteration
    spans: tuple[Span, ...]  # in order of start
    events: tuple[BlockEvent, ...]  # in order; blocks are those of the plan in force
    events_until: tuple[int, ...]  # how many of them there were after admission, and at the end of each iteration
    stalls: tuple[Stall, ...]  # in order
    switches: tuple[tuple[int, int], ...]  # that took effect: time, index into Job.plans

    @property
    def iterations_ns(self) -> tuple[int, ...]:
        """How long each iteration took."""
        return tuple(b - a for a, b in pairwise((self.admitted_ns or 0, *self.boundaries)))

    @property
    def mean_ns(self) -> float:
        """The mean iteration; NaN where none ended."""
        lasts = self.iterations_ns
        return sum(lasts) / len(lasts) if lasts else float("nan")

    def stall_ns(self, cause: Cause) -> int:
        """How long it waited for this, in all."""
        return sum(s.end_ns - s.start_ns for s in self.stalls if s.cause == cause)

    @cached_property
    def held(self) -> tuple[tuple[int, int], ...]:
        """(time_ns, bytes that the job holds after this), in order."""
        return memory_curve(self.events, 0)


@dataclass(frozen=True)
class JobsTimeline:
    """Several jobs on one machine, from the arrival of the first until the last has left."""

    limit: int
    sharing: Sharing
    end_ns: int  # when the last job left
    peak_bytes: int
    jobs: tuple[JobTimeline, ...]
    order: tuple[int, ...]  # the jobs of all block events, in order
    evictions: tuple[Eviction, ...]  # in order

    @classmethod
    def assemble(
        cls, limit: int, sharing: Sharing, end_ns: int, jobs: Sequence[JobTimeline], order: Sequence[int],
        evictions: Sequence[Eviction],
    ) -> JobsTimeline:  # fmt: skip
        """With the peak that the events give."""
        peak = max(used for _, used in memory_curve(_merged(jobs, order), 0))
        return cls(limit, sharing, end_ns, peak, tuple(jobs), tuple(order), tuple(evictions))

    @cached_property
    def memory(self) -> tuple[tuple[int, int], ...]:
        """(time_ns, bytes in use after this), in order; all that one instant takes, or gives back, is one change."""
        return memory_curve(_merged(self.jobs, self.order), 0)

    def copies_ns(self, stream: Literal["d2h", "h2d"]) -> int:
        """How long copies in this direction were under way."""
        return sum(s.end_ns - s.start_ns for job in self.jobs for s in job.spans if s.stream == stream)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as lists and numbers."""
        out = asdict(self)
        for job, entry in zip(self.jobs, out["jobs"], strict=True):
            entry |= {name: [list(x) for x in getattr(job, name)] for name in ("spans", "events", "stalls", "switches")}
        out["evictions"] = [e._asdict() for e in self.evictions]
        return out

    def perfetto(self, jobs: Sequence[Job]) -> dict[str, Any]:
        """Chrome trace JSON (opens in Perfetto): a process a job with its streams, its stalls, what it holds and the
        instants at which it changes its plan; one more process for the memory of all."""
        events: list[dict[str, Any]] = []
        for pid, (job, ran) in enumerate(zip(jobs, self.jobs, strict=True), 1):
            events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": ran.name}})
            for tid, track in enumerate((*STREAMS, "waits"), 1):
                events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": track}})
            events += [trace_span(pid, span, job.program) for span in ran.spans]
            events += [trace_piece(pid, len(STREAMS) + 1, "wait", s.cause, s.start_ns, s.end_ns) for s in ran.stalls]
            for time, plan in ran.switches:
                what = f"plan {plan}"
                events.append({"ph": "i", "s": "p", "pid": pid, "tid": 1, "name": what, "ts": time / 1000})
            events += trace_memory(pid, ran.held)
        everybody = len(jobs) + 1
        events.append({"ph": "M", "pid": everybody, "name": "process_name", "args": {"name": "all jobs"}})
        return {"traceEvents": events + trace_memory(everybody, self.memory), "displayTimeUnit": "ns"}


def _merged(jobs: Sequence[JobTimeline], order: Sequence[int]) -> list[BlockEvent]:
    """The block events of all jobs, in order."""
    events = [iter(job.events) for job in jobs]
    return [next(events[j]) for j in order]
