"""Timeline: the result of a simulated or measured execution."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from simulator.files import FormatError, fields, integers, keys_of, load_json, write_json
from simulator.program import Program
from simulator.settings import read

FORMAT = "timeline/2"
STREAMS = ("compute", "d2h", "h2d")
SPAN_KINDS = ("kernel", "recompute", "swap_out", "swap_in")
CAUSES = ("memory", "data", "issue")  # of stalls


class Span(NamedTuple):
    """One kernel or copy on one stream, over [start_ns, end_ns)."""

    start_ns: int
    end_ns: int
    stream: Literal["compute", "d2h", "h2d"]
    kind: Literal["kernel", "recompute", "swap_out", "swap_in", "switch"]  # switch: with several jobs only
    index: int  # type: ignore[assignment]  # kernel for the compute stream, tensor for copies


class BlockEvent(NamedTuple):
    """Allocation or release of a block in device memory. A swap releases its block and allocates it again."""

    time_ns: int
    owner: int  # tensor, or -1 - k: the workspace of kernel k
    block: int  # its index in the schedule
    nbytes: int  # positive for an allocation, negative for a free


@dataclass(frozen=True)
class Breakdown:
    """Time of the last iteration by cause, in ns; all entries but the transfers add up to ``iteration_ns``."""

    compute_ns: int
    recompute_ns: int
    stall_memory_ns: int  # compute waits for memory that swap-outs (d2h) free
    stall_data_ns: int  # compute waits for a tensor that is being swapped in (h2d)
    overlapped_transfer_ns: int  # copy-engine time during which compute was not stalled
    stall_issue_ns: int = 0  # compute waits until the host has issued the next step (RULES.md, choice i)


def memory_curve(events: Sequence[BlockEvent], resident: int) -> tuple[tuple[int, int], ...]:
    """Returns (time_ns, bytes in use) after each change, in order.

    Args:
        events: Block events in order.
        resident: Number of leading events that describe the initial state.

    Returns:
        Pairs in order of time, with the bytes in use from then on.
    """
    used = sum(event.nbytes for event in events[:resident])
    previous = (-1, True)
    curve = [(0, used)]
    for event in events[resident:]:
        used += event.nbytes
        current = (event.time_ns, event.nbytes > 0)
        if current == previous:
            curve.pop()
        curve.append((event.time_ns, used))
        previous = current
    return tuple(curve)


def trace_piece(pid: int, tid: int, kind: str, name: str, start_ns: int, end_ns: int) -> dict[str, Any]:
    """Returns a duration event of a Chrome trace."""
    label = name if kind in ("kernel", "wait") else f"{kind} {name}"
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "cat": kind,
        "name": label,
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
    }


def trace_span(pid: int, s: Span, program: Program) -> dict[str, Any]:
    """Returns the duration event of a span, on the track of its stream."""
    table = program.kernels if s.stream == "compute" else program.tensors
    return trace_piece(pid, STREAMS.index(s.stream) + 1, s.kind, table[s.index].name, s.start_ns, s.end_ns)


def trace_memory(pid: int, curve: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Returns the counter events of the bytes in use."""
    return [{"ph": "C", "pid": pid, "name": "memory", "ts": t / 1000, "args": {"bytes": used}} for t, used in curve]


def _last_start(boundaries: Sequence[int]) -> int:
    """Returns the start of the last iteration, given the end times of all iterations."""
    return boundaries[-2] if len(boundaries) > 1 else 0


