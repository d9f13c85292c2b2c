"""Streams of the fake device: work queues, and vector clocks for the order that events impose."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence

HOST = "the host"
Clock = dict[str, int]
Span = tuple[int, int]  # half-open range of byte addresses


class Queue:
    """A stream whose work runs in order, when something waits for it or at random moments."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue = deque[Callable[[], object]]()
        self.issued = self.done = 0

    def put(self, work: Callable[[], object]) -> None:
        self.queue.append(work)
        self.issued += 1

    def step(self) -> None:
        self.done += 1
        self.queue.popleft()()

    def run(self, upto: int) -> None:
        while self.done < upto:
            self.step()


def by_chance(chance: random.Random | None, streams: Sequence[Queue]) -> None:
    """Runs some of the queued work at random, or none if ``chance`` is None."""
    while chance and chance.random() < 0.5:
        if not (busy := [stream for stream in streams if stream.queue]):
            return
        chance.choice(busy).step()


class Clocks:
    """Vector clocks: for each stream, how much work of every other stream precedes its next work.

    The host counts as a stream: its past work precedes everything that it issues later.
    """

    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = {HOST: {HOST: 0}}
        self.uses: dict[str, list[tuple[int, Span, bool, str]]] = {}  # stream -> (time, span, is a write, name)

    def of(self, stream: str) -> Clock:
        """Returns the clock of the stream's next work, issued by the host now."""
        clock = self.clocks.setdefault(stream, {stream: 0})
        return self.join(clock, self.clocks[HOST])

    @staticmethod
    def join(clock: Clock, other: Clock) -> Clock:
        for stream, time in other.items():
            if time > clock.get(stream, 0):
                clock[stream] = time
        return clock

    def use(self, stream: str, name: str, reads: Iterable[Span], writes: Iterable[Span], after: Clock) -> str | None:
        """Records memory use by work on the stream, also ordered after ``after``; returns a description of any race."""
        clock = self.of(stream)
        clock[stream] += 1
        ordered = self.join(dict(clock), after) if after else clock
        for memory, write in [(m, False) for m in reads] + [(m, True) for m in writes]:
            for other_stream, uses in self.uses.items():
                if other_stream == stream:
                    continue
                upto = ordered.get(other_stream, 0)
                for time, other, wrote, other_name in reversed(uses):
                    if time <= upto:
                        break
                    if (write or wrote) and memory[0] < other[1] and other[0] < memory[1]:
                        return f"{name} and {other_name} use the same memory, and neither waits for the other"
            self.uses.setdefault(stream, []).append((ordered[stream], memory, write, name))
        return None
