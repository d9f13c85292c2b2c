"""The first plan of a large program: by heuristics whose time grows with the program, and not with its square."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from agents.heuristics.autoswap import AutoSwap
from agents.heuristics.memonger import Memonger
from agents.planner import Infeasible, Planner
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program


def quick(planner: Any, program: Program, machine: Machine, limit: int) -> tuple[Plan | None, int]:
    """A plan in the mode of ``planner``, and in its name; None: these have none. And the simulator calls it took."""
    calls, plan = 0, None
    mode = planner.mode if hasattr(planner, "mode") else planner.facts.moves
    for heuristic in _heuristics(mode, planner.min_bytes):
        try:
            plan = replace(heuristic.plan(program, machine, limit), planner=planner.name)
        except Infeasible:
            pass
        calls += heuristic.simulator_calls
        if plan is not None:
            break
    return plan, calls


def _heuristics(mode: str, min_bytes: int) -> Iterator[Planner]:
    if mode != "recompute":
        yield AutoSwap("doa", min_bytes)
    if mode != "swap":
        yield Memonger(min_bytes=min_bytes)