@dataclass(frozen=True)
class Timeline:
    """Spans, block events and statistics of a simulation; figures are those of the last iteration, except the peak.

    Attributes:
        program: Name of the program.
        limit: Memory limit in bytes.
        iteration_ns: Time of the last iteration.
        ideal_ns: Time of all kernels one after the other, with nothing evicted.
        peak_bytes: Most bytes in use, over all iterations.
        required_bytes: Smallest limit in bytes at which the plan is feasible.
        breakdown: Time of the last iteration by cause.
        boundaries: End time of each iteration in ns.
        spans: Kernels and copies by start; at one instant in the order of rule 9.
        events: Block events in order; initially resident blocks come first.
        events_until: Number of events at the start, then at the end of each iteration.
        period: Number of iterations that repeat, the last being the slowest (rule 10); 0: not periodic yet.
    """

    program: str
    limit: int
    iteration_ns: int
    ideal_ns: int
    peak_bytes: int
    required_bytes: int
    breakdown: Breakdown
    boundaries: tuple[int, ...]
    spans: tuple[Span, ...]
    events: tuple[BlockEvent, ...]
    events_until: tuple[int, ...]
    period: int = 1

    @cached_property
    def memory(self) -> tuple[tuple[int, int], ...]:
        """(time_ns, bytes in use) after each change, in order; simultaneous allocations, or frees, are merged."""
        return memory_curve(self.events, self.events_until[0])

    @cached_property
    def peak(self) -> tuple[int, dict[int, int]]:
        """Time of the first peak in ns, and the bytes of each owner (``BlockEvent``) at that time."""
        used = highest = last = 0
        for i, event in enumerate(self.events):
            used += event.nbytes
            if used > highest:
                highest = used
                last = i
        by_owner: Counter[int] = Counter()
        for event in self.events[: last + 1]:
            by_owner[event.owner] += event.nbytes
        return self.events[last].time_ns if self.events else 0, {owner: n for owner, n in by_owner.items() if n}

    def peak_by(self, kind_of: Callable[[int], str]) -> dict[str, int]:
        """Returns the bytes in use at the first peak, summed by the kind that ``kind_of`` returns for each owner."""
        at_peak: Counter[str] = Counter()
        for owner, nbytes in self.peak[1].items():
            at_peak[kind_of(owner)] += nbytes
        return dict(at_peak)

    def span_at(self, time_ns: int) -> Span:
        """Returns the span that the compute stream executes at ``time_ns``, else the last before, else the first."""
        spans = [span for span in self.spans if span.stream == "compute"]
        return spans[max(bisect_right(spans, time_ns, key=lambda span: span.start_ns) - 1, 0)]

    @property
    def steady(self) -> bool:
        """Whether the last iteration ends in the state in which it began."""
        return self.period == 1

    @property
    def last_start_ns(self) -> int:
        """Start of the last iteration, in ns."""
        return _last_start(self.boundaries)

    @property
    def overhead(self) -> float:
        """Iteration time divided by ideal time, minus 1; 0 for a program without duration."""
        return self.iteration_ns / self.ideal_ns - 1 if self.ideal_ns else 0.0

    @classmethod
    def assemble(
        cls,
        program: Program,
        limit: int,
        required: int,
        boundaries: Sequence[int],
        spans: Sequence[Span],
        events: Sequence[BlockEvent],
        events_until: Sequence[int],
        stalls: Sequence[tuple[int, int, str]],
        period: int = 1,
    ) -> Timeline:
        """Builds a timeline from the raw records of a simulation, sorted by start.

        Args:
            program: Simulated program.
            limit: Memory limit in bytes.
            required: Smallest limit in bytes at which the plan is feasible.
            boundaries: Start of each iteration and end of the last, in ns.
            spans: Busy intervals of the compute stream and copy engines.
            events: Allocations and frees.
            events_until: Number of events at the start, then at the end of each iteration.
            stalls: (start, end, cause), the cause one of "memory", "data" and "issue".
            period: Iterations that repeat (rule 10); 0: none do yet.

        Returns:
            The timeline; its iteration time and breakdown are those of the last iteration, in ns.
        """
        end = boundaries[-1]
        begin = _last_start(boundaries)

        def overlap(pairs: Iterable[tuple[int, int]]) -> int:
            return sum(max(0, min(e, end) - max(s, begin)) for s, e in pairs)

        busy = {kind: overlap((s.start_ns, s.end_ns) for s in spans if s.kind == kind) for kind in SPAN_KINDS}
        memory, data, issue = (overlap((s, e) for s, e, kind in stalls if kind == cause) for cause in CAUSES)
        overlapped = busy["swap_out"] + busy["swap_in"] - memory - data
        breakdown = Breakdown(busy["kernel"], busy["recompute"], memory, data, overlapped, issue)
        peak = max(used for _, used in memory_curve(events, events_until[0]))
        records = tuple(boundaries), tuple(spans), tuple(events), tuple(events_until)
        return cls(program.name, limit, end - begin, program.ideal_ns, peak, required, breakdown, *records, period)

    def to_dict(self) -> dict[str, Any]:
        """Returns the ``timeline/2`` dictionary; ``period`` is left out if 1, ``stall_issue_ns`` if 0."""
        out = asdict(self)
        if not self.breakdown.stall_issue_ns:
            del out["breakdown"]["stall_issue_ns"]
        if self.steady:
            del out["period"]
        out["spans"] = [list(s) for s in self.spans]
        out["events"] = [list(e) for e in self.events]
        out["boundaries"] = list(self.boundaries)
        out["events_until"] = list(self.events_until)
        return {"format": FORMAT, **out}

    @classmethod
    def from_dict(cls, data: object) -> Timeline:
        """Reads a ``timeline/2`` dictionary.

        Raises:
            FormatError: An entry is malformed; the message names the first.
        """
        required, optional = keys_of(cls)
        top = fields(data, "timeline", {"format": str, **required}, optional)
        if (version := top.pop("format")) != FORMAT:
            raise FormatError(f"timeline.format: expected {FORMAT!r}, got {version!r}; simulate the plan again")
        top["breakdown"] = read(Breakdown, top["breakdown"], "breakdown")
        for name in ("boundaries", "events_until"):
            top[name] = integers(top[name], name)
        top["events"] = tuple(BlockEvent(*integers(e, f"events[{i}]", length=4)) for i, e in enumerate(top["events"]))
        spans = []
        for i, entry in enumerate(top["spans"]):
            where = f"spans[{i}]"
            if not isinstance(entry, list) or len(entry) != 5:
                raise FormatError(f"{where}: expected [start_ns, end_ns, stream, kind, index]")
            start, end, index = integers([entry[0], entry[1], entry[4]], where)
            if entry[2] not in STREAMS or entry[3] not in SPAN_KINDS:
                raise FormatError(
                    f"{where}: expected a stream of {', '.join(STREAMS)} and a kind of {', '.join(SPAN_KINDS)}, got "
                    f"{entry[2]!r} and {entry[3]!r}"
                )
            spans.append(Span(start, end, entry[2], entry[3], index))
        top["spans"] = tuple(spans)
        return cls(**top)

    def save(self, path: str | Path) -> None:
        """Writes ``timeline/2`` JSON."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Reads ``timeline/2`` JSON; raises FormatError that names the file and entry."""
        return load_json(path, cls.from_dict)

    def perfetto(self, program: Program) -> dict[str, Any]:
        """Returns Chrome trace JSON (opens in Perfetto): one track per stream, and a memory counter.

        Chrome's unit is the microsecond; fractions keep the nanoseconds.
        """
        events: list[dict[str, Any]] = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": self.program}}]
        for tid, stream in enumerate(STREAMS, 1):
            events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": stream}})
            events.append({"ph": "M", "pid": 1, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
        for span in self.spans:
            args = {"index": span.index}
            if span.stream != "compute":
                args["nbytes"] = program.tensors[span.index].nbytes
            events.append(trace_span(1, span, program) | {"args": args})
        return {"traceEvents": events + trace_memory(1, self.memory), "displayTimeUnit": "ns"}
