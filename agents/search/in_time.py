"""Searches that keep within their ``seconds`` at every size of program: a quick plan is made first."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from agents.deadline import TimeUp, within
from agents.heuristics.autoswap import AutoSwap
from agents.heuristics.memonger import Memonger
from agents.planner import Infeasible, Planner
from simulator.compiled.encoding import decisions_of
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

LARGE = 5_000  # kernels: what comes before the search of a smaller program takes no time to speak of
PART, SLACK = 0.95, 0.5  # of the seconds that are left, what a search takes for itself; seconds until it is broken off

Search = Callable[[Any, Program, Machine, int], Plan]


def in_time(plan: Search) -> Search:
    """Decorator of the ``plan`` of a planner with ``seconds``: of a program of ``LARGE`` kernels or more it makes
    a quick plan first, which is returned where the search has none in the time that is left."""

    @functools.wraps(plan)
    def run(self: Any, program: Program, machine: Machine, limit: int) -> Plan:
        if self.seconds is None or len(program.kernels) < LARGE:
            return plan(self, program, machine, limit)
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
        except (TimeUp, Infeasible) as error:
            if first is None and isinstance(error, Infeasible):
                raise
            if first is None:
                raise Infeasible(f"{self.name}: found no plan of {program.name!r} within {self.seconds} s") from None
            return first
        finally:
            self.__dict__ |= search.__dict__ | {"seconds": self.seconds}
            self.simulator_calls += calls

    return run


def quick(planner: Any, program: Program, machine: Machine, limit: int) -> tuple[Plan | None, int]:
    """A plan in the mode of ``planner``, and in its name, by heuristics whose time grows with the program only; None:
    these have none. And the simulator calls it took."""
    calls, plan = 0, None
    if getattr(planner, "first", None) is not None:  # a plan that is there
        return Plan.of(program, decisions_of(planner.first), planner.name, limit, machine.name), 0
    mode = planner.mode if hasattr(planner, "mode") else planner.facts.moves
    heuristics: list[Planner] = [AutoSwap("doa", min_bytes=planner.min_bytes)] if mode != "recompute" else []
    heuristics += [Memonger(min_bytes=planner.min_bytes)] if mode != "swap" else []
    for heuristic in heuristics:
        try:
            plan = replace(heuristic.plan(program, machine, limit), planner=planner.name)
        except Infeasible:
            pass
        calls += heuristic.simulator_calls
        if plan is not None:
            break
    return plan, calls
