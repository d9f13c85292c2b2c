"""A limit on the time of a block of code, and planners that keep within their ``seconds`` at every size of program."""

from __future__ import annotations

import copy
import functools
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

AGAIN = 3.0  # seconds after which it is raised once more, should something have caught it
LARGE = 5_000  # kernels: what comes before the search of a smaller program takes no time to speak of
PART, SLACK = 0.95, 0.5  # of the seconds that are left, what a search takes for itself; seconds until it is broken off


class TimeUp(BaseException):
    """The time of a block is over. No ``except Exception`` catches it."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises TimeUp in the block when the time is over, or that of a block around it.

    A call of a library that does not come back to Python is not broken off, nor is an import; TimeUp then comes after
    it. Outside the main thread, where Python hears no signals, nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(_: int, frame: FrameType | None) -> None:
        while frame:
            name = frame.f_code.co_filename
            if frame.f_code.co_name == "__del__" or name == weakref.__file__ or name.startswith("<frozen importlib"):
                # Python swallows what is raised there; what is half imported cannot be imported any more.
                signal.setitimer(signal.ITIMER_REAL, 0.01, AGAIN)
                return
            frame = frame.f_back
        raise TimeUp

    begin, outer = time.monotonic(), signal.getitimer(signal.ITIMER_REAL)[0]
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(min(seconds, outer or seconds), 1e-3), AGAIN)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if outer:
            signal.setitimer(signal.ITIMER_REAL, max(outer - (time.monotonic() - begin), 1e-3), AGAIN)


Search = Callable[[Any, Program, Machine, int], Plan]


def in_time(plan: Search) -> Search:
    """Decorator of the ``plan`` of a planner with ``seconds``: of a large program it first makes a quick plan, which is
    returned where the search has none in the time that is left."""

    @functools.wraps(plan)
    def run(self: Any, program: Program, machine: Machine, limit: int) -> Plan:
        if self.seconds is None or len(program.kernels) < LARGE:
            return plan(self, program, machine, limit)
        from agents.heuristics.quick import quick

        until, search = time.monotonic() + self.seconds, copy.copy(self)
        first, calls = quick(self, program, machine, limit)
        left = until - time.monotonic()
        if first is not None and left <= 0:
            self.simulator_calls = calls
            return first
        search.seconds = max(PART * left, 1e-2)
        try:
            with within(max(left, 0) + SLACK):
                return plan(search, program, machine, limit)
        except TimeUp:
            if first is None:
                from agents.planner import Infeasible

                raise Infeasible(f"{self.name}: found no plan of {program.name!r} within {self.seconds} s") from None
            return first
        finally:
            self.__dict__ |= search.__dict__ | {"seconds": self.seconds}
            self.simulator_calls += calls

    return run
