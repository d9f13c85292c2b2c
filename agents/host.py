"""Checks whether host memory makes a limit infeasible, because planners report only the GPU's limit."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from agents.planner import Infeasible, small
from simulator.compiled.encoding import rows_of
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.plan_transfer import IdentityKey
from simulator.program import Program

QUICK = ("tensile", "autoswap_swdoa")
ENDLESS = 2**50


def host_needed(program: Program, machine: Machine, limit: int, mode: str = "joint") -> int | None:
    """Returns the host memory (bytes) that a quick planner's plan needs, if the machine has less.

    Returns None if the machine's host memory is sufficient or if the quick planners find no plan.
    """
    could_leave = {gap.tensor for gap in program.gaps()}
    if sum(program.tensors[t].nbytes for t in could_leave) <= machine.host_bytes:
        return None
    least = _needed(IdentityKey(program), IdentityKey(machine), limit, mode)
    return least if least > machine.host_bytes else None


@lru_cache(16)
def _needed(program: IdentityKey, machine: IdentityKey, limit: int, mode: str) -> int:
    """Returns the smallest host memory (bytes) used by the plans of QUICK; 0 if none of them finds a plan."""
    import agents

    roomy, found = replace(machine.value, host_bytes=ENDLESS), []
    for name in QUICK:
        chosen = {"mode": mode, "min_bytes": small(program.value)}
        planner = agents.make(name, **{key: chosen[key] for key in chosen.keys() & set(agents.options(name))})
        try:
            plan = planner.plan(program.value, roomy, limit)
        except Infeasible:
            continue
        found.append(Engine(program.value, roomy, limit).on_host(rows_of(plan.decisions)))
    return min(found, default=0)
