"""Time budgets for searches on programs of any size: a quick plan is made first."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from agents.heuristics.autoswap import AutoSwap
from agents.heuristics.memonger import Memonger
from agents.planner import Infeasible, Planner
from agents.search.thinning import thinned
from simulator.compiled.encoding import decisions_of
from simulator.compiled.engine import Engine
from simulator.deadline import TimeUp, within
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

LARGE = 5_000  # kernels: setup of the search is negligible for smaller programs
SLACK = 0.5  # seconds by which a search may exceed its budget before it is interrupted

Search = Callable[[Any, Program, Machine, int], Plan]


def budgeted(plan: Search) -> Search:
    """Decorates ``plan`` of a planner with ``seconds`` so that it returns within its time budget.

    For programs of ``LARGE`` kernels or more it makes a quick plan first, and returns it if the search finds none in
    the remaining time.
    """

    @functools.wraps(plan)
    def run(self: Any, program: Program, machine: Machine, limit: int) -> Plan:
        if self.seconds is None or len(program.kernels) < LARGE:
            return plan(self, program, machine, limit)
        deadline = time.monotonic() + self.seconds
        search = copy.copy(self)
        fallback, calls = quick_plan(self, program, machine, limit)
        remaining = deadline - time.monotonic()
        if fallback is not None and remaining <= 0:
            self.simulator_calls = calls
            return fallback
        search.seconds = max(0.95 * remaining, 1e-2)  # it may look at the clock a little late
        try:
            with within(max(remaining, 0) + SLACK):
                return plan(search, program, machine, limit)
        except (TimeUp, Infeasible) as error:
            if fallback is None and isinstance(error, Infeasible):
                raise
            if fallback is None:
                raise Infeasible(
                    f"{self.name}: found no plan of {program.name!r} within {self.seconds} s; allow more seconds"
                ) from None
            return fallback
        finally:
            self.__dict__ |= search.__dict__ | {"seconds": self.seconds}
            self.simulator_calls += calls

    return run


def quick_plan(planner: Any, program: Program, machine: Machine, limit: int) -> tuple[Plan | None, int]:
    """Makes a quick plan, under the name and mode of ``planner``, with heuristics of near-linear run time.

    Returns:
        The plan (None if the heuristics find none) and the simulator calls.
    """
    if getattr(planner, "first", None) is not None:  # an existing plan
        return Plan.of(program, decisions_of(planner.first), planner.name, limit, machine.name), 0
    mode = planner.mode if hasattr(planner, "mode") else planner.facts.moves
    engine = Engine(program, machine, limit)
    rows, _ = thinned(engine, mode, planner.min_bytes, time.monotonic())
    calls = engine.calls
    if rows is not None:
        return Plan.of(program, decisions_of(rows), planner.name, limit, machine.name), calls
    heuristics: list[Planner] = [AutoSwap("doa", min_bytes=planner.min_bytes)] if mode != "recompute" else []
    heuristics += [Memonger(min_bytes=planner.min_bytes)] if mode != "swap" else []
    for heuristic in heuristics:
        try:
            plan = heuristic.plan(program, machine, limit)
        except Infeasible:
            calls += heuristic.simulator_calls
            continue
        return replace(plan, planner=planner.name), calls + heuristic.simulator_calls
    return None, calls
