"""What can be seen in the spans alone: form, order, and how long each lasts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import pairwise
from math import inf
from typing import NamedTuple

from simulator.machine import Machine
from simulator.program import Kernel, Program
from simulator.timeline import Span, Timeline

LONE = 2**20  # what a transfer alone on the link gets done in a nanosecond


class Violation(NamedTuple):
    """One broken rule."""

    rule: str
    time_ns: int
    detail: str


def well_formed(timeline: Timeline, program: Program) -> Iterator[Violation]:
    """Rule ``spans``."""
    streams = {"kernel": "compute", "recompute": "compute", "swap_out": "d2h", "swap_in": "h2d"}
    for span in timeline.spans:
        count = len(program.kernels if span.stream == "compute" else program.tensors)
        if streams[span.kind] != span.stream:
            yield Violation("spans", span.start_ns, f"a {span.kind} on stream {span.stream}")
        elif not 0 <= span.index < count:
            yield Violation("spans", span.start_ns, f"{span.kind} of {span.index}; there are {count}")
        elif not 0 <= span.start_ns <= span.end_ns:
            yield Violation("spans", span.start_ns, f"{span} ends before it starts")
    for a, b in pairwise(timeline.spans):
        if b.start_ns < a.start_ns:
            yield Violation("spans", b.start_ns, f"{b} is recorded after {a}")
    if not (timeline.spans and timeline.boundaries):
        yield Violation("spans", 0, "there are no spans or no boundaries")


def overlap(timeline: Timeline, machine: Machine) -> Iterator[Violation]:
    """Rule ``overlap``."""
    streams = [{"compute"}, {"d2h"}, {"h2d"}] if machine.copy_engines == 2 else [{"compute"}, {"d2h", "h2d"}]
    for stream in streams:
        for a, b in pairwise(s for s in timeline.spans if s.stream in stream):
            if b.start_ns < a.end_ns:
                yield Violation("overlap", b.start_ns, f"{b} starts before {a} has ended")


def order(timeline: Timeline, program: Program) -> Iterator[Violation]:
    """Rule ``order``."""
    n = len(program.kernels)
    compute = [s for s in timeline.spans if s.stream == "compute"]
    ran = [s for s in compute if s.kind == "kernel"]
    for position, span in enumerate(ran):
        if span.index != position % n:
            yield Violation("order", span.start_ns, f"kernel {span.index} runs where {position % n} is next")
            return
    if len(ran) != n * len(timeline.boundaries):
        when = ran[-1].end_ns if ran else 0
        yield Violation("order", when, f"{len(ran)} kernels in {len(timeline.boundaries)} iterations of {n}")
    elif timeline.spans[-1].start_ns > ran[-1].end_ns or compute[-1] != ran[-1]:
        yield Violation("order", timeline.spans[-1].start_ns, "something starts after the last iteration")


def duration(
    timeline: Timeline, program: Program, link: Link, waits: Mapping[int, int], machine: Machine
) -> Iterator[Violation]:
    """Rule ``duration``; the timeline is in order and without overlap. ``waits``: kernel -> ns that come with it."""
    for span in timeline.spans:
        if span.stream == "compute":
            kernel = program.kernels[span.index]
            lasts = kernel.duration_ns + (waits.get(span.index, 0) if span.kind == "kernel" else 0)
            right = link.beside_copies(span.start_ns, lasts, _taken(kernel, machine))
        else:
            right = link.end(span)
        if span.end_ns != right:
            lasts, wanted = span.end_ns - span.start_ns, right - span.start_ns
            yield Violation("duration", span.start_ns, f"{span.kind} {span.index} lasts {lasts} ns, not {wanted}")


def _taken(kernel: Kernel, machine: Machine) -> int:
    """What a copy takes from the kernel's speed, of LONE (k)."""
    if not kernel.duration_ns:
        return 0
    could = kernel.duration_ns * machine.memory_bytes_per_s  # 10^-9 bytes
    busy = Fraction(min(kernel.bytes * 10**9, could), could)
    return int(int(machine.copy_contention * LONE) * busy)


def beside_each_other(machine: Machine) -> dict[str, int]:
    """By stream, what a copy beside one in the other direction gets done in a nanosecond, of LONE (g)."""
    figures = {
        "d2h": (machine.d2h_bytes_per_s, machine.duplex_d2h_bytes_per_s),
        "h2d": (machine.h2d_bytes_per_s, machine.duplex_h2d_bytes_per_s),
    }
    return {
        stream: LONE if machine.copy_engines == 1 or not beside else min(LONE, max(1, beside * LONE // alone))
        for stream, (alone, beside) in figures.items()
    }


class Link:
    """How fast the recorded copies are: LONE a ns alone, less beside one in the other direction (g)."""

    def __init__(self, timeline: Timeline, program: Program, machine: Machine):
        self.size = [t.nbytes for t in program.tensors]
        self.latency = machine.copy_latency_ns
        self.rates = {"d2h": machine.d2h_bytes_per_s, "h2d": machine.h2d_bytes_per_s}
        self.shared = beside_each_other(machine)
        finish = max(s.end_ns for s in timeline.spans if s.stream == "compute")
        # What is under way when the simulation ends is reckoned as if it went on for ever beside the other direction.
        self.busy: dict[str, list[tuple[float, float]]] = {
            stream: [
                (s.start_ns, s.end_ns if s.end_ns <= finish else inf) for s in timeline.spans if s.stream == stream
            ]
            for stream in self.rates
        }

    def _stretches(self, span: Span) -> Iterator[tuple[int, float, int, int]]:
        """(from, to, speed, work left at its begin) as long as the other direction stays busy, or idle."""
        whole, rest = divmod(self.size[span.index] * 10**9, self.rates[span.stream])
        left = (self.latency + whole + (rest > 0)) * LONE
        others = self.busy["h2d" if span.stream == "d2h" else "d2h"]
        changes = sorted({t for other in others for t in other if span.start_ns < t < inf})
        for now, then in pairwise([span.start_ns, *changes, inf]):
            speed = self.shared[span.stream] if any(a <= now < b for a, b in others) else LONE
            yield int(now), then, speed, left
            if then < inf:
                left -= int(then - now) * speed

    def beside_copies(self, start: int, lasts: int, taken: int) -> int:
        """When a step ends that takes so long alone, and from which each copy under way takes so much of LONE (k)."""
        copies = [copy for stream in self.busy.values() for copy in stream] if taken else []
        changes = sorted({int(t) for copy in copies for t in copy if start < t < inf})
        now, left = start, lasts * LONE
        for then in [*changes, inf]:
            speed = LONE - taken * sum(begin <= now < end for begin, end in copies)
            if now + -(-left // speed) <= then:
                break
            now, left = int(then), left - (int(then) - now) * speed
        return now + -(-left // speed)

    def end(self, span: Span) -> int:
        """The first whole ns at which it is done."""
        return next(
            now + -(-left // speed)
            for now, then, speed, left in self._stretches(span)
            if now + -(-left // speed) <= then
        )

    def left(self, span: Span, time_ns: int) -> int:
        """The work that is left of it at this time, at which it is under way."""
        return next(
            left - (time_ns - now) * speed for now, then, speed, left in self._stretches(span) if time_ns <= then
        )
